"""Bytes of a version into tensors. Goal: whatever fails, nothing is under way into their memory
when the caller hears of it. Method: a store whose batches fail when they are waited for, or given.
"""

from types import SimpleNamespace

import pytest
import torch

from lightckpt import gpus
from lightckpt._core import Op
from lightckpt.errors import CorruptError, MediaError
from lightckpt.manifest import TensorEntry
from lightckpt.transfer import Target, write_targets

SIZES = (16, 16, 16)


class Store:
    """Batches are the numbers of a host's or a GPU's reading, and 9 of what is verified."""

    def __init__(self, *, fails=None, refuses=None, bad=()):
        self.fails, self.refuses, self.bad, self.waited = fails, refuses, bad, []

    def submit(self, op, spans, *, version):
        return self._take(9 if op is Op.VERIFY else gpus.HOST)

    def submit_on(self, device, *_, version):
        return self._take(device)

    def _take(self, batch):
        if batch == self.refuses:
            raise MediaError("it is not taken")
        return batch

    def open_device(self, ordinal):
        return SimpleNamespace(direct=True)

    def wait(self, batch):
        if batch not in self.waited:
            self.waited.append(batch)
        if batch == self.fails:
            raise MediaError(f"batch {batch} failed")
        return SimpleNamespace(bad=self.bad)


@pytest.fixture
def targets(monkeypatch):
    """One on the host, and two on GPUs."""
    names = {torch.Size([4]): gpus.HOST, torch.Size([2, 2]): 0, torch.Size([1, 4]): 1}
    monkeypatch.setattr(gpus, "ordinal_of", lambda tensor: names[tensor.shape])
    monkeypatch.setattr(gpus, "current_stream", lambda ordinal: 0)
    made = []
    for extent, shape in enumerate(names):
        tensor = torch.zeros(shape)
        entry = TensorEntry(("t", str(extent)), "float32", tuple(shape), tensor.stride(), extent)
        made.append(Target(entry, tensor))
    return made


@pytest.mark.parametrize("fails", [gpus.HOST, 0, 1, 9])
def test_the_others_are_waited_for_where_one_fails(targets, fails):
    store = Store(fails=fails)
    with pytest.raises(MediaError, match=f"batch {fails} failed"):
        write_targets(store, 1, SIZES, targets)
    assert sorted(store.waited) == [gpus.HOST, 0, 1, 9]


@pytest.mark.parametrize(("refuses", "taken"), [(0, [gpus.HOST]), (9, [gpus.HOST, 0, 1])])
def test_what_was_taken_is_waited_for_where_the_rest_is_not(targets, refuses, taken):
    store = Store(refuses=refuses)
    with pytest.raises(MediaError, match="not taken"):
        write_targets(store, 1, SIZES, targets)
    assert store.waited == taken


def test_damage_names_the_tensors(targets):
    with pytest.raises(CorruptError, match="bytes of t/1 differ"):
        write_targets(Store(bad=(1,)), 1, SIZES, targets)
