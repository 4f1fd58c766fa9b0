"""ckpt-chaos as an outside referee: it kills at file events of a save, and judges what comes back.

    python bench/referee.py [--strategies NAMES] [--points N] [--results FILE]

It runs a small training script under each strategy, once whole and then once per file event that it
saw (at most N): killed there, or with the file cut in half, and run again. Its verdicts are PASS,
HARD_FAIL (the second run fails), SILENT_DIVERGENCE (it ends with other weights) and LOST_WORK.

It sees files that Python, torch.save and safetensors open. lightckpt writes into a mapping made by
its core, which is no such event: of it only the script's own result file is hit, so its verdicts
say nothing of its commit. tests/kill and the kill matrix do.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record
from arguments import ROOT

RESULTS = ROOT / "bench" / "results" / "referee.ndjson"
NAMES = "torch.save,torch.save-safe,safetensors,dcp,lightckpt"
STEPS = 6
RESUMED = "resumed from step"


def train(name: str, folder: Path) -> None:
    """Train a tiny model to its end under strategy *name*, from where *folder* stands."""
    import torch

    import catalog
    from state import digest
    from workloads import Workload

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    generator = torch.Generator()
    generator.manual_seed(0)
    workload = Workload(
        name="referee",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_of=lambda model, batch: model(batch[0]).square().mean(),
        draw=lambda generator: (torch.randn(16, 64, generator=generator), torch.empty(0)),
        generator=generator,
        facts={},
    )
    saves = folder / "saves"
    saves.mkdir(parents=True, exist_ok=True)
    strategy = catalog.by_name(name)(saves, workload, 1)
    strategy.open()
    done = strategy.restore()
    print(RESUMED, done, flush=True)
    for step in range(done + 1, STEPS + 1):
        workload.step(strategy.before_update)
        strategy.after_step(step)
    strategy.close()
    (folder / "final.txt").write_text(digest(workload.state()))


def judge(name: str, points: int) -> dict[str, Any]:
    """Return the referee's verdicts on strategy *name*, and the events it made use of."""
    from ckpt_chaos.runner import rejudge

    with tempfile.TemporaryDirectory(prefix="lightckpt-bench-") as folder:
        work = Path(folder) / "work"
        script = [sys.executable, __file__, "--train", name, "--folder", "{out}"]
        ran = subprocess.run(
            [
                sys.executable, "-m", "ckpt_chaos", "run", "--work", work, "--jobs", "2",
                "--max-points", str(points), "--step-regex", RESUMED + r" (\d+)",
                "--result-file", "{out}/final.txt", "--", *script,
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        rows = rejudge(work) if work.is_dir() else []
        if not rows:
            raise RuntimeError(f"{name}: ckpt-chaos judged nothing: {ran.stdout}{ran.stderr}")
        hit = [row for row in rows if not row.label.startswith("no crash")]
        return {
            "strategy": name,
            "control": next(row.verdict for row in rows if row not in hit),
            "verdicts": dict(Counter(row.verdict for row in hit)),
            "events": [f"{row.label}: {row.verdict}" for row in hit],
            "sees_its_saves": any("final.txt" not in row.label for row in hit),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", default=NAMES, help="names, by commas")
    parser.add_argument("--points", type=int, default=10, help="file events per strategy, at most")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.folder)
        return 0
    if find_spec("ckpt_chaos") is None:
        print("bench: ckpt-chaos is not installed; make bench-smoke installs it")
        return 2
    found = []
    for name in options.strategies.split(","):
        found.append(judge(name, options.points))
        print(name, found[-1]["control"], found[-1]["verdicts"], flush=True)
    line = record.make_line("referee", "python bench/referee.py", judged=found)
    record.append(options.results, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
