"""Tables of the report, as plain data from recorded lines: pure, tried in tests/test_bench.py.

Of lines about the same thing the newest counts; smoke runs count only where asked for. A cell is a
string; what was not measured says so, and is never a zero.
"""

from typing import Any

import figures
import published

NOT_MEASURED = "not measured"
SIX = tuple(published.INTERVALS)
Line = dict[str, Any]
Table = dict[str, Any]  # title, note, columns, rows


def newest(lines: list[Line], *, smoke: bool = False) -> dict[tuple[Any, ...], Line]:
    """Return the newest line of each (model, every, folder, device) in *lines*, oldest first."""
    found = {}
    for line in lines:
        if line["bench"] == "model" and line["smoke"] == smoke:
            facts = line["parameters"]
            found[line["model"], facts["every"], facts["folder"], facts["device"]] = line
    return found


def six_lines(lines: dict[tuple[Any, ...], Line], device: str = "cpu") -> dict[str, Line]:
    """Return, by model, the lines with a checkpoint in every step; in the order of LightCheck's."""
    found = {key[0]: line for key, line in lines.items() if key[1] == 1 and key[3] == device}
    return {model: found[model] for model in SIX if model in found}


def cite(line: Line) -> str:
    """Name *line* as documents do."""
    return f"{line['bench']} {line.get('model', line.get('part', ''))}, {line['date']}"


def number(value: float | None, digits: int = 3) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}g}"


def with_spread(figure: dict[str, Any] | None, scale: float = 1.0) -> str:
    """Return median and spread in words: ``1.2 (1.1 to 1.4)``; one value has no spread."""
    if figure is None:
        return NOT_MEASURED
    middle, low, high = (f"{figure[key] * scale:.3g}" for key in ("median", "p10", "p90"))
    return middle if figure["n"] == 1 else f"{middle} ({low} to {high})"


def measured(line: Line) -> dict[str, dict[str, Any]]:
    """Return the strategies of *line* that were measured."""
    return {name: entry for name, entry in line["strategies"].items() if entry.get("figures")}


def interval_words(entry: dict[str, Any] | None) -> str:
    steps = (entry or {}).get("figures", {}).get("interval")
    if not steps:
        return NOT_MEASURED
    low, high = steps["low"], steps["high"]
    return str(high) if low == high else f"{low} to {high}"


def best_peer(line: Line) -> str | None:
    """Return the peer that adds least to a step; what we wrote after papers is a peer as well."""
    peers = {
        name: entry["figures"]["added_s"]["median"]
        for name, entry in measured(line).items()
        if not name.startswith("lightckpt")
    }
    return min(peers, key=peers.__getitem__) if peers else None


def intervals(lines: dict[str, Line]) -> Table:
    """The table that LightCheck opens with, ours beside it."""
    mine = ("lightckpt", "lightckpt-stop", "checkfreq-style", "torch.save")
    rows = []
    for model in SIX:
        line = lines.get(model)
        entries = line["strategies"] if line else {}
        peer = best_peer(line) if line else None
        size = f"{line['parameters']['state_bytes'] / 1e6:.0f}" if line else NOT_MEASURED
        rows.append(
            [model, size, *(interval_words(entries.get(name)) for name in mine)]
            + [f"{peer}: {interval_words(entries[peer])}" if peer else NOT_MEASURED]
            + [str(published.INTERVALS[model][name]) for name in ("mb", *published.COLUMNS)]
        )
    return {
        "title": "Fewest steps between checkpoints that add at most 5 %",
        "note": (
            "Derived. The first number takes it that all but the waiting is hidden; the second "
            "that a checkpoint always costs what it did with one in every step. Columns marked LC "
            f"are LightCheck's. {published.CONDITIONS}"
        ),
        "columns": ["model", "MB", *mine, "best peer", "LC MB"]
        + [f"LC {name}" for name in published.COLUMNS],
        "rows": rows,
    }


