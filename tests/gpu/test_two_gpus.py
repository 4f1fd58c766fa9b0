"""Runs on two GPUs. Goal: a version has what each of them had at its boundary, and the way out of
each is judged by its own bytes. Method: a run whose state is known, with parameters on both.
"""

import pytest

from gpu_run import Run, same, states_of, stored
from lightckpt import gpus
from ways import WAYS

pytestmark = pytest.mark.parametrize("platform", [2], indirect=True)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_each_version_is_of_its_boundary_on_both(platform, path, way):
    expected = states_of(platform, 9)
    run = Run(platform, path, devices=2, snapshot=way)
    for step in (4, 8):
        run.train(4)
        assert run.checkpointer.wait() == step
        assert same(stored(path)[1], expected[step])
    assert run.checkpointer.stats.dropped == 0
    run.checkpointer.close()
    for devices in (2, 1):
        again = Run(platform, path, devices=devices, snapshot=way, every=100)
        assert again.checkpointer.restore() == 8
        assert same(again.train(1).state(), expected[9])
        again.checkpointer.close()


def test_each_is_judged_by_its_own_bytes(platform, path):
    run = Run(platform, path, devices=2)
    run.train(4)
    run.checkpointer.wait()
    run.train(1)
    of_run = {0: 0, 1: 0, gpus.HOST: 0}
    for state in run.optimizer.state.values():
        of_run[gpus.ordinal_of(state["momentum"])] += 2 * state["momentum"].nbytes
    of_run[0] += run.model.seen.nbytes
    trials = run.checkpointer._driver.snapshots._trials
    assert {ordinal: trial.total for ordinal, trial in trials.items()} == {
        ordinal: of_run[ordinal] for ordinal in (0, 1)
    }
    assert len(run.checkpointer.why()["snapshot"]) == 2
    run.checkpointer.close()
