"""Goal: a forked child works, or says what it may not, whatever other threads did at the fork.

Method: a process forks many times while its threads are in every kind of call; each child opens
stores, reads one and writes one, and an alarm ends it if it hangs. A Checkpointer is forked while
another thread has its lock; each of its methods is called in a child of its own.

Elsewhere: descriptors and locks after a fork, in core/fork_test.cc and lock_test.cc; what a hook of
a watched model or optimizer does in a child, in test_regressions.py.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager

import numpy as np
import pytest

import lightckpt
from lightckpt._core import Op, Store, make_sizes, make_spans
from lightckpt.reader import must_pin
from training import make, update

pytestmark = pytest.mark.kill

FORKS = 60
CHILD_SECONDS = 60


def in_a_child(call):
    """Run *call* in a forked child; return its exit status, 0 if it returned."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        try:
            call()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it was, it is this child's last
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save(store, array, step):
    store.begin(step=step, keep=1, extents=make_sizes([array.nbytes]), blob=b"{}", host_bytes=4)
    store.wait(store.submit(Op.WRITE, make_spans([(array.ctypes.data, 0)])), CHILD_SECONDS)
    store.wait(store.commit(b"host"), CHILD_SECONDS)


def newest(path):
    """Return the bytes of the newest version, compared with their checksums."""
    with Store(path, read_only=True, workers=1) as store:
        version = must_pin(store, str(path))
        spans = make_spans([(0, 0)])
        assert store.wait(store.submit(Op.VERIFY, spans, version=version.version)).bad_count == 0
        return bytes(store.locate(version.version, 0))


@contextmanager
def over_and_over(*works):
    """Do all of *works*, each on a thread of its own; all have been done once when this begins."""
    stop, errors = threading.Event(), []
    begun = threading.Barrier(len(works) + 1)

    def run(work):
        try:
            work()
            begun.wait(CHILD_SECONDS)
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - told below, and nobody waits for it
            errors.append(error)
            begun.abort()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        begun.wait(CHILD_SECONDS)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_children_of_a_busy_process_open_stores_read_and_write(folder):
    array = np.arange(50_000)
    steps = itertools.count(1)
    model, optimizer = make()
    with lightckpt.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
    with Store(folder / "live", create=True, workers=2) as live:
        save(live, array, next(steps))

        def open_and_close():
            with Store(folder / "made", create=True, workers=1):
                pass

        def child():
            assert newest(folder / "live") == array.tobytes()
            own = folder / f"own-{os.getpid()}"
            with Store(own, create=True, workers=1) as store:
                save(store, array, 1)
            assert newest(own) == array.tobytes()
            own.unlink()

        with over_and_over(
            live.versions,
            lambda: save(live, array, next(steps)),
            open_and_close,
            lambda: lightckpt.load(folder / "run"),
        ):
            codes = [in_a_child(child) for _ in range(FORKS)]
        assert codes == [0] * FORKS
        save(live, array, next(steps))
        assert newest(folder / "live") == array.tobytes()


CALLS = {
    "iterate": lambda checkpointer: checkpointer.iterate([1], start=1),
    "mark": lambda checkpointer: checkpointer.mark(),
    "finish_on": lambda checkpointer: checkpointer.finish_on(),
    "decorate": lambda checkpointer: checkpointer.decorate(make()[1]),
    "restore": lambda checkpointer: checkpointer.restore(),
    "info": lambda checkpointer: checkpointer.info(),
    "why": lambda checkpointer: checkpointer.why(),
    "steps": lambda checkpointer: checkpointer.steps(),
    "pin": lambda checkpointer: checkpointer.pin(1),
    "wait": lambda checkpointer: checkpointer.wait(),
    "close": lambda checkpointer: checkpointer.close(),
    "exit": lambda checkpointer: checkpointer.__exit__(None, None, None),
}


@contextmanager
def held(lock):
    """Let another thread hold *lock* meanwhile."""
    taken, free = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            free.wait(CHILD_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(CHILD_SECONDS)
    yield
    free.set()
    thread.join()


def test_every_public_method_of_a_checkpointer_is_tried_here():
    public = {
        name
        for name, value in vars(lightckpt.Checkpointer).items()
        if callable(value) and not name.startswith("_")
    }
    assert public == CALLS.keys() - {"exit"}


def test_a_checkpointer_is_inert_in_a_child_even_if_its_lock_is_held(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        ticket = checkpointer.mark()
        checkpointer.wait()

        def refuses(call):
            with pytest.raises(ValueError, match="in a forked child it is inert"):
                call(checkpointer)

        def still_known():
            assert checkpointer.latest == 1
            assert ticket.durable
            assert checkpointer.stats.versions == 1
            checkpointer.__exit__(SystemExit, SystemExit(), None)  # leaves that one to go on

        calls = {
            **CALLS,
            "ticket.wait": lambda _: ticket.wait(),
            "ticket.copied": lambda _: ticket.copied(),
        }
        with held(checkpointer._driver.lock):
            codes = {name: in_a_child(lambda c=call: refuses(c)) for name, call in calls.items()}
            assert codes == dict.fromkeys(calls, 0)
            assert in_a_child(still_known) == 0
        update(model, optimizer, 1)
        checkpointer.mark()
        assert checkpointer.wait() == 2


ENDS = """
import os, sys, threading
import lightckpt
from training import make, update
model, optimizer = make()
with lightckpt.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as checkpointer:
    update(model, optimizer, 0)
    checkpointer.mark()
    lock, free = checkpointer._driver.lock, threading.Event()
    taken = threading.Event()
    def hold():
        with lock:
            taken.set()
            free.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    if (child := os.fork()) == 0:
        sys.exit(3)  # unwinds the with block, runs what is registered for the exit, and finalizers
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    free.set()
    thread.join()
sys.exit(0 if code == 3 else 1)
"""


def test_a_child_that_ends_in_order_is_silent_and_keeps_its_status(path, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    done = subprocess.run(
        [sys.executable, script, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=CHILD_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    with Store(path, read_only=True) as store:
        assert store.versions()[0].step == 1
