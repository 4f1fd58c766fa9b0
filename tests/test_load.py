"""Loading a version without its objects. Goal: what comes is what was saved, in torch's own shapes.

Method: small runs in memory; what `load` gives is compared bit for bit with deep copies made while
training, and with torch's own state dicts.
"""

import pathlib

import numpy as np
import pytest
import torch
from torch import nn

import lightckpt
from small_run import SmallRun, assert_same, save


@pytest.fixture
def store(folder):
    return folder / "store"


@pytest.fixture
def run(store):
    run = SmallRun(store, keep=2)
    yield run
    run.close()


def test_a_model_takes_what_was_loaded(run):
    run.train(3)
    state = lightckpt.load(run.path)
    assert state["step"] == 3
    assert_same(state["model"], run.states[3])
    other = SmallRun(run.path.with_name("other"))
    other.model.load_state_dict(state["model"])
    assert_same(other.model.state_dict(), run.model.state_dict())
    other.close()


def test_the_optimizer_state_is_in_torchs_own_format(run):
    run.train(3)
    loaded = lightckpt.load(run.path)["optimizer"]
    assert_same(loaded, run.optimizer.state_dict())


def test_training_goes_on_from_it_bit_for_bit(run):
    run.train(3)
    state = lightckpt.load(run.path)
    other = SmallRun(run.path.with_name("other"))
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    losses = []
    for one in (run, other):
        torch.manual_seed(11)
        losses.append([one.update() for _ in range(3)])
    assert losses[0] == losses[1]
    assert_same(other.model.state_dict(), run.model.state_dict())
    other.close()


def test_every_step_that_is_kept_can_be_loaded(run):
    run.train(5)
    for step in run.checkpointer.steps():
        assert_same(lightckpt.load(run.path, step)["model"], run.states[step])


def test_kinds_given_by_name_come_by_name(store):
    models = {"a": nn.Linear(2, 2), "b": nn.Linear(3, 3)}
    optimizers = {
        "x": torch.optim.SGD(models["a"].parameters(), lr=0.1, momentum=0.9),
        "y.z": torch.optim.Adam(models["b"].parameters()),
    }

    def update():
        for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()

    save(store, update=update, model=models, optimizer=optimizers)
    state = lightckpt.load(store)
    for name, model in models.items():
        assert_same(state["model"][name], model.state_dict())
    for name, optimizer in optimizers.items():
        assert_same(state["optimizer"][name], optimizer.state_dict())
    assert state["members"]["x"] == [["model/a/weight", "model/a/bias"]]


def test_all_kinds_of_state_come(store):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    class Counter:
        def state_dict(self):
            return {"seen": 5, "array": np.arange(3), "tensor": torch.ones(2)}

        def load_state_dict(self, state):
            raise AssertionError

    save(
        store, model=model, optimizer=optimizer, scheduler=scheduler, scaler={"s": scaler},
        extra={"counter": Counter()}, tensors={"loose": torch.arange(4.0)},
        generators={"g": torch.Generator().manual_seed(3)},
    )  # fmt: skip
    state = lightckpt.load(store)
    assert state["scheduler"] == scheduler.state_dict()
    assert state["scaler"] == {"s": scaler.state_dict()}
    assert state["extra"]["counter"]["seen"] == 5
    np.testing.assert_array_equal(state["extra"]["counter"]["array"], np.arange(3))
    assert_same(state["extra"]["counter"]["tensor"], torch.ones(2))
    assert_same(state["tensors"], {"loose": torch.arange(4.0)})
    assert_same(state["rng"]["own"]["g"], torch.Generator().manual_seed(3).get_state())
    assert {"torch", "python", "numpy"} <= state["rng"].keys()


