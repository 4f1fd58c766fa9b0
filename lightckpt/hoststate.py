"""Host state: a tree of Python values to bytes and back, exactly, without pickle.

Host state is what a version holds beside its tensors: scheduler, scaler and loader state dicts,
param groups, RNG states. Values come back equal *and* of the same types. Invariants:

  1. Decoding runs no code that the bytes choose: constructors come from tables in this file, and
     no module but torch is imported. A pickle is read with allow_pickle only.
  2. Decoding allocates O(bytes given): leaves do not overlap, and shapes are checked against them.
  3. Types are exact: a subclass (IntEnum, namedtuple) is refused, never flattened to its base.
  4. Damaged bytes raise FormatError or decode to something else, which is for checksums to find.

Format (little-endian; offsets are from the first byte):

    header := magic "LCH1", json_bytes: u32, total_bytes: u64 (the length of all of it)
    json   := {"tree": node, "leaves": [[kind, bytes, meta], ...]}, ASCII
    leaf i := bytes, from the next multiple of 64 after what stands before
    node   := null | true | false | int64 | finite float (repr, which is exact) | string
            | [node...] | {string: node} | {"$": [tag, node...]}

The tags, and the parts that follow them, are those of the forms below; a dict is a plain object if
its keys are ASCII strings other than "$". {"$": ["leaf", i]} is leaf i: an array, or an object of
the hook's, that occurs twice in the tree comes back as one object, other objects as equal copies.
Long lists of int or float are leaves of int64 or float64, so that random.getstate() costs little.
Arrays come back writable, in C or Fortran order as they were; other strides become C order.
No other thread may change the tree while it is encoded.
"""

import json
import math
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from .errors import FormatError, UnsafeStateError
from .pickles import unpickled

DEPTH_MAX = 200  # Levels of nesting, both ways; each costs two Python frames.
LEAF_ALIGN = 64
_HEADER, _MAGIC, _TAG = struct.Struct("<4sIQ"), b"LCH1", "$"
_INT_MAX = 2**63  # Ints beyond are written in hex: decimal is quadratic, and limited by Python.
_INLINE_MAX = 64  # Longer bytes, and longer lists of int or float, become leaves.
_WRITER = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":"))
# What the parser and the constructors below raise when they are given nonsense.
_MALFORMED = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, SyntaxError,
              TypeError, ValueError, Warning, struct.error)  # fmt: skip

Buffer = bytes | bytearray | memoryview
LeafEncoder = Callable[[object], object | None]
LeafDecoder = Callable[[dict[str, Any], memoryview], object]


@dataclass(frozen=True, slots=True)
class Blob:
    """What a leaf hook makes of an object: *meta* is JSON-able, *data* a C-contiguous buffer."""

    meta: dict[str, Any]
    data: Any


def encode(
    tree: object, *, root: str = "", allow_pickle: bool = False, leaf: LeafEncoder | None = None
) -> bytes:
    """Encode *tree*.

    Args:
        root: where the tree hangs, for messages: `scheduler` makes `scheduler.lr_lambdas[0]`.
        allow_pickle: pickle what has no encoding, rather than refuse it.
        leaf: called with each object of unknown type; returns a Blob, whose data are copied
            before `encode` returns, or None to decline.

    Raises:
        UnsafeStateError: a value has no exact and safe encoding, lies in itself, or is nested
            more than DEPTH_MAX levels deep. The message has the path and the type.
    """
    encoder = _Encoder(root, allow_pickle, leaf)
    try:
        text = _WRITER.encode({"tree": encoder.value(tree), "leaves": encoder.leaves}).encode()
    except RecursionError as error:
        raise encoder.refusal("is nested too deeply for the stack that is left") from error
    parts: list[Any] = [b"", text]
    end = _HEADER.size + len(text)
    for (_, size, _), data in zip(encoder.leaves, encoder.buffers, strict=True):
        parts += (bytes(-end % LEAF_ALIGN), data)
        end += -end % LEAF_ALIGN + size
    parts[0] = _HEADER.pack(_MAGIC, len(text), end)
    return b"".join(parts)


