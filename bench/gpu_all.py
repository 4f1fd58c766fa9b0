"""All that a machine with a GPU is asked, in one go that ends in time: what say most comes first.

    python bench/gpu_all.py [--budget SECONDS] [--out FOLDER] [--results FILE] [--wheels FOLDER]

Needs a Python with torch, pytest and pip, and no network where there are wheels. In this order:
lightckpt goes to a folder of its own (gpu_site.py); what the machine is; the probe, whose findings
decide what the rest uses; the doctor; tests/gpu; and bench/gpu.py for the time that is left. Each
has a limit, and is ended with its children. Its words go to a file in the folder; the probe, the
tests and each figure leave a line in the results as soon as they are through. A part with a good
line there, made in the same circumstances, is not run again: a second go takes up where the first
one ended.

Without a GPU nothing is measured and nothing is written. On the fake driver (LIGHTCKPT_FAKE_CUDA
names it) all is tried that needs no torch with CUDA, and no line is written.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gpu_site
import record
from arguments import ROOT, default_folder

OUT = ROOT / "build" / "gpu"
RESULTS = ROOT / "bench" / "results" / "gpu.ndjson"
WHEELS = ROOT / "build" / "gpu-wheels"
DOCTOR_SECONDS, TESTS_SECONDS, LOOK_SECONDS, PROBE_SECONDS = 30.0, 200.0, 60.0, 170.0
PART_SECONDS_MIN = 5.0  # with less left none is begun
TEST_SECONDS, TESTS_FAILED_MAX = 60, 6
GRACE_SECONDS = 15.0  # to end by itself, children and files included
TAIL_LINES = 25
FAKE = "LIGHTCKPT_FAKE_CUDA"
DOCTOR = "import sys; from lightckpt.cli import main; sys.exit(main(sys.argv[1:]))"
LOOK = """
import json, torch, lightckpt
from lightckpt._core import Store
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu,
                  "lightckpt": lightckpt.__file__}))
