"""What CUDA may refuse. Goal: each refusal has its words, costs no more than it must, and training
goes on. Method: a driver of our own that is told to refuse.
"""

import ctypes
import threading

import pytest

from gpu_run import Run, same, stored
from lightckpt._core import Store
from lightckpt.doctor import diagnose
from lightckpt.errors import CheckpointWarning, MediaError, NoSpaceError
from ways import skip_unless_open

NOT_SUPPORTED, OUT_OF_MEMORY = 801, 2


def test_where_the_store_cannot_be_registered_auto_takes_the_ring(fake, path):
    platform = fake(refuse_registration=NOT_SUPPORTED)
    run = Run(platform, path)
    expected = run.train(10).state()
    run.checkpointer.wait()
    assert same(stored(path)[1], expected)
    [way] = run.checkpointer.why()["snapshot"]
    assert "host" in way
    assert "cuMemHostRegister" in way
    run.checkpointer.close()
    platform.finish()


def test_what_was_asked_for_is_not_replaced(fake, path):
    platform = fake(refuse_registration=NOT_SUPPORTED)
    run = Run(platform, path, snapshot="direct", on_error="warn")
    for _ in range(2):
        with pytest.warns(CheckpointWarning, match="cuMemHostRegister"):
            run.train(1)
    with pytest.raises(MediaError, match="cuMemHostRegister"):
        run.checkpointer.close()
    assert run.checkpointer.stats.versions == 0
    platform.finish()


def test_no_room_to_copy_aside_is_said(fake, path):
    platform = fake()
    run = Run(platform, path, snapshot="device", on_error="warn")
    platform.lib.fake_cuda_fail(b"cuMemAlloc", 1, OUT_OF_MEMORY)
    with pytest.warns(CheckpointWarning, match="OUT_OF_MEMORY"):
        run.train(1)
    expected = run.train(2).state()
    with pytest.raises(NoSpaceError, match="OUT_OF_MEMORY"):
        run.checkpointer.wait()
    assert same(stored(path)[1], expected)
    run.checkpointer.close()
    platform.finish()


def test_a_copy_that_fails_costs_its_version(fake, path):
    for nth in (1, 20, 50):
        platform = fake(delay_us_max=0, copies_singly=1)
        run = Run(platform, path.with_name(f"store{nth}"), on_error="warn")
        run.train(6)
        run.checkpointer.wait()
        platform.lib.fake_cuda_fail(b"cuMemcpyDtoHAsync", nth, OUT_OF_MEMORY)
        with pytest.warns(CheckpointWarning):
            run.train(3)
        expected = run.train(3).state()
        with pytest.raises(Exception, match=r"OUT_OF_MEMORY|did not come"):
            run.checkpointer.wait()
        assert run.checkpointer.wait() == 12
        assert same(stored(run.checkpointer.path)[1], expected)
        run.checkpointer.close()
        platform.finish()


def test_streams_that_do_not_wait_are_found(fake, path):
    """The test of the tests: a driver that leaves out event waits lets versions be wrong."""
    platform = fake(ignore_waits=1)
    run = Run(platform, path, snapshot="direct", mode="stop")  # nothing is compared
    run.train(3)
    run.checkpointer.wait()
    platform.synchronize()
    with platform.held_up():
        run.train(1)
        assert run.checkpointer.wait() == 4  # though the update has not even begun
    step, state = stored(path)
    assert step == 4
    assert not same(state, run.state())
    run.checkpointer.close()


def test_the_doctor_says_which_ways_are_open(fake, folder):
    fake(refuse_registration=NOT_SUPPORTED)
    answers = diagnose(folder, measure=False).snapshots
    assert answers["direct"].startswith("no: cuMemHostRegister")
    assert answers["host"].startswith("yes")
    fake()
    answers = diagnose(folder, measure=False).snapshots
    assert all(answer.startswith("yes") for answer in answers.values())


def test_what_needs_a_closed_way_is_left_out_with_the_doctor_s_words(fake, path):
    fake(refuse_registration=NOT_SUPPORTED)
    with pytest.raises(pytest.skip.Exception, match="snapshot=direct: no: cuMemHostRegister"):
        skip_unless_open("direct", path.parent)
    assert skip_unless_open("host", path.parent) == "host"
    platform = fake()
    platform.lib.fake_cuda_attribute(0, 91, 0)
    with pytest.raises(pytest.skip.Exception, match=r"snapshot=direct: no: .* attribute 91 is 0"):
        skip_unless_open("direct", path.parent)


def test_an_edit_before_the_copy_is_through_gives_the_version_up(fake, path):
    """What is left out of a version that is given up is no failure of the guard."""
    platform = fake()
    run = Run(platform, path, snapshot="host", staging=1, on_error="warn")  # a ring of one piece
    run.train(4)
    run.checkpointer.wait()
    gate = platform.lib.fake_cuda_gate(ctypes.c_uint64(platform.stream))
    run.train(1)
    platform.add(run.model.p4, 1)
    opener = threading.Timer(0.3, platform.lib.fake_cuda_open, [ctypes.c_uint64(gate)])
    opener.start()
    with pytest.warns(CheckpointWarning, match="p4 changed while it was being copied"):
        run.train(1)
    opener.join()
    expected = run.state()
    assert run.checkpointer.wait() == 6
    assert same(stored(path)[1], expected)
    run.checkpointer.close()
    platform.finish()


def test_what_did_not_go_direct_is_not_measured_as_that(fake, path, monkeypatch):
    """As while the store is still being registered."""
    platform = fake()
    wait = Store.wait
    monkeypatch.setattr(Store, "wait", lambda *arguments: wait(*arguments)._replace(in_place=False))
    run = Run(platform, path)
    run.train(10)
    run.checkpointer.wait()
    [way] = run.checkpointer.why()["snapshot"]
    assert "being measured" in way
    run.checkpointer.close()
    platform.finish()
