"""A trainer that needs numpy and the core only, and that can be killed anywhere.

Its state after step k follows from step k-1 by a congruence, and from k alone by its closed form:
so a life that goes on from a wrong version goes wrong, and anybody can tell what step k must be.
Every sixth step an extent comes, grows, or goes, so that areas change their size; the host state
has another length in every step. The reports, one message each and in the pipe before the next
statement runs:

    ("at", name)      a named point was passed, where the job asks for these reports
    ("trying", k)     from now on the newest version may be step k
    ("ack", k)        step k is durable, and the newest
    ("inert", pid, message): a call was refused in a forked child
    ("error", class, message), ("done",)

Run with a job as JSON in its argument, when reports are lines of JSON on standard output; or forked
by nursery.py.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightckpt._core import Media, Op, Store, Version, make_sizes, make_spans

MULTIPLIER, INCREMENT, MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64
SIZES_BYTES = (8, 4096, 72, 200_008, 1_100_000)  # the last is more than a chunk
POINTS = ("opening", "opened", "begin", "begun", "submitted", "copied", "queued", "durable", "told")
LIFE_SECONDS = 120  # after this a life ends by itself, whatever happened to everyone else

Array = np.ndarray[Any, np.dtype[np.uint64]]
Say = Callable[..., None]
_START = [np.random.Generator(np.random.PCG64(i)).bytes(n) for i, n in enumerate(SIZES_BYTES)]


@dataclass(frozen=True)
class Job:
    """What one life is to do.

    Attributes:
        steps: how many to do; then it waits, store open, for a message.
        die_at: one of POINTS, passed for the ``die_in``-th time; None: it does not kill itself.
        die_us: microseconds from there to the kill; meanwhile it goes on.
        die_how: "kill"; or, at the point itself, "leave" without a word, or "raise".
        back: make the version before the newest the latest first, if there is one.
        talk: report every point, and wait there for a message.
        orphan: how to make a child once the store is open, "fork" or "multiprocessing", which tries
            to use it and then waits for ever; None: none.
        look: before each step, copy the folder of the store and read all of it: "copytree", "tar".
        close: close at the end.
        timeout: seconds that a batch may take.
    """

    path: str
    steps: int = 1_000_000
    keep: int = 1
    media: str = "AUTO"
    workers: int = 2
    size_bytes: int = 0
    die_at: str | None = None
    die_in: int = 1
    die_us: int = 0
    die_how: str = "kill"
    back: bool = False
    talk: bool = False
    orphan: str | None = None
    look: str | None = None
    close: bool = False
    timeout: float = 60.0


# What step k is.


def state_at(step: int) -> list[Array]:
    """Return what the state is after *step* steps."""
    factor = pow(MULTIPLIER, step, MODULUS)
    power = pow(MULTIPLIER, step, (MULTIPLIER - 1) * MODULUS)
    offset = (power - 1) // (MULTIPLIER - 1) * INCREMENT % MODULUS
    return [np.frombuffer(b, np.uint64) * np.uint64(factor) + np.uint64(offset) for b in _START]


def advance(state: list[Array]) -> None:
    """Bring *state*, in place, to the next step."""
    for array in state:
        array *= np.uint64(MULTIPLIER)
        array += np.uint64(INCREMENT)


def extra_at(step: int) -> list[Array]:
    """Return the extents that a version of *step* has besides the state."""
    phase = step // 6 % 4
    return [np.full(phase * 20_001, step, np.uint64)] if phase else []


def host_at(step: int) -> bytes:
    return b"%d" % step + bytes([step % 251]) * (step * 37 % 2000)


def blob_at(step: int) -> bytes:
    return json.dumps([array.nbytes for array in state_at(0) + extra_at(step)]).encode()


def difference(store: Store, version: Version) -> str:
    """Say how *version* differs from the step that it says it is; empty if it does not.

    Its checksums are looked at as ``lightckpt verify`` does, then its bytes one by one.
    """
    expected = state_at(version.step) + extra_at(version.step)
    if version.damaged or version.extent_count != len(expected):
        return f"{version} is damaged, or has not {len(expected)} extents"
    spans = make_spans([(0, extent) for extent in range(len(expected))])
    bad = store.wait(store.submit(Op.VERIFY, spans, version=version.version)).bad
    if bad:
        return f"the checksums of extents {bad} of step {version.step} are wrong"
    blob, host = store.view(version.version)
    if (bytes(blob), bytes(host)) != (blob_at(version.step), host_at(version.step)):
        return f"the manifest or the host state of step {version.step} is another's"
    for extent, array in enumerate(expected):
        if bytes(store.locate(version.version, extent)) != array.tobytes():
            return f"extent {extent} of step {version.step} is not that step's"
    return ""


# A life.


class Trainer:
    """One life: opens the store, goes on from its newest version, saves every step."""

    def __init__(self, job: Job, say: Say, listen: Callable[[], object]) -> None:
        self.job, self.say, self.listen = job, say, listen
        self._left = job.die_in  # passages of die_at until the kill

    def at(self, point: str) -> None:
        """Pass a named point, and die there or soon after if the job says so."""
        assert point in POINTS
        if self.job.talk:
            self.say("at", point)
            self.listen()
        self._left -= point == self.job.die_at
        if self._left or point != self.job.die_at:
            return
        if self.job.die_how == "raise":
            raise RuntimeError(f"at {point}")
        if self.job.die_how == "leave":
            os._exit(0)
        if self.job.die_us == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=_die_in, args=(self.job.die_us,), daemon=True).start()

    def live(self) -> None:
        job = self.job
        self.at("opening")
        store = Store(
            job.path,
            create=True,
            media=Media[job.media],
            workers=job.workers,
            size_bytes=job.size_bytes,
        )
        self.at("opened")
        if job.orphan:
            self.leave_a_child(store)
        step, state = self.restore(store)
        self.say("ack", step)
        for _ in range(job.steps):
            if job.look:
                look_into(os.path.dirname(job.path), job.look)
            advance(state)
            step += 1
            self.save(store, step, state)
            self.say("ack", step)
            self.at("told")
        self.listen()
        if job.close:
            store.close()

    def leave_a_child(self, store: Store) -> None:
        if self.job.orphan == "multiprocessing":
            context = multiprocessing.get_context("fork")
            context.Process(target=self.stay, args=(store,), daemon=True).start()
        elif os.fork() == 0:
            self.stay(store)

    def stay(self, store: Store) -> None:
        """Be a child that outlives its trainer."""
        for call in (store.info, store.versions, lambda: store.commit(b""), lambda: store.pin(1)):
            try:
                call()
            except ValueError as error:
                self.say("inert", os.getpid(), str(error))
        os.close(1)  # else whoever reads the reports waits for this process too
        signal.pause()

    def restore(self, store: Store) -> tuple[int, list[Array]]:
        """Return the newest version's step and state, checked by its checksums only."""
        versions = store.versions()
        if not versions:
            return 0, state_at(0)
        if self.job.back and len(versions) > 1:
            self.say("trying", versions[1].step)
            store.rebase(versions[1].version)
            versions = store.versions()
        state = [np.empty_like(array) for array in state_at(0)]
        spans = make_spans([(array.ctypes.data, i) for i, array in enumerate(state)])
        report = store.wait(store.submit(Op.READ, spans, version=versions[0].version))
        assert report.bad_count == 0, report
        return versions[0].step, state

    def save(self, store: Store, step: int, state: list[Array]) -> None:
        arrays = state + extra_at(step)
        host = host_at(step)
        pairs = [(array.ctypes.data, i) for i, array in enumerate(arrays)]
        self.say("trying", step)
        self.at("begin")
        store.begin(
            step=step,
            keep=self.job.keep,
            extents=make_sizes([array.nbytes for array in arrays]),
            blob=blob_at(step),
            host_bytes=len(host),
        )
        self.at("begun")
        batches = [store.submit(Op.WRITE, make_spans(part)) for part in (pairs[3:], pairs[:3])]
        self.at("submitted")
        for batch in batches:
            store.wait(batch, self.job.timeout)
        self.at("copied")
        commit = store.commit(host)
        self.at("queued")
        store.wait(commit, self.job.timeout)
        self.at("durable")


def look_into(folder: str, how: str) -> None:
    """Open and close every file of *folder*, in this process, as a backup of a run does."""
    with tempfile.TemporaryDirectory() as elsewhere:
        if how == "copytree":
            shutil.copytree(folder, os.path.join(elsewhere, "copy"))
        else:
            with tarfile.open(os.path.join(elsewhere, "copy.tar"), "w") as archive:
                archive.add(folder)


def _die_in(microseconds: int) -> None:
    until = time.perf_counter_ns() + 1000 * microseconds
    while time.perf_counter_ns() < until:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    def say(*words: object) -> None:
        os.write(1, json.dumps(words).encode() + b"\n")

    job = Job(**json.loads(sys.argv[1]))
    signal.alarm(LIFE_SECONDS)

    def listen() -> None:
        os.read(0, 1)

    try:
        Trainer(job, say, listen).live()
    except Exception as error:  # noqa: BLE001 - the test wants to know which
        say("error", type(error).__name__, str(error))
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
