"""The memory that checkpointing takes beside training: a thread that looks now and then.

Counted: private memory of this process and its descendants (``RssAnon``), and shared memory of
theirs that is no file of the checkpoint's own (staging areas). The files themselves are counted
apart, as media. What lasts less than a look, and what the kernel holds for it, is not seen. Looking
takes time of its own, so it is not done beside steps that count.
"""

import ctypes
import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil

LOOK_SECONDS = 0.02


def files_bytes(folder: Path) -> int:
    """Return the bytes that the files below *folder* occupy; some may be going just now."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * os.lstat(os.path.join(place, name)).st_blocks
    return total


def resident(pid: int) -> tuple[int, int]:
    """Return (private, shared) bytes of process *pid*; zeros if it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Rss"))
    if not fields:  # a zombie
        return 0, 0
    return tuple(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def settle() -> None:
    """Give back what nobody uses, so that it does not hide what is used next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Watch:
    """Looks at the memory of this process and its children until told to stop.

    Args:
        folder: the checkpoint's own; its files are media.
        mapped: the strategy maps those files, so they show as its shared memory too.
    """

    def __init__(self, folder: Path, *, mapped: bool) -> None:
        self._folder, self._mapped = folder, mapped
        self._me = psutil.Process()
        self._stop = threading.Event()
        self.media_bytes = 0
        self._peak = self._look()[0]
        self._base = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def _look(self) -> tuple[int, int]:
        media = files_bytes(self._folder)
        pids = [self._me.pid, *(child.pid for child in self._me.children(recursive=True))]
        private, shared = zip(*(resident(pid) for pid in pids), strict=True)
        staged = max(shared) - (media if self._mapped else 0)
        return sum(private) + max(0, staged), media

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                used, media = self._look()
                self._peak = max(self._peak, used)
                self.media_bytes = max(self.media_bytes, media)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def plain_ends(self) -> None:
        """Note that all seen until now was training's own."""
        self._base, self._peak = self._peak, 0

    def stop(self) -> int:
        """Stop looking; returns by how much the most since then exceeded the most before."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return max(0, self._peak - self._base)
