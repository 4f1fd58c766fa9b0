"""Standings of extents: probation, streaming, and the way back, as plain bookkeeping."""

import pytest

from lightckpt.trust import (
    PROBATION_VERSIONS,
    RECHECKED_VERSIONS,
    ROTATING_SHARE,
    Standing,
    Trust,
)

A, B = ("model", "m", "a"), ("model", "m", "b")


def test_an_extent_streams_after_quiet_versions_only():
    trust = Trust()
    assert trust.standing(A) is Standing.PROBATION
    promoted = [trust.saw_quiet([A]) for _ in range(PROBATION_VERSIONS)]
    assert promoted == [False] * (PROBATION_VERSIONS - 1) + [True]
    assert trust.standing(A) is Standing.LAZY
    assert trust.standing(B) is Standing.PROBATION


def test_one_change_is_for_good_and_is_reported():
    trust = Trust()
    trust.saw_change(A, "it moved")
    for _ in range(10):
        trust.saw_quiet([A])
    assert trust.standing(A) is Standing.VOLATILE
    assert trust.report() == ["model/m/a: it moved"]


def test_it_is_proven_after_the_rechecked_versions():
    trust = Trust()
    for _ in range(PROBATION_VERSIONS + RECHECKED_VERSIONS):
        assert not trust.is_proven(A)
        trust.saw_quiet([A])
    assert trust.is_proven(A)


def test_what_was_proven_is_rechecked_anew_but_streams_on():
    trust = Trust()
    for _ in range(PROBATION_VERSIONS + RECHECKED_VERSIONS):
        trust.saw_quiet([A])
    trust.saw_quiet([B])
    trust.doubt()
    assert trust.standing(A) is Standing.LAZY
    assert trust.standing(B) is Standing.PROBATION
    for _ in range(RECHECKED_VERSIONS):
        assert not trust.is_proven(A)
        assert not trust.saw_quiet([A])
    assert trust.is_proven(A)


def test_turns_go_round_all_extents_at_the_rotating_share():
    trust = Trust()
    sizes = [1000] * 49 + [10_000]
    turns = [trust.turn("layer", sizes) for _ in range(200)]
    seen = [index for turn in turns for index in turn]
    assert [at % 50 for at in range(len(seen))] == seen
    summed = sum(sizes[index] for index in seen)
    assert summed == pytest.approx(200 * ROTATING_SHARE * sum(sizes), abs=10_000)


def test_layers_go_round_each_by_itself():
    trust = Trust()
    seen = {"a": set(), "b": set()}
    for _ in range(400):
        for layer in seen:
            seen[layer].update(trust.turn(layer, [100, 100]))
    assert seen == {"a": {0, 1}, "b": {0, 1}}


def test_a_turn_over_empty_extents_ends():
    assert Trust().turn("layer", []) == []
    assert len(Trust().turn("layer", [0, 0])) <= 2
