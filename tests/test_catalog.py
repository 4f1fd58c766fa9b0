"""``catalog="pmemobj"``: slots and manifests in a pool of libpmemobj. Goal: a run keeps and finds
its steps as with slots in the store's lines, and the command line reads them. Method: a short run,
killed in between; then each command, and ``pmempool check`` where it is installed."""

import os
import shutil
import signal
import subprocess

import pytest
import torch

import lightckpt
import pypmemobj
from training import make, state_of, update

try:
    pypmemobj.check("/dev/null", "none")
except pypmemobj.LibraryNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)
except (pypmemobj.PoolError, ValueError):
    pass


def train(path, steps, catalog="pmemobj"):
    model, optimizer = make()
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, catalog=catalog, keep=2
    ) as checkpointer:
        start = checkpointer.restore()
        for step in range(start, start + steps):
            update(model, optimizer, step)
            checkpointer.mark()
    return state_of(model, optimizer)


def check_pool(path):
    tool = shutil.which("pmempool")
    if tool is not None:
        done = subprocess.run(
            [tool, "check", f"{path}.catalog"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_goes_on_where_it_stood(path):
    train(path, 5)
    went_on = train(path, 4, catalog="auto")
    shutil.rmtree(os.path.dirname(path))
    os.mkdir(os.path.dirname(path))
    torch.testing.assert_close(train(path, 9), went_on, rtol=0, atol=0)
    check_pool(path)


def test_a_killed_run_loses_at_most_the_step_in_flight(path):
    reading, writing = os.pipe()
    for round_ in range(3):
        child = os.fork()
        if child == 0:
            model, optimizer = make()
            checkpointer = lightckpt.Checkpointer(
                path, model=model, optimizer=optimizer, catalog="pmemobj"
            )
            step = checkpointer.restore()
            while True:
                update(model, optimizer, step)
                step = checkpointer.mark().step
                checkpointer.wait()
                os.write(writing, step.to_bytes(4, "little"))
        acknowledged = 0
        for _ in range(3 + round_):
            acknowledged = int.from_bytes(os.read(reading, 4), "little")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.set_blocking(reading, False)
        try:
            while rest := os.read(reading, 4):
                acknowledged = int.from_bytes(rest, "little")
        except BlockingIOError:
            os.set_blocking(reading, True)
        check_pool(path)
        model, optimizer = make(seed=3)
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
            assert checkpointer.restore() >= acknowledged
            step, restored = checkpointer.latest, state_of(model, optimizer)
        model, optimizer = make()
        for i in range(step):
            update(model, optimizer, i)
        torch.testing.assert_close(restored, state_of(model, optimizer), rtol=0, atol=0)


def test_the_command_line_reads_it(path, call, call_json):
    train(path, 3)
    code, facts = call_json("show", path)
    assert code == 0
    assert facts["catalog"] == "pmemobj"
    assert [version["step"] for version in facts["versions"]][:2] == [3, 2]
    assert call("ls", path)[0] == 0
    assert "catalog pmemobj" in call("show", path)[1]
    assert call("verify", path)[0] == 0
    assert lightckpt.load(path)["step"] == 3
    with open(path, "r+b") as file:  # all areas
        file.seek(17 * 4096)
        file.write(b"x" * (os.path.getsize(path) - 17 * 4096))
    assert call("verify", path)[0] == 1


def test_a_reader_beside_the_writer_is_told_who_has_the_catalog(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, catalog="pmemobj"):
        with pytest.raises(lightckpt.BusyError, match="catalog"):
            lightckpt.load(path)


def test_another_catalog_than_the_stores_is_refused(path):
    train(path, 1, catalog="lines")
    model, optimizer = make()
    with pytest.raises(ValueError, match="not in a pmemobj catalog"):
        lightckpt.Checkpointer(path, model=model, optimizer=optimizer, catalog="pmemobj")
    with pytest.raises(ValueError, match="must be one of"):
        lightckpt.Checkpointer(path, model=model, optimizer=optimizer, catalog="pool")
