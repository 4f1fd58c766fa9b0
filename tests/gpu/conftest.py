"""A platform for each test: the real GPU, else the fake one that LIGHTCKPT_FAKE_CUDA names; what a
machine does not have is the reason why a test is left out.
"""

import os
import shutil

import pytest
import torch

from platforms import Fake, Real
from small_run import MEMORY
from ways import skip_unless_open

LIBRARY = os.environ.get("LIGHTCKPT_FAKE_CUDA")
ROOM_BYTES = 60 << 20  # of memory that the store of a test may need, by its own estimate


def pytest_addoption(parser, pluginmanager):
    """Let the limit that pyproject.toml sets stand where pytest-timeout is not installed."""
    if not any(map(pluginmanager.hasplugin, ("timeout", "pytest_timeout"))):
        parser.addini("timeout", "seconds; of pytest-timeout")


@pytest.fixture
def fake(monkeypatch):
    """Make a fake platform with options, and finish it; skips on a real device."""
    if not LIBRARY:
        pytest.skip("only a driver of our own can be told to do this")
    made = []

    def make(**options):
        while made:
            made.pop().finish()  # the next one forgets what this one found
        made.append(Fake(LIBRARY, monkeypatch, **options))
        return made[0]

    yield make
    while made:
        made.pop().finish()


@pytest.fixture
def platform(request, monkeypatch):
    """A platform of one device, or of as many as its parameter says."""
    devices = getattr(request, "param", 1)
    if LIBRARY:
        made = Fake(LIBRARY, monkeypatch, devices=devices)
    elif (there := torch.cuda.device_count()) >= devices:
        made = Real()
    elif there == 0:
        pytest.skip("no CUDA device; tests/test_fake_gpu.py runs this on a fake one")
    else:
        pytest.skip(f"it needs {devices} CUDA devices; this machine has {there}")
    yield made
    made.finish()


@pytest.fixture
def path(folder):
    """A place for a store in memory, which has room for it."""
    if not folder.is_relative_to(MEMORY):
        pytest.skip(f"{MEMORY} cannot be written to, and copy engines reach no plain file")
    if (free := shutil.disk_usage(folder).free) < ROOM_BYTES:
        pytest.skip(f"{MEMORY} has {free:,} bytes left, of {ROOM_BYTES:,} that a store may need")
    return folder / "store"


@pytest.fixture
def way(request, platform, path):
    """A way out of the GPU that is open here."""
    return skip_unless_open(request.param, path.parent)


@pytest.fixture
def direct(platform, path):
    """The way of copy engines that reach the store."""
    return skip_unless_open("direct", path.parent)
