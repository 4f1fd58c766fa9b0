"""The facade and many threads. Goal: what the docstrings allow from any thread may come from all at
once, and what is committed is whole. Method: threads that mark, wait, look, close and update, each
bounded by work; every join has a deadline."""

import threading

import pytest
import torch
from torch import nn

import lightckpt
from gate import until
from lightckpt.errors import CheckpointError, WaitTimeoutError
from training import make, state_of, update

DEADLINE = 60


class Crew:
    """Threads that are joined on exit; the first error of one is raised there."""

    def __init__(self):
        self._threads, self._errors = [], []

    def start(self, body, *args):
        def run():
            try:
                body(*args)
            except BaseException as error:  # noqa: BLE001 - raised again on exit
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a thread hangs"
        if self._errors:
            raise self._errors[0]


def test_marks_of_several_threads_are_counted_once_each(path):
    model, optimizer = make()
    turn = threading.Lock()  # training itself is one thread at a time, as any loop is
    steps = []
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:

        def train(worker):
            for i in range(20):
                with turn:
                    update(model, optimizer, 100 * worker + i)
                    steps.append(checkpointer.mark().step)

        with Crew() as crew:
            for worker in range(4):
                crew.start(train, worker)
        assert steps == list(range(1, 81))
        checkpointer.wait()
        expected = state_of(model, optimizer)
    model, optimizer = make(seed=1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.restore() == 80
        torch.testing.assert_close(state_of(model, optimizer), expected, rtol=0, atol=0)


def test_marks_that_nothing_orders_keep_every_version_whole(path):
    """Each mark is a boundary; without updates in between the state is one and the same."""
    tensor = torch.arange(100_000.0)
    with lightckpt.Checkpointer(path, tensors={"x": tensor}, keep=2) as checkpointer:

        def mark():
            for _ in range(25):
                checkpointer.mark()
                checkpointer.latest  # noqa: B018 - looked at while others change it
                checkpointer.steps()

        with Crew() as crew:
            for _ in range(4):
                crew.start(mark)
        assert checkpointer.mark().step == 101
        assert checkpointer.wait() == 101
    assert torch.equal(lightckpt.load(path)["tensors"]["x"], tensor)


def test_threads_may_mark_wait_and_look_at_once(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        stop = threading.Event()

        def look():
            while not stop.is_set():
                checkpointer.wait()
                steps = checkpointer.steps()
                assert steps == sorted(steps, reverse=True)

        with Crew() as crew:
            for _ in range(3):
                crew.start(look)
            for i in range(30):
                update(model, optimizer, i)
                checkpointer.mark()
            # The others wait for this thread to land the last version, so it may not wait for them.
            assert checkpointer.wait() == 30
            stop.set()


@pytest.mark.parametrize("decorated", [False, True])
def test_close_in_the_middle_of_everything_leaves_a_whole_version(path, decorated):
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer, timeout=DEADLINE)
    if decorated:
        checkpointer.decorate(optimizer.step)
    begun = threading.Barrier(5)

    def until_closed(call):
        begun.wait(DEADLINE)
        with pytest.raises(ValueError, match="closed"):
            while True:
                call()

    def train():
        begun.wait(DEADLINE)
        for i in range(200):
            update(model, optimizer, i)
            if not decorated:
                try:
                    checkpointer.mark()
                except ValueError:
                    return

    with Crew() as crew:
        crew.start(train)
        for call in (checkpointer.wait, checkpointer.steps, checkpointer.info):
            crew.start(until_closed, call)
        begun.wait(DEADLINE)
        until(lambda: checkpointer.latest >= 3, "version became durable")
        checkpointer.close()
    state = lightckpt.load(path)
    assert state["step"] >= 3


@pytest.mark.parametrize("closed", [False, True])
def test_forward_calls_of_several_threads_end_one_iteration_once(path, closed):
    """All have seen that one is to end; the first ends it, and none if it is closed by then."""
    model, optimizer = make()
    checkpointer = lightckpt.protect(optimizer, path, model=model)
    update(model, optimizer, 0)
    seen, end = threading.Barrier(4), checkpointer._decoration._end_one

    def end_when_all_have_seen():
        seen.wait(DEADLINE)
        end()

    checkpointer._decoration._end_one = end_when_all_have_seen
    with Crew() as crew:
        for _ in range(3):
            crew.start(model, torch.zeros(1, model[0].in_features))
        until(lambda: seen.n_waiting == 3, "forward call saw the end of an iteration")
        if closed:
            checkpointer.close()
        seen.wait(DEADLINE)
    update(model, optimizer, 1)
    checkpointer.close()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.restore() == (1 if closed else 2)


def test_a_waiter_on_another_thread_is_released_by_close(path):
    """The version in flight lands in close; who waits for it must not wait for the timeout."""
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer, timeout=1000)
    waiting = threading.Event()

    def wait():
        waiting.set()
        try:
            assert checkpointer.wait() == 6
        except ValueError as error:  # it came to wait only after the end
            assert "closed" in str(error)

    with Crew() as crew:
        for i in range(6):  # so many, that the last is copied lazily
            update(model, optimizer, i)
            checkpointer.mark()
        crew.start(wait)
        assert waiting.wait(DEADLINE)
        checkpointer.close()


