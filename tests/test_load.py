"""Loading a version without its objects. Goal: what comes is what was saved, costs no copy, keeps
its version, changes no store, and runs no code.

Method: small runs in memory; what `load` gives is compared bit for bit with deep copies made while
training, with torch's own state dicts, and with what /proc says is mapped.
"""

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import (
    CheckpointWarning,
    CorruptError,
    FormatError,
    NotFoundError,
    UnsafeStateError,
    loading,
)
from lightckpt.reader import open_reader, pin_newest
from small_run import SmallRun, assert_same, bytes_of, clones, flip_bit, folder_in_memory


@pytest.fixture
def folder():
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def store(folder):
    return folder / "store"


@pytest.fixture
def run(store):
    run = SmallRun(store, keep=2)
    yield run
    run.close()


def mappings_of(path):
    """Count the places where this process has mapped *path*."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"{path}\n")


def save(path, *, update=None, **objects):
    """Save one version of *objects* at *path*, after *update* if given, and close the store."""
    with lightckpt.Checkpointer(path, **objects) as checkpointer:
        if update is not None:
            update()
        elif isinstance(objects.get("optimizer"), torch.optim.Optimizer):
            objects["optimizer"].step()
        checkpointer.mark()
        checkpointer.wait()


# -- what comes ------------------------------------------------------------------------------------


def test_a_model_takes_what_was_loaded(run):
    run.train(3)
    state = lightckpt.load(run.path)
    assert state["step"] == 3
    assert_same(state["model"], run.states[3])
    other = SmallRun(run.path.with_name("other"))
    other.model.load_state_dict(state["model"])
    assert_same(other.model.state_dict(), run.model.state_dict())
    other.close()


def test_the_optimizer_state_is_in_torchs_own_format(run):
    run.train(3)
    loaded = lightckpt.load(run.path)["optimizer"]
    assert_same(loaded, run.optimizer.state_dict())


def test_training_goes_on_from_it_bit_for_bit(run):
    run.train(3)
    state = lightckpt.load(run.path)
    other = SmallRun(run.path.with_name("other"))
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    losses = []
    for one in (run, other):
        torch.manual_seed(11)
        losses.append([one.update() for _ in range(3)])
    assert losses[0] == losses[1]
    assert_same(other.model.state_dict(), run.model.state_dict())
    other.close()


def test_every_step_that_is_kept_can_be_loaded(run):
    run.train(5)
    for step in run.checkpointer.steps():
        assert_same(lightckpt.load(run.path, step)["model"], run.states[step])


def test_kinds_given_by_name_come_by_name(store):
    models = {"a": nn.Linear(2, 2), "b": nn.Linear(3, 3)}
    optimizers = {
        "x": torch.optim.SGD(models["a"].parameters(), lr=0.1, momentum=0.9),
        "y.z": torch.optim.Adam(models["b"].parameters()),
    }

    def update():
        for model, optimizer in zip(models.values(), optimizers.values(), strict=True):
            model(torch.ones(1, model.in_features)).sum().backward()
            optimizer.step()

    save(store, update=update, model=models, optimizer=optimizers)
    state = lightckpt.load(store)
    for name, model in models.items():
        assert_same(state["model"][name], model.state_dict())
    for name, optimizer in optimizers.items():
        assert_same(state["optimizer"][name], optimizer.state_dict())
    assert state["members"]["x"] == [["model/a/weight", "model/a/bias"]]


def test_all_kinds_of_state_come(store):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    class Counter:
        def state_dict(self):
            return {"seen": 5, "array": np.arange(3), "tensor": torch.ones(2)}

        def load_state_dict(self, state):
            raise AssertionError

    save(
        store, model=model, optimizer=optimizer, scheduler=scheduler, scaler={"s": scaler},
        extra={"counter": Counter()}, tensors={"loose": torch.arange(4.0)},
        generators={"g": torch.Generator().manual_seed(3)},
    )  # fmt: skip
    state = lightckpt.load(store)
    assert state["scheduler"] == scheduler.state_dict()
    assert state["scaler"] == {"s": scaler.state_dict()}
    assert state["extra"]["counter"]["seen"] == 5
    np.testing.assert_array_equal(state["extra"]["counter"]["array"], np.arange(3))
    assert_same(state["extra"]["counter"]["tensor"], torch.ones(2))
    assert_same(state["tensors"], {"loose": torch.arange(4.0)})
    assert_same(state["rng"]["own"]["g"], torch.Generator().manual_seed(3).get_state())
    assert {"torch", "python", "numpy"} <= state["rng"].keys()


def test_parameters_that_no_model_holds_and_gradients_come(store):
    parameter = nn.Parameter(torch.arange(3.0))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([parameter, *model.parameters()], lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    save(store, model=model, optimizer=optimizer, grads=True)
    state = lightckpt.load(store)
    assert_same(state["unnamed"], {"optimizer/0/0": parameter.detach()})
    assert_same(state["grads"]["model/model/weight"], model.weight.grad)
    assert state["members"]["optimizer"][0][0] == "group/optimizer/0/0"


class Awkward(nn.Module):
    """Tensors of every kind that has a place of its own in a version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.tied = self.weight
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("column", torch.randn(6, 50)[:, 3])
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("absent", None)

    def get_extra_state(self):
        return {"counter": 4}

    def set_extra_state(self, state):
        self.seen = state


