"""The strategies there are: which can run here, which are asked for, and the table of a line."""

from typing import Any

from rich.console import Console
from rich.table import Table

import ours
import peers
import strategies
import styles
from strategies import GROUP_MEDIA, GROUP_TABLE, Strategy, UnavailableError

ALL: tuple[type[Strategy], ...] = (
    *ours.STRATEGIES,
    *ours.GPU_STRATEGIES,
    strategies.TorchSave,
    strategies.TorchSaveSafe,
    strategies.Safetensors,
    *peers.STRATEGIES,
    *styles.STRATEGIES,
)
NAMES = [strategy.name for strategy in ALL]
# Other media than the one that all share are compared among themselves, where it is quick.
MEDIA_STATE_BYTES_MAX = 64 << 20
# All of them on all models would take more than an hour on two cores: of states above so many bytes
# the slowest are left out, unless they are asked for. Those that LightCheck compares stay.
LEFT_OUT = {
    128 << 20: ("torch.save-safe", "moonclip", "dcp-async-process"),
    1 << 30: ("dcp", "dcp-async-thread"),
    3 << 30: ("lightckpt-stop",),
}


def listing() -> list[tuple[str, str]]:
    """Return (name, why it cannot run here or "") of every strategy."""
    return [(strategy.name, _reason(strategy)) for strategy in ALL]


def by_name(name: str) -> type[Strategy]:
    """Return the strategy called *name*."""
    return next(strategy for strategy in ALL if strategy.name == name)


def _reason(strategy: type[Strategy]) -> str:
    try:
        strategy.check()
    except UnavailableError as reason:
        return str(reason)
    return ""


def choose(
    asked: tuple[str, ...], *, state_bytes: int
) -> tuple[dict[str, type[Strategy]], dict[str, str]]:
    """Return the strategies to run, by name, and why others that were asked for cannot.

    Args:
        asked: names and groups: "all", "table", "media" (those of a GPU are gpu.py's); without
            any, what fits *state_bytes*.

    Raises:
        SystemExit: a name that there is not.
    """
    groups = {"all": {GROUP_TABLE, GROUP_MEDIA}, "table": {GROUP_TABLE}, "media": {GROUP_MEDIA}}
    left_out: dict[str, str] = {}
    if not asked:
        asked = ("all",) if state_bytes <= MEDIA_STATE_BYTES_MAX else ("table",)
        left_out = {
            name: f"left out of states above {limit >> 20} MiB, for time"
            for limit, names in LEFT_OUT.items()
            for name in names
            if state_bytes > limit
        }
    unknown = set(asked) - set(NAMES) - set(groups) - {"none"}
    if unknown:
        raise SystemExit(f"bench: no strategy {sorted(unknown)}; there are {NAMES} and {[*groups]}")
    chosen, missing = {}, {}
    for strategy in ALL:
        if strategy.name in asked or any(strategy.group in groups.get(name, ()) for name in asked):
            if reason := left_out.get(strategy.name) or _reason(strategy):
                missing[strategy.name] = reason
            else:
                chosen[strategy.name] = strategy
    return chosen, missing


def show(console: Console, line: dict[str, Any]) -> None:
    """Print the figures of *line* as a table."""
    parameters = line["parameters"]
    console.print(
        f"{line['model']}: {parameters['state_bytes'] / 1e6:.0f} MB of state, plain step "
        f"{line['plain_step_s']['median']:.3f} s, copy {line['copy_s']['median']:.3f} s"
    )
    table = Table(box=None)
    for column in ("strategy", "added %", "of allowed", "stall / M", "copy / persist",
                   "copy / restore", "memory MB", "interval"):  # fmt: skip
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, entry in line["strategies"].items():
        if "figures" not in entry:
            table.add_row(name, "not run")
            continue
        found = entry["figures"]
        cells = [
            _cell(found[key], digits)
            for key, digits in (
                ("added_percent", 1), ("added_over_allowed", 2), ("stall_over_copy", 2),
                ("persist_over_copy", 2), ("restore_over_copy", 2),
            )
        ]  # fmt: skip
        memory = f"{found['extra_memory_bytes']['median'] / 1e6:.0f}"
        steps = found.get("interval")
        table.add_row(name, *cells, memory, f"{steps['low']} to {steps['high']}" if steps else "")
    console.print(table)
    for name, entry in line["strategies"].items():
        if "missing" in entry:
            console.print(f"not run: {name}: {entry['missing']}")


def _cell(figure: dict[str, float] | None, digits: int) -> str:
    if figure is None:
        return ""
    return f"{figure['median']:.{digits}f} ({figure['p10']:.{digits}f}, {figure['p90']:.{digits}f})"
