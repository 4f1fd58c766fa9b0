"""Names do not depend on the wrappers around a module, and never collide."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

import lightckpt
from lightckpt.names import held_tensors, named_modules, wrappers_in


def names(model):
    return [held.name for held in held_tensors(model)]


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_wrappers_leave_no_trace_at_any_depth():
    plain = names(net())
    assert names(nn.DataParallel(net())) == plain
    assert names(torch.compile(nn.DataParallel(net()), backend="eager")) == plain
    assert names(Wrapper(Wrapper(net()))) == plain
    outer = nn.ModuleDict({"a": Wrapper(net())})
    assert names(outer) == ["a." + name for name in plain]


def test_a_module_called_module_beside_others_keeps_its_name():
    model = Wrapper(nn.Linear(1, 1))
    model.register_buffer("count", torch.zeros(1))
    assert names(model) == ["count", "module.weight", "module.bias"]


def test_names_that_would_be_equal_stay_apart():
    inner = nn.Linear(1, 1, bias=False)
    model = nn.Module()
    model._orig_mod = nn.Module()
    model._orig_mod.lin = nn.Linear(1, 1, bias=False)
    model.lin = inner
    found = names(model)
    assert len(found) == len(set(found)) == 2


def test_tied_tensors_are_listed_under_each_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    held = {h.name: h.tensor for h in held_tensors(model)}
    assert held["a.weight"] is held["b.weight"]


def test_shared_modules_are_visited_once_and_their_tensors_have_every_name():
    part = nn.Linear(1, 1, bias=False)
    model = nn.ModuleList([part, part])
    assert [name for name, _ in named_modules(model)] == ["", "0"]
    assert names(model) == ["0.weight", "1.weight"] == list(model.state_dict())


def test_persistence_is_known():
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("lost", torch.zeros(1), persistent=False)
    assert {h.name: h.persistent for h in held_tensors(model)} == {"kept": True, "lost": False}


def test_a_wrapper_has_a_name_of_its_own_and_the_wrapped_keeps_the_bare_one():
    model = nn.ModuleDict({"a": Wrapper(Wrapper(nn.Linear(1, 1))), "b": nn.Linear(1, 1)})
    assert [name for name, _ in named_modules(model)] == ["", "a''", "a'", "a", "b"]
    assert wrappers_in(model) == {"a''": "a", "a'": "a"}


def test_a_mode_of_what_is_wrapped_is_that_of_a_wrapper_that_is_new(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        checkpointer.mark()
    wrapped = Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    with lightckpt.Checkpointer(path, model=wrapped) as checkpointer:
        checkpointer.restore()
    assert [module.training for module in wrapped.modules()] == [False] * 4


@pytest.mark.parametrize("mode", [2, 1, 0, None, "x"])
def test_a_mode_that_is_no_bool_comes_back_as_what_it_meant(path, mode):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].training = mode
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()
        checkpointer.restore()
    assert model[1].training is bool(mode)


def test_modes_are_set_where_none_can_be_read(path):
    """A frozen TorchScript module tells no mode; old and new state stay whole."""
    script = torch.jit.script(nn.Dropout().eval())
    with lightckpt.Checkpointer(path, model=nn.Sequential(nn.Linear(2, 2), script)) as checkpointer:
        checkpointer.mark()
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.freeze(script))
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        assert checkpointer.restore() == 1


def test_a_lazy_parameter_of_ones_own_takes_a_saved_one(path):
    class Lazy(UninitializedTensorMixin, nn.Parameter):
        cls_to_become = nn.Parameter

        def __new__(cls):
            return torch.Tensor._make_subclass(cls, torch.empty(0), True)

    model = nn.Linear(2, 2)
    model.register_parameter("own", nn.Parameter(torch.ones(3)))
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        checkpointer.mark()
    model = nn.Linear(2, 2)
    model.register_parameter("own", Lazy())
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        checkpointer.restore()
    assert type(model.own) is nn.Parameter
    assert torch.equal(model.own, torch.ones(3))
