"""Tests of bench/gpu_all.py, which a machine with a GPU runs. Goal: it starts beside any torch
without touching it, ends in time with all that it began, and records what it found, of a real GPU
only.

Method: pip installs a wheel made here, without a registry; what looks at torch and what runs the
parts are stood in for.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import gpu_all
import gpu_site
import record
from gpu_targets import gone

ROOT = Path(__file__).resolve().parent.parent
FACTS = {"step": "facts", "outcome": "ok", "words": "", "facts": {"name": "GPU"}}
FINDINGS = {"folder": "", "outcomes": [FACTS], "snapshot": "auto", "batch": "1", "reasons": ["so"]}


def wheel(folder, name, text):
    """Write the wheel of a package that is one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", text)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: it\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", "")


# The folder of packages.


def test_wheels_go_to_a_folder_beside_what_is_there_without_a_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    wheel(wheels, "carried_along", "HERE = True")
    site.mkdir()
    (site / "of_an_older_go.py").touch()
    monkeypatch.setattr(gpu_site, "NEEDED", {"carried_along": (), "torch": ()})
    gpu_site.install(site, wheels)
    assert not (site / "of_an_older_go.py").exists()
    (tmp_path / "carried_along.py").write_text("HERE = False")
    code = "import carried_along, torch; print(carried_along.HERE, torch.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=gpu_site.environment(site), cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    here, torch_file = ran.stdout.split()
    assert here == "True"
    assert not Path(torch_file).is_relative_to(tmp_path)


def test_what_is_missing_in_the_end_is_named(tmp_path, monkeypatch):
    wheel(tmp_path / "wheels", "carried_along", "")
    monkeypatch.setattr(gpu_site, "NEEDED", {"no_such_module": (), "json": ()})
    with pytest.raises(gpu_site.SiteError, match="has no no_such_module: make PYTHON="):
        gpu_site.install(tmp_path / "site", tmp_path / "wheels")


