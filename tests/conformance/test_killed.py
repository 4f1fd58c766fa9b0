"""Goal: whenever the trainer is killed, the 32 cases go on bit for bit. Method: see lives.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import CASES
from lives import check_killed
from zygote import FreshProcesses, Zygote

pytestmark = [pytest.mark.conformance, pytest.mark.kill]

# Where hash seeds, addresses, imports or the process's own generators could matter.
IN_FRESH_PROCESSES = [
    "control_mlp_adamw",
    "global_opt_state",
    "dropout_all_rngs",
    "loader_mid_epoch",
]


@pytest.mark.parametrize("name", CASES)
def test_killed_trainers_go_on(name: str, store: Path, zygote: Zygote, seed: int) -> None:
    check_killed(CASES[name], store, zygote, seed, kills=("early", "late", "outside"))


@pytest.mark.parametrize("name", IN_FRESH_PROCESSES)
def test_a_fresh_process_goes_on(
    name: str, store: Path, zygote: Zygote, fresh_processes: FreshProcesses, seed: int
) -> None:
    check_killed(CASES[name], store, zygote, seed, kills=("late",), last=fresh_processes)
