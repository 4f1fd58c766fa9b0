"""Goal: a signal that a run finishes on ends it at the next boundary, that step durable, and then
does what it did before.

Method: a life of torch_trainer.py waits in the middle of a step, is sent the signal there, and goes
on. What it reports, how it ends, and what the store then holds are compared with a run that nobody
stopped. No test waits for time: a signal that was sent while the other side waits in ``recv`` has
been handled before that returns.
"""

import dataclasses
import os
import signal
import threading

import pytest
import torch

import lightckpt
import torch_trainer
from training import make, update

pytestmark = pytest.mark.kill

STEPS = 12
STYLES = ["iterate", "mark", "decorate"]
TERM = (int(signal.SIGTERM),)


@pytest.fixture(scope="module")
def digests(torch_trainers, tmp_path_factory):
    path = tmp_path_factory.mktemp("gold") / "run"
    messages, code = run(torch_trainers, torch_trainer.Job(str(path), STEPS))
    assert code == 0
    return {message[1]: message[2] for message in messages if message[0] in ("restored", "end")}


def run(zygote, job, *, send_in=(), number=signal.SIGTERM):
    """Run a life, and send it *number* in the middle of steps; its messages and exit code."""
    life = zygote.spawn()
    life.connection.send(dataclasses.asdict(job))
    messages = []
    with life.connection as connection:
        try:
            while True:
                message = connection.recv()
                if message[0] == "middle":
                    if message[1] in send_in:
                        os.kill(life.pid, number)
                    connection.send(None)
                else:
                    messages.append(message)
        except (EOFError, ConnectionResetError):
            pass
    return messages, life.reap()


def job_that_talks(folder, **changes):
    changes = {"style": "mark", "wait": 0.0, "finish_on": TERM, "talk": True, **changes}
    return torch_trainer.Job(str(folder / "run"), STEPS, **changes)


def newest(path, digests, zygote):
    """The step that a new life restores; its bytes are those of a run that nobody stopped."""
    messages, code = run(zygote, torch_trainer.Job(str(path), STEPS))
    assert code == 0
    kind, step, digest = messages[0]
    assert (kind, digest) == ("restored", digests[step])
    assert messages[-2][:3] == ("end", STEPS, digests[STEPS]) or step == STEPS
    return step


@pytest.mark.parametrize("style", STYLES)
def test_the_iteration_in_progress_is_finished_and_durable(torch_trainers, digests, folder, style):
    job = job_that_talks(folder, style=style)
    messages, code = run(torch_trainers, job, send_in=[5])
    assert code == -signal.SIGTERM
    # Only after mark() does the loop report: the other boundaries come behind the report.
    last = 4 if style == "mark" else 5
    assert [message[:3] for message in messages[1:]] == [
        ("end", step, digests[step]) for step in range(1, last + 1)
    ]
    assert newest(folder / "run", digests, torch_trainers) == 5


def test_a_version_is_made_although_none_is_due(torch_trainers, digests, folder):
    job = job_that_talks(folder, options={"every": 100})
    messages, code = run(torch_trainers, job, send_in=[7])
    assert code == -signal.SIGTERM
    assert messages[-1][3] == 0
    assert newest(folder / "run", digests, torch_trainers) == 7


@pytest.mark.parametrize("before", ["call", "ignore"])
def test_a_handler_that_was_there_is_called_or_nothing_happens_and_training_goes_on(
    torch_trainers, digests, folder, before
):
    job = job_that_talks(folder, before=before)
    messages, code = run(torch_trainers, job, send_in=[3, 6])
    assert code == 0
    told = [message for message in messages if message[0] == "told"]
    # At the boundary: its step has ended, is durable, and the next one has not begun.
    expected = [("told", *TERM, 3, 3, True), ("told", *TERM, 6, 6, True)]
    assert told == (expected if before == "call" else [])
    assert {m[1]: m[3] for m in messages if m[0] == "end"}[6] == 6
    assert newest(folder / "run", digests, torch_trainers) == STEPS


def test_a_handler_that_exits_does_so_from_the_boundary(torch_trainers, digests, folder):
    job = job_that_talks(folder, before="raise", style="iterate")
    messages, _code = run(torch_trainers, job, send_in=[4])
    assert messages[-1] == ("told", *TERM, 4, 4, True)
    assert newest(folder / "run", digests, torch_trainers) == 4


