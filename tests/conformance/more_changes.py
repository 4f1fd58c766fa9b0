"""Further cases about runs that change: tensors that grow, move or appear, edits, frozen layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from cases import Run, data, ints, mlp, regress, simple
from registry import MAY_DROP, PREPARE, Registry

CHANGES = Registry()
case = CHANGES.case


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


# Buffers and parameters that change shape, kind or place.


@case(
    "a buffer that is None, then a tensor, then grows; another that becomes None",
    "the version of each step has what was there then, in the fresh process too",
    care=("structure",),
    n1=5,
    n2=5,
)
def buffers_come_and_go(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("late", None)
            self.register_buffer("early", torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lin(x)
            y = y if self.late is None else y + self.late.mean(0)
            return y if self.early is None else y * self.early

    net = Net()

    def after(i: int) -> None:
        row = data(i, 1, 4, salt=4)
        if i >= 2:
            net.late = row if net.late is None else torch.cat([net.late, row])
        if i == 3:
            net.early = None

    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 4), after)


@case(
    "sparse COO buffers: number of entries changes, one of them uncoalesced",
    "indices, values, order and the coalesced flag of each step",
)
def sparse_coo_buffers(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 4)
            self.register_buffer("counts", torch.zeros(6, 6).to_sparse())
            self.register_buffer("raw", torch.zeros(6, 6).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x + torch.sparse.mm(self.counts, x.t()).t() * 0.01)

    net = Net()

    def after(i: int) -> None:
        at = ints(i, 6, 2, 3 + i % 3, salt=5)
        new = torch.sparse_coo_tensor(at, data(i, at.shape[1], salt=6), (6, 6))
        net.counts = (net.counts + new).coalesce()
        net.raw = new

    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 6, 4), after)


@case(
    "a buffer that is None, then sparse; another that is sparse, then None",
    "there is what was there then, in the fresh process too",
    care=("structure",),
)
def sparse_comes_and_goes(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("late", None)
            self.register_buffer("early", (torch.eye(4) * (seed + 1)).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = [buffer for buffer in (self.late, self.early) if buffer is not None]
            return self.lin(x) + sum(buffer.to_dense()[0] for buffer in held)

    net = Net()

    def after(i: int) -> None:
        if i == 3:
            net.late, net.early = (torch.eye(4) * 2).to_sparse(), None

    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 4), after)


@case(
    "a vocabulary that grows: embedding, head and their state get more rows at step 3",
    "the program resizes the model before it restores; state comes back in the new shape",
    care=(PREPARE, "structure"),
    n1=5,
    n2=5,
)
def embedding_grows(seed: int) -> Run:
    net = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 3)})
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    run = Run()

    def grow(value: float) -> None:
        weight = net["emb"].weight
        if len(weight) == 6:
            weight.data = torch.cat([weight.data, torch.full((4, 4), value)])
            net["emb"].num_embeddings = 10
            weight.grad = None
            state = opt.state[weight]
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = torch.cat([state[key], torch.zeros(4, 4)])

    def loss(i: int) -> torch.Tensor:
        if i == 3:
            grow(0.1)
        tokens = ints(i, len(net["emb"].weight), 8)
        return functional.cross_entropy(net["head"](net["emb"](tokens)), ints(i, 3, 8, salt=1))

    run._prepare = lambda step: grow(0.1 + seed) if step > 3 else None
    return simple(run, net, opt, loss)


@case(
    "user code gives a parameter new storage between boundary and forward, and after the step",
    "the version has the bytes of its boundary; the new storage is the one restored into",
    care=("stale-ptr",),
)
def data_rebound_between(seed: int) -> Run:
    net = mlp(4, 6, 2)

    def loss(i: int) -> torch.Tensor:
        if i % 2:
            net[0].weight.data = net[0].weight.data * 0.995
        return regress(net, i, 4, 2)

    def after(i: int) -> None:
        if i % 3 == 2:
            net[2].weight.data = net[2].weight.data.clone().mul_(0.99)

    return simple(Run(), net, sgd(net), loss, after)


@case(
    "weights edited through numpy, between the boundary and the update, in every step",
    "no version counter moves; the version has the bytes of its boundary, or is not made",
    care=("hook",),
)
def numpy_edit_before_update(seed: int) -> Run:
    net = mlp(4, 6, 2)

    def loss(i: int) -> torch.Tensor:
        for p in net.parameters():
            array = p.detach().numpy()
            array *= 0.995
        return regress(net, i, 4, 2)

    return simple(Run(), net, sgd(net), loss)


@case(
    "weights edited with counted operations, between boundary and update, from step 6 on only",
    "one version may be given up with a warning; none that is made holds the edited weights",
    care=(MAY_DROP, "hook"),
    n1=5,
    n2=6,
)
def edit_before_update_late(seed: int) -> Run:
    net = mlp(4, 6, 2)

    def loss(i: int) -> torch.Tensor:
        if i >= 6:
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.99)
        return regress(net, i, 4, 2)

    return simple(Run(), net, sgd(net), loss)


@case(
    "about 20 MB of state, so that a kill lands inside a copy",
    "as every case; the copy of a version takes as long as a good part of a step",
    n1=5,
    n2=4,
)
def large_layers(seed: int) -> Run:
    net = mlp(256, 1536, 768, 16)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    return simple(Run(), net, opt, lambda i: regress(net, i, 256, 16, n=4))


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
    "tensors that are no parameters, one of them frozen at step 3",
    "it takes no gradient, and the optimizer leaves it as it is",
    care=("structure",),
)
def plain_tensor_frozen(seed: int) -> Run:
    run = Run()
    w, v = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    run.tensors.update(w=w, v=v)
    run.optimizers["opt"] = opt = torch.optim.Adam([w, v], lr=0.01)

    def step(i: int) -> torch.Tensor:
        opt.zero_grad()
        loss = functional.mse_loss(torch.tanh(data(i, 8, 4) @ w) @ v, data(i, 8, 3, salt=1))
        loss.backward()
        opt.step()
        if i == 3:
            w.requires_grad_(False)
        return loss.detach()

    run._step = step
    return run


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
