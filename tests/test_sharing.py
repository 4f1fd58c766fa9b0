"""What a restored run shares, it shared when it was saved; what cannot be so is refused by name.

Goal: neither memory in common nor a structure that does not fit is taken without a word, or found
out when half of the run has been changed. Method: small runs, changed between saving and restoring;
after a refusal nothing has changed. That overlap is exact is shown against sets of byte addresses.
"""

import random

import pytest
import torch
from torch import nn

import lightckpt
from lightckpt import StructureError, UnsafeStateError
from lightckpt._core import Store
from lightckpt.manifest import decode_manifest
from lightckpt.overlap import meetings, reach_of
from lightckpt.remake import MADE
from small_run import assert_same, clones, save
from training import make, update


def saved_by(path, optimizer=None, **objects):
    with lightckpt.Checkpointer(path, optimizer=optimizer, **objects) as checkpointer:
        checkpointer.mark()
        checkpointer.wait()


def entries_of(path):
    with Store(path, read_only=True) as store:
        manifest = decode_manifest(store.view(store.versions()[0].version)[0])
    return {entry.path[-1]: entry for entry in manifest.entries if entry.path[0] not in MADE}


def assert_refused(path, match, **objects):
    """Assert that restoring into *objects* is refused, and that nothing of them has changed."""
    model, optimizer = objects.get("model"), objects.get("optimizer")
    before = clones(dict(objects.get("tensors") or (model.state_dict() if model else {})))
    groups = [dict(group) for group in optimizer.param_groups] if optimizer else []
    with lightckpt.Checkpointer(path, **objects) as checkpointer:
        with pytest.raises(StructureError, match=match):
            checkpointer.restore()
    assert_same(dict(objects.get("tensors") or (model.state_dict() if model else {})), before)
    if optimizer:
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            assert all(group[key] is value for key, value in old.items())


# Overlap.


def addresses(begin, itemsize, shape, stride):
    found = {begin}
    for n, s in zip(shape, stride, strict=True):
        found = {at + k * s * itemsize for at in found for k in range(n)}
    return {at + k for at in found for k in range(itemsize)}


def test_overlap_is_exact():
    seed = random.SystemRandom().getrandbits(31)
    chance = random.Random(seed)  # to replay: put the seed of the message here
    for _ in range(5000):
        tensors = []
        for _ in range(3):
            dims = chance.randint(0, 3)
            shape = [chance.randint(1, 4) for _ in range(dims)]
            stride = [chance.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in range(dims)]
            tensors.append((chance.randint(0, 60), chance.choice([1, 2, 4]), shape, stride))
        sets = [addresses(*tensor) for tensor in tensors]
        expected = {(i, j) for i in range(3) for j in range(i + 1, 3) if sets[i] & sets[j]}
        found = list(meetings([reach_of(*tensor) for tensor in tensors]))
        assert sorted(found) == sorted(expected), f"seed {seed}: {tensors}"


def test_overlap_of_large_tensors_needs_no_walk_over_their_elements():
    columns = [reach_of(at * 4, 4, (1 << 40, 8), (1 << 20, 1)) for at in (0, 8, 15)]
    assert list(meetings(columns)) == [(1, 2)]


# Shared in the store, not in the run; and the other way round.


