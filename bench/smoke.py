"""Run every script of the benchmark on tiny models, in one process: do they all still work?

    python bench/smoke.py FOLDER

Importing torch and all that is compared takes longer than training tiny models, so the scripts run
one after the other in here, each as its own main program. What they record goes to FOLDER and is
worth nothing. The first script that fails ends it, with its exit status or its exception.
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KILLED = "lightckpt,lightckpt-huge,torch.save,dcp-async-process,moonclip"
MODELS = ("resnet18", "vgg16", "inception_v3", "alexnet", "gpt2", "bert")


def run(script: str, *arguments: str) -> int:
    """Run *script* as ``python bench/SCRIPT.py ARGUMENTS`` would; return its exit status."""
    sys.argv = [f"bench/{script}.py", *arguments]
    print(" ".join(sys.argv), flush=True)
    try:
        runpy.run_path(str(HERE / f"{script}.py"), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def main() -> int:
    folder = Path(sys.argv[1])
    model = ["--smoke", "--rounds", "1", "--steps", "1", "--results", str(folder / "models.ndjson")]
    few = ["--no-recovery", "--strategies", "lightckpt,torch.save-safe"]
    scripts = [
        ("small", *model, "--strategies", "all", "--no-recovery"),
        ("small", *model, "--strategies", KILLED, "--kills", "1"),
        *((name, *model, "--no-recovery", "--strategies", "lightckpt") for name in MODELS),
        ("small", *model, *few, "--every", "2", "--steps", "4"),
        ("scale", "--smoke", "--results", str(folder / "scale.ndjson")),
        ("report", "--smoke", "--results", str(folder), "--output", str(folder / "report")),
    ]
    for script, *arguments in scripts:
        if status := run(script, *arguments):
            return status
    # Without a GPU it has to say so, by its exit status too, and write nothing.
    import torch

    if not torch.cuda.is_available():
        results = folder / "gpu.ndjson"
        if run("gpu", "--results", str(results)) != 2 or results.exists():
            print("bench/gpu.py: it did not refuse to run without a GPU")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
