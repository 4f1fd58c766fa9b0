"""One step of the probe of a GPU, in a process of its own: it may hang, or take its process down.

    python -P -m lightckpt.probe_steps LIBRARY FOLDER STEP [NUMBER...]

Calls of the driver's API by ctypes; only the last step uses the core. What is found goes out as a
line of JSON each, at once, so that it is known what was found before a hang or a crash. A step
that cannot be made ends with a line ``{"error": WORDS}`` and exit status 1; one whose copies came
out as other bytes has a line ``{"right": false}``.

The steps, of the first GPU, with copies on a stream as the core makes its own:

    facts                   driver, name, functions that are not there, attributes
    pinned MIB              rates both ways, of memory that the driver has pinned itself
    mapped MIB              a file in FOLDER is mapped and registered; the same rates; unregistered
    batch KIND COUNT TIMES  COUNT small copies by one call, TIMES over, and by one call each; of
                            memory that is KIND: pinned or mapped
    versions COUNT TIMES    versions of COUNT small extents, made by the core
"""

import ctypes as c
import json
import mmap
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError

# What the core cannot do without, as csrc/cuda_driver.cc asks for it, and what it can.
NEEDED = (
    "cuInit", "cuGetErrorName", "cuGetErrorString", "cuDriverGetVersion", "cuDeviceGet",
    "cuDeviceGetCount", "cuDeviceGetName", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuCtxGetStreamPriorityRange", "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreateWithPriority", "cuStreamDestroy_v2", "cuStreamQuery", "cuStreamSynchronize",
    "cuStreamWaitEvent", "cuStreamIsCapturing", "cuEventCreate", "cuEventDestroy_v2",
    "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemAlloc_v2", "cuMemFree_v2",
    "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister_v2", "cuMemHostUnregister",
    "cuPointerGetAttributes",
)  # fmt: skip
OPTIONAL = ("cuDeviceGetAttribute", "cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
# CUdevice_attribute, from cuda.h.
ATTRIBUTES = {
    "can_use_host_pointer_for_registered_memory": 91,
    "host_register_supported": 99,
    "uses_host_page_tables": 100,
    "read_only_host_register_supported": 113,
}
PORTABLE, NON_BLOCKING = 1, 1
SOURCE_IN_STREAM_ORDER, OVERLAP_WITH_COMPUTE = 1, 1
PART_BYTES = 64 << 20  # of device memory; larger host memory is filled by as many copies
SMALL_BYTES = 32 << 10
RATE_TIMES = 3  # of what is no larger than that; the rest takes long enough once
PR_SET_PDEATHSIG = 1

_size, _pointer = c.c_size_t, c.c_uint64


class RefusedError(Exception):
    """The driver does not do it; the message says which call, and its result."""


def tell(**facts: Any) -> None:
    """Let the parent know *facts*."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Driver:
    """libcuda, with the primary context of the first GPU current, and a stream of it."""

    def __init__(self, library: str) -> None:
        # Global, so that the core's dlopen finds this very library under its own name.
        self.library, self._lib = library, c.CDLL(library, mode=c.RTLD_GLOBAL)
        self.call("cuInit", c.c_uint(0))
        device, context, stream = c.c_int(), c.c_void_p(), c.c_uint64()
        least, greatest = c.c_int(), c.c_int()
        self.call("cuDeviceGet", c.byref(device), c.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuCtxGetStreamPriorityRange", c.byref(least), c.byref(greatest))
        made = c.byref(stream)
        self.call("cuStreamCreateWithPriority", made, c.c_uint(NON_BLOCKING), greatest)
        self.device, self.stream = device, stream

    def has(self, name: str) -> bool:
        return hasattr(self._lib, name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            RefusedError: it is not there, or returns an error.
        """
        if not self.has(name):
            raise RefusedError(f"{self.library} has no {name}")
        if result := int(getattr(self._lib, name)(*arguments)):
            raise RefusedError(f"{name}: {self._name_of(result)}")

    def _name_of(self, result: int) -> str:
        name = c.c_char_p()
        if self._lib.cuGetErrorName(c.c_int(result), c.byref(name)) or not name.value:
            return f"CUDA error {result}"
        return f"{name.value.decode(errors='replace')} ({result})"

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def out(self, host: int, device: int, size: int) -> None:
        self.call(
            "cuMemcpyDtoHAsync_v2", _pointer(host), _pointer(device), _size(size), self.stream
        )

    def into(self, device: int, host: int, size: int) -> None:
        self.call(
            "cuMemcpyHtoDAsync_v2", _pointer(device), _pointer(host), _size(size), self.stream
        )

    def allocate(self, size: int) -> int:
        """Return memory of the GPU."""
        address = _pointer()
        self.call("cuMemAlloc_v2", c.byref(address), _size(size))
        return int(address.value)

    def pin(self, size: int) -> int:
        """Return memory of the host that the driver has pinned."""
        address = _pointer()
        self.call("cuMemHostAlloc", c.byref(address), _size(size), c.c_uint(PORTABLE))
        return int(address.value)

    def register(self, address: int, size: int) -> None:
        self.call("cuMemHostRegister_v2", _pointer(address), _size(size), c.c_uint(PORTABLE))


def mapped_file(folder: Path, size: int) -> int:
    """Return the address of *size* bytes of a nameless file in *folder*, for this process's life.

    Raises:
        OSError: there is no room.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        memory = mmap.mmap(file.fileno(), size)
    _kept.append((c.c_byte * size).from_buffer(memory))
    return c.addressof(_kept[-1])


_kept: list[Any] = []  # what ends with the process


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# The steps.


def facts(library: str, folder: Path) -> None:
    bare = c.CDLL(library, mode=c.RTLD_GLOBAL)
    missing = [name for name in NEEDED if not hasattr(bare, name)]
    batches = [name for name in OPTIONAL if hasattr(bare, name) and "Batch" in name]
    tell(missing=missing, batch=batches[0] if batches else "")
    if missing:
        raise RefusedError(f"{library} has no {', '.join(missing)}")
    driver = Driver(library)
    version, count, name = c.c_int(), c.c_int(), c.create_string_buffer(256)
    driver.call("cuDriverGetVersion", c.byref(version))
    driver.call("cuDeviceGetCount", c.byref(count))
    driver.call("cuDeviceGetName", name, c.c_int(len(name)), driver.device)
    tell(driver=version.value, gpus=count.value, name=name.value.decode(errors="replace"))
    if not driver.has("cuDeviceGetAttribute"):
        return
    value = c.c_int()
    for attribute, number in ATTRIBUTES.items():
        driver.call("cuDeviceGetAttribute", c.byref(value), c.c_int(number), driver.device)
        tell(**{attribute: value.value})


def pinned(library: str, folder: Path, mib: int) -> None:
    driver = Driver(library)
    rates(driver, driver.pin(mib << 20), mib << 20)


def mapped(library: str, folder: Path, mib: int) -> None:
    driver, size = Driver(library), mib << 20
    at = mapped_file(folder, size)
    tell(register_s=timed(lambda: driver.register(at, size)))
    rates(driver, at, size)
    unregister = timed(lambda: driver.call("cuMemHostUnregister", _pointer(at)))
    tell(unregister_s=unregister)


def rates(driver: Driver, at: int, size: int) -> None:
    """Tell the rates between the GPU and *size* bytes at *at*, and whether the bytes are right."""
    part = min(size, PART_BYTES)
    expected = secrets.token_bytes(1 << 20) * (part >> 20)
    device = driver.allocate(part)
    c.memmove(at, expected, part)

    def load() -> None:
        driver.into(device, at, part)
        driver.wait()

    def save() -> None:
        for offset in range(0, size, part):
            driver.out(at + offset, device, min(part, size - offset))
        driver.wait()

    tell(in_bytes_s=part / min(timed(load) for _ in range(RATE_TIMES)))
    c.memset(at, 0, size)
    times = RATE_TIMES if size <= PART_BYTES else 1
    tell(out_bytes_s=size / min(timed(save) for _ in range(times)))
    parts = range(0, size, part)
    tell(right=all(same(at + offset, expected, min(part, size - offset)) for offset in parts))


def same(at: int, expected: bytes, size: int) -> bool:
    return bool(c.CDLL(None).memcmp(c.c_void_p(at), expected, _size(size)) == 0)


def batch(library: str, folder: Path, kind: str, count: int, times: int) -> None:
    driver, size = Driver(library), count * SMALL_BYTES
    at = driver.pin(size) if kind == "pinned" else mapped_file(folder, size)
    if kind == "mapped":
        driver.register(at, size)
    device = driver.allocate(size)
    expected = secrets.token_bytes(size)
    c.memmove(at, expected, size)
    driver.into(device, at, size)
    driver.wait()
    targets, sources, sizes = (_pointer * count)(), (_pointer * count)(), (_size * count)()
    for i in range(count):
        targets[i], sources[i] = at + i * SMALL_BYTES, device + i * SMALL_BYTES
        sizes[i] = SMALL_BYTES

    def together() -> None:
        for _ in range(times):
            copy_many(driver, targets, sources, sizes)
        driver.wait()

    def singly() -> None:
        for _ in range(times):
            for target, source in zip(targets, sources, strict=True):
                driver.out(target, source, SMALL_BYTES)
        driver.wait()

    for name, work in (("singly_s", singly), ("together_s", together)):
        c.memset(at, 0, size)
        tell(**{name: timed(work)})
        tell(right=same(at, expected, size))


def copy_many(driver: Driver, targets: Any, sources: Any, sizes: Any) -> None:
    """Give the stream all copies by one call, of whichever form the driver has."""
    count = len(sizes)
    # CUmemcpyAttributes: the source's order, two hints of two numbers, flags.
    attributes = (c.c_int * 6)(SOURCE_IN_STREAM_ORDER, 0, 0, 0, 0, OVERLAP_WITH_COMPUTE)
    first, failed = (_size * count)(), _size()
    given = (targets, sources, sizes, _size(count), attributes, first, _size(1))
    if driver.has("cuMemcpyBatchAsync_v2"):
        driver.call("cuMemcpyBatchAsync_v2", *given, driver.stream)
    else:
        driver.call("cuMemcpyBatchAsync", *given, c.byref(failed), driver.stream)


def versions(library: str, folder: Path, count: int, times: int) -> None:
    from ._core import Op, Snapshot, Store, make_sizes, make_spans

    driver, size = Driver(library), count * SMALL_BYTES
    device = driver.allocate(size)
    expected = secrets.token_bytes(size)
    at = driver.pin(size)
    c.memmove(at, expected, size)
    driver.into(device, at, size)
    driver.wait()
    spans = make_spans([(device + i * SMALL_BYTES, i) for i in range(count)])
    sizes = make_sizes([SMALL_BYTES] * count)
    with Store(folder / "store", create=True) as store:
        way = Snapshot.DIRECT if store.open_device(0).direct else Snapshot.HOST
        took = []
        for step in range(times + 1):  # the first has the store grow
            store.begin(step=step, keep=1, extents=sizes, blob=b"", host_bytes=0)
            began = time.perf_counter()
            stream = int(driver.stream.value)
            store.wait(store.submit_on(0, stream, way, Op.WRITE, spans))
            store.wait(store.commit(b""))
            took.append(time.perf_counter() - began)
        tell(way=way.name.lower(), version_s=min(took[1:]))
        newest = store.versions()[0].version
        found = b"".join(bytes(store.locate(newest, i)) for i in range(count))
        tell(right=found == expected)


STEPS: dict[str, Callable[..., None]] = {
    step.__name__: step for step in (facts, pinned, mapped, batch, versions)
}


def main(arguments: Sequence[str]) -> int:
    """Make one step; return the exit status."""
    # Whoever waits for it may be killed, and a driver that hangs would keep this process for ever.
    c.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    library, folder, step, *rest = arguments
    numbers = [int(text) if text.isdigit() else text for text in rest]
    try:
        STEPS[step](library, Path(folder), *numbers)
    except (RefusedError, CheckpointError, OSError) as error:
        tell(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
