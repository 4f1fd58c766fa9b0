#!/usr/bin/env python3
"""Training set-ups taken from public checkpoint / resume bug reports, in pure torch.

Nothing here needs lightckpt.  Every case is a small, CPU-deterministic training
program.  ``build(seed)`` returns a ``Run``; ``run.step(i)`` does iteration ``i``
and depends on nothing but the run's own state and ``i`` (and, where the case says
``rng=True``, on the global random number generators).

What a harness does with a case (N1 = case.n1, N2 = case.n2):

    golden  = build(0): N1+N2 steps                      -> losses, final fingerprint
    victim  = build(0): N1 steps, checkpoint, die
    reborn  = build(1): restore, N2 steps                -> must equal golden, bit for bit

``build(1)`` uses another initialisation seed on purpose: whatever an engine forgets
to restore stays at the wrong value and shows up.  (The data stream does not depend
on the seed.)

API:  CASES (name -> Case), Run, fingerprint(run), diff(a, b), digest(fp),
      golden(case), check(case, engine).
CLI:  cases.py                 self-check with three stand-in engines
      cases.py --list          one line per case
      cases.py --digests       JSON: name -> [digest at N1, digest at N1+N2]
      cases.py --case NAME     self-check of one case, verbose
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import random
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

warnings.filterwarnings("ignore")


def setup_determinism() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float32)


# ----------------------------------------------------------------------------
# Run / Case
# ----------------------------------------------------------------------------
class Run:
    """One live training program.

    models      name -> nn.Module               what the user hands to the engine
    optimizers  name -> Optimizer               ditto
    schedulers, scalers, extras                 name -> object with (load_)state_dict
    tensors     name -> Tensor                  loose tensors the user registers
    generators  name -> torch.Generator         private generators the user registers
    nested      name -> Optimizer               optimizers hidden inside another one
    rng         global torch / random / numpy generators matter
    grads       .grad contents matter at the boundary
    hidden      name -> (getter, setter)        state that no torch API shows
    """

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Any] = {}
        self.scalers: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.nested: dict[str, torch.optim.Optimizer] = {}
        self.hidden: dict[str, tuple[Callable, Callable]] = {}
        self.rng = False
        self.grads = False
        self._step: Callable[[int], Any] | None = None
        self._prepare: Callable[[int], None] | None = None

    @property
    def model(self) -> nn.Module:
        return next(iter(self.models.values()))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return next(iter(self.optimizers.values()))

    def step(self, i: int) -> float:
        out = self._step(i)
        return float(out)

    def prepare_restore(self, step: int) -> None:
        """Bring the structure (groups, frozen flags) to what it is after `step` steps."""
        if self._prepare is not None:
            self._prepare(step)


@dataclass
class Case:
    name: str
    source: str
    kind: str
    expect: str
    build: Callable[[int], Run]
    n1: int = 5
    n2: int = 4
    care: tuple[str, ...] = ()
    plain: str = "ok"  # what plain torch state_dict copy+load is expected to give

    def __post_init__(self) -> None:
        assert self.n2 > 0


CASES: dict[str, Case] = {}


def case(name, source, kind, expect, *, n1=5, n2=4, care=(), plain="ok"):
    def deco(fn):
        def build(seed: int) -> Run:
            setup_determinism()
            seed_all(10_000 + seed)
            run = fn(seed)
            return run

        assert name not in CASES
        CASES[name] = Case(name, source, kind, expect, build, n1, n2, tuple(care), plain)
        return fn

    return deco


def seed_all(s: int) -> None:
    torch.manual_seed(s)
    random.seed(s)
    np.random.seed(s % 2**32)


def gen(i: int, salt: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(7_919 * (i + 1) + 104_729 * salt + 17)


def data(i: int, *shape: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=gen(i, salt))


def ints(i: int, high: int, *shape: int, salt: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=gen(i, salt))


def mlp(*sizes: int, act=nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def regress(net, i, din, dout, n=8, salt=0):
    x, y = data(i, n, din, salt=salt), data(i, n, dout, salt=salt + 1)
    return F.mse_loss(net(x), y)


def simple(run: Run, net: nn.Module, opt, loss_fn, after=None) -> Run:
    run.models["net"] = net
    run.optimizers["opt"] = opt

    def step(i):
        opt.zero_grad()
        loss = loss_fn(i)
        loss.backward()
        opt.step()
        if after is not None:
            after(i)
        return loss.detach()

    run._step = step
    return run


# ----------------------------------------------------------------------------
# 0. control
# ----------------------------------------------------------------------------
@case(
    "control_mlp_adamw",
    "pytorch/pytorch#35047 (resume diverges)",
    "control",
    "everything round-trips; losses and final bytes equal the uninterrupted run",
)
def _(seed):
    net = mlp(6, 12, 3)
    return simple(
        Run(), net, torch.optim.AdamW(net.parameters(), lr=1e-2), lambda i: regress(net, i, 6, 3)
    )


# ----------------------------------------------------------------------------
# A. aliasing and layout
# ----------------------------------------------------------------------------
@case(
    "tied_embedding",
    "huggingface/accelerate#2875, #1204; huggingface/transformers#30202; "
    "deepspeedai/DeepSpeed#8376",
    "tied weights",
    "both names show the same bytes AND the same storage after restore; stored once",
    care=("alias",),
)
def _(seed):
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.body = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, t):
            return self.head(torch.tanh(self.body(self.emb(t))))

    net = LM()

    def loss(i):
        t = ints(i, 11, 4, 5)
        return F.cross_entropy(net(t).flatten(0, 1), ints(i, 11, 20, salt=1))

    return simple(Run(), net, torch.optim.AdamW(net.parameters(), lr=1e-2), loss)


@case(
    "flat_buffer_views",
    "deepspeedai/DeepSpeed#8376; pytorch/pytorch#40157 (a slice saves its whole storage)",
    "parameters are views into one flat tensor; optimizer owns only the flat one",
    "flat tensor and views stay one memory; bytes written for views must not be k x flat size",
    care=("alias",),
)
def _(seed):
    run = Run()
    net = mlp(4, 8, 2)
    ps = list(net.parameters())
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in ps]))
    flat.grad = torch.zeros_like(flat)
    off = 0
    for p in ps:
        n = p.numel()
        p.data = flat.data[off : off + n].view(p.shape)
        p.grad = flat.grad[off : off + n].view(p.shape)
        off += n
    opt = torch.optim.Adam([flat], lr=1e-2)
    run.models["net"] = net
    run.optimizers["opt"] = opt
    run.tensors["flat"] = flat

    def step(i):
        flat.grad.zero_()
        loss = regress(net, i, 4, 2)
        loss.backward()
        opt.step()
        return loss.detach()

    run._step = step
    return run


@case(
    "channels_last_conv",
    "NVIDIA/physicsnemo#1597, #1614 (Adam moments scrambled on resume)",
    "channels_last parameters and optimizer state",
    "values equal in logical order; strides of weight AND exp_avg stay channels_last",
    care=("stride",),
)
def _(seed):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    net = net.to(memory_format=torch.channels_last)

    def loss(i):
        x = data(i, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        return net(x).square().mean()

    return simple(Run(), net, torch.optim.Adam(net.parameters(), lr=1e-2), loss)


@case(
    "expanded_buffer",
    "pytorch/pytorch#34880, #28318; lucidrains/titans-pytorch#64",
    "stride-0 (expanded) buffer",
    "restore succeeds (plain copy_ refuses); pos still expands base; only the compact bytes are "
    "stored",
    care=("stride", "alias"),
    plain="error",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("base", torch.randn(1, 4))
            self.register_buffer("pos", self.base.expand(8, 4))

        def forward(self, x):
            return self.lin(x + self.pos)

    net = Net()

    def after(i):
        net.base.mul_(0.9).add_(data(i, 1, 4, salt=5), alpha=0.1)

    return simple(
        Run(),
        net,
        torch.optim.SGD(net.parameters(), lr=0.05),
        lambda i: regress(net, i, 4, 4),
        after,
    )


@case(
    "zero_dim_and_empty",
    "pytorch/pytorch#131976, #108869, #102821",
    "0-dim and zero-element tensors",
    "scalars stay shape (), empty ones keep shape (0, 5) and dtype; both have optimizer state",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.temp = nn.Parameter(torch.randn(()))
            self.none = nn.Parameter(torch.empty(0, 5))
            self.lin = nn.Linear(3, 3)
            self.register_buffer("seen", torch.tensor(seed * 100, dtype=torch.int64))
            self.register_buffer("flag", torch.tensor(bool(seed)))
            self.register_buffer("nothing", torch.empty(2, 0, dtype=torch.int16))

        def forward(self, x):
            self.seen.add_(1)
            self.flag.logical_not_()
            return self.lin(x) * self.temp * (1 + 0.01 * self.seen) + self.none.sum() + self.flag

    net = Net()
    return simple(
        Run(), net, torch.optim.AdamW(net.parameters(), lr=1e-2), lambda i: regress(net, i, 3, 3)
    )


# ----------------------------------------------------------------------------
# B. buffers, dtypes, subclasses
# ----------------------------------------------------------------------------
@case(
    "bn_cumulative",
    "pytorch/pytorch#110361 (num_batches_tracked reset)",
    "int64 buffer that drives the update",
    "num_batches_tracked exact int64; with momentum=None a lost counter changes running stats at "
    "once",
)
def _(seed):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 2)
    )
    run = Run()

    def after(i):
        net.eval()
        with torch.no_grad():
            run.last_eval = net(data(i, 3, 4, salt=9)).sum()
        net.train()

    return simple(
        run, net, torch.optim.SGD(net.parameters(), lr=0.05), lambda i: regress(net, i, 4, 2), after
    )


@case(
    "nonpersistent_buffer",
    "vllm-project/vllm#44371; ByteDance-Seed/VeOmni#1086",
    "persistent=False buffer that training changes",
    "captured although state_dict() leaves it out (or refused loudly); then bit-exact",
    care=("nonpersistent",),
    plain="state",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4) + seed, persistent=False)

        def forward(self, x):
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return self.lin(x - self.mean)

    net = Net()
    return simple(
        Run(), net, torch.optim.SGD(net.parameters(), lr=0.05), lambda i: regress(net, i, 4, 4)
    )


class MasterAdam(torch.optim.Optimizer):
    """bf16 parameters, float32 master copy and moments, python int step."""

    def __init__(self, params, lr=1e-2, b1=0.9, b2=0.99, eps=1e-8):
        super().__init__(params, dict(lr=lr, b1=b1, b2=b2, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = 0
                    s["master"] = p.detach().float().clone()
                    s["m"] = torch.zeros_like(s["master"])
                    s["v"] = torch.zeros_like(s["master"])
                for k in ("master", "m", "v"):
                    s[k] = s[k].float()  # a no-op unless load_state_dict has cast the state
                s["step"] += 1
                d = p.grad.float()
                s["m"].lerp_(d, 1 - g["b1"])
                s["v"].mul_(g["b2"]).addcmul_(d, d, value=1 - g["b2"])
                mh = s["m"] / (1 - g["b1"] ** s["step"])
                vh = s["v"] / (1 - g["b2"] ** s["step"])
                s["master"].addcdiv_(mh, vh.sqrt().add_(g["eps"]), value=-g["lr"])
                p.copy_(s["master"])
        return loss


@case(
    "bf16_param_fp32_state",
    "pytorch/pytorch#43706; facebookresearch/fairscale#50; TensorAuto/OpenTau#185",
    "optimizer state of higher precision than the parameter",
    "float32 masters and moments come back as float32 bits (Optimizer.load_state_dict casts them "
    "to bf16)",
    care=("dtype",),
    plain="state",
)
def _(seed):
    net = mlp(6, 8, 2).to(torch.bfloat16)

    def loss(i):
        return F.mse_loss(net(data(i, 8, 6).bfloat16()).float(), data(i, 8, 2, salt=1))

    return simple(Run(), net, MasterAdam(net.parameters()), loss)


class LowMomentSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, mom=0.9, dtype=torch.bfloat16):
        super().__init__(params, dict(lr=lr, mom=mom))
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if "m" not in s:
                    s["m"] = torch.zeros_like(p, dtype=self.dtype)
                new = s["m"].float() * g["mom"] + p.grad
                s["m"] = new.to(s["m"].dtype)
                p.add_(s["m"].float(), alpha=-g["lr"])


@case(
    "dtype_zoo",
    "pytorch/ao#3314; NVIDIA/TransformerEngine#2721",
    "int8/uint8/int16/int32/int64/uint16/bool/f16/bf16/fp8/f64 buffers, frozen int8 parameter",
    "each keeps dtype and bytes; fp8 residual feeds the next step so a wrong cast changes the loss",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.q = nn.Parameter(
                torch.randint(-100, 100, (4, 4), dtype=torch.int8), requires_grad=False
            )
            z = torch.randn(4, 4)
            for n, dt in dict(
                u8=torch.uint8,
                i16=torch.int16,
                i32=torch.int32,
                i64=torch.int64,
                b=torch.bool,
                h=torch.float16,
                bf=torch.bfloat16,
                d=torch.float64,
                e4=torch.float8_e4m3fn,
                e5=torch.float8_e5m2,
                u16=torch.uint16,
            ).items():
                self.register_buffer(n, (z.abs() * 10).to(dt))

        def forward(self, x):
            w = self.w + self.q.float() / 64 + self.e4.float() * 0.01 + self.e5.float() * 0.01
            return x @ w * (1 + self.b.float().mean()) + self.d.float().mean() * 0.01

        @torch.no_grad()
        def update(self, i):
            r = self.w + self.e4.float()
            self.q.copy_((r * 16).round().clamp(-127, 127).to(torch.int8))
            self.e4.copy_((r - self.q.float() / 16).to(torch.float8_e4m3fn))
            self.e5.copy_((r * 0.3).to(torch.float8_e5m2))
            self.u8.add_(1)
            self.i16.sub_(self.u8.to(torch.int16))
            self.i32.mul_(3)
            self.i64.add_(self.i32.long() << 20)
            self.b.logical_xor_(r > 0)
            self.h.mul_(0.9)
            self.bf.add_(r.bfloat16())
            self.d.mul_(0.99).add_(r.double() * 1e-9)
            self.u16.copy_((self.i64 & 0xFFFF).to(torch.uint16))

    net = Net()
    return simple(
        Run(),
        net,
        torch.optim.SGD([net.w], lr=0.05, momentum=0.9),
        lambda i: regress(net, i, 4, 4),
        net.update,
    )


class PairTensor(torch.Tensor):
    """Wrapper subclass: no storage of its own (data_ptr() is 0), two inner tensors."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.size(),
            strides=a.stride(),
            dtype=a.dtype,
            device=a.device,
            layout=a.layout,
            requires_grad=a.requires_grad,
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return PairTensor(inner["a"], inner["b"])

    def __repr__(self):
        return f"PairTensor({self.a}, {self.b})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._python_dispatch import return_and_correct_aliasing

        kwargs = kwargs or {}

        def pick(k):
            return lambda t: getattr(t, k) if isinstance(t, PairTensor) else t

        ra = func(*tree_map(pick("a"), args), **tree_map(pick("a"), kwargs))
        rb = func(*tree_map(pick("b"), args), **tree_map(pick("b"), kwargs))
        flat_a, spec = torch.utils._pytree.tree_flatten(ra)
        flat_b, _ = torch.utils._pytree.tree_flatten(rb)
        out = [
            PairTensor(x, y) if isinstance(x, torch.Tensor) else x for x, y in zip(flat_a, flat_b)
        ]
        return return_and_correct_aliasing(
            func, args, kwargs, torch.utils._pytree.tree_unflatten(out, spec)
        )


