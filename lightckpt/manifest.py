"""What a version contains: its tensors by path, where their bytes lie, and who owns them.

A manifest is written when the structure changes and never otherwise, so nothing that changes from
step to step is in it: values live in extents, the rest in the host state. It is JSON, for anybody
to read; the C core keeps the extents' sizes beside it and treats it as opaque.

A path is a tuple of strings, the kind first:

    ("model", model, name)            a parameter or buffer
    ("tensor", name)                  a loose tensor
    ("grad", *path)                   the gradient of the parameter at path
    ("state", optimizer, key, *path)  optimizer state of the parameter at path
    ("shared", optimizer, key)        optimizer state under a string key
    ("group", optimizer, group, index)  a parameter that no model holds
    (*path, "<attribute>")            an inner tensor of a tensor subclass

Knows no torch: dtypes are torch's names without the prefix.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from .errors import FormatError

Path = tuple[str, ...]

# Bytes per element of every dtype that can lie in an extent.
DTYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def name_of(path: Path) -> str:
    """Return *path* as people read it, such as ``state/opt/exp_avg/model/net/0.weight``."""
    return "/".join(path)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. Its element (0, 0, ...) lies at byte ``offset`` of extent ``extent``.

    ``requires_grad`` is of leaves: a result of other tensors is saved without its history.
    ``extent`` is -1 for a tensor without bytes: an empty or uninitialised one, or a subclass whose
    inner tensors have entries of their own. ``stride`` is in elements. ``packed``: the bytes are a
    contiguous copy, since the tensor reaches less than half of the span it lies in. ``device`` is
    "cuda" for a tensor on a GPU: state that a fresh run lacks is made there again.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    extent: int
    offset: int = 0
    requires_grad: bool = False
    buffer: bool = False
    persistent: bool = True
    parameter: bool = False
    conj: bool = False
    neg: bool = False
    packed: bool = False
    uninitialised: bool = False
    subclass: str = ""
    device: str = ""

    @property
    def name(self) -> str:
        return name_of(self.path)

    def span_bytes(self) -> int:
        """Bytes from the first to behind the last element in memory; 0 if there is none."""
        if 0 in self.shape:
            return 0
        last = 0
        for n, s in zip(self.shape, self.stride, strict=True):
            last += (n - 1) * s
        return (last + 1) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything about a version that is not a value.

    ``absent``: buffers that a module has a place for and that are None.
    ``groups``: optimizer -> per parameter group the paths of its members, in order.
    ``single``: the kinds (model, optimizer, ...) that were given as one object, not by name.
    """

    entries: tuple[TensorEntry, ...]
    extents: tuple[int, ...]
    groups: dict[str, list[list[Path]]] = field(default_factory=dict)
    absent: tuple[Path, ...] = ()
    single: tuple[str, ...] = ()
    made_by: str = ""


def graded(manifest: Manifest) -> list[Path]:
    """Return the tensors that may have a gradient, in a fixed order."""
    owned = {path for groups in manifest.groups.values() for paths in groups for path in paths}
    return [
        entry.path
        for entry in manifest.entries
        if entry.path[0] in ("model", "tensor", "group")
        and not entry.uninitialised
        and (entry.parameter or entry.requires_grad or entry.path in owned)
    ]


_REQUIRED = ("path", "dtype", "shape", "stride", "extent")
_DEFAULTS = {
    name: spec.default
    for name, spec in TensorEntry.__dataclass_fields__.items()
    if name not in _REQUIRED
}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as UTF-8 JSON; equal manifests give equal bytes."""
    entries = [
        {k: v for k, v in vars(entry).items() if v != _DEFAULTS.get(k, ...)}
        for entry in manifest.entries
    ]
    return json.dumps(
        {
            "made_by": manifest.made_by,
            "single": manifest.single,
            "groups": manifest.groups,
            "absent": manifest.absent,
            "extents": manifest.extents,
            "tensors": entries,
        },
        separators=(",", ":"),
    ).encode("utf-8", "surrogatepass")


def decode_manifest(blob: bytes | memoryview) -> Manifest:
    """Read a manifest, checking every number in it against the extents.

    Raises:
        FormatError: it is no manifest, or contradicts itself.
    """
    try:
        tree = json.loads(bytes(blob).decode("utf-8", "surrogatepass"))
        extents = tuple(_size(n) for n in tree["extents"])
        entries = tuple(_entry(fields, extents) for fields in tree["tensors"])
        groups = {
            str(optimizer): [[_path(path) for path in members] for members in groups]
            for optimizer, groups in tree["groups"].items()
        }
        absent = tuple(_path(path) for path in tree["absent"])
        single = tuple(str(kind) for kind in tree["single"])
        return Manifest(entries, extents, groups, absent, single, str(tree["made_by"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the manifest cannot be read: {error}") from error


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    for value in values:
        _size(value)
    return tuple(values)


def _path(value: Any) -> Path:
    if not isinstance(value, list) or set(map(type, value)) != {str}:
        raise ValueError(f"{value!r} is no path")
    return tuple(value)


def _entry(fields: dict[str, Any], extents: tuple[int, ...]) -> TensorEntry:
    for name in fields.keys() - _REQUIRED:
        if name not in _DEFAULTS:
            raise ValueError(f"{name!r} is no field of a tensor")
        if type(fields[name]) is not type(_DEFAULTS[name]):
            raise ValueError(f"{name} is {fields[name]!r}")
    fields["path"] = _path(fields["path"])
    fields["shape"], fields["stride"] = _sizes(fields["shape"]), _sizes(fields["stride"])
    entry = TensorEntry(**fields)
    if entry.device not in ("", "cuda"):
        raise ValueError(f"{entry.name} is on {entry.device!r}")
    known = entry.dtype in DTYPE_BYTES or bool(entry.subclass)
    if type(entry.dtype) is not str or not known:
        raise ValueError(f"{entry.name} has the dtype {entry.dtype!r}")
    if len(entry.shape) != len(entry.stride):
        raise ValueError(
            f"{entry.name} has {len(entry.shape)} sizes and {len(entry.stride)} strides"
        )
    if type(entry.extent) is not int or not -1 <= entry.extent < len(extents):
        raise ValueError(f"{entry.name} lies in extent {entry.extent} of {len(extents)}")
    if entry.extent < 0 and not (0 in entry.shape or entry.uninitialised or entry.subclass):
        raise ValueError(f"{entry.name} of shape {list(entry.shape)} lies in no extent")
    if entry.extent >= 0:
        end = _size(entry.offset) + _stored_bytes(entry)
        if end > extents[entry.extent]:
            raise ValueError(f"{entry.name} ends at {end} of {extents[entry.extent]} bytes")
    return entry


def _stored_bytes(entry: TensorEntry) -> int:
    if not entry.packed:
        return entry.span_bytes()
    count = 1
    for n, stride in zip(entry.shape, entry.stride, strict=True):
        count *= n if stride else min(n, 1)  # expanded dimensions are stored once
    return count * DTYPE_BYTES[entry.dtype]
