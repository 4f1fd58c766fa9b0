"""Stores that older releases have made stay readable.

Goal: what a user has on disk is restored, bit for bit, by this release, and written on. Method: one
store for each format since 0.1.0 lies in tests/data, with what its steps hold as JSON beside it.
"""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import lightckpt

DATA = Path(__file__).parent / "data"
STORES = sorted(path.name.removesuffix(".gz") for path in DATA.glob("store-*.gz"))


@pytest.fixture(params=STORES)
def old(request, path):
    """An old store, unpacked, and what each of its steps holds."""
    with gzip.open(DATA / f"{request.param}.gz") as packed, open(path, "wb") as store:
        shutil.copyfileobj(packed, store)
    steps = json.loads((DATA / f"{request.param}.json").read_text(encoding="utf-8"))
    return path, {int(step): values for step, values in steps.items()}


def make():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_there_is_one_for_each_format():
    assert STORES == ["store-0.1.0"]


def test_each_step_is_restored_bit_for_bit(old):
    path, steps = old
    for step, values in sorted(steps.items(), reverse=True):
        model, optimizer = make()
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=2) as checkpointer:
            assert checkpointer.restore(step) == step
        assert model.weight.tolist() == values["weight"]
        assert model.bias.tolist() == values["bias"]
        assert optimizer.state[model.weight]["exp_avg"].tolist() == values["exp_avg"]
        assert torch.get_rng_state().sum().item() == values["rng"]


def test_it_is_written_on(old):
    path, steps = old
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=2) as checkpointer:
        newest = checkpointer.restore()
        assert newest == max(steps)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpointer.mark()
        assert checkpointer.wait() == newest + 1
    assert lightckpt.load(path)["step"] == newest + 1
