"""What the virtual machine is made of: qemu, a Debian kernel, and an initial file system.

Goal: `prepare()` gives a Kit, or says in one line why there can be none here. What is missing is
installed where apt-get may (as root); the kernel is fetched and unpacked, never installed. What is
made lies in build/fsdax and is made once: the name of its folder is a checksum of this file.

The initial file system holds busybox, the drivers and one script. It loads the drivers, mounts the
host's / read-only over 9p, and runs a Python program of the host in it. So nothing is copied into
the machine, and the code under test is the one in this working tree.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "fsdax"
# The one place in the guest that can be written to: a tmpfs over this empty folder.
SCRATCH = BUILT / "scratch"

# Program -> its Debian package. All but the first run in the guest.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ndctl": "ndctl",
    "mkfs.xfs": "xfsprogs",
    "mkfs.ext4": "e2fsprogs",
    "pmempool": "pmdk-tools",  # brings libpmemobj as well
}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KERNEL = "linux-image-amd64"  # depends on the package of the current release
APT_SECONDS = 300

# What is needed of the kernel; what these depend on is found, and loaded before them. Those that a
# release has built in are not there to be loaded.
DRIVERS = (
    *("crc32c_generic", "virtio_pci", "9pnet_virtio", "9p"),
    *("nfit", "nd_pmem", "device_dax", "dax_pmem", "kmem", "virtio_pmem"),
    *("ext4", "xfs"),
)

INIT = """#!/bin/busybox sh
# Arguments: the scratch folder, then a command; both are paths of the host.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
for driver in {drivers}; do $b insmod /drivers/$driver || $b echo "no driver $driver"; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 host /host
for place in proc sys dev; do $b mount -o bind /$place /host/$place; done
$b mount -t tmpfs scratch /host$1
cd /
export HOME=$1 TMPDIR=$1 PATH={path} LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
shift
$b chroot /host "$@"
$b echo "the command ended with $?"
$b poweroff -f
"""


class UnavailableError(Exception):
    """There can be no machine here; the message says why."""


@dataclass(frozen=True)
class Kit:
    qemu: str
    kernel: Path
    initrd: Path


def prepare() -> Kit:
    """Return what a machine is made of, fetched and built if it was not yet.

    Raises:
        UnavailableError: something is missing and cannot be had.
    """
    if platform.machine() != "x86_64":
        raise UnavailableError(
            f"the machine that is emulated is x86_64, this one {platform.machine()}"
        )
    install([package for program, package in PROGRAMS.items() if not find(program)])
    missing = [program for program in PROGRAMS if not find(program)]
    if missing:
        raise UnavailableError(
            f"{', '.join(missing)}: not found, although the package is installed"
        )
    SCRATCH.mkdir(parents=True, exist_ok=True)
    made = BUILT / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    kit = Kit(find("qemu-system-x86_64"), made / "kernel", made / "initrd")
    if not made.is_dir():
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            build(Path(folder), Path(folder) / "made")
            try:
                (Path(folder) / "made").rename(made)
            except OSError:
                if not made.is_dir():  # else somebody else has just made the same
                    raise
    return kit


def find(program: str) -> str:
    return shutil.which(program, path=PATH) or ""


def install(packages: list[str]) -> None:
    if not packages:
        return
    command = f"apt-get install {' '.join(packages)}"
    if os.geteuid() != 0 or not find("apt-get"):
        raise UnavailableError(f"this needs, as root: {command}")
    apt("apt-get", "install", "-qy", "--no-install-recommends", *packages)


def apt(*command: str, cwd: Path | None = None) -> str:
    """Run a command of apt; once more with fresh lists if it fails, which they may be the cause of.

    Raises:
        UnavailableError: it fails.
    """
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    refresh = ("apt-get", "update", "-q")
    ended = None
    for attempt in (command, refresh, command):
        if attempt is refresh and os.geteuid() != 0:
            break
        try:
            ended = subprocess.run(
                attempt, cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=APT_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{' '.join(attempt)}: {error}") from error
        if attempt is command and ended.returncode == 0:
            return ended.stdout
    last = (ended.stderr or ended.stdout).strip().splitlines()[-1:] if ended else []
    raise UnavailableError(f"{' '.join(command)}: {''.join(last) or 'failed'}")


def build(work: Path, made: Path) -> None:
    """Fetch the kernel's package into *work*; put the kernel and the initrd into *made*."""
    depends = apt("apt-cache", "depends", KERNEL)
    found = re.search(r"Depends: (linux-image-(\S+))", depends)
    if found is None:
        raise UnavailableError(f"no package {KERNEL}: this is not a Debian")
    package, release = found.groups()
    apt("apt-get", "download", package, cwd=work)
    archive = next(work.glob("*.deb"))
    members = [f"./boot/vmlinuz-{release}", f"./lib/modules/{release}/kernel"]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as tar:
        subprocess.run(["tar", "-x", "-C", work, *members], stdin=tar.stdout, check=True)
    drivers = dict(in_order(work / members[1]))
    made.mkdir()
    (work / members[0]).rename(made / "kernel")
    (made / "initrd").write_bytes(gzip.compress(b"".join(initial_files(drivers)), 1))


def in_order(modules: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each driver, after those that it depends on."""
    paths = {
        path.name.partition(".ko")[0].replace("-", "_"): path
        for path in modules.rglob("*.ko*")
    }  # fmt: skip
    loaded = set()

    def load(name: str) -> Iterator[tuple[str, bytes]]:
        name = name.replace("-", "_")
        if name in loaded or name not in paths:
            return
        loaded.add(name)
        content = paths[name].read_bytes()
        if paths[name].suffix == ".xz":
            content = lzma.decompress(content)
        # The section .modinfo is a list of strings that end in zero.
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in filter(None, depends[1].decode().split(",") if depends else ()):
            yield from load(other)
        yield name, content

    for name in DRIVERS:
        yield from load(name)


def initial_files(drivers: dict[str, bytes]) -> Iterator[bytes]:
    """Yield an archive of cpio's format "newc", which the kernel unpacks as its first /."""
    init = INIT.format(drivers=" ".join(drivers), path=PATH)
    folders = ("bin", "dev", "drivers", "host", "proc", "sys")
    entries = [(name, 0o040755, b"") for name in folders]
    entries.append(("bin/busybox", 0o100755, Path(find("busybox")).read_bytes()))
    entries += [(f"drivers/{name}", 0o100644, content) for name, content in drivers.items()]
    entries.append(("init", 0o100755, init.encode()))
    entries.append(("TRAILER!!!", 0, b""))
    for number, (name, mode, content) in enumerate(entries, start=1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield content + bytes(-len(content) % 4)
