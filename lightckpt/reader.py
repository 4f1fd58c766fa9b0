"""Reader: versions of a store chosen, pinned and verified, beside whoever writes to it. No torch.

A trainer may commit and retire versions while they are looked at. So choosing is: look, pin what
was seen, and look again if it was retired in between. What is pinned stays until it is unpinned or
its store is closed.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence

from ._core import Op, Store, Version, make_spans
from .errors import BusyError, FormatError, NotFoundError
from .manifest import Manifest, decode_manifest

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all; what it raises ends the work."""

GROUP_BYTES = 16 << 20  # extents are worked on in groups of about so much, or alone
PIN_TRIES = 1000


def open_reader(path: str | os.PathLike[str], *, workers: int = 0) -> Store:
    """Open a store for reading only; it may be open for writing elsewhere."""
    return Store(path, read_only=True, workers=workers)


def identity(version: Version) -> tuple[int, int]:
    """Return what tells a version from every other that its store ever held."""
    return version.generation, version.version


def steps_of(store: Store) -> list[int]:
    """Return the steps that can be loaded, newest first."""
    return [v.step for v in store.versions() if not v.damaged]


def pin_newest(
    store: Store, step: int | None = None, *, without: Collection[tuple[int, int]] = ()
) -> Version | None:
    """Pin the newest version, of *step* if that is given; None if there is none.

    A version with damaged metadata is returned as it is: it cannot be pinned, nor viewed.

    Args:
        without: identities of versions to pass over.

    Raises:
        BusyError: a writer retires versions faster than they can be pinned.
    """
    for _ in range(PIN_TRIES):
        found = next(
            (v for v in store.versions() if step in (None, v.step) and identity(v) not in without),
            None,
        )
        if found is None or found.damaged:
            return found
        try:
            store.pin(found.version)
        except (NotFoundError, BusyError):
            continue  # retired between the look and the pin
        return found
    raise BusyError(f"versions are retired faster than they are pinned: tried {PIN_TRIES} times")


def must_pin(store: Store, path: object, step: int | None = None) -> Version:
    """Pin the newest version that is not known to be damaged, of *step* if that is given.

    Raises:
        NotFoundError: there is none; the message lists the steps there are.
        FormatError: there are only versions with damaged metadata.
    """
    damaged = {identity(v) for v in store.versions() if v.damaged}
    version = pin_newest(store, step, without=damaged)
    if version is None and (version := pin_newest(store, step)) is None:
        raise missing(store, path, step)
    if version.damaged:
        store.view(version.version)  # raises, and says what is damaged
    return version


def missing(store: Store, path: object, step: int | None) -> NotFoundError:
    """Return the error for a version that is not there."""
    if step is None:
        return NotFoundError(f"{path} holds no version yet")
    return NotFoundError(f"{path} holds no version of step {step}, only of {steps_of(store)}")


def read_manifest(store: Store, version: Version) -> Manifest:
    """Return the manifest of a version.

    Raises:
        FormatError: it is damaged.
    """
    manifest = decode_manifest(store.view(version.version)[0])
    if len(manifest.extents) != version.extent_count:
        raise FormatError(
            f"the manifest of step {version.step} names {len(manifest.extents)} extents; "
            f"its version has {version.extent_count}"
        )
    return manifest


def check_extents(store: Store, version: int, manifest: Manifest) -> None:
    """Raise FormatError unless the extents of *version* are those that its manifest names."""
    for extent, size in enumerate(manifest.extents):
        try:
            stored = len(store.locate(version, extent))
        except ValueError as error:
            raise FormatError(f"the manifest names more extents than there are: {error}") from error
        if stored != size:
            raise FormatError(f"extent {extent} has {stored} bytes; the manifest says {size}")


def names_in(manifest: Manifest, extents: Collection[int]) -> list[str]:
    """Name the tensors that lie in *extents*, in the manifest's order."""
    wanted = set(extents)
    names = [e.name for e in manifest.entries if e.extent in wanted]
    named = {e.extent for e in manifest.entries}
    return names + [f"extent {extent}" for extent in sorted(wanted - named)]


def groups_of(sizes: Sequence[int], limit_bytes: int = GROUP_BYTES) -> Iterator[list[int]]:
    """Yield indexes of consecutive extents that have at most *limit_bytes* together, or one."""
    group: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if group and total + size > limit_bytes:
            yield group
            group, total = [], 0
        group.append(index)
        total += size
    if group:
        yield group


def bad_extents(store: Store, version: int, extents: Sequence[int]) -> list[int]:
    """Return those of *extents* whose bytes on the media differ from their checksums."""
    spans = make_spans([(0, extent) for extent in extents])
    report = store.wait(store.submit(Op.VERIFY, spans, version=version))
    if report.bad_count <= len(report.bad):
        return sorted(set(report.bad))
    if len(extents) == 1:
        return list(extents)
    # More chunks than a report can name: ask for each extent alone.
    return [extent for extent in extents if bad_extents(store, version, [extent])]


def verify(
    store: Store, version: Version, manifest: Manifest, progress: Progress | None = None
) -> list[str]:
    """Compare all data of a pinned version with their checksums; name the tensors that differ."""
    done, total = 0, sum(manifest.extents)
    bad: list[int] = []
    for group in groups_of(manifest.extents):
        bad += bad_extents(store, version.version, group)
        done += sum(manifest.extents[extent] for extent in group)
        if progress is not None:
            progress(done, total)
    return names_in(manifest, bad)
