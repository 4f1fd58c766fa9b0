"""Every training step durable, at about the cost of one memory copy.

Names are imported when first used, so that tools which only read a store need no torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .checkpointer import Checkpointer as Checkpointer
    from .checkpointer import protect as protect
    from .loading import load as load
    from .ticket import Ticket as Ticket

_HOMES = {
    "Checkpointer": "checkpointer",
    "Ticket": "ticket",
    "protect": "checkpointer",
    "load": "loading",
}
_ERRORS = (
    "AccessError",
    "BusyError",
    "CheckpointError",
    "CheckpointWarning",
    "CorruptError",
    "FormatError",
    "MediaError",
    "MediaLostError",
    "NoSpaceError",
    "NotFoundError",
    "StructureError",
    "UnsafeStateError",
    "WaitTimeoutError",
)
__all__ = [*_HOMES, *_ERRORS, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("lightckpt")
    home = _HOMES.get(name, "errors" if name in _ERRORS else None)
    if home is None:
        raise AttributeError(f"module 'lightckpt' has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return __all__
