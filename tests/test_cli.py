"""The command line. Goal: every command says what is so, for people and for scripts, and what goes
wrong is one line and an exit code.

Method: `main` is called in this process on small stores, whole and damaged; what it prints is read
back. Whether torch was imported is asked in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import cli
from lightckpt._core import Store, make_sizes
from lightckpt.cli import EXIT_DAMAGED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from lightckpt.listing import layer_of
from lightckpt.reader import open_reader
from small_run import assert_same, bytes_of, flip_bit

DEADLINE_S = 120
NEW, OLD = 3, 2  # the steps in the store


@pytest.fixture
def store(trained, folder):
    """A copy of a closed store; its newest step is NEW."""
    path = folder / "store"
    path.write_bytes(trained.path.read_bytes())
    return path


# -- ls and show -----------------------------------------------------------------------------------


def test_ls_lists_the_versions_newest_first(call, call_json, store):
    code, out, _ = call("ls", store)
    assert code == EXIT_OK
    assert "granularity" in out
    assert out.index(f" {NEW} ") < out.index(f" {OLD} ")
    code, facts = call_json("ls", store)
    assert code == EXIT_OK
    assert [version["step"] for version in facts["versions"]][:2] == [NEW, OLD]
    assert facts["slots"] == 64
    assert facts["media"] in ("tmpfs", "file", "pmem")
    with open_reader(store) as reader:
        assert facts["store_id"] == f"{reader.info().store_id:016x}"


def test_ls_tells_damage_and_who_reads(call, store):
    with open_reader(store) as reader:
        newest, older = reader.versions()[:2]
        manifest = bytes(reader.view(newest.version)[0])
        reader.pin(older.version)
        assert "pinned by a reader" in call("ls", store)[1]
    flip_bit(store, manifest)
    code, out, _ = call("ls", store)
    assert code == EXIT_OK
    assert "damaged" in out


def test_show_names_every_tensor_with_dtype_shape_and_bytes(call, call_json, trained, store):
    code, out, _ = call("show", store)
    assert code == EXIT_OK
    for name, tensor in trained.model.state_dict().items():
        (line,) = [text for text in out.splitlines() if f" model/model/{name} " in text]
        assert str(tensor.dtype).removeprefix("torch.") in line
        assert "x".join(map(str, tensor.shape)) in line
    assert "state/optimizer/exp_avg/model/model/0.weight" in out
    code, facts = call_json("show", store, "--step", OLD)
    assert code == EXIT_OK
    shown = facts["shown"]
    assert shown["step"] == OLD
    assert shown["made_by"] == f"lightckpt {lightckpt.__version__}"
    tensors = {t["name"]: t for layer in shown["layers"] for t in layer["tensors"]}
    assert len(tensors) == shown["tensors"]
    assert tensors["model/model/0.weight"]["bytes"] == trained.model[0].weight.nbytes
    assert sum(t["bytes"] for t in tensors.values()) == shown["tensor_bytes"]
    assert shown["groups"]["optimizer"][0][0] == "model/model/0.weight"


def test_show_groups_tensors_by_the_layer_they_are_about():
    state = ("state", "o", "exp_avg", "model", "m", "net.0.weight")
    assert layer_of(("model", "m", "net.0.weight")) == "m/net.0"
    assert layer_of(("model", "m", "net.0.weight", "<inner>")) == "m/net.0"
    assert layer_of(("model", "m", "weight")) == "m"
    assert layer_of(state) == "m/net.0"
    assert layer_of(("grad", "model", "m", "net.0.weight")) == "m/net.0"
    assert layer_of(("tensor", "t")) == "tensor"
    assert layer_of(("group", "o", "0", "1")) == "group/o"
    assert layer_of(("shared", "o", "key")) == "shared/o"


def test_show_says_what_is_special_about_a_tensor(call, folder):
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4, bias=False)
    model.tied = model.weight
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    model.register_buffer("column", torch.ones(4, 99)[:, 0])
    model.double_one = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with lightckpt.Checkpointer(
        folder / "s", model=model, tensors={"[red]name": torch.ones(1)}
    ) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()
    out = call("show", folder / "s")[1]
    for words in (
        "in the extent of model/model/weight", "not persistent", "buffer, packed",
        "TwoTensor, of the tensors below", "<a>", "tensor/[red]name",
    ):  # fmt: skip
        assert words in out


def test_a_step_that_is_not_there_is_named_with_those_that_are(call, store):
    code, out, err = call("show", store, "--step", 77)
    assert (code, out) == (EXIT_FAILED, "")
    assert f"no version of step 77, only of [{NEW}, {OLD}" in err


# -- verify ----------------------------------------------------------------------------------------


def test_verify_finds_a_whole_store_whole(call, call_json, store):
    code, out, _ = call("verify", store)
    assert code == EXIT_OK
    assert "ok" in out
    code, report = call_json("verify", store)
    assert code == EXIT_OK
    assert report["ok"]
    with open_reader(store) as reader:
        steps = [version.step for version in reader.versions()]
        assert all(version.pinned == 0 for version in reader.versions())
    assert [version["step"] for version in report["versions"]] == steps


def test_verify_names_the_tensors_that_are_damaged(call, call_json, trained, store):
    flip_bit(store, bytes_of(trained.states[NEW]["0.weight"]))
    code, out, _ = call("verify", store)
    assert code == EXIT_DAMAGED
    assert "damaged: model/model/0.weight" in out
    code, report = call_json("verify", store)
    assert code == EXIT_DAMAGED
    assert not report["ok"]
    assert report["versions"][0] == {
        "step": NEW, "version": report["versions"][0]["version"], "ok": False, "error": "",
        "bad": ["model/model/0.weight"], "bytes": report["versions"][0]["bytes"],
    }  # fmt: skip
    assert report["versions"][1]["ok"]


def test_verify_names_more_tensors_than_a_report_of_the_core_can(call_json, folder):
    tensors = {f"t{i:02}": torch.full((64,), float(i)) for i in range(1, 41)}
    with lightckpt.Checkpointer(folder / "s", tensors=tensors) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()
    for tensor in tensors.values():
        flip_bit(folder / "s", bytes_of(tensor))
    code, report = call_json("verify", folder / "s")
    assert code == EXIT_DAMAGED
    assert report["versions"][0]["bad"] == [f"tensor/{name}" for name in tensors]


def test_verify_finds_damaged_metadata(call, call_json, store):
    with open_reader(store) as reader:
        host = bytes(reader.view(reader.versions()[0].version)[1])
    flip_bit(store, host)
    code, report = call_json("verify", store)
    assert code == EXIT_DAMAGED
    assert "checksum of its record" in report["versions"][0]["error"]
    assert report["versions"][1]["ok"]
    with open_reader(store) as reader:
        manifest = bytes(reader.view(reader.versions()[1].version)[0])
    flip_bit(store, manifest)
    code, out, _ = call("verify", store)
    assert code == EXIT_DAMAGED
    assert "checksum of its manifest" in out


def test_verify_finds_a_manifest_that_cannot_be_read(call_json, folder):
    with Store(folder / "s", create=True) as store:
        store.begin(step=1, keep=1, extents=make_sizes([]), blob=b"not json", host_bytes=1)
        store.wait(store.commit(b"x"))
    code, report = call_json("verify", folder / "s")
    assert code == EXIT_DAMAGED
    assert "the manifest cannot be read" in report["versions"][0]["error"]


def test_a_store_without_versions_cannot_be_verified(call, folder):
    Store(folder / "s", create=True).close()
    code, _, err = call("verify", folder / "s")
    assert code == EXIT_FAILED
    assert "holds no version yet" in err


# -- archive ---------------------------------------------------------------------------------------


def test_a_version_is_archived_compressed_and_expanded(call, call_json, trained, store, folder):
    code, report = call_json("archive", store, folder, "--step", OLD)
    assert (code, report["path"]) == (EXIT_OK, str(folder / f"step-{OLD}.lckpt"))
    code, report = call_json("archive", store, folder, "--lz4")
    packed = Path(report["path"])
    assert code == EXIT_OK
    assert packed.name == f"step-{NEW}.lckpt.lz4"
    code, out, _ = call("archive", packed, folder / "expanded", "--expand")
    assert code == EXIT_OK
    assert str(folder / "expanded") in out
    assert_same(lightckpt.load(folder / "expanded")["model"], trained.states[NEW])


def test_every_command_reads_a_compressed_archive(call, call_json, store, folder):
    packed = Path(call_json("archive", store, folder, "--lz4")[1]["path"])
    assert call_json("ls", packed)[1]["versions"][0]["step"] == NEW
    assert call_json("show", packed)[1]["shown"]["step"] == NEW
    assert call_json("verify", packed)[0] == EXIT_OK
    assert call("export", packed, "--to", folder / "m.pt")[0] == EXIT_OK
    assert call("archive", packed, folder / "plain")[0] == EXIT_OK
    code, _, err = call("doctor", packed)
    assert code == EXIT_FAILED
    assert "is a compressed archive" in err


def test_archive_does_not_write_over_a_file(call, store, folder):
    (folder / "precious").write_text("mine")
    code, _, err = call("archive", store, folder / "precious")
    assert code == EXIT_FAILED
    assert "precious exists already" in err
    assert (folder / "precious").read_text() == "mine"


def test_a_step_makes_no_sense_where_one_version_is(call, store, folder):
    code, _, err = call("archive", store, folder / "x", "--expand", "--step", 3)
    assert code == EXIT_FAILED
    assert "one version only" in err


# -- doctor and demo -------------------------------------------------------------------------------


def test_doctor_prints_what_it_found(call, call_json, store):
    code, out, _ = call("doctor", store)
    assert code == EXIT_OK
    for words in ("a store", "survives: power cut", "persists", "huge pages", "libpmem2.so.1"):
        assert words in out
    code, found = call_json("doctor", store)
    assert code == EXIT_OK
    assert found["survives"]["process kill"] == "yes"
    assert found["speed"]["persist_bytes_per_s"] > 0


def test_demo_is_given_its_options(call, monkeypatch):
    given = []

    def run(arguments):
        given.append(arguments)
        return 1

    monkeypatch.setattr(cli.demo, "run", run)
    code, _, _ = call("demo", "--quick", "--kills", 1, "--json")
    assert code == 1
    assert (given[0].quick, given[0].kills, given[0].json) == (True, 1, True)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor", "archive", "export"])
def test_what_is_no_store_is_one_line_and_exit_code_2(call, folder, command):
    more = {"archive": [folder / "x"], "export": ["--to", folder / "x.pt"]}.get(command, [])
    (folder / "text").write_text("no store" * 10_000)
    cases = [folder / "text", folder / "missing" / "store"]
    if command != "doctor":  # which looks at folders, and at files to be
        cases += [folder, folder / "missing"]
    for path in cases:
        code, out, err = call(command, path, *more)
        assert (code, out) == (EXIT_FAILED, "")
        assert err.startswith("lightckpt: ")
        assert err.count("\n") == 1
        assert str(path) in err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["ls"], ["export", "x"], ["show", "--no"]])
def test_wrong_usage_is_exit_code_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (EXIT_FAILED, "")
    assert "usage: lightckpt" in err


def test_help_is_no_error(call):
    code, out, _ = call("--help")
    assert code == EXIT_OK
    for command in ("demo", "ls", "show", "verify", "export", "archive", "doctor"):
        assert f"    {command} " in out


def test_being_interrupted_is_no_traceback(call, store, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "describe_store", interrupt)
    code, _, err = call("ls", store)
    assert code == EXIT_INTERRUPTED
    assert err == "lightckpt: stopped\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_traceback(store, options):
    program = "import sys; from lightckpt.cli import main; sys.exit(main())"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program, "show", str(store), *options],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (EXIT_FAILED, "")


def test_looking_needs_no_torch(store, folder):
    program = """
import sys
sys.modules["torch"] = None
from lightckpt.cli import main

store, folder = sys.argv[1:]
for command in ("ls", "show", "verify", "doctor"):
    assert main([command, store]) == 0
assert main(["archive", store, folder + "/a"]) == 0
assert main(["archive", store, folder + "/b", "--lz4"]) == 0
assert main(["archive", folder + "/b", folder + "/c", "--expand"]) == 0
"""
    subprocess.run(
        [sys.executable, "-c", program, str(store), str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=DEADLINE_S,
    )
