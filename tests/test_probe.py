"""The probe of a GPU. Goal: whatever a driver does, the probe ends, leaves nothing behind, and says
what may be used; what it did not see work it does not recommend.

Method: the fake driver, and a faulty one on top of it, in the probe's own processes. A call that
hangs stands at a gate, a named pipe. What follows from outcomes is a pure function.
"""

import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightckpt import probe as module
from lightckpt import probe_steps
from lightckpt.probe import CRASHED, FAILED, HUNG, NOT_MADE, OK, WRONG, Outcome, decide, make_step
from lightckpt.probe import probe as find_out

ROOT = Path(__file__).resolve().parent.parent
SINGLY, TOGETHER = "versions, copies one by one", "versions, copies at once"
MAPPED_SMALL, MAPPED_LARGE = "mapped file, 1 MiB", "mapped file, 4 MiB"
PINNED_BATCH, MAPPED_BATCH = "copies at once, pinned", "copies at once, mapped"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "MAPPED_MIB", (1, 4))
    monkeypatch.setattr(module, "SMALL_TIMES", 5)
    monkeypatch.setattr(module, "VERSION_EXTENTS", 64)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "0")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, fake_cuda):
    from fake_driver import build_faulty

    return build_faulty(tmp_path_factory.mktemp("faulty_cuda"), fake_cuda)


