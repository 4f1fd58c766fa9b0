"""Real DAX, in a virtual machine: what a place is, and that power cuts lose nothing there.

Goal: on ext4 and xfs with DAX the kernel grants MAP_SYNC; there and on device DAX the core sees
what the platform promises (ADR: CACHE_LINE, eADR: BYTE), and a step whose commit has returned is
there bit for bit after a power cut, although the process could not call fsync or msync. Where
MAP_SYNC is refused (virtio-pmem) the core says PAGE, uses msync, and loses nothing either. Memory
on a NUMA node of its own is volatile.

Method: one machine lives three times (conftest.py) and is killed twice, in the middle of training
at four places at once. Each test looks at one thing that was said. The emulator has no processor
caches: this shows mapping, metadata and recovery, and nothing of flushes; see vm.py.
"""

from __future__ import annotations

import pytest

from vm import of

# The first test waits for all lives.
pytestmark = [pytest.mark.fsdax, pytest.mark.slow, pytest.mark.timeout(600)]

FILE_SYSTEMS = ("ext4", "xfs")
PMEM = (*FILE_SYSTEMS, "devdax")
ALL = (*PMEM, "catalog", "virtio")
CUTS = (("first", "again"), ("again", "last"))
each_place = pytest.mark.parametrize("place", ALL)
each_cut = pytest.mark.parametrize(("before", "after"), CUTS, ids=("adr", "eadr"))


def only(records, place, fact):
    """Return what was said of *fact*; what failed instead, if nothing was."""
    found = of(records, place, fact)
    failures = [record for record in records if "failed" in record and record["place"] == place]
    assert found, f"nothing of {fact} at {place}: {failures}"
    return found[0]


@each_place
@pytest.mark.parametrize("life", ["first", "again", "last"])
def test_nothing_fails(lives, life, place):
    said = lives[life]
    failed = [record for record in said if "failed" in record]
    failed = [record for record in failed if record["place"] in (place, "guest")]
    assert not failed, "\n".join(record["trace"] for record in failed)


@pytest.mark.parametrize("place", FILE_SYSTEMS)
@pytest.mark.parametrize("life", ["first", "again"])
def test_map_sync_is_taken(lives, life, place):
    """As the kernel sees the mapping; device DAX has no metadata, and needs none."""
    assert only(lives[life], place, "sync") is True


@pytest.mark.parametrize("place", PMEM)
@pytest.mark.parametrize(
    ("life", "granularity"), [("first", "cache_line"), ("again", "byte")], ids=("adr", "eadr")
)
def test_persistent_memory_is_known(lives, life, granularity, place):
    facts = only(lives[life], place, "facts")
    assert (facts["media"], facts["granularity"]) == ("pmem", granularity)
    assert (facts["flush_method"] == "none") == (granularity == "byte")
    assert facts["kind"] == ("device DAX" if place == "devdax" else "fsdax with MAP_SYNC")
    assert facts["survives"]["power cut"] == "yes"


@each_place
@each_cut
def test_acknowledged_steps_survive_a_power_cut(lives, before, after, place):
    acknowledged = of(lives[before], place, "acknowledged")
    assert acknowledged, f"nothing was trained at {place}"
    found = [record for record in lives[after] if "found" in record and record["place"] == place]
    wrong = [record for record in found if record["wrong"]]
    assert not wrong
    steps = [record["found"] for record in found]
    assert steps, f"no version is left at {place}"
    # The step in flight may have been committed, and the power gone before that was said.
    assert max(steps) - acknowledged[-1] in (0, 1)
    assert max(steps) - 1 in steps, "the version before it is kept"


@pytest.mark.parametrize("life", ["again", "last"])
def test_a_catalogs_pool_is_consistent_after_a_power_cut(lives, life):
    assert only(lives[life], "catalog", "checked")


@pytest.mark.parametrize("place", FILE_SYSTEMS)
@each_cut
def test_a_mapping_without_map_sync_loses_its_bytes(lives, before, after, place):
    """The control: the machine does lose what MAP_SYNC, or an fsync, would have kept."""
    assert of(lives[before], place, "armed")
    assert only(lives[after], place, "control") == "zeros"


@pytest.mark.parametrize("place", [*FILE_SYSTEMS, "virtio"])
def test_the_file_systems_are_mounted_with_dax(lives, place):
    """Else the negative case, virtio-pmem, would show nothing."""
    facts = only(lives["first"], place, "facts")
    assert facts["filesystem"] == ("ext4" if place == "virtio" else place)
    assert {"dax", "dax=always"} & set(facts["mount_options"].split(","))


def test_virtio_pmem_is_a_plain_file(lives):
    """DAX without MAP_SYNC: the host must be asked, so every commit needs msync."""
    for life in ("first", "again"):
        assert only(lives[life], "virtio", "sync") is False
        facts = only(lives[life], "virtio", "facts")
        assert (facts["media"], facts["granularity"]) == ("file", "page")
        assert facts["flush_method"] == "msync"
        assert facts["survives"]["power cut"] == "yes, if the disk honours a flush"


def test_without_map_sync_a_commit_that_cannot_msync_fails(lives):
    """It also shows that the filter, under which all others train, refuses what it should."""
    assert "Operation not permitted" in only(lives["first"], "virtio", "refused")


def test_memory_of_another_node_is_volatile(lives):
    said = lives["last"]
    assert only(said, "memory", "node_bytes") > 0
    facts = only(said, "memory", "facts")
    assert (facts["media"], facts["granularity"]) == ("tmpfs", "volatile")
    assert facts["survives"]["power cut"] == "no"
    pages = only(said, "memory", "pages")
    assert list(pages) == ["N1"], "all of the store lies on the node without processors"
    assert (only(said, "memory", "found"), only(said, "memory", "wrong")) == (1, "")