def model_table(line: Line) -> Table:
    """All figures of one line, a row per strategy."""
    facts = line["parameters"]
    rows = []
    for name, entry in line["strategies"].items():
        if not entry.get("figures"):
            continue
        f = entry["figures"]
        rows.append([
            name,
            with_spread(f["added_percent"]),
            with_spread(f["added_s"], 1e3),
            with_spread(f["stall_s"], 1e3),
            with_spread(f["persist_bytes_s"], 1e-9),
            with_spread(f["persist_over_copy"]),
            with_spread(f["restore_over_copy"]),
            with_spread(f["extra_memory_bytes"], 1e-6),
            with_spread(f["media_bytes"], 1e-6),
            interval_words(entry),
            recovery_words(line, entry),
            "yes" if f["verified"] else NOT_MEASURED,
        ])  # fmt: skip
    copy = line["copy_s"]["median"]
    missing = [f"{n}: {e['missing']}" for n, e in line["strategies"].items() if "missing" in e]
    return {
        "title": f"{line['model']}, every {facts['every']} steps a checkpoint in {facts['folder']}",
        "note": (
            f"{facts['parameters']:,} parameters, {facts['optimizer']}, {facts['precision']}, "
            f"batch {facts['batch']} of {facts['size']}, {facts['input']}. State "
            f"{facts['state_bytes'] / 1e6:.0f} MB; plain step {with_spread(line['plain_step_s'])} "
            f"s; a plain copy of the state takes {with_spread(line['copy_s'], 1e3)} ms, which is "
            f"{facts['state_bytes'] / copy / 1e9:.2f} GB/s. Line: {cite(line)}, {line['commit']}."
        ),
        "columns": ["strategy", "added %", "added ms", "stall ms", "persist GB/s",
                    "copy / persist", "copy / restore", "memory MB", "files MB", "interval",
                    "recovery s", "same bytes"],
        "rows": rows,
        "missing": missing,
    }  # fmt: skip


