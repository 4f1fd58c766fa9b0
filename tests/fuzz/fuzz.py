"""What ``make fuzz`` runs: the C++ fuzzer on one core, the Python ones in turn on another.

Prints at the end how many inputs each saw, and how much of the code if that is known; exits with 1
if any failed. What failed is in build/fuzz/failures: once it is repaired, put it into the corpus.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DECODERS = ("host", "manifest", "container", "load")
START_SECONDS = 300  # beyond its time, for a fuzzer to start, to read its corpus and to end


@dataclass
class Fuzzer:
    """A fuzzer at work: what it is called, and where it writes."""

    name: str
    log: Path
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, name: str, command: list[object], folder: Path) -> "Fuzzer":
        log = folder / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen([str(part) for part in command], stdout=file, stderr=file)
        return cls(name, log, process)

    def finish(self, seconds: float) -> bool:
        """Wait for the end, print the figures, and say whether all went well."""
        try:
            failed = self.process.wait(seconds + START_SECONDS) != 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            failed = True
        text = self.log.read_text(errors="replace")
        counts = re.findall(r"number_of_executed_units: (\d+)|(\d+) (?:inputs|mutants)", text)
        covered = re.findall(r"cov: (\d+)", text)
        inputs = sum(int(one or other) for one, other in counts)
        coverage = f"{covered[-1]} edges" if covered else "not measured"
        print(f"{self.name:<12}{inputs:>10} inputs   coverage: {coverage:<14} failures: {failed:d}")
        if failed:
            print("\n".join(text.splitlines()[-30:]))
        return not failed


def working_copy(name: str, folder: Path) -> list[Path]:
    """Give the folders of a corpus: one for what is found, then the saved one."""
    found = folder / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    return [found, HERE / "corpus" / name]


def start_core(arguments: argparse.Namespace, failures: Path) -> Fuzzer:
    folder = arguments.folder
    libfuzzer = folder / "fuzz_open"
    if libfuzzer.exists():
        command = [libfuzzer, f"-max_total_time={arguments.seconds}", "-max_len=8192",
                   "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1",
                   f"-artifact_prefix={failures}/",
                   *working_copy("open_store", folder)]  # fmt: skip
    else:
        command = [folder / "fuzz_replay", f"--seconds={arguments.seconds}",
                   f"--seed={arguments.seed}", f"--keep={failures / 'open_store-last'}",
                   HERE / "corpus" / "open_store"]  # fmt: skip
    return Fuzzer.start("open_store", command, folder)


def start_decoder(name: str, arguments: argparse.Namespace, failures: Path) -> Fuzzer:
    command = [sys.executable, HERE / "decode.py", name, f"--failures={failures}",
               f"--seconds={arguments.seconds // len(DECODERS)}", f"--seed={arguments.seed}",
               *working_copy(name, arguments.folder)]  # fmt: skip
    return Fuzzer.start(name, command, arguments.folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all fuzzers.")
    parser.add_argument("folder", type=Path, help="where fuzz_open or fuzz_replay was built")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failures = arguments.folder / "failures"
    failures.mkdir(parents=True, exist_ok=True)
    core = start_core(arguments, failures)
    well = True
    for name in DECODERS:
        decoder = start_decoder(name, arguments, failures)
        well = decoder.finish(arguments.seconds) and well
    return 0 if core.finish(arguments.seconds) and well else 1


if __name__ == "__main__":
    sys.exit(main())
