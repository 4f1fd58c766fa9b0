"""What tests of pypmemobj share: a pool to work on, and a second opinion on what is left of it."""

import shutil
import subprocess

import pytest

import pypmemobj
from pool_tools import SECONDS, make_pool


@pytest.fixture
def path(tmp_path):
    """A place for a pool on a plain file, removed afterwards: pytest keeps such folders."""
    yield tmp_path / "pool"
    shutil.rmtree(tmp_path)


@pytest.fixture
def pool(path):
    """An open pool of the smallest size."""
    with make_pool(path) as pool:
        yield pool


@pytest.fixture
def root(pool):
    """A root of eight words, durably 1."""
    root = pool.root(64)
    root.write((1).to_bytes(8, "little") * 8)
    return root


@pytest.fixture
def sound():
    """Whether ``pmempool check``, where there is one, and pypmemobj find nothing wrong."""

    def sound(path):
        consistent = pypmemobj.check(path)
        if shutil.which("pmempool") is not None:
            command = ["pmempool", "check", "-v", path]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            assert (done.returncode == 0) == consistent, done.stdout + done.stderr
        return consistent

    return sound
