"""Further cases about optimizers: state of odd shapes and kinds, and optimizers in optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

import cases
from cases import Run, mlp, regress, simple
from registry import Registry

OPTIMIZERS = Registry()
case = OPTIMIZERS.case


class PerParameter(torch.optim.Optimizer):
    """A base: subclasses say how one parameter is updated."""

    def __init__(self, params, **defaults) -> None:
        super().__init__(params, {"lr": 0.05, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: torch.Tensor, state: dict, group: dict) -> None:
        raise NotImplementedError


# State of odd shapes and kinds.


class TransposedMomentum(PerParameter):
    """Momentum kept transposed, a row of statistics kept in every other element of a buffer."""

    def update(self, p: torch.Tensor, state: dict, group: dict) -> None:
        if "m" not in state:
            state["m"] = torch.zeros_like(p.t(), memory_format=torch.contiguous_format).t()
            state["peak"] = torch.zeros(2 * p.shape[0])[::2]
        state["m"].mul_(0.9).add_(p.grad)
        torch.maximum(state["peak"], p.grad.reshape(len(p), -1).abs().amax(1), out=state["peak"])
        scale = (1 + state["peak"]).reshape(-1, *[1] * (p.dim() - 1))
        p.sub_(group["lr"] * state["m"] / scale)


@case(
    "optimizer state that is transposed, or a strided slice",
    "a fresh process, which has no state yet, gets it with the strides it had",
    care=("stride",),
)
def noncontiguous_state(seed: int) -> Run:
    net = mlp(4, 6, 2)
    return simple(Run(), net, TransposedMomentum(net.parameters()), lambda i: regress(net, i, 4, 2))


class FlatMomentum(torch.optim.Optimizer):
    """One flat momentum under a string key; each parameter's is a view of it."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        (group,) = self.param_groups
        ps = group["params"]
        if "flat" not in self.state:
            flat = torch.zeros(sum(p.numel() for p in ps))
            self.state["flat"] = flat
            for p, part in zip(ps, flat.split([p.numel() for p in ps]), strict=True):
                self.state[p]["m"] = part.view(p.shape)
        self.state["flat"].mul_(0.9)  # seen through every view, if they are views
        for p in ps:
            self.state[p]["m"].add_(p.grad)
            p.sub_(self.state[p]["m"], alpha=group["lr"])


@case(
    "optimizer state of all parameters in one flat tensor, under a string key",
    "in a fresh process views and flat tensor are one memory again: decaying one decays all",
    care=("alias",),
)
def flat_optimizer_state(seed: int) -> Run:
    net = mlp(4, 6, 2)
    return simple(Run(), net, FlatMomentum(net.parameters()), lambda i: regress(net, i, 4, 2))


class MixedKinds(PerParameter):
    """Per-parameter values that change kind from step to step, and come and go."""

    def update(self, p: torch.Tensor, state: dict, group: dict) -> None:
        k = state["k"] = state.get("k", 2**70) + 1
        turn = k - 2**70
        if turn == 1:
            state["warm"] = (1, [None, "a", b"\x00\xff"], {"nested": {3: -0.0, (1, "x"): math.inf}})
        if turn == 4:
            del state["warm"]
        if turn % 3 == 0:
            state["m"] = None
        elif state.get("m") is None:
            state["m"] = p.grad.clone()
        else:
            state["m"].mul_(0.9).add_(p.grad)
        state["phase"] = ["up", "down"][turn % 2]
        state["z"] = complex(turn, -0.0)
        state["dtype"] = p.dtype if turn % 2 else p.device
        state["norms"] = [*state.get("norms", []), float(p.grad.norm())][-4:]
        state["at"] = np.float32(turn) if turn % 2 else np.arange(turn, dtype=np.int16)
        step = p.grad if state["m"] is None else state["m"]
        extra = 1.5 if "warm" in state else 1.0
        p.sub_(step * (group["lr"] * extra / (1 + sum(state["norms"]))))


@case(
    "state that is None, then a tensor; keys deleted; huge ints, bytes, complex, numpy values",
    "values and their types exact, missing keys missing, -0.0 and inf kept",
    care=("opt-str",),
)
def mixed_kinds_of_state(seed: int) -> Run:
    net = mlp(4, 6, 2)
    return simple(Run(), net, MixedKinds(net.parameters()), lambda i: regress(net, i, 4, 2))


@case(
    "bf16 momentum for float32 parameters, given new storage in every step",
    "the momentum stays bf16: load_state_dict would cast it up, and the next rounding differs",
    care=("dtype", "stale-ptr"),
    source="facebookresearch/fairscale#50",
)
def low_precision_momentum(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = cases.LowMomentSGD(net.parameters())
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2))


@case(
    "L-BFGS: lists of tensors and None in the state, a closure, many evaluations per step",
    "old directions, steps, scalars and counters exact, in lists of the same length",
)
def lbfgs(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = torch.optim.LBFGS(
        net.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe"
    )
    run = Run()
    run.models["net"], run.optimizers["opt"] = net, opt

    def step(i: int) -> float:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = regress(net, i // 3, 4, 2)
            loss.backward()
            return loss

        return float(opt.step(closure))

    run._step = step
    return run


# Wrappers.


class Lookahead(torch.optim.Optimizer):
    """Slow weights over any optimizer, whose groups it shares."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 3) -> None:
        self.inner, self.every, self.turn = inner, every, 0
        super().__init__(inner.param_groups, {"alpha": 0.5})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        self.inner.step()
        self.turn += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.turn % self.every == 0:
                    slow.lerp_(p, group["alpha"])
                    p.copy_(slow)


@case(
    "lookahead: slow weights, an inner optimizer that shares its groups, a bare counter",
    "inner moments and slow weights restored; the counter needs registration (documented)",
    care=("nested", "hidden"),
)
def lookahead(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = Lookahead(torch.optim.Adam(net.parameters(), lr=1e-2))
    run = Run()
    run.nested["opt.inner"] = opt.inner
    run.hidden["turn"] = (lambda: opt.turn, lambda v: setattr(opt, "turn", v))
    return simple(run, net, opt, lambda i: regress(net, i, 4, 2))


class Mixture(torch.optim.Optimizer):
    """Matrices go to one optimizer and vectors to another, both kept in a dict."""

    def __init__(self, params) -> None:
        params = list(params)
        super().__init__(params, {})
        self.parts = {
            "matrices": torch.optim.Adam([p for p in params if p.dim() > 1], lr=1e-2),
            "vectors": torch.optim.SGD([p for p in params if p.dim() < 2], lr=0.05, momentum=0.9),
        }

    def step(self, closure: Callable | None = None) -> None:
        for part in self.parts.values():
            part.step()


@case(
    "an optimizer that keeps others in a dict attribute",
    "the engine finds them: their state is restored although only the outer one is registered",
    care=("nested",),
)
def optimizers_in_a_dict(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = Mixture(net.parameters())
    run = Run()
    for name, part in opt.parts.items():
        run.nested[f"opt.{name}"] = part
    return simple(run, net, opt, lambda i: regress(net, i, 4, 2))


@case(
    "schedule-free: the model is in evaluation mode, on averaged weights, at the boundary",
    "the version has the averaged weights and train_mode False; training goes on from the raw ones",
    care=("hook",),
    source="facebookresearch/schedule_free",
)
def schedule_free_eval(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = cases.ScheduleFree(net.parameters())

    def loss(i: int) -> torch.Tensor:
        opt.train()
        return regress(net, i, 4, 2)

    return simple(Run(), net, opt, loss, lambda i: opt.eval())