@pytest.fixture
def fault(monkeypatch, tmp_path):
    """Let a call of the faulty driver fail; returns the gate of one that hangs."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def fault(how, call):
        for name, value in {"HOW": how, "CALL": call, "GATE": str(gate)}.items():
            monkeypatch.setenv(f"FAULTY_{name}", value)
        return gate

    return fault


def outcomes(findings):
    return {one.step: one.outcome for one in findings.outcomes}


# On the fake driver.


def test_a_driver_that_works_is_found_to_work(fake_cuda, folder):
    findings = find_out(folder, library=str(fake_cuda))
    assert set(outcomes(findings).values()) == {OK}, findings.rows()
    assert findings.snapshot == "auto"
    assert findings.batch in ("0", "1")
    assert os.listdir(folder) == []
    facts = {one.step: one.facts for one in findings.outcomes}
    assert facts["facts"] | {"missing": [], "name": "Fake GPU 0"} == facts["facts"]
    for step in ("pinned memory", MAPPED_SMALL, MAPPED_LARGE):
        assert facts[step]["out_bytes_s"] > 0
        assert facts[step]["in_bytes_s"] > 0
    assert facts[MAPPED_LARGE].keys() >= {"register_s", "unregister_s"}
    assert facts[PINNED_BATCH].keys() >= {"singly_s", "together_s"}
    assert facts[SINGLY]["way"] == facts[TOGETHER]["way"] == "direct"
    rows = findings.rows()
    assert rows.keys() == facts.keys()
    assert "Fake GPU 0" in rows["facts"]


def test_where_registration_is_refused_staging_is_what_is_left(fake_cuda, folder, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_REFUSE_REGISTRATION", "801")
    findings = find_out(folder, library=str(fake_cuda))
    found = outcomes(findings)
    assert found[MAPPED_SMALL] == found[MAPPED_LARGE] == FAILED
    assert (found[SINGLY], found[MAPPED_BATCH]) == (OK, NOT_MADE)
    assert findings.snapshot == "host"
    assert "cuMemHostRegister_v2: CUDA error 801" in findings.reasons[0]
    assert "cuMemHostRegister_v2: CUDA error 801" in findings.rows()[MAPPED_SMALL]


@pytest.mark.parametrize(
    ("how", "outcome"), [("crash", CRASHED), ("nothing", WRONG)], ids=lambda value: value
)
def test_a_batch_with_a_fault_leaves_batches_off(faulty, folder, fault, how, outcome):
    fault(how, "cuMemcpyBatchAsync_v2")
    findings = find_out(folder, library=str(faulty))
    found = outcomes(findings)
    assert found["two copies at once, pinned"] == outcome
    assert {found[PINNED_BATCH], found[MAPPED_BATCH], found[TOGETHER]} == {NOT_MADE}
    assert (findings.snapshot, findings.batch) == ("auto", "0")
    assert outcome in findings.reasons[-1]
    assert os.listdir(folder) == []


def test_copies_that_bring_other_bytes_are_never_recommended(faulty, folder, fault):
    fault("nothing", "cuMemcpyDtoHAsync_v2")
    findings = find_out(folder, library=str(faulty))
    assert outcomes(findings)["pinned memory"] == WRONG
    assert (findings.snapshot, findings.batch) == ("", "0")
    assert "do not checkpoint from this GPU" in findings.reasons[0]


def test_where_registered_memory_has_other_addresses_nothing_is_written_in_place(
    faulty, folder, fault
):
    fault("zero", "cuDeviceGetAttribute")
    findings = find_out(folder, library=str(faulty))
    assert outcomes(findings)[MAPPED_BATCH] == NOT_MADE
    assert findings.snapshot == "host"
    assert "attribute 91 is 0" in findings.reasons[0]


def test_a_driver_that_lacks_functions_is_told_by_their_names(folder, tmp_path):
    library = tmp_path / "libless.so"
    source = 'extern "C" int cuInit(unsigned) { return 0; }'
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    findings = find_out(folder, library=str(library))
    facts, *others = findings.outcomes
    assert facts.outcome == FAILED
    assert facts.facts["missing"] == [name for name in probe_steps.NEEDED if name != "cuInit"]
    assert "has no cuGetErrorName, " in facts.words
    assert {one.outcome for one in others} == {NOT_MADE}
    assert (findings.snapshot, findings.batch) == ("", "0")


def test_without_a_driver_nothing_is_tried(folder):
    findings = find_out(folder, library="libno-such-driver.so")
    facts, *others = findings.outcomes
    assert "libno-such-driver.so" in facts.words
    assert {one.words for one in others} == {"there is no driver to try"}
    assert findings.snapshot == ""


def test_the_functions_asked_for_are_those_that_the_core_takes():
    source = (ROOT / "csrc" / "cuda_driver.cc").read_text()
    taken = set(re.findall(r'take\(&\w+, "(\w+)"\)', source))
    assert taken - {*probe_steps.NEEDED, *probe_steps.OPTIONAL} == set()
    assert set(probe_steps.NEEDED) - taken == set()


# How a step ends.


def test_a_step_that_hangs_is_ended(faulty, folder, fault):
    gate = fault("hang", "cuMemHostRegister_v2")
    found = make_step("it", [str(faulty), str(folder), "mapped", "1"], limit_s=2)
    assert (found.outcome, found.words) == (HUNG, "not through after 2 s")
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads: it has gone
        os.open(gate, os.O_WRONLY | os.O_NONBLOCK)


def test_a_step_is_ended_with_the_process_that_waits_for_it(faulty, folder, fault):
    gate = fault("hang", "cuMemHostRegister_v2")
    arguments = [str(faulty), str(folder), "mapped", "1"]
    code = "import sys; from lightckpt.probe import make_step; "
    code += "make_step('it', sys.argv[1:], limit_s=600)"
    parent = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=folder)
    try:
        held = os.open(gate, os.O_WRONLY)  # returns when the step stands there
        parent.send_signal(signal.SIGKILL)
        poll = select.poll()
        poll.register(held, 0)
        assert poll.poll(60_000) == [(held, select.POLLERR)]  # it does not read any more
        os.close(held)
    finally:
        parent.kill()
        parent.wait()


def test_an_interrupt_ends_the_step(folder, monkeypatch):
    made = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if self not in made:
                made.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(module.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_step("it", ["libc.so.6", str(folder), "facts"], limit_s=60)
    assert made[0].returncode is not None


def test_an_unforeseen_error_is_told_by_its_last_line(folder):
    found = make_step("it", ["libc.so.6", str(folder), "nonsense"], limit_s=60)
    assert (found.outcome, found.words) == (FAILED, "KeyError: 'nonsense'")


def test_no_step_begins_when_the_time_is_over(folder):
    findings = find_out(folder, library="libno-such-driver.so", budget_s=0)
    assert {one.words for one in findings.outcomes} == {"0 s are over"}
    assert findings.snapshot == ""


def test_no_more_room_is_taken_than_half_of_what_is_free(folder, monkeypatch):
    monkeypatch.setattr(module, "memory_bytes", lambda: 7 << 20)
    steps = [name for name, _, _ in module._steps(folder)]
    assert [name for name in steps if name.startswith("mapped")] == [
        "mapped file, 1 MiB", "mapped file, 3 MiB"
    ]  # fmt: skip
    monkeypatch.undo()
    assert module.memory_bytes() > 1 << 20


# What follows.


def all_well(**changed):
    """Return good outcomes of every step, but for those in *changed*, by their names' starts."""
    facts = {"facts": {"batch": "cuMemcpyBatchAsync_v2"}, SINGLY: {"version_s": 1.0}}
    facts[TOGETHER] = {"version_s": 0.5}
    steps = ("facts", "pinned memory", MAPPED_SMALL, MAPPED_LARGE, SINGLY, PINNED_BATCH,
             MAPPED_BATCH, TOGETHER)  # fmt: skip
    made = {name: Outcome(name, OK, facts=facts.get(name, {})) for name in steps}
    for name, outcome in changed.items():
        key = next(step for step in steps if step.startswith(name.replace("_", " ")))
        made[key] = replace(made[key], outcome=outcome, words="words")
    return made


