"""Seeds for the decoders: what a small run saves, a tree with every tag, and what once did harm.

``python tests/fuzz/seeds.py FOLDER`` writes them; FOLDER is tests/fuzz/corpus.
"""

import datetime as dt
import random
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import nn

from decoders import pack_container, pack_host, pack_load
from lightckpt.archive import archive
from lightckpt.container import MAGIC
from lightckpt.hoststate import encode
from lightckpt.manifest import Manifest, TensorEntry, encode_manifest
from lightckpt.reader import open_reader
from lightckpt.tensors import encode_leaf

LEAF: dict[str, Any] = {"$": ["leaf", 0]}

EVERY_TAG = {
    "plain": [None, True, 1, 0.5, "text", "\ud800", float("nan"), 2**80, 1j], 1: (b"b", [7] * 70),
    "bytes": [b"b" * 70, bytearray(b"b")], "set": {1, "a"}, "frozen": frozenset([1]),
    "deque": deque([1], 3), "counter": Counter("ab"), "ordered": OrderedDict(a=1),
    "default": defaultdict(int), "range": range(3), "slice": slice(1), "date": dt.date.max,
    "time": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "delta": dt.timedelta(1),
    "numbers": [Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=5)], "floats": [0.5] * 65,
    "paths": [PurePosixPath("a"), PureWindowsPath("b"), Path("c")], "type": int,
    "numpy": [np.float32(2), np.str_("a\0"), np.bytes_(b"a\0"), np.datetime64("NaT", "s")],
    "arrays": [np.arange(6, dtype=">i2").reshape(2, 3), np.zeros(2, [("a", "M8[s]"), ("b", "U2")])],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.strided],
    "tensors": [torch.arange(6.0).reshape(2, 3).t(), torch.eye(2).to_sparse(), torch.tensor(5),
                nn.Parameter(torch.ones(2)), torch.empty(0)],
}  # fmt: skip


def _host(node: Any, *leaves: tuple[str, bytes, Any]) -> bytes:
    """Build host state by hand; each of *leaves* is (kind, data, meta)."""
    table = [[kind, len(data), meta] for kind, data, meta in leaves]
    return pack_host({"tree": node, "leaves": table}, [data for _, data, _ in leaves])


def _axis(at: int) -> tuple[str, bytes, Any]:
    shape = [1] * 3
    shape[at] = 900
    return "array", bytes(900), [["|u1"], shape, "C"]


def hosts() -> dict[str, bytes]:
    text = ("array", b"a\0\0\0" * 2000, [["<U10"], [200], "C"])
    return {
        "every_tag": encode(EVERY_TAG, leaf=encode_leaf),
        "random": encode(random.Random(1).getstate()),
        "shape_of_arrays": _host(
            LEAF, ("array", b"", [["|u1"], [{"$": ["leaf", i]} for i in (1, 2, 3)], "C"]),
            *map(_axis, range(3)),
        ),
        "array_many_times_in_a_message": _host({"$": ["int", *[LEAF] * 99]}, text),
        "no_dict": encode(5),
        "early_is_no_bytes": encode({"early": 5}),
        "pickle": _host(LEAF, ("pickle", b"cbuiltins\nexec\n(S'1/0'\ntR.", None)),
    }  # fmt: skip


def _manifest(**entry: Any) -> bytes:
    fields = {"dtype": "float32", "shape": (2, 3), "stride": (3, 1), "extent": 0, **entry}
    path = fields.pop("path", ("model", "m", "w"))
    return encode_manifest(Manifest((TensorEntry(path, **fields),), (24,)))


def manifests(saved: bytes) -> dict[str, bytes]:
    return {
        "saved": saved,
        "large_and_in_no_extent": _manifest(shape=(2**40,), stride=(1,), extent=-1),
        "packed_and_expanded": _manifest(shape=(4, 6), stride=(0, 1), packed=True),
        "expanded_beyond_all_bounds": _manifest(shape=(2**61, 2**61), stride=(0, 0)),
        "subclass": _manifest(subclass="os.system", extent=-1),
        "path_of_a_kind": _manifest(path=("model",)),
    }


def containers(saved: bytes) -> dict[str, bytes]:
    assert saved.startswith(MAGIC)
    part = {"bytes": 1, "element": 1, "chunks": [[64, 1, 0]]}
    none = {"bytes": 0, "element": 1, "chunks": []}
    index = {"step": 1, "made_by": "", "parts": [part, none]}

    def with_part(size: int, chunks: list[list[int]]) -> bytes:
        large = {"bytes": size, "element": 4, "chunks": chunks}
        return pack_container({**index, "parts": [large, large]}, b"\0" * 99)

    return {
        "saved": saved,
        "step_without_end": pack_container({**index, "step": float("inf")}, b"\0"),
        "step_below_zero": pack_container({**index, "step": -1}, b"\0"),
        "one_chunk_many_times": with_part(500 << 20, [[64, 90, 0]] * 500),
        "chunks_that_expand_too_far": with_part(50 << 20, [[64 + i, 1, 0] for i in range(50)]),
    }


def write(folder: Path) -> None:
    from small_run import SmallRun, folder_in_memory

    with folder_in_memory() as place:
        run = SmallRun(place / "store", width=4, rng=False).train(1)
        run.close()
        container = archive(run.path, place, compress="lz4").read_bytes()
        with open_reader(run.path) as store:
            blob, host = map(bytes, store.view(store.versions()[0].version))
    seeds = {
        "host": {**hosts(), "saved": host},
        "manifest": manifests(blob),
        "container": containers(container),
        "load": {
            "saved": pack_load(blob, host),
            **{name: pack_load(data, host) for name, data in manifests(blob).items()},
            "pickle": pack_load(blob, hosts()["pickle"]),
        },
    }
    for kind, named in seeds.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, data in named.items():
            (folder / kind / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    write(Path(sys.argv[1]))
