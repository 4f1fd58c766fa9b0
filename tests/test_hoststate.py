"""Host state: what goes in comes out, to the bit and to the type, or is refused by name.

Goal: encode and decode are exact inverses on what they accept; the rest is refused with its path;
no bytes, however damaged, run code, take memory without bound, or raise anything but FormatError
and UnsafeStateError. Method: random trees (hypothesis) compared by `exact`, to the bit; one case
per refused type; bytes built by hand, cut at every length, flipped at every byte, made at random.
"""

import contextlib
import datetime as dt
import enum
import functools
import json
import math
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cffi import FFI
from hypothesis import given, settings
from hypothesis import strategies as st

from lightckpt.errors import FormatError, UnsafeStateError
from lightckpt.hoststate import _FORM_OF_TAG, _LEAVES, DEPTH_MAX, LEAF_ALIGN, Blob, decode, encode

# fmt: off
HEADER = struct.Struct("<4sIQ")
LEAF = {"$": ["leaf", 0]}

def exact(x):
    """Return what is equal only for values that are equal in type, order and bits."""
    kind = type(x)
    if kind in (float, complex):
        return kind, np.array(x).tobytes()
    if kind in (list, tuple, deque):
        return kind, getattr(x, "maxlen", None), [exact(y) for y in x]
    if kind in (set, frozenset):
        return kind, sorted((exact(y) for y in x), key=repr)
    if kind is slice:
        return kind, exact([x.start, x.stop, x.step])
    if isinstance(x, dict):
        rest = [getattr(x, name, None) for name in ("default_factory", "__dict__")]
        return kind, exact(rest), exact(list(x.items()))
    if kind is np.ndarray:
        fortran = x.flags.f_contiguous or not x.nbytes
        return kind, x.dtype, x.dtype.type, x.shape, (x.T if fortran else x).tobytes(), fortran
    if isinstance(x, np.generic) and kind not in (np.str_, np.bytes_):
        return kind, x.dtype, x.tobytes()
    size = len(x) if isinstance(x, np.generic) else 0  # numpy compares without trailing zeros.
    return kind, repr(x) if kind in (Decimal, dt.datetime) else x, size

def check(tree):
    assert exact(decode(encode(tree))) == exact(tree)

def with_header(text, body=b""):
    return HEADER.pack(b"LCH1", len(text), HEADER.size + len(text) + len(body)) + text + body

def container(node, *leaves):
    """Build host state by hand; each of *leaves* is (kind, data, meta)."""
    table = [[kind, len(data), meta] for kind, data, meta in leaves]
    text = json.dumps({"tree": node, "leaves": table}).encode()
    body = b""
    for _, data, _ in leaves:
        body += bytes(-(HEADER.size + len(text) + len(body)) % LEAF_ALIGN) + data
    return with_header(text, body)

# Exactness.

any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0])
any_text = st.text(st.characters(exclude_categories=()), max_size=8) | st.text("\ud83d\ude00$a")
any_int = st.integers() | st.integers(-(2**66), 2**66)
zones = st.none() | st.timedeltas(dt.timedelta(-1, 1), dt.timedelta(0, 86399)).map(dt.timezone)
scalars = st.one_of(
    st.none(), st.booleans(), any_int, any_float, any_text, st.binary(max_size=100),
    st.builds(complex, any_float, any_float), st.fractions(), st.uuids(), st.dates(),
    st.decimals().filter(lambda d: not d.is_snan()), st.timedeltas(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(lambda d, zone, fold: d.replace(tzinfo=zone, fold=fold),
              st.datetimes(), zones, st.integers(0, 1)),
    any_text.filter(lambda s: "\0" not in s).map(PurePosixPath))
mutable = st.one_of(
    st.binary(max_size=100).map(bytearray), st.builds(slice, scalars, scalars, scalars),
    st.lists(any_float, min_size=60, max_size=70), st.lists(any_int, min_size=60, max_size=70))
keys = scalars | st.tuples(scalars, any_text) | st.frozensets(st.integers() | any_text, max_size=3)
trees = st.recursive(
    scalars | mutable, lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(any_text, inner, max_size=4), st.dictionaries(keys, inner, max_size=4),
        st.lists(st.tuples(keys, inner), max_size=4).map(OrderedDict), st.sets(keys, max_size=4),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 9)),
        st.builds(lambda d, kind: defaultdict(kind, d), st.dictionaries(keys, inner, max_size=4),
                  st.sampled_from([None, int, float, list, dict, set, str, tuple])),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter)))

@settings(max_examples=150)
@given(trees)
def test_every_tree_comes_back_exactly(tree):
    check(tree)

