"""Goal: pypmemobj installs and imports where there is no PMDK, and then says what to install.

Method: a library name that is nowhere, a library that is another's, a fresh interpreter.
"""

import pickle
import subprocess
import sys

import pytest

import pypmemobj
from pool_tools import SECONDS
from pypmemobj._library import Library


def test_a_missing_library_is_an_error_that_names_the_package():
    with pytest.raises(pypmemobj.LibraryNotFoundError, match=r"no\.such\.1 .*install libpmemobj1"):
        Library("no.such.1")


def test_the_library_is_not_opened_by_the_import():
    code = "import pypmemobj; print('libpmemobj' in open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "False\n"


def test_an_error_survives_pickling():
    error = pypmemobj.PoolBusyError("there", 11, "in use")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno) == (type(error), "there: in use", 11)


def test_a_wrong_argument_is_refused_before_the_library_is_looked_for(tmp_path):
    for size in (0, 1 << 20, 1 << 63):
        with pytest.raises(ValueError, match=f"size_bytes is {size}"):
            pypmemobj.Pool.create(tmp_path / "pool", "x", size)


def test_what_is_exported_is_there_and_documented():
    for name in pypmemobj.__all__:
        assert getattr(pypmemobj, name).__doc__, name
