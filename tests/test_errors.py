"""Bad input and faults: each gets a clear error with its values in it, and loses nothing."""

import os

import pytest
import torch

import lightckpt
from lightckpt import CheckpointWarning, _core
from training import make, update


def test_a_second_writer_is_refused_with_the_holder(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer):
        with pytest.raises(lightckpt.BusyError, match=str(os.getpid())):
            lightckpt.Checkpointer(path, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "is empty"),
        (b"x" * 300_000, "not a lightckpt store"),
        (b"LIGHTCKP" + bytes(300_000), "header is damaged"),
        (b"short", "too few"),
    ],
)
def test_foreign_files_are_refused_and_left_alone(path, content, error):
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(lightckpt.FormatError, match=error):
        lightckpt.Checkpointer(path, model=make()[0])
    with open(path, "rb") as file:
        assert file.read() == content


def test_another_format_version_is_named(path):
    with lightckpt.Checkpointer(path, model=make()[0]):
        pass
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        data[8] = 2
        data[60:64] = crc32c(data[:60]).to_bytes(4, "little")
        file.seek(0)
        file.write(data)
    with pytest.raises(lightckpt.FormatError, match="has format 2; this lightckpt reads format 1"):
        lightckpt.Checkpointer(path, model=make()[0])


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_a_missing_folder_and_a_directory_are_named(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="the folder of"):
        lightckpt.Checkpointer(path + "/no/such", model=make()[0])
    with pytest.raises(ValueError, match="is a directory"):
        lightckpt.Checkpointer(str(tmp_path), model=make()[0])


def test_unsafe_state_is_named_by_its_path_and_training_goes_on(path):
    class Odd:
        def state_dict(self):
            return {"nested": [1, {"fn": lambda: 1}]}

        def load_state_dict(self, state):
            pass

    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, extra={"o": Odd()}
    )
    update(model, optimizer, 0)
    with pytest.warns(CheckpointWarning, match=r"extra\.o\.nested\[1\]\.fn"):
        assert "extra.o.nested[1].fn" in checkpointer.mark().skipped
    with pytest.raises(lightckpt.UnsafeStateError, match=r"extra\.o\.nested\[1\]\.fn"):
        checkpointer.close()


def test_on_error_raise_raises_at_once(path):
    class Odd:
        def state_dict(self):
            return {"x": object()}

        def load_state_dict(self, state):
            pass

    model, optimizer = make()
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, extra={"o": Odd()}, on_error="raise"
    ) as checkpointer:
        update(model, optimizer, 0)
        with pytest.raises(lightckpt.UnsafeStateError):
            checkpointer.mark()
        with pytest.raises(lightckpt.UnsafeStateError):
            checkpointer.wait()


def held_run(path, gate, monkeypatch, **options):
    """A run of eight steps whose layers stream lazily; its gate opens when a version is given up.

    Dropping one waits for its workers, so without that it would time out as well.
    """
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap", media="emulated", **options
    )
    drop = checkpointer._driver.store.drop

    def open_and_drop():
        gate.open()
        drop()

    monkeypatch.setattr(checkpointer._driver.store, "drop", open_and_drop)
    for i in range(8):
        update(model, optimizer, i)
        checkpointer.mark()
    assert checkpointer.wait() == 8
    gate.close()
    return model, optimizer, checkpointer


def test_a_guard_beyond_its_timeout_gives_the_version_up_and_training_goes_on(
    path, gate, monkeypatch
):
    model, optimizer, checkpointer = held_run(path, gate, monkeypatch)
    with checkpointer:
        update(model, optimizer, 8)
        ticket = checkpointer.mark()
        assert not ticket.copied()
        checkpointer._driver.flight._timeout = 1e-6
        with pytest.warns(CheckpointWarning, match="not done after"):
            optimizer.step()
        with pytest.raises(lightckpt.WaitTimeoutError, match="not done after"):
            checkpointer.wait()
        assert checkpointer.latest == 8
        checkpointer.mark()
        assert checkpointer.wait() == 10


