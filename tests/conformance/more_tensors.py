"""Further cases about how tensors lie in memory: aliases, strides, dtypes, derived weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import cases
from cases import Run, data, ints, mlp, regress, simple
from registry import Registry

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
