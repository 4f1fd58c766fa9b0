"""The ways out of a GPU, and which of them are open on a machine: the doctor says so."""

import pytest

from lightckpt.doctor import diagnose

WAYS = ("auto", "direct", "host", "device")


def skip_unless_open(way, folder):
    """Return *way*; leave a test out, for the doctor's reason, where it leads to no store."""
    answer = "yes" if way == "auto" else diagnose(folder, measure=False).snapshots[way]
    if not answer.startswith("yes"):
        pytest.skip(f"snapshot={way}: {answer}")
    return way
