"""The demo's results, as tables for people and as JSON for programs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .options import Options
from .results import Cost, Identity, Kill, is_noisy

NAMES = {
    "plain": "none",
    "lightckpt": "lightckpt, overlap",
    "torch.save": "torch.save",
}


@dataclass(frozen=True)
class Results:
    """All that the demo found; ``persisted``: (bytes, versions) of the killed run."""

    parameters: int
    kills: list[Kill]
    costs: dict[str, Cost]
    identity: Identity
    persisted: tuple[int, int]
    picture: Path
    elapsed_s: float

    def failures(self, options: Options) -> list[str]:
        """Return what did not hold of that which the demo is there to show."""
        failures: list[str] = []
        if options.kills and not self.kills:
            failures.append("the trainer was not killed")
        if any(kill.steps_lost > 1 for kill in self.kills):
            failures.append("a kill lost more than the step in flight")
        failures += [f"{part} differ" for part, same in self.identity.parts.items() if not same]
        equal, compared = self.identity.losses
        if equal != compared:
            failures.append(f"{compared - equal} of {compared} losses differ")
        if self.identity.steps_missing:
            failures.append(f"{self.identity.steps_missing} steps were never reported")
        if not failures and not self.identity.holds:
            failures.append("nothing was compared")
        return failures


def as_json(results: Results, options: Options) -> dict[str, Any]:
    """Return the results as JSON's own types; seconds and bytes, as the names say."""
    failures = results.failures(options)
    return {
        "ok": not failures,
        "failures": failures,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
        "parameters": results.parameters,
        "kills": [asdict(kill) for kill in results.kills],
        "steps_lost_max": max((kill.steps_lost for kill in results.kills), default=0),
        "costs": {method: asdict(cost) for method, cost in results.costs.items()},
        "noisy": is_noisy(results.costs),
        "identical": {**results.identity.parts, "losses": list(results.identity.losses)},
        "sha256": results.identity.digests,
        "persisted_bytes": results.persisted[0],
        "persisted_versions": results.persisted[1],
        "picture": str(results.picture),
        "elapsed_s": results.elapsed_s,
    }


def show(console: Console, results: Results, options: Options) -> None:
    """Print the tables and the verdict."""
    console.print(_kill_table(results.kills))
    console.print(_cost_table(results.costs))
    if is_noisy(results.costs):
        console.print(
            "Steps without checkpoints vary by more than a quarter of their time: this machine is "
            "busy, and what a checkpoint adds is lost in that. Measure on a quieter one.",
            style="yellow",
        )
    console.print(_identity_table(results.identity))
    size_bytes, versions = results.persisted
    console.print(
        f"Persisted by the killed run: {size_bytes / 1e9:.2f} GB in {versions} versions. "
        f"Picture: {results.picture}",
        soft_wrap=True,
    )
    failures = results.failures(options)
    if failures:
        console.print(f"[bold red]FAILED[/]: {'; '.join(failures)}.", soft_wrap=True)
        return
    lost = sum(kill.steps_lost for kill in results.kills)
    console.print(
        f"[bold green]PASSED[/]: {len(results.kills)} kills, finished steps lost: {lost} "
        f"in all, at most one each; same bits as the uninterrupted run. {results.elapsed_s:.0f} s.",
        soft_wrap=True,
    )


def _table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table that fits 80 columns of text."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _kill_table(kills: list[Kill]) -> Table:
    table = _table(
        "Kills: SIGKILL at a random moment",
        "kill",
        "finished\nbefore it",
        "resumed\nat step",
        "steps\nlost",
        "work\nlost",
        "restore()",
        "start to\nrestore()",
        "start to\nfirst step",
    )
    for number, kill in enumerate(kills, start=1):
        table.add_row(
            str(number),
            str(kill.reported_step),
            str(kill.resumed_step),
            str(kill.steps_lost),
            f"{kill.work_lost_s:.2f} s",
            f"{kill.restore_s * 1e3:.0f} ms",
            f"{kill.build_s:.2f} s",
            f"{kill.resume_s:.2f} s",
        )
    return table


def _cost_table(costs: dict[str, Cost]) -> Table:
    table = _table(
        "A step in ms, alternating blocks: without a checkpoint, and with one each",
        "checkpoint",
        "step,\nmedian",
        "quartiles",
        "added,\nmedian",
        "range",
        "added,\n%",
        "n",
    )
    plain_s = costs["plain"].median_s
    for method, cost in costs.items():
        extra = ["", "", ""]
        if method != "plain":
            added, least, most = (_milliseconds(value, "+") for value in cost.added_s)
            extra = [added, f"{least} to {most}", f"{cost.added_s[0] / plain_s * 100:+.1f}"]
        low, high = (_milliseconds(value) for value in cost.quartiles_s)
        row = [NAMES[method], _milliseconds(cost.median_s), f"{low} to {high}", *extra]
        table.add_row(*row, str(cost.steps))
    return table


def _identity_table(identity: Identity) -> Table:
    table = _table("Compared with the first run", "part", "identical", "sha256, begins")
    for part, same in identity.parts.items():
        table.add_row(part, _mark(same), identity.digests[part][:16])
    equal, compared = identity.losses
    table.add_row("losses", _mark(equal == compared), f"{equal} of {compared}")
    return table


def _milliseconds(seconds: float, sign: str = "") -> str:
    value = seconds * 1e3
    return format(value, f"{sign}.1f" if abs(value) < 100 else f"{sign}.0f")


def _mark(same: bool) -> str:
    return "[green]yes[/]" if same else "[bold red]NO[/]"
