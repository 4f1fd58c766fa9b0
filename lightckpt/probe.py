"""The probe: what a GPU and its driver really do, found out before anything is trusted to them.

Each step (probe_steps) runs in a process of its own, with a limit: some drivers hang or crash at
calls that their documents allow. What was found decides which settings to use, and ``decide`` says
why. Nothing is left behind: no process, no file. The steps do not use torch.

A step's outcome is one of these:

    ok            it was made, and its bytes were right
    failed        a call was refused, or there was no room; the words say which
    wrong bytes   copies came out as other bytes
    crashed       a signal ended it
    hung          it was not through within its limit
    not made      for the reason in the words: an earlier step, or no time left
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.filesize import decimal

OK, FAILED, WRONG, CRASHED, HUNG, NOT_MADE = (
    "ok", "failed", "wrong bytes", "crashed", "hung", "not made",
)  # fmt: skip
LIBRARY = "libcuda.so.1"
LIMIT_SECONDS, BUDGET_SECONDS = 40.0, 150.0  # of a step, and of all
KILLED_SECONDS = 10.0  # after SIGKILL; a process that the kernel holds is left to it
MAPPED_MIB = (64, 4096)
ROOM_SHARE = 2  # at most one part in so many of the room that is free is taken
SMALL_COUNT, SMALL_TIMES = 128, 200
VERSION_EXTENTS, VERSIONS = 1024, 5
GAIN_MAX = 0.9  # batches are used where they take at most so much of the time
BATCH_VARIABLE = "LIGHTCKPT_CUDA_BATCH"
HOST_POINTER = "can_use_host_pointer_for_registered_memory"


@dataclass(frozen=True)
class Outcome:
    """What came of one step; ``facts`` are what it had told by its end."""

    step: str
    outcome: str
    words: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """All steps, and what follows.

    ``snapshot`` is what to give a Checkpointer, "" where nothing is safe; ``batch`` is the value
    for LIGHTCKPT_CUDA_BATCH; ``reasons`` say why.
    """

    folder: str
    outcomes: tuple[Outcome, ...]
    snapshot: str
    batch: str
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON's own types."""
        steps = [asdict(one) for one in self.outcomes]
        return {**asdict(self), "outcomes": steps, "reasons": list(self.reasons)}

    def rows(self) -> dict[str, str]:
        """Return what each step found, in words, by its name."""
        return {one.step: _row(one) for one in self.outcomes}


def probe(
    folder: str | os.PathLike[str],
    *,
    library: str = LIBRARY,
    limit_s: float = LIMIT_SECONDS,
    budget_s: float = BUDGET_SECONDS,
) -> Findings:
    """Try this machine's first GPU, with stores to lie in *folder*.

    Raises:
        OSError: nothing can be written in *folder*.
    """
    ends = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lightckpt-probe-") as own:
        done: dict[str, Outcome] = {}
        for name, arguments, switch in _steps(Path(own)):
            left = ends - time.monotonic()
            reason = why_not(name, done) if left > 0 else f"{budget_s:.0f} s are over"
            if reason:
                done[name] = Outcome(name, NOT_MADE, reason)
                continue
            done[name] = make_step(
                name, [library, own, *arguments], limit_s=min(limit_s, left), switch=switch
            )
    snapshot, batch, reasons = decide(done)
    return Findings(str(folder), tuple(done.values()), snapshot, batch, tuple(reasons))


