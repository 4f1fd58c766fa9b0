"""Changes behind the engine's back, and the way back: guards, fallbacks, lineage, pins, threads.

Method: edits at moments where nothing tells the engine, bits flipped through the file, and several
threads at once; the outcome is compared with what `Checkpointer` promises.
"""

import pytest
import torch

import lightckpt
from lightckpt import CheckpointWarning
from lightckpt._core import Store
from lightckpt.manifest import decode_manifest, name_of
from small_run import assert_same
from training import make, state_of, update


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


@pytest.mark.filterwarnings("ignore:step .* changed while it was being copied")
@pytest.mark.parametrize("edited", [slice(None), slice(0, 8)])
def test_a_habit_that_comes_late_costs_versions_until_it_is_first_hit_only(path, edited):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(64)]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    tensors = {f"{i:02}": parameter for i, parameter in enumerate(parameters)}
    outcomes = []
    with lightckpt.Checkpointer(path, tensors=tensors, optimizer=optimizer, mode="overlap") as c:
        for i in range(80):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
            wanted = [parameter.detach().clone() for parameter in parameters]
            ticket = c.mark()
            while not ticket.copied():
                pass
            if i >= 10:  # from here on always, and no version counter moves
                for parameter in parameters[edited]:
                    parameter.data.mul_(1.01)
            optimizer.step()  # the guard
            step = c.wait()
            for parameter, value in zip(parameters, wanted, strict=True):
                parameter.data.copy_(value)
            outcomes.append(step == i + 1)
        assert outcomes.count(False) == c.stats.dropped == 1
        assert outcomes.index(False) >= 10
        assert len(c.why()["volatile"]) == len(parameters[edited])
        loaded = lightckpt.load(path)["tensors"]
        assert_same(
            {name: loaded[name] for name in tensors}, dict(zip(tensors, wanted, strict=True))
        )


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
