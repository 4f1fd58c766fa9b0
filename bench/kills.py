"""Trainers that are killed with SIGKILL, and what their successors find.

A *life* is a process that builds the workload, restores what is there, and trains on, with a
checkpoint in every step, until it is killed with all its children. It reports the digest of each
state before it saves it, so a successor's state is told to be the newest that was begun ("new"), an
earlier one ("old"), or no state that ever was ("mixture"); where nothing loads it is "nothing".

Lives are forked from a server in which everything is imported already: importing takes seconds, is
the same for all, and is measured apart, once.
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SILENCE_SECONDS_MAX = 240.0
OUTCOMES = ("new", "old", "nothing", "mixture")
LARGE_BYTES = 1 << 30
# Of large states only these are killed: others take minutes, and their restore is timed in blocks.
KINDS_OF_LARGE = ("lightckpt", "torch.save", "checkfreq")
KILLED_AT_ONCE = 2  # strategies: a life waits more than it computes
STEPS_BEFORE_KILL = 2  # at least so many saves are begun in a life before the one that is hit
HERE = str(Path(__file__).parent)
KILLED_SECONDS = 10.0  # after SIGKILL; a process that a driver holds is left to the kernel
PR_SET_PDEATHSIG = 1

context = get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """What a life trains, and how it checkpoints."""

    model: str
    strategy: str
    folder: Path
    smoke: bool
    seed: int
    device: str = "cpu"


@dataclass
class Life:
    """What a life reported; times are CLOCK_MONOTONIC seconds.

    ``saving`` and ``saved`` are when a step's save was called and returned; ``digests`` are of the
    states that were to be saved.
    """

    started: float
    built: float = 0.0
    restored: float = 0.0
    restored_step: int = 0
    restored_digest: str = ""
    error: str = ""
    first_step_s: float = 0.0
    durable: int = 0
    saving: dict[int, float] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def take(self, report: dict[str, Any]) -> None:
        match report:
            case {"event": "built", "at": at}:
                self.built = at
            case {"event": "restored", "at": at, "step": step}:
                self.restored, self.restored_step = at, step
            case {"event": "found", "digest": digest}:
                self.restored_digest = digest
            case {"event": "broken", "error": error}:
                self.error = error
            case {"event": "trained", "seconds": seconds}:
                self.first_step_s = self.first_step_s or seconds
            case {"event": "saving", "at": at, "step": step, "digest": digest}:
                self.saving[step], self.digests[step] = at, digest
            case {"event": "saved", "at": at, "step": step, "durable": durable}:
                self.saved[step], self.durable = at, durable

    def span(self) -> float:
        """Return how long a save takes: the call, or the whole step if it goes on behind."""
        last = max(self.saved)
        if self.durable == last:
            return self.saved[last] - self.saving[last]
        return self.saved[last] - self.saved[last - 1] if last - 1 in self.saved else 0.1


def be_killable() -> None:
    """Let this process, just forked, be killed with its children, and end with its server."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def live(job: Job, pipe: Any) -> None:
    """Be a life; never returns by itself."""
    be_killable()
    import psutil
    import torch

    import catalog
    from state import digest
    from workloads import build

    def report(event: str, **fields: Any) -> None:
        pipe.send({"event": event, "at": time.monotonic(), **fields})

    torch.set_num_threads(psutil.cpu_count() or 1)
    workload = build(job.model, device=job.device, smoke=job.smoke, seed=job.seed)
    strategy = catalog.by_name(job.strategy)(job.folder, workload, 1)
    report("built")
    try:
        strategy.open()
        step = strategy.restore()
    except Exception as error:  # noqa: BLE001 - each library raises its own; it is told as found
        report("broken", error=f"{type(error).__name__}: {error}"[:300])
        return
    report("restored", step=step)
    report("found", digest=digest(workload.state()) if step else "")
    while True:
        begin = time.monotonic()
        workload.step(strategy.before_update)
        report("trained", seconds=time.monotonic() - begin)
        step += 1
        report("saving", step=step, digest=digest(workload.state()))
        strategy.after_step(step)
        report("saved", step=step, durable=strategy.durable)


