"""Hooks: how the checkpointer learns of updates without taking torch's methods away from it.

torch's own step hooks are used, so ``optimizer.step`` stays the bound method that LR schedulers
look for, closures and GradScaler work, and an optimizer inside another one is seen as well. Hooks
are kept out of compiled graphs: a compiled step that calls one breaks the graph there, runs the
hook as plain Python, and goes on.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def weakly(owner: Any, method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls *method* on *owner* while that lives, in this process only."""
    this, process = weakref.ref(owner), os.getpid()

    def call(*args: Any) -> None:
        if (alive := this()) is not None and os.getpid() == process:
            method(alive, *args)

    return call


def uncompiled(function: Callable[..., None]) -> Callable[..., None]:
    """Mark *function* as one that torch.compile must call, not trace.

    The mark is what ``torch.compiler.disable`` leaves on a function. It is set by hand because that
    call imports the whole compiler, which takes seconds and which most runs never use.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def watch_optimizer(
    optimizer: Optimizer, before: Callable[[bool], None], after: Callable[[], None]
) -> list[RemovableHandle]:
    """Call *before* ahead of every step of *optimizer* and *after* behind it.

    *before* is told whether the step was given a closure, which will call the model.
    """

    @uncompiled
    def pre(_optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before(any(map(callable, (*args[1:2], kwargs.get("closure")))))

    @uncompiled
    def post(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        after()

    return [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]


class _Hook:
    """A forward hook of this process: copies and pickles of its module have one that does nothing.

    So a model that is watched can still be saved whole, sent to a process, or copied for averaging.
    """

    def __init__(self, entered: Callable[..., None]) -> None:
        self._entered = entered

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_nothing,)


class _Call(_Hook):
    @uncompiled
    def __call__(self, module: nn.Module, _args: Any) -> None:
        self._entered(module)


class _Glimpse(_Hook):
    def __call__(self, _module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._entered()


def _nothing(*_: Any) -> None:
    pass


def watch_forward(model: nn.Module, entered: Callable[[nn.Module], None]) -> RemovableHandle:
    """Call *entered* with *model* ahead of each of its forward calls, compiled ones included."""
    return model.register_forward_pre_hook(_Call(entered))


def glimpse_forward(model: nn.Module, entered: Callable[[], None]) -> RemovableHandle:
    """Call *entered* ahead of forward calls, but leave compiled ones without a trace of it.

    For what may be missed: a graph break there could forbid ``fullgraph=True``.
    """
    return model.register_forward_pre_hook(_Glimpse(entered))


def optimizer_of(step: Any, known: Iterable[Optimizer]) -> Optimizer:
    """Return the optimizer that *step* is, or whose step method it is, however often wrapped.

    An LR scheduler puts a plain function in the method's place that names no optimizer; so those
    in *known* are asked whether their step has anything in common with *step*.

    Raises:
        TypeError: *step* is no optimizer's step method.
    """
    if isinstance(step, Optimizer):
        return step
    links = list(_unwrapped(step))
    for link in links:
        if isinstance(owner := getattr(link, "__self__", None), Optimizer):
            return owner
    for optimizer in known:
        shared = list(_unwrapped(type(optimizer).step))  # by all of its class
        own = [link for link in _unwrapped(vars(optimizer).get("step")) if link not in shared]
        if any(link is mine for link in links for mine in own):
            return optimizer
    raise TypeError(
        f"{step!r} is not the step method of an optimizer that this checkpointer knows; the "
        "optimizer itself will do"
    )


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yield *function*, and what it wraps, from the outside in."""
    while function is not None:
        yield function
        names = ("_torchdynamo_orig_callable", "__wrapped__", "func")  # the last is partial's
        inner = (getattr(function, name, None) for name in names)
        function = next((at for at in inner if at is not None), None)


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return *optimizer*, or the one inside it where it only passes calls on.

    Such wrappers (Accelerate's is one) leave ``Optimizer.__init__`` out: they have neither hooks
    nor state of their own.

    Raises:
        TypeError: it has state of its own, which could not be watched.
    """
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or not all(
            getattr(optimizer, name, None) is getattr(inner, name)
            for name in ("state", "param_groups")
        ):
            raise TypeError(
                f"{type(optimizer).__qualname__} never called Optimizer.__init__, so it cannot be "
                "watched: call it there, or give the optimizer inside, and the rest as extra="
            )
        optimizer = inner
    return optimizer
