"""Steps of a run that can be checked by anybody: their bytes follow from place and number.

`forbid_syncs` is the heart of the matter. It has the kernel refuse fsync, msync and their kin to
this process, so that a step acknowledged after it is durable by stores, flushes and MAP_SYNC alone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
from pathlib import Path

from lightckpt._core import Op, Store, Version, make_sizes, make_spans

SIZES = (4096, 70_001, 1_300_000)  # a page, an odd number of bytes, more than one chunk
STORE_BYTES = 24 << 20  # holds keep + 1 areas, so that nothing grows
KEEP = 2
CONTROL_BYTES = 64 << 10

# Numbers of x86-64: msync, fsync, fdatasync, sync, sync_file_range, syncfs.
SYNC_CALLS = (26, 74, 75, 162, 277, 306)
PR_SET_NO_NEW_PRIVS = 38
SYS_SECCOMP, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 317, 1, 1
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # of the classic BPF machine
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def forbid_syncs() -> None:
    """Refuse every call that asks the kernel for durability, to all threads, from now on."""
    count = len(SYNC_CALLS)
    lines = [(LOAD, 0, 0, 0)]  # the number of the call
    lines += [
        (JUMP_IF_EQUAL, count - index, 0, call) for index, call in enumerate(SYNC_CALLS)
    ]  # fmt: skip
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    flags = SECCOMP_FILTER_FLAG_TSYNC
    if libc.syscall(SYS_SECCOMP, SECCOMP_SET_MODE_FILTER, flags, program) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    try:
        os.fsync(0)
    except PermissionError:
        return
    raise OSError("the filter lets fsync pass")


def content(place: str, step: int, extent: int) -> bytes:
    return random.Random(f"{place} {step} {extent}").randbytes(SIZES[extent])


def spans_over(buffers: list[bytearray]) -> object:
    """Return spans over *buffers*, extent by extent."""
    first = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
    return make_spans([(address, extent) for extent, address in enumerate(first)])


def commit(store: Store, place: str, step: int) -> None:
    """Make *step* durable; on return it is acknowledged."""
    buffers = [bytearray(content(place, step, extent)) for extent in range(len(SIZES))]
    host = f"{place} {step}".encode()
    store.begin(
        step=step, keep=KEEP, extents=make_sizes(SIZES), blob=b"", host_bytes=len(host)
    )  # fmt: skip
    store.wait(store.submit(Op.WRITE, spans_over(buffers)))
    store.wait(store.commit(host))


def damage_of(store: Store, place: str, version: Version) -> str:
    """Compare every byte of *version* with what its step has; return what differs, or nothing."""
    if version.damaged:
        return "metadata"
    buffers = [bytearray(size) for size in SIZES]
    store.wait(store.submit(Op.READ, spans_over(buffers), version=version.version))
    wrong = [
        f"extent {extent}"
        for extent, buffer in enumerate(buffers)
        if buffer != content(place, version.step, extent)
    ]
    if bytes(store.view(version.version)[1]) != f"{place} {version.step}".encode():
        wrong.append("host state")
    return ", ".join(wrong)


# The control: as the store's pages, but mapped without MAP_SYNC. Its file is durable and has its
# blocks; that they hold data is what the file system notes at the first touch, and nobody asks it
# to make that note durable. So the bytes are lost, which is what MAP_SYNC is there against.


def make_control(path: Path) -> None:
    """Make a file of allocated blocks, durably."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, CONTROL_BYTES)
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_control(path: Path, place: str) -> None:
    """Put bytes into it through a mapping that promises nothing."""
    with path.open("rb+") as file, mmap.mmap(file.fileno(), CONTROL_BYTES) as mapped:
        mapped[:] = random.Random(place).randbytes(CONTROL_BYTES)


def left_of_control(path: Path, place: str) -> str:
    """Return what a power cut left: "data", "zeros" or "other"."""
    expected = random.Random(place).randbytes(CONTROL_BYTES)
    found = {expected: "data", bytes(CONTROL_BYTES): "zeros"}
    return found.get(path.read_bytes(), "other")
