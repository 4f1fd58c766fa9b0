"""The libraries that a user would take instead, each at its best for one process saving often.

All write into folders or files of their own below the shared folder; the checkpoint before is
removed when the newer one is complete, or memory would fill up. Asynchronous ones have one save in
flight: the next waits for it, as their own documents ask.
"""

import logging
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from strategies import Strategy, need
from workloads import Workload

STEP = re.compile(r"^step-(\d+)$")


@contextmanager
def quiet() -> Iterator[None]:
    """Let libraries not warn or log that one process is all there is, or what they look for."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class Folders(Strategy):
    """Strategies that make a folder per step."""

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps that there are folders of, newest first."""
        found = [STEP.match(path.name) for path in self.folder.iterdir()]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def completed(self, step: int) -> None:
        """Note that *step* is complete, and remove those before it."""
        self.durable = step
        for older in self.steps():
            if older < step:
                shutil.rmtree(self.path(older))

    def load(self, step: int) -> None:
        """Bring the workload to *step*."""
        raise NotImplementedError

    def restore(self) -> int:
        """Restore the newest that loads, as a careful script does; see Strategy."""
        errors: list[str] = []
        for step in self.steps():
            try:
                self.load(step)
            # Each library raises its own, and DCP what is no Exception.
            except (Exception, CheckpointException) as error:  # noqa: BLE001
                errors.append(f"{step}: {type(error).__name__}: {error}")
            else:
                return step
        if errors:
            raise RuntimeError(f"no step loads; {'; '.join(errors)}")
        return 0


class Pending(Folders):
    """Those that save behind training, one save at a time."""

    def open(self) -> None:
        self._pending: Any = None
        self._saving = 0
        self._persists: list[tuple[int, int]] = []

    def begin(self, step: int) -> Any:
        """Start the save of *step*; return what ``finish`` waits for."""
        raise NotImplementedError

    def finish(self, pending: Any) -> None:
        """Wait until a save is complete."""
        pending.result()

    def save(self, step: int) -> None:
        self.drain()
        self._pending, self._saving = self.begin(step), step

    def drain(self) -> None:
        if self._pending is not None:
            self.finish(self._pending)
            self._pending = None
            self.completed(self._saving)

    def persists(self) -> list[tuple[int, int]]:
        return self._persists


class Dcp(Folders):
    """torch.distributed.checkpoint.save, with fsync and two writing threads."""

    name, kind, copies = "dcp", "dcp", 3.0

    def writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.path(step), thread_count=torch.get_num_threads())

    def save(self, step: int) -> None:
        with quiet():
            dcp.save(self.workload.state(), storage_writer=self.writer(step), no_dist=True)
        self.completed(step)

    def load(self, step: int) -> None:
        # DCP reads into the tensors that it is given, and knows nothing of those that an optimizer
        # has only after its first update; a loop over zero gradients is what its own helper does.
        prepare_optimizer(self.workload)
        state = self.workload.state()
        with quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.path(step)), no_dist=True)
        self.workload.load(state)


def prepare_optimizer(workload: Workload) -> None:
    """Let an optimizer that has made no update make its state; parameters stay as they are."""
    optimizer = workload.optimizer
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class DcpThread(Pending, Dcp):
    """DCP's async_save as it comes: staged while training waits, written by a thread."""

    name, copies = "dcp-async-thread", 4.0

    def save(self, step: int) -> None:
        self.drain()
        begin = time.monotonic_ns()
        super().save(step)
        self._pending.add_done_callback(
            lambda _: self._persists.append((begin, time.monotonic_ns()))
        )

    def begin(self, step: int) -> Future[Any]:
        return dcp.async_save(
            self.workload.state(), storage_writer=self.writer(step), no_dist=True,
            async_stager=DefaultStager(StagingOptions(False, False, False, False)),
        )  # fmt: skip


class DcpStager(DcpThread):
    """The same with a stager that is kept, so that its buffers are warm."""

    name = "dcp-async-stager"

    def open(self) -> None:
        super().open()
        self._stager = self._make()

    def _make(self) -> DefaultStager:
        pinned = torch.cuda.is_available()
        return DefaultStager(StagingOptions(pinned, False, pinned, pinned))

    def begin(self, step: int) -> Future[Any]:
        # torch 2.11 spoils a stager by using it: there each save has one of its own.
        if not getattr(self._stager._state_dict_stager, "_deepcopy_dispatch", True):
            self._stager.close()
            self._stager = self._make()
        answer = dcp.async_save(
            self.workload.state(), storage_writer=self.writer(step), no_dist=True,
            async_stager=self._stager,
        )  # fmt: skip
        self._staged = getattr(answer, "staging_completion", None)
        return getattr(answer, "upload_completion", answer)

    def before_update(self) -> None:
        if self._pending is not None and self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        super().close()
        self._stager.close()


