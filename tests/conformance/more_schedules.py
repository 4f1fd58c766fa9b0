"""Further cases about what follows an update: schedulers, and averages of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from cases import Run, mlp, regress, simple
from registry import Registry

SCHEDULES = Registry()
case = SCHEDULES.case


def scheduled(
    make: Callable[[torch.optim.Optimizer], Any],
    step: Callable[[Any, int, torch.Tensor], None] = lambda sch, i, loss: sch.step(),
) -> Run:
    """A small run whose scheduler is stepped after each update."""
    net = mlp(4, 6, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sch = make(opt)
    run = Run()
    run.models["net"], run.optimizers["opt"], run.schedulers["sch"] = net, opt, sch

    def one_step(i: int) -> torch.Tensor:
        opt.zero_grad()
        loss = regress(net, i, 4, 2)
        loss.backward()
        opt.step()
        step(sch, i, loss.detach())
        return loss.detach() * opt.param_groups[0]["lr"]

    run._step = one_step
    return run


# Schedulers.


@case(
    "ReduceLROnPlateau: the learning rate follows the losses, the best is inf at first",
    "best, bad epochs and cooldown exact; the next reduction comes in the same step",
)
def reduce_on_plateau(seed: int) -> Run:
    return scheduled(
        lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1),
        lambda sch, i, loss: sch.step(loss),
    )


@case(
    "CosineAnnealingWarmRestarts stepped with a fraction of an epoch",
    "T_cur, T_i and the fractional last_epoch exact",
)
def cosine_restarts(seed: int) -> Run:
    return scheduled(
        lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2, T_mult=2),
        lambda sch, i, loss: sch.step(i / 3),
    )


class Warmup:
    """A callable with state, which LambdaLR puts into its state_dict()."""

    def __init__(self, seed: int) -> None:
        self.calls, self.length = 10 * seed, 4

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(1.0, (epoch + 1) / self.length) * 0.99**self.calls


@case("LambdaLR over an object that counts its calls", "the object's attributes are restored")
def lambda_lr_with_state(seed: int) -> Run:
    return scheduled(lambda opt: lr_scheduler.LambdaLR(opt, Warmup(seed)))


@case(
    "ChainedScheduler of a StepLR and a SequentialLR, whose milestone is near the checkpoint",
    "inner schedulers restored, in order; the change of hands comes in the same step",
)
def nested_schedulers(seed: int) -> Run:
    def make(opt: torch.optim.Optimizer) -> Any:
        warmup = lr_scheduler.LinearLR(opt, 0.2, total_iters=4)
        decay = lr_scheduler.ExponentialLR(opt, 0.95)
        sequence = lr_scheduler.SequentialLR(opt, [warmup, decay], milestones=[5])
        return lr_scheduler.ChainedScheduler([sequence, lr_scheduler.StepLR(opt, 2, 0.7)])

    return scheduled(make)


@case(
    "stochastic weight averaging with SWALR from step 3 on, beside another scheduler",
    "n_averaged, both schedulers and the averaged weights exact",
)
def swa(seed: int) -> Run:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    averaged = swa_utils.AveragedModel(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    run = Run()
    cosine = lr_scheduler.CosineAnnealingLR(opt, T_max=6)
    constant = swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=3)
    run.schedulers.update(cosine=cosine, swa=constant)

    def after(i: int) -> None:
        if i >= 3:
            averaged.update_parameters(net)
            constant.step()
        else:
            cosine.step()

    simple(run, net, opt, lambda i: regress(net, i, 4, 2), after)
    run.models["averaged"] = averaged
    return run


# Averages by hand.


@case(
    "an average kept in loose tensors, changed through .data",
    "no version counter moves: loose tensors are copied at the boundary",
    care=("hook",),
)
def average_through_data(seed: int) -> Run:
    net = mlp(4, 6, 2)
    run = Run()
    for name, p in net.named_parameters():
        run.tensors[f"ema.{name}"] = p.detach().clone()

    def loss(i: int) -> torch.Tensor:
        pull = sum((p - run.tensors[f"ema.{n}"]).square().sum() for n, p in net.named_parameters())
        return regress(net, i, 4, 2) + 0.1 * pull

    def after(i: int) -> None:
        for name, p in net.named_parameters():
            run.tensors[f"ema.{name}"].data.mul_(0.9).add_(p.data, alpha=0.1)

    return simple(run, net, torch.optim.Adam(net.parameters(), lr=1e-2), loss, after)


@case(
    "the average is copied into the model for the boundary, through .data, and out again",
    "as ema_swap, but no counter tells of it: the version has the average in the model",
    care=("hook",),
    source="ultralytics/yolov5#310",
)
def average_swapped_through_data(seed: int) -> Run:
    net = mlp(4, 6, 2)
    run = Run()
    ema = [p.detach().clone() for p in net.parameters()]
    raw = [p.detach().clone() for p in net.parameters()]
    for k in range(len(ema)):
        run.tensors[f"ema{k}"], run.tensors[f"raw{k}"] = ema[k], raw[k]

    def loss(i: int) -> torch.Tensor:
        if i > 0:
            for p, r in zip(net.parameters(), raw, strict=True):
                p.data.copy_(r)
        return regress(net, i, 4, 2)

    def after(i: int) -> None:
        for p, e, r in zip(net.parameters(), ema, raw, strict=True):
            e.data.lerp_(p.data, 0.1)
            r.data.copy_(p.data)
            p.data.copy_(e)

    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return simple(run, net, opt, loss, after)
