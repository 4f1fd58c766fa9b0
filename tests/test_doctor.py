"""The doctor. Goal: what it says of a path is what the core does there, and it leaves no trace.

Method: real folders of this machine, whatever they are; the tables for media that it has not are
tried on facts made up here.
"""

import json
import os
from pathlib import Path

import pytest

from lightckpt import AccessError, FormatError, NotFoundError, doctor
from lightckpt._core import Catalog, Granularity, Info, Media, Store
from lightckpt.doctor import diagnose
from small_run import SmallRun

INFO = Info(
    1,
    1 << 20,
    0,
    Media.TMPFS,
    Granularity.VOLATILE,
    False,
    16,
    1,
    "none",
    Catalog.LINES,
    0,
    0,
    0,
    0,
)


@pytest.fixture(autouse=True)
def small_probe(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_BYTES", doctor.PROBE_BYTES_MIN)


def info_of(path):
    """Return what the core says of a new store at *path*."""
    with Store(path, create=True) as store:
        return store.info()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_it_says_of_a_folder_what_a_store_there_is(folder, tmp_path, where):
    place = folder if where == "memory" else tmp_path
    found = diagnose(place)
    info = info_of(place / "store")
    assert found.media == info.media.name.lower()
    assert found.granularity == info.granularity.name.lower()
    assert found.flush_method == info.flush_method
    assert (found.is_store, found.emulated) == (False, info.emulated)
    assert found.kind == {
        Media.TMPFS: "tmpfs", Media.FILE: "plain file", Media.PMEM: "fsdax with MAP_SYNC"
    }[info.media]  # fmt: skip
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.cores == len(os.sched_getaffinity(0))


def test_it_measures_and_leaves_nothing_behind(folder):
    found = diagnose(folder)
    assert found.speed is not None
    assert found.speed.state_bytes == doctor.PROBE_BYTES
    assert found.speed.persist_bytes_per_s > 0
    assert found.speed.copy_bytes_per_s > 0
    assert found.speed.commit_ns > 0
    assert os.listdir(folder) == []


def test_it_measures_only_if_it_may(folder):
    found = diagnose(folder, measure=False)
    assert found.speed is None
    assert os.listdir(folder) == []


def test_a_store_that_is_there_is_not_touched(folder):
    run = SmallRun(folder / "store").train(2)
    before = (run.path.read_bytes(), run.path.stat().st_mtime_ns)
    found = diagnose(run.path)
    assert found.is_store
    assert found.speed is not None
    assert (run.path.read_bytes(), run.path.stat().st_mtime_ns) == before
    run.train(1)  # which was open for writing all the time
    run.close()
    assert sorted(os.listdir(folder)) == ["store", "store.lock"]


def test_a_file_to_be_is_judged_by_its_folder(folder):
    found = diagnose(folder / "store")
    assert (found.is_store, found.media) == (False, diagnose(folder).media)
    assert os.listdir(folder) == []


def test_it_is_json_as_it_stands(folder):
    found = diagnose(folder)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def test_a_missing_folder_and_a_foreign_file_are_errors(folder):
    with pytest.raises(NotFoundError, match=r"the folder of .* does not exist"):
        diagnose(folder / "no" / "where")
    (folder / "text").write_text("no store" * 10_000)
    with pytest.raises(FormatError, match="not a lightckpt store"):
        diagnose(folder / "text")


def test_with_little_room_nothing_is_measured_and_it_says_so(folder, monkeypatch):
    monkeypatch.setattr(doctor, "FREE_SHARE", 1 << 60)
    found = diagnose(folder)
    assert found.speed is None
    assert found.advice[0].startswith("nothing was measured: only ")


def refuse(folder):
    raise AccessError(f"cannot make a file in {folder}")


def test_a_folder_that_cannot_be_written_still_tells_about_its_store(folder, monkeypatch):
    SmallRun(folder / "store").train(1).close()
    monkeypatch.setattr(doctor, "_probe", refuse)
    found = diagnose(folder / "store")
    assert found.speed is None
    assert found.advice[0] == f"nothing was measured: cannot make a file in {folder}"
    with pytest.raises(AccessError, match="cannot make a file"):
        diagnose(folder)


def test_what_fails_while_measuring_leaves_nothing_behind(folder, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "_measure", fail)
    assert "Input/output error" in diagnose(folder).advice[0]
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("media", "granularity", "emulated", "kind", "os_crash", "power_cut"),
    [
        (Media.PMEM, Granularity.CACHE_LINE, False, "fsdax with MAP_SYNC", "yes", "yes"),
        (Media.PMEM, Granularity.BYTE, False, "fsdax with MAP_SYNC", "yes", "yes"),
        (Media.FILE, Granularity.PAGE, False, "plain file", "yes", "yes, if"),
        (Media.TMPFS, Granularity.VOLATILE, False, "tmpfs", "no", "no"),
        (Media.EMULATED, Granularity.CACHE_LINE, True, "emulated persistent memory", "no", "no"),
    ],
)
def test_what_survives_follows_from_the_granularity(
    media, granularity, emulated, kind, os_crash, power_cut
):
    info = INFO._replace(media=media, granularity=granularity, emulated=emulated)
    assert doctor._kind(info, device=False) == kind
    assert doctor._kind(info, device=True) == "device DAX"
    survives = doctor._SURVIVES[doctor._durability(info)]
    assert survives["process kill"] == "yes"
    assert survives["OS crash"].startswith(os_crash)
    assert survives["power cut"].startswith(power_cut)


