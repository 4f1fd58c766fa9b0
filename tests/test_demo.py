"""Tests of the demo. Goal: what it prints is so, and it fails when something is not bit for bit.

Method: the definitions are pure functions of what trainers reported, tried on reports made up here;
one test runs the small demo as a user does, with real processes and real kills.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightckpt.demo import run
from lightckpt.demo.digest import PARTS, digest_state, loss_bits
from lightckpt.demo.drill import plan_kills, steps_min
from lightckpt.demo.results import METHODS, Finished, Life, compare, costs, count_kills, is_noisy
from lightckpt.demo.text import read_text
from lightckpt.demo.timeline import draw

SECOND_NS = 10**9
DEADLINE_S = 280


def life(first: int, last: int, *, killed: bool = False, started_s: int = 0) -> Life:
    """Return a life that resumed at *first* and reported steps up to *last*, one a second."""
    begin_ns = started_s * SECOND_NS
    finished = [
        Finished(step, f"loss {step}", begin_ns + (step - first) * SECOND_NS)
        for step in range(first + 1, last + 1)
    ]
    end_ns = begin_ns + (last - first) * SECOND_NS
    return Life(
        started_ns=begin_ns,
        resumed_step=first,
        restore_ns=(begin_ns, begin_ns),
        finished=finished,
        killed_ns=end_ns + SECOND_NS // 2 if killed else None,
        digests={} if killed else dict.fromkeys(PARTS, "same"),
    )


@given(kills=st.integers(0, 12), extra=st.integers(0, 50), seed=st.integers(0, 2**32))
def test_kills_come_one_after_the_other_and_within_the_run(kills, extra, seed):
    steps = steps_min(kills) + extra
    moments = plan_kills(steps=steps, kills=kills, seed=seed)
    assert moments == plan_kills(steps=steps, kills=kills, seed=seed)
    after = [moment.after_step for moment in moments]
    assert len(after) == kills
    assert after == sorted(set(after))
    assert all(1 < step < steps for step in after)
    assert all(0 <= moment.fraction < 1 for moment in moments)


@pytest.mark.parametrize(
    ("resumed", "lost", "work_s"),
    [
        pytest.param(5, 0, 0.5, id="the step in flight only"),
        pytest.param(4, 1, 1.5, id="a finished step too"),
        pytest.param(6, 0, 0.0, id="durable before it was reported"),
    ],
)
def test_a_kill_costs_what_the_successor_does_again(resumed, lost, work_s):
    (kill,) = count_kills([life(0, 5, killed=True), life(resumed, 8, started_s=20)])
    assert (kill.reported_step, kill.resumed_step, kill.steps_lost) == (5, resumed, lost)
    assert kill.work_lost_s == pytest.approx(work_s)
    assert kill.resume_s == pytest.approx(1)


def test_work_of_a_repeated_step_counts_from_its_last_end():
    lives = [life(0, 5, killed=True), life(4, 6, killed=True, started_s=20), life(5, 8)]
    assert [kill.work_lost_s for kill in count_kills(lives)] == [1.5, 1.5]


def test_a_run_with_the_same_bits_is_identical():
    identity = compare(life(0, 8), [life(0, 5, killed=True), life(4, 8)])
    assert identity.holds
    assert identity.losses == (9, 9)


def test_each_difference_is_seen():
    golden = life(0, 8)
    for part in PARTS:
        last = life(4, 8)
        last.digests[part] = "other"
        assert not compare(golden, [life(0, 5, killed=True), last]).holds, part
    first = life(0, 5, killed=True)
    first.finished[2] = Finished(3, "other", 0)
    assert not compare(golden, [first, life(4, 8)]).holds, "a loss"
    assert not compare(golden, [life(0, 3, killed=True), life(4, 8)]).holds, "a missing step"
    last = life(4, 8)
    last.digests = {}
    assert not compare(golden, [life(0, 5, killed=True), last]).holds, "no digests"


def test_what_a_checkpoint_adds_is_counted_within_a_round():
    """The second round is slower for all methods; what is added stays the same."""
    samples = [
        (method, number, (number * 1000 + 100 + added) * 10**6)
        for number in (0, 1)
        for method, added in zip(METHODS, (0, 7, 50), strict=True)
        for _ in range(3)
    ]
    found = costs(samples)
    for method, added_s in zip(METHODS, (0, 0.007, 0.05), strict=True):
        assert found[method].added_s == pytest.approx((added_s,) * 3)
    assert is_noisy(found)
    assert not is_noisy(costs([sample for sample in samples if sample[1] == 0]))


def test_a_digest_sees_one_bit_of_each_part():
    def state(zero: float = 0.0, step: float = 1.0, epoch: int = 1, draws: int = 0):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.bias]["step"] = torch.tensor(step)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        scheduler.last_epoch = epoch
        torch.rand(draws)
        return digest_state(model, optimizer, scheduler)

    assert state() == state()
    for part, change in {
        "weights": {"zero": -0.0},
        "optimizer": {"step": 1.0000001},
        "scheduler": {"epoch": 2},
        "random": {"draws": 1},
    }.items():
        changed = state(**change)
        assert {name for name in PARTS if changed[name] != state()[name]} == {part}


def test_losses_are_compared_by_their_bits():
    assert loss_bits(0.0) != loss_bits(-0.0)
    assert loss_bits(1.0) == "3f800000"


def test_the_text_is_the_same_each_time_and_no_longer_than_asked():
    text = read_text(100_000)
    assert len(text) == 100_000
    assert text == read_text(200_000)[:100_000]


@pytest.mark.parametrize("told", [True, False])
def test_the_picture_is_drawn_whatever_the_engine_told(tmp_path, told):
    """A dropped version has no commit, and one that was stopped for has no guard."""
    phases = [(at, at + 80, at + 90) for at in range(10**6, 10**6 + 400, 100)]
    versions = [
        {
            "step": step,
            "mode": "overlap" if told else "stop",
            "boundary_ns": (end, end + 5),
            "copies": [(end + 3, end + 30, 1000), (end + 4, end + 20, 500)] if told else [],
            "guard_ns": [(end + 80, end + 81)] if told else [],
            "landing_ns": (end + 95, end + 96) if told else (0, 0),
            "commit_ns": (end + 82, end + 83) if told else (0, 0),
        }
        for step, (_begin, _backward, end) in enumerate(phases, start=1)
    ]
    picture = tmp_path / "timeline.png"
    lives = [life(0, 5, killed=True), life(4, 8, started_s=20)]
    draw(picture, lives, {"phases": phases, "versions": versions}, total_steps=8)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "5", "--kills", "4"], "4 kills need --steps 13 or more"),
        (["--dir", "nowhere"], "nowhere is no writable folder"),
        (["--out", "nowhere/picture.png"], "no writable folder"),
    ],
)
def test_what_cannot_be_run_says_why(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert said in capsys.readouterr().out


@pytest.mark.kill
@pytest.mark.slow
def test_the_small_demo_is_killed_and_ends_bit_for_bit(tmp_path):
    picture, stores = tmp_path / "demo.png", tmp_path / "stores"
    stores.mkdir()
    command = [sys.executable, "-m", "lightckpt.demo", "--quick", "--json", "--seed", "7"]
    result = subprocess.run(
        [*command, "--dir", str(stores), "--out", str(picture)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    found = json.loads(result.stdout)
    assert found["ok"]
    assert not found["failures"]
    assert found["kills"]
    assert found["steps_lost_max"] <= 1
    equal, compared = found["identical"].pop("losses")
    assert equal == compared >= found["options"]["steps"]
    assert found["identical"] == dict.fromkeys(PARTS, True)
    assert found["persisted_bytes"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert os.listdir(stores) == []
