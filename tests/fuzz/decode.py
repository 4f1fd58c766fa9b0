"""Fuzz one decoder for a time: ``python tests/fuzz/decode.py TARGET [options] [FILE or FOLDER]...``

With atheris, libFuzzer for Python, guided by coverage; where that is not installed, by chance: the
same seed then draws the same inputs, as far as the time goes. Memory is limited by the system
to LIMIT_BYTES beyond what the start took, and each input to INPUT_SECONDS. The input that breaks
this, or raises what its decoder does not document, is left in the folder of --failures.
"""

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    atheris = None

LIMIT_BYTES = 256 << 20
INPUT_SECONDS = 10
POOL_MAX = 2000
INPUT_BYTES_MAX = 1 << 16


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz one decoder.")
    parser.add_argument("target")
    parser.add_argument("corpus", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chance", action="store_true", help="do without atheris")
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_intermixed_args(argv)


def limit_memory() -> None:
    """Let writable memory grow by LIMIT_BYTES; the address space that stores reserve is free."""
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (held + LIMIT_BYTES,) * 2)


def give_up(*_: Any) -> None:
    raise TimeoutError(f"an input took longer than {INPUT_SECONDS} seconds")


def inputs_of(corpus: list[Path]) -> Iterator[bytes]:
    for place in corpus:
        files = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
        yield from (file.read_bytes() for file in files)


class Runner:
    """Runs inputs of one target, each under the limits."""

    def __init__(self, arguments: argparse.Namespace, place: Path) -> None:
        import decoders

        self.arguments, self.place, self.decoders = arguments, place, decoders
        self.count = 0
        signal.signal(signal.SIGALRM, give_up)

    def run(self, data: bytes) -> None:
        self.count += 1
        signal.setitimer(signal.ITIMER_REAL, INPUT_SECONDS)
        try:
            self.decoders.run(self.arguments.target, data, self.place)
        except BaseException:
            self.arguments.failures.mkdir(parents=True, exist_ok=True)
            path = self.arguments.failures / f"{self.arguments.target}-{abs(hash(data)):016x}"
            path.write_bytes(data)
            print(f"the input that failed is {path}", file=sys.stderr)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def by_chance(self) -> None:
        """Replay the corpus, then mutate it; some mutants take the place of older ones."""
        rng = random.Random(self.arguments.seed)
        pool = list(inputs_of(self.arguments.corpus))
        for data in pool:
            self.run(data)
        end = time.monotonic() + self.arguments.seconds
        saved = len(pool)
        while time.monotonic() < end:
            data = self.decoders.mutate(self.arguments.target, rng.choice(pool), rng)
            data = data[:INPUT_BYTES_MAX]
            self.run(data)
            if rng.randrange(4) == 0:
                if len(pool) == saved + POOL_MAX:
                    pool.pop(rng.randrange(saved, len(pool)))
                pool.append(data)
        print(f"{self.arguments.target}: {self.count} inputs, failures: 0")

    def by_coverage(self) -> None:
        def mutator(data: bytes, max_size: int, seed: int) -> bytes:
            changed = self.decoders.mutate(self.arguments.target, data, random.Random(seed))
            return changed if len(changed) <= max_size else data

        options = [f"-max_total_time={int(self.arguments.seconds)}", f"-max_len={INPUT_BYTES_MAX}",
                   f"-seed={self.arguments.seed}", f"-timeout={2 * INPUT_SECONDS}",
                   f"-artifact_prefix={self.arguments.failures}/", "-print_final_stats=1",
                   "-rss_limit_mb=4096"]  # fmt: skip
        corpus = [str(place) for place in self.arguments.corpus]
        atheris.Setup([sys.argv[0], *options, *corpus], self.run, custom_mutator=mutator)
        atheris.Fuzz()


def main(argv: list[str]) -> None:
    arguments = arguments_of(argv)
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent)]
    guided = atheris is not None and not arguments.chance
    if guided:
        # The package as files that can be instrumented: an editable install's finder comes last.
        sys.path.insert(0, str(here.parent.parent))
        sys.meta_path.sort(key=lambda finder: "Redirecting" in type(finder).__name__)
        with atheris.instrument_imports(include=["lightckpt", "json"]):
            import decoders  # noqa: F401
    from small_run import folder_in_memory

    with folder_in_memory() as place:
        runner = Runner(arguments, place)
        limit_memory()
        if guided:
            runner.by_coverage()
        else:
            runner.by_chance()


if __name__ == "__main__":
    main(sys.argv[1:])
