"""Boundaries, loops and decoration: which iterations get a version, and that each is exact.

Goal: what a training script sees is what `Checkpointer` promises. Method: short deterministic runs
on tmpfs, compared bit for bit with runs that were not interrupted.
"""

import random
import warnings

import numpy as np
import pytest
import torch

import lightckpt
from gate import until
from lightckpt import gpus
from small_run import assert_same
from training import make, state_of, update


@pytest.mark.parametrize("mode", ["overlap", "stop", "auto"])
def test_a_resumed_run_equals_an_uninterrupted_one(path, mode):
    model, optimizer = make()
    torch.manual_seed(5)
    expected = [update(model, optimizer, i) for i in range(20)]
    final = state_of(model, optimizer)

    model, optimizer = make()
    torch.manual_seed(5)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode=mode) as checkpointer:
        for i in range(13):
            update(model, optimizer, i)
            checkpointer.mark()
    model, optimizer = make(seed=9)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode=mode) as checkpointer:
        start = checkpointer.restore()
        assert start == 13
        losses = []
        for i in range(start, 20):
            losses.append(update(model, optimizer, i))
            checkpointer.mark()
    assert losses == expected[13:]
    assert_same(state_of(model, optimizer), final)


def test_every_step_is_durable_once_the_next_boundary_returns(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for i in range(8):
            update(model, optimizer, i)
            ticket = checkpointer.mark()
            assert ticket.step == i + 1
            assert checkpointer.latest >= i
        assert ticket.wait() == 8
        assert ticket.durable
        assert ticket.copied()


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_gpu_still_copies_into_pinned_memory_is_waited_for(path, monkeypatch, packed):
    """A GPU's late copy moves no counter: here it comes when it is waited for."""
    model, _ = make()
    average = torch.zeros(50, 8)[:, 0] if packed else torch.zeros(50)
    monkeypatch.setattr(gpus, "is_pinned", lambda tensor: tensor is average)
    monkeypatch.setattr(gpus, "synchronize", lambda ordinals: average.numpy().fill(7))
    with lightckpt.Checkpointer(path, model=model, tensors={"average": average}) as checkpointer:
        checkpointer.mark()
    assert torch.equal(lightckpt.load(path)["tensors"]["average"], torch.full((50,), 7.0))


def test_a_break_or_an_exception_ends_no_iteration(path):
    model, optimizer = make()
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer)
    for step, _ in checkpointer.iterate(range(10)):
        update(model, optimizer, step)
        if step == 3:
            break
    assert checkpointer.wait() == 3
    with pytest.raises(KeyError), checkpointer:
        update(model, optimizer, 4)
        raise KeyError
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.steps()[0] == 3


def test_an_accumulation_makes_versions_at_updates_only(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for i in range(1, 9):
            model(torch.ones(2, 6)).sum().backward()
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            ticket = checkpointer.mark()
            assert bool(ticket.skipped) == (i % 4 != 0)
        assert checkpointer.wait() == 8
    assert checkpointer.stats.versions == 2


def test_every_n_makes_every_nth_version(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, every=3, keep=4) as c:
        for i in range(10):
            update(model, optimizer, i)
            c.mark()
        c.wait()
        assert c.steps() == [9, 6, 3]


def test_every_auto_adjusts_and_says_why(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, every="auto") as c:
        for i in range(60):
            update(model, optimizer, i)
            c.mark()
        assert "costs" in c.why()["every"]
        assert 1 <= c.stats.versions < 60


def test_steps_hold_exactly_the_state_at_their_boundary(path):
    model, optimizer = make()
    states = {}
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=5) as checkpointer:
        for i in range(12):
            update(model, optimizer, i)
            checkpointer.mark()
            states[i + 1] = state_of(model, optimizer)
        checkpointer.wait()
        held = checkpointer.steps()
        assert len(held) >= 5
    for step in held:
        loaded = lightckpt.load(path, step=step)
        assert_same(dict(loaded["model"]), dict(states[step][0]))


def test_an_evaluation_makes_the_last_step_durable(path, gate):
    model, optimizer = make()
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap", media="emulated"
    ) as c:
        for i in range(7):
            update(model, optimizer, i)
            c.mark()
        c.wait()
        update(model, optimizer, 7)
        gate.close()
        ticket = c.mark()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 6))
            assert not c._driver.flight._commit, "it has not been copied"
            gate.open()
            until(ticket.copied, "copy")
            model(torch.ones(2, 6))
        assert c._driver.flight._commit, "no forward call committed it"
        assert not ticket.durable  # nobody has waited for it yet
        assert ticket.wait() == 8


