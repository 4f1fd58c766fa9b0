"""Hooks: how the checkpointer learns of updates without taking torch's methods away from it.

torch's own step hooks are used, so ``optimizer.step`` stays the bound method that LR schedulers
look for, closures and GradScaler work, and an optimizer inside another one is seen as well. Hooks
are kept out of compiled graphs: a compiled step that calls one breaks the graph there, runs the
hook as plain Python, and goes on.
"""

import os
import weakref
from collections.abc import Callable
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


def optimizer_of(step: Any) -> Optimizer:
    """Return the optimizer whose (possibly compiled or scheduler-wrapped) step method this is.

    Raises:
        TypeError: *step* is no optimizer's step method.
    """
    seen = step
    while seen is not None:
        owner = getattr(seen, "__self__", None)
        if isinstance(owner, Optimizer):
            return owner
        seen = getattr(seen, "_torchdynamo_orig_callable", None) or getattr(
            seen, "__wrapped__", None
        )
    raise TypeError(f"{step!r} is not the step method of a torch optimizer")