def tied(kind):
    """Two linear layers that share their weight in one of several ways, or not at all."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    if kind == "object":
        model["b"].weight = model["a"].weight
    elif kind == "data":
        model["b"].weight.data = model["a"].weight.data
    elif kind == "part":
        model["b"].weight.data = model["a"].weight.data.view(-1)[:12].as_strided((4, 4), (2, 1))
    return model


@pytest.mark.parametrize("kind", ["object", "data", "part"])
def test_weights_tied_in_one_of_store_and_run_are_refused(path, kind):
    one, other = tied(kind), tied("no")
    saved_by(path, model=one)
    assert_refused(path, r"a\.weight and .*b\.weight share memory in the store, not", model=other)
    with torch.no_grad():  # equal bytes are no excuse: the next update makes them differ
        other["b"].weight.copy_(other["a"].weight)
    saved_by(path + "-untied", model=other)
    assert_refused(
        path + "-untied", r"a\.weight and .*b\.weight share memory in the run, not", model=one
    )
    saved_by(path + "-again", model=tied(kind))
    with lightckpt.Checkpointer(path + "-again", model=one) as checkpointer:
        assert checkpointer.restore() == 1


def test_weights_that_come_to_share_memory_are_seen_to(path):
    model = tied("no")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        for i in range(4):
            optimizer.step()
            if i == 2:
                model["b"].weight.data = model["a"].weight.data
            checkpointer.mark()
    entries = entries_of(path)
    assert entries["a.weight"].extent == entries["b.weight"].extent


def test_a_flat_buffer_is_compared_with_each_of_its_pieces(path):
    def pieces(apart):
        flat = torch.randn(12)
        tensors = {"flat": flat, **{f"piece{k}": flat[4 * k : 4 * k + 4] for k in range(3)}}
        return tensors | ({f"piece{apart}": torch.randn(4)} if apart is not None else {})

    saved_by(path, tensors=pieces(None))
    saved_by(path + "-apart", tensors=pieces(2))
    assert_refused(path, "flat and tensor/piece2 share memory in the store", tensors=pieces(2))
    assert_refused(
        path + "-apart", "flat and tensor/piece2 share memory in the run", tensors=pieces(None)
    )


def test_columns_of_one_matrix_may_lie_in_a_matrix_each(path):
    def columns(shared):
        one = torch.randn(6, 2)
        return {"left": one[:, 0], "right": (one if shared else torch.randn(6, 2))[:, 1]}

    before, after = columns(shared=True), columns(shared=False)
    saved_by(path, tensors=before)
    with lightckpt.Checkpointer(path, tensors=after) as checkpointer:
        checkpointer.restore()
    assert_same(after, before)


def columns_of_a_large_matrix(kind):
    base = torch.randn(50, 40)
    other = {"same": base[:, 3], "part": base[10:20, 3:5], "no": torch.randn(50, 40)[:, 3]}
    return {"one": base[:, 3], "other": other[kind], "apart": base[:, 7]}


@pytest.mark.parametrize("kind", ["same", "part"])
def test_sharing_is_known_of_tensors_that_are_stored_as_copies(path, kind):
    before = columns_of_a_large_matrix(kind)
    saved_by(path, tensors=before)
    after = columns_of_a_large_matrix(kind)
    with lightckpt.Checkpointer(path, tensors=after) as checkpointer:
        checkpointer.restore()
    assert_same(after, before)
    if kind == "same":  # the column is stored once, and not the matrix
        assert entries_of(path)["one"].packed
        apart = columns_of_a_large_matrix("no")
        assert_refused(path, "one and tensor/other share memory in the store", tensors=apart)


def test_pieces_that_lie_otherwise_in_the_same_memory_are_refused(path):
    def views(transposed):
        flat = torch.randn(9)
        return {"flat": flat, "square": flat.view(3, 3).t() if transposed else flat.view(3, 3)}

    saved_by(path, tensors=views(transposed=False))
    assert_refused(path, "flat and tensor/square share memory", tensors=views(transposed=True))


def test_state_in_memory_that_the_run_has_not_is_refused(path):
    def fresh(flat):
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if flat:  # the parameters are pieces of the optimizer's flat buffer
            parameters = list(model.parameters())
            whole = torch.cat([p.detach().flatten() for p in parameters])
            at = 0
            for p in parameters:
                p.data = whole[at : at + p.numel()].view_as(p)
                at += p.numel()
            optimizer.state["flat"] = whole
        return {"model": model, "optimizer": optimizer}

    save(path, **fresh(flat=True))
    assert_refused(path, r"flat and model/model/.* share memory in the store", **fresh(flat=False))
    whole = fresh(flat=True)
    with lightckpt.Checkpointer(path, **whole) as checkpointer:
        assert checkpointer.restore() == 1
    first = next(whole["model"].parameters())
    assert whole["optimizer"].state["flat"].data_ptr() == first.data_ptr()


def test_a_state_tensor_that_stays_is_the_same_object(path):
    model, optimizer = make()
    update(model, optimizer, 0)
    save(path, model=model, optimizer=optimizer, update=lambda: update(model, optimizer, 1))
    before = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.restore()
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))


# What else does not fit is found before anything is touched.


def with_buffer(value):
    model = nn.Linear(4, 4)
    model.register_buffer("extra", value)
    return model


def test_a_buffer_of_another_layout_is_refused_by_name(path):
    dense, sparse = torch.eye(4), torch.eye(4).to_sparse()
    saved_by(path, model=with_buffer(sparse))
    saved_by(path + "-dense", model=with_buffer(dense))
    assert_refused(
        path, "extra is sparse_coo in the store and strided in", model=with_buffer(dense)
    )
    assert_refused(
        path + "-dense", "extra is strided in the store and sparse_coo", model=with_buffer(sparse)
    )
    other = with_buffer(torch.eye(5).to_sparse())
    assert_refused(
        path, r"extra has float32 \[4, 4\] in the store and float32 \[5, 5\]", model=other
    )


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_by_name(path, layout):
    with pytest.raises(UnsafeStateError, match="model/extra cannot be saved: it is a nested"):
        saved_by(path, model=with_buffer(nested(layout)), on_error="raise")
    saved_by(path + "-dense", model=with_buffer(torch.eye(4)))
    with lightckpt.Checkpointer(path + "-dense", model=with_buffer(nested(layout))) as reborn:
        with pytest.raises(StructureError, match="extra is strided in the store and nested in"):
            reborn.restore()


def test_state_of_another_class_of_optimizer_is_refused(path):
    model, _ = make()
    save(path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    adam = torch.optim.Adam(model.parameters())
    assert_refused(path, r"\(Adam\) needs the options .*betas", model=model, optimizer=adam)


def test_options_that_came_in_training_are_no_other_class(path):
    model, optimizer = make()
    optimizer.param_groups[0]["mine"] = 3
    save(path, model=model, optimizer=optimizer)
    model, optimizer = make()
    with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.restore()
    assert optimizer.param_groups[0]["mine"] == 3


class Packed(nn.Linear):
    """Shows in its state_dict what is no parameter, and leaves loading it to nobody."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.zeros(2)


