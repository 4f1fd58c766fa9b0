"""The tests again and again, on a machine that is made slow: what depends on time shows itself.

    again.py [--times N] [--spin N] [--cores 0,1] [-- ARGUMENT...]

runs what ``make test`` does once it is built, N times: beside so many processes that do nothing but
spin, and on those cores only. With arguments it runs pytest with them and no C++ tests. Each run is
one line here, and a log in build/again; the exit code is 1 if one of them has failed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "again"
RUN_SECONDS = 4 * 3600  # a run that takes longer hangs
# Ends with whoever started it, whatever becomes of that: PR_SET_PDEATHSIG, SIGKILL.
SPIN = "import ctypes\nctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"
SAID = re.compile(r"^(?:FAILED|ERROR) .*|.*\*\*\*(?:Failed|Timeout|Exception).*", re.MULTILINE)
TOTALS = re.compile(r"\d+% tests passed.*|\d+ (?:passed|failed)[^\n]* in [^\n]*")


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--spin", type=int, default=0)
    parser.add_argument("--cores", type=lambda words: {int(word) for word in words.split(",")})
    parser.add_argument("pytest", nargs="*")
    return parser.parse_args(argv)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Keep *count* processes busy within."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count))
        yield
        assert all(process.poll() is None for process in started), "one has ended too early"
    finally:
        for process in started:
            process.kill()
            process.wait()


def commands_of(chosen: list[str]) -> list[list[str]]:
    pytest = [sys.executable, "-m", "pytest", "-q"]
    if chosen:
        return [[*pytest, *chosen]]
    jobs = str(len(os.sched_getaffinity(0)))
    ctest = [str(Path(sys.executable).with_name("ctest")), "--test-dir", "build/asan", "-j", jobs]
    return [[*ctest, "--no-tests=error", "--output-on-failure"], [*pytest, "-m", "not fsdax"]]


def run_once(commands: list[list[str]], log: Path) -> tuple[bool, str]:
    """Run all of *commands*; return whether they passed, and their totals and failures."""
    passed = True
    with log.open("wb") as output:
        for command in commands:
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=RUN_SECONDS, check=False,
            )  # fmt: skip
            passed = passed and done.returncode == 0
    words = log.read_text(errors="replace")
    totals = "; ".join(line.strip("= ") for line in TOTALS.findall(words))
    return passed, "\n    ".join([totals, *(match.strip() for match in SAID.findall(words))])


def main(argv: list[str]) -> int:
    arguments = arguments_of(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends what it has started
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    with spinning(arguments.spin):
        for number in range(1, arguments.times + 1):
            begin = time.monotonic()
            passed, said = run_once(commands_of(arguments.pytest), LOGS / f"{number}.log")
            failed += not passed
            outcome = f"{'passed' if passed else 'FAILED'} in {time.monotonic() - begin:.0f} s"
            where = f"{len(os.sched_getaffinity(0))} cores, beside {arguments.spin} that spin"
            print(f"run {number} of {arguments.times}, {where}: {outcome}: {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