def test_batches_are_used_where_they_gain():
    assert decide(all_well())[:2] == ("auto", "1")
    slow = all_well()
    slow[TOGETHER] = Outcome(TOGETHER, OK, facts={"version_s": 0.95})
    snapshot, batch, reasons = decide(slow)
    assert (snapshot, batch) == ("auto", "0")
    assert reasons[-1] == "LIGHTCKPT_CUDA_BATCH=0: copies at once took 0.95 of the time"


@pytest.mark.parametrize("outcome", [FAILED, WRONG, CRASHED, HUNG])
@pytest.mark.parametrize(
    ("step", "snapshot", "batch"),
    [
        ("facts", "", "0"),
        ("pinned", "", "0"),
        ("versions", "", "0"),
        ("mapped", "host", "1"),
    ],
)
def test_what_was_not_seen_to_work_is_not_recommended(step, snapshot, batch, outcome):
    done = all_well(**{step: outcome})
    found = decide(done)
    assert found[:2] == (snapshot, batch)
    assert any(f"{outcome}: words" in reason for reason in found[2])


@pytest.mark.parametrize("step", [PINNED_BATCH, MAPPED_BATCH, TOGETHER])
def test_one_fault_of_batches_leaves_them_off(step):
    done = all_well()
    done[step] = Outcome(step, HUNG, "words")
    done[TOGETHER] = done[TOGETHER] if step == TOGETHER else Outcome(TOGETHER, NOT_MADE, "words")
    snapshot, batch, reasons = decide(done)
    assert (snapshot, batch) == ("auto", "0")
    assert reasons[-1] == f"LIGHTCKPT_CUDA_BATCH=0: {step}: hung: words"


def test_after_a_fault_what_could_meet_it_again_is_not_made():
    done = all_well()
    assert module.why_not(TOGETHER, done) == ""
    done[PINNED_BATCH] = Outcome(PINNED_BATCH, CRASHED)
    assert module.why_not(TOGETHER, done) == f"not after this failed: {PINNED_BATCH}"
    assert module.why_not(SINGLY, done) != ""
    assert module.why_not(MAPPED_LARGE, done) == ""
    done = all_well(mapped=HUNG)
    assert "hung" in module.why_not(MAPPED_BATCH, done)
    assert module.why_not(SINGLY, done) == ""  # the core says itself what it can use
    done["facts"] = Outcome("facts", OK, facts={"batch": ""})
    assert module.why_not(PINNED_BATCH, done) == "the driver has no call for many copies"


# The command.


def test_the_command_says_what_to_use(fake_cuda, folder, monkeypatch, call, call_json):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda.parent))
    code, out, _ = call("doctor", "--gpu", folder)
    assert code == 0
    assert "snapshot='auto'" in out
    assert "Fake GPU 0" in out
    code, document = call_json("doctor", "--gpu", folder)
    assert (code, document["snapshot"]) == (0, "auto")
    assert document["outcomes"][0]["facts"]["name"] == "Fake GPU 0"


def test_the_command_fails_where_nothing_may_be_used(folder, monkeypatch, call):
    monkeypatch.setattr("lightckpt.cli.probe", lambda path: find_out(path, library="libnone.so"))
    code, out, _ = call("doctor", "--gpu", folder)
    assert code == 1
    assert "do not checkpoint from this GPU" in out
    code, _, err = call("doctor", "--gpu", folder / "none")
    assert code == 2
    assert "is no folder" in err


def test_the_place_need_not_be_named(monkeypatch, call):
    asked = []
    monkeypatch.setattr("lightckpt.cli.probe", lambda path: asked.append(path) or NOTHING)
    monkeypatch.setattr("lightckpt.cli.MEMORY_FOLDER", ROOT)
    assert call("doctor", "--gpu")[0] == 0
    assert asked == [ROOT]


NOTHING = module.Findings("", (), "auto", "0", ())
