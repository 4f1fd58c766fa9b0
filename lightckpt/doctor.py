"""Doctor: what a path really is, what survives there, and how fast it is. No torch.

Facts come from the core: a small store is made in the same folder, used, and removed. A store that
is there already is looked at, never touched. What would be different on better media is said.
"""

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from ._core import (
    Granularity,
    Info,
    Media,
    Op,
    Snapshot,
    Store,
    calibrate,
    make_sizes,
    make_spans,
)
from .errors import CheckpointError, NotFoundError
from .reader import open_reader

PROBE_BYTES = 64 << 20  # of the state that is written to measure; two versions of it lie in a store
PROBE_BYTES_MIN = 1 << 20
FREE_SHARE = 8  # at most one part in so many of the free space is taken for it
STAGING_BYTES = 4 << 20  # enough to try
WAYS = tuple(way.name.lower() for way in Snapshot)
WARM_VERSIONS, MEASURED_VERSIONS = 2, 3
# What PMDK adds: the Debian package that has it, and what is not there without it.
LIBRARIES = {
    "libpmem2.so.1": ("libpmem2-1", "bad blocks and unsafe shutdowns go unseen"),
    "libpmemobj.so.1": ("libpmemobj1", "no catalog='pmemobj', and pypmemobj opens no pools"),
    "pmempool": ("pmdk-tools", "such pools cannot be checked from a shell"),
}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

_DURABLE = "yes"
_SURVIVES: dict[str, dict[str, str]] = {
    "memory": {
        "process kill": _DURABLE,
        "OS crash": "no: the memory is given back at boot",
        "power cut": "no",
    },
    "file": {
        "process kill": _DURABLE,
        "OS crash": _DURABLE,
        "power cut": "yes, if the disk honours a flush",
    },
    "pmem": {"process kill": _DURABLE, "OS crash": _DURABLE, "power cut": _DURABLE},
    "emulated": {
        "process kill": _DURABLE,
        "OS crash": "no: the flush instructions end in the page cache",
        "power cut": "no",
    },
}


@dataclass(frozen=True)
class Speed:
    """Measured here and now, with versions of ``state_bytes``; bytes per second, nanoseconds.

    ``copy`` is a plain copy into warm memory: what a checkpoint costs at least.
    """

    state_bytes: int
    copy_bytes_per_s: float
    persist_bytes_per_s: float
    commit_ns: int


@dataclass(frozen=True)
class Diagnosis:
    """What a path is. ``speed`` is None where nothing could be measured; ``advice`` says why.

    ``snapshots``: for each way out of a GPU, whether it is open to a store there, and why not.
    """

    path: str
    is_store: bool
    kind: str
    filesystem: str
    mount_options: str
    media: str
    granularity: str
    emulated: bool
    flush_method: str
    survives: dict[str, str]
    total_bytes: int
    free_bytes: int
    speed: Speed | None
    cores: int
    workers: int
    huge_pages: dict[str, str]
    libraries: dict[str, bool]
    snapshots: dict[str, str]
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON's own types."""
        return {**asdict(self), "advice": list(self.advice)}

    def rows(self) -> dict[str, str]:
        """Return the diagnosis in words, without the advice, by what each is about."""
        emulated = " (emulated)" if self.emulated else ""
        there = "a store" if self.is_store else "no store yet"
        rows = {
            "what it is": f"{self.kind}{emulated}, {there}",
            "file system": f"{self.filesystem} ({self.mount_options})",
            "granularity": f"{self.granularity}; flush by {self.flush_method}",
            **{f"survives: {what}": answer for what, answer in self.survives.items()},
            "free": f"{decimal(self.free_bytes)} of {decimal(self.total_bytes)}",
            "workers": f"{self.workers} of {self.cores} cores",
            "huge pages": ", ".join(f"{name}: {value}" for name, value in self.huge_pages.items()),
            **{name: "found" if has else "not found" for name, has in self.libraries.items()},
            **_answers(self.snapshots),
        }
        if self.speed is not None:
            rows |= {
                "persists": f"{decimal(int(self.speed.persist_bytes_per_s))}/s, "
                f"versions of {decimal(self.speed.state_bytes)}",
                "plain copy": f"{decimal(int(self.speed.copy_bytes_per_s))}/s",
                "commit": f"{self.speed.commit_ns / 1000:.0f} us",
            }
        return rows


