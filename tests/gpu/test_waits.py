"""Where the host waits for a GPU. Goal: at the boundaries and guards of a run that has settled it
does not, in any of the loops that people write, and where it must know what only the GPU does, it
asks once. Method: what torch would make the host wait for is noted between two points of a run,
whose gradients are made by hand.
"""

import warnings

import pytest
import torch

import lightckpt
from gpu_run import Model, Run, Sgd, same, stored
from lightckpt.errors import CheckpointWarning

SETTLED = 8  # steps after which every layer streams lazily
PARTS = {"a": ("p5", "p6", "p7"), "b": ("p8", "p9")}


@pytest.fixture
def make(platform, path):
    """Make a model, its optimizers by name and a checkpointer of them; it is closed at the end."""
    made = []

    def make(parts=PARTS, **options):
        model = Model(platform)
        optimizers = {name: Sgd(model, platform, names) for name, names in parts.items()}
        checkpointer = lightckpt.Checkpointer(
            path, model=model, optimizer=optimizers, media="tmpfs", on_error="raise", **options
        )
        made.append(checkpointer)
        return model, optimizers, checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()


def backward(platform, optimizer):
    """Give each parameter a gradient, or add to the one that it has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = platform.zeros_like(parameter)
            platform.add(parameter.grad, 1)


def clear(optimizers, *, in_place):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not in_place)


def take_turns(platform, optimizers, mark, step):
    """As opponents do: the one's backward reaches the other, which takes that away at its turn."""
    a, b = optimizers.values()
    turn = (b, a) if step % 2 else (a, b)
    clear(turn[:1], in_place=False)
    backward(platform, turn[0])
    if turn[0] is a:
        backward(platform, b)
    turn[0].step()
    return mark()


def test_what_makes_the_host_wait_is_noted(platform):
    """The test of the tests."""
    tensor = platform.tensor(torch.ones(4))
    made = [
        lambda: bool(tensor.any()),
        lambda: tensor.sum().item(),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: tensor.nonzero(),
        lambda: torch.equal(tensor, tensor),
        lambda: torch.zeros(4).copy_(tensor),
        lambda: float(torch.stack(torch._foreach_norm([tensor], 1)).max()),
    ]
    for make in made:
        make()  # what is done at the first time alone is no matter here
        with platform.waits() as waits:
            make()
        assert waits
    with platform.waits() as waits:
        (tensor + 1).mul_(2).sum()
        torch.ones(3).tolist()
    assert waits == []


def test_opponents_do_not_wait_for_the_device(platform, make):
    _, optimizers, checkpointer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        for step in range(SETTLED):
            take_turns(platform, optimizers, checkpointer.mark, step)
        with platform.waits() as waits:
            for step in range(SETTLED, SETTLED + 4):
                assert not take_turns(platform, optimizers, checkpointer.mark, step).skipped
        assert waits == []


@pytest.mark.parametrize(("in_place", "asked"), [(False, 0), (True, 1)])
def test_a_sum_of_gradients_is_asked_for_once_at_most(platform, make, in_place, asked):
    """Each boundary has a buffer that was changed: is it within a sum?"""
    model, optimizers, checkpointer = make({"a": PARTS["a"]})

    def window():
        clear(optimizers.values(), in_place=in_place)
        for part in range(3):
            model()
            backward(platform, optimizers["a"])
            if part == 2:
                optimizers["a"].step()
            assert bool(checkpointer.mark().skipped) == (part < 2)

    for _ in range(SETTLED):
        window()
    with platform.waits() as waits:
        window()
    assert len(waits) == 2 * asked


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_changed_by_hand_gets_its_version_without_a_sum(platform, make, path, in_place):
    model, optimizers, checkpointer = make({"a": PARTS["a"]})
    for _ in range(3):
        backward(platform, optimizers["a"])
        optimizers["a"].step()
        assert not checkpointer.mark().skipped
        backward(platform, optimizers["a"])
        model()
        assert checkpointer.mark().skipped  # within a sum, which is then given up
        platform.synchronize()
        clear(optimizers.values(), in_place=in_place)
        assert not checkpointer.mark().skipped
        checkpointer.wait()
        platform.synchronize()
        assert torch.equal(lightckpt.load(path)["model"]["seen"], model.seen.detach().cpu())


