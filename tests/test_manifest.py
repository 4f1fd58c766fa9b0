"""Manifests come back as they were, and nothing that contradicts itself is believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightckpt.errors import FormatError
from lightckpt.manifest import (
    DTYPE_BYTES,
    Manifest,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)

texts = st.text(max_size=6)
paths = st.lists(texts, min_size=1, max_size=4).map(tuple)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def manifests(draw):
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(shapes)
        stride = tuple(draw(st.integers(0, 9)) for _ in shape)
        flags = {
            name: draw(st.booleans())
            for name in ("requires_grad", "buffer", "persistent", "parameter", "conj", "neg")
        }
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        entries.append(TensorEntry(draw(paths), dtype, shape, stride, 0, draw(st.integers(0, 99)),
                                   **flags))  # fmt: skip
    groups = draw(st.dictionaries(texts, st.lists(st.lists(paths, max_size=2), max_size=2)))
    absent = tuple(draw(st.lists(paths, max_size=2)))
    return Manifest(tuple(entries), (100_000, 7), groups, absent, ("model",), draw(texts))


@given(manifests())
def test_round_trip(manifest):
    blob = encode_manifest(manifest)
    assert decode_manifest(blob) == manifest
    assert encode_manifest(decode_manifest(blob)) == blob


GOOD = json.loads(
    encode_manifest(
        Manifest((TensorEntry(("model", "m", "w"), "float32", (2, 3), (3, 1), 0),), (24,))
    )
)


@pytest.mark.parametrize(
    "change",
    [
        {"extents": [20]},
        {"extents": [-1]},
        {"extents": [24.0]},
        {"extents": []},
        {"groups": 3},
        {"groups": {"o": [[["a", 1]]]}},
        {"single": 1},
        {"tensors": [{}]},
        {"tensors": [{"path": []}]},
        {"tensors": [{**GOOD["tensors"][0], "dtype": "float31"}]},
        {"tensors": [{**GOOD["tensors"][0], "shape": [2]}]},
        {"tensors": [{**GOOD["tensors"][0], "shape": [2, -3]}]},
        {"tensors": [{**GOOD["tensors"][0], "stride": [1 << 61, 1]}]},
        {"tensors": [{**GOOD["tensors"][0], "extent": 1}]},
        {"tensors": [{**GOOD["tensors"][0], "extent": -2}]},
        {"tensors": [{**GOOD["tensors"][0], "offset": 4}]},
        {"tensors": [{**GOOD["tensors"][0], "offset": -4}]},
        {"tensors": [{**GOOD["tensors"][0], "packed": 1}]},
        {"tensors": [{**GOOD["tensors"][0], "surprise": 1}]},
    ],
    ids=str,
)
def test_contradictions_are_refused(change):
    with pytest.raises(FormatError):
        decode_manifest(json.dumps({**GOOD, **change}).encode())


@pytest.mark.parametrize("blob", [b"", b"{", b"\xff", b"[]", b"3", b"{}", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(blob):
    with pytest.raises(FormatError):
        decode_manifest(blob)
