"""Imported by the server that lives are forked from: everything that a trainer needs."""

from importlib import import_module
from importlib.util import find_spec

import harness
from workloads import load_libraries

load_libraries()
for name in ("sklearn.datasets", "safetensors.torch", "torchsnapshot", "torch_checkpointing",
             "moonclip"):  # fmt: skip
    if find_spec(name.partition(".")[0]) is not None:
        import_module(name)

__all__ = ["harness"]