def test_who_waits_for_a_training_thread_that_waits_for_it_is_told(path):
    """Only the training thread lands what is copied behind it; here it joins the waiter instead."""
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as run:
        for i in range(6):  # so many, that the last is copied lazily
            update(model, optimizer, i)
            run.mark()
        with Crew() as crew:

            def wait():
                with pytest.raises(WaitTimeoutError, match=r"step 6 is not .* reached neither"):
                    run.wait(timeout=0.1)

            crew.start(wait)
        assert run.wait() == 6


def test_guards_fire_from_the_threads_that_run_backward(path):
    """Optimizers in backward: autograd calls each on the thread that runs the backward."""
    torch.manual_seed(0)
    models = {f"m{i}": nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 1)) for i in range(4)}
    optimizers = {}

    def steps_at_once(optimizer):
        def hook(_):
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for name, model in models.items():
        for key, parameter in model.named_parameters():
            optimizers[f"{name}.{key}"] = torch.optim.Adam([parameter], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(steps_at_once(optimizers[f"{name}.{key}"]))
    guarded, main = set(), threading.get_ident()
    for name, optimizer in optimizers.items():
        optimizer.register_step_pre_hook(
            lambda *_, name=name: guarded.add((name, threading.get_ident() != main))
        )

    def backward(model, seed):
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()

    with lightckpt.Checkpointer(path, model=models, optimizer=optimizers) as checkpointer:
        for step in range(12):
            with Crew() as crew:
                for index, model in enumerate(models.values()):
                    crew.start(backward, model, 10 * step + index)
            checkpointer.mark()
        assert checkpointer.wait() == 12
        assert guarded == {(name, True) for name in optimizers}
        assert checkpointer.stats.dropped == 0
        assert any(len(record.guard_ns) > 1 for record in checkpointer.timeline)
    saved = lightckpt.load(path)["model"]
    for name, model in models.items():
        for key, value in model.state_dict().items():
            assert torch.equal(saved[name][key], value)


def test_a_failing_media_is_told_to_every_thread(path):
    """An error of the store reaches whoever waits, and close, whatever thread met it first."""
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer)
    update(model, optimizer, 0)
    checkpointer.mark()
    checkpointer.wait()
    with open(path, "r+b") as file:
        file.truncate(4096)
    with pytest.warns(lightckpt.CheckpointWarning), Crew() as crew:

        def fail():
            update(model, optimizer, 1)
            checkpointer.mark()
            with pytest.raises(CheckpointError, match="cut"):
                checkpointer.wait()

        crew.start(fail)
    with pytest.warns(lightckpt.CheckpointWarning):
        update(model, optimizer, 2)
        checkpointer.mark()
    with pytest.raises(CheckpointError, match="cut"):
        checkpointer.close()
