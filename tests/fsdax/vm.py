"""A virtual machine with persistent memory that can lose its power.

It is qemu with two emulated NVDIMMs (ACPI, with label areas, each a file of the host), a
virtio-pmem device, and two NUMA nodes, of which the second has no memory of its own. By KVM where
the processor has what that takes, else by TCG, about twenty times slower; both do the same here.

**What this shows, and what not.** The kernel's side is real: namespaces, DAX, MAP_SYNC, journals
replayed after a power cut. The processor's is not: the emulator has no caches in front of the
NVDIMM, so a store is in the host's file at once and a flush left out loses nothing. That flushes
and fences stand where they must is shown by the enumerated crash states, not here.

The program in the guest (guest.py) reports over a second serial line, one JSON document a line,
which qemu appends to a file of the host as it comes. So what was reported outlives the machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit

GUEST = Path(__file__).with_name("guest.py")
DIMM_BYTES = 1 << 30  # each image is holes, but for what is written
LABEL_BYTES = 128 << 10
# The label area comes on top: what is left for namespaces has to end at a multiple of 16 MiB.
IMAGES = {
    "nvdimm0": DIMM_BYTES + LABEL_BYTES,
    "nvdimm1": DIMM_BYTES + LABEL_BYTES,
    "virtio": DIMM_BYTES,
}
ADR, EADR = "mem-ctrl", "cpu"  # up to where the platform says that power lasts
POLL_SECONDS = 0.05
DIE_SECONDS = 10
LOG_LINES = 25

Record = dict[str, Any]


class Machine:
    """The part that outlives the power: a kit, and the images that lie in *folder*."""

    def __init__(self, made: kit.Kit, folder: Path) -> None:
        self._kit, self.folder = made, folder
        for name, size in IMAGES.items():
            with (folder / name).open("xb") as image:
                image.truncate(size)

    def boot(self, life: str, persistence: str) -> Life:
        """Switch the machine on; the guest's program does what *life* names."""
        report, console = (self.folder / f"{life}.{name}" for name in ("report", "console"))
        # Should this process die, qemu is killed with it.
        command = ["setpriv", "--pdeathsig", "KILL", "nice", self._kit.qemu]
        command += self._hardware(persistence)
        command += ["-serial", f"file:{console}", "-serial", f"file:{report}"]
        command += ["-append", " ".join((
            "console=ttyS0 quiet panic=-1 mitigations=off --",
            f"{kit.SCRATCH} {sys.executable} {GUEST} {life}",
        ))]  # fmt: skip
        report.touch()
        with (self.folder / f"{life}.qemu").open("wb") as said:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )
        return Life(process, report, console)

    def scrap(self) -> None:
        """Remove the images; what was said stays."""
        for name in IMAGES:
            (self.folder / name).unlink()

    def _hardware(self, persistence: str) -> list[str]:
        def image(name: str) -> str:
            where = f"mem-path={self.folder / name},size={IMAGES[name]}"
            return f"memory-backend-file,id=m-{name},share=on,{where}"

        processor = ["-accel", "kvm", "-cpu", "host"] if has_kvm() else ["-cpu", "max"]
        return [
            *("-M", f"pc,nvdimm=on,nvdimm-persistence={persistence}", *processor),
            *("-smp", "2", "-m", "1G,slots=4,maxmem=8G"),
            *("-object", "memory-backend-ram,id=m-ram,size=1G"),
            *("-numa", "node,nodeid=0,cpus=0-1,memdev=m-ram", "-numa", "node,nodeid=1"),
            *("-object", image("virtio")),
            *("-device", "virtio-pmem-pci,memdev=m-virtio"),
            *("-object", image("nvdimm0")),
            *("-device", f"nvdimm,memdev=m-nvdimm0,label-size={LABEL_BYTES},node=0"),
            *("-object", image("nvdimm1")),
            *("-device", f"nvdimm,memdev=m-nvdimm1,label-size={LABEL_BYTES},node=1"),
            *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,"
              "multidevs=remap"),
            *("-kernel", str(self._kit.kernel), "-initrd", str(self._kit.initrd)),
            *("-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot"),
        ]  # fmt: skip


def has_kvm() -> bool:
    """Tell whether qemu can use the processor itself; the device node alone promises nothing."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(re.search(r"\b(vmx|svm)\b", flags))


def of(records: list[Record], place: str, fact: str) -> list[Any]:
    """Return what was said of *fact* at *place*, in order."""
    return [record[fact] for record in records if record["place"] == place and fact in record]


class Life:
    """The machine while it is on. Leaving the ``with`` block is a power cut."""

    def __init__(self, process: subprocess.Popen[bytes], report: Path, console: Path) -> None:
        self._process, self._report, self._console = process, report, console
        self.accelerator = "KVM" if has_kvm() else "TCG"
        self._start = time.monotonic()
        self.seconds = 0.0

    def records(self) -> list[Record]:
        """Return what the guest has reported so far; a line that is cut short is not of it."""
        whole = self._report.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, until: Callable[[list[Record]], bool], seconds: float) -> list[Record]:
        """Return the records once *until* holds of them.

        Raises:
            AssertionError: it does not within *seconds*, or the machine goes off before.
        """
        end = time.monotonic() + seconds
        while not until(self.records()):
            running = self._process.poll() is None
            # The last words may have come between the two looks.
            if not running and until(self.records()):
                break
            assert running, f"the machine went off:\n{self.last_words()}"
            assert time.monotonic() < end, f"nothing after {seconds} s:\n{self.last_words()}"
            time.sleep(POLL_SECONDS)
        return self.records()

    def last_words(self) -> str:
        """Return the ends of what qemu, the kernel and the guest said."""
        files = (self._console.with_suffix(".qemu"), self._console, self._report)
        texts = (path.read_text(errors="replace") for path in files if path.exists())
        return "\n--\n".join("\n".join(text.splitlines()[-LOG_LINES:]) for text in texts)

    def cut_power(self) -> None:
        """End qemu between two instructions of the guest: nothing is written back or shut down."""
        self._process.kill()
        self._process.wait(DIE_SECONDS)
        self.seconds = self.seconds or time.monotonic() - self._start

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cut_power()