# ----------------------------------------------------------------------------
# C. optimizer state
# ----------------------------------------------------------------------------
@case(
    "fused_adamw_amsgrad",
    "pytorch/pytorch#80809, #102619, #68733",
    "fused kernels, tensor step, amsgrad",
    "step float32 0-dim on the right device; max_exp_avg_sq exact; flags kept",
)
def _(seed):
    net = mlp(6, 10, 2)
    return simple(
        Run(),
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True, amsgrad=True),
        lambda i: regress(net, i, 6, 2),
    )


@case(
    "tensor_lr_exponential",
    "pytorch/torchtitan#4598 (stale lr in cached state); ray-project/ray#61937",
    "learning rate held as a tensor and changed in place",
    "lr tensor value at the checkpoint, still a tensor, in-place link optimizer<->scheduler alive",
    care=("hook",),
)
def _(seed):
    net = mlp(4, 6, 2)
    opt = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.02), foreach=False)
    run = Run()
    sch = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    run.schedulers["sch"] = sch
    return simple(run, net, opt, lambda i: regress(net, i, 4, 2), lambda i: sch.step())


@case(
    "sparse_adam_plus_dense",
    "pytorch/pytorch#130645, #1285",
    "sparse gradients, two optimizers on one model",
    "dense state of SparseAdam exact; each optimizer gets its own state back",
)
def _(seed):
    net = nn.ModuleDict({"emb": nn.Embedding(20, 4, sparse=True), "lin": nn.Linear(4, 3)})
    sp = torch.optim.SparseAdam(net["emb"].parameters(), lr=1e-2)
    de = torch.optim.AdamW(net["lin"].parameters(), lr=1e-2)
    run = Run()
    run.models["net"] = net
    run.optimizers.update(sparse=sp, dense=de)

    def step(i):
        sp.zero_grad(), de.zero_grad()
        loss = F.cross_entropy(net["lin"](net["emb"](ints(i, 20, 6))), ints(i, 3, 6, salt=1))
        loss.backward()
        sp.step(), de.step()
        return loss.detach()

    run._step = step
    return run


