"""Goal: the 32 cases of public bug reports are restored bit for bit. Method: see harness.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import CASES
from harness import check_in_one_process

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", CASES)
def test_an_older_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(CASES[name], store, at_latest=False, mode="overlap")


@pytest.mark.parametrize("name", CASES)
def test_the_latest_step_restored_is_that_step(name: str, store: Path) -> None:
    check_in_one_process(CASES[name], store, at_latest=True, mode="stop")