def decode(buffer: Buffer, *, allow_pickle: bool = False, leaf: LeafDecoder | None = None) -> Any:
    """Decode what `encode` made.

    Args:
        leaf: rebuilds a hook's object from its meta and a read-only view into *buffer*. It
            copies what it keeps; what it raises on nonsense becomes a FormatError.

    Raises:
        FormatError: the bytes are damaged, cut short, or of another format version.
        UnsafeStateError: they hold a pickle, and *allow_pickle* is false. Nothing was unpickled.
    """
    view = memoryview(buffer).toreadonly().cast("B")
    try:
        magic, json_bytes, total = _HEADER.unpack_from(view)
        end = _HEADER.size + json_bytes
        if magic != _MAGIC or total != view.nbytes or end > total:
            raise ValueError(f"header {magic!r}, {json_bytes}, {total} of {view.nbytes} bytes")
        document = json.loads(str(view[_HEADER.size : end], "utf-8"))
        leaves = []
        for kind, size, meta in document["leaves"]:
            start = end + -end % LEAF_ALIGN
            end = start + size
            leaves.append((kind, view[start:end], meta))
            if not start <= end <= total:
                raise ValueError(f"a leaf of {size} bytes, with {total - start} left")
        if end != total:
            raise ValueError(f"the leaves end at byte {end} of {total}")
        if not allow_pickle and any(kind == "pickle" for kind, _, _ in leaves):
            raise UnsafeStateError("host state holds a pickle; loading needs allow_pickle=True")
        return _Decoder(leaves, _LEAVES | ({"hook": leaf} if leaf else {})).value(document["tree"])
    except _MALFORMED as error:
        raise FormatError(f"host state is damaged: {type(error).__name__}: {error}") from error


@dataclass
class _Encoder:
    """Makes JSON nodes of objects, and gathers the leaves."""

    root: str
    allow_pickle: bool
    hook: LeafEncoder | None
    leaves: list[tuple[str, int, object]] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    # By id: the containers around the value, with the parts made so far; the objects in leaves.
    above: "dict[int, tuple[_Form, object, Any]]" = field(default_factory=dict)
    seen: dict[int, tuple[object, object]] = field(default_factory=dict)

    def value(self, obj: Any) -> object:
        kind = type(obj)
        if kind in _IS_JSON and _IS_JSON[kind](obj):
            return obj
        if id(obj) in self.above:
            raise self.refusal("lies in itself: state cannot hold a cycle")
        if len(self.above) >= DEPTH_MAX:
            raise self.refusal(f"is nested more than {DEPTH_MAX} levels deep")
        if kind in _BULKY and len(obj) > _INLINE_MAX and (bulk := _bulk(kind, obj)):
            return self.add(*bulk)
        form = _PLAIN if kind is dict and _is_plain(obj) else _FORMS.get(kind) or _foreign(obj)
        return self.parts(form, obj) if form else self.other(obj)

    def parts(self, form: "_Form", obj: Any) -> object:
        out: Any = {} if form is _PLAIN else []
        self.above[id(obj)] = form, obj, out
        if form is _PLAIN:
            for key, part in obj.items():
                is_json = _IS_JSON.get(type(part))
                out[key] = part if is_json and is_json(part) else self.value(part)
        else:
            for part in form.split(obj):
                out.append(self.value(part))
        del self.above[id(obj)]
        return out if form.tag in ("plain", "list") else {_TAG: [form.tag, *out]}

    def other(self, obj: Any) -> object:
        """Encode an array, an object of the hook's, or a pickle; once, however often it occurs."""
        if id(obj) in self.seen:
            return self.seen[id(obj)][1]
        if type(obj) is np.ndarray and (spec := _dtype_spec(obj.dtype)):
            order = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
            flat = np.ascontiguousarray(obj.T if order == "F" else obj).reshape(-1)
            data = flat.view(np.uint8) if flat.nbytes else b""
            node = self.add("array", data, self.value([spec, obj.shape, order]))
        elif self.hook and (blob := self.hook(obj)) is not None:
            assert isinstance(blob, Blob), f"the leaf hook returned a {type(blob)}"
            node = self.add("hook", blob.data, self.value(blob.meta))
        else:
            kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
            if not self.allow_pickle:
                reason = "has no exact and safe encoding; allow_pickle=True would pickle it"
                raise self.refusal(f"is of type {kind}, which {reason}")
            try:
                node = self.add("pickle", pickle.dumps(obj, protocol=4), None)
            except Exception as error:  # Any: pickling runs the object's own code.
                raise self.refusal(f"is of type {kind}, which is not pickled: {error}") from error
        self.seen[id(obj)] = obj, node
        return node

    def add(self, kind: str, data: Any, meta: object) -> object:
        self.leaves.append((kind, memoryview(data).nbytes, meta))
        self.buffers.append(data)
        return {_TAG: ["leaf", len(self.leaves) - 1]}

    def refusal(self, reason: str) -> UnsafeStateError:
        path = "".join(form.place(obj, len(out)) for form, obj, out in self.above.values())
        return UnsafeStateError(f"`{(self.root + path).removeprefix('.') or 'state'}` {reason}")


def _place(key: object) -> str:
    return f".{key}" if type(key) is str and key.isidentifier() else f"[{repr(key)[:99]}]"