@pytest.mark.parametrize(
    ("media", "granularity", "filesystem", "libraries", "words"),
    [
        (Media.TMPFS, Granularity.VOLATILE, "tmpfs", True, "archive_every="),
        (Media.FILE, Granularity.PAGE, "ext4", True, "-o dax"),
        (
            Media.PMEM,
            Granularity.CACHE_LINE,
            "xfs",
            False,
            "apt-get install libpmem2-1 libpmemobj1",
        ),
    ],
)
def test_what_would_be_better_is_said(media, granularity, filesystem, libraries, words):
    info = INFO._replace(media=media, granularity=granularity)
    found = dict.fromkeys(doctor.LIBRARIES, libraries)
    assert words in " ".join(doctor._advice(info, filesystem, "rw", found))


def test_dax_without_map_sync_is_not_told_to_mount_with_dax():
    info = INFO._replace(media=Media.FILE, granularity=Granularity.PAGE)
    advice = " ".join(doctor._advice(info, "ext4", "rw,dax=always", {}))
    assert "takes no MAP_SYNC" in advice
    assert "-o dax" not in advice


def test_where_all_is_well_nothing_is_advised():
    info = INFO._replace(media=Media.PMEM, granularity=Granularity.CACHE_LINE)
    assert not list(doctor._advice(info, "xfs", "dax", dict.fromkeys(doctor.LIBRARIES, True)))


def test_emulation_is_called_so():
    info = INFO._replace(emulated=True, granularity=Granularity.CACHE_LINE)
    assert "emulation" in " ".join(doctor._advice(info, "tmpfs", "", {}))


def test_the_file_system_is_that_of_the_deepest_mount(folder):
    kind, _ = doctor._mount_of(folder)
    expected = "tmpfs" if Path("/dev/shm") in folder.parents else kind
    assert kind == expected
    assert doctor._mount_of(Path("/proc/self"))[0] == "proc"


def test_a_library_that_is_not_there_is_not_found():
    assert not doctor._loads("libno-such-thing.so.1")
    assert doctor._loads("libc.so.6")
    assert not doctor._loads("no-such-program")
    assert doctor._loads("sh")


@pytest.mark.parametrize("missing", doctor.LIBRARIES)
def test_of_a_library_that_is_missing_it_says_what_is_not_there_without_it(missing):
    info = INFO._replace(media=Media.PMEM, granularity=Granularity.CACHE_LINE)
    found = {name: name != missing for name in doctor.LIBRARIES}
    (advice,) = doctor._advice(info, "xfs", "dax", found)
    package, lost = doctor.LIBRARIES[missing]
    assert f"{lost} ({missing}): apt-get install {package} (" in advice


def test_it_says_which_snapshots_a_gpu_could_make_here(folder, call):
    found = diagnose(folder)
    assert set(found.snapshots) == {"direct", "host", "device"}
    if any(answer.startswith("no: ") for answer in found.snapshots.values()):
        assert "driver" in found.snapshots["host"] or "device" in found.snapshots["host"]
    _, out, _ = call("doctor", folder)
    assert "snapshot" in out
