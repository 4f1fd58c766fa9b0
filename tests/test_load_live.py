"""Loading where things happen. Goal: a load costs no copy, keeps its version, changes no
store, runs no code, and says what is damaged.

Method: small runs in memory that go on saving, in this process and in another; damaged files; what
is mapped and open is read from /proc.
"""

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lightckpt
from gate import until
from lightckpt import (
    CheckpointWarning,
    CorruptError,
    FormatError,
    NotFoundError,
    UnsafeStateError,
    loading,
)
from lightckpt.reader import open_reader, pin_newest
from small_run import SmallRun, assert_same, bytes_of, clones, flip_bit, save


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
    assert mappings_of(run.path) == alone + 2, "one to read, one to be written to"
    weight = state["model"]["0.weight"][3]  # a view is enough
    del state
    assert mappings_of(run.path) == alone + 2, "one to read, one to be written to"
    assert_same(weight, run.states[3]["0.weight"][3])
    del weight
    assert mappings_of(run.path) == alone


def test_threads_and_descriptors_do_not_pile_up(run):
    run.train(2)
    lightckpt.load(run.path)
    gc.collect()
    descriptors, threads = (os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task"))
    for _ in range(50):
        lightckpt.load(run.path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    # The kernel lists a thread a little longer than until it is joined.
    until(lambda: {*os.listdir("/proc/self/task")} <= {*threads}, "end of all threads")


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
    with open_reader(damaged.path) as reader:
        steps = [version.step for version in reader.versions()]
    for step in steps[1:]:
        flip_bit(damaged.path, bytes_of(damaged.states[step]["0.weight"]))
    with pytest.raises(CorruptError, match=r"no version of .* is whole") as caught:
        lightckpt.load(damaged.path)
    assert all(f"step {step}: " in str(caught.value) for step in steps)


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