FLOATS = [0.1, 1e308, *(struct.unpack(">d", bytes.fromhex(text))[0] for text in (
    "7ff8000000000000", "fff8000000000000", "7ff800000000beef", "7ff0000000000001",
    "7ff0000000000000", "fff0000000000000", "8000000000000000", "0000000000000001"))]
STATE_DICT = OrderedDict(a=1)
STATE_DICT._metadata = torch.nn.BatchNorm1d(2).state_dict()._metadata
TRICKY = [
    *([x, [x], {"a": x, x: x}, [x] * 100, complex(x, -0.0), complex(-0.0, x)] for x in FLOATS),
    "\ud83d\ude00", "\U0001f600",  # Two lone surrogates are not the character U+1F600.
    {"\ud83d\ude00": 1, "\U0001f600": 2}, {"$": ["tuple", 1]}, {"$": 1, "a": 2},
    {"b": 1, "a": 2, "": 3, "é": 4}, {2: 0, 1: 0, "1": 0, None: 0, b"1": 0, (1, "a"): 0, 0.5: 0},
    {True: 1}, {1: 1}, {1.0: 1}, [True, 1, 1.0], [True] * 100, [True, 1] * 50, [1.5, 1] * 50,
    10**5000, [10**5000] * 100,  # More digits than int() reads.
    [2**63] * 100, [-(2**63), 2**63 - 1] * 50, [1.5] * 100, (2,) * 100, -(2**63), 2**63,
    b"x" * 1000, bytearray(1000), bytearray(b"short"), (), [], {}, set(), frozenset(), "", deque(),
    deque([1, 2], maxlen=2), range(-5, 10**30, 3), slice(None, 1.5, "x"), int, list,
    Decimal("1.10"), Decimal("-sNaN123"), Decimal("-0E+5"), Fraction(-1, 10**40), uuid.UUID(int=5),
    Path("a/b"), PurePosixPath("//a"), PureWindowsPath("C:\\a\\b"), dt.date.max, dt.timedelta.min,
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=-1), "odd")), dt.UTC,
    STATE_DICT, random.getstate(),
    *(kind(5).state for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)),
    np.float64(-0.0), np.float32("nan"), np.float16(1), np.longdouble("0.1"), np.longlong(5),
    np.ulonglong(5), np.bool_(True), np.complex64(1j), np.datetime64("NaT", "ns"), np.str_("a\0"),
    np.timedelta64(5, "25s"), np.str_(""), np.str_("\ud83d\ude00"), np.bytes_(b"a\0"),
    np.bytes_(b""), np.void(b"a\0"), np.void(b""), np.array([(1, 2.0)], "i4,>f8")[0],
    *map(torch.device, ["cpu", "cpu:0", "cuda", "cuda:3", "meta"]),
    *map(torch.Size, [(), (0,), (2, 3), (1,) * 100]),
    *(x for x in vars(torch).values()
      if type(x) in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme))]

@pytest.mark.parametrize("tree", TRICKY, ids=lambda tree: type(tree).__name__)
def test_what_is_easily_got_wrong_is_right(tree):
    check(tree)
    check({"a": (tree, [tree])})

DTYPES = [
    "?", "i1", "<u2", ">i4", "q", "Q", ">q", "l", "e", "f", ">d", "g", "F", "D", "G", "S5", "U3",
    "V4", "M8", "M8[s]", ">M8[25us]", "m8[D]", "S0", "U0", "V0", [], [("a", "<i4"), ("b", ">f8")],
    [("a", "i1", (2, 3)), ("b", [("c", "U2"), ("d", "M8[ns]")])], [(("title", "a"), "i4")],
    {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [3, 16], "itemsize": 40},
    np.dtype([("a", "i1"), ("b", "f8")], align=True)]

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_come_back_exactly(dtype):
    dtype = np.dtype(dtype)
    for shape in [(), (0,), (5,), (2, 3), (3, 0, 2), (2, 3, 4)]:
        data = bytearray(i % 4 == 0 for i in range(math.prod(shape) * dtype.itemsize))
        check([np.ndarray(shape, dtype, data), np.ndarray(shape, dtype, data, order="F")])

def test_other_strides_come_back_in_c_order_and_writable():
    base = np.arange(24.0).reshape(2, 3, 4)
    for view in (base[:, ::2], base.swapaxes(0, 1), base[..., ::-1], np.broadcast_to(1, (2, 3))):
        back = decode(encode(view))
        assert np.array_equal(back, view)
        assert back.flags.c_contiguous
        assert back.flags.writeable

