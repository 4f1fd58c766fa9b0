"""Goal: a fault of the media, or of the clock, is an error in words and costs no acknowledged step.

Method: trainers in processes of their own meet a full or a read-only file system, a file that is
cut short or removed under their mapping, system calls that fail (interpose.c, by LD_PRELOAD), a
clock that jumps. None may die of a signal. Then the store is looked at, as after a kill.

What needs a mount, or a C compiler, is skipped with the reason where there is none.

Elsewhere: each drain of a save that fails, and pages lost at each check, in
core/store_failure_test.cc; a full file system and limits on file sizes as the media sees them, and
foreign SIGBUS, in core/file_media_test.cc; stores cut short before they are opened, and foreign
files, in core/store_file_test.cc and test_errors.py; what a device that fails below a mapping does
is what a file cut short does: the kernel raises SIGBUS where a page cannot be had.
"""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightckpt
import trainer
from lightckpt._core import Op, Store, make_spans
from process import Process
from series import Series
from training import make, update

pytestmark = pytest.mark.kill

INTERPOSE = Path(__file__).with_name("interpose.c")


@pytest.fixture
def series(folder):
    return Series(folder / "run")


def mount(*arguments):
    command = ["mount", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()}"


@pytest.fixture
def volume(tmp_path):
    """A tmpfs of its own, of 8 MiB."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount: a file system of limited size")
    place = tmp_path / "volume"
    place.mkdir()
    if why := mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", place):
        pytest.skip(f"may not mount: {why}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(volume, leave_bytes):
    """Take all space of *volume* but *leave_bytes*; return the file that has it."""
    free = os.statvfs(volume).f_bavail * os.statvfs(volume).f_frsize
    file = volume / "filler"
    with open(file, "wb") as out:
        os.posix_fallocate(out.fileno(), 0, free - leave_bytes)
    return file


def goes_on(series, steps=2):
    """A new trainer goes on from what there is."""
    with Process(series, steps=steps, close=True) as heir:
        heir.go()
        assert heir.end() == ["done"]
    series.check()


# No space.


def test_a_store_that_does_not_fit_is_not_made(volume):
    fill(volume, leave_bytes=40_000)
    series = Series(volume / "run")
    with Process(series) as process:
        kind, error, message = process.end()
    assert (kind, error) == ("error", "NoSpaceError")
    assert "are free" in message
    assert os.listdir(volume) == ["filler", "run.lock"] or not series.path.exists()
    (volume / "filler").unlink()
    goes_on(series)


def test_a_growth_that_does_not_fit_keeps_what_there_was_and_goes_on_with_room(volume):
    """Steps 6 and 12 have more bytes than those before: the store must grow."""
    series = Series(volume / "run")
    with Process(series, talk=True) as process:
        process.to("told", times=5)
        filler = fill(volume, leave_bytes=100_000)
        process.go()
        kind, error, message = process.end()
    assert (kind, error) == ("error", "NoSpaceError")
    assert "more are needed" in message
    assert (series.acknowledged, series.trying) == (5, 6)
    assert series.check()
    assert series.acknowledged == 5
    filler.unlink()
    goes_on(series, steps=8)
    assert series.acknowledged == 13


def test_a_checkpointer_on_a_full_file_system_trains_on_and_saves_again_with_room(volume):
    model, optimizer = make(width=8_000)
    with lightckpt.Checkpointer(
        volume / "run", model=model, optimizer=optimizer, size=1 << 16
    ) as checkpointer:
        filler = fill(volume, leave_bytes=1 << 16)
        update(model, optimizer, 0)
        with pytest.warns(lightckpt.CheckpointWarning, match="more are needed"):
            assert "are free" in checkpointer.mark().skipped
        update(model, optimizer, 1)
        with pytest.raises(lightckpt.NoSpaceError, match="more are needed"):
            checkpointer.wait()
        filler.unlink()
        checkpointer.mark()
        assert checkpointer.wait() == 2


# Read-only media.


def test_a_file_system_that_is_read_only_can_be_read_and_says_so_to_a_writer(volume):
    series = Series(volume / "run")
    with Process(series, steps=4, keep=2, close=True) as process:
        process.go()
        assert process.end() == ["done"]
    assert not mount("-o", "remount,ro", volume)
    with Process(series) as process:
        kind, error, message = process.end()
    assert (kind, error) == ("error", "AccessError")
    assert "Read-only file system" in message
    series.check()
    assert series.acknowledged == 4
    assert not mount("-o", "remount,rw", volume)
    goes_on(series)


def test_a_file_that_may_not_be_written_says_so_to_a_writer_and_can_be_read(series):
    """As a user whom modes hold back: root they do not."""
    with Process(series, steps=3, close=True) as process:
        process.go()
        assert process.end() == ["done"]
    series.path.chmod(0o444)
    with Store(series.path, read_only=True) as store:
        assert store.versions()[0].step == 3
    code = (
        "import os, sys\n"
        "from lightckpt._core import Store\n"
        "from lightckpt.errors import AccessError\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        "store = Store(sys.argv[1], read_only=True); print(store.versions()[0].step)\n"
        "try: Store(sys.argv[1], create=True)\n"
        "except AccessError as error: print(error)\n"
    )
    series.path.parent.chmod(0o755)
    command = [sys.executable, "-c", code, series.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    step, refused = done.stdout.splitlines()
    assert step == "3"
    assert f"cannot open {series.path} for writing: Permission denied" in refused
    series.check()


# A file that changes under the mapping.


def cut_to_nothing(path):
    os.truncate(path, 0)


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("change", [cut_to_nothing, cut_in_half, remove])
@pytest.mark.parametrize("place", ["folder", "tmp_path"])
def test_a_store_that_is_cut_or_removed_ends_training_with_an_error(request, place, change):
    series = Series(request.getfixturevalue(place) / "run")
    with Process(series, talk=True, keep=2) as process:
        process.to("told", times=4)
        change(series.path)
        process.go()
        kind, error, message = process.end()
    assert (kind, error) == ("error", "MediaLostError")
    assert ("removed" if change is remove else "cut") in message
    assert str(series.path) in message
    assert ".tmp" not in message, "that is its name while it is being made"
    whole_or_error(series)


def whole_or_error(series):
    """The newest step that is whole is one that was acknowledged; or an error says why none is."""
    try:
        with Store(series.path, read_only=True) as store:
            versions = [v for v in store.versions() if not v.damaged]
            whole = [v.step for v in versions if not difference_or_error(store, v)]
        assert set(whole) <= set(range(series.acknowledged + 1))
    except lightckpt.NotFoundError as error:
        assert "no store" in str(error)
    except lightckpt.FormatError as error:
        assert str(series.path) in str(error)


def difference_or_error(store, version):
    try:
        return trainer.difference(store, version)
    except lightckpt.CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("change", [cut_to_nothing, cut_in_half, remove])
def test_a_store_that_is_cut_or_removed_at_any_moment_kills_nobody(trainers, folder, change):
    chance = random.Random(change.__name__)
    for number in range(8):
        series = Series(folder / str(number))
        with Process(series, workers=2) as process:
            process.hear(chance.randint(2, 60))
            change(series.path)
            kind, error, message = process.end()
        assert (kind, error) == ("error", "MediaLostError"), message
        assert ("removed" if change is remove else "cut") in message
        whole_or_error(series)


def test_a_reader_whose_file_is_cut_gets_an_error_and_no_signal(series):
    """A page that cannot be read, as of a device that fails."""
    with Process(series, steps=3, close=True) as process:
        process.go()
        assert process.end() == ["done"]
    with Store(series.path, read_only=True) as store:
        version = store.versions()[0]
        spans = make_spans([(0, extent) for extent in range(version.extent_count)])
        cut_in_half(series.path)
        with pytest.raises(lightckpt.MediaError, match=r"lost pages|was cut"):
            report = store.wait(store.submit(Op.VERIFY, spans, version=version.version))
            assert report.bad_count > 0
            store.view(version.version)


# System calls that fail, and a clock that jumps.


@pytest.fixture(scope="module")
def interposed(tmp_path_factory):
    """What preloads interpose.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: cc")
    library = tmp_path_factory.mktemp("interposed") / "interpose.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, INTERPOSE, "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize(
    ("call", "succeed"),
    [*(("msync", n) for n in (0, 1, 2, 3, 5, 8, 13, 40)), *(("fsync", n) for n in range(4))],
)
def test_a_call_that_fails_is_final_and_costs_no_acknowledged_step(
    interposed, tmp_path, call, succeed
):
    series = Series(tmp_path / "run")
    environment = {**interposed, f"FAULT_{call.upper()}": str(succeed)}
    with Process(series, environment, steps=30) as process:
        process.go()
        kind, error, message = process.end()
    # While the store is made nothing can be lost: that call failed, and another may succeed.
    made = call == "msync" or succeed >= 2
    assert (kind, error) in [("error", "MediaLostError")] + [("error", "MediaError")] * (not made)
    assert call in message
    assert "Input/output error" in message
    assert not Path(f"{series.path}.tmp").exists()
    series.check()
    goes_on(series)


def test_a_clock_that_jumps_is_not_looked_at(interposed, folder, tmp_path):
    environment = {**interposed, "FAULT_CLOCK": "1"}
    code = "import time; print(abs(time.time() - time.time()) > 1e8)"
    jumps = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert jumps.stdout == "True\n", "the clock of the test does not jump"
    for place in (folder, tmp_path):
        series = Series(place / "run")
        with Process(series, environment, steps=20, close=True) as process:
            process.go()
            assert process.end() == ["done"]
        assert series.acknowledged == 20
        series.check()
        goes_on(series)


def test_a_file_system_whose_rename_may_replace_gets_stores_by_a_link(interposed, tmp_path):
    series = Series(tmp_path / "run")
    with Process(series, {**interposed, "FAULT_RENAMEAT2": "0"}, steps=2, close=True) as process:
        process.go()
        assert process.end() == ["done"]
    assert sorted(os.listdir(tmp_path)) == ["run", "run.lock"]
    assert series.path.stat().st_nlink == 1
    series.check()
    goes_on(series)
