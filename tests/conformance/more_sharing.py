"""Further cases about what is one and what is two: memory, objects, names that wrappers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cases import Run, mlp, regress, simple
from registry import Registry

SHARING = Registry()
case = SHARING.case


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


class Own(torch.optim.Optimizer):
    """SGD that keeps what *prepare* makes for each parameter, and calls *update*."""

    def __init__(self, net: nn.Module, update: Callable[[Any, Any], None]) -> None:
        super().__init__(net.parameters(), {"lr": 0.05})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p])


# Memory.


@case(
    "optimizer state that is the parameter's own memory (a master copy of fp32 weights)",
    "the update of the state is the update of the parameter, in the fresh process too",
    care=("alias",),
)
def state_is_the_parameter(seed: int) -> Run:
    net = mlp(4, 6, 2)

    def update(p: Any, state: Any) -> None:
        if not state:
            state.update(master=p.detach(), rows=p.detach()[:1], m=torch.zeros_like(p))
        state["m"].mul_(0.9).add_(p.grad)
        state["master"].add_(state["m"], alpha=-0.05)
        state["rows"].mul_(0.99)

    return simple(Run(), net, Own(net, update), lambda i: regress(net, i, 4, 2))


@case(
    "the same in a lazy model, which has no memory yet when it is restored",
    "the parameter is given its memory, and the state is in it",
    care=("alias",),
)
def state_is_the_lazy_parameter(seed: int) -> Run:
    net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2))

    def update(p: Any, state: Any) -> None:
        if not state:
            state["master"] = p.detach()
        state["master"].add_(p.grad, alpha=-0.05)

    run = Run()
    run.rng = True  # materialising draws from the global generator
    return simple(run, net, Own(net, update), lambda i: regress(net, i, 4, 2))


@case(
    "step counters of the parameters: own ones at first, from step 3 on one for all",
    "one object again, though the fresh optimizer made one for each",
    care=("alias",),
)
def counters_joined(seed: int) -> Run:
    net = mlp(4, 6, 2)
    run = Run()

    def update(p: Any, state: Any) -> None:
        state["t"].add_(1)
        p.add_(p.grad, alpha=-0.05 / float(state["t"]))

    opt = Own(net, update)
    for p in net.parameters():
        opt.state[p]["t"] = torch.zeros(())

    def after(i: int) -> None:
        if i == 3:
            for p in net.parameters():
                opt.state[p]["t"] = opt.state[net[0].weight]["t"]

    return simple(run, net, opt, lambda i: regress(net, i, 4, 2), after)


@case(
    "step counters that the optimizer makes as one object, and that part at step 3",
    "each has its own memory again: changing one leaves the others as they are",
    care=("alias",),
)
def counters_parted(seed: int) -> Run:
    net = mlp(4, 6, 2)

    def update(p: Any, state: Any) -> None:
        state["t"].add_(1)
        p.add_(p.grad, alpha=-0.05 / float(state["t"]))

    opt = Own(net, update)
    one = torch.zeros(())
    for p in net.parameters():
        opt.state[p]["t"] = one

    def after(i: int) -> None:
        if i == 3:
            for p in net.parameters():
                opt.state[p]["t"] = opt.state[p]["t"].clone()

    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


@case(
    "buffers that are None until they become views of another: conjugate, and a real part",
    "views of the live buffer again, the one lazily conjugate",
    care=("alias", "dtype"),
)
def none_becomes_a_view(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("z", torch.randn(4, dtype=torch.complex64))
            self.register_buffer("conj", None)
            self.register_buffer("real", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            return y if self.conj is None else y * self.conj.imag + self.real

    net = Net()

    def after(i: int) -> None:
        if i == 2:
            net.conj, net.real = net.z.conj(), net.z.real
        net.z.mul_(0.9 + 0.1j)

    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 4), after)


@case(
    "learning rates held as tensors: one at first, an own one for each group from step 2 on",
    "a change of one group's leaves the other's as it is",
    care=("alias",),
)
def rates_parted(seed: int) -> Run:
    net = mlp(4, 6, 2)
    groups = [{"params": [*net[k].parameters()]} for k in (0, 2)]
    opt = torch.optim.Adam(groups, lr=torch.tensor(0.02), foreach=False)

    def after(i: int) -> None:
        if i == 2:
            for k, group in enumerate(opt.param_groups):
                group["lr"] = torch.tensor(0.02 * (k + 1))
        opt.param_groups[0]["lr"].mul_(0.9)

    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


@case(
    "learning rates held as tensors: an own one for each group, one for both from step 2 on",
    "a change of one group's is a change of the other's",
    care=("alias",),
)
def rates_joined(seed: int) -> Run:
    net = mlp(4, 6, 2)
    groups = [{"params": [*net[k].parameters()], "lr": torch.tensor(0.02)} for k in (0, 2)]
    opt = torch.optim.Adam(groups, lr=torch.tensor(0.02), foreach=False)

    def after(i: int) -> None:
        if i == 2:
            opt.param_groups[1]["lr"] = opt.param_groups[0]["lr"]
        opt.param_groups[0]["lr"].mul_(0.9)

    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


# Names that wrappers share with what they wrap.


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.module(x), 0.5, self.training)


@case(
    "a wrapper in training mode around a module in evaluation mode, and the other way round",
    "each has its own mode",
)
def wrapper_in_another_mode(seed: int) -> Run:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    net = Wrapper(Wrapper(inner))
    run = Run()
    run.rng = True

    def after(i: int) -> None:
        net.module.train(i % 2 == 0)
        inner.train(i % 3 == 0)

    return simple(run, net, sgd(net), lambda i: regress(net, i, 4, 4), after)


@case(
    "extra state of a wrapper and of what it wraps",
    "each has its own",
)
def wrapper_with_extra_state(seed: int) -> Run:
    class Counting:
        count = 10 * seed

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    class Inner(Counting, nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x) * self.count

    class Outer(Counting, Wrapper):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 3
            return self.module(x) * (1 + self.count)

    net = Outer(Inner(4, 4))
    return simple(Run(), net, sgd(net, 1e-4), lambda i: regress(net, i, 4, 4))


@case(
    "a module that saves and loads a number in its own way, which is no extra state",
    "what it shows in its state_dict is given back",
)
def module_with_its_own_way(seed: int) -> Run:
    class Scaled(nn.Linear):
        scale = 2.0 + seed

        def _save_to_state_dict(self, destination: Any, prefix: str, keep: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep)
            destination[prefix + "scale"] = torch.tensor(self.scale, dtype=torch.float64)

        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            self.scale = float(state.pop(prefix + "scale"))
            super()._load_from_state_dict(state, prefix, *rest)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale *= 0.9
            return super().forward(x) * self.scale

    net = nn.Sequential(Scaled(4, 4), nn.Tanh(), Scaled(4, 2))
    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 2))


# Groups.


@case(
    "two groups of equal length, built the other way round before restoring",
    "each group has its members, and its options, in the order saved",
)
def groups_in_another_order(seed: int) -> Run:
    net = mlp(4, 4, 4)
    groups = [{"params": [*net[k].parameters()], "lr": 0.02 / (k + 1)} for k in (0, 2)]
    if seed % 2:
        groups.reverse()
    opt = torch.optim.AdamW(groups)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 4))


@case(
    "the first of three groups of equal shapes is removed at step 3",
    "the others stay, and the state of the first is kept",
    care=("structure",),
)
def group_removed(seed: int) -> Run:
    net = nn.ModuleDict({"lin": nn.Linear(4, 4)})
    net.scales = nn.ParameterList([torch.zeros(2) for _ in range(3)])
    opt = sgd(net)
    opt.param_groups[0]["params"] = [*net["lin"].parameters()]
    for scale in net.scales:
        opt.add_param_group({"params": [scale]})

    def loss(i: int) -> torch.Tensor:
        by = 1.0
        for k, scale in enumerate(net.scales):
            by = by * (1 + scale.sum() / (k + 1))
        return regress(lambda x: net["lin"](x) * by, i, 4, 4)

    def after(i: int) -> None:
        if i == 3:
            opt.state.pop(net.scales[0])
            del opt.param_groups[1]

    return simple(Run(), net, opt, loss, after)