def test_awkward_tensors_come_as_state_dict_has_them(store):
    model = nn.ModuleDict({"inner": Awkward()})
    save(store, model=model)
    state = lightckpt.load(store)
    expected = model.state_dict()
    assert state["model"].keys() == expected.keys()
    assert state["model"].pop("inner._extra_state") == expected.pop("inner._extra_state")
    for name, tensor in expected.items():
        loaded = state["model"][name]
        assert not loaded.requires_grad
        assert_same(loaded.to_dense(), tensor.to_dense())
    assert_same(state["nonpersistent"], {"inner.hidden": model["inner"].hidden})
    fresh = nn.ModuleDict({"inner": Awkward()})
    fresh["inner"].wide = torch.randn(4, 3)  # torch itself cannot load into an expanded tensor
    fresh.load_state_dict(lightckpt.load(store)["model"])
    assert fresh["inner"].seen == {"counter": 4}
    assert_same(fresh["inner"].column, model["inner"].column)


def test_tied_weights_come_back_as_one_storage(store):
    model = Awkward()
    save(store, model=model)
    state = lightckpt.load(store)["model"]
    one, other = (state[name].untyped_storage() for name in ("weight", "tied"))
    assert one._cdata == other._cdata
    state["weight"].zero_()
    assert_same(state["tied"], torch.zeros(4, 3))


def test_lazy_modules_that_saw_no_batch_stay_lazy(store):
    model = nn.Sequential(nn.LazyLinear(3))
    save(store, model=model)
    loaded = lightckpt.load(store)["model"]
    assert all(nn.parameter.is_lazy(tensor) for tensor in loaded.values())
    nn.Sequential(nn.LazyLinear(3)).load_state_dict(loaded)


def test_a_subclass_comes_as_its_inner_tensors(store):
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    save(store, model=model)
    assert_same(
        lightckpt.load(store)["model"], {"weight": {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}}
    )


class Unusual(torch.optim.SGD):
    """Keeps values that are no tensors, and state that belongs to no parameter."""

    def step(self, closure=None):
        super().step(closure)
        first, second = self.param_groups[0]["params"]
        self.state[first]["note"] = ("text", 3)
        self.state[second] = 17
        self.state["shared"] = torch.arange(2)
        self.state["count"] = 9


class Outer(torch.optim.SGD):
    """Holds another optimizer, as wrappers do."""

    def __init__(self, parameters):
        parameters = list(parameters)
        self.inner = torch.optim.Adam(parameters)
        super().__init__(parameters, lr=0.1)


