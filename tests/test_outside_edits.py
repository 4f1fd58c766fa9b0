"""Weights that are edited behind torch's back, while they are copied, never make a damaged version.

Goal: an edit that no version counter shows (by a numpy view in another thread, as Hogwild makes it)
decides which bytes a version has; it never makes one that its own checksums refuse.
Method: a thread that edits all the time; every acknowledged version is verified by a reader.
"""

import threading

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import reader


def damaged(path):
    """Return the names of the newest version's tensors that differ from their checksums."""
    with reader.open_reader(path) as store:
        version = reader.must_pin(store, path)
        return reader.verify(store, version, reader.read_manifest(store, version))


@pytest.mark.parametrize("mode", ["overlap", "stop"])
@pytest.mark.filterwarnings("ignore::lightckpt.CheckpointWarning")  # dropped where it was noticed
def test_an_acknowledged_version_has_the_bytes_of_its_checksums(path, mode):
    model = nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    inputs = torch.randn(4, 512)
    view = model[0].weight.detach().numpy()
    editing, stop = threading.Event(), threading.Event()

    def edit():
        editing.wait(60)
        value = 0
        while not stop.is_set():
            value += 1
            view[...] = value % 2

    editor = threading.Thread(target=edit)
    editor.start()
    acknowledged = 0
    try:
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode=mode) as ckpt:
            for step in range(1, 30):
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 10:  # by then the weights are trusted, and copied behind the boundary
                    editing.set()
                ckpt.mark()
                if ckpt.wait() == step:
                    acknowledged += 1
                    assert damaged(path) == []
    finally:
        editing.set()
        stop.set()
        editor.join(60)
    assert not editor.is_alive()
    assert acknowledged >= 10
