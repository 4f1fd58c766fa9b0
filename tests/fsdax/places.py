"""Places for stores in the guest: namespaces of its NVDIMMs, and what is made on them.

The first NVDIMM is split into two namespaces for file systems; the second into a device DAX node
and one that becomes plain memory of NUMA node 1, as memory behind CXL does. The virtio-pmem device
holds a file system too: DAX, but the host has to be asked for durability, so no MAP_SYNC.

The journals are told to sleep: with what the kernel writes back by itself every few seconds, a
store that forgot to ask for durability would look durable.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

MIB = 1 << 20
# Names of namespaces, kept in the label areas. 400 MiB: mkfs.xfs makes none below 300.
NAMESPACES = {
    "ext4": ("0", "fsdax", 400 * MIB),
    "xfs": ("1", "fsdax", 400 * MIB),
    "devdax": ("2", "devdax", 256 * MIB),
    "memory": ("3", "devdax", 512 * MIB),
    "catalog": ("4", "fsdax", 160 * MIB),  # a store whose slots are in a libpmemobj pool
}
# Which NVDIMM each lies on: their regions are told apart by their NUMA nodes.
DIMM = {"ext4": 0, "xfs": 0, "catalog": 0, "devdax": 1, "memory": 1}
FILE_SYSTEMS = ("ext4", "xfs", "catalog", "virtio")
MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-m", "reflink=0"),
}
OPTIONS = {"ext4": "dax,commit=600", "xfs": "dax"}
XFS_SYNC = Path("/proc/sys/fs/xfs/xfssyncd_centisecs")
ASLEEP = "720000"
DIMMS, VIRTIO = "ACPI.NFIT", "virtio-pmem"  # the names of their buses
NODE = 1
RUN_SECONDS = 120


def run(*command: str) -> str:
    """Run a program of the host and return what it printed."""
    ended = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=RUN_SECONDS
    )
    if ended.returncode != 0:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}")
    return ended.stdout


def listed(*arguments: str) -> list[dict[str, Any]]:
    """Return what ndctl lists."""
    found = json.loads(run("ndctl", "list", *arguments) or "[]")
    return found if isinstance(found, list) else [found]


def make_namespaces() -> None:
    """Split the NVDIMMs of a machine that is on for the first time."""
    for command in ("disable-region", "init-labels", "enable-region"):
        run("ndctl", command, "-b", DIMMS, "all")
    region_of = {}
    for region in listed("-R", "-b", DIMMS):
        node = Path("/sys/bus/nd/devices", region["dev"], "target_node")
        region_of[int(node.read_text())] = region["dev"]
    for name, (_, mode, size) in NAMESPACES.items():
        run("ndctl", "create-namespace", "-r", region_of[DIMM[name]], "-m", mode, "-M", "mem",
            "-s", str(size), "-n", name)  # fmt: skip


def device_of(name: str) -> str:
    """Return the node of what lies at *name*."""
    if name == "virtio":
        found = listed("-N", "-b", VIRTIO)
    else:
        found = [one for one in listed("-N") if one.get("name") == name]
    if not found:
        raise OSError(f"no namespace {name}: {run('ndctl', 'list', '-N', '-R')}")
    node = found[0].get("blockdev") or found[0].get("chardev")
    if node is None:
        raise OSError(f"namespace {name} has no device: {found[0]}")
    return f"/dev/{node}"


def mount(name: str, folder: Path, *, make: bool) -> Path:
    """Mount the file system at *name* with DAX, made anew if asked, and return the mount point."""
    kind = "xfs" if name == "xfs" else "ext4"
    device = device_of(name)
    if make:
        run(*MAKE[kind], device)
    point = folder / name
    point.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", OPTIONS[kind], device, str(point))
    if kind == "xfs":
        XFS_SYNC.write_text(ASLEEP)
    return point


def make_memory_node(folder: Path) -> Path:
    """Turn the fourth namespace into memory of a node of its own; mount a tmpfs that takes it."""
    node = Path(device_of("memory")).name
    drivers = Path("/sys/bus/dax/drivers")
    Path("/sys/devices/system/memory/auto_online_blocks").write_text("online_movable")
    (drivers / "device_dax" / "unbind").write_text(node)
    (drivers / "kmem" / "new_id").write_text(node)
    if not (drivers / "kmem" / node).exists():
        (drivers / "kmem" / "bind").write_text(node)
    point = folder / "memory"
    point.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size=64m,mpol=bind:{NODE}", "memory", str(point))
    return point


def node_bytes() -> int:
    """Return how much memory the memory node has; 0 if there is no such node."""
    try:
        lines = Path(f"/sys/devices/system/node/node{NODE}/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[3]) << 10 for line in lines if "MemTotal" in line)


def pages_by_node(path: Path) -> dict[str, int]:
    """Return on which nodes the pages lie that this process has mapped of *path*."""
    counts: dict[str, int] = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        words = line.split()
        if f"file={path}" in words:
            for word in words:
                node, equals, count = word.partition("=")
                if equals and node[0] == "N" and node[1:].isdigit():
                    counts[node] = counts.get(node, 0) + int(count)
    return counts


def is_sync(path: Path) -> bool:
    """Tell whether the kernel has a mapping of *path* down as MAP_SYNC ("sf" in VmFlags)."""
    flags: list[set[str]] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if inside:
                flags.append(set(line.split()[1:]))
        elif not line.split()[0].endswith(":"):
            inside = line.endswith(f" {path}")
    return bool(flags) and all("sf" in one for one in flags)
