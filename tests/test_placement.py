"""Tensors of host state that were on a device that is not here. Goal: a store with such is whole,
it loads on the cpu, and a run gets them where it is itself; a device that does not take one is no
damage. Method: stores whose learning rates say that they were on a GPU, and devices by name.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import collect
from lightckpt.capture import Run
from lightckpt.errors import CheckpointError, FormatError
from lightckpt.hoststate import Blob
from lightckpt.placement import Placement, beside
from lightckpt.remake import fill_loose
from lightckpt.tensors import decode_leaf, encode_leaf
from small_run import assert_same, make_model, save

LR = 0.0625


def encode_as_of_a_gpu(value):
    blob = encode_leaf(value)
    return None if blob is None else Blob(blob.meta | {"device": "cuda:3"}, blob.data)


@pytest.fixture
def path(folder, monkeypatch):
    """A store whose newest version has a learning rate, and an extra, of a GPU that is not here."""
    path = folder / "store"
    with monkeypatch.context() as patched:
        patched.setattr(collect, "encode_leaf", encode_as_of_a_gpu)
        save(path, **objects(lr=torch.tensor(LR)))
    return path


class Average:
    """An extra that keeps what it is given."""

    def __init__(self, value=0.0):
        self.value = torch.full((3,), value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Odd:
    """What only a pickle can hold."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"odd": self}

    def load_state_dict(self, state):
        self.tensor = state["odd"].tensor


def objects(**options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.5} | options)
    return {"model": model, "optimizer": optimizer, "extra": {"average": Average(2.0)}}


def leaf(device, **more):
    part = {"dtype": "float32", "shape": [], "offset": 0}
    return {"kind": "tensor", "parts": [part], "device": device, **more}


def run_on(*names):
    """A run whose only parameters are on these devices."""
    members = [SimpleNamespace(device=torch.device(name)) for name in names]
    return Run(optimizers={"o": SimpleNamespace(param_groups=[{"params": members}])})


def test_a_store_from_a_gpu_loads_on_the_cpu(path):
    state = lightckpt.load(path)
    [group] = state["optimizer"]["param_groups"]
    assert_same(group["lr"], torch.tensor(LR))
    assert_same(state["extra"]["average"]["value"], torch.full((3,), 2.0))


def test_the_command_line_reads_it(path, folder, call):
    to = ("--to", folder / "it.pt")
    for command in (("show", path), ("verify", path), ("export", path, *to)):
        code, _, err = call(*command)
        assert code == 0, err


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
def test_a_run_elsewhere_gets_it_where_it_is(path, lr):
    run = objects(lr=lr)
    with lightckpt.Checkpointer(path, **run) as checkpointer:
        assert checkpointer.restore() == 1
    [group] = run["optimizer"].param_groups
    assert_same(group["lr"], torch.tensor(LR))
    assert (group["lr"] is lr) == isinstance(lr, torch.Tensor)  # others may hold on to it
    assert_same(run["extra"]["average"].value, torch.full((3,), 2.0))


def test_extras_in_the_middle_of_an_epoch_as_well(path, folder, monkeypatch):
    monkeypatch.setattr(collect, "encode_leaf", encode_as_of_a_gpu)
    run = objects()
    with lightckpt.Checkpointer(folder / "loop", **run) as checkpointer:
        for step, _ in checkpointer.iterate(range(5)):
            run["optimizer"].step()
            if step == 2:
                break
    run = objects()
    with lightckpt.Checkpointer(folder / "loop", **run) as checkpointer:
        start = checkpointer.restore()
        assert [batch for _, batch in checkpointer.iterate(range(5), start)] == [2, 3, 4]


@pytest.mark.parametrize(
    ("devices", "was", "now"),
    [
        ([], "cuda:3", "cpu"),
        (["cpu"], "cuda:3", "cpu"),
        (["cuda:1", "cuda:3"], "cuda:3", "cuda:3"),
        (["cpu", "cuda:1", "cuda:2"], "cuda:3", "cuda:1"),
        (["cuda:1"], "mps:0", "cpu"),
    ],
)
def test_what_was_on_a_device_goes_to_one_that_the_run_is_on(devices, was, now):
    placement = Placement(run_on(*devices))
    assert placement.device_for(torch.device(was)) == torch.device(now)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_a_leaf_is_put_there_whole(kind):
    run = Run(models={"m": nn.Linear(2, 2, device="meta")}, tensors={"none": None})
    meta = leaf("meta", requires_grad=True, parameter=kind is nn.Parameter)
    made = Placement(run).decode(meta, memoryview(bytes(4)))
    assert type(made) is kind
    assert made.is_leaf
    assert made.requires_grad
    assert made.device == torch.device("meta")
    assert decode_leaf(meta, memoryview(bytes(4))).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["no such device", "cuda:-7", 5, None])
def test_a_device_that_is_none_is_damage(device):
    with pytest.raises(FormatError, match="a tensor inside host state"):
        decode_leaf(leaf(device), memoryview(bytes(4)))


def test_a_device_without_room_is_no_damage(path, monkeypatch):
    def refuse(self, *_):
        raise RuntimeError("CUDA out of memory")

    run = objects()
    with lightckpt.Checkpointer(path, **run) as checkpointer:
        monkeypatch.setattr(torch.Tensor, "to", refuse)
        with pytest.raises(CheckpointError, match="was on cuda:3, cannot be put on cpu") as caught:
            checkpointer.restore()
        assert type(caught.value) is CheckpointError
        monkeypatch.undo()
        assert checkpointer.restore() == 1


@pytest.mark.parametrize("location", ["cuda:3", "cuda:0", "cpu"])
def test_a_tensor_in_a_pickle_comes_on_the_cpu(folder, monkeypatch, location):
    path, extra = folder / "store", {"odd": Odd(torch.arange(3.0))}
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: location)
        save(path, extra=extra, allow_pickle=True)
    assert_same(
        lightckpt.load(path, allow_pickle=True)["extra"]["odd"]["odd"].tensor, torch.arange(3.0)
    )
    extra["odd"].tensor = None
    with lightckpt.Checkpointer(path, extra=extra, allow_pickle=True) as checkpointer:
        assert checkpointer.restore() == 1
    assert_same(extra["odd"].tensor, torch.arange(3.0))


class Somewhere:
    """Stands for a tensor on a device."""

    def __init__(self, device):
        self.device, self.grad = device, None

    def to(self, device):
        return "moved to", device


def test_what_has_an_owner_goes_where_that_is():
    saved, owner, on_cpu = Somewhere("there"), Somewhere("here"), torch.ones(1)
    assert beside(saved, [owner]) == ("moved to", "here")
    assert beside(saved, []) is saved
    assert beside(on_cpu, [owner]) is on_cpu
    optimizer = SimpleNamespace(state={owner: {}})
    places = {("model", "m", "w"): owner}
    paths = (["grad", "model", "m", "w"], ["state", "o", "seen", "model", "m", "w"])
    fill_loose(
        {"loose": [[path, saved] for path in paths]}, Run(optimizers={"o": optimizer}), places
    )
    assert owner.grad == optimizer.state[owner]["seen"] == ("moved to", "here")


def test_tensors_are_on_the_cpu_whatever_is_the_default(folder):
    path = folder / "store"
    save(path, **objects(lr=torch.tensor(LR)))
    with torch.device("meta"):
        state = lightckpt.load(path)
    assert state["optimizer"]["param_groups"][0]["lr"].device == torch.device("cpu")
    assert all(tensor.device == torch.device("cpu") for tensor in state["model"].values())
