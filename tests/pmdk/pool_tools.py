"""Pools for tests, what is in them, and children that tell what happened to them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import pypmemobj
from pypmemobj._library import load

KIND = 7
LAYOUT = "tests"
SECONDS = 60


def make_pool(path: Path, size_bytes: int = pypmemobj.SIZE_MIN) -> pypmemobj.Pool:
    # Without the shutdown state, which PMDK from 2.1 on cannot keep on the file systems here.
    return pypmemobj.Pool.create(path, LAYOUT, size_bytes, shutdown_state=False)


def in_child(function: Callable[[], object]) -> str:
    """Run *function* in a forked child; return its result, or its exception, in words."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            said = repr(function())
        except BaseException as error:  # noqa: BLE001 - the parent is told
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)  # without a word from the parent's finalisers
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said
    return said


def skip_without_libpmemobj() -> None:
    """Skip the file that calls this, saying what is missing, where there is no libpmemobj."""
    try:
        load()
    except pypmemobj.LibraryNotFoundError as error:
        pytest.skip(str(error), allow_module_level=True)


def allocate(
    change: pypmemobj.Transaction, number: int, size_bytes: int = 64, kind: int = KIND
) -> pypmemobj.Object:
    """Return a new object with *number* as its first word."""
    thing = change.zalloc(size_bytes, kind)
    thing.view("Q")[0] = number
    return thing


def numbers(pool: pypmemobj.Pool, type_number: int) -> list[int]:
    """Return the first word of each object of a type, in order."""
    return sorted(thing.view("Q")[0] for thing in pool.objects(type_number))