def test_a_busy_boundary_gives_up_what_is_not_copied_yet_if_that_is_wanted(path, gate, monkeypatch):
    model, optimizer, checkpointer = held_run(path, gate, monkeypatch, busy="drop")
    with checkpointer:
        update(model, optimizer, 8)
        assert not checkpointer.mark().copied()
        with torch.no_grad():  # an update that no guard holds back
            model[0].weight.add_(1)
        with pytest.warns(CheckpointWarning, match="step 9 has no version: the next boundary came"):
            checkpointer.mark()
        assert checkpointer.wait() == 10
        assert checkpointer.stats.dropped == 1
    torch.testing.assert_close(
        dict(lightckpt.load(path)["model"]), dict(model.state_dict()), rtol=0, atol=0
    )


def test_a_begin_that_is_refused_is_said_and_training_goes_on(path, monkeypatch):
    """Not taken for an attempt that an interrupt left open, whose drop would then be refused."""
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        with monkeypatch.context() as refusing:

            def begin(self, **arguments):
                raise ValueError(f"keep is {arguments['keep']}; the store can keep fewer")

            refusing.setattr(lightckpt._core.Store, "begin", begin)
            update(model, optimizer, 0)
            with pytest.warns(CheckpointWarning, match="step 1 cannot be begun: keep is"):
                assert "can keep fewer" in checkpointer.mark().skipped
            with pytest.raises(lightckpt.CheckpointError, match="can keep fewer") as kept:
                checkpointer.wait()
            assert type(kept.value.__cause__) is ValueError
        update(model, optimizer, 1)
        checkpointer.mark()
        assert checkpointer.wait() == 2


def test_an_interrupt_behind_a_commit_that_is_through_is_what_is_raised(path, monkeypatch):
    commit = _core.Store.commit

    def interrupted(self, host):
        self.wait(commit(self, host), 60)
        raise KeyboardInterrupt

    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        with monkeypatch.context() as interrupting:
            interrupting.setattr(_core.Store, "commit", interrupted)
            update(model, optimizer, 0)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.mark()
        update(model, optimizer, 1)
        checkpointer.mark()
        assert checkpointer.wait() == 2


def test_an_attempt_that_an_interrupt_left_open_gives_way_to_the_next(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        store = checkpointer._driver.store
        store.begin(
            step=9, keep=1, extents=lightckpt._core.make_sizes([8]), blob=b"{}", host_bytes=0
        )
        update(model, optimizer, 0)
        checkpointer.mark()
        assert checkpointer.wait() == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("every", 0), ("every", 1.5), ("keep", 0), ("keep", 15), ("mode", "fast"), ("busy", "x"),
        ("media", "disk"), ("size", 0), ("timeout", 0), ("on_error", "ignore"), ("overhead", 0),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_before_anything_is_made(path, argument, value):
    with pytest.raises(ValueError, match=argument):
        lightckpt.Checkpointer(path, model=make()[0], **{argument: value})
    assert not os.path.exists(path)


def test_nothing_to_save_is_refused(path):
    with pytest.raises(ValueError, match="nothing to save"):
        lightckpt.Checkpointer(path)


def test_a_size_beyond_the_file_system_is_an_error_with_bytes(path):
    with pytest.raises(lightckpt.NoSpaceError, match=r"\d+ bytes .* are free"):
        lightckpt.Checkpointer(path, model=make()[0], size=1 << 50)
    assert not os.path.exists(path)
    assert not os.path.exists(path + ".tmp")


def test_a_closed_checkpointer_says_so(path):
    checkpointer = lightckpt.Checkpointer(path, model=make()[0])
    checkpointer.close()
    checkpointer.close()
    for call in (checkpointer.mark, checkpointer.wait, checkpointer.restore, checkpointer.steps):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_a_forked_child_is_inert(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
        checkpointer.wait()
        child = os.fork()
        if child == 0:
            try:
                checkpointer.steps()
            except ValueError as error:
                os._exit(0 if "inert" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        update(model, optimizer, 1)
        checkpointer.mark()
        assert checkpointer.wait() == 2


def test_pinned_steps_stay(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for i in range(8):
            update(model, optimizer, i)
            checkpointer.mark()
            checkpointer.wait()
            if i == 2:
                checkpointer.pin(3)
        assert 3 in checkpointer.steps()
        assert lightckpt.load(path, step=3)["step"] == 3
        checkpointer.pin(3, pinned=False)
        update(model, optimizer, 8)
        checkpointer.mark()
        checkpointer.wait()
        update(model, optimizer, 9)
        checkpointer.mark()
        checkpointer.wait()
        assert 3 not in checkpointer.steps()
