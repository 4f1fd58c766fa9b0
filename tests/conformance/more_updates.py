"""Further cases about updates: where they happen, who makes them, and what groups say of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import cases
from cases import Run, data, ints, mlp, regress, simple
from registry import Registry

UPDATES = Registry()
case = UPDATES.case


# Where the update happens.


@case(
    "optimizer in backward: one optimizer per parameter, stepped by its gradient hook",
    "updates begin while backward runs, so each waits for its own layer's copy only",
    care=("hook",),
    source="pytorch/torchtune, optimizer_in_bwd",
)
def optimizer_in_backward(seed: int) -> Run:
    net = mlp(4, 8, 8, 2)
    run = Run()
    run.models["net"] = net
    for name, p in net.named_parameters():
        opt = torch.optim.Adam([p], lr=1e-2)
        run.optimizers[name] = opt

        def update(_: torch.Tensor, opt: torch.optim.Optimizer = opt) -> None:
            opt.step()
            opt.zero_grad()

        p.register_post_accumulate_grad_hook(update)

    def step(i: int) -> torch.Tensor:
        loss = regress(net, i, 4, 2)
        loss.backward()
        return loss.detach()

    run._step = step
    return run


@case(
    "fused AdamW under a GradScaler: on overflow the step runs, its kernel skips the update",
    "the step counter stands still on overflow; scale and growth exact",
    care=("hook", "skip"),
    n1=5,
    n2=5,
)
def gradscaler_fused(seed: int) -> Run:
    return cases.scaler_case(True)


@case(
    "one GradScaler, two optimizers, of which one overflows",
    "one is updated, the other is not; one scale for both",
    care=("skip",),
    n1=5,
    n2=5,
)
def scaler_two_optimizers(seed: int) -> Run:
    a, b = mlp(4, 6, 2), mlp(4, 6, 2)
    oa = torch.optim.Adam(a.parameters(), lr=1e-2)
    ob = torch.optim.SGD(b.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    run = Run()
    run.models.update(a=a, b=b)
    run.optimizers.update(a=oa, b=ob)
    run.scalers["amp"] = scaler

    def step(i: int) -> torch.Tensor:
        oa.zero_grad()
        ob.zero_grad()
        la, lb = regress(a, i, 4, 2), regress(b, i, 4, 2, salt=3)
        bad = math.inf if i in (1, 4, 6) else 1.0
        scaler.scale(la * bad + lb).backward()
        scaler.unscale_(oa)
        nn.utils.clip_grad_norm_(a.parameters(), 1.0)
        scaler.step(oa)
        scaler.step(ob)
        scaler.update()
        return (la + lb).detach() + scaler.get_scale() * 1e-6

    run._step = step
    return run


@case(
    "two optimizers on the same parameters, in turn",
    "each has its own state for each parameter; an update by either may not tear a version",
    care=("hook",),
)
def two_optimizers_same_parameters(seed: int) -> Run:
    net = mlp(4, 6, 2)
    run = Run()
    opts = [
        torch.optim.Adam(net.parameters(), lr=1e-2),
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    ]
    run.models["net"] = net
    run.optimizers.update(adam=opts[0], sgd=opts[1])

    def step(i: int) -> torch.Tensor:
        opt = opts[i // 2 % 2]
        opt.zero_grad()
        loss = regress(net, i, 4, 2)
        loss.backward()
        opt.step()
        return loss.detach()

    run._step = step
    return run


@case(
    "an update by hand with torch.no_grad(), beside an optimizer for the rest",
    "no hook guards the hand-made update: those parameters are copied at the boundary",
    care=("hook",),
)
def update_by_hand(seed: int) -> Run:
    net = mlp(4, 6, 2)
    opt = torch.optim.Adam(net[2].parameters(), lr=1e-2)

    def after(i: int) -> None:
        with torch.no_grad():
            for p in net[0].parameters():
                p.sub_(p.grad, alpha=0.05)
                p.grad = None

    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


# Param groups.


@case(
    "groups, and the members in each, in another order in the fresh process; a scheduler",
    "state follows the names, options their group; groups are in the saved order, which schedulers "
    "count on",
    care=("structure", "order"),
)
def groups_reordered(seed: int) -> Run:
    net = mlp(4, 4, 4, 4)
    groups = [
        {"params": list(net[0].parameters()), "lr": 0.02, "tag": "first"},
        {"params": [*net[2].parameters(), *net[4].parameters()], "lr": 0.01},
    ]
    if seed % 2:
        groups.reverse()
        for group in groups:
            group["params"].reverse()
    opt = torch.optim.AdamW(groups)
    run = Run()
    run.schedulers["sch"] = sch = LambdaLR(opt, lambda k: 0.9**k)
    return simple(run, net, opt, lambda i: regress(net, i, 4, 4), lambda i: sch.step())


@case(
    "options that training changes: a tensor shared by groups, a numpy scalar, a list, a name",
    "values and types exact; the shared tensor is still the object that the program changes",
    care=("alias", "hook"),
)
def options_that_change(seed: int) -> Run:
    net = mlp(4, 6, 2)
    lr = torch.tensor(0.02 + 0.01 * seed)
    named = list(net.named_parameters())  # then the groups hold names, too
    opt = torch.optim.Adam([{"params": named[:2]}, {"params": named[2:]}], lr=lr, foreach=False)
    for group in opt.param_groups:
        group.update(scale=np.float64(1 + seed), seen=[seed], phase="warm", span=(0, None))

    def loss(i: int) -> torch.Tensor:
        return regress(net, i, 4, 2) * float(opt.param_groups[0]["scale"])

    def after(i: int) -> None:
        lr.mul_(0.93)
        for group in opt.param_groups:
            group["scale"] = np.float64(group["scale"] * 0.99)
            group["seen"] = [*group["seen"], i][-3:]
            group["phase"] = "warm" if i < 3 else "run"
            group["span"] = (i, None)

    return simple(Run(), net, opt, loss, after)


@case(
    "sparse gradients accumulated over several boundaries",
    "the sparse .grad is part of the version, uncoalesced as it stands; absent ones stay None",
    care=("grads",),
    n1=6,
    n2=6,
)
def sparse_grad_accumulation(seed: int) -> Run:
    net = nn.ModuleDict({"emb": nn.Embedding(12, 4, sparse=True), "lin": nn.Linear(4, 3)})
    net["late"] = nn.Linear(4, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    run = Run()
    run.models["net"], run.optimizers["opt"] = net, opt
    run.grads = True

    def step(i: int) -> torch.Tensor:
        hidden = net["emb"](ints(i, 12, 6))
        out = net["lin"](hidden) + (net["late"](hidden) if i % 4 >= 2 else 0)
        loss = functional.cross_entropy(out, ints(i, 3, 6, salt=1)) / 4
        loss.backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    run._step = step
    return run


@case(
    "gradients accumulated in plain leaf tensors that an optimizer owns, without any module",
    "their .grad is part of the version",
    care=("grads",),
    n1=6,
    n2=6,
)
def plain_grad_accumulation(seed: int) -> Run:
    run = Run()
    w, frozen = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    run.tensors.update(w=w, frozen=frozen)
    opt = torch.optim.SGD([w, frozen], lr=0.1)
    run.optimizers["opt"] = opt
    run.grads = True

    def step(i: int) -> torch.Tensor:
        loss = functional.mse_loss(torch.tanh(data(i, 8, 4) @ w) * frozen, data(i, 8, 3, salt=1))
        loss.backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    run._step = step
    return run


def branched(seed: int, zero_first: bool) -> Run:
    """Two layers of which one is used now and then; AdamW decays what has a gradient of zeros."""
    net = nn.ModuleDict({"a": nn.Embedding(9, 4, sparse=True), "late": nn.Linear(4, 4)})
    run = Run()
    run.models["net"] = net
    run.optimizers["sparse"] = torch.optim.SparseAdam([*net["a"].parameters()], lr=0.01)
    run.optimizers["dense"] = torch.optim.AdamW(net["late"].parameters(), lr=0.01)

    def zero(to_none: bool) -> None:
        for opt in run.optimizers.values():
            opt.zero_grad(set_to_none=to_none)

    def step(i: int) -> torch.Tensor:
        if zero_first:
            zero(to_none=False)
        x = net["a"](ints(i, 9, 8))
        if i % 4 == 2:
            x = x + net["late"](x)
        loss = functional.mse_loss(x, data(i, 8, 4, salt=1))
        loss.backward()
        for opt in run.optimizers.values():
            opt.step()
        if not zero_first:
            zero(to_none=True)
        return loss.detach()

    run._step = step
    return run


@case(
    "gradients zeroed, not set to None, and not captured; a branch used now and then",
    "an unused layer with a gradient of zeros decays, one that never had any stands still",
)
def gradients_zeroed(seed: int) -> Run:
    return branched(seed, zero_first=True)


@case(
    "gradients set to None after the update, and not captured; a branch used now and then",
    "an unused layer stands still",
)
def gradients_set_to_none(seed: int) -> Run:
    return branched(seed, zero_first=False)