"""
FACTS = (
    ("uname", "-a"), ("df", "-h", str(default_folder())), ("free", "-g"), ("nvidia-smi",),
)  # fmt: skip


class Go:
    """One go: its environment, its files, and the time that is left."""

    def __init__(self, options: argparse.Namespace, began: float) -> None:
        self.out, self.results, self.budget = options.out, options.results, options.budget
        self.site, self.wheels = OUT / "site", options.wheels
        self.folder = default_folder()
        self.ends = began + options.budget
        self.fake = os.environ.get(FAKE)
        self.env = gpu_site.environment(self.site)
        if self.fake:  # libcuda.so.1 is this one, whoever opens it; a torch with CUDA is not to
            paths = [str(Path(self.fake).parent), os.environ.get("LD_LIBRARY_PATH", "")]
            self.env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
            self.env["CUDA_VISIBLE_DEVICES"] = ""
        self.device = ""
        self.findings: dict[str, Any] = {}
        self.failed: list[str] = []

    def left(self) -> float:
        """Return the seconds that are left to use."""
        return self.ends - GRACE_SECONDS - time.monotonic()

    def run(
        self, name: str, command: Sequence[str], limit: float, *, tail: int = TAIL_LINES
    ) -> int | None:
        """Run a part, with its words to a file; return its status, None if it had to be ended.

        Args:
            tail: so many of the last words are said, too.
        """
        limit = min(limit, self.left())
        path = self.out / f"{name}.txt"
        if limit < PART_SECONDS_MIN:
            path.write_text("")
            say(f"{name}: not run: no time is left")
            return None
        say(f"{name}: {limit:.0f} s at most")
        status = run_limited([sys.executable, *command], path, limit_s=limit, env=self.env)
        for line in path.read_text(errors="replace").splitlines()[-tail:] if tail else ():
            say(f"  {line}")
        if status is None:
            say(f"{name}: ended after {limit:.0f} s")
        return status

    def keep(self, bench: str, **fields: Any) -> None:
        """Record a line, but of a fake GPU."""
        if not self.fake:
            line = record.make_line(bench, "make gpu", device=self.device, **fields)
            record.append(self.results, line)

    def recorded(self, bench: str) -> dict[str, Any]:
        """Return the newest line of *bench* from these very circumstances, or an empty one."""
        here = record.make_line(bench, "", device=self.device)
        same = ("bench", "commit", "versions", "device")
        lines = [] if self.fake else record.read(self.results)
        found = [line for line in lines if all(line[key] == here[key] for key in same)]
        return found[-1] if found else {}

    # The parts.

    def look(self) -> bool:
        """Find out what this Python has; is there a GPU, or a fake one?"""
        ran = subprocess.run(
            [sys.executable, "-c", LOOK], env=self.env, cwd=ROOT, capture_output=True, text=True,
            timeout=LOOK_SECONDS,
        )  # fmt: skip
        if ran.returncode != 0:
            raise gpu_site.SiteError(f"torch or lightckpt does not load: {ran.stderr[-1000:]}")
        found = json.loads(ran.stdout)
        if not Path(found["lightckpt"]).is_relative_to(self.site):
            raise gpu_site.SiteError(f"lightckpt is taken from {found['lightckpt']}")
        self.device = found["gpu"]
        if not self.device and not self.fake:
            say("gpu: torch finds no GPU here; nothing was measured, nothing written")
            return False
        self.out.mkdir(parents=True, exist_ok=True)
        words = [json.dumps(found), f"locked memory: {resource.getrlimit(resource.RLIMIT_MEMLOCK)}"]
        for fact in FACTS:
            words += [f"$ {' '.join(fact)}", words_of(fact)]
        (self.out / "facts.txt").write_text("\n".join(words), encoding="utf-8")
        say(words[0])
        return True

    def probe(self) -> bool:
        """Find out what may be used, and let the parts after this use that; may anything be?"""
        if line := self.recorded("gpu-probe"):
            self.findings = line["findings"]
            say(f"probe: as recorded at {line['date']}")
        else:
            command = ["-c", DOCTOR, "doctor", "--gpu", "--json", str(self.folder)]
            self.run("probe", command, PROBE_SECONDS, tail=0)
            text = (self.out / "probe.txt").read_text(errors="replace")
            with suppress(ValueError):  # warnings of others may stand around it
                self.findings, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
            if not self.findings:
                self.failed.append("probe: it ended without a finding")
                return False
            self.keep("gpu-probe", findings=self.findings)
        for step in self.findings["outcomes"]:
            facts = ", ".join(f"{name} {value}" for name, value in step["facts"].items())
            say(f"  {step['step']}: {step['outcome']}: {step['words'] or facts}")
        for reason in self.findings["reasons"]:
            say(f"probe: {reason}")
        self.env["LIGHTCKPT_CUDA_BATCH"] = self.findings["batch"]
        if not self.findings["snapshot"]:
            self.failed.append("probe: nothing may be used here")
        return bool(self.findings["snapshot"])

    def doctor(self) -> None:
        self.run("doctor", ["-c", DOCTOR, "doctor", str(self.folder)], DOCTOR_SECONDS)

    def tests(self) -> None:
        if self.recorded("gpu-tests").get("status") == 0:
            say("tests: passed, as recorded")
            return
        command = ["-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
        command += [f"--timeout={TEST_SECONDS}", f"--maxfail={TESTS_FAILED_MAX}", "tests/gpu"]
        status = self.run("tests", command, TESTS_SECONDS)
        lines = (self.out / "tests.txt").read_text(errors="replace").splitlines()
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        summary = lines[-1] if lines else ""
        self.keep("gpu-tests", status=status, summary=summary, failures=failures)
        if status != 0:
            self.failed.append(f"tests: status {status}: {summary}")

    def figures(self) -> None:
        if self.fake:
            say("figures: none on a fake GPU")
            return
        command = [str(ROOT / "bench" / "gpu.py"), "--results", str(self.results)]
        if self.findings["snapshot"] == "host":
            # Neither into a registered mapping, nor aside and from there into one.
            command += ["--strategies", "lightckpt-gpu-host,torch.save,checkfreq-style"]
        left = max(0.0, self.left())
        status = self.run("figures", [*command, "--budget", f"{left:.0f}"], left + GRACE_SECONDS)
        if status != 0:
            self.failed.append(f"figures: status {status}")


def run_limited(
    command: Sequence[str], path: Path, *, limit_s: float, env: dict[str, str]
) -> int | None:
    """Run *command* with its words to *path*; None if it was not through in time.

    At the end it and its children are gone, whatever comes.
    """
    with path.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
            env=env, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End *process* and its group, first by asking."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver may hold it
        process.wait(GRACE_SECONDS)


def words_of(command: Sequence[str]) -> str:
    """Return what a program of the system says, or why it says nothing."""
    if shutil.which(command[0]) is None:
        return "not installed"
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=GRACE_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ran.stdout + ran.stderr


def say(words: str) -> None:
    print(words, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; it ends before")
    parser.add_argument("--out", type=Path, default=OUT / "out", help="where its words go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file that gets lines")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="what to install, if there")
    go = Go(parser.parse_args(arguments), began)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        gpu_site.install(go.site, go.wheels)
        sys.path.insert(0, str(go.site))  # the releases that lines name are those there
        if not go.look():
            return 2
    except (gpu_site.SiteError, subprocess.TimeoutExpired) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    if go.probe():
        go.doctor()
        go.tests()
        go.figures()
    for words in go.failed:
        say(f"failed: {words}")
    say(f"gpu: {time.monotonic() - began:.0f} of {go.budget:.0f} s; its words are in {go.out}")
    return 1 if go.failed else 0


if __name__ == "__main__":
    sys.exit(main())