@case(
    "lazy_state_frozen",
    "pytorch/pytorch#192202; pytorch/torchtitan#4474; dotnet/TorchSharp#1153",
    "frozen parameters, and a branch without gradients until step 7",
    "missing state stays missing: a zero-filled momentum differs exactly because dampening != 0",
    n1=5,
    n2=6,
)
def _(seed):
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "late": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)})
    net["frozen"].requires_grad_(False)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, dampening=0.5)

    def loss(i):
        def f(x):
            h = net["frozen"](torch.tanh(net["a"](x)))
            return h + net["late"](x) if i >= 7 else h

        return regress(f, i, 4, 4)

    return simple(Run(), net, opt, loss)


class Zoo(nn.Module):
    NAMES = [
        "sgd_nesterov",
        "adagrad",
        "rmsprop",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
        "asgd",
        "rprop",
        "adafactor",
        "muon",
    ]

    def __init__(self):
        super().__init__()
        self.m = nn.ModuleDict({n: nn.Linear(4, 3, bias=(n != "muon")) for n in self.NAMES})


@case(
    "optimizer_zoo",
    "NVIDIA/Megatron-LM#5742 (hard-coded two moments); pytorch/pytorch#35047",
    "eleven optimizers with different state shapes and kinds",
    "every state key of every optimizer exact (0-dim step/eta/mu/ax, row_var/col_var, state "
    "present before step 1)",
)
def _(seed):
    z = Zoo()
    P = lambda n: z.m[n].parameters()
    o = torch.optim
    opts = dict(
        sgd_nesterov=o.SGD(P("sgd_nesterov"), lr=0.05, momentum=0.9, nesterov=True),
        adagrad=o.Adagrad(P("adagrad"), lr=0.05, lr_decay=0.01),
        rmsprop=o.RMSprop(P("rmsprop"), lr=0.01, centered=True, momentum=0.5),
        adadelta=o.Adadelta(P("adadelta")),
        adamax=o.Adamax(P("adamax")),
        nadam=o.NAdam(P("nadam"), decoupled_weight_decay=True),
        radam=o.RAdam(P("radam")),
        asgd=o.ASGD(P("asgd"), t0=2),
        rprop=o.Rprop(P("rprop")),
        adafactor=o.Adafactor(P("adafactor")),
        muon=o.Muon(P("muon")),
    )
    run = Run()
    run.models["zoo"] = z
    run.optimizers.update(opts)

    def step(i):
        for op in opts.values():
            op.zero_grad()
        loss = sum(regress(z.m[n], i, 4, 3, salt=2 * k) for k, n in enumerate(Zoo.NAMES))
        loss.backward()
        for op in opts.values():
            op.step()
        return loss.detach()

    run._step = step
    return run


