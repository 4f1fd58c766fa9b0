"""A small run on a GPU, whose state after each step is known."""

from itertools import count

import torch
from torch import nn

import lightckpt

SIZES = ((300, 1000), (7,), (1,), (64, 64), (1500, 1000), *[(3,)] * 40)


class Model(nn.Module):
    """Parameters of many sizes, and a buffer that every forward changes.

    Of several devices, the first two parameters are on the first, and all others on the last.
    """

    def __init__(self, platform, devices=1):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.platform = platform
        for index, size in enumerate(SIZES):
            values = platform.tensor(
                torch.randn(size, generator=generator), 0 if index < 2 else devices - 1
            )
            self.register_parameter(f"p{index}", nn.Parameter(values))
        self.register_buffer("seen", platform.tensor(torch.zeros(100)))

    def forward(self):
        self.platform.add(self.seen, 1)


class Sgd(torch.optim.Optimizer):
    """SGD with momentum whose updates are kernels, and whose state is there from the start."""

    def __init__(self, model, platform, names=None):
        self.platform = platform
        chosen = [p for n, p in model.named_parameters() if names is None or n in names]
        super().__init__(chosen, {})
        for parameter in chosen:
            momentum = platform.zeros_like(parameter)
            self.state[parameter] = {"momentum": momentum, "step": torch.zeros(())}

    def step(self, closure=None):
        for parameter, state in self.state.items():
            state["step"] += 1
            self.platform.update(parameter, state["momentum"], 1)


class Run:
    """A model and an optimizer on *platform*, checkpointed at *path* if there is one."""

    def __init__(self, platform, path=None, *, devices=1, **options):
        self.platform = platform
        self.model = Model(platform, devices)
        self.optimizer = Sgd(self.model, platform)
        self.checkpointer = None
        if path is not None:
            options = {"media": "tmpfs", "on_error": "raise", "mode": "overlap"} | options
            self.checkpointer = lightckpt.Checkpointer(
                path, model=self.model, optimizer=self.optimizer, **options
            )

    def train(self, steps, *, before_forward=lambda step: None):
        done = self.checkpointer._step if self.checkpointer else 0
        for step in range(done, done + steps):
            before_forward(step)
            self.model()
            self.optimizer.step()
            if self.checkpointer:
                self.checkpointer.mark()
        return self

    def state(self):
        """Return all tensors as they are when the device is through."""
        self.platform.synchronize()
        held = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            held |= {f"momentum{index}": state["momentum"], f"step{index}": state["step"]}
        return {name: tensor.detach().cpu().clone() for name, tensor in held.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def states_of(platform, steps):
    """Return the states after 0 to *steps* steps of a run that nothing watches."""
    run = Run(platform)
    return [run.state(), *(run.train(1).state() for _ in range(steps))]


def stored(path):
    """Return the newest version's tensors, under the names that ``Run.state`` gives them."""
    loaded = lightckpt.load(path)
    held = dict(loaded["model"])
    for index, state in zip(count(), loaded["optimizer"]["state"].values(), strict=False):
        held |= {f"momentum{index}": state["momentum"], f"step{index}": state["step"]}
    return loaded["step"], held
