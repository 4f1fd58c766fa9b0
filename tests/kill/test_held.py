"""Goal: a store has one writer, whatever others do to its name, its lock file and its folder.

Method: a trainer in a process of its own is stopped between two steps. It copies its own folder;
its store is renamed, linked, replaced or locked by somebody who may only read; its lock file goes.
Then either it goes on and a second trainer is refused with its pid, or it ends with one error and a
second trainer goes on from the newest acknowledged step.

Elsewhere: the same in one process, bind mounts and bare clones, in core/hold_test.cc.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightckpt._core import Store
from process import Process
from series import Series

pytestmark = pytest.mark.kill

NOBODY = 65534
# Share-locks all of each file that it may read, says which, and stays.
LOCKER = """
import fcntl, os, sys
os.setresuid(*[int(sys.argv[1])] * 3)
files = []
for path in sys.argv[2:]:
    try:
        files.append(open(path, "rb"))
        fcntl.lockf(files[-1], fcntl.LOCK_SH)
        print(os.path.basename(path), flush=True)
    except PermissionError:
        print("-", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run():
    """A folder that every user may look into, and a series in it."""
    folder = Path(tempfile.mkdtemp(prefix="lightckpt-held-"))
    folder.chmod(0o755)
    yield Series(folder / "run")
    shutil.rmtree(folder)


def refused(path, holder):
    with Process(Series(path)) as second:
        kind, error, message = second.end()
    assert (kind, error) == ("error", "BusyError")
    assert f"already open for writing in process {holder.pid}" in message
    return True


def go_on(series, steps=2):
    with Process(series, steps=steps, close=True) as heir:
        heir.go()
        assert heir.end() == ["done"]
    series.check()


@pytest.mark.parametrize("how", ["copytree", "tar"])
def test_a_trainer_that_copies_its_own_folder_keeps_its_lock(run, how):
    with Process(run, talk=True, look=how) as trainer:
        trainer.to("told", times=2)
        assert refused(run.path, trainer)
        trainer.go()
        trainer.to("told")
        trainer.kill()
    run.check()
    assert run.acknowledged == 3


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
def test_a_trainer_whose_store_loses_its_name_ends_with_one_error(run, how):
    aside = run.path.with_name("aside")
    with Process(run, talk=True) as trainer:
        trainer.to("told", times=2)
        os.link(run.path, aside)
        if how == "renamed":
            os.replace(run.path, run.path.with_name("other"))
        elif how == "removed":
            run.path.unlink()
        else:
            go_on(Series(run.path.with_name("other")))
            os.replace(run.path.with_name("other"), run.path)
        assert refused(aside, trainer), "under its other name it is held as long as it is open"
        trainer.go()
        kind, error, message = trainer.end()
    assert (kind, error) == ("error", "MediaLostError")
    assert f"{run.path} was renamed, removed or replaced while it was open" in message
    if how == "replaced":
        newest = Series(run.path)
        newest.acknowledged = 2
        go_on(newest)
        assert newest.acknowledged == 4, "the other trainer's two, and two more"
    run.path = aside
    run.trying = None
    run.check()
    assert run.acknowledged == 2
    go_on(run)


def test_a_trainer_is_held_by_all_names_and_without_its_lock_file(run):
    link, way = run.path.with_name("link"), run.path.with_name("way")
    with Process(run, talk=True) as trainer:
        trainer.to("told", times=2)
        os.link(run.path, link)
        way.symlink_to(run.path)
        run.path.with_name("run.lock").unlink()
        assert all(refused(path, trainer) for path in (run.path, link, way))
        trainer.go()
        trainer.to("told")
        trainer.kill()
    run.check()
    assert run.acknowledged == 3


def test_where_a_store_was_removed_its_trainer_is_named_until_it_has_noticed(run):
    with Process(run, talk=True) as trainer:
        trainer.to("told", times=2)
        run.path.unlink()
        assert refused(run.path, trainer)
        trainer.go()
        assert trainer.end()[1] == "MediaLostError"
    run.acknowledged, run.trying = 0, None
    go_on(run)


@contextlib.contextmanager
def locker(*paths):
    """Give the names of the files that somebody who may only read has locked."""
    user = str(NOBODY if os.getuid() == 0 else os.getuid())
    with subprocess.Popen(
        [sys.executable, "-c", LOCKER, user, *map(str, paths)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield [process.stdout.readline().strip() for _ in paths]
        process.stdin.close()


def test_who_may_only_read_keeps_no_trainer_out_and_stops_none(run):
    go_on(run)
    lock_file = run.path.with_name("run.lock")
    if os.getuid() != 0:
        run.path.chmod(0o600)  # the locker is the same user here: it stands for who may read both
    with locker(run.path, lock_file) as locked:
        assert locked == (["run", "-"] if os.getuid() == 0 else ["run", "run.lock"])
        with Process(run, talk=True) as trainer:
            trainer.to("told", times=2)
            assert refused(run.path, trainer)
            trainer.go()
            trainer.to("told")
            trainer.kill()
    run.check()
    assert run.acknowledged == 5
    go_on(run)


def test_a_lock_file_of_an_earlier_release_that_is_read_locked_keeps_no_trainer_out(run):
    go_on(run)
    lock_file = run.path.with_name("run.lock")
    lock_file.chmod(0o644)
    with locker(lock_file) as locked:
        assert locked == ["run.lock"]
        with Process(run, talk=True) as trainer:
            trainer.to("told", times=1)
            assert refused(run.path, trainer)
            trainer.kill()
    run.check()
    assert run.acknowledged == 3
    assert lock_file.stat().st_mode & 0o777 == 0o600


def test_a_writer_of_an_earlier_release_is_named_and_keeps_others_out(run):
    go_on(run)
    with open(run.path.with_name("run.lock"), "rb+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1)
        with Process(run) as trainer:
            kind, error, message = trainer.end()
        assert (kind, error) == ("error", "BusyError")
        assert f"process {os.getpid()}" in message
    go_on(run)


def test_readers_leave_nothing_beside_a_store(run):
    go_on(run)
    run.path.with_name("run.lock").unlink()
    with Store(run.path, read_only=True) as reader:
        reader.pin(reader.versions()[0].version)
        assert os.listdir(run.path.parent) == ["run"]


def test_a_holder_in_another_pid_namespace_is_not_called_by_a_number(run):
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("needs root and unshare: another PID namespace")
    with Process(run, talk=True) as trainer:
        trainer.to("told")
        code = f"from lightckpt._core import Store; Store({str(run.path)!r})"
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "unshare" in done.stderr:
            pytest.skip(f"may not: {done.stderr.strip()}")
        assert "a process that is not seen from here: of another container" in done.stderr
        assert "process 0" not in done.stderr
        trainer.go()
        trainer.to("told")


def test_a_trainer_that_is_replaced_by_exec_holds_nothing_of_its_former_self(run):
    code = (
        "import os, sys\nfrom lightckpt._core import Store\n"
        f"store = Store({str(run.path)!r}, create=True)\n"
        "print(len(store.versions()), flush=True)\n"
        "if len(sys.argv) == 1:\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
    )
    script = run.path.with_name("script.py")
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
