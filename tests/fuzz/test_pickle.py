"""No bytes run code. Goal: what a store, an archive or host state holds is never unpickled, called
or imported, unless allow_pickle says so.

Method: a pickle that leaves a file behind, in every place where bytes or names are decoded; and an
audit hook in a process of its own, which sees each import, exec and call of the system that loading
a hostile store causes.
"""

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import decoders
from lightckpt.collect import read_host
from lightckpt.errors import CheckpointError, FormatError, UnsafeStateError
from lightckpt.hoststate import _FORM_OF_TAG, _LEAVES, decode, encode
from lightckpt.manifest import Manifest, TensorEntry, encode_manifest
from lightckpt.tensors import decode_leaf

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"


class Canary:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def canary(tmp_path):
    """A path that must not come to be, and the pickles that would make it."""
    path = tmp_path / "flew"
    yield path, [pickle.dumps(Canary(path), protocol=protocol) for protocol in (0, 2, 4, 5)]
    assert not path.exists()


def test_the_canary_flies_where_it_is_let(tmp_path):
    path = tmp_path / "flew"
    data = encode(Canary(path), allow_pickle=True)
    decode(data, allow_pickle=True)
    assert path.exists()


def host(node: object, *leaves: tuple[str, bytes, object]) -> bytes:
    table = [[kind, len(data), meta] for kind, data, meta in leaves]
    return decoders.pack_host({"tree": node, "leaves": table}, [data for _, data, _ in leaves])


def values_of(data: bytes) -> list[object]:
    """Return every form in which host state can hand *data* to a constructor, as JSON nodes."""
    text = data.decode("latin-1")
    inner = [text, data.hex(), {"$": ["bytes", data.hex()]}, {"$": ["bytearray", data.hex()]}]
    return [*inner, {"$": ["numpy", ["O"], inner[2]]}, {"$": ["numpy.bytes_", inner[2]]}]


@pytest.mark.parametrize("tag", [*_FORM_OF_TAG, "leaf", "pickle"])
def test_no_value_of_host_state_is_unpickled(canary, tag):
    _, pickles = canary
    for data in pickles:
        for value in values_of(data):
            for parts in ([value], [value, value], ["dtype", value], [None, value, value]):
                for read in (decode, read_host):
                    with pytest.raises((FormatError, UnsafeStateError)):
                        read(host([{"$": [tag, *parts]}, {"$": ["leaf", 9]}]))
                    with pytest.raises((FormatError, UnsafeStateError)):
                        read(host({"$": [tag, *parts], "a": 1}))
                try:
                    decode(host({"$": [tag, *parts]}), leaf=decode_leaf)
                except (FormatError, UnsafeStateError):
                    continue


@pytest.mark.parametrize("kind", [*_LEAVES, "hook", "object", "os.system"])
def test_no_leaf_of_host_state_is_unpickled(canary, kind):
    _, pickles = canary
    metas = [None, "", "O", "q", "p", [["O"], [1], "C"], [["|O8"], [1], "C"], [["p"], [1], "C"],
             {"parts": [{"dtype": "object", "shape": [1], "offset": 0}]},
             {"parts": [{"dtype": "load", "shape": [1], "offset": 0}]}]  # fmt: skip
    for data in pickles:
        for meta in metas:
            leaf = (kind, data + bytes(-len(data) % 8), meta)
            for node in ({"$": ["leaf", 0]}, {"rng": {"$": ["leaf", 0]}}, 1):
                try:
                    decode(host(node, leaf), leaf=decode_leaf)
                except (FormatError, UnsafeStateError):
                    continue


def test_a_pickle_is_refused_in_every_branch_of_a_run(canary):
    path, pickles = canary
    from torch import nn

    from lightckpt import Checkpointer
    from lightckpt.reader import open_reader
    from small_run import folder_in_memory, save

    with folder_in_memory() as folder:
        save(folder / "good", model=nn.Linear(2, 2))
        with open_reader(folder / "good") as store:
            blob, good = map(bytes, store.view(store.versions()[0].version))
        tree = read_host(good)
        for branch in (*tree, "early"):
            for value in (Canary(path), {"model": Canary(path)}, [[["model"], Canary(path)]]):
                smuggled = encode({**_plain(tree), branch: value}, allow_pickle=True)
                decoders.run("load", decoders.pack_load(blob, smuggled), folder)
                model = nn.Linear(2, 2)
                with Checkpointer(folder / "store", model=model) as checkpointer:
                    with pytest.raises(CheckpointError):
                        checkpointer.restore()
        early = encode({**_plain(tree), "early": encode(Canary(path), allow_pickle=True)})
        with pytest.raises(UnsafeStateError):
            read_host(early)
        for data in pickles:
            for pair in ((data, good), (blob, data), (data, data)):
                decoders.run("load", decoders.pack_load(*pair), folder)
                decoders.run("manifest", pair[0], folder)


