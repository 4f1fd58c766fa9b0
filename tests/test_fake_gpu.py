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


# Together in a process, which takes its time to load torch.
OTHERS = ("test_refusals", "test_waits", "test_lifetimes", "test_two_gpus", "test_fake_platform")


@pytest.mark.parametrize("names", [("test_contract",), OTHERS], ids=["contract", "others"])
def test_the_contract_holds_on_a_fake_gpu(fake_cuda, names):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Where this process is: another folder may hold another lightckpt.
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(TESTS.parent)]
    environment = os.environ | {"LIGHTCKPT_FAKE_CUDA": str(fake_cuda)}
    command += [str(TESTS / "gpu" / f"{name}.py") for name in names]
    done = subprocess.run(command, env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


def test_all_tests_of_gpus_are_run():
    found = {path.stem for path in (TESTS / "gpu").glob("test_*.py")}
    assert found == {"test_contract", *OTHERS}
