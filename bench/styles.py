"""Two published ways to checkpoint, written for this benchmark after their papers, on a CPU.

CheckFreq (FAST 2021): *snapshot*, a copy of the state that is made behind forward and backward and
that the next update waits for; then *persist*, torch.save of the copy by a thread. One checkpoint
is in flight: the next begins when it is there.

PCcheck (ASPLOS 2025): two checkpoints are in flight. Storage has three slots in one file, so that
one is always whole; a copy is written in chunks by threads, made durable, and then named by a
pointer with a checksum, which is made durable too. An older checkpoint never replaces a newer one.
"""

import json
import os
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from state import tensors_of
from strategies import Strategy, replacing

CHUNK_BYTES = 4 << 20
SLOTS, IN_FLIGHT, WRITERS = 3, 2, 2
POINTER_BYTES = 4096
ALIGN_BYTES = 4096


class Mirror:
    """Buffers in host memory that a state is copied into; pinned where the state is on a GPU.

    There the copies have a stream of their own, which begins where the caller's stood at ``mark``.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._reached: torch.cuda.Event | None = None

    def mark(self, source: dict[str, Tensor]) -> None:
        """Note that what has been queued by now made *source*; called where it is trained."""
        if any(tensor.is_cuda for tensor in source.values()):
            self._stream = self._stream or torch.cuda.Stream()
            self._reached = torch.cuda.current_stream().record_event()

    def copy(self, source: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy *source*, and return the copies when they are complete; any thread may call."""
        if self._stream is None or self._reached is None:
            self._copy(source)
        else:
            self._stream.wait_event(self._reached)
            with torch.cuda.stream(self._stream):
                self._copy(source)
            self._stream.synchronize()
        return {name: self.tensors[name] for name in source}

    def _copy(self, source: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in source.items():
                kept = self.tensors.get(name)
                if kept is None or kept.shape != tensor.shape:
                    kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                    self.tensors[name] = kept
                kept.copy_(tensor, non_blocking=tensor.is_cuda)


class CheckFreq(Strategy):
    """Snapshot behind the next forward and backward, then persist by a thread."""

    name, kind, copies = "checkfreq-style", "checkfreq", 4.0

    def open(self) -> None:
        self._snapshots = ThreadPoolExecutor(1, "snapshot")
        self._persists = ThreadPoolExecutor(1, "persist")
        self._mirror = Mirror()
        self._snapshot: Future[dict[str, Tensor]] | None = None
        self._persist: Future[None] | None = None
        self._spans: list[tuple[int, int]] = []

    def save(self, step: int) -> None:
        self.drain()
        state = self.workload.state()
        source, groups = tensors_of(state), state["optimizer"]["param_groups"]
        self._mirror.mark(source)
        self._snapshot = self._snapshots.submit(self._mirror.copy, source)
        self._persist = self._persists.submit(self._write, step, self._snapshot, groups)

    def persists(self) -> list[tuple[int, int]]:
        return self._spans

    def _write(self, step: int, snapshot: Future[dict[str, Tensor]], groups: Any) -> None:
        begin = time.monotonic_ns()
        copies = snapshot.result()
        with replacing(self.folder / "latest.pt") as temporary:
            torch.save({"step": step, "tensors": copies, "groups": groups}, temporary)
        self.durable = step
        self._spans.append((begin, time.monotonic_ns()))

    def before_update(self) -> None:
        if self._snapshot is not None:
            self._snapshot.result()
            self._snapshot = None

    def drain(self) -> None:
        self.before_update()
        if self._persist is not None:
            self._persist.result()
            self._persist = None

    def close(self) -> None:
        super().close()
        self._snapshots.shutdown()
        self._persists.shutdown()

    def restore(self) -> int:
        path = self.folder / "latest.pt"
        if not path.exists():
            return 0
        saved = torch.load(path, weights_only=True, mmap=True)
        load_tensors(self, saved["tensors"], saved["groups"])
        return int(saved["step"])


def load_tensors(strategy: Strategy, tensors: dict[str, Tensor], groups: Any) -> None:
    """Bring *tensors*, by path, into the strategy's workload."""
    run = strategy.workload
    live = tensors_of({"model": run.model.state_dict()})
    moments: dict[int, dict[str, Tensor]] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in live:
                live[name].copy_(tensor)
            elif name.startswith("optimizer/"):
                _, _, index, key = name.split("/")
                moments.setdefault(int(index), {})[key] = tensor
    run.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    run.generator.set_state(tensors["random"].clone())


class PcCheck(Strategy):
    """Chunks of two copies on their way to three slots; see above."""

    name, kind, copies, warmup = "pccheck-style", "pccheck", 5.1, IN_FLIGHT + 1

    def open(self) -> None:
        self._file = os.open(self.folder / "slots", os.O_RDWR | os.O_CREAT, 0o600)
        self._copying = ThreadPoolExecutor(1, "copy")
        self._carrying = ThreadPoolExecutor(IN_FLIGHT, "carry")
        self._writing = ThreadPoolExecutor(WRITERS, "write")
        self._lock = threading.Lock()
        self._mirrors = [Mirror() for _ in range(IN_FLIGHT)]
        self._flights: list[Future[None]] = []
        self._copied: Future[Any] | None = None
        named = self._pointer()
        self._committed = named or {"step": 0, "slot": SLOTS - 1}
        self._free = [slot for slot in range(SLOTS) if slot != self._committed["slot"]]
        self._count = 0

    def save(self, step: int) -> None:
        self.before_update()
        while len(self._flights) >= IN_FLIGHT:
            self._flights.pop(0).result()
        state = self.workload.state()
        source, groups = tensors_of(state), state["optimizer"]["param_groups"]
        mirror = self._mirrors[self._count % IN_FLIGHT]
        self._count += 1
        mirror.mark(source)
        self._copied = self._copying.submit(mirror.copy, source)
        self._flights.append(self._carrying.submit(self._carry, step, self._copied, groups))

    def _carry(self, step: int, copied: Future[Any], groups: Any) -> None:
        tensors = copied.result()
        with self._lock:
            slot = self._free.pop()
        table, end = [], 0
        for name, tensor in tensors.items():
            table.append([name, str(tensor.dtype)[6:], list(tensor.shape), end])
            end += -(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES
        begin = self._begin(slot, end)
        chunks = [
            (view[at : at + CHUNK_BYTES], begin + row[3] + at)
            for row, view in zip(table, map(_bytes, tensors.values()), strict=True)
            for at in range(0, len(view), CHUNK_BYTES)
        ]
        list(self._writing.map(self._write, chunks))
        os.fsync(self._file)
        self._commit({"step": step, "slot": slot, "begin": begin, "table": table, "groups": groups})

    def _begin(self, slot: int, size: int) -> int:
        """Return where *slot* begins: behind the pointers, a MiB each, and the slots before it."""
        with self._lock:
            self._size = max(size, getattr(self, "_size", 0))
            return (1 << 20) * SLOTS + slot * self._size

    def _write(self, chunk: tuple[memoryview, int]) -> None:
        view, at = chunk
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written

    def _commit(self, words: dict[str, Any]) -> None:
        with self._lock:
            if words["step"] <= self._committed["step"]:  # a newer one was quicker
                self._free.append(words["slot"])
                return
            text = json.dumps(words).encode()
            head = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
            os.pwrite(self._file, head + text, (1 << 20) * words["slot"])
            os.fsync(self._file)
            self._free.append(self._committed["slot"])
            self._committed = words
            self.durable = words["step"]

    def _pointer(self) -> dict[str, Any] | None:
        """Return the newest pointer whose checksum is right; None if there is none."""
        found = []
        for slot in range(SLOTS):
            head = os.pread(self._file, 12, (1 << 20) * slot)
            if len(head) < 12:
                continue
            text = os.pread(self._file, int.from_bytes(head[:8], "little"), (1 << 20) * slot + 12)
            if text and zlib.crc32(text) == int.from_bytes(head[8:], "little"):
                found.append(json.loads(text))
        return max(found, key=lambda words: words["step"], default=None)

    def before_update(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def drain(self) -> None:
        self.before_update()
        while self._flights:
            self._flights.pop(0).result()

    def close(self) -> None:
        super().close()
        for pool in (self._copying, self._carrying, self._writing):
            pool.shutdown()
        os.close(self._file)

    def restore(self) -> int:
        words = self._pointer()
        if words is None:
            return 0
        tensors = {}
        for name, dtype, shape, at in words["table"]:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            view, end = _bytes(tensors[name]), words["begin"] + at
            while view:
                count = os.preadv(self._file, [view], end)
                if count == 0:
                    raise EOFError(f"the slots end before {name}")
                view, end = view[count:], end + count
        load_tensors(self, tensors, words["groups"])
        return int(words["step"])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


STRATEGIES = (CheckFreq, PcCheck)
