"""Host state: all of a run that is not a streamed tensor, gathered at the boundary on its thread.

The tree's branches, each by the name its object was given:

    groups       optimizer -> per group every option but the members (those are in the manifest)
    state        [optimizer, path, key, value] of optimizer state that is no tensor
    modes, module, wrappers, shown    of modules: see modules.py
    grads        one byte for each tensor of ``manifest.graded``, see ``tensors.gradient_form``; not
                 where gradients are captured
    loose        [path, tensor] of tensors without plain bytes of their own (sparse)
    scheduler, scaler, extra    what the object's ``state_dict()`` returns
    rng, loop    random number generators; epoch and position of ``iterate``
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .capture import Run, Walk
from .errors import FormatError
from .hoststate import LeafDecoder, decode, encode
from .modules import module_states
from .placement import Placement
from .rng import State, capture_rng, generators_of
from .tensors import decode_leaf, encode_leaf, gradient_forms

# What using a tree of another form than the above raises.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
STATEFUL = {"scheduler": "schedulers", "scaler": "scalers", "extra": "extras"}


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def capture_early(run: Run) -> bytes:
    """Encode what must be taken as the optimizer's step ends, where the boundary comes later.

    With decoration only, the boundary is the next forward: by then the next batch has been drawn,
    so generators are captured here, and the extras that it is drawn from.
    """
    tree = {"rng": _generators(run), "extra": _extras(run, _draws)}
    return encode(tree, allow_pickle=run.allow_pickle, leaf=encode_leaf)


def encode_extras(run: Run) -> bytes:
    """Encode the extras as they are now; b"" without any."""
    tree = {name: item.state_dict() for name, item in run.extras.items()}
    return encode(tree, allow_pickle=run.allow_pickle, leaf=encode_leaf) if tree else b""


def load_extras(run: Run, encoded: bytes) -> None:
    """Bring the extras back to what :func:`encode_extras` made."""
    if encoded:
        tree = decode(encoded, allow_pickle=run.allow_pickle, leaf=Placement(run).decode)
        for name, item in run.extras.items():
            item.load_state_dict(tree[name])


def _generators(run: Run) -> State:
    return capture_rng(run.generators, everything=run.rng)


def _extras(run: Run, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    return {name: item.state_dict() for name, item in run.extras.items() if wanted(item)}


def _draws(extra: Any) -> bool:
    """May a batch be drawn from *extra*, or with it? So from loaders, samplers and datasets."""
    kind = type(extra)
    taken = any(hasattr(kind, name) for name in ("__iter__", "__next__", "__getitem__"))
    holds_values = isinstance(extra, nn.Module | Mapping)
    return (taken and not holds_values) or bool(generators_of(extra))


def _states(run: Run, early: bytes | None) -> dict[str, Any]:
    """Gather extras and generators, but for those that are in *early*."""
    if early is None:
        return {"rng": _generators(run), "extra": _extras(run, lambda _: True)}
    return {"extra": _extras(run, lambda extra: not _draws(extra)), "early": early}


def collect_host(
    run: Run, walk: Walk, *, step: int, loop: Any = None, early: bytes | None = None
) -> bytes:
    """Encode the host state of *run* as it is now.

    Args:
        early: what :func:`capture_early` took; None takes it now.

    Raises:
        UnsafeStateError: a value has no exact and safe encoding; the message has its path.
    """
    tree: dict[str, Any] = {
        "step": step,
        "groups": {
            name: [group_options(group) for group in optimizer.param_groups]
            for name, optimizer in run.optimizers.items()
        },
        "state": [
            [value.optimizer, list(value.path), value.key, value.holder[value.at]]
            for value in walk.values
        ],
        **module_states(walk),
        "loose": [[list(leaf.path), leaf.tensor] for leaf in walk.loose],
        "loop": loop,
        "scheduler": {name: item.state_dict() for name, item in run.schedulers.items()},
        "scaler": {name: item.state_dict() for name, item in run.scalers.items()},
        **({} if run.grads else {"grads": gradient_forms(walk.graded)}),
        **_states(run, early),
    }
    return encode(tree, allow_pickle=run.allow_pickle, leaf=encode_leaf)


def read_host(
    host: bytes | memoryview, *, allow_pickle: bool = False, leaf: LeafDecoder = decode_leaf
) -> dict[str, Any]:
    """Decode what :func:`collect_host` made.

    Args:
        leaf: decodes tensors; as it is, all of them are on the cpu.

    Raises:
        FormatError: it is damaged.
        UnsafeStateError: it holds a pickle and *allow_pickle* is false.
    """
    tree = _branches(host, allow_pickle, leaf)
    try:
        if "early" in tree:
            early = _branches(tree.pop("early"), allow_pickle, leaf)
            tree["rng"], tree["extra"] = early["rng"], tree.get("extra", {}) | early["extra"]
        _check_form(tree)
    except MISFITS as error:
        raise FormatError(f"host state is not that of a run: {error!r}") from error
    return tree


def _check_form(tree: dict[str, Any]) -> None:
    """Raise one of MISFITS if a branch is missing, or is not what this file says it is."""
    dicts = [tree[name] for name in ("groups", "modes", "module", "rng", *STATEFUL)]
    dicts += [*tree["module"].values(), *itertools.chain(*tree["groups"].values())]
    lists = [tree["state"], tree["loose"], *tree["groups"].values(), *tree["modes"].values()]
    lists += [*tree["state"], *tree["loose"], *(row[1] for row in tree["state"])]
    for kind, branches in ((dict, dicts), (list, lists)):
        if wrong := [type(branch).__name__ for branch in branches if type(branch) is not kind]:
            raise TypeError(f"a {wrong[0]} stands where a {kind.__name__} belongs")
    if not all(len(row) == 4 for row in tree["state"]):
        raise ValueError("optimizer state of other than four parts")
    if not all(isinstance(tensor, Tensor) for _, tensor in tree["loose"]):
        raise TypeError("a loose tensor is none")
    if tree["modes"].keys() != tree["module"].keys():
        raise ValueError("its modules are of other models than its modes")


def _branches(host: Any, allow_pickle: bool, leaf: LeafDecoder) -> dict[str, Any]:
    if not isinstance(host, bytes | bytearray | memoryview):
        raise FormatError(f"host state lies in a {type(host).__name__}, not in bytes")
    tree = decode(host, allow_pickle=allow_pickle, leaf=leaf)
    if type(tree) is not dict:
        raise FormatError(f"host state is a {type(tree).__name__}, not a dict")
    return tree
