"""Decoration: one line on an optimizer's step makes every update durable, exactly.

Goal: whatever has been put around the step, before or after, its optimizer is found; and a version
holds what followed the update, but the generators as they were at it. Method: short runs through
`protect`, restored into fresh objects and compared bit for bit.
"""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import lightckpt
from small_run import assert_same
from training import make, state_of, update

STEPS = 9


def plain(optimizer):
    pass


def scheduled(optimizer):
    return StepLR(optimizer, 100)


def scheduled_twice(optimizer):
    return StepLR(optimizer, 100), ExponentialLR(optimizer, 1.0)


def compiled(optimizer):
    optimizer.step = torch.compile(optimizer.step, backend="eager")


def wrapped(optimizer):
    inner = optimizer.step

    @functools.wraps(inner)
    def step(*args, **kwargs):
        return inner(*args, **kwargs)

    optimizer.step = step


def scheduled_then_wrapped(optimizer):
    scheduler = scheduled(optimizer)
    wrapped(optimizer)
    return scheduler


def scheduled_then_compiled(optimizer):
    scheduler = scheduled(optimizer)
    compiled(optimizer)
    return scheduler


AROUND = [
    plain,
    scheduled,
    scheduled_twice,
    wrapped,
    scheduled_then_wrapped,
    pytest.param(compiled, marks=pytest.mark.slow),
    pytest.param(scheduled_then_compiled, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", ["decorate", "protect"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("around", AROUND)
def test_a_step_is_found_whatever_is_put_around_it(path, around, when, way):
    model, optimizer = make()
    made = around(optimizer) if when == "before" else None
    if way == "protect":
        checkpointer = lightckpt.protect(optimizer, path, model=model)
    else:
        checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer)
        step = optimizer.step
        assert checkpointer.decorate(step) is step
    made = around(optimizer) if when == "after" else made
    for i in range(4):
        update(model, optimizer, i)
    checkpointer.close()
    final = state_of(model, optimizer)
    assert checkpointer.stats.iterations == 4
    model, optimizer = make(1)
    with lightckpt.protect(optimizer, path, model=model) as checkpointer:
        assert checkpointer.restore() == 4
    assert_same(state_of(model, optimizer), final)
    del made


def test_a_step_that_was_taken_before_others_were_put_around_it_is_found(path):
    model, optimizer = make()
    bound = optimizer.step
    scheduler = StepLR(optimizer, 1)
    of_scheduler = optimizer.step
    wrapped(optimizer)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for step in (bound, of_scheduler, functools.partial(of_scheduler)):
            checkpointer.decorate(step)
    del scheduler


def test_a_scheduler_of_another_optimizer_of_the_class_is_not_mistaken(path):
    model, optimizer = make()
    _, other = make()
    schedulers = StepLR(optimizer, 1), StepLR(other, 1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        with pytest.raises(TypeError, match="the optimizer itself will do"):
            checkpointer.decorate(other.step)
        with pytest.raises(ValueError, match="was not given to the Checkpointer"):
            checkpointer.decorate(other)
    del schedulers


class Passing(torch.optim.Optimizer):
    """Passes calls on to another optimizer, as Accelerate's wrapper does: no __init__, no hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("way", ["mark", "decorate", "protect"])
def test_an_optimizer_that_only_passes_calls_on_is_that_inside(path, way):
    model, inner = make()
    optimizer = Passing(Passing(inner))
    if way == "protect":
        checkpointer = lightckpt.protect(optimizer, path, model=model)
    else:
        checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer)
    if way == "decorate":
        checkpointer.decorate(optimizer.step)
    for i in range(4):
        update(model, optimizer, i)
        if way == "mark":
            checkpointer.mark()
    checkpointer.close()
    final = state_of(model, inner)
    model, inner = make(1)
    with lightckpt.Checkpointer(path, model=model, optimizer=inner) as checkpointer:
        assert checkpointer.restore() == 4
    assert_same(state_of(model, inner), final)


def test_one_with_state_of_its_own_that_cannot_be_watched_is_refused(path):
    class Averaging(Passing):
        state = None  # instead of the inner one's

    model, optimizer = make()
    with pytest.raises(TypeError, match=r"Averaging never called Optimizer\.__init__"):
        lightckpt.Checkpointer(path, model=model, optimizer=Averaging(optimizer))


class Average:
    """An average of the weights, updated behind the step."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.values[name].lerp_(p, 0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


class Loader:
    """Yields noise of a generator of its own, and goes on where it was."""

    def __init__(self):
        self._generator, self.taken = np.random.default_rng(5), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.taken += 1
        return torch.from_numpy(self._generator.standard_normal((4, 6), dtype=np.float32))

    def state_dict(self):
        return {"taken": self.taken, "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state):
        self.taken, self._generator.bit_generator.state = state["taken"], state["generator"]


class Noise:
    """What a transform draws from: neither iterated nor indexed."""

    def __init__(self):
        self._python = random.Random(3)

    def draw(self):
        return self._python.random()

    def state_dict(self):
        return {"python": self._python.getstate()}

    def load_state_dict(self, state):
        self._python.setstate(state["python"])


class History(dict):
    """Losses by step: iterable, but holds values and is drawn from by nobody."""

    def state_dict(self):
        return {"items": list(self.items())}

    def load_state_dict(self, state):
        self.update(state["items"])


def extras_of(model):
    return {
        "average": Average(model),
        "loader": Loader(),
        "noise": Noise(),
        "history": History(),
        "swa": nn.Sequential(nn.Linear(6, 12)),  # a module can be iterated, too
    }


def train_with_extras(model, optimizer, extras, steps):
    for i in steps:
        batch = next(extras["loader"]) + extras["noise"].draw()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        extras["average"].update(model)
        extras["history"][i] = loss.item()
        with torch.no_grad():
            extras["swa"][0].weight.lerp_(model[0].weight, 0.2)
    return copy.deepcopy(
        (state_of(model, optimizer), {n: e.state_dict() for n, e in extras.items()})
    )


@pytest.mark.parametrize("stop", ["close", "killed"])
def test_extras_are_of_the_boundary_and_what_batches_are_drawn_from_of_the_update(path, stop):
    model, optimizer = make()
    extras = extras_of(model)
    torch.manual_seed(2)
    at_five = train_with_extras(model, optimizer, extras, range(5))
    expected = train_with_extras(model, optimizer, extras, range(5, STEPS))

    model, optimizer = make()
    extras = extras_of(model)
    torch.manual_seed(2)
    checkpointer = lightckpt.protect(optimizer, path, model=model, extra=extras)
    train_with_extras(model, optimizer, extras, range(5))
    if stop == "killed":  # within the next iteration, after its forward
        model(next(extras["loader"]) + extras["noise"].draw())
        checkpointer.wait()
        checkpointer._close(ended=False)
    checkpointer.close()

    model, optimizer = make(1)
    extras = extras_of(model)
    with lightckpt.protect(optimizer, path, model=model, extra=extras) as checkpointer:
        assert checkpointer.restore() == 5
        found = state_of(model, optimizer), {n: e.state_dict() for n, e in extras.items()}
        assert_same(found, at_five)
        assert_same(train_with_extras(model, optimizer, extras, range(5, STEPS)), expected)


def train_scaled(model, optimizer, scaler, steps, bad):
    losses = []
    for i in steps:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        scaler.scale(loss * (float("inf") if i in bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop", range(1, 8))
def test_an_update_that_a_scaler_skips_is_an_iteration(path, stop):
    def fresh(seed):
        model, optimizer = make(seed)
        torch.manual_seed(7 + seed)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    bad = (2, 3, 6)
    expected = train_scaled(*fresh(0), range(STEPS), bad)
    model, optimizer, scaler = fresh(0)
    with lightckpt.protect(optimizer, path, model=model, scaler=scaler):
        assert train_scaled(model, optimizer, scaler, range(stop), bad) == expected[:stop]
    model, optimizer, scaler = fresh(1)
    with lightckpt.protect(optimizer, path, model=model, scaler=scaler) as checkpointer:
        start = checkpointer.restore()
        # The version before a skipped update leads to the same state as one after it.
        assert start == max(i for i in range(stop + 1) if i - 1 not in bad)
        found = train_scaled(model, optimizer, scaler, range(start, STEPS), bad)
        assert found == expected[start:]
