"""Exports. Goal: other programs read what was saved, or the command says by name why they cannot.

Method: the command line writes files that torch and safetensors read back; what has no place in a
format is tried on state dicts made up here.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import StructureError, export
from lightckpt.cli import EXIT_FAILED, EXIT_OK
from lightckpt.export import weights_of
from small_run import assert_same

NEW, OLD = 3, 2  # the steps in the store


@pytest.fixture
def store(trained, folder):
    """A copy of a closed store; its newest step is NEW."""
    path = folder / "store"
    path.write_bytes(trained.path.read_bytes())
    return path


def test_weights_are_exported_to_safetensors_under_their_own_names(
    call_json, trained, store, folder
):
    from safetensors import safe_open
    from safetensors.torch import load_file

    made = folder / "m.safetensors"
    code, report = call_json("export", store, "--step", OLD, "--to", made)
    assert code == EXIT_OK
    assert report == {"path": str(made), "bytes": made.stat().st_size}
    assert_same(load_file(made), trained.states[OLD])
    with safe_open(made, "pt") as file:
        assert file.metadata()["step"] == str(OLD)
    assert made.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_everything_is_exported_to_pt_and_read_without_pickled_code(call, trained, store, folder):
    made = folder / "all.pt"
    code, out, _ = call("export", store, "--to", made)
    assert code == EXIT_OK
    assert str(made) in out
    state = torch.load(made, weights_only=True)
    assert state["step"] == NEW
    assert_same(state["model"], trained.states[NEW])
    assert_same(state["optimizer"], trained.optimizer.state_dict())
    assert state["rng"].keys() >= {"torch", "python", "numpy"}


def test_an_export_replaces_a_file_only_when_it_is_whole(call, store, folder, monkeypatch):
    made = folder / "all.pt"
    made.write_text("old")

    def break_off(state, part):
        Path(part).write_text("half")
        raise OSError(28, "No space left on device", str(part))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", break_off)
        code, _, err = call("export", store, "--to", made)
    assert code == EXIT_FAILED
    assert "No space left on device" in err
    assert made.read_text() == "old"
    assert sorted(os.listdir(folder)) == ["all.pt", "store"]
    assert call("export", store, "--to", made)[0] == EXIT_OK
    assert torch.load(made, weights_only=True)["step"] == NEW


def test_an_unknown_suffix_is_refused(call, store, folder):
    code, _, err = call("export", store, "--to", folder / "m.onnx")
    assert code == EXIT_FAILED
    assert "must be one of ['.pt', '.pth', '.safetensors']" in err


def test_a_store_is_not_exported_onto_itself(call, store, folder):
    store.rename(folder / "store.pt")
    before = (folder / "store.pt").read_bytes()
    code, _, err = call("export", folder / "store.pt", "--to", folder / "store.pt")
    assert code == EXIT_FAILED
    assert "is the store itself" in err
    assert (folder / "store.pt").read_bytes() == before


@pytest.mark.parametrize("name", ["safetensors", "torch"])
def test_a_missing_library_is_named_with_what_installs_it(call, store, folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    if name == "torch":
        monkeypatch.delitem(sys.modules, "lightckpt.export")
        monkeypatch.delitem(sys.modules, "lightckpt.loading")
        monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = call("export", store, "--to", folder / "m.safetensors")
    assert code == EXIT_FAILED
    assert f"no {name}" in err
    assert "pip install" in err
    assert sorted(os.listdir(folder))[0] == "store"


def test_a_pickle_is_exported_only_where_it_is_allowed(call, folder):
    class Odd:
        def state_dict(self):
            return {"path": {1, Ellipsis}}

        def load_state_dict(self, state):
            raise AssertionError

    with lightckpt.Checkpointer(
        folder / "s", model=nn.Linear(1, 1), extra={"odd": Odd()}, allow_pickle=True
    ) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()
    code, _, err = call("export", folder / "s", "--to", folder / "m.safetensors")
    assert code == EXIT_FAILED
    assert "allow_pickle" in err
    allowed = ("export", folder / "s", "--to", folder / "m.safetensors", "--allow-pickle")
    assert call(*allowed)[0] == EXIT_OK


def test_tied_strided_and_conjugate_weights_each_get_bytes_of_their_own():
    weight = torch.arange(6.0).view(2, 3)
    model = {"a": weight, "b": weight, "t": weight.t(), "c": torch.tensor([1 + 2j]).conj()}
    state = {"model": model, "modes": {"model": []}, "tensors": {"loose": weight[1]}}
    weights = weights_of(state)
    assert_same(weights, {**model, "tensors.loose": weight[1]})
    assert all(tensor.is_contiguous() for tensor in weights.values())
    storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    assert len(storages) == len(weights)
    assert not weights["c"].is_conj()


def test_several_models_are_told_apart_in_safetensors():
    one = torch.ones(1)
    state = {"model": {"x": {"w": one}, "y": {}}, "modes": {"x": [], "y": []}, "tensors": {}}
    assert_same(weights_of(state), {"x.w": one})


@pytest.mark.parametrize(
    ("model", "tensors", "name"),
    [
        ({"m._extra_state": {"a": 1}}, {}, "m._extra_state"),
        ({"w": {"inner": torch.ones(1)}}, {}, "w"),
        ({"s": torch.eye(2).to_sparse()}, {}, "s"),
        ({"l": nn.UninitializedParameter()}, {}, "l"),
        ({"tensors.x": torch.ones(1)}, {"x": torch.ones(1)}, "tensors.x"),
    ],
)
def test_what_has_no_place_in_safetensors_is_refused_by_name(model, tensors, name):
    state = {"model": model, "modes": {"model": []}, "tensors": tensors}
    with pytest.raises(StructureError, match=rf"^{name} .*export to \.pt"):
        weights_of(state)


def test_a_dtype_that_safetensors_lacks_is_refused(folder):
    with lightckpt.Checkpointer(
        folder / "s", tensors={"c": torch.ones(2, dtype=torch.complex128)}
    ) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()
    with pytest.raises(StructureError, match="safetensors cannot hold this state"):
        export.export(folder / "s", folder / "m.safetensors")
    assert not (folder / "m.safetensors").exists()