def _steps(folder: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield each step's name, its arguments, and the value of the switch of batches for it."""
    room = min(shutil.disk_usage(folder).free, memory_bytes()) // ROOM_SHARE >> 20
    sizes = sorted({max(1, min(size, room)) for size in MAPPED_MIB})
    small = [str(SMALL_COUNT), str(SMALL_TIMES)]
    made = [str(VERSION_EXTENTS), str(VERSIONS)]
    yield "facts", ["facts"], "0"
    yield "pinned memory", ["pinned", str(sizes[0])], "0"
    for size in sizes:
        yield f"mapped file, {size} MiB", ["mapped", str(size)], "0"
    yield "versions, copies one by one", ["versions", *made], "0"
    yield "two copies at once, pinned", ["batch", "pinned", "2", "10"], "0"
    yield "copies at once, pinned", ["batch", "pinned", *small], "0"
    yield "copies at once, mapped", ["batch", "mapped", *small], "0"
    yield "versions, copies at once", ["versions", *made], "1"


def memory_bytes() -> int:
    """Return the memory that a new process could have, as the kernel estimates it."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def why_not(name: str, done: dict[str, Outcome]) -> str:
    """Return why the step *name* is not to be made after those in *done*; "" if it is."""
    facts = done.get("facts")
    if facts is None:
        return ""
    if facts.outcome != OK:
        return "there is no driver to try"
    failed = [one.step for one in done.values() if one.outcome not in (OK, NOT_MADE)]
    if "at once" in name:
        if not facts.facts.get("batch"):
            return "the driver has no call for many copies"
        if "mapped" in name and (closed := why_not_mapped(done)):
            return closed
    elif not name.startswith("versions"):
        failed = []
    # The core takes another way where a mapping cannot be used.
    failed = [step for step in failed if not step.startswith("mapped")]
    return f"not after this failed: {', '.join(failed)}" if failed else ""


def why_not_mapped(done: dict[str, Outcome]) -> str:
    """Return why copies must not go to a registered mapping; "" if they may."""
    for name, one in done.items():
        if name.startswith("mapped") and one.outcome != OK:
            return f"{name}: {one.outcome}: {one.words}"
    if done["facts"].facts.get(HOST_POINTER) == 0:
        return "the GPU reaches registered memory under other addresses only (attribute 91 is 0)"
    return ""


def decide(done: dict[str, Outcome]) -> tuple[str, str, list[str]]:
    """Return what to use for ``snapshot``, whether to copy in batches ("0", "1"), and why."""
    singly, together = done["versions, copies one by one"], done["versions, copies at once"]
    for name in ("facts", "pinned memory", singly.step):
        if done[name].outcome != OK:
            words = f"{name}: {done[name].outcome}: {done[name].words}"
            return "", "0", [f"do not checkpoint from this GPU: {words}"]
    if closed := why_not_mapped(done):
        snapshot, reasons = "host", [f"snapshot='host': {closed}"]
    else:
        snapshot, reasons = "auto", ["snapshot='auto': a mapped file was registered and copied to"]
    if together.outcome != OK:
        tried = (one for one in done.values() if "at once" in one.step)
        bad = next((one for one in tried if one.outcome not in (OK, NOT_MADE)), together)
        reason = f"{BATCH_VARIABLE}=0: {bad.step}: {bad.outcome}: {bad.words}"
        return snapshot, "0", [*reasons, reason]
    share = together.facts["version_s"] / singly.facts["version_s"]
    batch = "1" if share <= GAIN_MAX else "0"
    reasons.append(f"{BATCH_VARIABLE}={batch}: copies at once took {share:.2f} of the time")
    return snapshot, batch, reasons


def make_step(name: str, arguments: Sequence[str], *, limit_s: float, switch: str = "0") -> Outcome:
    """Make one step in a process of its own, and end that, whatever comes."""
    command = [sys.executable, "-P", "-m", f"{__package__}.probe_steps", *arguments]
    environment = os.environ | {BATCH_VARIABLE: switch}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_SECONDS)
        seconds = time.monotonic() - began
        facts, wrong = _told(out)
        outcome, words = _judge(status, facts, wrong, errors, limit_s=limit_s)
    return Outcome(name, outcome, words, seconds, facts)


def _told(file: TextIO) -> tuple[dict[str, Any], bool]:
    """Return what a step told, and whether bytes were wrong at any time."""
    file.seek(0)
    facts: dict[str, Any] = {}
    wrong = False
    for line in file:
        with suppress(ValueError):  # the last may be cut off
            told = json.loads(line)
            wrong = wrong or told.get("right") is False
            facts |= told
    return facts, wrong


def _judge(
    status: int | None, facts: dict[str, Any], wrong: bool, errors: TextIO, *, limit_s: float
) -> tuple[str, str]:
    """Return a step's outcome and words, from how its process ended and what it told."""
    if status is None:
        return HUNG, f"not through after {limit_s:.0f} s"
    if status < 0:
        return CRASHED, _signal_name(-status)
    if wrong:
        return WRONG, "copies came out as other bytes"
    if status == 0:
        return OK, ""
    errors.seek(0)
    last = next(iter(reversed(errors.read().strip().splitlines())), "no words")
    return FAILED, str(facts.pop("error", last))


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _row(one: Outcome) -> str:
    """Say what a step came to: its facts, and how it ended if not well."""
    told = [_fact(name, value) for name, value in one.facts.items() if name != "right"]
    ended = "" if one.outcome == OK else f"{one.outcome}: {one.words}"
    return "; ".join(filter(None, [*told, ended])) or one.outcome


def _fact(name: str, value: Any) -> str:
    if name.endswith("_bytes_s"):
        return f"{name.removesuffix('_bytes_s')} {decimal(int(value))}/s"
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {1e3 * value:.3g} ms"
    if isinstance(value, list):
        return f"{name} {', '.join(value) or 'none'}"
    return f"{name.replace('_', ' ')} {value}"
