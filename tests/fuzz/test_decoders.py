"""Decoders under bad bytes. Goal: they refuse in the documented way, in bounded memory and time.

Method: the saved corpus, which holds every input that ever failed, and seeded mutants of it, in a
process whose memory is limited; random JSON and random bytes (hypothesis); and by hand what no
limit shows. `make fuzz` does the first for as long as one likes, guided by coverage.
"""

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decoders
import lightckpt
from lightckpt.archive import archive, expand
from lightckpt.container import ContainerReader
from lightckpt.errors import FormatError
from lightckpt.hoststate import decode
from lightckpt.manifest import Manifest, TensorEntry, decode_manifest, encode_manifest
from small_run import assert_same, save

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"


@pytest.mark.parametrize("target", decoders.TARGETS)
def test_the_corpus_and_mutants_of_it_are_refused_or_decode(target, tmp_path):
    command = [sys.executable, HERE / "decode.py", target, "--chance", "--seconds=1", "--seed=1"]
    done = subprocess.run(
        [*command, f"--failures={tmp_path}", CORPUS / target],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures: 0" in done.stdout


def test_the_corpus_is_small():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {*decoders.TARGETS, "open_store"}
    assert sum(path.stat().st_size for path in files) < 300_000


@pytest.mark.parametrize("target", decoders.TARGETS)
def test_mutators_keep_the_format_and_follow_their_seed(target):
    data = (CORPUS / target / "saved.bin").read_bytes()
    mutants = [decoders.mutate(target, data, random.Random(seed)) for seed in range(50)]
    assert mutants == [decoders.mutate(target, data, random.Random(seed)) for seed in range(50)]
    assert len(set(mutants)) > 40


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["model", "state", "float32", "os.system", 2**62, 2**64, -1]),
)  # fmt: skip
keys = st.text(max_size=3) | st.sampled_from(
    ["extents", "tensors", "groups", "absent", "single", "made_by", "path", "dtype", "shape",
     "stride", "extent", "subclass", "step", "parts", "bytes", "element", "chunks"]
)  # fmt: skip
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
)


@settings(max_examples=150)
@given(trees, st.binary(max_size=80))
def test_any_json_and_any_bytes_are_refused_or_read(tree, garbage):
    text = json.dumps(tree).encode()
    for target in ("host", "manifest"):
        decoders.run(target, text, HERE)
        decoders.run(target, garbage, HERE)


@settings(max_examples=60)
@given(trees, st.binary(max_size=80))
def test_any_index_of_a_container_is_refused_or_read(tmp_path_factory, tree, garbage):
    folder = tmp_path_factory.mktemp("container")
    decoders.run("container", decoders.pack_container(tree, garbage), folder)
    decoders.run("container", garbage, folder)


sizes = st.lists(st.integers(0, 40), min_size=2, max_size=5)


@settings(max_examples=25)
@given(sizes, st.binary(max_size=60), st.binary(max_size=60))
def test_a_store_of_any_blob_and_host_state_is_refused_or_loaded(
    tmp_path_factory, extents, blob, host
):
    folder = tmp_path_factory.mktemp("load")
    whole = encode_manifest(Manifest((), tuple(extents)))
    decoders.run("load", decoders.pack_load(whole, host), folder)
    decoders.run("load", decoders.pack_load(blob, host), folder)


# What hostile bytes may claim, and what each once cost.


