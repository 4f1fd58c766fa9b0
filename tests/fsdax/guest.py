"""What runs inside the machine, in one of its lives; vm.py starts it, as root, with their name.

    first  makes namespaces, file systems and stores, says what they are, and trains on all of them
           until the power is cut
    again  looks at what the first left, and trains on it until the power is cut once more
    last   looks again; then turns persistent memory into a NUMA node, and looks at that

Everything said goes out as a JSON document a line; "place" tells of which store. A step is
acknowledged when its commit has returned, and only then said so. No torch: it takes minutes here.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import termios
import time
import traceback
import tty
from collections.abc import Callable
from pathlib import Path

import places
import steps
from lightckpt._core import Catalog, Store
from lightckpt.doctor import diagnose
from lightckpt.errors import CheckpointError, FormatError
from lightckpt.reader import open_reader

LINE = "/dev/ttyS1"
FOLDER = Path(os.environ["TMPDIR"])
PLACES = (*places.FILE_SYSTEMS, "devdax")
WITH_CONTROL = ("ext4", "xfs")
STEPS = 8  # after so many all pages of a store have been touched; later ones repeat
FACTS = (
    "kind",
    "filesystem",
    "mount_options",
    "media",
    "granularity",
    "flush_method",
    "survives",
    "advice",
)
HEADER_BYTES = 64 << 10  # more than the header of a store and its slots

line = -1


def say(place: str, **facts: object) -> None:
    """Report; the line has left the machine before the next statement runs."""
    os.write(line, json.dumps({"place": place, **facts}).encode() + b"\n")
    termios.tcdrain(line)


def tried(work: Callable[..., None], place: str, *arguments: object) -> None:
    """Do *work*; if it fails, report how: the other places go on."""
    try:
        work(place, *arguments)
    except Exception as error:  # noqa: BLE001 - the host is told
        trace = traceback.format_exc(limit=-3)
        say(place, failed=work.__name__, error=f"{type(error).__name__}: {error}", trace=trace)


def path_at(place: str) -> Path:
    return Path(places.device_of(place)) if place == "devdax" else FOLDER / place / "store"


# What a place is.


def set_up(place: str) -> None:
    """Make the file system and an empty store in it."""
    if place != "devdax":
        places.mount(place, FOLDER, make=True)
    path = path_at(place)
    if place == "devdax":
        make_on_device(path)
    else:
        catalog = Catalog.PMEMOBJ if place == "catalog" else Catalog.LINES
        Store(path, create=True, size_bytes=steps.STORE_BYTES, catalog=catalog).close()
    tell(place)


def make_on_device(path: Path) -> None:
    """Make a store on a device DAX node: by the core if it can, else by the bytes of its header."""
    try:
        Store(path, create=True).close()
    except FormatError as error:
        say("devdax", not_formatted=str(error))
    else:
        return
    model = FOLDER / "model"
    Store(model, create=True).close()
    with path.open("rb+") as device:
        with mmap.mmap(device.fileno(), 2 << 20) as mapped:
            mapped[:HEADER_BYTES] = model.read_bytes()[:HEADER_BYTES]
    model.unlink()


def tell(place: str) -> None:
    """Report what doctor finds, of a file system by a store of its own."""
    path = path_at(place)
    found = diagnose(path if place == "devdax" else path.parent, measure=False).as_dict()
    say(place, facts={name: found[name] for name in FACTS})


# Training.


def train_all() -> None:
    """Train at all places at once, until the power goes."""
    tried(refuse, "virtio")
    for place in PLACES:
        if os.fork() == 0:
            tried(train, place)
            os._exit(0)
    while True:
        os.wait()


def train(place: str) -> None:
    path = path_at(place)
    with Store(path, workers=1) as store:
        info = store.info()
        say(place, sync=places.is_sync(path), granularity=info.granularity.name, bytes=info.bytes)
        first = 1 + max((version.step for version in store.versions()), default=0)
        control = path.with_name(f"control-{first}")
        if place in WITH_CONTROL:
            steps.make_control(control)
        if place != "virtio":
            steps.forbid_syncs()
        for step in range(first, first + STEPS):
            steps.commit(store, place, step)
            say(place, acknowledged=step)
        if place in WITH_CONTROL:
            # The store has all its pages by now: it asks for no journal that would hold this too.
            steps.write_control(control, place)
        say(place, armed=True)
        for step in range(first + STEPS, first + 10_000):
            steps.commit(store, place, step)
            say(place, acknowledged=step)


def refuse(place: str) -> None:
    """Show that without MAP_SYNC a commit needs msync: it fails where that is forbidden."""
    path = path_at(place).with_name("refused")
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        tried(commit_without_sync, place, path)
        os._exit(0)
    os.waitpid(child, 0)


def commit_without_sync(place: str, path: Path) -> None:
    store = Store(path, create=True, size_bytes=steps.STORE_BYTES)
    steps.forbid_syncs()
    try:
        steps.commit(store, place, 1)
    except CheckpointError as error:
        say(place, refused=f"{type(error).__name__}: {error}")
    else:
        say(place, refused="")


# After a power cut.


def look(place: str) -> None:
    """Mount, and report the versions that are there, and what is wrong with their bytes."""
    if place != "devdax":
        places.mount(place, FOLDER, make=False)
    path = path_at(place)
    if place == "catalog":
        places.run("pmempool", "check", f"{path}.catalog")
        say(place, checked=True)
    if place in WITH_CONTROL:
        newest = max(path.parent.glob("control-*"), key=lambda one: int(one.name.split("-")[1]))
        say(place, control=steps.left_of_control(newest, place))
    with open_reader(path, workers=1) as store:
        for version in store.versions():
            say(place, found=version.step, wrong=steps.damage_of(store, place, version))
    tell(place)


def look_at_memory(place: str) -> None:
    """Make a store on the memory of a node without processors, and say where its pages lie."""
    folder = places.make_memory_node(FOLDER)
    say(place, node_bytes=places.node_bytes())
    path = folder / "store"
    with Store(path, create=True, size_bytes=steps.STORE_BYTES) as store:
        steps.commit(store, place, 1)
        found = diagnose(path, measure=False).as_dict()
        say(place, facts={name: found[name] for name in FACTS})
        say(place, pages=places.pages_by_node(path))
        for version in store.versions():
            say(place, found=version.step, wrong=steps.damage_of(store, place, version))


def first() -> None:
    places.make_namespaces()
    for place in PLACES:
        tried(set_up, place)
    train_all()


def again() -> None:
    for place in PLACES:
        tried(look, place)
    train_all()


def last() -> None:
    for place in PLACES:
        tried(look, place)
    tried(look_at_memory, "memory")


def main(life: str) -> None:
    """Open the line and live."""
    global line
    line = os.open(LINE, os.O_WRONLY | os.O_NOCTTY)
    tty.setraw(line)
    say("guest", up=time.clock_gettime(time.CLOCK_BOOTTIME), kernel=os.uname().release)
    tried(lambda _: {"first": first, "again": again, "last": last}[life](), "guest")
    say("guest", ended=life)


if __name__ == "__main__":
    main(sys.argv[1])