def _answers(snapshots: dict[str, str]) -> dict[str, str]:
    """Return a row for each way, or one where all have the same answer."""
    if len(set(snapshots.values())) == 1:
        return {"snapshots of a GPU": next(iter(snapshots.values()))}
    return {f"snapshot={way}": answer for way, answer in snapshots.items()}


def diagnose(path: str | os.PathLike[str], *, measure: bool = True) -> Diagnosis:
    """Find out what *path* is: a store, a file to be, a folder, or a device DAX node.

    Raises:
        NotFoundError: neither it nor its folder exists.
        CheckpointError: it is there, and is no store.
    """
    place = Path(path)
    folder = place if place.is_dir() else place.absolute().parent
    if not folder.is_dir():
        raise NotFoundError(f"the folder of {place} does not exist")
    device = place.is_char_device()
    volume = os.statvfs(folder)
    free_bytes = volume.f_bavail * volume.f_frsize
    info: Info | None = None
    if place.exists() and not place.is_dir():
        with open_reader(place, workers=1) as store:
            info = store.info()
    speed: Speed | None = None
    snapshots = dict.fromkeys(WAYS, "not tried: there is no room for a store beside this one")
    advice: list[str] = []
    if info is None or not device:
        size = min(PROBE_BYTES, free_bytes // FREE_SHARE) if measure else 0
        try:
            with _probe(folder) as probe:
                info = info or probe.info()
                snapshots = _snapshots(probe)
                if size >= PROBE_BYTES_MIN:
                    speed = _measure(probe, size)
        except (CheckpointError, OSError) as error:
            if info is None:
                raise
            if measure:
                advice.append(f"nothing was measured: {error}")
        else:
            if speed is None and measure:
                advice.append(f"nothing was measured: only {free_bytes:,} bytes are free")
    elif device:
        advice.append("nothing was measured: a device has no room beside the store")
    filesystem, options = ("devdax", "") if device else _mount_of(folder)
    libraries = {name: _loads(name) for name in LIBRARIES}
    advice += _advice(info, filesystem, options, libraries)
    return Diagnosis(
        path=str(place),
        is_store=place.exists() and not place.is_dir(),
        kind=_kind(info, device=device),
        filesystem=filesystem,
        mount_options=options,
        media=info.media.name.lower(),
        granularity=info.granularity.name.lower(),
        emulated=info.emulated,
        flush_method=info.flush_method,
        survives=dict(_SURVIVES[_durability(info)]),
        total_bytes=volume.f_blocks * volume.f_frsize,
        free_bytes=free_bytes,
        speed=speed,
        cores=len(os.sched_getaffinity(0)),
        workers=min(8, len(os.sched_getaffinity(0))),
        huge_pages=_huge_pages(),
        libraries=libraries,
        snapshots=snapshots,
        advice=tuple(advice),
    )


@contextmanager
def _probe(folder: Path) -> Iterator[Store]:
    """Give a store of its own in *folder*; nothing of it stays."""
    path = folder / f".lightckpt-doctor-{secrets.token_hex(6)}"
    try:
        with Store(path, create=True, staging_bytes=STAGING_BYTES) as store:
            yield store
    finally:
        for name in (path, path.with_name(path.name + ".lock")):
            name.unlink(missing_ok=True)


def _snapshots(store: Store) -> dict[str, str]:
    """Try the ways out of this machine's first GPU, to a store of this kind."""
    try:
        gpu = store.open_device(0)
    except CheckpointError as error:
        return dict.fromkeys(WAYS, f"no: {error}")
    words = {
        "direct": "yes; it pins the pages of the store" if gpu.direct else f"no: {gpu.why_not}",
        "host": "yes, through pinned staging",
        "device": "yes, where the GPU has room for the state once more",
    }
    return {way: f"{words[way]} ({gpu.name})" for way in WAYS}


def _measure(store: Store, size: int) -> Speed:
    """Persist versions of *size* bytes; the best of those after the first touch of each page."""
    memory = np.ones(size, dtype=np.uint8)
    spans = make_spans([(int(memory.ctypes.data), 0)])
    sizes = make_sizes([size])
    times = []
    commits = []
    for step in range(WARM_VERSIONS + MEASURED_VERSIONS):
        store.begin(step=step, keep=1, extents=sizes, blob=b"", host_bytes=0)
        copied = store.wait(store.submit(Op.WRITE, spans))
        durable = store.wait(store.commit(b""))
        if step >= WARM_VERSIONS:
            times.append(durable.end_ns - copied.submit_ns)
            commits.append(durable.end_ns - durable.start_ns)
    return Speed(
        state_bytes=size,
        copy_bytes_per_s=size / (calibrate(size) / 1e9),
        persist_bytes_per_s=size / (min(times) / 1e9),
        commit_ns=min(commits),
    )


def _durability(info: Info) -> str:
    if info.emulated:
        return "emulated"
    if info.granularity in (Granularity.BYTE, Granularity.CACHE_LINE):
        return "pmem"
    return "file" if info.granularity is Granularity.PAGE else "memory"


def _kind(info: Info, *, device: bool) -> str:
    if device:
        return "device DAX"
    return {
        "pmem": "fsdax with MAP_SYNC",
        "file": "plain file",
        "memory": "tmpfs",
        "emulated": "emulated persistent memory",
    }[_durability(info)]


def _mount_of(folder: Path) -> tuple[str, str]:
    """Return the type and the options of the file system that *folder* lies on."""
    resolved = folder.resolve()
    found = ("unknown", "")
    longest = -1
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        front, _, back = line.partition(" - ")
        point = front.split()[4].encode().decode("unicode_escape")
        kind, _, super_options = back.split(" ", 2)
        # Later lines are mounted over earlier ones.
        if resolved.is_relative_to(point) and len(point) >= longest:
            found, longest = (kind, super_options), len(point)
    return found


def _loads(library: str) -> bool:
    """Is the library, or program, installed?"""
    if ".so" not in library:
        return shutil.which(library) is not None
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _huge_pages() -> dict[str, str]:
    """Return the kernel's policies for huge pages: the choice that is in brackets."""
    policies = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            words = (_HUGE_PAGES / name).read_text(encoding="utf-8").split()
        except OSError:
            words = []
        policies[name] = next((w.strip("[]") for w in words if w.startswith("[")), "unknown")
    return policies


def _advice(info: Info, filesystem: str, options: str, libraries: dict[str, bool]) -> Iterator[str]:
    durability = _durability(info)
    if durability == "memory":
        yield "it does not survive the machine: give archive= and archive_every= to a Checkpointer"
        if "huge=" not in options and _huge_pages()["shmem_enabled"] in ("never", "unknown"):
            yield "first touches of pages are slow: mount it with huge=within_size if you can"
    if durability == "file":
        yield "each version waits for the disk: a store on tmpfs with an archive costs less"
        if {"dax", "dax=always"} & set(options.split(",")):
            yield "mounted with DAX, but its device takes no MAP_SYNC, as virtio-pmem does not"
        elif filesystem in ("ext4", "xfs"):
            yield "if the disk is persistent memory, mount it with -o dax to write without msync"
    if durability == "emulated":
        yield "emulation is for trying things: what it makes durable is not"
    if durability == "pmem":
        missing = [name for name, there in libraries.items() if not there]
        if missing:
            packages = " ".join(LIBRARIES[name][0] for name in missing)
            lacks = "; ".join(f"{LIBRARIES[name][1]} ({name})" for name in missing)
            yield f"{lacks}: apt-get install {packages} (libpmem2-1 is libpmem2 on Debian 12)"
    if info.media is Media.HEAP:
        yield "a store in this process's memory survives nothing"
