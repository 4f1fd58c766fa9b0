"""Figures from samples: pure functions, tried in tests/test_bench.py. No torch, no clock.

A *block* is some counted steps with one strategy, and the plain steps right before and after it,
which are its measure: on a machine that others use, only neighbours can be compared. All times are
seconds.

Derived figures are named so wherever they are shown:

    interval        the fewest steps between checkpoints at which they add at most 5 %. The most
                    that it may be (``high``) takes it that a checkpoint costs what it did when
                    there was one in each step, where asynchronous ones also wait for the one
                    before. The least (``low``) counts only what a save alone makes training wait,
                    and that one is done before the next begins.
    recovery        start of an interpreter and its imports, measured once a run, and the rest,
                    measured in a process that is forked with all imported.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

OVERHEAD_MAX = 0.05
ADDED_OF_COPY_MAX, ADDED_OF_STEP_MAX = 1.3, 0.01
STALL_OF_COPY_MAX = 0.15
COPY_RATE_MIN = 0.9
TIMES_BETTER_MIN = 3.0

Figure = dict[str, Any]


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which *fraction* of *values* lie, interpolated."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float]) -> Figure | None:
    """Return median, tenth and ninetieth percentile, and count; None for no values."""
    if not values:
        return None
    return {
        "median": median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "n": len(values),
    }


def plain_seconds(block: dict[str, Any]) -> float:
    """Return the plain step that *block* is compared with."""
    return median(block["plain_before"] + block["plain_after"])


def added_seconds(block: dict[str, Any], every: int) -> list[float]:
    """Return what checkpoints added to each step of *block*.

    At *every* above 1 most steps have none, so steps are taken together by as many, and what one
    of them got is their mean.
    """
    plain = plain_seconds(block)
    steps = block["steps"]
    groups = [steps[at : at + every] for at in range(0, len(steps) - every + 1, every)]
    return [sum(group) / every - plain for group in groups]


def interval(*, added: float, stall_alone: float, persist: float, step: float) -> dict[str, int]:
    """Return the derived interval, ``low`` and ``high``, of a checkpoint of these costs."""
    budget = OVERHEAD_MAX * step
    high = max(1, math.ceil(added / budget))
    low = max(1, math.ceil(stall_alone / budget), math.ceil(persist / step))
    return {"low": min(low, high), "high": high}


def allowed_seconds(*, copy: float, step: float) -> float:
    """Return what a checkpoint may add to a step: 1.3 M + 1 % of T."""
    return ADDED_OF_COPY_MAX * copy + ADDED_OF_STEP_MAX * step


def summarise(blocks: list[dict[str, Any]], *, every: int, state_bytes: int) -> dict[str, Any]:
    """Return the figures of one strategy from its *blocks*."""
    added, percent, stalls, over_allowed, stalls_over_copy = [], [], [], [], []
    for block in blocks:
        plain, copy = plain_seconds(block), block["copy_s"]
        mine = added_seconds(block, every)
        added += mine
        percent += [100 * value / plain for value in mine]
        over_allowed += [value / allowed_seconds(copy=copy, step=plain) for value in mine]
        stalls += block["stalls"]
        stalls_over_copy += [value / copy for value in block["stalls"]]
    alone = [(block["alone"], block["copy_s"]) for block in blocks if block.get("alone")]
    persists = [value for one, _ in alone for value in one["persists"]]
    restores = [one["restore_s"] for one, _ in alone]
    figures = {
        "added_s": spread(added),
        "added_percent": spread(percent),
        "added_over_allowed": spread(over_allowed),
        "stall_s": spread(stalls),
        "stall_over_copy": spread(stalls_over_copy),
        "persist_s": spread(persists),
        "persist_bytes_s": spread([state_bytes / value for value in persists]),
        "persist_over_copy": spread([copy / p for one, copy in alone for p in one["persists"]]),
        "restore_s": spread(restores),
        "restore_over_copy": spread([copy / one["restore_s"] for one, copy in alone]),
        "extra_memory_bytes": spread([block["extra_memory_bytes"] for block in blocks]),
        "media_bytes": spread([block["media_bytes"] for block in blocks]),
        "verified": all(one["verified"] for one, _ in alone) if alone else None,
    }
    if alone and added:
        figures["interval"] = interval(
            added=median(added) * every,
            stall_alone=median([value for one, _ in alone for value in one["stalls"]]),
            persist=median(persists),
            step=median([plain_seconds(block) for block in blocks]),
        )
    return figures


def compare(line: dict[str, Any]) -> dict[str, Any]:
    """Return how the best lightckpt stands to the best peer and to its targets, in *line*."""
    medians = {
        name: entry["figures"]["added_s"]["median"]
        for name, entry in line["strategies"].items()
        if entry.get("figures") and entry["figures"].get("added_s")
    }
    ours = {name: value for name, value in medians.items() if name.startswith("lightckpt")}
    peers = {name: value for name, value in medians.items() if name not in ours}
    if not ours or not peers:
        return {}
    mine, peer = min(ours, key=ours.__getitem__), min(peers, key=peers.__getitem__)
    return {
        "ours": mine,
        "peer": peer,
        "ours_added_s": ours[mine],
        "peer_added_s": peers[peer],
        # Where nothing was seen to be added, a ratio says nothing.
        "times_better": peers[peer] / ours[mine] if ours[mine] > 0 else None,
    }


def targets(figures: dict[str, Any], *, every: int) -> list[dict[str, Any]]:
    """Return each target of *figures* with the value, and whether it is met."""
    wanted = [
        ("added_over_allowed", "added of 1.3 M + 1 % of T", "<=", 1.0),
        ("stall_over_copy", "stall of M", "<=", STALL_OF_COPY_MAX),
        ("persist_over_copy", "copy of persist", ">=", COPY_RATE_MIN),
        ("restore_over_copy", "copy of restore", ">=", COPY_RATE_MIN),
    ]
    if every >= 10:
        wanted = [("added_percent", "added, percent", "<=", 1.0)]
    found = []
    for name, label, sign, limit in wanted:
        if figures.get(name) is None:
            continue
        value = figures[name]["median"]
        met = value <= limit if sign == "<=" else value >= limit
        found.append({"name": label, "value": value, "sign": sign, "limit": limit, "met": met})
    return found