def _is_text(text: str) -> bool:
    """Whether *text* has no lone surrogate; JSON would merge two of them into one character."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text


def _is_plain(obj: dict[Any, Any]) -> bool:
    for key in obj:
        if type(key) is not str or not key.isascii():
            return False
    return _TAG not in obj


def _bulk(kind: type, obj: Any) -> tuple[str, bytes, str] | None:
    """Make kind, bytes and meta of a leaf of something long and plain; None declines."""
    if kind in (bytes, bytearray):
        return kind.__name__, obj, ""
    code = _CODES.get((*set(map(type, obj)),))
    try:
        return (kind.__name__, struct.pack(f"<{len(obj)}{code}", *obj), code) if code else None
    except struct.error:  # An int has more than 64 bits.
        return None


class _Form(NamedTuple):
    """How a type is taken apart: *make* makes an equal object of the parts that *split* gave."""

    tag: str
    types: tuple[type, ...]  # Of the parts, checked when decoding; empty: any.
    split: Callable[[Any], Iterable[object]]
    make: Callable[..., object]
    place: Callable[[Any, int], str] = lambda _, index: f"[{index}]"


def _dict_form(kind: Any, rest: str) -> _Form:
    """The parts are what the attribute *rest* holds, then key, value, key, value, ..."""

    def make(state: Any, *items: Any) -> object:
        out = kind(state) if kind is defaultdict else kind()
        if rest == "__dict__":
            vars(out).update(state or {})
        for key, child in zip(items[::2], items[1::2], strict=True):
            out[key] = child
        return out

    return _Form(
        kind.__name__, (),
        lambda d: [getattr(d, rest, 0) or None, *(x for pair in d.items() for x in pair)], make,
        lambda d, index: _place([*d][(index - 1) // 2] if index else rest))  # fmt: skip


def _torch_value(kind: str, text: Any) -> object:
    import torch

    if kind in ("device", "Size"):
        return getattr(torch, kind)(text)
    return {str(v): v for v in vars(torch).values() if type(v).__name__ in _TORCH_KINDS}[text]


def _dtype_spec(dtype: Any) -> Any:
    """Describe *dtype* as .npy files do, in a tuple; None if it would not come back equal."""
    if dtype.hasobject or dtype.metadata:
        return None
    try:
        spec = dtype.str[0] + dtype.char  # "q" is as long as "i8", but another type.
        spec = spec if dtype.char in "qQ" else np.lib.format.dtype_to_descr(dtype)
        back = np.lib.format.descr_to_dtype(spec)
    except (TypeError, ValueError):  # Overlapping fields, say.
        return None
    return (spec,) if back == dtype and back.type is dtype.type else None


def _array(data: Any, spec: Any, shape: Any, order: Any) -> Any:
    """Make an array of a copy of *data*, once their number is seen to be what the shape needs."""
    dtype = np.lib.format.descr_to_dtype(*spec)
    # Of many parts, or of arrays, the product could take any time and memory.
    sound = len(shape) <= 64 and {*map(type, shape)} <= {int} and not dtype.hasobject
    if not sound or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of dtype {dtype} and {len(shape)} dimensions has other bytes")
    return np.ndarray(shape, dtype, bytearray(data), order=order)


# fmt: off
_CODES: dict[Any, str] = {(int,): "q", (float,): "d"}
_BULKY, _SHARED = (bytes, bytearray, list, tuple), ("array", "hook", "pickle")
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str, tuple)}
_TORCH_KINDS = ("dtype", "layout", "memory_format", "qscheme")
_IS_JSON: dict[type, Callable[[Any], bool]] = {
    str: _is_text, float: math.isfinite, int: lambda n: -_INT_MAX <= n < _INT_MAX,
    **dict.fromkeys((bool, NoneType), lambda _: True)}
_FORMS: dict[Any, _Form] = {
    int: _Form("int", (str,), lambda n: [hex(n)], lambda text: int(text, 16)),
    float: _Form("float", (str,), lambda x: [struct.pack(">d", x).hex()],
                 lambda text: struct.unpack(">d", bytes.fromhex(text))[0]),
    complex: _Form("complex", (float,), lambda z: [z.real, z.imag], complex),
    str: _Form("str", (str,), lambda s: [s.encode("utf-8", "surrogatepass").hex()],
               lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass")),
    **{kind: _Form(kind.__name__, (str,), lambda b: [b.hex()], kind.fromhex)
       for kind in (bytes, bytearray)},
    list: _Form("list", (), list, lambda *items: [*items]),
    tuple: _Form("tuple", (), tuple, lambda *items: items),
    set: _Form("set", (), list, lambda *items: {*items}, lambda *_: "{...}"),
    frozenset: _Form("frozenset", (), list, lambda *items: frozenset(items), lambda *_: "{...}"),
    deque: _Form("deque", (), lambda d: [*d, d.maxlen], lambda *d: deque(d[:-1], d[-1])),
    dict: _dict_form(dict, ""), Counter: _dict_form(Counter, "__dict__"),
    OrderedDict: _dict_form(OrderedDict, "__dict__"),  # torch keeps a state dict's _metadata there.
    defaultdict: _dict_form(defaultdict, "default_factory"),
    range: _Form("range", (int,), lambda r: [r.start, r.stop, r.step], range),
    slice: _Form("slice", (), lambda s: [s.start, s.stop, s.step], slice),
    date: _Form("date", (int,), lambda d: [d.year, d.month, d.day], date),
    datetime: _Form("datetime", (), lambda d: [*d.timetuple()[:6], d.microsecond, d.tzinfo, d.fold],
                    lambda *d: datetime(*d[:-1], fold=d[-1])),
    timedelta: _Form("timedelta", (int,), lambda d: [d.days, d.seconds, d.microseconds], timedelta),
    timezone: _Form("timezone", (timedelta, str), lambda z: z.__getinitargs__(), timezone),
    Fraction: _Form("Fraction", (int,), lambda f: [f.numerator, f.denominator], Fraction),
    **{kind: _Form(kind.__name__, (str,), lambda p: [str(p)], kind)
       for kind in (Decimal, UUID, PurePosixPath, PureWindowsPath, type(Path()))},
    # As arrays of one element, or by str(), these would lose trailing zeros.
    np.str_: _Form("numpy.str_", (str,), lambda s: [str.__str__(s)], np.str_),
    np.bytes_: _Form("numpy.bytes_", (bytes,), lambda b: [bytes(b)], np.bytes_),
}
_PLAIN = _Form("plain", (), lambda d: d.values(), dict, lambda d, index: _place([*d][index]))
_SCALAR = _Form("numpy", (), lambda x: [_dtype_spec(x.dtype), x.tobytes()],
                lambda spec, data: _array(data, spec, (), "C")[()])
_TORCH = _Form("torch", (), lambda x: [type(x).__name__, [*x] if type(x).__name__ == "Size"
               else str(x)], _torch_value)
_FACTORY = _Form("factory", (str,), lambda kind: [kind.__name__], lambda name: _FACTORIES[name])
_FORM_OF_TAG = {form.tag: form for form in (*_FORMS.values(), _SCALAR, _TORCH, _FACTORY)}
_LEAVES: dict[str, Callable[[Any, memoryview], object]] = {
    "bytes": lambda _, data: bytes(data), "bytearray": lambda _, data: bytearray(data),
    "list": lambda code, data: [*struct.unpack(f"<{len(data) // 8}{code}", data)],
    "tuple": lambda code, data: struct.unpack(f"<{len(data) // 8}{code}", data),
    "array": lambda meta, data: _array(data, *meta), "pickle": unpickled,
}
# fmt: on


def _foreign(obj: Any) -> _Form | None:
    """Find the form of a numpy scalar, a torch constant, or a defaultdict's factory."""
    kind, name = type(obj), type(obj).__name__
    if kind is type:
        return _FACTORY if obj in _FACTORIES.values() else None
    if isinstance(obj, np.generic) and kind is obj.dtype.type and _dtype_spec(obj.dtype):
        return _SCALAR
    known = name in ("device", "Size", *_TORCH_KINDS)
    return _TORCH if known and getattr(sys.modules.get("torch"), name, None) is kind else None


