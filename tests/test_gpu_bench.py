"""Tests of bench/gpu.py without a GPU. Goal: whatever a driver, a library or a person does to a
run, what was measured is recorded, what was not is said, and no process or file is left.

Method: plans are pure; processes are real, forked as the benchmark's own, and do what gpu_targets
says in place of measuring.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gpu
import gpu_child
import gpu_plan
import gpu_targets
import kills
import record
import report
import tables
from gpu_plan import RECOVERY, STEPS, Circumstances, Task
from gpu_targets import gone

BENCH = Path(gpu.__file__).parent
TESTS = Path(__file__).parent
HERE = Circumstances("c", "d", ())
OURS = [kind.name for kind in gpu.OURS]
PEERS = [kind.name for kind in gpu.PEERS]


# Plans.


def planned(models=("a", "b")):
    return gpu_plan.plan(models, ours=["l", "m"], peers=["p"], killed=["l", "p"])


def test_what_says_most_comes_first():
    assert planned() == [
        Task("a", "l", STEPS), Task("a", "m", STEPS), Task("b", "l", STEPS), Task("b", "m", STEPS),
        Task("a", "p", STEPS), Task("b", "p", STEPS), Task("a", "l", RECOVERY),
        Task("b", "l", RECOVERY), Task("a", "p", RECOVERY), Task("b", "p", RECOVERY),
    ]  # fmt: skip


def line(task, **more):
    return {
        "bench": "gpu", "commit": "c", "device": "d", "versions": {}, "model": task.model,
        "part": task.part, "strategy": task.strategy, "strategies": {task.strategy: {}}, **more,
    }  # fmt: skip


def test_a_second_run_goes_on_where_the_first_was_ended():
    first, second, *others = planned()
    assert gpu_plan.left(planned(), [line(first), line(second)], HERE) == others


@pytest.mark.parametrize(
    "other", [{"commit": "e"}, {"device": "e"}, {"versions": {"torch": "1"}}, {"bench": "gpu-x"}]
)
def test_what_was_measured_in_other_circumstances_is_measured_anew(other):
    assert gpu_plan.left(planned(), [line(planned()[0], **other)], HERE) == planned()


def test_one_process_does_what_is_of_one_model():
    tasks = planned()
    assert gpu_plan.together(tasks) == tasks[:2]
    assert gpu_plan.together(tasks[1:]) == tasks[1:2]
    assert gpu_plan.together(tasks[6:]) == tasks[6:7]


# Processes.


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """The gate at which a process stands that hangs; the fork server is told of it as it starts."""
    gate = tmp_path / "standing"
    os.mkfifo(gate)
    monkeypatch.setenv(gpu_targets.HANGS, str(gate))
    return gate


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """Processes are forked from a server that has this test's environment."""
    from multiprocessing.forkserver import _forkserver

    _forkserver._stop()
    monkeypatch.setattr(_forkserver, "_preload_modules", [])
    yield
    _forkserver._stop()


def all_of(target, **options):
    with gpu_child.reports(target, **options) as reports:
        return [report["say"] for report in reports]


def test_what_a_process_reports_is_there():
    assert all_of(gpu_targets.report_two) == ["0", "1"]


@pytest.mark.parametrize(
    ("target", "status"), [(gpu_targets.report_and_abort, -6), (gpu_targets.report_and_exit, 3)]
)
def test_a_process_that_ends_badly_is_told_by_its_status(target, status):
    with pytest.raises(gpu_child.EndedError, match=f"ended with status {status}"):
        all_of(target)


def test_a_process_that_hangs_is_ended_with_its_children(standing):
    with pytest.raises(gpu_child.EndedError, match="hung: it reported nothing for 1 s"):
        with gpu_child.reports(gpu_targets.hang, silence_s=1) as reports:
            assert next(reports) == {"say": "standing"}
            held = os.open(standing, os.O_WRONLY)
            next(reports)
    assert gone(held)
    os.close(held)


def test_an_interrupt_ends_a_process_with_its_children(standing):
    with pytest.raises(KeyboardInterrupt):
        with gpu_child.reports(gpu_targets.hang) as reports:
            next(reports)
            held = os.open(standing, os.O_WRONLY)
            raise KeyboardInterrupt
    assert gone(held)
    os.close(held)


