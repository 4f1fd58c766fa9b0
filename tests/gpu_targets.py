"""What processes of bench/gpu_child.py do in tests in place of measuring. No torch here.

``HANGS`` names the variable with a named pipe: the gate at which a process stands that hangs, with
a child of its own beside it. Whoever holds its other end learns when both have gone.
"""

import os
import select
import subprocess

HANGS = "TARGET_GATE"


def gone(held):
    """Wait until nobody reads from the gate whose other end is *held*."""
    poll = select.poll()
    poll.register(held, 0)
    return bool(poll.poll(60_000))


def line_of(work, name, entry):
    """Return a line about *name*, as gpu.make_line would make it in circumstances made up here."""
    return {
        "bench": "gpu", "commit": "c", "device": "d", "versions": {}, "model": work.model,
        "part": "steps", "strategy": name, "strategies": {name: entry},
    }  # fmt: skip


def report_two(pipe):
    for number in range(2):
        pipe.send({"say": str(number)})


def report_and_abort(pipe):
    pipe.send({"say": "on the way"})
    os.abort()


def report_and_exit(pipe):
    pipe.send({"say": "on the way"})
    raise SystemExit(3)


def hang(pipe):
    os.setsid()
    gate = os.environ[HANGS]
    with subprocess.Popen(["cat", gate], stdout=subprocess.DEVNULL):
        pipe.send({"say": "standing"})
        with open(gate) as held:
            held.read()


def hang_at_once(work, pipe):
    pipe.send({"line": line_of(work, work.strategies[0], {"added_percent": None})})
    hang(pipe)


def scripted(work, pipe):
    """Measure each strategy well, but for these: one crashes, one fails, one cannot run."""
    for name in work.strategies:
        if name == "lightckpt-gpu-direct":
            os.abort()
        if name == "lightckpt-gpu-host":
            pipe.send({"line": line_of(work, name, {"missing": "words", "failed": True})})
            return
        missing = name == "lightckpt-gpu-device"
        entry = {"missing": "no room"} if missing else {"added_percent": None}
        pipe.send({"line": line_of(work, name, entry)})


def unbuildable(work, pipe):
    pipe.send({"error": "RuntimeError: out of memory"})


def where(pipe):
    import psutil

    pipe.send(psutil.__file__)
