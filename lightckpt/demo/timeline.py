"""The picture: when the trainer computed, when bytes moved, and when versions became durable.

Three parts, from the whole to the detail: the killed run, step by step; some steps of the measured
run, with the copies that run beside them; and one boundary between two steps, enlarged.
All times are CLOCK_MONOTONIC, so that the trainer's and the core's can be drawn on one axis.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import Life

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[float, float]

FORWARD, UPDATE, STALL, GUARD = "#9ecae1", "#2171b5", "#d7301f", "#fd8d3c"
VERSIONS = ("#41ab5d", "#807dba")
COMMIT, GREY, INK = "#252525", "#e0e0e0", "#333333"
RUN_NAMES = ("process start, imports, model", "open, restore()", "step finished", "SIGKILL")
LANE = 0.8
# Lanes, from the bottom: their middles and names.
COMMIT_LANE, COPY_LANE, TRAIN_LANE = 0.0, 1.0, 2.0


def draw(path: Path, lives: list[Life], timeline: dict[str, Any], *, total_steps: int) -> None:
    """Draw the killed run's *lives* and the *timeline* report of the measured one to *path*."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, (run, steps, detail) = pyplot.subplots(
            3, 1, figsize=(13, 9.5), height_ratios=(1.1, 1, 1), layout="constrained"
        )
        _draw_run(run, lives, total_steps)
        phases: list[tuple[int, int, int]] = timeline["phases"]
        versions: list[dict[str, Any]] = timeline["versions"]
        origin_ns = phases[0][0]
        # The first step of the block has nothing beside it.
        window = (_ms(phases[0][1], origin_ns), _ms(versions[-1]["boundary_ns"][1], origin_ns))
        zoom = _boundary_window(phases, versions, origin_ns)
        for axes, limits in ((steps, window), (detail, zoom)):
            _draw_lanes(axes, phases, versions, origin_ns, limits)
        steps.axvspan(*zoom, color="#fff3c4", zorder=0)
        detail.set_facecolor("#fffbea")
        steps.set_title("Some steps of the measured run: version k is copied while step k+1 runs")
        detail.set_title("One boundary, enlarged")
        detail.set_xlabel("milliseconds")
        _legend(steps)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _ms(at_ns: int, origin_ns: int) -> float:
    return (at_ns - origin_ns) / 1e6


def _span(pair: Any, origin_ns: int) -> Span | None:
    """Return the interval *pair* in milliseconds from the origin, or None if it never was."""
    if not pair or not pair[1]:
        return None
    return _ms(pair[0], origin_ns), _ms(pair[1], origin_ns)


def _draw_run(axes: "Axes", lives: list[Life], total_steps: int) -> None:
    origin_ns = lives[0].started_ns
    for number, life in enumerate(lives):
        # A legend takes one of each kind.
        names = RUN_NAMES if number == 0 else (None,) * len(RUN_NAMES)
        started, ready, restored = (
            (at_ns - origin_ns) / 1e9
            for at_ns in (life.started_ns, life.ready_ns, life.restore_ns[1])
        )
        axes.axvspan(started, ready, color=GREY, label=names[0])
        axes.axvspan(ready, restored, color=VERSIONS[0], label=names[1])
        at = [restored, *((report.at_ns - origin_ns) / 1e9 for report in life.finished)]
        step = [life.resumed_step, *(report.step for report in life.finished)]
        axes.step(at, step, where="post", color=UPDATE, linewidth=1.4)
        axes.plot(at[1:], step[1:], ".", color=UPDATE, markersize=5, label=names[2])
        if number:
            _note(axes, f"resumed at {step[0]}", (at[0], step[0]), (5, -11))
        if life.killed_ns is not None:
            killed = (life.killed_ns - origin_ns) / 1e9
            axes.plot([at[-1], killed], [step[-1]] * 2, color=UPDATE, linewidth=1.4)
            axes.axvline(killed, color=STALL, linewidth=1, linestyle=":")
            axes.plot([killed], [step[-1]], "X", color=STALL, markersize=9, label=names[3])
    axes.set_ylim(-0.06 * total_steps, 1.06 * total_steps)
    axes.set_xlim(0, axes.dataLim.x1 * 1.02)
    axes.set_ylabel("steps done")
    axes.set_xlabel("seconds")
    axes.set_title("The run that was killed")
    axes.legend(loc="upper left", facecolor="white", framealpha=1.0, edgecolor="white")


def _boundary_window(
    phases: list[tuple[int, int, int]], versions: list[dict[str, Any]], origin_ns: int
) -> Span:
    """Return the limits of one boundary: from the update before it to the end of its copies."""
    version = versions[max(0, len(versions) - 3)]
    boundary = version["boundary_ns"]
    backward_ns = max((p[1] for p in phases if p[2] <= boundary[0]), default=boundary[0])
    ends = [boundary[1], *(end for _start, end, _size in version["copies"])]
    begin, end = _ms(backward_ns, origin_ns), _ms(max(ends), origin_ns)
    margin = 0.08 * (end - begin)
    return begin - margin, end + margin


