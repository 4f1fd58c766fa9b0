"""What a case must show when the real engine restores it, in one process.

A case (cases.py) is a small deterministic training program, built from a seed. Here:

    gold     build(0), trained to the end, never checkpointed: losses and a fingerprint per step
    victim   build(0), every step marked; trains two steps past N1, so that a version which only
             refers to live tensors is caught
    reborn   build(1), restored from the victim's store, trained to the end, every step marked
    heir     build(2), restored from what the reborn left

Losses, values, strides, aliases and flags of all of them equal the gold run's, bit for bit.
The seeds differ on purpose: whatever is not restored stays at another value.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import cases
import lightckpt
import more_cases
from cases import FP, Case, Run
from registry import MAY_DROP, PREPARE


@dataclass(frozen=True)
class Gold:
    """The uninterrupted run: ``losses[i]`` of step i, ``at[k]`` the state after k steps."""

    losses: list[bytes]
    at: list[FP]


def case_named(name: str) -> Case:
    return cases.CASES[name] if name in cases.CASES else more_cases.MORE[name]


def gold_of(case: Case) -> Gold:
    return _gold(case.name)


@functools.cache
def _gold(name: str) -> Gold:
    case = case_named(name)
    run = case.build(0)
    losses, at = [], [cases.fingerprint(run)]
    for i in range(total_steps(case)):
        losses.append(cases.bits(run.step(i)))
        at.append(cases.fingerprint(run))
    cases.close(run)
    return Gold(losses, at)


def total_steps(case: Case) -> int:
    return case.n1 + case.n2


class HiddenState:
    """A bare Python attribute, registered the way the documentation asks for."""

    def __init__(self, name: str, run: Run) -> None:
        self._get, self._set = run.hidden[name]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set(state["value"])


def attach(run: Run, path: Path, **options: Any) -> lightckpt.Checkpointer:
    """Make a Checkpointer of everything that the run's author would register."""
    covered = _names_in_extra_state(run)
    hidden = {f"hidden.{n}": HiddenState(n, run) for n in run.hidden if n not in covered}
    return lightckpt.Checkpointer(
        path,
        model=run.models,
        optimizer=run.optimizers,
        scheduler=run.schedulers or None,
        scaler=run.scalers or None,
        extra={**run.extras, **hidden} or None,
        tensors=run.tensors or None,
        generators=run.generators or None,
        rng=run.rng,
        grads=run.grads,
        **options,
    )


def _names_in_extra_state(run: Run) -> set[str]:
    """Names that a module's own get_extra_state() already hands to any checkpoint."""
    names: set[str] = set()
    for model in run.models.values():
        for module in model.modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                state = module.get_extra_state()
                names |= set(state) if isinstance(state, dict) else set()
    return names


def restore(case: Case, run: Run, ckpt: lightckpt.Checkpointer, step: int | None = None) -> int:
    if PREPARE in case.care and ckpt.steps():
        run.prepare_restore(max(ckpt.steps()) if step is None else step)
    return ckpt.restore(step=step)


@contextlib.contextmanager
def checkpoint_warnings_are_errors(case: Case) -> Iterator[None]:
    """No case may lose a version silently, or with a warning that nobody reads."""
    with warnings.catch_warnings():
        action = "ignore" if MAY_DROP in case.care else "error"
        warnings.simplefilter(action, category=lightckpt.CheckpointWarning)
        yield


def assert_same(expected: FP, found: FP, what: str) -> None:
    values, layouts = cases.diff(expected, found)
    if not values and not layouts:
        return
    lines = [f"{what}: {len(values)} values and {len(layouts)} layouts differ"]
    lines += [f"  {k}: {expected.val.get(k)} became {found.val.get(k)}" for k in values[:6]]
    lines += [f"  {k}: {expected.lay.get(k)} became {found.lay.get(k)}" for k in layouts[:6]]
    raise AssertionError("\n".join(lines))


def train(case: Case, run: Run, ckpt: lightckpt.Checkpointer, start: int, stop: int) -> None:
    """Train steps start to stop, each marked; its losses must be the gold run's."""
    for i in range(start, stop):
        loss = cases.bits(run.step(i))
        assert loss == gold_of(case).losses[i], f"{case.name}: the loss of step {i} differs"
        ckpt.mark()


@contextlib.contextmanager
def built(case: Case, seed: int) -> Iterator[Run]:
    run = case.build(seed)
    try:
        yield run
    finally:
        cases.close(run)


def check_in_one_process(case: Case, path: Path, *, at_latest: bool, mode: str) -> None:
    """Victim, reborn and heir, one after the other in this process.

    Args:
        at_latest: restore the victim's last step, instead of step N1 with two newer ones about.
        mode: how the engine copies; ``Checkpointer(mode=...)``.
    """
    gold, total = gold_of(case), total_steps(case)
    stop = case.n1 + 2
    with checkpoint_warnings_are_errors(case):
        with built(case, 0) as run, attach(run, path, keep=4, mode=mode) as ckpt:
            assert ckpt.restore() == 0
            train(case, run, ckpt, 0, stop)
            assert_same(gold.at[stop], cases.fingerprint(run), "the victim, merely observed")
        with built(case, 1) as run, attach(run, path, keep=4, mode=mode) as ckpt:
            wanted = stop if at_latest else case.n1
            start = restore(case, run, ckpt, None if at_latest else case.n1)
            assert start == wanted or (at_latest and MAY_DROP in case.care and start < wanted)
            assert_same(gold.at[start], cases.fingerprint(run), f"restored at step {start}")
            train(case, run, ckpt, start, total)
            assert_same(gold.at[total], cases.fingerprint(run), "the reborn at its end")
        with built(case, 2) as run, attach(run, path, keep=4, mode=mode) as ckpt:
            start = restore(case, run, ckpt)
            assert start == total
            assert_same(gold.at[total], cases.fingerprint(run), "the heir")