class Unpacked(Packed):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.loaded = state_dict.pop(prefix + "packed")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_shows_what_it_cannot_load_is_refused_by_name(path):
    model = nn.Sequential(Packed(2, 2))
    with pytest.raises(UnsafeStateError, match=r"model/model/0 \(Packed\) shows 'packed'"):
        saved_by(path, model=model, on_error="raise")


def test_what_a_module_shows_is_loaded_and_missed(path):
    model = nn.Sequential(Unpacked(2, 2))
    saved_by(path, model=model)
    with lightckpt.Checkpointer(path, model=model) as checkpointer:
        checkpointer.restore()
    assert_same(model[0].loaded, torch.zeros(2))
    assert_same(lightckpt.load(path)["model"]["0.packed"], torch.zeros(2))
    other = nn.Sequential(nn.Linear(2, 2))
    assert_refused(path, "module model/0 has state of its own in the store only", model=other)


def test_gradients_that_are_not_captured_are_zeros_or_none_as_they_were(path):
    model = nn.ModuleDict({"with": nn.Embedding(9, 4, sparse=True), "without": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model["with"](torch.tensor([1, 2])).sum().backward()
    save(path, model=model, optimizer=optimizer)
    for parameter in model["without"].parameters():
        parameter.grad = torch.ones_like(parameter)
    for forget in (False, True):  # as in the same process, and as in a fresh one
        if forget:
            model["with"].weight.grad = None
        with lightckpt.Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.restore()
        assert all(parameter.grad is None for parameter in model["without"].parameters())
        gradient = model["with"].weight.grad
        assert gradient.is_sparse
        assert gradient.sparse_dim() == 1
        assert_same(gradient.to_dense(), torch.zeros(9, 4))