def test_optimizer_state_of_any_kind_keeps_its_place(store):
    model = nn.Linear(2, 2)
    optimizer = Unusual(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    save(store, model=model, optimizer=optimizer)
    assert_same(lightckpt.load(store)["optimizer"], optimizer.state_dict())


def test_param_names_come_if_the_optimizer_had_them(store):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    save(store, model=model, optimizer=optimizer)
    (group,) = lightckpt.load(store)["optimizer"]["param_groups"]
    assert group["param_names"] == ["weight", "bias"]


def test_a_nested_optimizer_of_a_single_one_comes_apart(store):
    model = nn.Linear(2, 2)
    optimizer = Outer(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    save(store, update=optimizer.inner.step, model=model, optimizer=optimizer)
    state = lightckpt.load(store)
    assert state["optimizer"].keys() == {"state", "param_groups"}
    assert_same(state["nested"]["optimizer.inner"], optimizer.inner.state_dict())
    named = store.with_name("named")
    save(named, update=optimizer.step, model=model, optimizer={"o": optimizer})
    state = lightckpt.load(named)
    assert state["nested"] == {}
    assert state["optimizer"].keys() == {"o", "o.inner"}


# -- a live store ----------------------------------------------------------------------------------


def test_a_trainer_in_this_process_does_not_disturb_what_was_loaded(run):
    run.train(3)
    state = lightckpt.load(run.path)
    run.train(40)
    assert_same(state["model"], run.states[3])
    assert 3 in run.checkpointer.steps()
    del state
    gc.collect()
    run.train(3)
    assert 3 not in run.checkpointer.steps()


TRAINER = """
import sys
from pathlib import Path
from small_run import SmallRun

run = SmallRun(Path(sys.argv[1])).train(3)
print(run.states[3]["0.weight"].flatten().tolist(), flush=True)
sys.stdin.readline()
run.train(40)
print(run.checkpointer.steps(), flush=True)
sys.stdin.readline()
run.train(3)
print(run.checkpointer.steps(), flush=True)
run.close()
"""


@pytest.mark.slow
def test_a_trainer_in_another_process_does_not_disturb_what_was_loaded(store):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", TRAINER, str(store)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        expected = torch.tensor(json.loads(trainer.stdout.readline()))
        state = lightckpt.load(store)
        assert state["step"] == 3
        before = clones(state["model"])
        assert_same(before["0.weight"].flatten(), expected)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert 3 in json.loads(trainer.stdout.readline())
        assert_same(state["model"], before)
        del state
        gc.collect()
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert 3 not in json.loads(trainer.stdout.readline())
    assert trainer.returncode == 0


def test_writing_to_a_loaded_tensor_changes_no_store(run):
    run.train(3)
    before = run.path.read_bytes()
    state = lightckpt.load(run.path)
    for tensor in state["model"].values():
        tensor.fill_(5)
    assert run.path.read_bytes() == before
    assert_same(lightckpt.load(run.path)["model"], run.states[3])


def test_no_tensor_is_copied(run):
    run.train(3)
    state = lightckpt.load(run.path)
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(run.path)):
            begin, end = line.split()[0].split("-")
            spans.append((int(begin, 16), int(end, 16)))
    tensors = [*state["model"].values(), *state["optimizer"]["state"][0].values()]
    for tensor in tensors:
        assert any(begin <= tensor.data_ptr() < end for begin, end in spans)


def test_one_tensor_keeps_the_store_open_and_the_last_closes_it(run):
    run.train(3)
    alone = mappings_of(run.path)
    state = lightckpt.load(run.path)
    assert mappings_of(run.path) == alone + 1
    weight = state["model"]["0.weight"][3]  # a view is enough
    del state
    assert mappings_of(run.path) == alone + 1
    assert_same(weight, run.states[3]["0.weight"][3])
    del weight
    assert mappings_of(run.path) == alone


def test_threads_and_descriptors_do_not_pile_up(run):
    run.train(2)
    lightckpt.load(run.path)
    gc.collect()
    before = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")]
    for _ in range(50):
        lightckpt.load(run.path)
    gc.collect()
    assert [len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")] == before


def test_what_was_committed_behind_the_mapping_is_found(run, monkeypatch):
    run.train(1)
    early = open_reader(run.path)
    run.model.append(nn.Linear(3, 300))
    run.train(1)
    readers = [early]
    monkeypatch.setattr(
        loading, "open_reader",
        lambda path, workers: readers.pop() if readers else open_reader(path, workers=workers),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lightckpt.load(run.path)["step"] == 2
    assert not readers


# -- what is wrong ---------------------------------------------------------------------------------


def test_a_missing_step_names_those_there_are(run):
    run.train(4)
    with pytest.raises(NotFoundError, match=r"no version of step 99, only of \[4, 3"):
        lightckpt.load(run.path, 99)


def test_a_missing_store_and_an_empty_one_are_not_found(folder):
    with pytest.raises(NotFoundError, match="no store at"):
        lightckpt.load(folder / "nothing")
    model = nn.Linear(1, 1)
    with (
        lightckpt.Checkpointer(folder / "new", model=model),
        pytest.raises(NotFoundError, match="holds no version yet"),
    ):
        lightckpt.load(folder / "new")


def test_a_file_that_is_no_store_is_refused(folder):
    (folder / "text").write_text("hello" * 10000)
    with pytest.raises(FormatError, match="not a lightckpt store"):
        lightckpt.load(folder / "text")


@pytest.fixture
def damaged(run):
    """The newest version of a closed run has one flipped bit, in 0.weight."""
    run.train(5)
    run.close()
    flip_bit(run.path, bytes_of(run.states[5]["0.weight"]))
    return run


def test_damaged_data_fall_back_to_the_older_version_and_say_so(damaged):
    with pytest.warns(CheckpointWarning, match=r"loaded step 4 .* step 5: .*model/model/0\.weight"):
        state = lightckpt.load(damaged.path)
    assert state["step"] == 4
    assert_same(state["model"], damaged.states[4])


def test_damaged_data_of_the_step_asked_for_are_an_error(damaged):
    with pytest.raises(CorruptError, match=r"model/model/0\.weight differ"):
        lightckpt.load(damaged.path, 5)


def test_without_verifying_only_metadata_are_checked(damaged):
    state = lightckpt.load(damaged.path, verify=False)
    assert state["step"] == 5
    assert not torch.equal(state["model"]["0.weight"], damaged.states[5]["0.weight"])


def test_damaged_metadata_fall_back_too(run):
    run.train(5)
    run.close()
    manifest = run.path.read_bytes().count(b'{"made_by"')
    assert manifest == 1, "both versions share the manifest"
    with open_reader(run.path) as reader:
        newest = pin_newest(reader)
        host = bytes(reader.view(newest.version)[1])
    flip_bit(run.path, host)
    with pytest.warns(CheckpointWarning, match="checksum of its record is wrong"):
        assert lightckpt.load(run.path)["step"] == 4
    with pytest.raises(FormatError, match="checksum of its record is wrong"):
        lightckpt.load(run.path, 5)


def test_where_nothing_is_whole_all_damage_is_named(damaged):
    flip_bit(damaged.path, bytes_of(damaged.states[4]["0.weight"]))
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = lightckpt.load(damaged.path)["step"]
        except CorruptError as error:
            assert "no version of" in str(error)
            assert "step 5: " in str(error)
            assert "step 4: " in str(error)
            return
        flip_bit(damaged.path, bytes_of(damaged.states[step]["0.weight"]))


def test_a_failed_load_holds_no_version(damaged):
    with pytest.raises(CorruptError) as kept:
        lightckpt.load(damaged.path, 5)
    with open_reader(damaged.path) as reader:
        assert all(version.pinned == 0 for version in reader.versions())
    assert kept.value is not None


# -- safety ----------------------------------------------------------------------------------------


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Trapped:
    def __init__(self, path):
        self.path = path

    def state_dict(self):
        return {"innocent": 1, "trap": Trap(self.path)}

    def load_state_dict(self, state):
        raise AssertionError


def test_pickled_content_runs_only_where_it_is_allowed(folder):
    sprung = folder / "sprung"
    save(
        folder / "store", model=nn.Linear(1, 1), extra={"trapped": Trapped(sprung)},
        allow_pickle=True,
    )  # fmt: skip
    with pytest.raises(UnsafeStateError, match="allow_pickle"):
        lightckpt.load(folder / "store")
    assert not sprung.exists()
    # The test of the test: the trap does spring.
    lightckpt.load(folder / "store", allow_pickle=True)
    assert sprung.exists()
