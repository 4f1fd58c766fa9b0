"""Further cases about tensors: aliases, strides, dtypes, views, buffers that come, go and grow."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import cases
from cases import Run, data, ints, mlp, regress, simple
from registry import MAY_DROP, PREPARE, Registry

TENSORS = Registry()
case = TENSORS.case


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


# Aliases.


@case(
    "one parameter in two models, one optimizer",
    "encoder and decoder still share the memory; it is stored once and updated once",
    care=("alias",),
)
def tied_across_models(seed: int) -> Run:
    encoder = nn.ModuleDict({"emb": nn.Embedding(9, 4), "lin": nn.Linear(4, 4)})
    decoder = nn.Linear(4, 9, bias=False)
    decoder.weight = encoder["emb"].weight
    run = Run()
    opt = torch.optim.Adam([*encoder.parameters()], lr=1e-2)

    def loss(i: int) -> torch.Tensor:
        hidden = encoder["lin"](encoder["emb"](ints(i, 9, 12)))
        return functional.cross_entropy(decoder(hidden), ints(i, 9, 12, salt=1))

    simple(run, encoder, opt, loss)
    run.models["decoder"] = decoder
    return run


@case(
    "one module under two names",
    "both names show one module's parameters, buffers and training flag",
    care=("alias",),
)
def shared_submodule(seed: int) -> Run:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    net.append(net[0])
    net.append(net[1])
    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 4))


@case(
    "a buffer is a view of a row of a parameter",
    "the buffer follows the parameter's updates after restore: one memory, parameter streamed",
    care=("alias",),
)
def buffer_views_parameter(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("row", self.lin.weight.detach()[1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) + self.row.clone()

    net = Net()
    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 4))


@case(
    "a parameter and a buffer interleaved in one storage, with gaps nobody owns",
    "each gets its own columns back, the gaps keep what the new process had there",
    care=("alias", "stride"),
)
def interleaved_columns(seed: int) -> Run:
    base = torch.randn(4, 12)
    net = nn.Module()
    net.even = nn.Parameter(base[:, ::3])
    net.register_buffer("odd", base[:, 1::3])
    gap = base[:, 2::3].clone()

    def loss(i: int) -> torch.Tensor:
        assert torch.equal(base[:, 2::3], gap)
        return (data(i, 8, 4) @ net.even + net.odd.sum(0) - data(i, 8, 4, salt=1)).square().mean()

    def after(i: int) -> None:
        net.odd.mul_(0.9).add_(net.even.detach(), alpha=0.05)

    return simple(Run(), net, sgd(net), loss, after)


@case(
    "a small slice of a large tensor is all that is registered",
    "restored in place inside the large tensor, which the program goes on reading through",
    care=("alias",),
)
def slice_of_large_base(seed: int) -> Run:
    base = torch.randn(200_000)
    run = Run()
    run.tensors["window"] = base[1000:1016].view(4, 4)
    net = nn.Linear(4, 4)

    def after(i: int) -> None:
        base[1000:1016].mul_(0.9).add_(net.weight.detach().reshape(-1), alpha=0.1)

    def loss(i: int) -> torch.Tensor:
        return functional.mse_loss(
            net(data(i, 8, 4)) @ base[1000:1016].view(4, 4), data(i, 8, 4, salt=1)
        )

    return simple(run, net, sgd(net), loss, after)


@case(
    "parameter and shadow exchange their storages at every boundary",
    "p.data, s.data = s.data, p.data: each name gets the bytes it had, whichever memory holds them",
    care=("stale-ptr", "hook"),
)
def storages_exchanged(seed: int) -> Run:
    net = mlp(4, 6, 2)
    run = Run()
    shadows = [p.detach().clone() for p in net.parameters()]
    for k, shadow in enumerate(shadows):
        run.tensors[f"shadow{k}"] = shadow

    def exchange() -> None:
        for p, s in zip(net.parameters(), shadows, strict=True):
            p.data, s.data = s.data, p.data

    first = {"swapped": False}
    run.hidden["swapped"] = (lambda: first["swapped"], lambda v: first.update(swapped=v))

    def loss(i: int) -> torch.Tensor:
        if first["swapped"]:
            exchange()  # the model trains on its raw weights again
        return regress(net, i, 4, 2)

    def after(i: int) -> None:
        for p, s in zip(net.parameters(), shadows, strict=True):
            s.data.lerp_(p.data, 0.2)
        exchange()  # until the next step the model is the average
        first["swapped"] = True

    return simple(run, net, sgd(net), loss, after)


# Strides, conjugates, dtypes, subclasses.


@case(
    "complex parameters, and a buffer that is a conjugate view of another",
    "both parts of each number exact; the view stays lazy-conjugate and shares the memory",
    care=("alias", "dtype"),
)
def complex_and_conjugate(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
            self.register_buffer("z", torch.randn(4, dtype=torch.complex128))
            self.register_buffer("zbar", self.z.conj())
            self.register_buffer("imag", self.zbar.imag)  # a negative view, in float64

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x.to(torch.complex64) @ self.w) * self.zbar.to(torch.complex64)
            return y.real + self.imag.float()

    net = Net()

    def after(i: int) -> None:
        net.z.mul_(0.9 + 0.1j)

    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 4), after)


@case(
    "rare dtypes: unsigned 32 and 64, half complex, all float8 kinds",
    "same dtype, same bytes, NaN payloads and negative zeros included",
    care=("dtype",),
)
def rare_dtypes(seed: int) -> Run:
    net = nn.Linear(4, 4)
    kinds = ["uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz"]
    kinds += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float64"]
    for kind in kinds:
        dtype = getattr(torch, kind)
        size = 24 // dtype.itemsize * 2
        raw = ints(seed, 256, size * dtype.itemsize, salt=3).to(torch.uint8)
        net.register_buffer(kind, raw.view(dtype))
    stirred = list(net.buffers())

    def after(i: int) -> None:
        for k, buffer in enumerate(stirred):
            buffer.view(torch.uint8).add_(ints(i, 256, buffer.nbytes, salt=k).to(torch.uint8))

    def loss(i: int) -> torch.Tensor:
        noise = sum(b.view(torch.uint8).double().mean() for b in stirred)
        return regress(net, i, 4, 4) * (1 + noise.float() / 1e4)

    return simple(Run(), net, sgd(net), loss, after)


@case(
    "parameter and buffer of a wrapper subclass with two inner tensors",
    "data_ptr() is 0: the inner tensors are what is stored, and the parameter keeps its class",
    care=("subclass",),
    source="pytorch/ao#3314",
)
def subclass_inner(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            pair = cases.PairTensor(torch.randn(4), torch.randn(4))
            self.register_buffer("pair", pair)
            self.frozen = nn.Parameter(
                cases.PairTensor(torch.randn(4), torch.randn(4)), requires_grad=False
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) * self.pair.a + self.pair.b * 0.1 + self.frozen.a - self.frozen.b

    net = Net()

    def after(i: int) -> None:
        with torch.no_grad():
            net.pair.a.mul_(0.99)
            net.pair.b.add_(net.lin.bias.detach(), alpha=0.1)
            net.frozen.b.mul_(0.9)

    opt = torch.optim.Adam(net.lin.parameters(), lr=1e-2)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 4), after)


@case(
    "transposed weight and a permuted buffer",
    "strides of parameter, buffer and momentum as they were; logical order exact",
    care=("stride",),
)
def transposed_parameter(seed: int) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4).t())
            self.register_buffer("cube", torch.randn(2, 3, 4).permute(2, 0, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w + self.cube.sum((0, 1))

    net = Net()

    def after(i: int) -> None:
        net.cube.mul_(0.9).add_(0.1)

    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    return simple(Run(), net, opt, lambda i: regress(net, i, 4, 3), after)


# Parametrised weights.


@case(
    "weight_norm and spectral_norm as parametrizations",
    "the originals and the power iteration's vectors are restored, the derived weight follows",
)
def parametrised_weights(seed: int) -> Run:
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 6)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.orthogonal(nn.Linear(6, 6, bias=False), use_trivialization=False),
        nn.Linear(6, 2),
    )
    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 2))


@case(
    "pruned weights: mask buffer, original parameter, derived attribute",
    "mask and original restored; the attribute that shows their product follows",
)
def pruned(seed: int) -> Run:
    net = mlp(4, 8, 2)
    prune.random_unstructured(net[0], "weight", 0.4)
    return simple(Run(), net, sgd(net), lambda i: regress(net, i, 4, 2))


@case(
    "LSTM: flat weight list beside the parameters",
    "the module's own list still points at the restored parameters",
)
def lstm_flat_weights(seed: int) -> Run:
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 5, num_layers=2, bidirectional=True)})
    net["head"] = nn.Linear(10, 2)
    run = Run()
    run.tensors["h"] = torch.randn(4, 2, 5)  # the hidden state is carried from step to step
    run.tensors["c"] = torch.randn(4, 2, 5)

    def loss(i: int) -> torch.Tensor:
        net["rnn"].flatten_parameters()
        before = (run.tensors["h"].clone(), run.tensors["c"].clone())
        out, (h, c) = net["rnn"](data(i, 4, 2, 3), before)
        run.tensors["h"].copy_(h.detach())
        run.tensors["c"].copy_(c.detach())
        return functional.mse_loss(net["head"](out), data(i, 4, 2, 2, salt=1))

    return simple(run, net, torch.optim.RMSprop(net.parameters(), lr=1e-2), loss)


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
