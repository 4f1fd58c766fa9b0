"""Changes with and without an update: which of them a boundary makes a version of.

Goal: what a training script changed is in a version, and no version cuts a sum of gradients in two
without a word. Method: short runs on tmpfs that change one thing at a time.
"""

import warnings

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import CheckpointWarning
from small_run import assert_same
from training import make, state_of, update


def batch_norm(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def calibrate(model, optimizer):
    with torch.no_grad():
        model(torch.randn(8, 6))


def replace_a_weight(model, optimizer):
    model[0].weight.data = torch.randn(4, 6)


def load(model, optimizer):
    model.load_state_dict(batch_norm(5)[0].state_dict())


@pytest.mark.parametrize("zero_grad", ["before", "after", "in place"])
@pytest.mark.parametrize("change", [calibrate, replace_a_weight, load])
@pytest.mark.parametrize("mode", ["overlap", "stop"])
def test_what_is_changed_without_an_update_gets_a_version(path, change, mode, zero_grad):
    model, optimizer = batch_norm()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode=mode) as c:
        for i in range(8):
            update(model, optimizer, i)
            if zero_grad != "before":
                optimizer.zero_grad(set_to_none=zero_grad == "after")
            assert not c.mark().skipped
        assert c.mark().skipped
        c.wait()
        change(model, optimizer)
        ticket = c.mark()
        assert ticket.wait() == ticket.step == 10
        assert c.mark().skipped
    final = state_of(model, optimizer)
    model, optimizer = batch_norm(1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode=mode) as c:
        assert c.restore() == 10
        assert_same(state_of(model, optimizer), final)
        change(model, optimizer)
        assert c.mark().wait() == 11


@pytest.mark.parametrize("zero_grad", ["before", "after", "in place"])
def test_buffers_that_change_while_gradients_wait_make_no_version(path, zero_grad):
    model, optimizer = batch_norm()
    made = []
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=4) as c:
        for i in range(1, 17):
            if i % 4 == 1 and zero_grad == "before":
                optimizer.zero_grad()
            model(torch.randn(8, 6)).square().sum().backward()
            if i % 4 == 0:
                optimizer.step()
                if zero_grad != "before":
                    optimizer.zero_grad(set_to_none=zero_grad == "after")
            made += [i] * (not c.mark().skipped)
        assert made == [4, 8, 12, 16]
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.zero_grad()  # given up: nothing waits any more, but the buffers have changed
        assert not c.mark().skipped


def test_an_update_by_hand_has_gradients_that_wait_as_well(path):
    model, _ = batch_norm()
    head, body = list(model[2].parameters()), list(model[0].parameters())
    optimizer = torch.optim.SGD(head, lr=0.05)
    made = []
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=4) as c:
        for i in range(1, 13):
            model(torch.randn(8, 6)).square().sum().backward()
            if i % 4 == 0:
                optimizer.step()
                with torch.no_grad():
                    for parameter in body:
                        parameter.sub_(parameter.grad, alpha=0.05)
            if i % 4 == 0:
                optimizer.zero_grad()  # and not those of the body
            elif i % 4 == 1:
                for parameter in head:
                    parameter.grad = None  # as if the head had none
            made += [i] * (not c.mark().skipped)
        assert made == [4, 8, 12]
        c.wait()
        calibrate(model, optimizer)
        assert not c.mark().skipped


def two_windows(path, **options):
    models = {"a": make()[0], "b": make(1)[0]}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    with lightckpt.Checkpointer(path, model=models, optimizer=optimizers, **options) as c:
        for i in range(1, 13):
            sum(model(torch.randn(4, 6)).square().sum() for model in models.values()).backward()
            for name, every in (("a", 1), ("b", 4)):
                if i % every == 0:
                    optimizers[name].step()
                    optimizers[name].zero_grad()
            c.mark()


