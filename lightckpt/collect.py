"""Host state: all of a run that is not a streamed tensor, gathered at the boundary on its thread.

The tree's branches, each by the name its object was given:

    groups       optimizer -> per group every option but the members (those are in the manifest)
    state        [optimizer, path, key, value] of optimizer state that is no tensor
    modes        model -> names of the modules in evaluation mode
    module       model -> {module: extra state} where modules define ``get_extra_state``
    loose        [path, tensor] of tensors without plain bytes of their own (sparse)
    scheduler, scaler, extra    what the object's ``state_dict()`` returns
    rng, loop    random number generators; epoch and position of ``iterate``
"""

from typing import Any

from torch import nn

from .capture import Run, Walk
from .hoststate import decode, encode
from .rng import capture_rng
from .tensors import decode_leaf, encode_leaf

STATEFUL = {"scheduler": "schedulers", "scaler": "scalers", "extra": "extras"}


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def capture_early(run: Run) -> bytes:
    """Encode what must be taken as the optimizer's step ends, where the boundary comes later.

    With decoration only, the boundary is the next forward: by then the next batch has been drawn,
    so loaders and generators are captured here.
    """
    return encode(_drawing(run), allow_pickle=run.allow_pickle, leaf=encode_leaf)


def encode_extras(run: Run) -> bytes:
    """Encode the extras as they are now; b"" without any."""
    tree = {name: item.state_dict() for name, item in run.extras.items()}
    return encode(tree, allow_pickle=run.allow_pickle, leaf=encode_leaf) if tree else b""


def load_extras(run: Run, encoded: bytes) -> None:
    """Bring the extras back to what :func:`encode_extras` made."""
    if encoded:
        tree = decode(encoded, allow_pickle=run.allow_pickle, leaf=decode_leaf)
        for name, item in run.extras.items():
            item.load_state_dict(tree[name])


def _drawing(run: Run) -> dict[str, Any]:
    return {
        "rng": capture_rng(run.generators, everything=run.rng),
        "extra": {name: item.state_dict() for name, item in run.extras.items()},
    }


def collect_host(
    run: Run, walk: Walk, *, step: int, loop: Any = None, early: bytes | None = None
) -> bytes:
    """Encode the host state of *run* as it is now.

    Args:
        early: loaders and generators from :func:`capture_early`; None takes them now.

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
        "modes": {
            name: [at for at, module in modules if not module.training]
            for name, modules in walk.modules.items()
        },
        "module": {
            name: {at: m.get_extra_state() for at, m in modules if has_extra_state(m)}
            for name, modules in walk.modules.items()
        },
        "loose": [[list(leaf.path), leaf.tensor] for leaf in walk.loose],
        "loop": loop,
        "scheduler": {name: item.state_dict() for name, item in run.schedulers.items()},
        "scaler": {name: item.state_dict() for name, item in run.scalers.items()},
        **(_drawing(run) if early is None else {"early": early}),
    }
    return encode(tree, allow_pickle=run.allow_pickle, leaf=encode_leaf)


def read_host(host: bytes | memoryview, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Decode what :func:`collect_host` made.

    Raises:
        FormatError: it is damaged.
        UnsafeStateError: it holds a pickle and *allow_pickle* is false.
    """
    tree: dict[str, Any] = decode(host, allow_pickle=allow_pickle, leaf=decode_leaf)
    if "early" in tree:
        tree |= decode(tree.pop("early"), allow_pickle=allow_pickle, leaf=decode_leaf)
    return tree
