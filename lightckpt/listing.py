"""Listing: what a store and its versions contain, as data for the command line. No torch.

Everything here is of JSON's own types, and read from metadata; tensor bytes are not touched.
"""

from math import prod
from pathlib import Path as FilePath
from typing import Any

from ._core import Store, Version
from .manifest import DTYPE_BYTES, Manifest, Path, TensorEntry, name_of
from .reader import read_manifest

_PINNED = ("", "by this process", "by a reader")


def describe_store(store: Store, path: FilePath) -> dict[str, Any]:
    """Return facts about an open store and the versions it holds, newest first."""
    info = store.info()
    return {
        "path": str(path),
        "store_id": f"{info.store_id:016x}",
        "media": info.media.name.lower(),
        "granularity": info.granularity.name.lower(),
        "emulated": info.emulated,
        "flush_method": info.flush_method,
        "catalog": info.catalog.name.lower(),
        "bytes": info.bytes,
        "free_bytes": info.free_bytes,
        "slots": info.slots,
        "versions": [describe_version(version) for version in store.versions()],
    }


def describe_version(version: Version) -> dict[str, Any]:
    """Return what a slot says of its version."""
    return {
        "step": version.step,
        "version": version.version,
        "generation": version.generation,
        "damaged": bool(version.damaged),
        "pinned": _PINNED[version.pinned],
        "extents": version.extent_count,
        "area_bytes": version.area_bytes,
        "record_bytes": version.record_bytes,
        "manifest_bytes": version.manifest_bytes,
    }


def describe_contents(store: Store, version: Version) -> dict[str, Any]:
    """Return what a pinned version contains: its layers, and the tensors of each.

    Raises:
        FormatError: its metadata are damaged.
    """
    manifest = read_manifest(store, version)
    layers: dict[str, list[dict[str, Any]]] = {}
    first: dict[int, str] = {}
    for entry in manifest.entries:
        tensor = _describe_tensor(entry)
        if entry.extent >= 0 and first.setdefault(entry.extent, tensor["name"]) != tensor["name"]:
            tensor["shares"] = first[entry.extent]
        layers.setdefault(layer_of(entry.path), []).append(tensor)
    return {
        **describe_version(version),
        "made_by": manifest.made_by,
        "tensor_bytes": sum(manifest.extents),
        "host_bytes": len(store.view(version.version)[1]),
        "tensors": sum(not entry.subclass for entry in manifest.entries),
        "layers": [
            {"name": name, "bytes": sum(t["bytes"] for t in tensors), "tensors": tensors}
            for name, tensors in layers.items()
        ],
        "groups": _describe_groups(manifest),
    }


def layer_of(path: Path) -> str:
    """Return the layer a tensor belongs to: its module, or that of the parameter it is about."""
    kind, *rest = path
    if kind == "state" and len(rest) > 2:
        return layer_of(tuple(rest[2:]))
    if kind == "grad" and rest:
        return layer_of(tuple(rest))
    if kind == "model" and len(rest) > 1:
        model, name = rest[0], rest[1]
        module = name.rpartition(".")[0]
        return f"{model}/{module}" if module else model
    return kind if kind == "tensor" or not rest else f"{kind}/{rest[0]}"


def _describe_tensor(entry: TensorEntry) -> dict[str, Any]:
    count = prod(n if s else min(n, 1) for n, s in zip(entry.shape, entry.stride, strict=True))
    plain = entry.extent >= 0
    tensor: dict[str, Any] = {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "bytes": count * DTYPE_BYTES[entry.dtype] if plain else 0,
    }
    if plain:
        tensor |= {"extent": entry.extent, "offset": entry.offset}
    for name in ("buffer", "requires_grad", "packed", "uninitialised", "subclass"):
        if value := getattr(entry, name):
            tensor[name] = value
    if not entry.persistent:
        tensor["persistent"] = False
    return tensor


def _describe_groups(manifest: Manifest) -> dict[str, list[list[str]]]:
    return {
        optimizer: [[name_of(path) for path in members] for members in groups]
        for optimizer, groups in manifest.groups.items()
    }
