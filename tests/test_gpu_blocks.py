"""Tests of the blocks of steps on a GPU (bench/gpu_blocks.py), without one. Goal: what fails fails
for one strategy alone and is told with its own words, and the tool that looks at the GPU is ended.

Method: a tiny model on the CPU, with torch.cuda's waits taken out.
"""

import argparse
import json
import os

import pytest
import torch

import gpu
import gpu_blocks
import gpu_plan
import strategies
from gpu_plan import STEPS, Task
from gpu_targets import gone
from lightckpt.errors import NoSpaceError
from test_bench import tiny


@pytest.fixture
def no_device(monkeypatch):
    """Let torch's waits for a device return."""

    class Stream:
        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())


@pytest.fixture
def bench(no_device, tmp_path):
    return gpu_blocks.GpuBench(tiny(seed=1), tmp_path / "block", steps=2)


def measured(bench, kind, rounds=1):
    return gpu_blocks.measure(bench, kind, limit=1.0, rounds=rounds, say=lambda words: None)


class Failing(strategies.TorchSave):
    """Raises what a test says, where it says."""

    name = "failing"
    error: Exception
    at = 3

    def save(self, step):
        if step == self.at:
            raise self.error
        super().save(step)


def test_blocks_make_figures(bench):
    found = measured(bench, strategies.TorchSave, rounds=2)
    assert found["added_percent"]["n"] == len(found["blocks"]) == 2
    assert found["restore_s"]["n"] == 1
    assert [block["steps"] for block in found["blocks"]] == [2, 2]


@pytest.mark.parametrize(
    "error",
    [
        NoSpaceError("full"),
        OSError(28, "No space left on device"),
        AssertionError("other bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_fails_one_strategy_and_is_told(bench, monkeypatch, error):
    monkeypatch.setattr(Failing, "error", error, raising=False)
    found = measured(bench, Failing)
    assert found["failed"]
    assert found["missing"] == f"{type(error).__name__}: {error}"
    assert "added_percent" not in found
    assert "missing" not in measured(bench, strategies.TorchSave)


def test_what_failed_first_is_what_is_told(bench, monkeypatch):
    def close(self):
        raise RuntimeError("and then this")

    monkeypatch.setattr(Failing, "error", OSError("this"), raising=False)
    monkeypatch.setattr(Failing, "close", close)
    assert measured(bench, Failing)["missing"] == "OSError: this"
    monkeypatch.setattr(Failing, "at", -1)
    assert measured(bench, Failing)["missing"] == "RuntimeError: and then this"
    monkeypatch.setattr(Failing, "open", close)
    assert measured(bench, Failing)["missing"] == "RuntimeError: and then this"


def test_an_error_after_blocks_that_went_well_leaves_no_figures(bench):
    class Later(strategies.TorchSave):
        name = "later"
        opened = 0

        def open(self):
            Later.opened += 1
            if Later.opened == 2:
                raise OSError("this")

    found = measured(bench, Later, rounds=3)
    assert found["missing"] == "OSError: this"
    assert len(found["blocks"]) == 1
    assert "added_percent" not in found


def test_without_room_it_is_said_and_is_no_failure(bench, monkeypatch):
    monkeypatch.setattr(gpu_blocks, "ROOM_SPARE_BYTES", 1 << 60)
    found = measured(bench, strategies.TorchSave)
    assert "it would take about" in found["missing"]
    assert "failed" not in found


def test_a_slow_strategy_counts_fewer_steps_and_has_one_round(bench, monkeypatch):
    monkeypatch.setattr(gpu_blocks, "BLOCK_SECONDS_MAX", 0.0)
    monkeypatch.setattr(gpu_blocks, "STRATEGY_SECONDS_MAX", 0.0)
    found = measured(bench, strategies.TorchSave, rounds=3)
    assert [block["steps"] for block in found["blocks"]] == [1]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """An nvidia-smi that says 7 and goes on; returns the gate that tells when it has gone."""
    gate, program = tmp_path / "gate", tmp_path / "bin" / "nvidia-smi"
    os.mkfifo(gate)
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 7\nexec cat {gate}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return gate


def test_the_tool_that_looks_at_the_gpu_is_ended(tool):
    busy = gpu_blocks.Busy()
    held = os.open(tool, os.O_WRONLY)  # returns when the tool stands there, and has said 7
    assert busy.stop() == [7.0]
    assert gone(held)
    os.close(held)
    assert busy.stop() == [7.0]


def test_the_tool_is_ended_where_a_step_fails(bench, tool, monkeypatch):
    held = []

    class Interrupted(Failing):
        def save(self, step):
            if step == 3:
                held.append(os.open(tool, os.O_WRONLY))
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(bench, Interrupted)
    assert gone(*held)
    os.close(*held)


def test_without_the_tool_there_are_no_samples(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_blocks.Busy().stop() == []


def test_each_strategy_has_a_line_as_soon_as_it_is_measured(no_device, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "limit_bytes_s", lambda: 1e9)
    monkeypatch.setattr(gpu, "build", lambda model, device, seed: tiny(seed=seed))
    monkeypatch.setattr(gpu, "device_name", lambda: "none")
    monkeypatch.setattr(Failing, "error", OSError("this"), raising=False)
    options = argparse.Namespace(seed=1, steps=1)
    lines = []
    kinds = [Failing, strategies.TorchSave]
    whole = gpu.run_model(
        "gpt2", options, tmp_path, print, kinds=kinds, rounds=1, each=lines.append
    )
    assert [gpu_plan.task_of(one) for one in lines] == [
        Task("gpt2", "failing", STEPS), Task("gpt2", "torch.save", STEPS)
    ]  # fmt: skip
    assert whole["strategies"].keys() == {"failing", "torch.save"}
    assert lines[1]["strategies"]["torch.save"]["added_percent"]["n"] == 1
    assert lines[1]["settings"] == {"LIGHTCKPT_CUDA_BATCH": "0"}
    assert json.loads(json.dumps(lines)) == lines
