"""Goal: whenever a trainer is killed, no acknowledged step is lost, and every byte is its step's.

Method: lives of trainer.py on one store after another, in memory and on a plain file. A third kill
themselves at a named point of a save, a third some microseconds after one, a third are killed from
outside, some messages and some microseconds into their life. After each, the store is opened for
reading only: the newest version is the step that was last acknowledged or the one being tried, and
every version there is has the checksums and the bytes of its step.

``LIGHTCKPT_KILL_ROUNDS`` is the number of lives, ``LIGHTCKPT_KILL_SEED`` replays a run: what is
drawn follows from it, the scheduler's part does not.
"""

import dataclasses
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import torch_trainer
import trainer
from series import Series
from small_run import flip_bit
from zygote import Life, Zygote

pytestmark = pytest.mark.kill

ROUNDS = int(os.environ.get("LIGHTCKPT_KILL_ROUNDS", "200"))
ON_FILE = 1 / 4  # the share of lives whose store is a plain file
NEW_STORE = 1 / 12  # and of those that begin with none


def choose(chance: random.Random, path: Path) -> tuple[trainer.Job, int | None, float]:
    """Draw a job; messages after which to kill it from outside, None: not; seconds from there."""
    job = trainer.Job(
        path=str(path), keep=chance.randint(1, 3), workers=chance.randint(1, 3),
        back=chance.random() < 1 / 8,
    )  # fmt: skip
    kind = chance.randrange(3)
    if kind == 2:
        return job, chance.randint(0, 40), chance.random() * 0.004
    die_at = chance.choice(trainer.POINTS)
    die_in = 1 if die_at in ("opening", "opened") else chance.randint(1, 14)
    die_us = chance.randint(1, 1500) if kind == 1 else 0
    return dataclasses.replace(job, die_at=die_at, die_in=die_in, die_us=die_us), None, 0.0


def live_once(zygote: Zygote, series: Series, chance: random.Random) -> tuple[str, int]:
    """Run one life to its kill; return where it was killed and the steps it acknowledged."""
    job, messages, seconds = choose(chance, series.path)
    life = zygote.spawn()
    life.connection.send(dataclasses.asdict(job))
    before, heard = series.acknowledged, 0
    with life.connection as connection:
        try:
            while heard != messages:
                series.hear(connection.recv())
                heard += 1
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
            os.kill(life.pid, signal.SIGKILL)
            while True:
                series.hear(connection.recv())
        except (EOFError, ConnectionResetError):
            pass
    code = life.reap()
    assert code == -signal.SIGKILL, f"{job} ended with {code}:\n{zygote.log()}"
    return (job.die_at or "outside"), max(0, series.acknowledged - before)


def seed_of_this_run() -> int:
    return int(os.environ.get("LIGHTCKPT_KILL_SEED") or random.SystemRandom().getrandbits(31))


@pytest.mark.timeout(60 + ROUNDS)
def test_no_acknowledged_step_is_lost(trainers, folder, tmp_path, figure):
    seed = seed_of_this_run()
    chance = random.Random(seed)
    memory, file = Series(folder / "run"), Series(tmp_path / "run")
    kills: Counter[str] = Counter()
    acknowledged = given_up = 0
    for number in range(ROUNDS):
        series = file if chance.random() < ON_FILE else memory
        if chance.random() < NEW_STORE:
            series.start_anew()
        try:
            point, steps = live_once(trainers, series, chance)
            kills[point] += 1
            acknowledged += steps
            given_up += series.check()
        except BaseException as error:
            replay = f"LIGHTCKPT_KILL_SEED={seed} LIGHTCKPT_KILL_ROUNDS={number + 1}"
            error.add_note(f"round {number}, store {series.path}; replay with {replay}")
            raise
    points = ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
    figure(
        f"kills, core: {ROUNDS} rounds, {kills.total()} kills survived ({points}), {acknowledged} "
        f"steps acknowledged, 0 of them lost, {given_up} in flight given up; seed {seed}"
    )


def test_the_judge_sees_a_flipped_bit_and_a_step_that_is_missing(trainers, folder):
    """A test of the test: what the rounds above would say if the core were wrong."""
    series = Series(folder / "run")
    job = trainer.Job(path=str(series.path), steps=3, close=True)
    life = trainers.spawn()
    life.connection.send(dataclasses.asdict(job))
    for _ in range(7):
        series.hear(life.connection.recv())
    life.connection.send(None)
    assert life.reap() == 0
    series.check()
    series.acknowledged = 4
    with pytest.raises(AssertionError, match="'acknowledged': 4"):
        series.check()
    series.acknowledged = 3
    flip_bit(series.path, trainer.state_at(3)[3].tobytes())
    with pytest.raises(AssertionError, match=r"checksums of extents \(3,\) of step 3"):
        series.check()


# With torch. The conformance tests kill 32 kinds of training; here it is the moment that varies.

TORCH_STEPS = 60


def torch_life(zygote: Zygote, job: torch_trainer.Job) -> Life:
    life = zygote.spawn()
    life.connection.send(dataclasses.asdict(job))
    return life


@pytest.fixture(scope="module")
def digests(torch_trainers, tmp_path_factory) -> dict[int, str]:
    """The digest of each step of a run that nobody kills."""
    path = tmp_path_factory.mktemp("gold") / "run"
    life = torch_life(torch_trainers, torch_trainer.Job(str(path), TORCH_STEPS, style="iterate"))
    found = {}
    while (message := life.connection.recv())[0] != "done":
        found[message[1]] = message[2]
    assert life.reap() == 0
    return found


@pytest.mark.timeout(60 + ROUNDS)
@pytest.mark.parametrize("style", ["iterate", "mark"])
def test_a_killed_torch_trainer_goes_on_bit_for_bit(torch_trainers, digests, folder, style, figure):
    seed = seed_of_this_run()
    chance = random.Random(seed)
    rounds = max(1, ROUNDS // 40)
    durable = ended = acknowledged = given_up = 0
    for number in range(rounds):
        if ended > TORCH_STEPS - 10:
            (folder / "run").unlink()
            durable = ended = 0
        options = {"keep": chance.randint(1, 2), "mode": chance.choice(["overlap", "stop"])}
        job = torch_trainer.Job(
            str(folder / "run"), TORCH_STEPS, style, seed=seed + number, options=options
        )
        life = torch_life(torch_trainers, job)
        last = min(ended + chance.randint(0, 8), TORCH_STEPS - 1)
        seconds = chance.random() * 0.01
        why = f"round {number} of LIGHTCKPT_KILL_SEED={seed}, {ended} had ended"
        kind, start, digest = life.connection.recv()
        assert kind == "restored", why
        assert durable <= start <= ended + 1, why  # one may have ended without having said so
        assert digest == digests[start], why
        given_up += max(0, ended - start)
        ended, before = start, max(durable, start)
        try:
            while ended < last:
                _, ended, digest, durable = life.connection.recv()
                assert digest == digests[ended], why
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                pass
            os.kill(life.pid, signal.SIGKILL)
            while True:
                _, ended, digest, durable = life.connection.recv()
        except (EOFError, ConnectionResetError):
            pass
        assert life.reap() == -signal.SIGKILL, torch_trainers.log()
        acknowledged += max(0, durable - before)
    figure(
        f"kills, torch, {style}: {rounds} rounds, {rounds} kills survived, {acknowledged} steps "
        f"acknowledged, 0 of them lost, {given_up} in flight given up; seed {seed}"
    )
