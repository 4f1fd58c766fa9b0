"""Standings of extents: probation, streaming, and the way back, as plain bookkeeping."""

from lightckpt.trust import PROBATION_VERSIONS, RECHECKED_VERSIONS, Standing, Trust

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


def test_it_is_settled_after_the_rechecked_versions():
    trust = Trust()
    for _ in range(PROBATION_VERSIONS + RECHECKED_VERSIONS):
        assert not trust.is_settled(A)
        trust.saw_quiet([A])
    assert trust.is_settled(A)


def test_turns_go_round_all_extents():
    trust = Trust()
    sizes = [1000] * 50
    seen = [index for _ in range(60) for index in trust.turn(sizes)]
    assert set(seen) == set(range(50))
    assert len(trust.turn(sizes)) == 1


def test_a_turn_over_empty_extents_ends():
    assert Trust().turn([]) == []
    assert len(Trust().turn([0, 0])) <= 2
