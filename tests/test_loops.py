"""What `iterate` goes through: private generators, several sources, sources of a single use.

Goal: after a restore the same batches come in the same order, or an error says why they cannot.
Method: runs over six numbers in batches of two, stopped and started again, against one that was
not stopped.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

import lightckpt
from lightckpt import CheckpointWarning
from training import make, update


class Six(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, k):
        return float(k)


class Noisy(Six):
    def __init__(self):
        self.noise = np.random.default_rng(3)

    def __getitem__(self, k):
        return k + self.noise.random()


class Order:
    """A sampler with a random order from a generator of its own, under whatever name."""

    def __init__(self, generator):
        self._own = generator

    def __len__(self):
        return 6

    def __iter__(self):
        order = list(range(6))
        if isinstance(self._own, random.Random):
            self._own.shuffle(order)
        elif isinstance(self._own, np.random.BitGenerator):
            np.random.Generator(self._own).shuffle(order)
        elif isinstance(self._own, torch.Generator):
            order = torch.randperm(6, generator=self._own).tolist()
        else:
            self._own.shuffle(order)
        return iter(order)


class Batches(Order):
    def __len__(self):
        return 3

    def __iter__(self):
        order = list(super().__iter__())
        yield from (order[k : k + 2] for k in (0, 2, 4))


class Bar:
    """A progress bar, say."""

    def __init__(self, within, name="iterable"):
        setattr(self, name, within)
        self._name = name

    def __iter__(self):
        yield from getattr(self, self._name)


def shuffled():
    return DataLoader(Six(), 2, shuffle=True, generator=torch.Generator().manual_seed(5))


def sampled(generator):
    return DataLoader(Six(), 2, sampler=Order(generator))


LOADERS = {
    "generator": shuffled,
    "iterable": lambda: Bar(shuffled()),
    "loader": lambda: Bar(shuffled(), "loader"),
    "dataloader in a bar": lambda: Bar(Bar(shuffled(), "dataloader")),
    "batch sampler": lambda: DataLoader(Six(), batch_sampler=Batches(torch.Generator())),
    "its sampler": lambda: DataLoader(
        Six(), batch_sampler=BatchSampler(Order(random.Random(4)), 2, False)
    ),
    "random.Random": lambda: sampled(random.Random(4)),
    "numpy Generator": lambda: sampled(np.random.default_rng(4)),
    "numpy RandomState": lambda: sampled(np.random.RandomState(4)),
    "numpy BitGenerator": lambda: sampled(np.random.PCG64(4)),
    "torch Generator": lambda: sampled(torch.Generator().manual_seed(4)),
    "dataset": lambda: DataLoader(Noisy(), 2),
    "sampler itself": lambda: Order(random.Random(4)),
    "SystemRandom unused": lambda: Bar([1.0, 2.0, 3.0], "iterable"),
}


def run(path, phases, stop=None, epochs=3):
    """Train over the sources *phases*; return (step, batch) of each iteration that ended."""
    model, optimizer = make()
    seen = []
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        done = checkpointer.restore()
        for source in phases:
            for step, batch in checkpointer.iterate(source, start=done, epochs=epochs):
                if step == stop:
                    return seen
                update(model, optimizer, step)
                seen.append((step, batch.tolist() if torch.is_tensor(batch) else batch))
                done = step + 1
    return seen


@pytest.mark.parametrize("stop", [1, 3, 4, 8])
@pytest.mark.parametrize("kind", LOADERS)
def test_private_generators_go_on(path, kind, stop):
    expected = run(path + "-whole", [LOADERS[kind]()])
    assert run(path, [LOADERS[kind]()], stop) == expected[:stop]
    assert run(path, [LOADERS[kind]()]) == expected[stop:]


def test_a_generator_without_state_is_left_alone(path):
    bar = Bar([1.0, 2.0])
    bar.secure = random.SystemRandom()
    assert [batch for _, batch in run(path, [bar], epochs=1)] == [1.0, 2.0]


FIRST, SECOND, THIRD = [0, 1, 2], [10, 11], [20, 21, 22]


@pytest.mark.filterwarnings("ignore:iterate.. yields nothing")
@pytest.mark.parametrize("stop", range(1, 16))
def test_sources_that_were_gone_through_yield_nothing(path, stop):
    phases = [FIRST, SECOND, THIRD]
    expected = run(path + "-whole", phases, epochs=2)
    assert len(expected) == 16
    assert run(path, phases, stop, epochs=2) == expected[:stop]
    assert run(path, phases, epochs=2) == expected[stop:]


def test_that_a_source_yields_nothing_is_said(path):
    run(path, [FIRST, SECOND], stop=7, epochs=2)
    with pytest.warns(CheckpointWarning, match="number 1 of those .* number 2 was reached"):
        run(path, [FIRST, SECOND], epochs=2)


@pytest.mark.parametrize("stop", [2, 3, 5, 6])
@pytest.mark.parametrize(("once", "fresh"), [(None, False), (None, True), (1, False)])
def test_a_loop_of_ones_own_over_epochs_goes_on(path, fresh, once, stop):
    def train(path, stop=None):
        model, optimizer = make()
        seen, loader = [], shuffled()
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
            step = checkpointer.restore()
            # A version at an epoch's end is still of that epoch, whose rest is empty.
            for _ in range(max(0, step - 1) // 3, 4):
                if fresh:
                    loader = DataLoader(Six(), 2, shuffle=True)
                for at, batch in checkpointer.iterate(loader, start=step, epochs=once):
                    if at == stop:
                        return seen
                    update(model, optimizer, at)
                    seen.append((at, batch.tolist()))
                    step = at + 1
        return seen

    torch.manual_seed(1)
    expected = train(path + "-whole")
    torch.manual_seed(1)
    assert train(path, stop) == expected[:stop]
    assert train(path) == expected[stop:]


@pytest.mark.parametrize("mode", ["overlap", "stop"])
def test_going_back_within_a_later_source_does_not_need_the_earlier_ones(path, mode):
    model, optimizer = make()
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, keep=9, mode=mode
    ) as checkpointer:
        for source, start in ((FIRST, 0), (SECOND, 3)):
            for step, _ in checkpointer.iterate(source, start=start, epochs=1):
                update(model, optimizer, step)
        checkpointer.wait()
        start = checkpointer.restore(step=4)
        assert list(checkpointer.iterate(SECOND, start=start, epochs=1)) == [(4, 11)]
        checkpointer.wait()
        start = checkpointer.restore(step=2)
        with pytest.raises(ValueError, match=r"from source number 1 .* this is number 2"):
            checkpointer.iterate(SECOND, start=start, epochs=1)
        assert list(checkpointer.iterate(FIRST, start=start, epochs=1)) == [(2, 2)]


def numbers():
    yield from range(12)


@pytest.mark.parametrize("wrap", [lambda source: source, Bar])
@pytest.mark.parametrize("make_source", [numbers, lambda: iter(range(12)), lambda: zip(range(12))])
def test_what_can_be_gone_through_once_does_not_go_back(path, make_source, wrap):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=9) as checkpointer:
        source = wrap(make_source())
        taken = []
        for step, batch in checkpointer.iterate(source):
            if step == 5:
                break
            update(model, optimizer, step)
            taken.append(batch)
        checkpointer.wait()
        start = checkpointer.restore(step=3)
        with pytest.raises(ValueError, match=r"give iterate\(\) a new one"):
            checkpointer.iterate(source, start=start)
        again = checkpointer.iterate(wrap(make_source()), start=start)
        assert next(again) == (3, taken[3])


def test_it_may_go_on_where_it_is_without_going_back(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        source = numbers()
        for step, _ in checkpointer.iterate(source):
            if step == 5:
                break
            update(model, optimizer, step)
        assert next(checkpointer.iterate(source, start=5)) == (5, 6)