def test_sums_of_gradients_that_versions_do_without_are_told_of_once(path):
    with pytest.warns(CheckpointWarning, match="optimizer b adds gradients up .* grads=True") as w:
        two_windows(path)
    assert len([at for at in w if issubclass(at.category, CheckpointWarning)]) == 1


@pytest.mark.parametrize("options", [{"grads": True}, {"every": 4}])
def test_sums_of_gradients_that_no_version_does_without_are_not_told_of(path, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        two_windows(path, **options)


def test_optimizers_in_turn_are_not_taken_for_sums(path):
    """As where one of two opponents is trained, and gradients reach the other as well."""
    model, first = make()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(),
        lightckpt.Checkpointer(path, model=model, optimizer={"a": first, "b": second}) as c,
    ):
        warnings.simplefilter("error", CheckpointWarning)
        for i in range(12):
            update(model, first if i // 2 % 2 else second, i)
            c.mark()


def test_what_opponents_have_of_each_other_is_not_looked_into(path, monkeypatch):
    """Nothing needs to know whether it is zero: it is taken away before its update."""
    models = {"a": make()[0], "b": make(1)[0]}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    looked = []
    to_bool = torch.Tensor.__bool__
    with lightckpt.Checkpointer(path, model=models, optimizer=optimizers) as c:
        for i in range(12):
            own = "b" if i % 2 else "a"
            optimizers[own].zero_grad()
            output = models["b"](models["a"](torch.randn(4, 6)).repeat(1, 3))
            output.square().sum().backward()
            optimizers[own].step()
            with monkeypatch.context() as patched:
                patched.setattr(
                    torch.Tensor, "__bool__", lambda one: looked.append(one) or to_bool(one)
                )
                assert not c.mark().skipped
    assert looked == []


def test_the_first_gradient_that_is_not_zero_is_the_last_that_is_looked_into(path, monkeypatch):
    model, optimizer = batch_norm()
    looked = []
    any_of = torch.Tensor.any
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as c:
        for i in range(1, 13):  # before the first update nothing was changed by hand
            model(torch.randn(8, 6)).square().sum().backward()
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            with monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "any", lambda one: looked.append(one) or any_of(one))
                assert bool(c.mark().skipped) == (i % 4 > 0)
    assert len(looked) == 6


def test_gradients_that_came_as_zeros_are_no_sum(path):
    """As those of what a model did not use in this iteration."""
    models = {"a": make()[0], "b": make(1)[0]}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    with (
        warnings.catch_warnings(),
        lightckpt.Checkpointer(path, model=models, optimizer=optimizers) as c,
    ):
        warnings.simplefilter("error", CheckpointWarning)
        for i in range(12):
            models["a"](torch.randn(4, 6)).square().sum().backward()
            (models["b"](torch.randn(4, 6)).sum() * (i % 2)).backward()
            for name in ("a", "b") if i % 2 else ("a",):
                optimizers[name].step()
                optimizers[name].zero_grad()
            assert not c.mark().skipped
            optimizers["b"].zero_grad(set_to_none=False)


def test_tensors_that_take_a_name_later_are_followed(path):
    model, optimizer = make()
    tensors = {"hidden": torch.zeros(2)}
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, tensors=tensors) as c:
        for i in range(6):
            update(model, optimizer, i)
            tensors["hidden"] = model(torch.ones(6)).detach() + tensors["hidden"]
            c.mark()
        tensors["other"] = torch.ones(3)  # makes a version, too
        assert not c.mark().skipped
        del tensors["other"]
        tensors["hidden"] = None
        with pytest.warns(CheckpointWarning, match="failed: tensors.'hidden'. is a NoneType"):
            assert c.mark().skipped
        with pytest.raises(lightckpt.CheckpointError, match="hidden"):
            c.wait()
        tensors["hidden"] = expected = torch.arange(2.0)
        assert not c.mark().skipped
    model, optimizer = make(1)
    tensors = {"hidden": torch.ones(2)}
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, tensors=tensors) as c:
        assert c.restore() == 9
        assert_same(tensors["hidden"], expected)