@dataclass
class _Decoder:
    """The mirror of _Encoder. Nonsense raises one of _MALFORMED."""

    leaves: list[tuple[str, memoryview, Any]]
    makers: dict[str, Callable[[Any, memoryview], object]]
    made: dict[int, object] = field(default_factory=dict)

    def value(self, node: Any, depth: int = 0) -> Any:
        if type(node) not in (dict, list):
            return node
        if depth >= DEPTH_MAX:
            raise ValueError(f"nested more than {DEPTH_MAX} levels deep")
        if type(node) is list:
            return [self.value(child, depth + 1) for child in node]
        if _TAG not in node:
            return {key: self.value(child, depth + 1) for key, child in node.items()}
        ((tag, *parts),) = node.values()
        if tag == "leaf":
            return self.leaf(*parts)
        parts = [self.value(child, depth + 1) for child in parts]
        form = _FORM_OF_TAG[tag]
        if form.types and not all(type(part) in form.types for part in parts):
            kinds = [type(part).__name__ for part in parts[:9]]  # arrays may be long as text
            raise TypeError(f"{tag} does not consist of {kinds}")
        return form.make(*parts)

    def leaf(self, index: int) -> object:
        kind, data, meta = self.leaves[index]
        if kind not in self.makers:
            raise ValueError(f"nothing was given to make a leaf of kind {kind!r}")
        if index not in self.made:
            self.made[index] = self.makers[kind](self.value(meta), data)
        elif kind not in _SHARED:  # Or few bytes could stand for many, in a message, say.
            raise ValueError(f"leaf {index}, of kind {kind!r}, occurs twice")
        return self.made[index]
