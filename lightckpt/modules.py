"""Modules: what they hold beside tensors, gathered at the boundary, and given back.

Training mode, extra state, and what a module's own ``_save_to_state_dict`` shows beyond its
parameters and buffers. The branches of the host state:

    modes        model -> names of the modules in evaluation mode
    wrappers     model -> names of the modules that only wrap another; without any, no branch
    module       model -> {module: extra state} where modules define ``get_extra_state``
    shown        model -> {module: {key: value}}; without any, no branch
"""

from typing import Any

from torch import nn

from .capture import Run, Walk
from .errors import StructureError, UnsafeStateError
from .names import named_modules, wrappers_in


def module_states(walk: Walk) -> dict[str, Any]:
    """Return the branches above, of the modules that *walk* found.

    Raises:
        UnsafeStateError: a module shows state that it has no way to load.
    """
    branches: dict[str, Any] = {
        "modes": {
            name: [at for at, module in modules if not module.training]
            for name, modules in walk.modules.items()
        },
        "module": {
            name: {at: m.get_extra_state() for at, m in modules if _has_extra_state(m)}
            for name, modules in walk.modules.items()
        },
    }
    if walk.wrappers:
        branches["wrappers"] = walk.wrappers
    shown = {
        name: {at: state for at, module in modules if (state := _shown(f"{name}/{at}", module))}
        for name, modules in walk.showing.items()
    }
    return branches | ({"shown": shown} if any(shown.values()) else {})


def set_modes(host: dict[str, Any], run: Run) -> None:
    """Put each module in the mode that it was in."""
    for name, model in run.models.items():
        evaluating = set(host["modes"][name])
        saved, wrappers = host.get("wrappers", {}).get(name, ()), wrappers_in(model)
        for at, module in named_modules(model):
            # A wrapper that the version does not know of is in the mode of what it wraps.
            known = at if at in saved else wrappers.get(at, at)
            training = known not in evaluating
            if getattr(module, "training", None) is not training:  # setting costs more than this
                module.training = training


def load_module_states(host: dict[str, Any], run: Run) -> None:
    """Give the modules their extra state, and what they showed.

    Raises:
        StructureError: a module does not take what one of its name has shown.
    """
    for name, model in run.models.items():
        extra, shown = host["module"][name], host.get("shown", {}).get(name, {})
        for at, module in named_modules(model):
            if at in shown:
                _load_shown(f"{name}/{at}", module, shown[at])
            if at in extra and _has_extra_state(module):
                module.set_extra_state(extra[at])


def check_modules(host: dict[str, Any]) -> None:
    """Raise TypeError unless the branches that may be left out have the form above."""
    for name, kind in (("wrappers", list), ("shown", dict)):
        branches = host.get(name, {})
        if type(branches) is not dict or any(type(one) is not kind for one in branches.values()):
            raise TypeError(f"{name} of modules are no dict of {kind.__name__}s")
    shown = [state for states in host.get("shown", {}).values() for state in states.values()]
    if not all(type(state) is dict for state in shown):
        raise TypeError("what a module shows is no dict")


def missing_modules(host: dict[str, Any], run: Run) -> list[str]:
    """Name the modules that showed state of their own, and of which *run* has none that loads it.

    Models that *run* lacks are left out.
    """
    return [
        f"{name}/{at}"
        for name, model in run.models.items()
        for at in host.get("shown", {}).get(name, {}).keys()
        - {at for at, module in named_modules(model) if _loads_own_state(module)}
    ]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _loads_own_state(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own or bool(module._load_state_dict_pre_hooks)


def _shown(name: str, module: nn.Module) -> dict[str, Any]:
    everything: dict[str, Any] = {}
    module._save_to_state_dict(everything, "", True)
    known = {*module._parameters, *module._buffers, "_extra_state"}
    shown = {key: value for key, value in everything.items() if key not in known}
    if shown and not _loads_own_state(module):
        raise UnsafeStateError(
            f"model/{name} ({type(module).__qualname__}) shows {min(shown)!r} in its state_dict, "
            "which is neither a parameter nor a buffer, and has no way of its own to load it: "
            "give it get_extra_state and set_extra_state, or pass an object as extra="
        )
    return shown


def _load_shown(name: str, module: nn.Module, shown: dict[str, Any]) -> None:
    everything = {
        key: tensor.detach()
        for key, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
    }
    metadata = {"version": module._version}
    failed: list[str] = []
    module._load_from_state_dict(everything | shown, "", metadata, False, [], [], failed)
    if failed:
        raise StructureError(f"model/{name} does not take what it showed: {'; '.join(failed)}")