def test_one_array_twice_comes_back_as_one_with_its_own_memory():
    array = np.arange(3)
    buffer = bytearray(encode({"a": array, "b": [array], "c": array.copy()}))
    back = decode(memoryview(buffer))
    buffer[-24:] = bytes(24)
    assert back["a"] is back["b"][0]
    assert back["c"] is not back["a"]
    assert back["c"].tolist() == [0, 1, 2]

def test_it_loads_and_works_without_torch():
    code = ("import sys; from lightckpt.hoststate import *; decode(encode({'a': (1, 2)}));"
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})

def test_the_state_of_python_random_is_one_leaf():
    assert len(encode(random.getstate())) < 625 * 8 + 200

# Leaves of the caller's.

def tensor_out(obj):
    if type(obj) is not torch.Tensor:
        return None
    meta = {"shape": list(obj.shape), "$": (obj.dtype,)}
    return Blob(meta, obj.numpy().reshape(-1).view(np.uint8))

def tensor_in(meta, data):
    assert data.readonly
    flat = torch.frombuffer(bytearray(data), dtype=meta["$"][0]) if len(data) else torch.empty(0)
    return flat.reshape(meta["shape"])

def test_tensors_travel_through_the_hooks():
    a, b = torch.rand(3, 5), torch.rand(2)
    encoded = encode({"a": a, "b": (b, [a]), a: 1, "c": torch.empty(0)}, leaf=tensor_out)
    assert bytes(FFI().buffer(FFI().from_buffer(encoded))) == encoded
    back = decode(encoded, leaf=tensor_in)
    assert [x.tolist() for x in (back["a"], back["b"][0])] == [a.tolist(), b.tolist()]
    assert back["b"][1][0] is back["a"]
    assert back[back["a"]] == 1
    assert back["c"].shape == (0,)
    for leaf in (None, lambda meta, _: meta["no such key"]):
        with pytest.raises(FormatError, match="hook" if leaf is None else "no such key"):
            decode(encoded, leaf=leaf)

def test_every_leaf_is_aligned():
    data = [bytes([i]) * (i * 37) for i in range(9)]
    rest = iter(data)
    encoded = encode([[object()] for _ in data], leaf=lambda _: Blob({}, next(rest)))
    views = []
    decode(encoded, leaf=lambda _, view: views.append(view))
    assert [bytes(view) for view in views] == data
    start = np.frombuffer(encoded, np.uint8).ctypes.data
    offsets = [np.frombuffer(view, np.uint8).ctypes.data - start for view in views if len(view)]
    assert all(offset % LEAF_ALIGN == 0 for offset in offsets)

def test_the_hook_is_asked_about_unknown_types_before_pickle():
    asked = []
    encode([1, "a", (None, {1: 2}), np.arange(3), np.int8(1), torch.int, int], leaf=asked.append)
    assert not asked
    encoded = encode(SimpleNamespace(), allow_pickle=True, leaf=lambda _: Blob({"mine": 1}, b""))
    assert decode(encoded, leaf=lambda meta, _: meta) == {"mine": 1}

# What is refused, and how.

Point, Colour = namedtuple("Point", "x y"), enum.IntEnum("Colour", "RED")
REFUSED = [
    lambda: 1, len, functools.partial(int), Colour.RED, Colour, Point(1, 2), ..., object(),
    *(type("Sub", (kind,), {})() for kind in (str, int, float, list, tuple, dict, set, bytes)),
    type("Sub", (dt.datetime,), {})(2024, 1, 1), ModuleType("m"), (i for i in ()), memoryview(b""),
    zoneinfo.ZoneInfo("UTC"), random.Random(1), np.array([None]), np.ma.array([1]),
    np.rec.array([(1, 2)]), np.zeros(1, np.dtype((np.record, "i4,i4"))), np.dtype("f4"),
    np.random.default_rng(1), torch.rand(2), torch.nn.Parameter(torch.rand(1)), torch.Generator()]

@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_types_are_refused_with_path_and_type(value):
    with pytest.raises(UnsafeStateError, match="allow_pickle") as caught:
        encode({"lr_lambdas": [1, value]}, root="scheduler.sch")
    path, _, kind = str(caught.value).partition(" is of type ")
    assert path == "`scheduler.sch.lr_lambdas[1]`"
    assert kind.partition(",")[0].endswith(type(value).__name__)

