"""Goal: the 32 cases of public bug reports are restored bit for bit. Method: see harness.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import cases
from cases import CASES
from harness import assert_same, attach, built, check_in_one_process, gold_of, train

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", CASES)
def test_an_older_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(CASES[name], store, at_latest=False, mode="overlap")


@pytest.mark.parametrize("name", CASES)
def test_the_latest_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(CASES[name], store, at_latest=True, mode="stop")


def test_without_gradients_a_window_of_accumulation_is_never_cut(store: Path) -> None:
    """A version inside a window could not be exact, so there is none; the window starts over."""
    case = CASES["grad_accumulation_mid"]  # an update after every fourth step
    gold = gold_of(case)
    with built(case, 0) as run:
        run.grads = False
        with attach(run, store, keep=4) as ckpt:
            train(case, run, ckpt, 0, 7)
    with built(case, 1) as run:
        run.grads = False
        with attach(run, store, keep=4) as ckpt:
            assert set(ckpt.steps()) == {4}
            assert ckpt.restore() == 4
            run.grads = True  # in the fingerprint: at the update they are None
            assert_same(gold.at[4], cases.fingerprint(run), "restored at step 4")
            train(case, run, ckpt, 4, 12)
            assert_same(gold.at[12], cases.fingerprint(run), "the reborn at its end")
