"""Pictures of the report, drawn from recorded lines: PNG files, one function each.

Each returns the file it wrote, or None where the lines have nothing to draw.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import published
import tables

OURS, PEERS, LIGHTCHECK = "#2e7d32", "#8d99ae", "#c77d28"
COMPUTE, UPDATE, WAIT, PERSIST = "#9ecae1", "#2171b5", "#d7301f", "#41ab5d"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
Line = dict[str, Any]


def _colour(name: str) -> str:
    return OURS if name.startswith("lightckpt") else PEERS


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def overhead(lines: dict[str, Line], path: Path) -> Path | None:
    """Bars of what each strategy adds to a step, a panel per model."""
    if not lines:
        return None
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(5 * columns, 3.8 * rows), layout="constrained", squeeze=False
        )
        for at, (model, line) in zip(axes.flat, lines.items(), strict=False):
            found = {
                name: entry["figures"]["added_percent"]
                for name, entry in tables.measured(line).items()
            }
            names = sorted(found, key=lambda name, found=found: found[name]["median"], reverse=True)
            middles = [found[name]["median"] for name in names]
            errors = [
                [max(0, found[n]["median"] - found[n]["p10"]) for n in names],
                [max(0, found[n]["p90"] - found[n]["median"]) for n in names],
            ]
            at.barh(names, middles, xerr=errors, color=[_colour(n) for n in names],
                    error_kw={"elinewidth": 0.8, "ecolor": "#444"})  # fmt: skip
            at.axvline(5, color="#d7301f", linewidth=0.8, linestyle="--")
            at.axvline(0, color="#222", linewidth=0.8)
            step = line["plain_step_s"]["median"]
            size = line["parameters"]["state_bytes"] / 1e6
            at.set_title(f"{model}: {size:.0f} MB, plain step {step:.2f} s")
            at.set_xlabel("added to a step, % (dashed: 5)")
        for at in list(axes.flat)[len(lines) :]:
            at.set_axis_off()
        return _save(figure, path)


def intervals(lines: dict[str, Line], path: Path) -> Path | None:
    """The interval table as points: LightCheck's and ours, on a logarithmic axis."""
    if not lines:
        return None
    with matplotlib.rc_context(STYLE):
        figure, at = pyplot.subplots(figsize=(12, 4.2), layout="constrained")
        models = list(tables.SIX)
        for x, model in enumerate(models):
            theirs = published.INTERVALS[model]
            for name, marker in (("D", "o"), ("CheckFreq", "^"), ("torch.save", "s")):
                at.plot(x - 0.22, theirs[name], marker, color=LIGHTCHECK, markersize=6)
            if model not in lines:
                continue
            entries = tables.measured(lines[model])
            for name, marker in (
                ("lightckpt", "o"), ("checkfreq-style", "^"), ("torch.save", "s"),
            ):  # fmt: skip
                steps = entries.get(name, {}).get("figures", {}).get("interval")
                if steps:
                    low, high = steps["low"], steps["high"]
                    at.plot([x + 0.22] * 2, [low, high], color=_colour(name), linewidth=1)
                    at.plot(x + 0.22, high, marker, color=_colour(name), markersize=6)
        at.set_yscale("log")
        at.set_xticks(range(len(models)), models)
        at.set_ylabel("steps between checkpoints at <= 5 %")
        shapes = [
            Line2D([], [], marker=marker, linestyle="", color="#222", label=label)
            for marker, label in (
                ("o", "LightCheck-D, lightckpt"), ("^", "CheckFreq"), ("s", "torch.save"),
            )
        ]  # fmt: skip
        colours = [
            Patch(color=LIGHTCHECK, label="published, V100 and Optane"),
            Patch(color=OURS, label="lightckpt here"),
            Patch(color=PEERS, label="others here (line: least to most)"),
        ]
        handles = shapes + colours
        figure.legend(handles=handles, ncols=6, frameon=False, loc="outside upper center")
        return _save(figure, path)


def timeline(line: Line, path: Path) -> Path | None:
    """Steps of a few strategies on one axis: compute, waiting, and what is persisted beside."""
    wanted = ["lightckpt", "lightckpt-stop", tables.best_peer(line), "torch.save-safe"]
    entries = tables.measured(line)
    shown = [
        (name, entries[name]["blocks"][0]["timeline"])
        for name in dict.fromkeys(wanted)
        if name in entries and "timeline" in entries[name]["blocks"][0]
    ]
    if not shown:
        return None
    with matplotlib.rc_context(STYLE):
        figure, at = pyplot.subplots(figsize=(12, 1.1 + 0.9 * len(shown)), layout="constrained")
        for row, (_, found) in enumerate(shown):
            for begin, backward, waited, updated, end in found["steps"]:
                spans = (
                    (begin, backward, COMPUTE), (backward, waited, WAIT),
                    (waited, updated, UPDATE), (updated, end, WAIT),
                )  # fmt: skip
                for low, high, colour in spans:
                    at.barh(row - 0.18, high - low, left=low, height=0.34, color=colour)
            for low, high in found["persists"]:
                at.barh(row + 0.2, high - low, left=low, height=0.3, color=PERSIST)
        at.set_yticks(range(len(shown)), [name for name, _ in shown])
        at.invert_yaxis()
        at.set_xlim(left=0)
        at.set_xlabel("milliseconds")
        labels = {
            COMPUTE: "forward, backward", UPDATE: "update (with its guard)", WAIT: "training waits",
            PERSIST: "copied or written beside",
        }  # fmt: skip
        handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
        figure.legend(handles=handles, ncols=4, frameon=False, loc="outside upper center")
        return _save(figure, path)


def scaling(lines: list[Line], path: Path) -> Path | None:
    """How a version's time grows with the bytes and with the number of tensors."""
    parts = {line["part"]: line for line in lines if line.get("points")}
    if not parts:
        return None
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
        for at, part, key, label in (
            (left, "bytes", "bytes", "bytes of state, in 16 tensors"),
            (right, "tensors", "tensors", "tensors, 64 MB altogether"),
        ):
            if part not in parts:
                at.set_axis_off()
                continue
            points = parts[part]["points"]
            x = [point[key] for point in points]
            for name, colour, words in (
                ("save_s", OURS, "a version, alone"), ("copy_s", "#444", "plain copy"),
            ):  # fmt: skip
                low, middle, high = (
                    [1e3 * point[name][which] for point in points]
                    for which in ("p10", "median", "p90")
                )
                at.plot(x, middle, marker="o", color=colour, label=words)
                at.fill_between(x, low, high, color=colour, alpha=0.15)
            at.set_xscale("log")
            at.set_yscale("log")
            at.set_xlabel(label)
            at.set_ylabel("milliseconds")
            at.legend(frameon=False)
        return _save(figure, path)
