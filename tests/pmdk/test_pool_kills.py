"""Goal: whatever instant a process is killed at, the pool opens with all of a transaction or none.

Method: processes of pool_victim.py on one pool after another, on a plain file and on tmpfs. Each
is killed at a named point of a transaction, or from outside, some messages and microseconds into
its life, which begins with the recovery from the last kill. Then the pool must be sound for
``pmempool check``, hold the turn that was last told or the next, whole, and no object too many.

``PYPMEMOBJ_KILL_ROUNDS`` is the number of random lives, ``PYPMEMOBJ_KILL_SEED`` replays them: what
is drawn follows from it, the scheduler's part does not.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pool_victim
from pool_tools import KIND, SECONDS, make_pool, skip_without_libpmemobj
from pool_victim import POINTS, WORDS
from pypmemobj import Pool

skip_without_libpmemobj()
pytestmark = pytest.mark.kill

ROUNDS = int(os.environ.get("PYPMEMOBJ_KILL_ROUNDS", "40"))
SCRIPT = Path(pool_victim.__file__)


@contextlib.contextmanager
def victim(path, die_turn=0, die_at="", careless=""):
    """A process of pool_victim.py, which says what it does in lines; an alarm ends it in time."""
    command = [sys.executable, SCRIPT, path, str(die_turn), die_at, careless]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(SECONDS)


def heard(process, turn, messages=None):
    """Listen for *messages* lines, or to the end; return the turn that was told last."""
    while messages != 0 and (line := process.stdout.readline()):
        if line != "ready\n":
            turn = int(line.split()[1])
        if messages is not None:
            messages -= 1
    return turn


def turn_of(path):
    """Return the turn that the pool holds, after looking whether it holds that one whole."""
    with Pool.open(path) as pool:
        *words, offset = pool.root(8 * WORDS).view("Q")
        turn = words[0]
        assert set(words) == {turn}
        things = list(pool.objects())
        assert [thing.oid.offset for thing in things] == ([offset] if turn else [])
        for thing in things:
            assert thing.type_number == KIND
            size = pool_victim.size_of(turn)
            view = pool.object(offset, size).view()
            assert bytes(view) == turn.to_bytes(8, "little") * (size // 8)
    return turn


@pytest.fixture(params=["file", "tmpfs"])
def place(request, path, folder):
    """A pool on a medium of each kind."""
    place = path if request.param == "file" else folder / "pool"
    make_pool(place, 16 << 20).close()
    return place


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_in_a_transaction_leaves_the_one_before(place, sound, point):
    for die_turn in (1, 2):  # without an object before, and with one
        with victim(place, die_turn, point) as process:
            assert heard(process, 0) == die_turn - (point != "told")
            assert process.wait(SECONDS) == -signal.SIGKILL
        assert sound(place)
        assert turn_of(place) == die_turn - (point not in ("committed", "told"))
        with victim(place, die_turn + 1, "begun") as process:
            heard(process, 0)
        assert turn_of(place) == die_turn


def test_a_range_that_is_not_added_is_torn_by_a_kill(place):
    """The test of the test: without add(), a kill leaves what it should not."""
    with victim(place, 2, "half", "careless") as process:
        assert heard(process, 0) == 1
    with pytest.raises(AssertionError):
        turn_of(place)


def test_no_random_kill_loses_a_turn_or_tears_one(place, sound):
    seed = int(os.environ.get("PYPMEMOBJ_KILL_SEED", random.randrange(1 << 32)))
    replay = f"replay with PYPMEMOBJ_KILL_SEED={seed} PYPMEMOBJ_KILL_ROUNDS={ROUNDS}"
    chance, told = random.Random(seed), 0
    for life in range(ROUNDS // 2):
        with victim(place) as process:
            told = heard(process, told, chance.choice([1, 1, 2, 3, chance.randint(3, 60)]))
            until = time.monotonic() + chance.random() * 0.004
            while time.monotonic() < until:
                pass
            process.kill()
            told = heard(process, told)
            assert process.wait(SECONDS) == -signal.SIGKILL, replay
        assert sound(place), f"life {life}; {replay}"
        try:
            turn = turn_of(place)
        except BaseException as error:
            error.add_note(f"life {life}; {replay}")
            raise
        assert turn in (told, told + 1), f"life {life}; {replay}"
        told = turn
    assert told > 0, replay
