"""Arguments of the benchmarks, and what must be so before torch is loaded. No torch here.

Every model's script is ``sys.exit(main("gpt2"))``. A wrong argument is refused here, at once and
with a reason; then the threads are set up and the harness is loaded and run.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "models.ndjson"
MODELS = ("resnet18", "vgg16", "inception_v3", "alexnet", "gpt2", "bert", "small")
# Threads sleep where they wait: spinning, they keep a core from whoever they wait for, and whoever
# writes a checkpoint on a small machine is one of these.
THREADING = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Options:
    """What to run.

    Args:
        strategies: names or groups ("all", "table", "media", "core"), as given.
        steps: counted steps of a block.
        budget_s: no further round is begun so long after the first one, which has all strategies.
        every: a checkpoint each so many steps.
        recovery: kill a trainer per kind of checkpoint and time its successor.
        kills: kills per strategy in the kill matrix; 0 makes none.
    """

    model: str
    device: str
    strategies: tuple[str, ...]
    every: int
    steps: int
    rounds: int
    budget_s: float
    folder: Path
    smoke: bool
    results: Path
    seed: int
    recovery: bool
    kills: int
    command: str


class RefusedError(Exception):
    """An argument that cannot be served; the message says why."""


def make_parser(model: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"bench/{model}.py", description=f"Checkpoint {model} in each way that is at hand."
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, default=1, help="processes that train together; 1 for now")
    add("--strategies", default="", help="names or groups, by commas; --strategies list names them")
    add("--every", type=int, default=1, help="a checkpoint each so many steps")
    add("--steps", type=int, default=3, help="counted steps of a block")
    add("--rounds", type=int, default=5, help="at most so many blocks per strategy")
    add("--budget", type=float, default=40.0, help="seconds after which no round is begun")
    add("--dir", type=Path, default=None, help="where checkpoints go: a tmpfs, a disk")
    add("--quick", "--smoke", dest="smoke", action="store_true", help="a tiny variant of the model")
    add("--results", type=Path, default=None, help="the file that gets a line")
    add("--seed", type=int, default=0)
    add("--no-recovery", dest="recovery", action="store_false", help="kill nobody, time no restart")
    add("--kills", type=int, default=0, help="kills per strategy, for the kill matrix")
    return parser


def parse(model: str, arguments: list[str] | None = None) -> Options:
    """Return the options of *model*'s script.

    Raises:
        RefusedError: what is asked for cannot be done here.
    """
    given = make_parser(model).parse_args(arguments)
    if given.ranks != 1:
        raise RefusedError(
            f"--ranks {given.ranks}: lightckpt has no versions that ranks agree on yet, so what "
            "DDP would measure is not a checkpoint of the run; only --ranks 1 is served"
        )
    for name in ("every", "steps", "rounds"):
        if getattr(given, name) < 1:
            raise RefusedError(f"--{name} {getattr(given, name)}: at least 1")
    if given.kills < 0:
        raise RefusedError(f"--kills {given.kills}: at least 0")
    folder = given.dir or default_folder()
    if not folder.is_dir():
        raise RefusedError(f"--dir {folder}: there is no such folder")
    return Options(
        model=model,
        device=given.device,
        strategies=tuple(name for name in given.strategies.split(",") if name),
        every=given.every,
        steps=given.steps,
        rounds=given.rounds,
        budget_s=given.budget,
        folder=folder,
        smoke=given.smoke,
        results=given.results or RESULTS,
        seed=given.seed,
        recovery=given.recovery,
        kills=given.kills,
        command=" ".join(["python", f"bench/{model}.py", *(arguments or [])]),
    )


def default_folder() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def main(model: str, arguments: list[str]) -> int:
    """Run *model*'s benchmark; returns the exit status."""
    try:
        options = parse(model, arguments)
    except RefusedError as refusal:
        print(f"bench: {refusal}")
        return 2
    for name, value in (THREADING | QUIET).items():
        os.environ.setdefault(name, value)
    import harness

    return harness.run(options)