def _draw_lanes(
    axes: "Axes",
    phases: list[tuple[int, int, int]],
    versions: list[dict[str, Any]],
    origin_ns: int,
    limits: Span,
) -> None:
    first_step = versions[0]["step"]
    for index, phase in enumerate(phases):
        _draw_phase(axes, phase, versions, origin_ns)
        low, high = (
            max(_ms(phase[0], origin_ns), limits[0]),
            min(_ms(phase[1], origin_ns), limits[1]),
        )
        if high - low > 0.05 * (limits[1] - limits[0]):
            at = ((low + high) / 2, TRAIN_LANE)
            _note(axes, f"step {first_step + index}", at, (0, 0), centre=True)
    for index, version in enumerate(versions):
        _draw_version(axes, version, VERSIONS[index % 2], origin_ns, limits)
    axes.set_xlim(*limits)
    axes.set_ylim(-0.6, 2.6)
    axes.set_yticks([COMMIT_LANE, COPY_LANE, TRAIN_LANE], ["commit", "copy to media", "training"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds")


def _draw_phase(
    axes: "Axes", phase: tuple[int, int, int], versions: list[dict[str, Any]], origin_ns: int
) -> None:
    begin, backward, end = (_ms(at_ns, origin_ns) for at_ns in phase)
    _bar(axes, (begin, backward), TRAIN_LANE, FORWARD)
    _bar(axes, (backward, end), TRAIN_LANE, UPDATE)
    for version in versions:
        for wait in version["guard_ns"]:
            guard = _span(wait, origin_ns)
            if guard and backward <= guard[0] <= end:
                _bar(axes, guard, TRAIN_LANE, GUARD)


def _draw_version(
    axes: "Axes", version: dict[str, Any], color: str, origin_ns: int, limits: Span
) -> None:
    # Waiting for a version is part of the next boundary, and drawn as such.
    for wait in (version["boundary_ns"], version["landing_ns"]):
        if stall := _span(wait, origin_ns):
            _bar(axes, stall, TRAIN_LANE, STALL)
    spans = sorted(
        (_ms(start, origin_ns), _ms(end, origin_ns)) for start, end, _size in version["copies"]
    )
    busy_until: list[float] = []
    rows = [_first_free(busy_until, span) for span in spans]
    height = LANE / max(1, len(busy_until))
    for row, span in zip(rows, spans, strict=True):
        _bar(axes, span, COPY_LANE + LANE / 2 - height * (row + 0.5), color, height=height)
    if spans:
        megabytes = sum(size for _start, _end, size in version["copies"]) / 1e6
        at = max(end for _start, end in spans)
        if limits[0] < at < limits[1]:
            label = f"version {version['step']}\n{megabytes:.3g} MB"
            _note(axes, label, (at, COPY_LANE), (6, 0), clip=True)
    if commit := _span(version["commit_ns"], origin_ns):
        _bar(axes, commit, COMMIT_LANE, color)
        axes.plot([commit[1]], [COMMIT_LANE], "D", color=color, markersize=6,
                  markeredgecolor=COMMIT, zorder=4)  # fmt: skip
        if limits[0] < commit[1] < limits[1]:
            label = f"version {version['step']}\ndurable"
            _note(axes, label, (commit[1], COMMIT_LANE), (8, 0), clip=True)


def _first_free(busy_until: list[float], span: Span) -> int:
    """Return the first row that is free when *span* begins, and take it until the end."""
    for row, until in enumerate(busy_until):
        if until <= span[0]:
            busy_until[row] = span[1]
            return row
    busy_until.append(span[1])
    return len(busy_until) - 1


def _bar(axes: "Axes", span: Span, middle: float, color: str, *, height: float = LANE) -> None:
    axes.broken_barh(
        [(span[0], span[1] - span[0])],
        (middle - height / 2, height),
        facecolor=color,
        edgecolor=color,
        linewidth=0.2,
        zorder=2,
    )


def _note(
    axes: "Axes", text: str, at: Span, offset: Span, *, clip: bool = False, centre: bool = False
) -> None:
    """Write *text* at the point *at*, shifted by *offset* in points."""
    note = axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        color=INK,
        fontsize=8,
        ha="center" if centre else "left",
        va="center",
        zorder=5,
    )
    note.set_clip_on(clip)


def _legend(axes: "Axes") -> None:
    from matplotlib.patches import Patch

    names = {
        "forward and backward": FORWARD,
        "optimizer's update": UPDATE,
        "guard: waiting for the copy": GUARD,
        "boundary: training waits": STALL,
        "copies of a version, by batch": VERSIONS[0],
        "the next version": VERSIONS[1],
    }
    handles = [Patch(facecolor=color, label=name) for name, color in names.items()]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, -0.42), ncols=6,
                frameon=False)  # fmt: skip
