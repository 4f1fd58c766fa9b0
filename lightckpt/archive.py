"""Archive: versions on slow storage, since memory that survives a process dies with the host.

An archive is a store that holds one version, so that everything reads it. Compressed it is a
``container``, which ``expand`` and ``open_any`` turn into a store again.
"""

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from ._core import Store, Version
from .container import ContainerReader, is_container
from .copies import ContainerSource, StoreSource, write_container, write_store
from .errors import CheckpointError, CheckpointWarning, NotFoundError, WaitTimeoutError
from .reader import Progress, identity, must_pin, open_reader, steps_of

SUFFIX, SUFFIX_LZ4 = ".lckpt", ".lckpt.lz4"
CLOSE_SECONDS = 600.0  # that closing may wait for an archive
GRACE_SECONDS = 10.0  # for it to end when it was told to

Place = str | os.PathLike[str]


def archive(
    source: Store | Place,
    dest: Place,
    *,
    step: int | None = None,
    compress: Literal["lz4"] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Copy a version of *source* into a file of its own, and return where that is.

    Args:
        source: a path, or an open store; of that one, on the thread that begins its versions.
        dest: the file to make, or a folder: then ``step-<k>.lckpt`` in it.
        step: which; None takes the newest.
        compress: "lz4" makes a compressed container, for keeping only: a store needs ``expand``.
        replace: replace *dest* if it is there; it is refused otherwise.

    Raises:
        NotFoundError: there is no such version.
        CorruptError: its data differ from their checksums; nothing was made.
        NoSpaceError, BusyError, AccessError, FileExistsError: about *dest*.
    """
    if compress not in (None, "lz4"):
        raise ValueError(f"compress={compress!r} must be None or 'lz4'")
    if not isinstance(source, Store):
        with open_any(source) as path, open_reader(path) as store:
            return archive(
                store, dest, step=step, compress=compress, replace=replace, progress=progress
            )
    version = must_pin(source, "the store", step)
    try:
        target = _named(Path(dest), version.step, SUFFIX_LZ4 if compress else SUFFIX)
        copy = write_container if compress else write_store
        copy(StoreSource(source, version), target, replace=replace, progress=progress)
        return target
    finally:
        if version.pinned != 1:  # pinned by this handle before: then it stays so
            with suppress(NotFoundError):
                source.pin(version.version, pinned=False)


def expand(
    source: Place, dest: Place, *, replace: bool = False, progress: Progress | None = None
) -> Path:
    """Make a store of a compressed archive, and return where that is.

    Raises:
        FormatError: *source* is no compressed archive, or its index is damaged.
        CorruptError: its data are; the message names the tensors, and nothing was made.
        NoSpaceError, BusyError, AccessError, FileExistsError: about *dest*.
    """
    with ContainerReader(source) as reader:
        target = _named(Path(dest), reader.step, SUFFIX)
        write_store(ContainerSource(reader), target, replace=replace, progress=progress)
        return target


@contextmanager
def open_any(path: Place, progress: Progress | None = None) -> Iterator[Path]:
    """Give a path that can be opened as a store: *path*, or a compressed archive expanded.

    The expanded file lies where temporary files do, and is removed at the end of the block; what
    has been mapped by then stays readable.
    """
    if not is_container(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="lightckpt-") as folder:
        yield expand(path, folder, progress=progress)


def _named(dest: Path, step: int, suffix: str) -> Path:
    return dest / f"step-{step}{suffix}" if dest.is_dir() else dest


class Archiver:
    """Copies every so-manyeth version of a live run to a folder, in the background, one at a time.

    The version is pinned meanwhile, so the store may need room for one more. If the copy before is
    still under way when one is due, that one is left out and counted. What fails is told at the
    next ``look`` as a warning, or by ``close`` as an error.

    Threads: ``look`` and ``close`` on the one that begins versions; a second thread copies.

    Attributes:
        archived: the steps that were archived, oldest first.
        skipped: how often one was due while the one before was still being copied.

    Raises:
        ValueError: *every* is no number of versions.
        OSError: the folder cannot be made.
    """

    def __init__(self, store: Store, folder: Path, every: int) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"archive_every={every!r} must be a number of at least 1")
        folder.mkdir(parents=True, exist_ok=True)
        self._store, self._folder, self._every = store, folder, every
        self.archived: list[int] = []
        self.skipped = 0
        self._seen = 0
        self._due: int | None = None  # the step to archive next
        self._version: Version | None = None  # the one that is pinned and copied
        self._last: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._left = threading.Event()  # the copy needs the store no more

    @property
    def busy(self) -> bool:
        """Is a version being copied?"""
        return self._thread is not None and self._thread.is_alive()

    def look(self, step: int) -> None:
        """Note that the version of *step* was started; archive the one that was due before it.

        By now that one is durable, or was given up: then the newest is taken.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._let_go()
        if (error := self._take_error()) is not None:
            warnings.warn(f"an archive failed: {error}", CheckpointWarning, stacklevel=3)
        if self._due is not None and self.busy:
            self.skipped += 1
            self._due = None
        elif self._due is not None and self._pin():
            name = f"lightckpt-archive-{self._folder.name}"
            self._thread = threading.Thread(target=self._copy, args=(None,), name=name)
            self._thread.start()
        self._seen += 1
        if self._seen % self._every == 0:
            self._due = step

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Archive what is due, and end the thread. Twice is harmless.

        Raises:
            WaitTimeoutError: an archive was given up, since it took longer than *timeout* seconds.
            CheckpointError, OSError: one failed.
        """
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self._stop.set()
                # A copy of one group away. The store may not be closed before.
                self._left.wait()
                self._thread.join(GRACE_SECONDS)
            self._let_go()
        if self._due is not None and not self._stop.is_set() and self._pin():
            self._copy(deadline)
            self._let_go()
        self._due = None
        if (error := self._take_error()) is not None:
            raise error

    def _pin(self) -> bool:
        """Pin the version that is due; False if it is archived already, or cannot be pinned."""
        due, self._due = self._due, None
        try:
            if due not in steps_of(self._store):
                due = None
            version = must_pin(self._store, "the store", due)
        except NotFoundError:
            return False  # none was ever committed
        except CheckpointError as error:
            self._error = error
            return False
        self._version = version
        if identity(version) == self._last:
            self._unpin()
            return False
        self._last = identity(version)
        self._left.clear()
        return True

    def _unpin(self) -> None:
        version, self._version = self._version, None
        # One that was pinned by this handle before stays so.
        if version is not None and version.pinned != 1:
            with suppress(NotFoundError):
                self._store.pin(version.version, pinned=False)

    def _let_go(self) -> None:
        self._thread = None
        self._unpin()

    def _take_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error

    def _copy(self, deadline: float | None) -> None:
        """Copy the pinned version; what goes wrong is kept."""
        assert self._version is not None

        def keep_on(done: int, total: int) -> None:
            if self._stop.is_set() or (deadline is not None and time.monotonic() > deadline):
                raise WaitTimeoutError(
                    f"the archive of step {source.step} was given up at {done} of {total} bytes"
                )

        try:
            source = _Watched(self._store, self._version, self._left)
            path = self._folder / f"step-{source.step}{SUFFIX}"
            write_store(source, path, replace=True, progress=keep_on, workers=1)
            self.archived.append(source.step)
        except (CheckpointError, OSError) as error:
            self._error = error
        finally:
            self._left.set()


class _Watched(StoreSource):
    """A source that says when it has been left."""

    def __init__(self, store: Store, version: Version, left: threading.Event) -> None:
        super().__init__(store, version)
        self._left = left

    def confirm(self) -> None:
        super().confirm()
        self._left.set()
