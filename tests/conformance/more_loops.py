"""Further cases about the loop: schedulers, averages, data, generators, modes, growing models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

import cases
from cases import Run, data, ints, mlp, regress, simple
from registry import PREPARE, Registry

LOOPS = Registry()
case = LOOPS.case


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


# Modes, flags and growing models.


@case(
    "batch norm put into evaluation mode at step 3, the model stays in training mode",
    "the training flag of each submodule is restored: running statistics stand still",
)
def batch_norm_frozen_midway(seed: int) -> Run:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))

    def after(i: int) -> None:
        if i == 3:
            net[1].eval()

    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


@case(
    "requires_grad of layers switched on and off while training, in turn",
    "flags as they were; momentum of a frozen layer stands still and is kept",
    care=("structure",),
)
def layers_frozen_in_turn(seed: int) -> Run:
    net = mlp(4, 5, 5, 2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)

    def after(i: int) -> None:
        for k in (0, 2):
            net[k].requires_grad_((i + k) % 4 < 2)
            for p in net[k].parameters():
                p.grad = None

    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 2), after)


@case(
    "a layer is added to a ModuleList, and to the optimizer as a group, at step 3",
    "the program adds the module before it restores; groups, members and state are restored",
    care=(PREPARE, "structure"),
    n1=5,
    n2=5,
)
def layer_added(seed: int) -> Run:
    net = nn.ModuleDict({"body": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 2)})
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    run = Run()

    def grow(value: float) -> None:
        if len(net["body"]) == 1:
            layer = nn.Linear(4, 4)
            nn.init.constant_(layer.weight, value)
            nn.init.constant_(layer.bias, value)
            net["body"].append(layer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in net["body"]:
            x = x + torch.tanh(layer(x))
        return net["head"](x)

    def loss(i: int) -> torch.Tensor:
        if i == 3:
            grow(0.1)
            opt.add_param_group({"params": net["body"][1].parameters(), "lr": 1e-3})
        return regress(forward, i, 4, 2)

    run._prepare = lambda step: grow(0.1 + seed) if step > 3 else None
    return simple(run, net, opt, loss)


@case(
    "a lazy branch that sees its first batch after the checkpoint",
    "uninitialised parameters stay uninitialised; the optimizer still points at them afterwards",
    n1=5,
    n2=5,
    care=("rng",),
)
def lazy_until_later(seed: int) -> Run:
    net = nn.ModuleDict({"now": nn.LazyLinear(4), "later": nn.LazyLinear(4)})
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run = Run()
    run.rng = True  # materialising draws from the global generator

    def forward(i: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: net["now"](x) + (net["later"](x) if i >= 8 else 0)

    return simple(run, net, opt, lambda i: regress(forward(i), i, 4, 4))


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


@case(
    "teacher and student: the frozen teacher is replaced by the student at step 4",
    "the teacher of that time, though no optimizer owns it; its aliases are its own",
    source="NVIDIA-NeMo/RL#3312",
)
def teacher_replaced(seed: int) -> Run:
    student, teacher = mlp(4, 6, 3), mlp(4, 6, 3)
    teacher.requires_grad_(False).eval()
    opt = torch.optim.Adam(student.parameters(), lr=1e-2)
    run = Run()

    def loss(i: int) -> torch.Tensor:
        x = data(i, 8, 4)
        return functional.mse_loss(student(x), teacher(x)) + functional.cross_entropy(
            student(x), ints(i, 3, 8)
        )

    def after(i: int) -> None:
        if i == 4:
            teacher.load_state_dict(student.state_dict())

    simple(run, student, opt, loss, after)
    run.models["teacher"] = teacher
    return run
