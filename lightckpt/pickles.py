"""Pickles: state without a safe encoding, for who allows it. To read one is to run its code.

A tensor within one that was on a GPU which is not here comes on the cpu; torch would refuse it.
"""

import io
import pickle
from typing import Any

from .errors import FormatError


def unpickled(_meta: object, data: memoryview) -> object:
    """Return what *data* is a pickle of.

    Raises:
        FormatError: whatever the code that it names raises.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # Any: unpickling runs the object's own code.
        raise FormatError(f"host state holds a pickle that cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _load_storage if (module, name) == ("torch.storage", "_load_from_bytes") else found


def _load_storage(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location=_place, weights_only=False)


def _place(storage: Any, location: str) -> Any:
    """Return a storage of the cpu to leave it there; None lets torch put it to *location*."""
    import torch

    kind, _, index = location.partition(":")
    is_here = kind != "cuda" or int(index or 0) < torch.cuda.device_count()
    return None if is_here else storage