def test_a_folder_without_wheels_and_a_wheel_that_is_none_are_refused(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(gpu_site.SiteError, match="there is no wheel in"):
        gpu_site.install(tmp_path / "site", wheels)
    (wheels / "no-1.0-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(gpu_site.SiteError, match="pip install failed: "):
        gpu_site.install(tmp_path / "site", wheels)


def test_from_a_registry_comes_only_what_is_missing(tmp_path, monkeypatch):
    calls, lacking = [], [["rich", "lz4"], []]
    monkeypatch.setattr(gpu_site, "pip", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(gpu_site, "missing", lambda site: lacking.pop(0))
    gpu_site.install(tmp_path / "site", tmp_path / "none")
    [(command, *arguments)] = calls
    assert command == "install"
    assert arguments[arguments.index(str(ROOT)) + 1 :] == [
        "rich", "markdown-it-py", "mdurl", "pygments", "lz4"
    ]  # fmt: skip
    assert "--no-deps" in arguments  # or torch's own numpy would be hidden by another


def test_wheels_are_few_and_know_their_commit(tmp_path, monkeypatch):
    folder, calls = tmp_path / "wheels", []

    def pip(*arguments, **_):
        calls.append(arguments)
        folder.mkdir()

    monkeypatch.setattr(gpu_site, "pip", pip)
    monkeypatch.setattr(gpu_site, "commit", lambda: "abc")
    gpu_site.make_wheels(folder)
    [(command, *arguments)] = calls
    assert command == "wheel"
    assert arguments[-4:] == [str(ROOT), "cffi", "lz4", "pycparser"]
    assert "--no-deps" in arguments
    monkeypatch.setattr(record, "COMMIT_FILE", folder / "commit")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.commit() == "abc"


def test_without_git_a_line_is_made_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "COMMIT_FILE", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.make_line("gpu", "it")["commit"] == ""


def test_pip_that_does_not_end_is_an_error():
    with pytest.raises(gpu_site.SiteError, match="pip install: not through after 0 s"):
        gpu_site.pip("install", "nothing", limit_s=0.0)


# Parts.


def test_a_part_that_is_not_through_in_time_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_all, "GRACE_SECONDS", 1.0)  # it does not end by itself
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    opened = []

    def watch(process):
        opened.append(os.open(gate, os.O_WRONLY))  # returns when it stands there
        end(process)

    end = gpu_all.end
    monkeypatch.setattr(gpu_all, "end", watch)
    command = ["sh", "-c", f"echo begun; trap '' TERM; cat {gate}; cat {gate}"]
    status = gpu_all.run_limited(command, tmp_path / "words", limit_s=1, env=dict(os.environ))
    assert status is None
    assert (tmp_path / "words").read_text() == "begun\n"
    assert gone(*opened)
    os.close(*opened)


def test_a_part_gives_its_status_and_its_words(tmp_path):
    command = ["sh", "-c", "echo out; echo error >&2; exit 3"]
    status = gpu_all.run_limited(command, tmp_path / "words", limit_s=60, env=dict(os.environ))
    assert status == 3
    assert (tmp_path / "words").read_text() == "out\nerror\n"


def test_what_the_system_has_not_is_said():
    assert gpu_all.words_of(("no-such-program",)) == "not installed"
    assert gpu_all.words_of(("uname", "-s")) == "Linux\n"


# A go.


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Make a go on a GPU of that name whose parts end as *does* says; (status, lines, parts)."""
    site, results = tmp_path / "build" / "site", tmp_path / "gpu.ndjson"
    monkeypatch.setattr(gpu_all, "OUT", tmp_path / "build")
    monkeypatch.setattr(gpu_site, "install", lambda site, wheels: None)
    monkeypatch.delenv(gpu_all.FAKE, raising=False)
    monkeypatch.setattr(gpu_all.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def go(gpu, does=(), lightckpt=site / "lightckpt" / "__init__.py"):
        found = {"torch": "1", "cuda": None, "gpu": gpu, "lightckpt": str(lightckpt)}
        ends = {"probe": (0, "a warning\n" + json.dumps(FINDINGS))} | dict(does)
        parts = {}

        def run(self, name, command, limit, *, tail=0):
            status, words = ends.get(name, (0, ""))
            (self.out / f"{name}.txt").write_text(words)
            parts[name] = command, self.env.get("LIGHTCKPT_CUDA_BATCH")
            return status

        monkeypatch.setattr(gpu_all, "LOOK", f"print({json.dumps(found)!r})")
        monkeypatch.setattr(gpu_all.Go, "run", run)
        status = gpu_all.main(["--out", str(tmp_path / "out"), "--results", str(results)])
        return status, record.read(results), parts

    return go


def test_a_go_does_all_and_records_it(go):
    status, lines, parts = go("GPU", {"tests": (0, "3 passed in 1 s")})
    assert status == 0
    assert [*parts] == ["probe", "doctor", "tests", "figures"]
    assert [line["bench"] for line in lines] == ["gpu-probe", "gpu-tests"]
    assert {line["device"] for line in lines} == {"GPU"}
    assert lines[0]["findings"] == FINDINGS
    assert (lines[1]["status"], lines[1]["summary"]) == (0, "3 passed in 1 s")
    # What the probe found is what the rest uses.
    assert [parts[name][1] for name in ("tests", "figures")] == ["1", "1"]
    assert "--strategies" not in parts["figures"][0]


def test_a_second_go_takes_up_where_the_first_one_ended(go):
    go("GPU")
    status, lines, parts = go("GPU")
    assert (status, len(lines), [*parts]) == (0, 2, ["doctor", "figures"])
    assert parts["figures"][1] == "1"
    _, lines, parts = go("another GPU")
    assert [*parts] == ["probe", "doctor", "tests", "figures"]


def test_tests_that_fail_are_told_and_run_again(go):
    words = "FAILED tests/gpu/it.py::test\n1 failed in 1 s"
    status, lines, _ = go("GPU", {"tests": (1, words)})
    assert status == 1
    assert lines[1]["failures"] == ["FAILED tests/gpu/it.py::test"]
    assert "tests" in go("GPU")[2]


def test_where_only_staging_is_safe_nothing_else_is_measured(go):
    findings = json.dumps(FINDINGS | {"snapshot": "host", "batch": "0"})
    _, _, parts = go("GPU", {"probe": (0, findings)})
    command, batch = parts["figures"]
    assert command[command.index("--strategies") + 1].startswith("lightckpt-gpu-host,")
    assert batch == "0"


@pytest.mark.parametrize("words", [json.dumps(FINDINGS | {"snapshot": ""}), "", "{"])
def test_where_nothing_may_be_used_nothing_is_run(go, words):
    status, _, parts = go("GPU", {"probe": (1, words)})
    assert (status, [*parts]) == (1, ["probe"])


def test_without_a_gpu_nothing_is_measured_and_nothing_written(go, tmp_path, capsys):
    status, lines, parts = go("")
    assert (status, lines, parts) == (2, [], {})
    assert "nothing was measured, nothing written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_fake_gpu_leaves_no_line_and_no_figures(go, monkeypatch, tmp_path):
    monkeypatch.setenv(gpu_all.FAKE, str(tmp_path / "libcuda.so.1"))
    status, lines, parts = go("")
    assert (status, lines) == (0, [])
    assert [*parts] == ["probe", "doctor", "tests"]


def test_a_lightckpt_from_elsewhere_is_refused(go, capsys):
    status, lines, parts = go("GPU", lightckpt=ROOT / "lightckpt" / "__init__.py")
    assert (status, lines, parts) == (1, [], {})
    assert f"lightckpt is taken from {ROOT}" in capsys.readouterr().err


def test_with_no_time_left_a_part_is_not_begun(tmp_path, capsys):
    options = argparse.Namespace(
        out=tmp_path, results=tmp_path / "x", wheels=tmp_path / "none", budget=1.0
    )
    one = gpu_all.Go(options, began=0.0)
    assert one.run("it", ["-c", "1/0"], 60.0) is None
    assert "it: not run: no time is left" in capsys.readouterr().out
    one = gpu_all.Go(options, began=time.monotonic() + 100)
    assert one.run("it", ["-c", "print('words')"], 60.0) == 0
    assert "  words" in capsys.readouterr().out


def test_the_one_command_is_short_enough():
    text = (ROOT / "docs" / "TESTING.md").read_text(encoding="utf-8")
    command = re.search(r"```sh\n(python3 bench/gpu_all\.py .*?)```", text, re.DOTALL)
    assert command
    assert len(command[1]) < 2000