def gpu_entries(lines: list[Line]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what *lines*, oldest first, have of each (model, strategy) on a GPU.

    A line is about steps, a recovery, or both; of each the newest counts.
    """
    steps: dict[tuple[str, str], dict[str, Any]] = {}
    recoveries: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["bench"] != "gpu":
            continue
        for name, entry in line["strategies"].items():
            key = line["model"], name
            if "missing" in entry or "added_percent" in entry:
                steps[key] = entry | {"plain_step_s": line.get("plain_step_s")}
            if "recovery_s" in entry:
                recoveries[key] = {"recovery_s": entry["recovery_s"]}
    return {key: entry | recoveries.get(key, {}) for key, entry in steps.items()}


def gpu_table(lines: list[Line]) -> Table:
    """All figures from a GPU, a row per model and strategy."""
    columns = ["model", "strategy", "plain step ms", "added %", "stall ms", "GB/s", "of the limit",
               "GPU busy %", "recovery s"]  # fmt: skip
    entries = gpu_entries(lines)
    rows = []
    for model in SIX:
        mine = {name: entry for (of, name), entry in entries.items() if of == model}
        for name, found in mine.items():
            plain = with_spread(found["plain_step_s"], 1e3)
            if "missing" in found:
                rows.append([model, name, plain, found["missing"], *[""] * 5])
                continue
            rows.append([
                model, name, plain, with_spread(found["added_percent"]),
                with_spread(found["stall_s"], 1e3), with_spread(found["bytes_s"], 1e-9),
                with_spread(found["of_limit"]), with_spread(found["gpu_percent"]),
                number(found.get("recovery_s")),
            ])  # fmt: skip
        if not mine:
            rows.append([model, *[NOT_MEASURED] * 8])
    return {"title": "On a GPU", "columns": columns, "rows": rows}


def probe_table(line: Line) -> Table:
    """What the probe of a GPU found, step by step."""
    found = line["findings"]
    rows = [
        [step["step"], step["outcome"], "; ".join(f"{k} {v}" for k, v in step["facts"].items())
         or step["words"]]
        for step in found["outcomes"]
    ]  # fmt: skip
    note = "; ".join(found["reasons"]) + f". Line: {cite(line)}."
    columns = ["step", "outcome", "found"]
    return {"title": f"The probe of {line['device']}", "note": note, "columns": columns,
            "rows": rows}  # fmt: skip


def recovery_seconds(line: Line, entry: dict[str, Any]) -> float | None:
    """Return imports and the rest, from the start of a process to its first step done."""
    parts = entry.get("recovery")
    if not parts or "import_s" not in line:
        return None
    rest = parts["start_and_build_s"] + parts["restore_s"] + parts["first_step_s"]
    return float(line["import_s"] + rest)


def recovery_words(line: Line, entry: dict[str, Any]) -> str:
    seconds = recovery_seconds(line, entry)
    if seconds is None:
        return NOT_MEASURED
    return f"{seconds:.1f}, of these restoring {entry['recovery']['restore_s']:.2f}"


def target_table(lines: dict[str, Line], why: dict[str, str]) -> Table:
    """Each target of each model, met or missed and by how much."""
    rows = []
    for model, line in lines.items():
        every = line["parameters"]["every"]
        ours = measured(line)
        for name in sorted({"lightckpt", "lightckpt-stop"} & ours.keys()):
            found = figures.targets(ours[name]["figures"], every=every)
            if name == "lightckpt-stop":  # training waits for the copy: that is what the mode is
                found = [one for one in found if one["name"] != "stall of M"]
            rows += [_target_row(f"{model}, {name}", one, why) for one in found]
        comparison = line["comparison"]
        if comparison.get("times_better") is not None:
            limit = figures.TIMES_BETTER_MIN
            value = comparison["times_better"]
            found = {"name": f"times less than {comparison['peer']}", "value": value,
                     "sign": ">=", "limit": limit, "met": value >= limit}  # fmt: skip
            rows.append(_target_row(f"{model}, {comparison['ours']}", found, why))
    return {
        "title": "Targets",
        "note": "T is the plain step, M the plain copy of the state. Medians are compared.",
        "columns": ["what", "figure", "value", "to reach", "met"],
        "rows": rows,
    }


def _target_row(what: str, found: dict[str, Any], why: dict[str, str]) -> list[str]:
    met = "yes"
    if not found["met"]:
        by = abs(found["value"] - found["limit"]) / found["limit"]
        reason = why.get(f"{what}: {found['name']}") or why.get(found["name"]) or "no reason given"
        met = f"missed by {100 * by:.0f} %: {reason}"
    return [what, found["name"], number(found["value"]), f"{found['sign']} {found['limit']}", met]


def kill_table(line: Line) -> Table:
    """What was found after kills, and the work they cost."""
    rows = []
    for name, entry in line["strategies"].items():
        found = entry.get("kills")
        if not found:
            continue
        lost = found["lost_steps"]
        rows.append([
            name, str(found["kills"]), *(str(found["outcomes"][kind]) for kind in OUTCOMES),
            f"{sum(lost) / len(lost):.2f} (at most {max(lost)})", str(found["lost_acknowledged"]),
            "; ".join(found["errors"]),
        ])  # fmt: skip
    return {
        "title": f"{line['model']}: killed at random moments of a save",
        "note": (
            "SIGKILL to the trainer and its children. new: the save that was hit loads; old: an "
            "earlier one; nothing: none loads, and a person has to clean up; mixture: a state that "
            f"never was. A lost step is one whose save had begun. Line: {cite(line)}."
        ),
        "columns": ["strategy", "kills", *OUTCOMES, "steps lost", "acknowledged ones lost",
                    "errors"],
        "rows": rows,
    }  # fmt: skip


OUTCOMES = ("new", "old", "nothing", "mixture")


def every_table(lines: list[Line]) -> Table | None:
    """The same model with checkpoints at several intervals."""
    if len(lines) < 2:
        return None
    lines = sorted(lines, key=lambda line: line["parameters"]["every"])
    names = list(dict.fromkeys(name for line in lines for name in measured(line)))
    rows = []
    for name in names:
        cells = [name]
        for line in lines:
            entry = measured(line).get(name)
            cells.append(with_spread(entry["figures"]["added_percent"]) if entry else NOT_MEASURED)
        step = lines[0]["plain_step_s"]["median"]
        cells += [f"{step * (line['parameters']['every'] / 2 + 0.5):.2f}" for line in lines]
        rows.append(cells)
    every = [line["parameters"]["every"] for line in lines]
    return {
        "title": f"{lines[0]['model']}: added percent, and work lost per failure",
        "note": "Work lost is derived: a failure hits the middle of an interval. Lines: "
        + "; ".join(cite(line) for line in lines),
        "columns": ["strategy"]
        + [f"every {n}: added %" for n in every]
        + [f"every {n}: seconds lost" for n in every],
        "rows": rows,
    }
