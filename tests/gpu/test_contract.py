"""Runs on a GPU. Goal: every version is what the device had at its boundary, and comes back bit for
bit, whichever way it went; no guard and no boundary of a settled run waits for the device on the
host. Method: a run whose state after each step is known, on a real device or on a fake one whose
streams are late, with versions looked at between steps.
"""

import time
import warnings

import pytest
import torch

import lightckpt
from gpu_run import Run, same, states_of, stored
from lightckpt.doctor import diagnose
from lightckpt.errors import CheckpointWarning
from ways import WAYS

SETTLED = 8  # steps after which every layer streams lazily and only the rotation is summed


def test_on_tmpfs_copy_engines_reach_the_store(platform, path):
    """All that needs it skips where they do not; so here it is said."""
    diagnosis = diagnose(path.parent, measure=False)
    answer = diagnosis.snapshots["direct"]
    if "attribute" in answer:
        pytest.skip(f"this GPU reaches no memory of the host: {answer}")
    assert diagnosis.filesystem == "tmpfs"
    assert answer.startswith("yes"), answer


@pytest.mark.parametrize("staging", [1, 128 << 20], ids=["small_ring", "large_ring"])
@pytest.mark.parametrize("mode", ["overlap", "stop"])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_each_version_is_of_its_boundary(platform, path, way, mode, staging):
    expected = states_of(platform, 14)
    run = Run(platform, path, snapshot=way, mode=mode, staging=staging)
    for step in range(1, 13):
        run.train(1)
        if step % 3 == 0:
            assert run.checkpointer.wait() == step
            found, state = stored(path)
            assert found == step
            assert same(state, expected[step])
    assert run.checkpointer.stats.dropped == 0
    assert run.checkpointer.why()["snapshot"]
    run.checkpointer.close()
    again = Run(platform, path, snapshot=way)
    assert again.checkpointer.restore() == 12
    assert same(again.state(), expected[12])
    assert same(again.train(2).state(), expected[14])
    again.checkpointer.close()


@pytest.mark.parametrize("way", ["direct", "device"], indirect=True)
def test_neither_boundary_nor_guard_waits_for_the_device(platform, path, way):
    expected = states_of(platform, SETTLED + 1)
    run = Run(platform, path, snapshot=way, timeout=30)
    run.train(SETTLED - 1)
    run.checkpointer.wait()
    with platform.held_up():
        run.train(1)  # its boundary is queued behind work that has not begun
        run.model()
        run.optimizer.step()  # and so is the next update, behind the copy
    run.checkpointer.wait()
    step, state = stored(path)
    assert step == SETTLED
    assert same(state, expected[SETTLED])
    assert same(run.state(), expected[SETTLED + 1])
    run.checkpointer.close()


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("way", ["direct", "host", "device"], indirect=True)
def test_an_edit_before_the_update_costs_its_version_and_no_other(platform, path, way, counted):
    run = Run(platform, path, snapshot=way, on_error="warn")
    run.train(4)
    edited = run.model.p4

    def edit(step):
        # A copy that it overtook would have the edited bytes, and nothing could tell.
        deadline = time.monotonic() + 60
        while (flight := run.checkpointer._driver.flight) and not flight.copied():
            assert time.monotonic() < deadline
        platform.add(edited, 1, counted=counted)

    with pytest.warns(CheckpointWarning, match="model/p4 changed while it was being copied"):
        run.train(1, before_forward=edit)
    assert run.checkpointer.stats.dropped == 1
    [why] = run.checkpointer.why()["volatile"]
    assert "p4" in why
    run.train(3, before_forward=edit)  # it is copied at the boundary now
    expected = run.state()
    assert run.checkpointer.wait() == 8
    assert same(stored(path)[1], expected)
    assert run.checkpointer.stats.dropped == 1
    run.checkpointer.close()


def test_updates_in_a_graph_are_copied_at_boundaries(platform, path, direct):
    run = Run(platform, path, snapshot=direct, on_error="warn")
    run.train(SETTLED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # of the version in flight
        with platform.capture() as graph:
            run.optimizer.step()
    for _ in range(3):
        platform.replay(graph)
        for state in run.optimizer.state.values():
            state["step"] += 1
        ticket = run.checkpointer.mark()
        assert ticket.skipped == ""
        expected = run.state()
        run.checkpointer.wait()
        assert same(stored(path)[1], expected)
    run.checkpointer.close()


def test_a_graph_from_before_there_was_a_checkpointer_makes_versions(platform, path):
    run = Run(platform)
    run.train(2)
    with platform.capture() as graph:
        run.optimizer.step()
    with lightckpt.Checkpointer(
        path, model=run.model, optimizer=run.optimizer, media="tmpfs", on_error="raise"
    ) as checkpointer:
        for step in range(1, 4):
            platform.replay(graph)
            ticket = checkpointer.mark()
            assert ticket.skipped == ""
            expected = run.state()
            assert checkpointer.wait() == step
            assert same(stored(path)[1], expected)


def test_work_may_go_on_on_another_stream(platform, path, direct):
    expected = states_of(platform, SETTLED + 3)
    run = Run(platform, path, snapshot=direct)
    run.train(SETTLED)
    platform.other_stream()
    run.train(3)
    run.checkpointer.wait()
    assert same(stored(path)[1], expected[SETTLED + 3])
    run.checkpointer.close()


def test_a_version_loads_where_there_is_no_gpu(platform, path):
    run = Run(platform, path)
    run.train(3)
    expected = run.state()
    run.checkpointer.close()
    _, state = stored(path)
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    assert same(state, expected)


def test_state_of_a_fresh_run_is_made_on_its_device(platform, path):
    if not platform.real:
        pytest.skip("torch itself must know the device")
    made = []
    for device in ("cuda", "cuda", "cpu"):
        model = torch.nn.Linear(30, 20).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
            if checkpointer.restore() == 0:
                for _ in range(3):
                    model(torch.ones(5, 30, device=device)).sum().backward()
                    optimizer.step()
                    checkpointer.mark()
        made.append((model, optimizer))
    (first, moments), *others = made
    for model, optimizer in others:
        for name, value in first.state_dict().items():
            assert torch.equal(value.cpu(), model.state_dict()[name].cpu())
        for parameter, mine in zip(model.parameters(), first.parameters(), strict=True):
            state, known = optimizer.state[parameter], moments.state[mine]
            assert state["exp_avg"].device == parameter.device
            assert state["step"].device.type == "cpu"
            assert all(torch.equal(state[key].cpu(), known[key].cpu()) for key in known)
