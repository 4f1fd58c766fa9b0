"""The facade: boundaries, guards, restoring, policies and errors, on small models.

Goal: what a training script sees is what `Checkpointer` promises. Method: short deterministic runs
on tmpfs (or a temporary folder), compared bit for bit with runs that were not interrupted.
"""

import copy
import os
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import CheckpointWarning


def make(seed=0, width=6, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    return model, optimizer


def update(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    width = next(model.parameters()).shape[1]
    x = torch.randn(5, width, generator=generator)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def state_of(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture
def path(tmp_path_factory, tmp_path):
    if os.path.isdir("/dev/shm"):
        import tempfile

        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lightckpt-test-") as folder:
            yield os.path.join(folder, "store")
    else:
        yield str(tmp_path / "store")


# -- boundaries ------------------------------------------------------------------------------------


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


def test_an_evaluation_makes_the_last_step_durable(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as c:
        for i in range(8):
            update(model, optimizer, i)
            ticket = c.mark()
        model.eval()
        with torch.no_grad():
            for _ in range(10_000):
                model(torch.ones(2, 6))
                if c._driver.flight._commit:
                    break
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


# -- loops -----------------------------------------------------------------------------------------


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


# -- decoration ------------------------------------------------------------------------------------


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


# -- changes behind our back -----------------------------------------------------------------------


def test_an_edit_between_boundary_and_update_is_learned_without_losing_a_version(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as c:
        for i in range(10):
            with torch.no_grad():
                model[0].weight.data.mul_(0.999)  # moves no version counter
            update(model, optimizer, i)
            c.mark()
        c.wait()
        assert c.stats.dropped == 0
        assert any("0.weight" in line for line in c.why()["volatile"])


def test_a_late_edit_drops_the_version_and_the_tensor_becomes_volatile(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as c:
        for i in range(10):
            update(model, optimizer, i)
            c.mark()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        with pytest.warns(CheckpointWarning, match=r"0\.weight changed while it was being copied"):
            update(model, optimizer, 10)
            c.mark()
        assert c.wait() == 11
        assert c.stats.dropped == 1
        update(model, optimizer, 11)
        c.mark()
        assert c.wait() == 12


def test_schedule_free_like_optimizers_are_never_lazy(path):
    class Swapping(torch.optim.SGD):
        def train(self):
            pass

        def eval(self):
            pass

    model, _ = make()
    optimizer = Swapping(model.parameters(), lr=0.1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, mode="overlap") as c:
        for i in range(8):
            update(model, optimizer, i)
            c.mark()
        assert not c._driver._plan.layers


# -- restoring -------------------------------------------------------------------------------------


def test_a_store_of_another_model_names_what_differs_and_touches_nothing(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
    model, optimizer = make(width=7)
    before = state_of(model, optimizer)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        with pytest.raises(lightckpt.StructureError, match=r"0\.weight has float32 \[12, 6\]"):
            checkpointer.restore()
    assert_same(state_of(model, optimizer), before)


def test_restoring_an_older_step_retires_the_newer_ones(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=3) as checkpointer:
        for i in range(5):
            update(model, optimizer, i)
            checkpointer.mark()
        checkpointer.wait()
        assert checkpointer.restore(step=3) == 3
        assert checkpointer.steps()[0] == 3
        with pytest.raises(lightckpt.NotFoundError, match="no version of step 5"):
            checkpointer.restore(step=5)
        update(model, optimizer, 3)
        checkpointer.mark()
        assert checkpointer.wait() == 4


def flip(path, version_step, name):
    """Flip one bit of a tensor of a version, through the file."""
    from lightckpt._core import Store
    from lightckpt.manifest import decode_manifest, name_of

    with Store(path, read_only=True) as store:
        version = next(v for v in store.versions() if v.step == version_step)
        manifest = decode_manifest(store.view(version.version)[0])
        entry = next(e for e in manifest.entries if name_of(e.path).endswith(name))
        content = bytes(store.locate(version.version, entry.extent))
    with open(path, "r+b") as file:
        data = file.read()
        assert data.count(content) >= 1
        at = -1
        while (at := data.find(content, at + 1)) >= 0:
            file.seek(at)
            file.write(bytes([content[0] ^ 1]))


def test_a_flipped_bit_falls_back_to_the_older_version_and_says_so(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=2) as checkpointer:
        for i in range(4):
            update(model, optimizer, i)
            checkpointer.mark()
    flip(path, 4, "exp_avg/model/model/0.weight")
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer, keep=2) as checkpointer:
        with pytest.warns(CheckpointWarning, match=r"restored step 3 .*exp_avg/model/model/0\.w"):
            assert checkpointer.restore() == 3


def test_a_flipped_bit_without_an_older_version_is_an_error_that_names_it(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        update(model, optimizer, 0)
        checkpointer.mark()
    flip(path, 1, "model/model/3.bias")
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        with pytest.raises(lightckpt.CorruptError, match=r"model/model/3\.bias"):
            checkpointer.restore()


# -- errors ----------------------------------------------------------------------------------------


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
    checkpointer = lightckpt.Checkpointer(path, model=model, optimizer=optimizer, extra={"o": Odd()})
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


def test_a_guard_beyond_its_timeout_gives_the_version_up_and_training_goes_on(path):
    model = nn.Linear(2000, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, mode="overlap", workers=1
    ) as checkpointer:
        for i in range(8):
            update(model, optimizer, i)
            checkpointer.mark()
        checkpointer.wait()
        update(model, optimizer, 8)
        checkpointer.mark()
        checkpointer._driver.flight._timeout = 1e-6
        model(torch.ones(1, 2000)).sum().backward()
        with pytest.warns(CheckpointWarning, match="not done after"):
            optimizer.step()
        with pytest.raises(lightckpt.WaitTimeoutError):
            checkpointer.wait()
        checkpointer.mark()
        assert checkpointer.wait() == 10


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


def test_threads_may_mark_wait_and_look_at_once(path):
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        stop, errors = threading.Event(), []

        def look():
            try:
                while not stop.is_set():
                    checkpointer.wait()
                    steps = checkpointer.steps()
                    assert steps == sorted(steps, reverse=True)
            except Exception as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for i in range(30):
            update(model, optimizer, i)
            checkpointer.mark()
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
        assert not errors
        assert checkpointer.wait() == 30


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