def test_what_only_a_refresh_shows_is_kept_until_the_sum_is_over(platform, make, path):
    model, optimizers, checkpointer = make({"a": PARTS["a"]})
    for _ in range(3):
        backward(platform, optimizers["a"])
        optimizers["a"].step()
        assert not checkpointer.mark().skipped
    clear(optimizers.values(), in_place=False)
    model.p0.data = platform.tensor(torch.full(model.p0.shape, 5.0))
    backward(platform, optimizers["a"])
    assert checkpointer.mark().skipped
    clear(optimizers.values(), in_place=False)
    assert not checkpointer.mark().skipped
    checkpointer.wait()
    assert bool((lightckpt.load(path)["model"]["p0"] == 5).all())


@pytest.mark.parametrize("zero", [False, True], ids=["sums", "zeros"])
def test_a_warning_of_sums_waits_for_no_device(platform, make, zero):
    """A version does without gradients of b; the GPU says late whether they were all zero."""
    _, optimizers, checkpointer = make()
    a, b = optimizers.values()
    backward(platform, b)
    platform.synchronize()
    clear([b], in_place=True)
    for step in range(SETTLED):
        backward(platform, a)
        optimizers["b" if step % 2 else "a"].step()
        checkpointer.mark()
        clear([a], in_place=False)
        clear([b], in_place=True)
    checkpointer.wait()
    platform.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with platform.held_up(), platform.waits() as waits:
            if zero:
                clear([b], in_place=True)
            else:
                backward(platform, b)
            backward(platform, a)
            a.step()
            assert not checkpointer.mark().skipped
            b.step()
        told = [str(warning.message) for warning in caught]
        assert not any("adds gradients up" in text for text in told)
        assert waits == []
        platform.synchronize()
        checkpointer.mark()
        told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    assert ["optimizer b adds gradients up" in text for text in told] == ([] if zero else [True])


def test_what_is_spread_in_memory_is_gathered_on_the_device(platform, path):
    run = Run(platform, path)
    whole = platform.tensor(torch.zeros(400, 8))
    run.model.register_buffer("column", whole[:, 3])
    platform.add(run.model.column, 3)  # so that its kernel is loaded, which may wait
    run.train(SETTLED)
    run.checkpointer.wait()
    with platform.waits() as waits:
        with platform.held_up():
            platform.add(run.model.column, 4)
            run.train(1)
    assert waits == []
    expected = run.state()
    run.checkpointer.wait()
    assert same(stored(path)[1], expected)
    assert bool((expected["column"] == 7).all())
    run.checkpointer.close()
    again = Run(platform, path)
    again.model.register_buffer("column", platform.tensor(torch.zeros(400, 8))[:, 3])
    assert again.checkpointer.restore() == SETTLED + 1
    assert same(again.state(), expected)
    again.checkpointer.close()


def test_a_scale_on_the_device_is_read_for_the_version_alone(platform, make, monkeypatch):
    scaler = torch.amp.GradScaler("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._scale = platform.tensor(scaler._scale)
    read, state_dict = [], torch.amp.GradScaler.state_dict

    def counted(self):
        read.append(1)
        return state_dict(self)

    monkeypatch.setattr(torch.amp.GradScaler, "state_dict", counted)
    _, optimizers, checkpointer = make({"a": PARTS["a"]}, scaler=scaler)
    for _ in range(3):
        backward(platform, optimizers["a"])
        optimizers["a"].step()
        read.clear()
        assert not checkpointer.mark().skipped
        assert len(read) == 1
        read.clear()
        assert checkpointer.mark().skipped
        assert read == []
    scaler._scale.mul_(0.5)  # as an update that it skipped leaves it
    assert not checkpointer.mark().skipped