def test_parameters_that_no_model_holds_and_gradients_come(store):
    parameter = nn.Parameter(torch.arange(3.0))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([parameter, *model.parameters()], lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    save(store, model=model, optimizer=optimizer, grads=True)
    state = lightckpt.load(store)
    assert_same(state["unnamed"], {"optimizer/0/0": parameter.detach()})
    assert_same(state["grads"]["model/model/weight"], model.weight.grad)
    assert state["members"]["optimizer"][0][0] == "group/optimizer/0/0"


class Awkward(nn.Module):
    """Tensors of every kind that has a place of its own in a version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.tied = self.weight
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("column", torch.randn(6, 50)[:, 3])
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("absent", None)

    def get_extra_state(self):
        return {"counter": 4}

    def set_extra_state(self, state):
        self.seen = state


def test_awkward_tensors_come_as_state_dict_has_them(store):
    model = nn.ModuleDict({"inner": Awkward()})
    save(store, model=model)
    state = lightckpt.load(store)
    expected = model.state_dict()
    assert state["model"].keys() == expected.keys()
    assert state["model"].pop("inner._extra_state") == expected.pop("inner._extra_state")
    for name, tensor in expected.items():
        loaded = state["model"][name]
        assert not loaded.requires_grad
        assert_same(loaded.to_dense(), tensor.to_dense())
    assert_same(state["nonpersistent"], {"inner.hidden": model["inner"].hidden})
    fresh = nn.ModuleDict({"inner": Awkward()})
    fresh["inner"].wide = torch.randn(4, 3)  # torch itself cannot load into an expanded tensor
    fresh.load_state_dict(lightckpt.load(store)["model"])
    assert fresh["inner"].seen == {"counter": 4}
    assert_same(fresh["inner"].column, model["inner"].column)


def test_tied_weights_come_back_as_one_storage(store):
    model = Awkward()
    save(store, model=model)
    state = lightckpt.load(store)["model"]
    one, other = (state[name].untyped_storage() for name in ("weight", "tied"))
    assert one._cdata == other._cdata
    state["weight"].zero_()
    assert_same(state["tied"], torch.zeros(4, 3))


def test_lazy_modules_that_saw_no_batch_stay_lazy(store):
    model = nn.Sequential(nn.LazyLinear(3))
    save(store, model=model)
    loaded = lightckpt.load(store)["model"]
    assert all(nn.parameter.is_lazy(tensor) for tensor in loaded.values())
    nn.Sequential(nn.LazyLinear(3)).load_state_dict(loaded)


def test_a_subclass_comes_as_its_inner_tensors(store):
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    save(store, model=model)
    assert_same(
        lightckpt.load(store)["model"], {"weight": {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}}
    )


class Unusual(torch.optim.SGD):
    """Keeps values that are no tensors, and state that belongs to no parameter."""

    def step(self, closure=None):
        super().step(closure)
        first, second = self.param_groups[0]["params"]
        self.state[first]["note"] = ("text", 3)
        self.state[second] = 17
        self.state["shared"] = torch.arange(2)
        self.state["count"] = 9


class Outer(torch.optim.SGD):
    """Holds another optimizer, as wrappers do."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.inner = torch.optim.Adam(parameters)
        super().__init__(parameters, lr=0.1)


def test_optimizer_state_of_any_kind_keeps_its_place(store):
    model = nn.Linear(2, 2)
    optimizer = Unusual(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    save(store, model=model, optimizer=optimizer)
    assert_same(lightckpt.load(store)["optimizer"], optimizer.state_dict())


def test_param_names_come_if_the_optimizer_had_them(store):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    save(store, model=model, optimizer=optimizer)
    (group,) = lightckpt.load(store)["optimizer"]["param_groups"]
    assert group["param_names"] == ["weight", "bias"]


def test_a_nested_optimizer_of_a_single_one_comes_apart(store):
    model = nn.Linear(2, 2)
    optimizer = Outer(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    save(store, update=optimizer.inner.step, model=model, optimizer=optimizer)
    state = lightckpt.load(store)
    assert state["optimizer"].keys() == {"state", "param_groups"}
    assert_same(state["nested"]["optimizer.inner"], optimizer.inner.state_dict())
    named = store.with_name("named")
    save(named, update=optimizer.step, model=model, optimizer={"o": optimizer})
    state = lightckpt.load(named)
    assert state["nested"] == {}
    assert state["optimizer"].keys() == {"o", "o.inner"}


@pytest.mark.parametrize("device", [False, True])
def test_tensors_of_a_device_are_copies(trained, monkeypatch, device):
    """A reader of a device DAX node may not write to what it maps, and a user may to a tensor."""
    monkeypatch.setattr(pathlib.Path, "is_char_device", lambda _: device)
    state = lightckpt.load(trained.path)
    tensor = next(iter(state["model"].values()))
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if str(trained.path) in line]
    mapped = any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in ranges)
    assert mapped is not device
    tensor.fill_(1)
