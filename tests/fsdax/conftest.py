"""What the tests of the virtual machine share: its lives, each booted once, and the figures."""

from __future__ import annotations

import pytest

import kit
import vm
from vm import of

FIGURES = pytest.StashKey[list[str]]()
# For a machine without KVM that shares its processors; a life takes half a minute where it is idle.
LIFE_SECONDS = 200
PLACES = ("ext4", "xfs", "virtio", "catalog", "devdax")
ACKNOWLEDGED_MIN = 2  # steps after a store has touched all its pages


def trained(records: list[vm.Record]) -> bool:
    """Tell whether each place has trained on for long enough, or has given up."""

    def through(place: str) -> bool:
        if of(records, place, "failed"):
            return True
        armed = {"place": place, "armed": True}
        after = records[records.index(armed) :] if armed in records else []
        return len(of(after, place, "acknowledged")) >= ACKNOWLEDGED_MIN

    return all(map(through, PLACES)) or ended(records)


def ended(records: list[vm.Record]) -> bool:
    return bool(of(records, "guest", "ended"))


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    try:
        made = kit.prepare()
    except kit.UnavailableError as reason:
        pytest.skip(f"no virtual machine: {reason}")
    machine = vm.Machine(made, tmp_path_factory.mktemp("machine"))
    yield machine
    machine.scrap()


@pytest.fixture(scope="session")
def lives(machine, request):
    """What was said in each life: ADR and a power cut, eADR and another one, ADR again."""
    said = {}
    lines = request.config.stash.setdefault(FIGURES, [])
    for name, persistence, until in (
        ("first", vm.ADR, trained),
        ("again", vm.EADR, trained),
        ("last", vm.ADR, ended),
    ):
        with machine.boot(name, persistence) as life:
            life.wait(until, LIFE_SECONDS)
        said[name] = life.records()
        counts = {place: len(of(said[name], place, "acknowledged")) for place in PLACES}
        steps = ", ".join(f"{count} at {place}" for place, count in counts.items() if count)
        lines.append(
            f"fsdax: life {name!r}, {persistence}, {life.accelerator}, {life.seconds:.0f} s; "
            f"acknowledged: {steps or 'nothing'}"
        )
    return said


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)
