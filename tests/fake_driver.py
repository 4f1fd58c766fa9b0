"""Builds drivers for tests without a GPU: the fake one of tests/fake_cuda, and a faulty one."""

import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parent
COMPILE = ("c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread")


def build(folder: Path) -> Path:
    """Build the fake driver in *folder*, and return it."""
    built = folder / "libcuda.so.1"
    sources = sorted(map(str, (TESTS / "fake_cuda").glob("*.cc")))
    command = [*COMPILE, "-Wl,-soname,libcuda.so.1", "-o", str(built), *sources]
    subprocess.run(command, check=True, timeout=250)
    return built


def build_faulty(folder: Path, fake: Path) -> Path:
    """Build, on top of *fake*, the driver that the head of tests/gpu/faulty_cuda.cc is about."""
    built = folder / "libfaulty.so"
    command = [*COMPILE, "-o", str(built), str(TESTS / "gpu" / "faulty_cuda.cc")]
    command += ["-Wl,--no-as-needed", str(fake), f"-Wl,-rpath,{fake.parent}", "-ldl"]
    subprocess.run(command, check=True, timeout=250)
    return built