@pytest.mark.slow
def test_compiled_steps_and_models_are_guarded(path):
    def train(compiled):
        model, optimizer = make()
        torch.manual_seed(3)
        forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        with lightckpt.Checkpointer(path, model=forward, optimizer=optimizer, mode="overlap",
                                    on_error="raise") as c:  # fmt: skip
            for _ in range(10):
                optimizer.zero_grad()
                forward(torch.ones(3, 6)).square().mean().backward()
                step()
                c.mark()
            assert c._driver.trust.moved == {}
            assert c._driver._plan.layers
        return state_of(model, optimizer)

    after = train(compiled=True)
    loaded = lightckpt.load(path)
    assert loaded["step"] == 10
    assert_same(dict(loaded["model"]), dict(after[0]))


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, k):
        return torch.full((6,), float(k)) + torch.rand(6) + random.random() + np.random.rand()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stop", [2, 3, 4, 7])
def test_iterate_resumes_in_the_middle_of_an_epoch(path, stop, workers):
    def seeded(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def loader():
        return torch.utils.data.DataLoader(
            Augmented(), batch_size=4, shuffle=True, num_workers=workers
        )

    def train(checkpointer, model, optimizer, start, until=None):
        seen = []
        for step, batch in checkpointer.iterate(loader(), start=start, epochs=3):
            if step == until:
                break
            seen.append((step, batch.sum().item(), torch.rand(1).item()))
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        return seen

    model, optimizer = make()
    seeded(1)
    with lightckpt.Checkpointer(path + "-whole", model=model, optimizer=optimizer) as checkpointer:
        expected = train(checkpointer, model, optimizer, 0)
    final = state_of(model, optimizer)
    assert [step for step, *_ in expected] == list(range(9))

    model, optimizer = make()
    seeded(1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        assert train(checkpointer, model, optimizer, 0, until=stop) == expected[:stop]
    model, optimizer = make(seed=3)
    seeded(77)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        start = checkpointer.restore()
        assert start == stop
        assert train(checkpointer, model, optimizer, start) == expected[stop:]
    assert_same(state_of(model, optimizer), final)


def test_iterate_refuses_a_start_that_was_not_restored(path):
    model, optimizer = make()
    with (
        lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer,
        pytest.raises(ValueError, match="start=4, but this run stands at step 0"),
    ):
        checkpointer.iterate([1], start=4)


def test_a_plain_loader_as_extra_is_refused_with_advice(path):
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(TypeError, match=r"give the loader to iterate\(\)"):
        lightckpt.Checkpointer(path, model=make()[0], extra={"loader": loader})


def test_protect_alone_makes_every_step_durable(path):
    def train(model, optimizer, steps):
        return [update(model, optimizer, i) for i in steps]

    model, optimizer = make()
    torch.manual_seed(2)
    expected = train(model, optimizer, range(9))
    model, optimizer = make()
    torch.manual_seed(2)
    checkpointer = lightckpt.protect(optimizer, path, model=model)
    train(model, optimizer, range(6))
    checkpointer.close()
    model, optimizer = make(seed=4)
    checkpointer = lightckpt.protect(optimizer, path, model=model)
    assert checkpointer.restore() == 6
    assert train(model, optimizer, range(6, 9)) == expected[6:]
    checkpointer.close()


def test_decorate_returns_the_same_bound_method_and_schedulers_accept_it(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        step = optimizer.step
        optimizer.step = checkpointer.decorate(step)
        assert optimizer.step is step
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            for i in range(3):
                update(model, optimizer, i)
                scheduler.step()


def test_several_optimizers_with_decoration_only_are_refused_by_name(path):
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lightckpt.Checkpointer(
        path, model=model, optimizer={"adam": optimizer, "sgd": other}
    )
    checkpointer.decorate(optimizer.step)
    update(model, optimizer, 0)
    with pytest.raises(ValueError, match="adam, sgd"):
        update(model, optimizer, 1)
    checkpointer.mark()
    update(model, optimizer, 1)
    checkpointer.close()


def test_closures_and_scalers_work(path):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, scaler=scaler, on_error="raise"
    ) as checkpointer:
        for i in range(6):
            loss = model(torch.ones(2, 6)).sum() * (float("inf") if i == 3 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not checkpointer.mark().skipped
        optimizer.step(lambda: model(torch.ones(2, 6)).sum())
        checkpointer.mark()
        assert checkpointer.wait() == 7


def test_an_argument_of_the_wrong_kind_is_told_by_its_full_name(path):
    wrong = {"g": np.random.default_rng(0)}
    with pytest.raises(TypeError, match=r"a numpy\.random\.\S+, not a torch\.\S+"):
        lightckpt.Checkpointer(path, model=make()[0], generators=wrong)
    with pytest.raises(TypeError, match=r"scheduler is a list without"):
        lightckpt.Checkpointer(path, model=make()[0], scheduler=[1])
