"""Where the host waits for a device on the fake platform: what torch would make it wait for.

Within, each call of torch that brings bytes of a device to the host is noted by its name: of
tensors in the device's memory, and of what was computed from them, which a real device would have
as well.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

TO_THE_HOST = frozenset(
    {
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__",
        "__index__", "__int__", "__repr__", "allclose", "argwhere", "cpu", "equal", "is_nonzero",
        "item", "masked_select", "nonzero", "numpy", "tolist", "unique",
    }
)  # fmt: skip


class HostWaits(TorchFunctionMode):
    """Notes them in ``calls`` while it is entered, on this thread.

    Args:
        is_on_device: says so of a tensor.
    """

    def __init__(self, is_on_device):
        super().__init__()
        self.calls = []
        self._is_on_device = is_on_device
        self._computed = WeakIdKeyDictionary()  # tensors that a real device would have

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        theirs = any(map(self._is_theirs, tree_leaves((args, kwargs))))
        if not theirs:
            return function(*args, **kwargs)
        if name in TO_THE_HOST or (name == "copy_" and not self._is_theirs(args[0])):
            self.calls.append(name)
            return function(*args, **kwargs)
        results = function(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and not self._is_on_device(result):
                self._computed[result] = True
        return results

    def _is_theirs(self, value):
        if not isinstance(value, torch.Tensor):
            return False
        return value in self._computed or self._is_on_device(value)