BAD, LOOP, ODD = object(), {"a": [1, {"b": 2}]}, OrderedDict(a=1)
LOOP["a"][1]["c"], ODD.helper = LOOP["a"], BAD
PATHS = {
    "`host` is": BAD, "`host['layer.weight'][1][1]` is": {"layer.weight": [0, (1, BAD)]},
    "`host[3]` is": {3: BAD}, "`host[('a', 1)].b` is": {("a", 1): {"b": BAD}},
    "`host[<object object at": {"a": 1, BAD: 1}, "`host.b` is": OrderedDict(a=1, b=BAD),
    "`host.a` is": Counter({"a": BAD}), "`host.seen{...}` is": {"seen": {BAD}},
    "`host[1]` is": deque([1, BAD]), "`host.__dict__.helper` is": ODD,
    "`host.default_factory` is of type function": defaultdict(lambda: 1),
    "`host.default_factory` is of type enum.Enum": defaultdict(Colour),
    "`host.a[1].c` lies in itself": LOOP}

@pytest.mark.parametrize("path", PATHS)
def test_paths_read_like_code(path):
    with pytest.raises(UnsafeStateError) as caught:
        encode(PATHS[path], root="host")
    assert str(caught.value).startswith(path)
    with pytest.raises(UnsafeStateError, match=r"^`(state|[^.].*)` "):
        encode(PATHS[path])

def test_depth_is_limited_and_what_is_encoded_at_the_limit_decodes():
    wraps = [lambda x: [x], lambda x: {"a": x}, lambda x: (x,), lambda x: {1: x},
             lambda x: OrderedDict(a=x)]
    for wrap in wraps:
        deep = functools.reduce(lambda x, _, wrap=wrap: wrap(x), range(DEPTH_MAX), 1)
        assert decode(encode(deep)) == deep
        with pytest.raises(UnsafeStateError, match="200 levels"):
            encode([deep])
    for leaf in (math.nan, 2**70, np.float32(1), np.arange(3), dt.UTC, {1: 2}, "\ud800"):
        for depth in range(DEPTH_MAX - 5, DEPTH_MAX):
            with contextlib.suppress(UnsafeStateError):
                decode(encode(functools.reduce(lambda x, _: [x], range(depth), leaf)))

# Pickle.
class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)

def test_pickle_needs_leave_both_ways():
    moment = dt.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    tree = [Point(1, 2), Colour.RED, moment, defaultdict(Point, {1: 2}), np.array([None, "a"])]
    encoded = encode(tree, allow_pickle=True)
    with pytest.raises(UnsafeStateError, match="allow_pickle"):
        decode(encoded)
    back = decode(encoded, allow_pickle=True)
    assert [exact(x) for x in back[:4]] == [exact(x) for x in tree[:4]]
    assert back[4].tolist() == [None, "a"]
    with pytest.raises(UnsafeStateError, match=r"`s.f\[0\]` is of type function, .* pickled"):
        encode({"f": [lambda: 1]}, root="s", allow_pickle=True)

def test_a_smuggled_pickle_does_not_run():
    bomb = pickle.dumps(Bomb())
    for encoded in (container(1, ("pickle", bomb, None)), container(LEAF, ("pickle", bomb, None))):
        with pytest.raises(UnsafeStateError):
            decode(encoded)
        with pytest.raises(FormatError):
            decode(container({"$": ["pickle", {"$": ["bytes", bomb.hex()]}]}))
    assert not Bomb.exploded
    decode(encoded, allow_pickle=True)
    assert Bomb.exploded
    for data in (b"", b"garbage", pickle.dumps([1])[:-1], b"cno_such_module\nx\n."):
        with pytest.raises(FormatError):
            decode(container(LEAF, ("pickle", data, None)), allow_pickle=True)

# Damage.
def decodes(encoded):
    """Decode *encoded*, if it can be; any other error than these two is a failure."""
    try:
        decode(encoded, leaf=tensor_in)
    except (FormatError, UnsafeStateError):
        return False
    return True

