"""Further cases about what is no tensor of the model: extras, loaders, generators, extra state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cases
from cases import Run, data, regress, simple
from registry import Registry

HOST_STATE = Registry()
case = HOST_STATE.case


# Extras.


class LiveStatistics:
    """Hands out the tensors it goes on changing, and keeps those it is given."""

    def __init__(self, seed: int) -> None:
        self.mean = torch.zeros(4) + seed
        self.table = {"counts": torch.zeros(3, dtype=torch.int64), "last": [self.mean]}
        self.history = np.zeros(5, dtype=np.float32)
        self.seen = np.int64(seed)

    def update(self, x: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.table["counts"][int(self.seen) % 3] += 1
        self.history[int(self.seen) % 5] += float(self.mean[0])
        self.seen = np.int64(self.seen + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, **self.table, "history": self.history, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.history, self.seen = state["mean"], state["history"], state["seen"]
        self.table = {"counts": state["counts"], "last": state["last"]}


@case(
    "an extra whose state_dict() returns its live tensors and arrays",
    "copied at the boundary; what load_state_dict() is given is writable and its own to keep, and "
    "what was one tensor is one again",
    care=("alias",),
)
def extra_with_live_tensors(seed: int) -> Run:
    net = nn.Linear(4, 4)
    stats = LiveStatistics(seed)
    run = Run()
    run.extras["stats"] = stats

    def loss(i: int) -> torch.Tensor:
        x = data(i, 8, 4)
        stats.update(x)
        shift = stats.table["last"][0] + float(stats.history.sum()) * 0.01
        return functional.mse_loss(net(x - shift), data(i, 8, 4, salt=1))

    return simple(run, net, torch.optim.SGD(net.parameters(), lr=0.05), loss)


class Everything:
    """Holds whatever it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state


@case(
    "an extra of nested dicts, lists and tuples with every plain type of value",
    "types exact: tuple stays tuple, int keys stay int, bool is not int, arrays keep their dtype",
)
def extra_of_all_types(seed: int) -> Run:
    net = nn.Linear(4, 4)
    extra = Everything({"k": seed})
    run = Run()
    run.extras["all"] = extra

    def after(i: int) -> None:
        t = data(i, 3, 4)
        extra.value = {
            "k": i,
            "floats": [0.1 * i, float("inf"), -0.0, 5e-324, 1.7976931348623157e308],
            "ints": (i, -(2**63), 2**64 + i, True, False, None),
            "text": "\u00e9\n\x00\U0001f600" * i,
            "bytes": bytes(range(i)),
            "complex": complex(i, -0.0),
            7: {(1, "a"): [], "deep": [[[{"x": ({},)}]]], None: 0.5, True: 1},
            "arrays": [np.arange(i, dtype=k) for k in ("u2", "i8", "f2", "c8", ">i4")],
            "flags": np.array([[True], [False]]),
            "fortran": np.asfortranarray(t.numpy().copy()),
            "scalars": (np.float16(i), np.uint64(2**63 + i), np.bool_(i % 2)),
            "tensors": {"t": t.t(), "zero": torch.zeros(()), "bf": t.bfloat16(), "none": t[:0]},
            "torch": (torch.float16, torch.device("cpu")),
        }

    def loss(i: int) -> torch.Tensor:
        return regress(net, i, 4, 4) * (1 + extra.value["k"])

    return simple(run, net, torch.optim.SGD(net.parameters(), lr=0.05), loss, after)


# Data and generators.


class Reservoir:
    """A replay buffer sampled by generators of its own, Python's and numpy's."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.items: list[torch.Tensor] = []

    def draw(self, new: torch.Tensor) -> torch.Tensor:
        self.items.append(new)
        if len(self.items) > 4:
            self.items.pop(self.python.randrange(5))
        self.python.gauss(0, 1)  # an odd number of these leaves one in store
        weights = self.numpy.random(len(self.items), dtype=np.float32)
        return sum(w * item for w, item in zip(weights, self.items, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {
            "python": self.python.getstate(),
            "numpy": self.numpy.bit_generator.state,
            "items": list(self.items),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.python.setstate(state["python"])
        self.numpy.bit_generator.state = state["numpy"]
        self.items = list(state["items"])


@case(
    "a replay buffer that grows, with random.Random and numpy Generator of its own",
    "nested tuples of Python's state come back as tuples, 128-bit ints of numpy's exactly",
    care=("rng",),
)
def replay_buffer(seed: int) -> Run:
    net = nn.Linear(4, 4)
    reservoir = Reservoir(seed)
    run = Run()
    run.extras["reservoir"] = reservoir

    def loss(i: int) -> torch.Tensor:
        return functional.mse_loss(net(reservoir.draw(data(i, 8, 4))), data(i, 8, 4, salt=1))

    return simple(run, net, torch.optim.SGD(net.parameters(), lr=0.05), loss)


@case(
    "a shuffled loader with worker processes, in the middle of an epoch",
    "the order goes on; workers forked beside the engine's threads neither hold nor harm the store",
    care=("order",),
    n1=6,
    n2=4,
)
def loader_workers(seed: int) -> Run:
    # Workers seed their augmentation from the epoch's base seed and their number: exact as well.
    return cases.loader_case(seed, 2)


@case(
    "dropout, and a generator under two names",
    "the global stream goes on, and the generator is where it was, once",
    care=("rng",),
)
def generators(seed: int) -> Run:
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.RReLU(), nn.Linear(16, 2))
    own = torch.Generator().manual_seed(seed)
    run = Run()
    run.rng = True
    run.generators.update(noise=own, mask=own)

    def loss(i: int) -> torch.Tensor:
        keep = torch.bernoulli(torch.full((8, 4), 0.8), generator=own)
        return functional.mse_loss(net(data(i, 8, 4) * keep), data(i, 8, 2, salt=1))

    return simple(run, net, torch.optim.SGD(net.parameters(), lr=0.05), loss)


class Counter(nn.Module):
    """Keeps what it needs in get_extra_state(): a tensor, a tuple, and a subclass's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.scale, self.turn = torch.ones(3) + seed, (seed, "start")

    def get_extra_state(self) -> Any:
        return (self.scale, {"turn": self.turn})

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.turn = state[0], state[1]["turn"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.97)
        self.turn = (self.turn[0] + 1, "on")
        return x * self.scale * (1 + 0.01 * self.turn[0])


@case(
    "extra state of nested modules: live tensors and tuples, two of one class",
    "each module gets its own back, with the same types, copied at the boundary",
)
def extra_state_of_submodules(seed: int) -> Run:
    net = nn.Sequential(nn.Linear(4, 3), Counter(seed), nn.Linear(3, 3), Counter(2 * seed))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 3))
