"""Fixtures of the conformance tests: where stores lie, where processes come from, the seed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zygote import FreshProcesses, Zygote


@pytest.fixture(scope="session")
def seed() -> int:
    """The number that every random choice follows from: of the environment, or drawn."""
    return int(os.environ.get("SEED") or random.SystemRandom().getrandbits(31))


@pytest.fixture
def store() -> Iterator[Path]:
    """A path for a store: in memory where there is some, since a store may take many pages."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="lightckpt-conformance-", dir=base))
    yield folder / "run"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "stderr")
    yield zygote
    zygote.close()


@pytest.fixture
def fresh_processes(tmp_path: Path) -> FreshProcesses:
    return FreshProcesses(tmp_path / "stderr")


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Building a case sets determinism and one thread for the process: take that back.

    What torch thinks of a case's habits is not the question; harness.py says which warnings are.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
