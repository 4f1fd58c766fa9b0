"""Make the report: one HTML page and its pictures, from recorded lines and nothing else.

    python bench/report.py [--results FOLDER] [--output FOLDER] [--smoke]

Reads models, scale, gpu and referee.ndjson in FOLDER; of lines about the same thing the newest
counts. ``why.json`` there may say why a target is missed. What no line has is "not measured".
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jinja2

import plots
import record
import tables
from arguments import ROOT

HERE = Path(__file__).resolve().parent
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")
SMOKE_NOTE = "These are smoke runs of tiny models: they show that all runs, and measure nothing."


def circumstances(lines: list[dict[str, Any]]) -> list[str]:
    """Say on which machines, with which versions and when *lines* were recorded."""
    found = {}
    for line in lines:
        machine = line["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        gib = machine["memory_bytes"] / 2**30
        place = f"{machine['cpu']}, {machine['cores']} cores, {gib:.0f} GiB, {machine['system']}"
        found[f"{place}; {versions}"] = line["date"]
    return [f"{words} (newest line {date})" for words, date in found.items()]


def make(results: Path, output: Path, *, smoke: bool, command: str) -> Path:
    """Write the report into *output*; returns the page."""
    recorded = record.read(results / "models.ndjson")
    scale = [line for line in record.read(results / "scale.ndjson") if line["smoke"] == smoke]
    gpu = record.read(results / "gpu.ndjson")
    referee = record.read(results / "referee.ndjson")[-1:]
    why_file = results / "why.json"
    why = json.loads(why_file.read_text()) if why_file.is_file() else {}
    lines = tables.newest(recorded, smoke=smoke)
    output.mkdir(parents=True, exist_ok=True)
    blocks = [
        *_six(lines, output, why),
        *_others(lines),
        *map(_referee, referee),
        *_scale(scale, output),
    ]
    blocks.append(tables.gpu_table(gpu))
    probes = [line for line in gpu if line["bench"] == "gpu-probe"]
    blocks += [tables.probe_table(line) for line in probes[-1:]]
    text = (HERE / "report.html.jinja").read_text(encoding="utf-8")
    page = (
        jinja2.Environment(autoescape=True)
        .from_string(text)
        .render(
            blocks=blocks,
            command=command,
            circumstances=circumstances([*lines.values(), *scale, *gpu]),
            smoke_note=SMOKE_NOTE if smoke else "",
        )
    )
    path = output / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _six(lines: Any, output: Path, why: dict[str, str]) -> list[dict[str, Any]]:
    six = tables.six_lines(lines)
    shown = max(six.values(), key=lambda line: line["model"] == "gpt2", default=None)
    blocks = [
        tables.intervals(six) | _image(plots.intervals(six, output / "intervals.png")),
        {"title": "What a checkpoint in every step adds"}
        | _image(plots.overhead(six, output / "overhead.png")),
    ]
    if shown is not None:
        picture = _image(plots.timeline(shown, output / "timeline.png"))
        blocks.append({"title": f"Compute and persist: some steps of {shown['model']}"} | picture)
    blocks.append(tables.target_table(six, why))
    return blocks + [tables.model_table(line) for line in six.values()]


def _others(lines: Any) -> list[dict[str, Any]]:
    """The small model at several intervals, on other places, and killed."""
    others = {key: line for key, line in lines.items() if key[0] not in tables.SIX}
    blocks = [tables.model_table(line) for line in others.values()]
    folders = {key[2] for key in others}
    for folder in sorted(folders):
        same = [line for key, line in others.items() if key[2] == folder]
        if (table := tables.every_table(same)) is not None:
            blocks.append(table)
    killed = [line for line in lines.values()
              if any(entry.get("kills") for entry in line["strategies"].values())]  # fmt: skip
    return blocks + [tables.kill_table(line) for line in killed]


def _referee(line: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [
            found["strategy"],
            *(str(found["verdicts"].get(name, 0)) for name in VERDICTS),
            "yes" if found["sees_its_saves"] else "no: only the script's own result file",
        ]
        for found in line["judged"]
    ]
    note = (
        "ckpt-chaos kills a small training script at file events, or cuts the file in half, and "
        f"runs it again. Line: {tables.cite(line)}."
    )
    columns = ["strategy", *VERDICTS, "it sees the saves"]
    return {"title": "An outside referee", "note": note, "columns": columns, "rows": rows}


def _scale(lines: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    newest = {line["part"]: line for line in lines}
    picture = plots.scaling(list(newest.values()), output / "scale.png")
    rows = []
    for part in ("large", "billion"):
        line = newest.get(part)
        if line is None:
            rows.append([part, *[tables.NOT_MEASURED] * 5])
            continue
        save = line.get("save_s") or line.get("step_s")
        rows.append([
            part, f"{line['bytes'] / 1e9:.2f}", tables.with_spread(save),
            tables.with_spread(line["copy_s"]), f"{line['restore_s']:.2f}",
            "yes" if line["verified"] else "no",
        ])  # fmt: skip
    return [{
        "title": "Scale",
        "note": "large: one tensor of more than 4 GiB, saved alone. billion: 1 B parameters under "
        "plain SGD, a step with its version. Lines: "
        + ("; ".join(tables.cite(line) for line in newest.values()) or tables.NOT_MEASURED),
        "columns": ["part", "GB", "seconds", "plain copy, s", "restore, s", "same bytes"],
        "rows": rows,
    } | _image(picture)]  # fmt: skip


def _image(path: Path | None) -> dict[str, str]:
    return {"image": path.name} if path else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "report")
    parser.add_argument("--smoke", action="store_true", help="of smoke runs, to see that it works")
    options = parser.parse_args()
    command = " ".join(["python bench/report.py", *sys.argv[1:]])
    print(make(options.results, options.output, smoke=options.smoke, command=command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