# Runs.


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run what *arguments* ask for, with processes that do *target*; (status, lines, words)."""
    here = {"commit": "c", "device": "d", "versions": {}}
    original = gpu.make_line
    monkeypatch.setattr(gpu, "make_line", lambda *args, **more: original(*args, **more) | here)
    monkeypatch.setattr(kills, "prepare_server", lambda: None)
    monkeypatch.setattr(gpu, "TASK_SECONDS_MIN", 0.0)
    monkeypatch.setattr(gpu, "END_SECONDS", 0.0)
    results, words = tmp_path / "gpu.ndjson", []

    def run(target, *arguments):
        monkeypatch.setattr(gpu_child, "serve", target)
        folder = tmp_path / "checkpoints"
        folder.mkdir(exist_ok=True)
        options = ["--models", "gpt2", "--dir", str(folder), "--results", str(results)]
        options = gpu.parse([*options, *arguments])
        words.clear()
        status = gpu.run(options, words.append, began=time.monotonic())
        assert os.listdir(folder) == []
        return status, record.read(results), words

    return run


def test_what_fails_fails_alone(run):
    status, lines, words = run(gpu_targets.scripted, "--no-recovery")
    entries = {name: entry for line in lines for name, entry in line["strategies"].items()}
    assert entries.keys() == {*OURS, *PEERS}
    assert entries["lightckpt-gpu-direct"]["missing"] == "its process ended with status -6"
    assert entries["lightckpt-gpu-host"]["missing"] == "words"
    assert "failed" not in entries["lightckpt-gpu-device"]
    assert all("added_percent" in entries[name] for name in ("lightckpt-gpu-auto", *PEERS))
    assert status == 1
    assert [word for word in words if word.startswith("failed: ")] == [
        "failed: lightckpt-gpu-direct: its process ended with status -6",
        "failed: lightckpt-gpu-host: words",
    ]
    assert run(gpu_targets.hang, "--no-recovery")[:2] == (0, lines)  # all has a line: nothing runs


def test_a_model_that_cannot_be_built_is_told(run):
    status, lines, _ = run(gpu_targets.unbuildable, "--no-recovery", "--strategies", "torch.save")
    assert status == 0  # it is not ours that failed
    assert lines[0]["strategies"]["torch.save"]["missing"] == "RuntimeError: out of memory"


def test_a_budget_ends_it_and_what_was_not_run_is_said(run, standing):
    arguments = ("--no-recovery", "--budget", "3")
    status, lines, words = run(gpu_targets.hang_at_once, *arguments)
    assert [line["strategy"] for line in lines] == OURS[:1]
    assert status == 0
    assert "the budget of 3 s is spent" in words
    said = [word for word in words if word.startswith("not run, for time: steps of gpt2 with ")]
    assert len(said) == len(OURS) + len(PEERS) - 1
    with pytest.raises(OSError, match="No such device"):  # nobody stands at the gate
        os.open(standing, os.O_WRONLY | os.O_NONBLOCK)


def test_with_too_little_time_nothing_is_begun(run, monkeypatch):
    monkeypatch.setattr(gpu, "TASK_SECONDS_MIN", 25.0)
    status, lines, words = run(gpu_targets.hang, "--budget", "20")
    assert (status, lines) == (0, [])
    assert len(words) == len(OURS) + len(PEERS) + 3


def test_recoveries_are_timed_once_for_each_kind_of_checkpoint(run, monkeypatch):
    jobs, parts = [], dict.fromkeys(kills.RECOVERY_PARTS, 1.0)

    def recover(job):
        jobs.append(job)
        if job.strategy == "torch.save":
            raise TimeoutError("a trainer has been silent")
        return parts

    monkeypatch.setattr(kills, "recover", recover)
    monkeypatch.setattr(kills, "import_seconds", lambda model: 0.5)
    names = ["lightckpt-gpu-auto", "lightckpt-gpu-device", *PEERS]
    status, lines, _ = run(gpu_targets.scripted, "--strategies", ",".join(names))
    assert [job.strategy for job in jobs] == ["lightckpt-gpu-auto", "torch.save", "checkfreq-style"]
    recoveries = [line["strategies"] for line in lines if line["part"] == RECOVERY]
    assert recoveries[0] == {
        "lightckpt-gpu-auto": {"recovery": parts, "recovery_s": 3.5, "import_s": 0.5}
    }
    words_of = recoveries[1]["torch.save"]["recovery_missing"]
    assert words_of == "TimeoutError: a trainer has been silent"
    assert status == 0


def test_what_was_not_measured_is_not_killed_either(run, monkeypatch):
    monkeypatch.setattr(kills, "recover", lambda job: pytest.fail("it was"))
    _, lines, words = run(gpu_targets.scripted, "--strategies", "lightckpt-gpu-device")
    assert len(lines) == 1
    assert "recovery of gpt2 with lightckpt-gpu-device: not run: its steps were not" in words


def test_a_signal_ends_the_run_its_processes_and_its_files(standing, tmp_path):
    code = (
        "import sys, torch, gpu, gpu_child, gpu_targets, kills\n"
        "torch.cuda.is_available = lambda: True\n"
        "kills.prepare_server, gpu_child.serve = (lambda: None), gpu_targets.hang_at_once\n"
        "sys.exit(gpu.main())\n"
    )
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    arguments = ["--dir", str(folder), "--results", str(tmp_path / "gpu.ndjson")]
    paths = os.pathsep.join(map(str, (BENCH, TESTS)))
    ran = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        held = os.open(standing, os.O_WRONLY)
        assert os.listdir(folder) != []
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(60) == 128 + signal.SIGTERM
    finally:
        ran.kill()
    assert gone(held)
    os.close(held)
    assert os.listdir(folder) == []
    assert [line["model"] for line in record.read(tmp_path / "gpu.ndjson")] == ["gpt2"]


def test_without_a_gpu_nothing_is_measured_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    results = tmp_path / "gpu.ndjson"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(results)])
    assert gpu.main() == 2
    assert "nothing was measured, nothing written" in capsys.readouterr().out
    assert not results.exists()


@pytest.mark.parametrize("wrong", [["--models", "x"], ["--strategies", "x"], ["--rounds", "0"]])
def test_what_there_is_not_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(wrong)
    assert capsys.readouterr().err


# The report.


def figured(percent, **more):
    one = {"median": percent, "p10": percent, "p90": percent, "n": 1}
    names = ("added_percent", "stall_s", "bytes_s", "of_limit", "gpu_percent")
    return dict.fromkeys(names, one) | more


def test_the_report_puts_a_model_together_from_its_lines(tmp_path):
    plain = {"plain_step_s": {"median": 0.05, "p10": 0.05, "p90": 0.05, "n": 1}}
    entries = [
        (Task("gpt2", "l", STEPS), figured(77.0), plain),
        (Task("gpt2", "l", RECOVERY), {"recovery_s": 4.25}, {}),
        (Task("gpt2", "l", STEPS), figured(3.5), plain),
        (Task("gpt2", "l", RECOVERY), {"recovery_missing": "words", "failed": True}, {}),
        (Task("gpt2", "p", STEPS), {"missing": "no room"}, {}),
    ]
    findings = {
        "reasons": ["why"],
        "outcomes": [{"step": "one", "outcome": "hung", "words": "at it", "facts": {}}],
    }
    lines = [record.make_line("gpu-probe", "it", device="GPU", findings=findings)] + [
        record.make_line("gpu", "it", model=task.model, strategies={task.strategy: entry}, **more)
        for task, entry, more in entries
    ]
    for one in lines:
        record.append(tmp_path / "gpu.ndjson", one)
    table = tables.gpu_table(record.read(tmp_path / "gpu.ndjson"))
    rows = {(row[0], row[1]): row[2:] for row in table["rows"]}
    assert rows["gpt2", "l"] == ["50", "3.5", "3.5e+03", "3.5e-09", "3.5", "3.5", "4.25"]
    assert rows["gpt2", "p"][:2] == [tables.NOT_MEASURED, "no room"]
    assert rows["bert", tables.NOT_MEASURED][0] == tables.NOT_MEASURED
    page = report.make(tmp_path, tmp_path / "report", smoke=False, command="made up").read_text()
    assert "The probe of GPU" in page
    assert "<td>at it</td>" in page


def test_the_server_takes_no_package_from_the_folder_that_it_starts_in(tmp_path):
    """Where `make gpu` runs lies the checkout's own lightckpt/, which has no compiled module.

    Another package stands for it here: who has lightckpt editable finds that one anyhow.
    """
    (tmp_path / "psutil").mkdir()
    (tmp_path / "psutil" / "__init__.py").write_text('"""Not the one."""')
    script = tmp_path / "script" / "it.py"
    script.parent.mkdir()
    script.write_text(
        "import kills, gpu_targets\n"
        "if __name__ == '__main__':\n"
        "    kills.prepare_server()\n"
        "    ours, theirs = kills.context.Pipe(duplex=False)\n"
        "    process = kills.context.Process(target=gpu_targets.where, args=(theirs,))\n"
        "    process.start()\n"
        "    print(ours.recv() if ours.poll(120) else 'nothing')\n"
        "    process.join()\n"
    )
    paths = os.pathsep.join(map(str, (BENCH, TESTS)))
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=250, check=True,
    )  # fmt: skip
    assert Path(ran.stdout.strip()).name == "__init__.py", ran.stderr
    assert not Path(ran.stdout.strip()).is_relative_to(tmp_path)
