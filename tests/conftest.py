"""Fixtures that several test files share. Nothing is imported before a test asks for it.

But for hypothesis, where that is installed: it measures how long an example takes to draw and to
run, and fails a test for that. Whether a machine is busy is nothing that a test is about.
"""

import contextlib
import json

import pytest

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")


@pytest.fixture
def folder():
    """A folder in memory, where stores are quick; removed at the end."""
    from small_run import folder_in_memory

    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def path(folder):
    """A place for a store, in memory where there is such, removed afterwards."""
    return str(folder / "store")


@pytest.fixture
def gate(folder, monkeypatch):
    """Holds the copies of stores that are opened with ``media="emulated"``, while it is closed."""
    from gate import VARIABLE, Gate

    with Gate(folder / "gate") as gate:
        monkeypatch.setenv(VARIABLE, str(gate.path))
        yield gate


@pytest.fixture(scope="session")
def trained():
    """A closed run whose store, with keep=2, has step 3 as its newest."""
    from small_run import SmallRun, folder_in_memory

    with folder_in_memory() as folder:
        run = SmallRun(folder / "store", keep=2).train(3)
        run.close()
        yield run


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    """The fake driver (tests/fake_cuda), under the name that CUDA's has, in a folder of its own."""
    from fake_driver import build

    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command line; return its exit code, and what went to standard output and error."""
    from lightckpt.cli import main

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def call_json(call):
    """Run a command line with ``--json``; return its exit code and the document."""

    def call_json(*arguments):
        code, out, err = call(*arguments, "--json")
        assert err == ""
        return code, json.loads(out)

    return call_json
