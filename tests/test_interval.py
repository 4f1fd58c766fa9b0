"""The policies are pure: given times in, decisions out. No clock is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightckpt.interval import (
    INTERVAL_MAX,
    PROBE_EVERY,
    WINDOW,
    IntervalTuner,
    ModeTrial,
    choose_interval,
)

seconds = st.floats(1e-6, 1e3)


@given(plain=seconds, added=seconds, budget=st.floats(1e-3, 1.0))
def test_the_interval_is_the_smallest_within_the_budget(plain, added, budget):
    choice = choose_interval([plain], [plain + added], budget)
    cost = (plain + added) - plain
    assert choice.interval == INTERVAL_MAX or cost / (choice.interval * plain) <= budget * 1.001
    if 1 < choice.interval < INTERVAL_MAX:
        assert cost / ((choice.interval - 1) * plain) > budget * 0.999


def test_a_free_checkpoint_is_made_every_iteration():
    assert choose_interval([1.0], [0.9], 0.05).interval == 1


def test_nothing_measured_means_every_iteration_and_says_so():
    choice = choose_interval([], [1.0], 0.05)
    assert (choice.interval, choice.why) == (1, "not measured yet")


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(ValueError, match="overhead"):
        choose_interval([1.0], [1.0], budget)


def simulate(tuner, iterations, plain, cost):
    """Run *iterations* whose checkpoints cost *cost* more; return how many made a version."""
    versions, due = 0, False
    for _ in range(iterations):
        tuner.record(plain + (cost if due else 0), with_version=due)
        due = tuner.is_due()
        versions += due
    return versions


def test_the_tuner_adjusts_both_ways():
    tuner = IntervalTuner(budget=0.05)
    simulate(tuner, 200, plain=1.0, cost=0.5)
    assert tuner.choice.interval == 10
    simulate(tuner, 600, plain=1.0, cost=0.01)
    assert tuner.choice.interval == 1
    simulate(tuner, 40 * PROBE_EVERY, plain=1.0, cost=0.2)
    assert tuner.choice.interval == 4


def test_at_an_interval_of_one_a_boundary_in_many_is_left_out_to_measure():
    tuner = IntervalTuner(budget=0.5)
    simulate(tuner, 40, plain=1.0, cost=0.01)
    versions = simulate(tuner, 10 * PROBE_EVERY, plain=1.0, cost=0.01)
    assert versions == 10 * PROBE_EVERY - 10
    assert len(tuner.plain) <= WINDOW


@pytest.mark.parametrize(("overlap", "stop", "best"), [(1.0, 1.1, "overlap"), (1.2, 1.1, "stop")])
def test_the_trial_takes_turns_and_picks_the_quicker_mode(overlap, stop, best):
    trial = ModeTrial()
    seen = []
    while not trial.decided:
        mode = trial.mode()
        seen.append(mode)
        trial.record(mode, {"overlap": overlap, "stop": stop}[mode])
    assert trial.mode() == best
    assert seen[:4] == ["overlap"] * 4
    assert seen.count("overlap") == seen.count("stop")
    assert "ms" in trial.why
