"""Goal: processes that stop, fork, leave, or meet on one store lose no acknowledged step.

Method: trainers in processes of their own say what they acknowledged; then the store is looked at.

Elsewhere: inert children of a Checkpointer, and those of a busy process, in test_forks.py; stores
that are renamed, linked, locked or replaced under their writer in test_held.py; the locks
themselves, and who holds them after a fork or a kill, in core/lock_test.cc and hold_test.cc (bind
mounts and bare clones too); readers beside a trainer in test_load_live.py; a guard beyond its
timeout in test_errors.py.
"""

import contextlib
import dataclasses
import os
import random
import signal
import sys
import time

import pytest

import torch_trainer
import trainer
from process import Process
from series import Series

pytestmark = pytest.mark.kill


@pytest.fixture
def series(folder):
    return Series(folder / "run")


def test_a_second_process_is_refused_with_the_holder_until_that_is_killed(series):
    with Process(series, talk=True) as first:
        first.to("told", times=2)
        with Process(Series(series.path)) as second:
            kind, error, message = second.end()
        assert (kind, error) == ("error", "BusyError")
        assert str(first.pid) in message
        first.go()
        first.to("told")
        assert series.acknowledged == 3
        first.kill()
    series.check()
    with Process(series, steps=1, close=True) as third:
        third.go()
        assert third.end() == ["done"]
    series.check()
    assert series.acknowledged == 4


def test_of_many_that_make_the_store_at_once_one_does(trainers, series):
    lives = [trainers.spawn() for _ in range(6)]
    job = trainer.Job(str(series.path), steps=1)
    for life in lives:
        life.connection.send(dataclasses.asdict(job))
    first = [life.connection.recv() for life in lives]
    refused = [message for message in first if message[0] == "error"]
    assert {message[1] for message in refused} == {"BusyError"}
    assert len(refused) == 5
    (holder,) = [life for life, message in zip(lives, first, strict=True) if message[0] == "ack"]
    # Who is refused while the store is being made, or has just got its name, hears that only.
    assert all(
        str(holder.pid) in message[2] or "has not said which it is" in message[2]
        for message in refused
    )
    assert [holder.connection.recv() for _ in range(2)] == [("trying", 1), ("ack", 1)]
    os.kill(holder.pid, signal.SIGKILL)
    for life in lives:
        life.reap()
    series.acknowledged = 1
    series.check()


@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_a_child_is_inert_and_as_an_orphan_it_holds_no_lock(series, how):
    """So is a loader's worker whose trainer was killed."""
    with Process(series, orphan=how, steps=2) as process:
        reports = process.reports()
        inert = [next(reports) for _ in range(4)]
        orphan = inert[0][1]
        try:
            assert [report[:2] for report in inert] == [["inert", orphan]] * 4
            assert all("child" in report[2] for report in inert)
            process.kill()
            os.kill(orphan, 0)  # it lives
            series.check()
            with Process(series, steps=2, close=True) as heir:
                heir.go()
                assert heir.end() == ["done"]
            os.kill(orphan, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
    series.check()


@pytest.mark.parametrize("how", ["leave", "raise"])
@pytest.mark.parametrize("point", ["begun", "submitted", "copied", "queued", "durable"])
def test_an_end_without_close_loses_nothing(series, how, point):
    with Process(series, die_at=point, die_in=3, die_how=how) as process:
        last = process.end()
    assert last == (["error", "RuntimeError", f"at {point}"] if how == "raise" else [])
    assert series.acknowledged == 2
    series.check()
    with Process(series, steps=2, close=True) as heir:
        heir.go()
        assert heir.end() == ["done"]
    series.check()


def test_a_trainer_that_is_stopped_goes_on_or_says_what_took_too_long(trainers, tmp_path, figure):
    """All its threads are stopped: a deadline may pass, and then that is the error."""
    chance = random.Random(3)
    series, timeouts, stops = Series(tmp_path / "run"), 0, 30
    for _ in range(stops):
        life = trainers.spawn()
        job = trainer.Job(str(series.path), timeout=0.1, keep=2)
        life.connection.send(dataclasses.asdict(job))
        # On a busy machine the deadline may pass without a stop.
        timed_out = hear(series, life, messages=chance.randint(5, 20))
        spin(chance.random() * 0.003)
        if not timed_out:
            os.kill(life.pid, signal.SIGSTOP)
            spin(0.11)  # more than the timeout
            os.kill(life.pid, signal.SIGCONT)
            with contextlib.suppress(EOFError):
                timed_out = hear(series, life, until=series.acknowledged + 5)
        os.kill(life.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError, ConnectionResetError):
            timed_out = hear(series, life) or timed_out
        timeouts += timed_out
        life.reap()
        series.check()
    figure(f"stops: {stops} survived, {timeouts} of them said what took too long")


def hear(series, life, messages=sys.maxsize, until=sys.maxsize):
    """Hear so many messages, or up to a step; True if one says what took too long."""
    while messages > 0 and series.acknowledged < until:
        message = life.connection.recv()
        if message[0] == "error":
            assert message[1] == "WaitTimeoutError", message
            return True
        series.hear(message)
        messages -= 1
    return False


def spin(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_a_stopped_torch_trainer_gives_versions_up_and_trains_on(torch_trainers, folder):
    """Guards, copies and commits each may time out; what the store has is what training had."""
    options = {"timeout": 0.002, "mode": "overlap", "keep": 2}
    job = torch_trainer.Job(str(folder / "run"), 30, options=options, tolerate=True)
    life = torch_trainers.spawn()
    life.connection.send(dataclasses.asdict(job))
    digests, acknowledged = {}, 0
    chance = random.Random(5)
    while (message := life.connection.recv())[0] in ("restored", "end"):
        digests[message[1]] = message[2]
        if message[0] == "end":
            acknowledged = message[3]
        spin(chance.random() * 0.002)
        os.kill(life.pid, signal.SIGSTOP)
        spin(0.004)
        os.kill(life.pid, signal.SIGCONT)
    assert message[0] in ("done", "error"), message
    life.reap()
    assert len(digests) == 31, "training did not go on"
    life = torch_trainers.spawn()
    life.connection.send(dataclasses.asdict(torch_trainer.Job(str(folder / "run"), 30)))
    _, step, digest = life.connection.recv()
    assert step >= acknowledged
    assert digest == digests[step]
    life.reap()