class GlobalStateOpt(torch.optim.Optimizer):
    """state holds a non-mapping entry under a string key, plus odd per-parameter values."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))
        self.state["k"] = torch.tensor([0], dtype=torch.long)
        self.lucky = 0  # plain attribute, in no state_dict

    @torch.no_grad()
    def step(self, closure=None):
        self.state["k"] += 1
        k = int(self.state["k"])
        for g in self.param_groups:
            for j, p in enumerate(g["params"]):
                if p.grad is None:
                    continue
                s = self.state[p]
                s.setdefault("hist", [])
                s["hist"] = (s["hist"] + [float(p.grad.abs().max())])[-3:]
                s.setdefault("cfg", {"mode": "warm", "pair": (1, None)})
                s["cfg"] = {"mode": "warm" if k < 4 else "run", "pair": (k, None)}
                s.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                scale = 1.0 / (1.0 + sum(s["hist"]))
                p.add_(s["sum"], alpha=-g["lr"] * scale / math.sqrt(k))


@case(
    "global_opt_state",
    "Lightning-AI/pytorch-lightning#11757 (MADGRAD); pytorch/pytorch#99214",
    "optimizer.state with a string key and non-tensor per-parameter values",
    "string-keyed tensor, float lists, nested dict/tuple/None/str come back with the same types "
    "(Optimizer.load_state_dict of torch 2.13 turns every str in per-parameter state into "
    "'<generator object ...>')",
    care=("opt-str",),
    plain="state",
)
def _(seed):
    net = mlp(4, 6, 2)
    return simple(Run(), net, GlobalStateOpt(net.parameters()), lambda i: regress(net, i, 4, 2))


class Rebinder(torch.optim.Optimizer):
    """Every step gives each parameter and each momentum a new storage."""

    def __init__(self, params, lr=0.05, mom=0.9):
        super().__init__(params, dict(lr=lr, mom=mom))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                s["m"] = s.get("m", torch.zeros_like(p)) * g["mom"] + p.grad
                p.data = p.data - g["lr"] * s["m"]


@case(
    "optimizer_replaces_data",
    "NVIDIA-NeMo/RL#4183, #3312 (stale cached handles wrote the first save again)",
    "p.data and state tensors get a new storage every step",
    "the bytes saved are those of the current storage; pointers must be looked up again for "
    "every checkpoint",
    care=("stale-ptr",),
)
def _(seed):
    net = mlp(4, 6, 2)
    return simple(Run(), net, Rebinder(net.parameters()), lambda i: regress(net, i, 4, 2))


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta, train_mode=True, k=0))

    @torch.no_grad()
    def _swap(self, to_train):
        for g in self.param_groups:
            if g["train_mode"] != to_train:
                for p in g["params"]:
                    z = self.state[p].get("z")
                    if z is not None:
                        w = 1 - g["beta"] if to_train else 1 - 1 / g["beta"]
                        p.data.lerp_(z, w)
                g["train_mode"] = to_train

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            assert g["train_mode"]
            ck = 1 / (g["k"] + 1)
            for p in g["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, ck)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - ck) - 1))
                z.sub_(p.grad, alpha=g["lr"])
            g["k"] += 1


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base.step()


@case(
    "sam_nested_base",
    "davda54/sam#39, #73",
    "optimizer wrapping another; two backward passes per iteration",
    "momentum of the inner optimizer is restored; no checkpoint may see the perturbed weights",
    care=("nested", "hook"),
    plain="state",
)
def _(seed):
    net = mlp(4, 6, 2)
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    run = Run()
    run.models["net"], run.optimizers["sam"], run.nested["sam.base"] = net, opt, opt.base

    def step(i):
        opt.zero_grad()
        l1 = regress(net, i, 4, 2)
        l1.backward()
        opt.first_step()
        opt.zero_grad()
        regress(net, i, 4, 2).backward()
        opt.step()
        return l1.detach()

    run._step = step
    return run


@case(
    "edit_after_step",
    "official-stockfish/nnue-pytorch#461 (weight clipping); pytorch/torchtitan#851 (post-step "
    "conversion)",
    "user code edits parameters in place after optimizer.step() returned",
    "checkpoint N holds the edited values of iteration N in every layer: no half-edited mix with "
    "the values the hook saw",
    care=("hook",),
)
def _(seed):
    net = mlp(4, 6, 2)

    @torch.no_grad()
    def after(i):
        for q in net.parameters():
            q.mul_(0.99).clamp_(-0.25, 0.25)

    return simple(
        Run(),
        net,
        torch.optim.Adam(net.parameters(), lr=1e-2),
        lambda i: regress(net, i, 4, 2),
        after,
    )


@case(
    "many_tiny_params",
    "roboflow/rf-detr#1409 (465 groups); keras-team/keras#11592",
    "200 parameters of 1-3 elements, one group each",
    "exact; also a timing case: cost must not be per-tensor syscalls (record stall per step)",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ps = nn.ParameterList([nn.Parameter(torch.randn(1 + k % 3)) for k in range(200)])

    net = Net()
    opt = torch.optim.AdamW([dict(params=[p], lr=1e-3 * (1 + k % 7)) for k, p in enumerate(net.ps)])

    def loss(i):
        t = data(i, 200)
        return sum((p - t[k]).square().sum() for k, p in enumerate(net.ps))

    return simple(Run(), net, opt, loss)


# ----------------------------------------------------------------------------
# D. structure that changes or is named differently
# ----------------------------------------------------------------------------
class LazyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(6)
        self.bn = nn.LazyBatchNorm1d()
        self.b = nn.LazyLinear(2)

    def forward(self, x):
        return self.b(torch.tanh(self.bn(self.a(x))))


@case(
    "lazy_materialised",
    "pytorch/pytorch#73009; pfnet/pytorch-pfn-extras#187",
    "restore into lazy modules that have not seen a batch",
    "parameters take the saved shapes, optimizer still points at them, first forward does not "
    "re-initialise",
)
def _(seed):
    net = LazyNet()
    return simple(
        Run(),
        net,
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        lambda i: regress(net, i, 4, 2),
    )


@case(
    "unfreeze_adds_group",
    "Lightning-AI/pytorch-lightning#6891, #8502, #21901",
    "parameters unfrozen and added to the optimizer at step 3",
    "fresh process has one group, checkpoint has two: groups, membership and requires_grad all "
    "restored",
    n1=6,
    n2=4,
    care=("structure",),
    plain="error",
)
def _(seed):
    net = nn.ModuleDict({"head": nn.Linear(4, 2), "body": nn.Linear(4, 4)})
    net["body"].requires_grad_(False)
    opt = torch.optim.Adam(net["head"].parameters(), lr=1e-2)
    run = Run()

    def grow():
        if len(opt.param_groups) == 1:
            net["body"].requires_grad_(True)
            opt.add_param_group(dict(params=list(net["body"].parameters()), lr=1e-3))

    def loss(i):
        if i == 3:
            grow()
        return regress(lambda x: net["head"](torch.tanh(net["body"](x))), i, 4, 2)

    run._prepare = lambda s: grow() if s > 3 else None
    return simple(run, net, opt, loss)


@case(
    "wrapper_prefixes",
    "karpathy/nanoGPT#325; huggingface/pytorch-image-models#2003; pytorch/pytorch#101107",
    "saved from torch.compile(DataParallel(net)), restored into the bare net",
    "names normalised (module. and _orig_mod., any nesting); nothing silently skipped",
    care=("prefix",),
    plain="error",
)
def _(seed):
    net = mlp(4, 6, 2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    if seed % 2 == 0:
        net = torch.compile(nn.DataParallel(net), backend="eager", dynamic=False)
        call = net._orig_mod
    else:
        call = net
    run = Run()
    simple(run, net, opt, lambda i: regress(call, i, 4, 2))
    return run


@case(
    "lossy_state_dict_hook",
    "vllm-project/speculators#899; OpenTau#184 (precision lost on the way to the file)",
    "module whose state_dict() hook converts or renames",
    "engine captures the live float32 tensors, not what a user's state_dict hook shows",
    care=("raw",),
    plain="state",
)
def _(seed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self._register_state_dict_hook(self._down)
            self._register_load_state_dict_pre_hook(self._up)

        @staticmethod
        def _down(mod, sd, prefix, meta):
            for k in list(sd):
                sd[k.replace("lin.", "export.")] = sd.pop(k).bfloat16()

        @staticmethod
        def _up(sd, prefix, *a):
            for k in list(sd):
                sd[k.replace("export.", "lin.")] = sd.pop(k).float()

    net = Net()
    return simple(
        Run(),
        net,
        torch.optim.SGD(net.lin.parameters(), lr=0.05),
        lambda i: regress(net.lin, i, 4, 4),
    )


@case(
    "module_python_state",
    "pytorch/pytorch#99214, #125528 (non-tensor values)",
    "python attribute that steers forward; get_extra_state",
    "extra_state restored; the bare attribute needs registration (documented), then exact",
    care=("hidden",),
    plain="traj",
)
def _(seed):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.calls = 100 * seed
            self.log = [seed]

        def get_extra_state(self):
            return {"log": list(self.log)}

        def set_extra_state(self, s):
            self.log = list(s["log"])

        def forward(self, x):
            self.calls += 1
            self.log = (self.log + [self.calls])[-2:]
            return self.lin(x) * min(1.0, self.calls / 8) + 0.01 * len(self.log)

    net = Warm()
    run = Run()
    run.hidden["calls"] = (lambda: net.calls, lambda v: setattr(net, "calls", v))
    run.hidden["log"] = (lambda: list(net.log), lambda v: setattr(net, "log", list(v)))
    return simple(
        run, net, torch.optim.SGD(net.parameters(), lr=0.05), lambda i: regress(net, i, 4, 4)
    )


# ----------------------------------------------------------------------------
# E. several models / optimizers, averaging
# ----------------------------------------------------------------------------
@case(
    "gan_two_optimizers",
    "coqui-ai/Trainer#101; NVlabs/stylegan2-ada-pytorch#108; Lightning-AI/pytorch-lightning#5224",
    "two models and optimizers, discriminator stepped twice per iteration, weights clamped after "
    "step",
    "G and D state not exchanged (same shapes); the boundary is the iteration, not one "
    "optimizer.step",
    care=("hook",),
)
def _(seed):
    G, D = mlp(4, 8, 4), mlp(4, 8, 4)
    og = torch.optim.Adam(G.parameters(), lr=1e-2, betas=(0.5, 0.9))
    od = torch.optim.Adam(D.parameters(), lr=2e-2, betas=(0.5, 0.9))
    run = Run()
    run.models.update(G=G, D=D)
    run.optimizers.update(g=og, d=od)

    def step(i):
        for k in range(2):
            od.zero_grad()
            ld = D(data(i, 8, 4, salt=k)).mean() - D(G(data(i, 8, 4, salt=k + 2)).detach()).mean()
            ld.backward()
            od.step()
            with torch.no_grad():
                for p in D.parameters():
                    p.clamp_(-0.3, 0.3)
        og.zero_grad()
        lg = D(G(data(i, 8, 4, salt=7))).mean()
        lg.backward()
        og.step()
        return (ld + lg).detach()

    run._step = step
    return run


@case(
    "ema_swap",
    "ultralytics/yolov5#310; Lightning-AI/pytorch-lightning#6074; "
    "atomistic-machine-learning/schnetpack#785",
    "averaged copy updated after step; model holds the average while the checkpoint is taken",
    "raw weights, average and n_averaged (int64) all restored; training goes on from raw weights",
    care=("hook",),
)
def _(seed):
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    ema = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
    )
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run = Run()

    class Swap:
        backup: list | None = None

        def out(self):
            if self.backup is not None:
                with torch.no_grad():
                    for p, b in zip(net.parameters(), self.backup):
                        p.copy_(b)
                self.backup = None

        def into(self):
            self.backup = [p.detach().clone() for p in net.parameters()]
            with torch.no_grad():
                for p, e in zip(net.parameters(), ema.module.parameters()):
                    p.copy_(e)

        def state_dict(self):
            return {"backup": self.backup}

        def load_state_dict(self, s):
            self.backup = None if s["backup"] is None else [b.clone() for b in s["backup"]]

    sw = Swap()
    run.models.update(net=net, ema=ema)
    run.optimizers["opt"] = opt
    run.extras["swap"] = sw

    def step(i):
        sw.out()
        opt.zero_grad()
        loss = regress(net, i, 4, 2)
        loss.backward()
        opt.step()
        ema.update_parameters(net)
        sw.into()
        return loss.detach()

    run._step = step
    return run


# ----------------------------------------------------------------------------
# F. schedulers, scaler, accumulation, RNG, data
# ----------------------------------------------------------------------------
@case(
    "onecycle_resume",
    "Lightning-AI/pytorch-lightning#15462; pytorch/pytorch#65342, #119168",
    "OneCycleLR (lr and betas), constructor overwrites the optimizer's lr",
    "lr and betas at every resumed step equal golden; restore optimizer groups after schedulers "
    "exist",
    care=("order", "hook"),
)
def _(seed):
    net = mlp(4, 6, 2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    run = Run()
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=20)
    run.schedulers["sch"] = sch
    return simple(run, net, opt, lambda i: regress(net, i, 4, 2), lambda i: sch.step())


def scaler_case(fused):
    net = mlp(4, 6, 2)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    sc = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run = Run()
    run.models["net"], run.optimizers["opt"], run.scalers["amp"] = net, opt, sc
    sch = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    run.schedulers["sch"] = sch

    def step(i):
        opt.zero_grad()
        loss = regress(net, i, 4, 2)
        bad = loss * float("inf") if i in (2, 4, 7) else loss
        sc.scale(bad).backward()
        before = sc.get_scale()
        sc.step(opt)
        sc.update()
        if sc.get_scale() >= before:
            sch.step()
        return loss.detach() + before * 1e-6

    run._step = step
    return run


@case(
    "gradscaler_skip",
    "huggingface/transformers#34053; mosaicml/composer#1376; allenai/tango#154",
    "overflow: optimizer.step is not called, scale backs off",
    "scale and growth tracker exact; iteration counter independent of the number of optimizer "
    "steps",
    n1=5,
    n2=5,
    care=("hook", "skip"),
)
def _(seed):
    return scaler_case(False)


@case(
    "grad_accumulation_mid",
    "huggingface/transformers#22143; Nerogar/OneTrainer#1465; mosaicml/composer#3725",
    "checkpoint in the middle of an accumulation window",
    "either .grad is captured (bit-exact) or the engine only commits at optimizer steps and says "
    "so",
    n1=6,
    n2=6,
    care=("grads",),
    plain="state",
)
def _(seed):
    net = mlp(4, 6, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run = Run()
    run.models["net"], run.optimizers["opt"] = net, opt
    run.grads = True

    def step(i):
        loss = regress(net, i, 4, 2) / 4
        loss.backward()
        if i % 4 == 3:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    run._step = step
    return run


@case(
    "dropout_all_rngs",
    "huggingface/transformers#39215, #46628; vllm-project/speculators#1026; "
    "NVIDIA/Megatron-LM#6858",
    "torch, python and numpy global generators plus a private torch.Generator",
    "all four streams continue exactly (numpy: including the cached gaussian)",
    care=("rng",),
    plain="traj",
)
def _(seed):
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2))
    own = torch.Generator().manual_seed(77 + seed)
    run = Run()
    run.rng = True
    run.generators["own"] = own

    def loss(i):
        x = (
            data(i, 8, 4) * (1 + 0.1 * random.random())
            + 0.1 * float(np.random.normal())
            + 0.1 * torch.randn(8, 4, generator=own)
        )
        return F.mse_loss(net(x), data(i, 8, 2, salt=1))

    return simple(run, net, torch.optim.SGD(net.parameters(), lr=0.05), loss)


class AugData(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, k):
        return torch.full((4,), float(k)) / 20 + 0.1 * torch.rand(4)


class LoaderPos:
    """Position in a shuffled loader: generator state at epoch start + batches taken."""

    def __init__(self, seed, workers):
        self.g = torch.Generator().manual_seed(555 + seed)
        self.loader = torch.utils.data.DataLoader(
            AugData(), batch_size=4, shuffle=True, generator=self.g, num_workers=workers
        )
        self.it, self.pos, self.start = None, 0, self.g.get_state()

    def next(self):
        if self.it is None or self.pos == len(self.loader):
            self.start, self.pos = self.g.get_state(), 0
            self.it = iter(self.loader)
        self.pos += 1
        return next(self.it)

    def state_dict(self):
        return {"start": self.start, "pos": self.pos, "now": self.g.get_state()}

    def load_state_dict(self, s):
        self.start, self.pos = s["start"].clone(), s["pos"]
        self.g.set_state(self.start)
        self.it = None
        if self.pos:
            self.it = iter(self.loader)
            for _ in range(self.pos):
                next(self.it)
        self.g.set_state(s["now"])

    def close(self):
        self.it = None


def loader_case(seed, workers):
    net = mlp(4, 6, 4)
    run = Run()
    pos = LoaderPos(seed, workers)
    run.extras["loader"] = pos
    run.rng = workers == 0
    return simple(
        run,
        net,
        torch.optim.SGD(net.parameters(), lr=0.05),
        lambda i: F.mse_loss(net(pos.next()), data(i, 4, 4, salt=1)),
    )


@case(
    "loader_mid_epoch",
    "huggingface/accelerate#4233, #4203, #4071; huggingface/transformers#39215",
    "mid-epoch position, augmentation drawn from the global RNG",
    "permutation of the epoch kept (state at epoch START), RNG restored AFTER the skipped "
    "batches were replayed",
    n1=7,
    n2=6,
    care=("rng", "order"),
    plain="traj",
)
def _(seed):
    return loader_case(seed, 0)


# ----------------------------------------------------------------------------
# Fingerprints
# ----------------------------------------------------------------------------
def strip_prefix(n: str) -> str:
    parts = n.split(".")
    while parts and parts[0] in ("module", "_orig_mod"):
        parts = parts[1:]
    return ".".join(parts)


def inner_tensors(t):
    if hasattr(t, "__tensor_flatten__") and type(t) is not nn.Parameter:
        names, _ = t.__tensor_flatten__()
        return {n: getattr(t, n) for n in names}
    return None


def raw(t: torch.Tensor) -> bytes:
    t = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if t.is_complex():
        t = torch.view_as_real(t).reshape(-1)
    if t.numel() == 0:
        return b""
    return t.view(torch.uint8).numpy().tobytes()


def is_uninit(t) -> bool:
    return isinstance(t, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


class FP:
    def __init__(self):
        self.val: dict[str, Any] = {}
        self.lay: dict[str, Any] = {}
        self._mem: dict[int, list] = {}

    def put(self, key, obj, layout=False):
        if isinstance(obj, torch.Tensor):
            if is_uninit(obj):
                self.val[key] = ("uninitialised",)
                return
            inner = inner_tensors(obj)
            if inner is not None:
                self.val[key] = ("subclass", sorted(inner))
                for n, t in inner.items():
                    self.put(f"{key}<{n}>", t, layout)
                return
            if obj.layout == torch.sparse_coo:
                self.val[key] = ("coo", tuple(obj.shape), obj.is_coalesced())
                self.put(key + "<idx>", obj._indices())
                self.put(key + "<val>", obj._values())
                return
            self.val[key] = (
                "T",
                str(obj.dtype),
                tuple(obj.shape),
                hashlib.sha256(raw(obj)).hexdigest()[:24],
            )
            if layout:
                self.lay[key] = (tuple(obj.stride()), obj.is_conj(), obj.requires_grad)
                st = obj.untyped_storage()
                if st.nbytes():
                    self._mem.setdefault(st.data_ptr(), []).append((key, obj.storage_offset()))
        elif isinstance(obj, dict):
            self.val[key] = (type(obj).__name__ if type(obj) is not dict else "dict", len(obj))
            for k in sorted(obj, key=repr):
                self.put(f"{key}/{k!r}", obj[k], layout)
        elif isinstance(obj, (list, tuple)):
            self.val[key] = (type(obj).__name__, len(obj))
            for k, v in enumerate(obj):
                self.put(f"{key}[{k}]", v, layout)
        elif isinstance(obj, float):
            self.val[key] = ("float", obj.hex())
        elif isinstance(
            obj, (bool, int, str, bytes, type(None), complex, torch.dtype, torch.device)
        ):
            self.val[key] = (type(obj).__name__, repr(obj))
        elif isinstance(obj, np.ndarray):
            self.val[key] = (
                "np",
                str(obj.dtype),
                obj.shape,
                hashlib.sha256(obj.tobytes()).hexdigest()[:24],
            )
        elif isinstance(obj, np.generic):
            self.val[key] = ("npscalar", repr(obj))
        elif callable(obj):
            self.val[key] = ("callable", getattr(obj, "__qualname__", type(obj).__name__))
        else:
            self.put(key, dict(vars(obj), __class__=type(obj).__name__), layout)

    def finish(self):
        groups = []
        for lst in self._mem.values():
            if len(lst) > 1:
                base = min(o for _, o in lst)
                groups.append(tuple(sorted((k, o - base) for k, o in lst)))
        self.lay["<aliases>"] = tuple(sorted(groups))
        return self


def model_tensors(run: Run):
    """canonical name -> tensor, all parameters and buffers, duplicates included."""
    out: dict[str, torch.Tensor] = {}
    for mn, m in run.models.items():
        for n, p in m.named_parameters(remove_duplicate=False):
            out[f"{mn}:{strip_prefix(n)}"] = p
        for n, b in m.named_buffers(remove_duplicate=False):
            out[f"{mn}:{strip_prefix(n)}"] = b
    for n, t in run.tensors.items():
        out[f"@{n}"] = t
    return out


def param_names(run: Run) -> dict[int, str]:
    names: dict[int, str] = {}
    for n, t in model_tensors(run).items():
        names.setdefault(id(t), n)
    return names


def all_optimizers(run: Run):
    return {**run.optimizers, **run.nested}


def fingerprint(run: Run) -> FP:
    fp = FP()
    tensors = model_tensors(run)
    for n, t in tensors.items():
        fp.put("tensor " + n, t, layout=True)
        if run.grads and t.requires_grad and not is_uninit(t):
            fp.put("grad " + n, t.grad)
    names = param_names(run)
    for on, opt in all_optimizers(run).items():
        for gi, g in enumerate(opt.param_groups):
            fp.put(
                f"group {on}[{gi}] members",
                sorted(names.get(id(p), "<not in any model>") for p in g["params"]),
            )
            for k, v in g.items():
                if k != "params":
                    fp.put(f"group {on}[{gi}].{k}", v)
        for p, st in opt.state.items():
            key = names.get(id(p), "<not in any model>") if isinstance(p, torch.Tensor) else repr(p)
            if isinstance(st, dict) and not st:
                continue
            fp.put(f"state {on} {key}", dict(st) if isinstance(st, dict) else st, layout=True)
    for kind in ("schedulers", "scalers", "extras"):
        for n, o in getattr(run, kind).items():
            fp.put(f"{kind[:-1]} {n}", o.state_dict())
    for n, g in run.generators.items():
        fp.put(f"rng {n}", g.get_state())
    for n, (get, _) in run.hidden.items():
        fp.put(f"hidden {n}", get())
    if run.rng:
        fp.put("rng torch", torch.get_rng_state())
        fp.put("rng python", random.getstate())
        fp.put("rng numpy", np.random.get_state())
    for mn, m in run.models.items():
        fp.val[f"mode {mn}"] = m.training
    return fp.finish()


def diff(a: FP, b: FP) -> tuple[list[str], list[str]]:
    v = [k for k in {**a.val, **b.val} if a.val.get(k) != b.val.get(k)]
    l = [k for k in {**a.lay, **b.lay} if a.lay.get(k) != b.lay.get(k)]
    return v, l


def digest(fp: FP) -> str:
    return hashlib.sha256(repr(sorted(fp.val.items())).encode()).hexdigest()[:32]


def bits(x: float) -> bytes:
    return struct.pack("<d", x)


# ----------------------------------------------------------------------------
# Stand-in engines.  save(run, step) -> blob ; load(run, blob)
# ----------------------------------------------------------------------------
def _all_state(run: Run):
    return {
        "model": {n: m.state_dict() for n, m in run.models.items()},
        "optim": {n: o.state_dict() for n, o in run.optimizers.items()},
        "sched": {n: s.state_dict() for n, s in run.schedulers.items()},
        "scaler": {n: s.state_dict() for n, s in run.scalers.items()},
        "extra": {n: e.state_dict() for n, e in run.extras.items()},
    }


def _load_all(run: Run, s):
    for n, m in run.models.items():
        m.load_state_dict(s["model"][n])
    for n, o in run.optimizers.items():
        o.load_state_dict(s["optim"][n])
    for n, x in run.schedulers.items():
        x.load_state_dict(s["sched"][n])
    for n, x in run.scalers.items():
        x.load_state_dict(s["scaler"][n])
    for n, x in run.extras.items():
        x.load_state_dict(s["extra"][n])


class NoEngine:
    """Restores nothing: proves that a case is not vacuous."""

    name = "none"

    def save(self, run, step):
        return None

    def load(self, run, blob):
        pass


class RefEngine:
    """state_dict() without copying, training goes on before it is 'written'."""

    name = "ref"

    def save(self, run, step):
        return _all_state(run)

    def load(self, run, blob):
        _load_all(run, blob)


class PlainEngine:
    """deep copy of the state_dict()s, then load_state_dict()."""

    name = "plain"

    def save(self, run, step):
        return copy.deepcopy(_all_state(run))

    def load(self, run, blob):
        _load_all(run, blob)


ENGINES = [NoEngine(), RefEngine(), PlainEngine()]


# ----------------------------------------------------------------------------
# Harness
# ----------------------------------------------------------------------------
def close(run: Run):
    for e in run.extras.values():
        if hasattr(e, "close"):
            e.close()


@dataclass
class Golden:
    losses: list[bytes]
    at_n1: FP
    final: FP


def golden(c: Case) -> Golden:
    run = c.build(0)
    losses, at = [], None
    for i in range(c.n1 + c.n2):
        if i == c.n1:
            at = fingerprint(run)
        losses.append(bits(run.step(i)))
    g = Golden(losses, at, fingerprint(run))
    close(run)
    return g


@dataclass
class Verdict:
    code: str  # ok | layout | traj | state | error | torn
    detail: str = ""


def check(c: Case, engine, g: Golden | None = None) -> Verdict:
    g = g or golden(c)
    victim = c.build(0)
    try:
        if hasattr(engine, "attach"):
            engine.attach(victim)
    except Exception as e:
        close(victim)
        return Verdict("error", f"attach: {type(e).__name__}: {str(e)[:90]}")
    for i in range(c.n1):
        victim.step(i)
    try:
        blob = engine.save(victim, c.n1)
    except Exception as e:
        close(victim)
        return Verdict("error", f"save: {type(e).__name__}: {str(e)[:90]}")
    # the victim trains on: a snapshot that is only a reference changes here
    for i in range(c.n1, c.n1 + 2):
        victim.step(i)
    close(victim)
    reborn = c.build(1)
    try:
        engine.load(reborn, blob)
    except Exception as e:
        close(reborn)
        return Verdict(
            "error",
            f"load: {type(e).__name__}: {str(e).strip().splitlines()[-1][:90] if str(e) else ''}",
        )
    v, l = diff(g.at_n1, fingerprint(reborn))
    rng_only = bool(v) and all(k.startswith(("rng ", "hidden ")) for k in v)
    losses = []
    try:
        for i in range(c.n1, c.n1 + c.n2):
            losses.append(bits(reborn.step(i)))
    except Exception as e:
        close(reborn)
        return Verdict("error", f"step: {type(e).__name__}: {str(e)[:90]}")
    vf, lf = diff(g.final, fingerprint(reborn))
    close(reborn)
    bad = next((k for k, (a, b) in enumerate(zip(g.losses[c.n1 :], losses)) if a != b), None)
    traj = bad is not None or bool(vf)
    where = (
        f"; first different loss at +{bad}"
        if bad is not None
        else ("; end state differs" if vf else "; trajectory equal")
    )
    if v and not rng_only:
        return Verdict("state", f"{len(v)} values, e.g. {v[0]}{where}")
    if traj:
        return Verdict(
            "traj",
            f"{'rng/hidden not restored' if rng_only else 'state equal'}{where}, "
            f"{len(vf)} values differ at the end",
        )
    if v:
        return Verdict("state", f"{v[0]}{where}")
    if l:
        return Verdict("layout", f"{len(l)} of strides/aliases/flags, e.g. {l[0]}{where}")
    return Verdict("ok")


def hook_gap(c: Case) -> str:
    """What changes between the first / last optimizer.step of an iteration and its end."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    run = c.build(0)
    box: dict[str, Any] = {"n": 0, "fp": None, "first": None}
    last = max(c.n1 - 1, 0)
    known = {id(o) for o in all_optimizers(run).values()}
    armed = {"on": False}

    def hook(opt, args, kwargs):
        if armed["on"] and id(opt) in known:
            box["n"] += 1
            box["fp"] = fingerprint(run)
            box["first"] = box["first"] or box["fp"]

    h = register_optimizer_step_post_hook(hook)
    try:
        for i in range(last + 1):
            armed["on"] = i == last
            run.step(i)
        end = fingerprint(run)
    finally:
        h.remove()
        close(run)
    if box["n"] == 0:
        return "no optimizer.step in this iteration"

    def kinds(fp):
        return ", ".join(sorted({k.split()[0] for k in diff(fp, end)[0]})) or "nothing"

    if box["n"] == 1:
        return f"1x; later changes: {kinds(box['fp'])}"
    return (
        f"{box['n']}x; later changes: after first {kinds(box['first'])}; "
        f"after last {kinds(box['fp'])}"
    )


