"""A small training run, for tests that need a store with something in it: made in milliseconds."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightckpt

MEMORY = Path("/dev/shm")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Give a folder where stores are quick, and remove it."""
    base = MEMORY if os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="lightckpt-test-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def make_model(width: int = 16) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


class SmallRun:
    """A model, its optimizer and a checkpointer; ``states`` has a deep copy of every step's."""

    def __init__(self, path: Path, *, width: int = 16, **options: object) -> None:
        self.path = path
        self.model = make_model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.width = width
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.step = 0
        self.checkpointer = lightckpt.Checkpointer(
            path, model=self.model, optimizer=self.optimizer, **options
        )

    def update(self) -> float:
        batch = torch.randn(8, self.width)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, steps: int) -> "SmallRun":
        """Do so many steps, and wait until the last is durable."""
        for _ in range(steps):
            self.update()
            self.step += 1
            self.checkpointer.mark()
            self.states[self.step] = clones(self.model.state_dict())
        self.checkpointer.wait()
        return self

    def close(self) -> None:
        self.checkpointer.close()


def save(path: Path, *, update: Callable[[], object] | None = None, **objects: Any) -> None:
    """Save one version of *objects* at *path*, after *update* if given, and close the store."""
    with lightckpt.Checkpointer(path, **objects) as checkpointer:
        if update is not None:
            update()
        elif isinstance(objects.get("optimizer"), torch.optim.Optimizer):
            objects["optimizer"].step()
        checkpointer.mark()
        checkpointer.wait()


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(one: Any, other: Any) -> None:
    """Assert that two trees are equal, with the same types, and tensors bit for bit."""
    if isinstance(other, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_same(one[key], value)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert type(one) is type(other)
        assert one == other


def flip_bit(path: Path, needle: bytes) -> None:
    """Flip a bit in the middle of where the bytes *needle* lie in the file *path*."""
    data = path.read_bytes()
    at = data.find(needle)
    assert at >= 0, "the bytes to damage are not in the file"
    with open(path, "r+b") as file:
        file.seek(at + len(needle) // 2)
        file.write(bytes([data[at + len(needle) // 2] ^ 1]))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def visible(folder: Path) -> list[str]:
    """Name what is in *folder*, but for the lock files that the core leaves."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))