def _plain(tree: dict[str, object]) -> dict[str, object]:
    """Leave out the generators: their states are tensors, which take a hook to encode."""
    return {**tree, "rng": {}}


def test_a_container_and_a_file_in_its_place_are_not_unpickled(canary, tmp_path):
    import lightckpt

    _, pickles = canary
    saved = (CORPUS / "container" / "saved.bin").read_bytes()
    for data in pickles:
        part = {"bytes": len(data), "element": 1, "chunks": [[64, len(data), 0]]}
        index = {"step": 1, "made_by": data.decode("latin-1"), "parts": [part, part, part]}
        for made in (
            data,
            saved[:64] + data,
            b"LCKPTLZ4" + data,
            decoders.pack_container(index, data),
            decoders.pack_container({**index, "step": data.decode("latin-1")}, data),
        ):
            decoders.run("container", made, tmp_path)
            (tmp_path / "file").write_bytes(made)
            with pytest.raises(CheckpointError):
                lightckpt.load(tmp_path / "file")


NAMES = ["os.system", "builtins.exec", "__main__.Canary", "nonesuch", "../evil", "torch.load"]

AUDIT = """
import sys, decoders, lightckpt
from pathlib import Path
from lightckpt.archive import expand
import lightckpt.cli, lightckpt.export, torch.nn.parameter
folder = Path(sys.argv[1])
for target in decoders.TARGETS:  # what is imported late, is now
    decoders.run(target, Path(sys.argv[2]).read_bytes(), folder)
banned = ("exec", "compile", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class",
          "ctypes.dlopen", "os.posix_spawn", "os.spawn", "marshal.loads")
def hook(event, arguments):
    if event in banned or (event == "import" and arguments[0].split(".")[0] in {names!r}):
        print("ran", event, arguments, flush=True)
sys.addaudithook(hook)
for file in map(Path, sys.argv[2:]):
    decoders.run(file.name.partition("-")[0], file.read_bytes(), folder)
print("done", flush=True)
exec("1")  # which the hook must see
"""


def test_names_of_classes_and_dtypes_import_and_run_nothing(tmp_path):
    saved = (CORPUS / "load" / "saved.bin").read_bytes()
    (size,) = struct.unpack_from("<I", saved)
    good = saved[4 + size :]
    files = [tmp_path / "load-saved"]
    files[0].write_bytes(saved)
    for number, name in enumerate(NAMES):
        entries = (
            TensorEntry(("model", "model", "weight"), "float32", (2,), (1,), -1, subclass=name),
            TensorEntry(("model", "model", "weight", f"<{name}>"), "float32", (2,), (1,), 0),
            TensorEntry((name, name, name, name), "float32", (0,), (1,), -1),
        )
        groups = {name: [[(name,)]]}
        blob = encode_manifest(Manifest(entries, (8,), groups, (), (name,), made_by=name))
        bad = blob.replace(b'"float32"', f'"{name}"'.encode())
        types = [{"$": [kind, name]} for kind in ("factory", "leaf", name)]
        types += [{"$": ["torch", kind, name]} for kind in ("dtype", "device", "layout", name)]
        types += [{"$": ["defaultdict", name]}, {"$": ["numpy", [name], 0]}]
        made = [("host", host({"extra": node})) for node in types]
        made += [("load", decoders.pack_load(manifest, good)) for manifest in (blob, bad)]
        for at, (target, data) in enumerate(made):
            files.append(tmp_path / f"{target}-{number}-{at}")
            files[-1].write_bytes(data)
    roots = {name.split(".")[0] for name in NAMES} | {"nonesuch"}
    code = AUDIT.replace("{names!r}", repr(roots - {"torch", ""}))
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, *files],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done\nran")


def test_the_name_of_a_subclass_is_compared_and_never_looked_up(canary):
    """Restoring takes the class of the tensor that is there, or nothing."""
    from torch import nn

    from lightckpt import Checkpointer
    from lightckpt.errors import StructureError
    from small_run import folder_in_memory

    saved = (CORPUS / "load" / "saved.bin").read_bytes()
    (size,) = struct.unpack_from("<I", saved)
    with folder_in_memory() as folder:
        for name in (*NAMES, "Canary"):
            path = ("model", "model", "weight")
            entries = (
                TensorEntry(path, "float32", (2, 2), (2, 1), -1, subclass=name),
                TensorEntry((*path, f"<{name}>"), "float32", (2, 2), (2, 1), 0),
            )
            blob = encode_manifest(Manifest(entries, (16,), {"optimizer": [[path]]}))
            decoders.run("load", decoders.pack_load(blob, saved[4 + size :]), folder)
            model = nn.Linear(2, 2)
            optimizer = torch_sgd(model)
            with Checkpointer(folder / "store", model=model, optimizer=optimizer) as checkpointer:
                with pytest.raises(StructureError, match="in the store only"):
                    checkpointer.restore()


def torch_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)
