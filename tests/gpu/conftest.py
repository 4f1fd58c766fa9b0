"""A platform for each test: the real GPU, else the fake one that LIGHTCKPT_FAKE_CUDA names."""

import os

import pytest
import torch

from platforms import Fake, Real

LIBRARY = os.environ.get("LIGHTCKPT_FAKE_CUDA")


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
def platform(monkeypatch):
    if LIBRARY:
        made = Fake(LIBRARY, monkeypatch)
    elif torch.cuda.is_available():
        made = Real()
    else:
        pytest.skip("no CUDA device; tests/test_fake_gpu.py runs this on a fake one")
    yield made
    made.finish()