def self_check(names, verbose=False):
    rows, bad = [], []
    for n in names:
        c = CASES[n]
        g = golden(c)
        if g.losses != golden(c).losses:
            bad.append(f"{n}: not deterministic")
        verdicts = {e.name: check(c, e, g) for e in ENGINES}
        rows.append((c, verdicts, hook_gap(c)))
        if verdicts["none"].code == "ok":
            bad.append(f"{n}: vacuous (nothing restored and still equal)")
        if verdicts["plain"].code != c.plain:
            bad.append(
                f"{n}: plain expected {c.plain}, "
                f"got {verdicts['plain'].code} {verdicts['plain'].detail}"
            )
        if verbose:
            for k, v in verdicts.items():
                print(f"   {n:28s} {k:7s} {v.code:7s} {v.detail}")
    print(
        f"{'case':28s}"
        + "".join(f"{e.name:>8s}" for e in ENGINES)
        + "   step hooks in one iteration"
    )
    for c, vs, gap in rows:
        print(f"{c.name:28s}" + "".join(f"{vs[e.name].code:>8s}" for e in ENGINES) + f"   {gap}")
    return rows, bad


def digests(names):
    out = {}
    for n in names:
        g = golden(CASES[n])
        out[n] = [digest(g.at_n1), digest(g.final)]
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--digests", action="store_true")
    ap.add_argument("--case")
    ap.add_argument("--verbose", action="store_true")
    a = ap.parse_args()
    names = [a.case] if a.case else list(CASES)
    if a.list:
        for c in CASES.values():
            print(f"{c.name:28s} {c.kind}  [{c.source}]")
        return 0
    if a.digests:
        print(json.dumps(digests(names)))
        return 0
    rows, bad = self_check(names, verbose=a.verbose or bool(a.case))
    here = digests(names)
    other = json.loads(
        subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--digests"]
            + (["--case", a.case] if a.case else []),
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "1234"},
        ).stdout
    )
    for n in names:
        if here[n] != other[n]:
            bad.append(f"{n}: digest differs in another process")
    print(
        "digests equal in a second process:",
        sum(here[n] == other[n] for n in names),
        "of",
        len(names),
    )
    for b in bad:
        print("PROBLEM", b)
    print(
        f"{len(names) - len({b.split(':')[0] for b in bad})} passed, "
        f"{len({b.split(':')[0] for b in bad})} failed"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
