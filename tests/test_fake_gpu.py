"""The tests of tests/gpu on a fake driver (tests/fake_cuda), in a process of their own.

A process opens libcuda once, and remembers whether there is one: so tests with a driver and tests
without cannot share it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["test_contract", "test_refusals"])
def test_the_contract_holds_on_a_fake_gpu(fake_cuda, name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Where this process is: another folder may hold another lightckpt.
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(TESTS.parent)]
    environment = os.environ | {"LIGHTCKPT_FAKE_CUDA": str(fake_cuda)}
    command.append(str(TESTS / "gpu" / f"{name}.py"))
    done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
