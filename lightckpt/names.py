"""Names: what each tensor of a run is called, however the modules around it are wrapped.

State is keyed by name, never by index. The wrappers that torch puts around a module
(``torch.compile``, ``DataParallel``, DDP, FSDP and activation checkpointing) leave a component in
every name; it is dropped, so a run saved under a wrapper comes back without it, and the other way
round.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

_ALWAYS_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NAMES_OF_WRAPPED = (*_ALWAYS_WRAPPERS, "module")


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Is *module* only a wrapper around its *child*? Then the child's name is left out."""
    if child in _ALWAYS_WRAPPERS:
        return True
    return (
        child == "module"
        and len(module._modules) == 1
        and not module._parameters
        and not module._buffers
    )


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module), parents first, each module once under a name of its own.

    A wrapper has the name of what it wraps and a prime behind it, one more for each layer: what is
    wrapped has the same name with and without.
    """
    return ((name, module) for name, _, module in _distinct(model))


def wrappers_in(model: nn.Module) -> dict[str, str]:
    """Return name -> name of what it wraps, innermost, for each wrapper in *model*."""
    return {name: inner for name, inner, _ in _distinct(model) if name != inner}


def _distinct(model: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """List (own name, name of what is wrapped innermost, module), as named_modules yields them."""
    visited = list(_visit(model))
    inner = {name: at for at, (name, _) in enumerate(visited)}  # the last under each name
    own: list[str] = [""] * len(visited)
    taken = set(inner)
    for at in reversed(range(len(visited))):
        name = own[at] = visited[at][0]
        if at != inner[name]:
            while own[at] in taken:
                own[at] += "'"
            taken.add(own[at])
    return [(name, bare, module) for name, (bare, module) in zip(own, visited, strict=True)]


def _visit(model: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield (normalised name, module), parents first, each module once or under every name."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in seen and not every_name:
            continue
        seen.add(id(module))
        yield prefix, module
        for name, child in reversed(module._modules.items()):
            if child is None:
                continue
            if name in _NAMES_OF_WRAPPED and _is_wrapper(module, name):
                stack.append((prefix, child))
            else:
                stack.append((f"{prefix}.{name}" if prefix else name, child))


class Held(NamedTuple):
    """A tensor where a module holds it: ``holder[key]`` is the tensor."""

    name: str
    holder: dict[str, Any]
    key: str
    tensor: Tensor
    buffer: bool
    persistent: bool


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Yield every parameter and buffer of *model*, under each of its names.

    Where dropping a wrapper makes two names equal, the second keeps its position as a suffix.
    """
    taken: set[str] = set()
    for prefix, module in _visit(model, every_name=True):
        for buffer, holder in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                while name in taken:
                    name += "'"
                taken.add(name)
                persistent = key not in module._non_persistent_buffers_set
                yield Held(name, holder, key, tensor, buffer, persistent)


@dataclass(frozen=True)
class Empty:
    """A buffer's place that holds None: ``holder[key]``."""

    name: str
    holder: dict[str, Any]
    key: str


def empty_buffers(model: nn.Module) -> Iterator[Empty]:
    """Yield the places of *model* that may hold a buffer and hold none."""
    for prefix, module in _visit(model):
        for key, value in module._buffers.items():
            if value is None:
                yield Empty(f"{prefix}.{key}" if prefix else key, module._buffers, key)
