"""Set-ups that once resumed inexactly, or not at all, without a word; each must stay exact.

Goal: what a review found by trying unusual but legal training loops does not come back. Method:
short runs through the facade, restored into a fresh run and compared bit for bit.
"""

import collections
import copy
import io
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import lightckpt
from lightckpt import CheckpointWarning
from small_run import assert_same
from training import make, update

STEPS = 10


def everything(model, optimizer):
    """Copy parameters, the state of each, and which of them each group has."""
    parameters = list(model.parameters())
    state = [dict(optimizer.state.get(p, {})) for p in parameters]
    members = [
        [next(i for i, q in enumerate(parameters) if q is p) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    return copy.deepcopy((model.state_dict(), state, members))


def restored(path, make_run, steps=STEPS):
    """Restore a fresh run made by *make_run*; check the step, return its state."""
    model, optimizer = make_run(1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.restore() == steps
    return everything(model, optimizer)


def load_own_state_dict(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_state(model, optimizer):
    optimizer.state = collections.defaultdict(dict)


def replace_a_state_dict(model, optimizer):
    first = next(iter(model.parameters()))
    optimizer.state[first] = copy.deepcopy(optimizer.state[first])


def shorten_a_group(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]


def replace_a_module(model, optimizer):
    model[4] = copy.deepcopy(model[4])  # no optimizer owns it


@pytest.mark.parametrize(
    "change",
    [load_own_state_dict, forget_state, replace_a_state_dict, shorten_a_group, replace_a_module],
)
def test_containers_replaced_in_mid_run_are_followed(path, change):
    def fresh(seed):
        model, optimizer = make(seed)
        if change is replace_a_module:
            model.append(nn.Linear(2, 2))
        return model, optimizer

    model, optimizer = fresh(0)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for i in range(STEPS):
            update(model, optimizer, i)
            if i in (6, 8):
                change(model, optimizer)
            checkpointer.mark()
    assert_same(restored(path, fresh), everything(model, optimizer))


def test_names_in_angle_brackets_are_names(path):
    def fresh(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"<a>": nn.Linear(6, 2)})
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = fresh(0)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for _ in range(STEPS):
            model["<a>"](torch.randn(3, 6)).square().sum().backward()
            optimizer.step()
            checkpointer.mark()
    assert_same(restored(path, fresh), everything(model, optimizer))


def test_an_iteration_that_is_due_but_updates_nothing_is_stood_in_for_by_the_next(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, every=2) as checkpointer:
        made = []
        for step in range(8):
            if step % 2 == 0:  # the boundaries of steps 1, 3, 5, 7: none is a multiple of two
                update(model, optimizer, step)
            ticket = checkpointer.mark()
            made += [] if ticket.skipped else [ticket.step]
        assert made == [3, 5, 7]
        checkpointer.restore()
        update(model, optimizer, 8)
        assert not checkpointer.mark().skipped


def test_restore_takes_the_version_in_flight(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap"
    ) as checkpointer:
        for i in range(STEPS):
            update(model, optimizer, i)
            checkpointer.mark()
            assert checkpointer.restore() == i + 1


def test_a_step_that_raises_leaves_decoration_working(path):
    model, optimizer = make()
    checkpointer = lightckpt.protect(optimizer, path, model=model)
    for i in range(4):
        update(model, optimizer, i)

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    for i in range(4, 8):
        update(model, optimizer, i)
    assert checkpointer.wait() == 7
    checkpointer.close()


def test_decoration_sees_iterations_whose_forward_calls_are_all_in_closures(path):
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    checkpointer = lightckpt.protect(optimizer, path, model=model)
    for i in range(6):
        optimizer.step(closure)
        assert checkpointer.wait() == i
    checkpointer.close()


def test_decoration_warns_where_no_forward_call_ends_an_iteration(path):
    model, optimizer = make()
    model.eval()
    with lightckpt.protect(optimizer, path, model=model):
        update(model, optimizer, 0)
        with pytest.warns(CheckpointWarning, match="count as one iteration"):
            update(model, optimizer, 1)


def test_iterate_captures_generators_at_the_boundary_although_a_step_is_decorated(path):
    def train(start, stop, path):
        model, optimizer = make()
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.decorate(optimizer.step)
            losses = []
            assert checkpointer.restore() == start
            for step, _ in checkpointer.iterate(range(STEPS), start=start):
                if step == stop:
                    break
                losses.append(update(model, optimizer, step))
                torch.rand(3)
            return losses

    expected = train(0, STEPS, path + "-whole")
    train(0, 6, path)
    assert train(6, STEPS, path) == expected[6:]


class InferenceMomentum(torch.optim.Optimizer):
    """Makes its state in inference mode, where tensors have no version counter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.inference_mode()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["m"] = torch.zeros_like(parameter)
            state["m"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["m"], alpha=0.1)


def test_state_made_in_inference_mode_is_saved(path):
    def fresh(seed):
        model, _ = make(seed)
        return model, InferenceMomentum(model.parameters())

    model, optimizer = fresh(0)
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap"
    ) as checkpointer:
        for i in range(STEPS):
            update(model, optimizer, i)
            checkpointer.mark()
        checkpointer.restore()
    assert_same(restored(path, fresh), everything(model, optimizer))


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.device("meta")])
def test_restore_makes_ordinary_tensors_in_any_mode(path, mode):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
    fresh, other = make(1)
    other.state = {}  # as if emptied by hand
    with lightckpt.Checkpointer(path, model=fresh, optimizer=other) as checkpointer:
        with mode:
            assert checkpointer.restore() == 1
        assert_same(everything(fresh, other), everything(model, optimizer))
        update(fresh, other, 1)


def test_decoration_ends_no_iteration_while_the_model_holds_other_tensors(path):
    model, optimizer = make()
    x = torch.ones(2, 6)
    with lightckpt.protect(optimizer, path, model=model) as checkpointer:
        for i in range(3):
            update(model, optimizer, i)
            other = {name: 2 * p for name, p in model.named_parameters()}
            torch.func.functional_call(model, other, (x,))
            assert checkpointer.stats.iterations == i
    assert_same(restored(path, make, 3), everything(model, optimizer))


def test_a_watched_model_can_be_pickled_and_its_copies_are_not_watched(path):
    model, optimizer = make()
    with lightckpt.protect(optimizer, path, model=model) as checkpointer:
        update(model, optimizer, 0)
        torch.save(model, io.BytesIO())
        copy.deepcopy(model)(torch.ones(2, 6))
        assert checkpointer.stats.iterations == 0


# An interrupt that lands in a callback (gc, weakref, __del__) is reported there and swallowed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_a_run_that_goes_on(path):
    def interrupt(*_):
        raise KeyboardInterrupt

    delays = random.Random(0)
    model, optimizer = make()
    before = signal.signal(signal.SIGALRM, interrupt)
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap")
    try:
        for i in range(300):
            try:
                update(model, optimizer, i)
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(2e-6, 1e-3))
                checkpointer.mark()
                time.sleep(1)
            except KeyboardInterrupt:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    update(model, optimizer, 0)
    step = checkpointer.mark().step
    assert checkpointer.wait() == step
    checkpointer.close()
    assert_same(restored(path, make, step), everything(model, optimizer))


def test_a_forked_child_may_use_the_model_and_the_optimizer(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as c:
        for i in range(6):
            update(model, optimizer, i)
            c.mark()
        if (child := os.fork()) == 0:
            update(model, optimizer, 6)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


class Stream:
    """A numpy generator as an extra."""

    def __init__(self):
        self.generator = np.random.default_rng(7)

    def state_dict(self):
        return self.generator.bit_generator.state

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state


class Numbers(Dataset):
    def __init__(self, stream=None):
        self.stream = stream

    def __len__(self):
        return 12

    def __getitem__(self, k):
        noise = self.stream.generator.random() if self.stream else 0.0
        return torch.full((6,), float(k)) + noise


class Permuted(Sampler):
    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream.generator.permutation(12).tolist())

    def __len__(self):
        return 12


LOADERS = {
    "transform": lambda stream: DataLoader(Numbers(stream), batch_size=4, shuffle=True),
    "sampler": lambda stream: DataLoader(Numbers(), batch_size=4, sampler=Permuted(stream)),
    "persistent workers": lambda _: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def epochs_of(path, make_loader, stop, restore, again=False):
    """Train three epochs of three batches; return the sums of the batches, from the start on."""
    torch.manual_seed(1)
    stream = Stream()
    model, optimizer = make()
    loader = make_loader(stream)
    sums = []
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, extra={"stream": stream}, keep=9
    ) as checkpointer:
        start = checkpointer.restore() if restore else 0
        for attempt in range(1 + again):
            if attempt:
                checkpointer.wait()
                start, sums = checkpointer.restore(step=2), []
            for step, batch in checkpointer.iterate(loader, start=start, epochs=3):
                if step == stop and attempt == 0:
                    break
                sums.append((batch.sum().item(), torch.rand(1).item()))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    return sums


@pytest.mark.parametrize("stop", [2, 3, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_order_and_the_noise_of_batches_go_on(path, kind, stop):
    expected = epochs_of(path + "-whole", LOADERS[kind], None, restore=False)
    epochs_of(path, LOADERS[kind], stop, restore=False)
    assert epochs_of(path, LOADERS[kind], None, restore=True) == expected[stop:]


def test_persistent_workers_go_back_in_the_same_process(path):
    make_loader = LOADERS["persistent workers"]
    expected = epochs_of(path + "-whole", make_loader, None, restore=False)
    assert epochs_of(path, make_loader, 5, restore=False, again=True) == expected[2:]


def test_a_position_that_was_restored_is_not_used_after_training_went_on(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=9) as checkpointer:
        for step, _ in checkpointer.iterate(range(6)):
            update(model, optimizer, step)
        checkpointer.wait()
        step = checkpointer.restore(step=3)
        update(model, optimizer, step)
        checkpointer.mark()
        batches = [batch for _, batch in checkpointer.iterate(range(6), start=step + 1)]
        assert batches == list(range(6))
