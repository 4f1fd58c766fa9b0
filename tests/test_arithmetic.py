"""Torch's first square root in a process, made by two threads: the same bits every time."""

import subprocess
import sys

import pytest

# Forks, since importing torch anew takes seconds: the parent makes no call into the library.
SCRIPT = """
import os, sys, zlib
import torch
from lightckpt.arithmetic import prime_arithmetic
torch.set_num_threads(1)
x = torch.rand(98304, generator=torch.Generator().manual_seed(0))
read, write = os.pipe()
for _ in range(200):
    if (child := os.fork()) == 0:
        torch.set_num_threads(2)
        prime_arithmetic()
        os.write(write, b"%010d" % zlib.crc32(x.sqrt().numpy().tobytes()))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(os.read(read, 10).decode())
"""


@pytest.mark.slow
def test_the_first_square_root_is_rounded_alike_in_every_process():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    results = ran.stdout.split()
    assert len(results) == 200
    assert len(set(results)) == 1