def refusal(data: bytes) -> str:
    """Return the message with which host state is refused, and see that little memory was used."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 8 * len(data)
    finally:
        tracemalloc.stop()
    return str(caught.value)


def test_a_shape_of_arrays_is_not_multiplied():
    assert "3 dimensions" in refusal((CORPUS / "host" / "shape_of_arrays.bin").read_bytes())


def test_a_message_does_not_repeat_an_array():
    data = (CORPUS / "host" / "array_many_times_in_a_message.bin").read_bytes()
    assert len(refusal(data)) < 300


def test_a_long_shape_is_not_multiplied_out():
    leaf = {"tree": {"$": ["leaf", 0]}, "leaves": [["array", 0, [["|u1"], [2**62] * 10**5, "C"]]]}
    assert "100000 dimensions" in refusal(decoders.pack_host(leaf, [b""]))


def test_a_tensor_with_elements_lies_in_an_extent():
    data = (CORPUS / "manifest" / "large_and_in_no_extent.bin").read_bytes()
    with pytest.raises(FormatError, match=r"of shape \[1099511627776\] lies in no extent"):
        decode_manifest(data)


@pytest.mark.parametrize("name", ["one_chunk_many_times", "chunks_that_expand_too_far"])
def test_a_container_expands_in_proportion_to_its_size(name):
    with pytest.raises(FormatError, match=r"overlaps one|with a chunk of"):
        ContainerReader(CORPUS / "container" / f"{name}.bin")


@pytest.mark.parametrize("name", ["step_without_end", "step_below_zero"])
def test_the_step_of_a_container_is_a_step(name, tmp_path):
    with pytest.raises(FormatError, match="is no step"):
        expand(CORPUS / "container" / f"{name}.bin", tmp_path / "never")


def test_a_packed_tensor_of_expanded_dimensions_comes_back(folder):
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    model.register_buffer("column", torch.randn(6, 50)[:, 3].unsqueeze(0).expand(4, 6))
    save(folder / "store", model=model)
    assert_same(lightckpt.load(folder / "store")["model"], model.state_dict())
    kept = model.column.clone()
    model.column[0].zero_()
    with lightckpt.Checkpointer(folder / "store", model=model) as checkpointer:
        checkpointer.restore()
    assert_same(model.column.clone(), kept)
    archive(folder / "store", folder / "archive", compress="lz4")
    assert_same(lightckpt.load(folder / "archive")["model"]["column"], kept)


def tampered(folder: Path, manifest: Manifest | None = None, **branches: object) -> Path:
    """Make a store whose checksums are right, of a small run with something else in its place."""
    from torch import nn

    from lightckpt.collect import read_host
    from lightckpt.hoststate import encode
    from lightckpt.reader import open_reader
    from lightckpt.tensors import encode_leaf

    save(folder / "good", model=nn.Linear(2, 2))
    with open_reader(folder / "good") as store:
        blob, host = map(bytes, store.view(store.versions()[0].version))
    blob = blob if manifest is None else encode_manifest(manifest)
    tree = encode({**read_host(host), **branches}, leaf=encode_leaf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders.lightckpt, "load", lambda path: None)
        decoders.load_store(decoders.pack_load(blob, tree), folder)
    return folder / "store"


@pytest.mark.parametrize(
    "branches",
    [{"modes": 5}, {"groups": []}, {"groups": {"o": [{}]}}, {"state": [[1]]}, {"loose": [[[], 1]]},
     {"module": {}}, {"rng": None}, {"scheduler": []}, {"extra": 0}],
    ids=str,
)  # fmt: skip
def test_host_state_of_another_form_changes_nothing(folder, branches):
    from torch import nn

    store = tampered(folder, **branches)
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with lightckpt.Checkpointer(store, model=model) as checkpointer:
        with pytest.raises(FormatError):
            checkpointer.restore()
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("extents", [(16, 9), (16,), (16, 8, 8)], ids=str)
def test_a_manifest_with_other_extents_than_its_version_changes_nothing(folder, extents):
    from torch import nn

    from lightckpt._core import Media, Store, make_sizes

    entries = tuple(
        TensorEntry(("model", "model", name), "float32", shape, stride, index, parameter=True)
        for index, (name, shape, stride) in enumerate(
            [("weight", (2, 2), (2, 1)), ("bias", (2,), (1,))][: len(extents)]
        )
    )
    blob = encode_manifest(Manifest(entries, extents))
    store = tampered(folder)
    store.unlink()
    with Store(folder / "good", read_only=True) as good:
        host = bytes(good.view(good.versions()[0].version)[1])
    with Store(store, create=True, media=Media.FILE, workers=1) as made:
        made.begin(step=1, keep=1, extents=make_sizes([0, 0]), blob=blob, host_bytes=len(host))
        made.wait(made.commit(host))
    model = nn.Linear(2, 2)
    with lightckpt.Checkpointer(store, model=model) as checkpointer:
        with pytest.raises(FormatError, match=r"the manifest (says|names)"):
            checkpointer.restore()