HOSTILE = {
    "array larger than its leaf": (LEAF, ("array", b"", [["<f8"], [2**40], "C"])),
    "array smaller than its leaf": (LEAF, ("array", bytes(16), [["<f8"], [1], "C"])),
    "array of a negative shape": (LEAF, ("array", bytes(8), [["<f8"], [-1, -1], "C"])),
    "array whose size overflows": (LEAF, ("array", b"", [["<f8"], [0, 2**62, 2**62], "C"])),
    "huge items": (LEAF, ("array", b"", [["V2000000000"], [1], "C"])),
    "array of objects": (LEAF, ("array", bytes(8), [["O"], [1], "C"])),
    "array of objects in fields": (LEAF, ("array", bytes(8), [[[["a", "O"]]], [1], "C"])),
    "scalar object": ({"$": ["numpy", ["O"], {"$": ["bytes", "00" * 8]}]},), "tag": ({"$": [[]]},),
    "code by name": ({"$": ["factory", "eval"]},), "no type": ({"$": ["defaultdict", "int"]},),
    "code of torch by name": ({"$": ["torch", "dtype", "<class 'torch.Tensor'>"]},),
    "leaf in itself": (LEAF, ("hook", b"", {"a": LEAF})), "no leaf": (LEAF,),
    "ints of broken length": (LEAF, ("list", bytes(9), "q")), "unknown": ({"$": ["eval", "1"]},),
    "tag and key": ({"$": ["tuple"], "a": 1},), "no tag": ({"$": []},), "no body": ({"$": 1},),
    "key unhashable": ({"$": ["dict", None, [], 1]},), "half a pair": ({"$": ["dict", None, 1]},),
    "fraction over zero": ({"$": ["Fraction", 1, 0]},), "no decimal": ({"$": ["Decimal", "x"]},),
    "no memory": ({"$": ["Fraction", "1e999999999"]},), "no dtype": ({"$": ["numpy", [",i4"], 1]},),
    "date out of range": ({"$": ["date", 10**6, 1, 1]},), "maxlen": ({"$": ["deque", -1]},),
    "packed leaf that occurs twice": ([LEAF, LEAF], ("list", bytes(8), "q")),
    "depth": (functools.reduce(lambda x, _: {"$": ["tuple", [x]]}, range(101), 1),)}

@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_a_format_error_and_takes_no_memory(name):
    node, *leaves = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(container(node, *leaves), leaf=tensor_in)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()

def test_claims_that_do_not_fit_the_buffer_are_format_errors():
    cases = [HEADER.pack(b"LCH1", *claim) for claim in ((0, 16), (2**32 - 1, 16), (0, 2**64 - 1))]
    cases += [with_header(text * 10**5) for text in (b"[", b'{"tree":')]
    cases += [with_header(b'{"tree": 1, "leaves": []}', b"more"), encode(1) + b"more"]
    sizes = [[size] for size in (-1, 2**31, 2**63, 10**30, 1.0, True, None, "8")]
    for claimed in [*sizes, [1000] * 1000, [2024, -1048]]:  # The last two would overlap.
        table = [["bytes", size, ""] for size in claimed]
        text = json.dumps({"tree": LEAF, "leaves": table}).encode()
        cases.append(with_header(text, bytes(-(16 + len(text)) % LEAF_ALIGN + 1000)))
    for case in cases:
        with pytest.raises(FormatError):
            decode(case)

SAMPLE = {
    "group": {"lr": 0.1, "betas": (0.9, 0.999), "name": "a"}, 1: {1.5, "x"}, "ints": [7] * 70,
    "array": np.arange(6, dtype=">i2").reshape(2, 3), "scalar": np.float32(2), "b": b"b" * 70,
    "struct": np.zeros(2, [("a", "M8[s]"), ("b", "U2", (2,))]), "tensor": torch.arange(3),
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1])],
    "odd": [math.nan, 2**80, 1j, Decimal(1), Fraction(1, 3), deque([1], 3), slice(1), "\ud800"],
    "more": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC), Counter("ab"), defaultdict(int)]}

def test_every_cut_and_every_damaged_byte_is_refused_or_decodes():
    encoded = encode(SAMPLE, leaf=tensor_out)
    assert decodes(encoded)
    for at in range(len(encoded)):
        assert not decodes(encoded[:at])
        for flip in (1 << at % 8, 255):
            damaged = bytearray(encoded)
            damaged[at] ^= flip
            assert not decodes(damaged) or at >= HEADER.size

atoms = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["<f8", "O", "i4,O", "(2)i4", "M8[s]", "V0", "U2", "dtype", "device", "Size",
                     "torch.float32", "cpu", "00", "ff" * 8, "-0x1", "1e999999999", "q", "C"]))
tags, kinds = map(st.sampled_from, ([*_FORM_OF_TAG, "leaf"], [*_LEAVES, "hook", "other"]))
nodes = st.recursive(atoms, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("a$b"), inner, max_size=2),
    st.builds(lambda tag, parts: {"$": [tag, *parts]}, tags, st.lists(inner, max_size=4))))
@settings(max_examples=300)
@given(nodes, st.lists(st.tuples(kinds, st.binary(max_size=24), nodes), max_size=3), st.binary())
def test_random_nodes_are_refused_or_decode_and_garbage_is_refused(node, leaves, garbage):
    decodes(container(node, *leaves))
    assert not any(map(decodes, (garbage, b"LCH1" + garbage, with_header(garbage))))