@contextmanager
def life_of(job: Job) -> Iterator[tuple[Life, Any, Any]]:
    """Start a life; at the end of the ``with`` block it and its children are dead."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(job, theirs))
    life = Life(time.monotonic())
    process.start()
    theirs.close()
    try:
        yield life, ours, process
    finally:
        kill(process)
        with suppress(EOFError, OSError):  # what it reported before it died is still in the pipe
            while ours.poll(0):
                life.take(ours.recv())
        ours.close()


def kill(process: Any) -> None:
    """Kill *process* and its children, at once, and wait until it is gone."""
    with suppress(ProcessLookupError):  # it does not lead a group of its own yet
        os.killpg(process.pid, signal.SIGKILL)  # of its children too, where it has ended itself
    process.kill()
    process.join(KILLED_SECONDS)


def follow(life: Life, pipe: Any, until: Any) -> bool:
    """Take reports until ``until(life)`` holds; False if the life ended before.

    Raises:
        TimeoutError: it is silent for too long.
    """
    while not until(life):
        if not pipe.poll(SILENCE_SECONDS_MAX):
            raise TimeoutError(f"a trainer has been silent for {SILENCE_SECONDS_MAX:.0f} s")
        try:
            life.take(pipe.recv())
        except EOFError:
            return False
    return True


def prepare_server() -> None:
    """Say how the server that lives are forked from is to start, which it does with the first."""
    paths = [HERE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # The server has no other way; and where it starts there may lie a lightckpt that is not built.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))
    os.environ["PYTHONSAFEPATH"] = "1"
    # Libraries ask as they load whether there is a GPU. This way torch does not start CUDA for the
    # answer: a process that is forked after that could not use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context.set_forkserver_preload(["loaded"])


def import_seconds(model: str) -> float:
    """Return the seconds that the imports of a script with *model* and lightckpt take.

    The server imports all that is compared.
    """
    begin = time.monotonic()
    code = f"import lightckpt, workloads; workloads.load_libraries({model!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.monotonic() - begin


# Recovery.


def recover(job: Job) -> dict[str, Any]:
    """Kill a trainer after it has a durable checkpoint, and time its successor.

    Raises:
        RuntimeError: one of the two could not start or restore.
    """
    with life_of(job) as (life, pipe, _):
        if not follow(life, pipe, lambda life: life.durable):
            raise RuntimeError(f"{job.strategy}: the trainer ended: {life.error or 'no report'}")
    digests = life.digests
    with life_of(job) as (successor, pipe, _):
        if not follow(successor, pipe, lambda life: life.first_step_s):
            raise RuntimeError(f"{job.strategy}: the successor ended: {successor.error}")
    return {
        "start_and_build_s": successor.built - successor.started,
        "restore_s": successor.restored - successor.built,
        "first_step_s": successor.first_step_s,
        "durable_step": life.durable,
        "restored_step": successor.restored_step,
        "verified": digests.get(successor.restored_step) == successor.restored_digest,
    }


# The kill matrix.


def classify(life: Life, known: dict[str, int], newest: int) -> str:
    """Return what *life* found of the states in *known* (digest to step); see the file's head."""
    if life.error or life.restored_step == 0:
        return "nothing"
    if life.restored_digest not in known:
        return "mixture"
    return "new" if known[life.restored_digest] == newest else "old"


def matrix(job: Job, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill *job*'s trainer *kills* times at random moments of its saves; count what came back."""
    draw = random.Random(f"{seed} {job.strategy}")
    outcomes: Counter[str] = Counter()
    lost_steps, lost_acknowledged, errors = [], 0, []
    known: dict[str, int] = {}
    newest = acknowledged = 0
    for number in range(kills + 1):
        last = number == kills
        with life_of(job) as (life, pipe, process):
            ready = follow(life, pipe, lambda life: life.restored_digest or life.saving)
            if not ready and not life.error:
                raise RuntimeError(f"{job.strategy}: a trainer ended without a word")
            if number:
                outcome = classify(life, known, newest)
                outcomes[outcome] += 1
                found = life.restored_step if outcome in ("new", "old") else 0
                lost_steps.append(newest - found)
                lost_acknowledged += found < acknowledged
                if life.error and life.error not in errors:
                    errors.append(life.error)
            if ready and not last:
                wanted = STEPS_BEFORE_KILL + draw.randrange(2)
                if not follow(life, pipe, lambda life, wanted=wanted: len(life.saving) > wanted):
                    raise RuntimeError(f"{job.strategy}: a trainer ended by itself")
                time.sleep(draw.random() * life.span())
                kill(process)
        if not ready:
            # Nothing loads: a person cleans up, and the next life begins anew.
            discard(job)
            known, newest, acknowledged = {}, 0, 0
            with life_of(job) as (life, pipe, _):
                follow(life, pipe, lambda life: len(life.saved) >= STEPS_BEFORE_KILL)
        if life.saving:
            known |= {digest: step for step, digest in life.digests.items()}
            newest, acknowledged = max(life.saving), max(acknowledged, life.durable)
    discard(job)
    return {
        "kills": kills,
        "seed": seed,
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "lost_steps": lost_steps,
        "lost_acknowledged": lost_acknowledged,
        "errors": errors[:3],
    }


def discard(job: Job) -> None:
    """Remove what *job*'s trainers left."""
    import catalog

    catalog.by_name(job.strategy).discard(job.folder)


def run_all(
    options: Any,
    entries: dict[str, dict[str, Any]],
    folder: Path,
    say: Any,
    *,
    state_bytes: int,
) -> dict[str, Any]:
    """Add recovery, and the kill matrix if it is asked for, to *entries*; return common facts."""
    import catalog

    prepare_server()
    import_s = import_seconds(options.model)
    jobs = [
        Job(options.model, name, folder / name, options.smoke, options.seed, options.device)
        for name, entry in entries.items()
        if "missing" not in entry
    ]
    seen: set[str] = set()
    for job in jobs:
        name = job.strategy
        job.folder.mkdir()
        kind = catalog.by_name(name).kind
        large = state_bytes > LARGE_BYTES and kind not in KINDS_OF_LARGE
        if options.recovery and kind and kind not in seen and not large:
            seen.add(kind)
            entries[name]["recovery"] = found = recover(job)
            discard(job)
            took = sum(found[part] for part in RECOVERY_PARTS)
            say(f"killed {name}: {took:.2f} s from the start to the first step done")

    def kill_often(job: Job) -> None:
        entries[job.strategy]["kills"] = found = matrix(job, kills=options.kills, seed=options.seed)
        say(f"killed {job.strategy} {options.kills} times: {found['outcomes']}")

    if options.kills:  # nothing is timed here
        with ThreadPoolExecutor(KILLED_AT_ONCE) as pool:
            list(pool.map(kill_often, jobs))
    return {"import_s": import_s}


RECOVERY_PARTS = ("start_and_build_s", "restore_s", "first_step_s")