class DcpProcess(DcpThread):
    """DCP's async_save by a process, through staging in shared memory that is kept."""

    name, copies = "dcp-async-process", 5.0

    def open(self) -> None:
        super().open()
        if not torch.distributed.is_initialized():
            # The process has a group of its own, and asks this one who it is.
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def begin(self, step: int) -> Future[Any]:
        return dcp.async_save(
            self.workload.state(), storage_writer=self.writer(step),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS, async_stager=self._stager,
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        self._stager.close()
        torch.distributed.destroy_process_group()
        # It ends with its last reference, and there is no other way to end it; left alone it keeps
        # what it has received.
        _async_process_executor._CHECKPOINT_PROCESS = None


class TorchCheckpointing(Pending):
    """torch_checkpointing: staged by a thread into shared memory, written by a process."""

    name, kind, copies = "torch_checkpointing", "torch_checkpointing", 5.0

    @classmethod
    def check(cls) -> None:
        need("torch_checkpointing")

    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().open()
        # A tmpfs takes no O_DIRECT; asking for it first costs a try and a warning per file.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager.Config(storage_config=storage).build()

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def begin(self, step: int) -> Future[Any]:
        return self._manager.save(str(self.path(step)), self.workload.state())

    def load(self, step: int) -> None:
        prepare_optimizer(self.workload)
        state = self.workload.state()
        self.workload.load(dict(self._manager.load(str(self.path(step)), into=state)))

    def close(self) -> None:
        super().close()
        self._manager.close()


class Torchsnapshot(Pending):
    """torchsnapshot's async_take: returns when all is staged."""

    name, kind, copies = "torchsnapshot", "torchsnapshot", 4.0

    @classmethod
    def check(cls) -> None:
        need("torchsnapshot")

    def parts(self) -> dict[str, Any]:
        from torchsnapshot import StateDict

        run = self.workload
        random = StateDict(state=run.generator.get_state())
        return {"model": run.model, "optimizer": run.optimizer, "random": random}

    def begin(self, step: int) -> Any:
        from torchsnapshot import Snapshot

        with quiet():
            return Snapshot.async_take(str(self.path(step)), self.parts())

    def finish(self, pending: Any) -> None:
        pending.wait()

    def load(self, step: int) -> None:
        from torchsnapshot import Snapshot

        prepare_optimizer(self.workload)
        parts = self.parts()
        with quiet():
            Snapshot(str(self.path(step))).restore(parts)
        self.workload.generator.set_state(parts["random"]["state"])


class Moonclip(Strategy):
    """moonclip: compressed differences, saved behind training; lossless, at its lowest level."""

    name, kind, copies, warmup = "moonclip", "moonclip", 5.0, 2  # the first is none to differ from

    @classmethod
    def check(cls) -> None:
        need("moonclip")

    def open(self) -> None:
        from moonclip import CheckpointManager

        self._manager = CheckpointManager(
            str(self.folder / "moonclip"), compression_level=1, max_full_snapshots=2,
            max_total_snapshots=2, world_size=1, rank=0,
        )  # fmt: skip
        self._saving = 0

    def save(self, step: int) -> None:
        run = self.workload
        random = {"random": {"state": run.generator.get_state()}}
        self._manager.save(step=step, model=run.model, optimizer=run.optimizer, extra=random)
        # It returns once the save before is written.
        self.durable, self._saving = self._saving, step

    def drain(self) -> None:
        self._manager.flush()
        self.durable = self._saving

    def restore(self) -> int:
        run = self.workload
        if not self._manager.list_snapshots():
            return 0
        _, found = self._manager.load_latest(model=run.model, optimizer=run.optimizer)
        run.generator.set_state(found["extra/random"]["state"])
        return int(self._manager.list_snapshots()[-1]["step"])


STRATEGIES = (
    Dcp, DcpThread, DcpStager, DcpProcess, TorchCheckpointing, Torchsnapshot, Moonclip,
)  # fmt: skip
