"""lightckpt as a strategy: its modes on the folder that all share, and other media."""

import ctypes.util
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import torch

import lightckpt
from strategies import GROUP_GPU, GROUP_MEDIA, Strategy, UnavailableError, empty

RATE_VARIABLE, OPTANE_BYTES_PER_SECOND = "LIGHTCKPT_EMULATED_WRITE_RATE", 2_000_000_000


class Lightckpt(Strategy):
    """Every due step a version, copied behind the next forward and backward."""

    name, kind = "lightckpt", "lightckpt"
    # Two versions are watched, and three checked once more, before copies are lazy for good.
    warmup, mapped, copies = 7, True, 2.1
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap"}

    def open(self) -> None:
        self.checkpointer = self._make()
        self._waited = 0.0

    def _make(self) -> lightckpt.Checkpointer:
        run = self.workload
        return lightckpt.Checkpointer(
            self.place() / "run.lightckpt",
            model=run.model,
            optimizer=run.optimizer,
            generators={"input": run.generator},
            every=self.every,
            on_error="raise",
            **self.arguments,
        )

    def place(self) -> Path:
        """Return the folder of the store."""
        return self.folder

    def after_step(self, step: int) -> None:
        self.checkpointer.mark()
        self.durable = self.checkpointer.latest

    def stall(self) -> float:
        guard = self.checkpointer.stats.guard_seconds
        waited, self._waited = guard - self._waited, guard
        return waited

    def persists(self) -> list[tuple[int, int]]:
        records = list(self.checkpointer.timeline)
        copies = [(begin, end) for record in records for begin, end, _ in record.copies]
        return copies + [record.commit_ns for record in records if record.commit_ns[1]]

    def drain(self) -> None:
        self.durable = self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()

    def restore(self) -> int:
        return self.checkpointer.restore()


class Stop(Lightckpt):
    """The same, copied at the boundary while training waits."""

    name, warmup = "lightckpt-stop", 2
    arguments: ClassVar[dict[str, Any]] = {"mode": "stop"}


class Auto(Lightckpt):
    """The same, with the mode chosen by trial; the trial is in the warm-up."""

    name, warmup = "lightckpt-auto", 20
    group = GROUP_MEDIA
    arguments: ClassVar[dict[str, Any]] = {"mode": "auto"}


class File(Lightckpt):
    """A plain file: msync makes it durable, which costs nothing on a tmpfs."""

    name, group, kind = "lightckpt-file", GROUP_MEDIA, ""
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "media": "file"}


class Emulated(Lightckpt):
    """The instructions of persistent memory (flush, fence) on memory that is none."""

    name, group, kind = "lightckpt-emulated", GROUP_MEDIA, ""
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "media": "emulated"}


class Pmemobj(Lightckpt):
    """Slots and manifests in a libpmemobj pool."""

    name, group, kind = "lightckpt-pmemobj", GROUP_MEDIA, ""
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "catalog": "pmemobj"}

    @classmethod
    def check(cls) -> None:
        if ctypes.util.find_library("pmemobj") is None:
            raise UnavailableError("libpmemobj is not installed (Debian: libpmemobj1)")


class Huge(Lightckpt):
    """A tmpfs of huge pages, mounted for the block."""

    name, group, kind = "lightckpt-huge", GROUP_MEDIA, ""

    @classmethod
    def check(cls) -> None:
        if os.geteuid() != 0:
            raise UnavailableError("mounting a tmpfs of huge pages needs root")

    def place(self) -> Path:
        return self._mount

    def open(self) -> None:
        self._mount = self.folder / "huge"
        self._mount.mkdir(exist_ok=True)
        if not os.path.ismount(self._mount):
            command = ["mount", "-t", "tmpfs", "-o", "huge=always,size=90%", "tmpfs"]
            ran = subprocess.run([*command, self._mount], capture_output=True, text=True)
            if ran.returncode != 0:
                raise UnavailableError(
                    f"a tmpfs of huge pages cannot be mounted: {ran.stderr.strip()}"
                )
        super().open()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.discard(self.folder)

    @classmethod
    def discard(cls, folder: Path) -> None:
        if os.path.ismount(folder / "huge"):
            # Lazy: whoever counts its bytes may be looking at it.
            subprocess.run(["umount", "--lazy", folder / "huge"], check=True)
        empty(folder)


class Optane(Emulated):
    """One module of Optane as the core emulates it: about 2 GB/s of writes."""

    name = "lightckpt-optane"

    def open(self) -> None:
        os.environ[RATE_VARIABLE] = str(OPTANE_BYTES_PER_SECOND)
        try:
            super().open()
        finally:
            del os.environ[RATE_VARIABLE]


class GpuAuto(Lightckpt):
    """Tensors of a GPU, copied in the way that lightckpt chooses."""

    name, group = "lightckpt-gpu-auto", GROUP_GPU
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "snapshot": "auto"}

    @classmethod
    def check(cls) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError("torch finds no GPU here")


class GpuDirect(GpuAuto):
    """The copy engine writes into the store."""

    name = "lightckpt-gpu-direct"
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "snapshot": "direct"}


class GpuHost(GpuAuto):
    """Through pinned staging."""

    name = "lightckpt-gpu-host"
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "snapshot": "host"}


class GpuDevice(GpuAuto):
    """Copied aside on the GPU first."""

    name = "lightckpt-gpu-device"
    arguments: ClassVar[dict[str, Any]] = {"mode": "overlap", "snapshot": "device"}


GPU_STRATEGIES = (GpuAuto, GpuDirect, GpuHost, GpuDevice)
STRATEGIES = (Lightckpt, Stop, Auto, File, Emulated, Huge, Pmemobj, Optane)