def test_several_signals_before_one_boundary_are_one(torch_trainers, digests, folder):
    """And a second one in the middle of a step does not end it."""
    life = torch_trainers.spawn()
    life.connection.send(dataclasses.asdict(job_that_talks(folder)))
    assert life.connection.recv()[0] == "restored"
    assert life.connection.recv() == ("middle", 1)
    for _ in range(3):
        os.kill(life.pid, signal.SIGTERM)
    life.connection.send(None)
    assert life.reap() == -signal.SIGTERM
    assert newest(folder / "run", digests, torch_trainers) == 1


def test_a_signal_after_the_last_boundary_counts_at_the_close(torch_trainers, digests, folder):
    messages, code = run(torch_trainers, job_that_talks(folder), send_in=[0])
    assert code == -signal.SIGTERM
    assert messages[-1][0] == "end"
    assert newest(folder / "run", digests, torch_trainers) == STEPS


def test_other_signals_may_be_named(torch_trainers, digests, folder):
    job = job_that_talks(folder, finish_on=(int(signal.SIGUSR1), int(signal.SIGINT)))
    _, code = run(torch_trainers, job, send_in=[2], number=signal.SIGUSR1)
    assert code == -signal.SIGUSR1
    assert newest(folder / "run", digests, torch_trainers) == 2


# In this process.


@pytest.fixture
def handled():
    """SIGUSR1 calls a list's append for the time of a test."""
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGUSR1, before)


def test_close_gives_the_handler_back_and_twice_is_once(path, handled):
    before = signal.getsignal(signal.SIGUSR1)
    checkpointer = lightckpt.Checkpointer(path, model=make()[0])
    checkpointer.finish_on(signal.SIGUSR1)
    checkpointer.finish_on(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) != before
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert not handled


@pytest.mark.parametrize("end", ["close", "_end_quietly"])
def test_what_came_is_passed_on_at_the_close_or_as_the_interpreter_ends(path, handled, end):
    checkpointer = lightckpt.Checkpointer(path, model=make()[0])
    checkpointer.finish_on(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert not handled
    getattr(checkpointer, end)()
    assert handled == [signal.SIGUSR1]


def test_a_handler_that_was_set_later_is_left_in_place(path, handled):
    checkpointer = lightckpt.Checkpointer(path, model=make()[0])
    checkpointer.finish_on(signal.SIGUSR1)
    ours = signal.getsignal(signal.SIGUSR1)

    def over(number, frame):
        ours(number, frame)

    signal.signal(signal.SIGUSR1, over)
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) is over
    signal.raise_signal(signal.SIGUSR1)  # nobody would come to a boundary any more
    assert handled == [signal.SIGUSR1]


def test_two_checkpointers_finish_one_after_the_other(folder, handled):
    model, optimizer = make()
    runs = [lightckpt.Checkpointer(folder / name, model=model) for name in ("one", "two")]
    for run in runs:
        run.finish_on(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    update(model, optimizer, 0)
    runs[1].mark()
    assert runs[1].latest == 1
    assert not handled
    runs[0].mark()
    assert runs[0].latest == 1
    assert handled == [signal.SIGUSR1]
    for run in reversed(runs):
        run.close()


def test_a_boundary_on_another_thread_has_the_handler_run_on_the_main_one(path, handled):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.finish_on(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        update(model, optimizer, 0)
        thread = threading.Thread(target=checkpointer.mark)
        thread.start()
        thread.join()
        assert handled == [signal.SIGUSR1]
        assert checkpointer.latest == 1
        with pytest.raises(ValueError, match="main thread"):
            call_in_thread(lambda: checkpointer.finish_on(signal.SIGUSR2))
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.finish_on()


def call_in_thread(function):
    """Call *function* in a thread, and raise here what it raised there."""
    raised = []

    def call():
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise raised[0]


def test_a_forked_child_ends_on_the_signal_at_once(path):
    """A loader's worker must: its parent ends it that way."""
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.finish_on()
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_signal_that_nobody_can_catch_is_refused_and_the_store_is_whole(path):
    with lightckpt.Checkpointer(path, tensors={"t": torch.zeros(3)}) as checkpointer:
        with pytest.raises(OSError, match="Invalid argument"):
            checkpointer.finish_on(signal.SIGKILL)
        checkpointer.mark()
        assert checkpointer.wait() == 1


def test_a_failed_version_does_not_keep_the_signal_back(path, handled):
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer)
    checkpointer.finish_on(signal.SIGUSR1)
    update(model, optimizer, 0)
    os.remove(path)
    signal.raise_signal(signal.SIGUSR1)
    with pytest.warns(lightckpt.CheckpointWarning, match="removed or replaced while it was open"):
        checkpointer.mark()
    assert handled == [signal.SIGUSR1]
    with pytest.raises(lightckpt.MediaError, match="removed or replaced while it was open"):
        checkpointer.close()
