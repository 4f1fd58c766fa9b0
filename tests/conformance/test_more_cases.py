"""Goal: our own set-ups are restored bit for bit, killed or not. Method: harness.py, lives.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import cases
from harness import built, check_in_one_process, gold_of
from lives import check_killed
from more_cases import MORE
from zygote import Zygote

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", MORE)
def test_a_case_can_fail(name: str) -> None:
    """It is deterministic, and another initialisation is another state: nothing restored shows."""
    case, gold = MORE[name], gold_of(MORE[name])
    with built(case, 0) as run:
        for i in range(case.n1):
            assert cases.bits(run.step(i)) == gold.losses[i]
        assert cases.diff(gold.at[case.n1], cases.fingerprint(run)) == ([], [])
    with built(case, 1) as run:
        values, _ = cases.diff(gold.at[case.n1], cases.fingerprint(run))
        assert values


@pytest.mark.parametrize("name", MORE)
def test_an_older_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(MORE[name], store, at_latest=False, mode="overlap")


@pytest.mark.parametrize("name", MORE)
def test_the_latest_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(MORE[name], store, at_latest=True, mode="stop")


@pytest.mark.kill
@pytest.mark.parametrize("name", MORE)
def test_killed_trainers_go_on(name: str, store: Path, zygote: Zygote, seed: int) -> None:
    check_killed(MORE[name], store, zygote, seed, kills=("early", "outside"))
