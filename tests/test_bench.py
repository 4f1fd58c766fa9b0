"""Tests of the benchmark's own parts. Goal: its figures are what they are called, nothing that was
not measured shows as a number, and a way to checkpoint that loses a byte is not measured at all.

Method: figures and tables are pure functions, tried on blocks made up here; strategies that need
nothing but torch checkpoint a tiny model. `make bench-smoke` runs the scripts themselves.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import arguments
import catalog
import figures
import ours
import record
import report
import state
import strategies
import styles
import tables
from workloads import Workload

BENCH = Path(arguments.__file__).parent
ROUND_TRIP = [
    ours.Lightckpt,
    ours.Stop,
    strategies.TorchSave,
    strategies.TorchSaveSafe,
    strategies.Safetensors,
    styles.CheckFreq,
    styles.PcCheck,
]


def block(steps: list[float], *, plain: float = 1.0, copy: float = 0.1, **more) -> dict:
    return {
        "steps": steps,
        "stalls": [0.01] * len(steps),
        "plain_before": [plain] * 3,
        "plain_after": [plain] * 3,
        "copy_s": copy,
        "extra_memory_bytes": 1000,
        "media_bytes": 2000,
        **more,
    }


ALONE = {"stalls": [0.02], "persists": [0.2], "restore_s": 0.4, "verified": True}


# Figures.


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_spread_lies_between_the_least_and_the_most(values):
    found = figures.spread(values)
    assert min(values) <= found["p10"] <= found["median"] <= found["p90"] <= max(values)
    assert found["n"] == len(values)


def test_no_samples_are_no_figure():
    assert figures.spread([]) is None


def test_what_is_added_is_compared_with_the_neighbours():
    assert figures.added_seconds(block([1.1, 1.3]), every=1) == pytest.approx([0.1, 0.3])
    assert figures.plain_seconds(block([9.0], plain=2.0)) == 2.0


def test_rare_checkpoints_are_spread_over_their_interval():
    steps = [1.0, 1.0, 1.0, 1.4] * 2 + [7.0]  # the last is no whole interval
    assert figures.added_seconds(block(steps), every=4) == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("added", "stall", "persist", "expected"),
    [
        pytest.param(0.04, 0.01, 0.5, (1, 1), id="cheap"),
        pytest.param(0.5, 0.05, 0.5, (1, 10), id="most of it may be hidden"),
        pytest.param(0.5, 0.5, 0.5, (10, 10), id="none of it is hidden"),
        pytest.param(2.0, 0.01, 3.5, (4, 40), id="as long as it takes to write"),
        pytest.param(-0.1, 0.0, 0.1, (1, 1), id="noise below nothing"),
    ],
)
def test_the_interval_that_adds_five_percent(added, stall, persist, expected):
    found = figures.interval(added=added, stall_alone=stall, persist=persist, step=1.0)
    assert (found["low"], found["high"]) == expected


def test_a_strategy_that_never_saved_alone_has_no_ratios():
    found = figures.summarise([block([1.1])], every=1, state_bytes=100)
    assert found["persist_over_copy"] is None
    assert found["verified"] is None
    assert "interval" not in found


def test_ratios_are_of_the_copy_in_the_same_block():
    found = figures.summarise([block([1.1], alone=ALONE)], every=1, state_bytes=100)
    assert found["persist_over_copy"]["median"] == pytest.approx(0.5)
    assert found["restore_over_copy"]["median"] == pytest.approx(0.25)
    assert found["persist_bytes_s"]["median"] == pytest.approx(500)
    assert found["added_over_allowed"]["median"] == pytest.approx(0.1 / (0.13 + 0.01))


# Lines and the report.


def line_of(added: dict[str, float], *, model: str = "gpt2", every: int = 1, **more) -> dict:
    """Return a line in which each strategy of *added* makes a step of 1 s that much longer."""
    entries = {}
    for name, value in added.items():
        blocks = [block([1 + value] * every, alone=ALONE)]
        found = figures.summarise(blocks, every=every, state_bytes=10**9)
        entries[name] = {"blocks": blocks, "figures": found}
    line = record.make_line(
        "model", "made up", model=model, smoke=False,
        parameters={
            "device": "cpu", "every": every, "seed": 0, "folder": "/dev/shm", "threads": 2,
            "state_bytes": 10**9, "parameters": 1, "parameter_tensors": 1, "optimizer": "AdamW",
            "precision": "float32", "batch": 1, "size": 1, "input": "none",
        },
        plain_step_s=figures.spread([1.0]), copy_s=figures.spread([0.1]),
        strategies=entries | more.pop("missing", {}), **more,
    )  # fmt: skip
    return line | {"comparison": figures.compare(line)}


def test_the_best_of_each_side_are_compared():
    line = line_of({"lightckpt": 0.02, "lightckpt-stop": 0.1, "dcp": 0.9, "safetensors": 0.3})
    found = line["comparison"]
    assert (found["ours"], found["peer"]) == ("lightckpt", "safetensors")
    assert found["times_better"] == pytest.approx(15)
    assert line_of({"lightckpt": 0.0, "dcp": 0.9})["comparison"]["times_better"] is None


def test_of_lines_about_the_same_the_newest_counts():
    older, newer = line_of({"lightckpt": 0.5}), line_of({"lightckpt": 0.1})
    other = line_of({"lightckpt": 0.1}, every=10)
    smoke = line_of({"lightckpt": 0.1}) | {"smoke": True}
    found = tables.newest([older, other, newer, smoke])
    assert list(found.values()) == [newer, other]


def test_a_missed_target_says_by_how_much_and_why():
    line = line_of({"lightckpt": 0.21, "dcp": 0.9})
    why = {"gpt2, lightckpt: stall of M": "unused", "copy of persist": "checksums"}
    rows = {row[1]: row for row in tables.target_table({"gpt2": line}, why)["rows"]}
    assert rows["added of 1.3 M + 1 % of T"][-1] == "missed by 50 %: no reason given"
    assert rows["copy of persist"][-1] == "missed by 44 %: checksums"
    assert rows["stall of M"][-1] == "yes"


def test_the_report_is_made_of_lines_alone(tmp_path):
    results, output = tmp_path / "results", tmp_path / "report"
    kills = {
        "kills": 2, "seed": 0, "outcomes": dict.fromkeys(tables.OUTCOMES, 0) | {"new": 2},
        "lost_steps": [0, 1], "lost_acknowledged": 0, "errors": [],
    }  # fmt: skip
    line = line_of({"lightckpt": 0.02, "dcp": 0.9}, missing={"moonclip": {"missing": "<no wheel>"}})
    line["strategies"]["dcp"]["kills"] = kills
    record.append(results / "models.ndjson", line)
    page = report.make(results, output, smoke=False, command="made up").read_text()
    assert "moonclip: &lt;no wheel&gt;" in page
    assert tables.NOT_MEASURED in page  # five models, scale, and all of a GPU
    assert "0.50 (at most 1)" in page
    assert (output / "overhead.png").stat().st_size > 0
    assert not (output / "scale.png").exists()


def test_a_report_of_nothing_has_no_numbers(tmp_path):
    page = report.make(tmp_path, tmp_path, smoke=False, command="made up").read_text()
    assert tables.NOT_MEASURED in page
    assert "<img" not in page.replace("intervals.png", "")


def test_a_line_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "lines.ndjson"
    record.append(path, {"a": 1 / 3, "b": [1, {"c": None}]})
    record.append(path, {"a": 2})
    first, second = record.read(path)
    assert first["a"] == pytest.approx(1 / 3)
    assert (first["b"], second) == ([1, {"c": None}], {"a": 2})
    assert record.read(tmp_path / "none") == []


# Arguments.


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (["--ranks", "2"], "only --ranks 1"),
        (["--steps", "0"], "at least 1"),
        (["--every", "-1"], "at least 1"),
        (["--kills", "-1"], "at least 0"),
        (["--dir", "/there/is/none"], "no such folder"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(given_, words):
    with pytest.raises(arguments.RefusedError, match=words):
        arguments.parse("gpt2", given_)


def test_a_refusal_ends_the_script_before_torch_is_loaded():
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", BENCH / "gpt2.py", "--ranks", "4"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "versions that ranks agree on" in ran.stdout
    assert "torch" not in ran.stderr


def test_strategies_that_there_are_not_are_refused_by_name():
    with pytest.raises(SystemExit, match="no strategy"):
        catalog.choose(("lightckpt", "nonsense"), state_bytes=1)


def test_what_cannot_run_is_listed_with_its_reason(monkeypatch):
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    chosen, missing = catalog.choose(("table",), state_bytes=1)
    assert missing["safetensors"] == "safetensors is not installed"
    assert "safetensors" not in chosen
    assert "torch.save" in chosen


def test_of_large_states_the_slow_are_left_out_unless_they_are_asked_for():
    counts = [len(catalog.choose((), state_bytes=size << 30)[0]) for size in (1, 2, 4)]
    assert counts == sorted(counts, reverse=True)
    missing = catalog.choose((), state_bytes=2 << 30)[1]
    assert missing["torch.save-safe"] == "left out of states above 128 MiB, for time"
    assert "torch.save-safe" in catalog.choose(("torch.save-safe",), state_bytes=4 << 30)[0]


# Strategies.


def tiny(seed: int) -> Workload:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )

    def draw(generator):
        return torch.randn(5, 3, generator=generator), torch.empty(0)

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator()
    generator.manual_seed(seed)
    return Workload(
        "tiny", model, optimizer, lambda model, batch: model(batch[0]).square().mean(), draw,
        generator, {},
    )  # fmt: skip


def trained(kind: type[strategies.Strategy], folder: Path, steps: int) -> Workload:
    """Train *steps* steps with *kind*, saving each, and return the workload."""
    workload = tiny(seed=1)
    strategy = kind(folder, workload, 1)
    strategy.open()
    for step in range(1, steps + 1):
        workload.step(strategy.before_update)
        strategy.after_step(step)
    strategy.close()
    return workload


@pytest.mark.parametrize("kind", ROUND_TRIP, ids=lambda kind: kind.name)
def test_another_run_gets_what_was_saved_last(kind, tmp_path):
    saved = trained(kind, tmp_path, steps=5)
    other = tiny(seed=2)
    strategy = kind(tmp_path, other, 1)
    strategy.open()
    assert strategy.restore() == 5
    assert state.digest(other.state()) == state.digest(saved.state())
    # And it goes on, and saves again.
    other.step(strategy.before_update)
    strategy.after_step(6)
    strategy.close()
    saved.step()
    assert state.digest(other.state()) == state.digest(saved.state())


@pytest.mark.parametrize("kind", ROUND_TRIP, ids=lambda kind: kind.name)
def test_an_empty_folder_restores_nothing(kind, tmp_path):
    workload = tiny(seed=1)
    before = state.digest(workload.state())
    strategy = kind(tmp_path, workload, 1)
    strategy.open()
    assert strategy.restore() == 0
    assert state.digest(workload.state()) == before
    strategy.close()


def test_a_digest_sees_one_flipped_bit_and_a_scramble():
    workload = tiny(seed=1)
    workload.step()
    before = state.digest(workload.state())
    weight = next(workload.model.parameters())
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[0] ^= 1
    assert state.digest(workload.state()) != before
    state.scramble(workload.state())
    assert not weight.any()


class Forgetful(strategies.TorchSave):
    """Loses one number on the way."""

    name = "forgetful"

    def restore(self) -> int:
        step = super().restore()
        with torch.no_grad():
            next(self.workload.model.parameters()).view(-1)[0] += 1
        return step


@pytest.fixture(scope="module")
def harness():
    # Its module shares its name with a helper of other tests.
    spec = importlib.util.spec_from_file_location("bench_harness", BENCH / "harness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_later_rounds_are_of_ours_and_of_the_best_peers(harness):
    added = {"a": 0.3, "lightckpt": 0.9, "b": 0.1, "lightckpt-file": 0.0, "c": 0.2, "slow": 0.05}
    entries = {
        name: {
            "blocks": [
                {
                    "steps": [1 + more],
                    "plain_before": [1.0],
                    "plain_after": [1.0],
                    "seconds": 60.0 if name == "slow" else 10.0,
                }
            ]
        }
        for name, more in added.items()
    }
    entries["d"] = {"missing": "it is not installed"}
    assert harness.finalists(entries) == ["lightckpt", "b", "c"]


def test_a_strategy_that_loses_a_byte_is_not_measured(harness, tmp_path):
    options = arguments.parse("small", ["--steps", "1", "--dir", str(tmp_path)])
    bench = harness.Bench(options, tmp_path / "block", tiny(seed=1), print)
    found = bench.block(strategies.TorchSave, alone=True)
    assert found["alone"]["verified"]
    with pytest.raises(AssertionError, match=r"forgetful saved step .* other bytes"):
        bench.block(Forgetful, alone=True)


# Kills.


@pytest.mark.parametrize(
    ("step", "digest", "error", "expected"),
    [
        (4, "d4", "", "new"),
        (3, "d3", "", "old"),
        (4, "d3 and d4", "", "mixture"),
        (0, "", "", "nothing"),
        (0, "", "EOFError", "nothing"),
    ],
)
def test_what_a_successor_finds_is_told_by_its_bytes(step, digest, error, expected):
    import kills

    life = kills.Life(0.0, restored_step=step, restored_digest=digest, error=error)
    assert kills.classify(life, {"d3": 3, "d4": 4}, newest=4) == expected


def test_published_columns_are_whole():
    assert json.dumps(report.tables.published.INTERVALS)
    for row in tables.published.INTERVALS.values():
        assert {"mb", *tables.published.COLUMNS} == set(row)
