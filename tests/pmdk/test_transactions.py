"""Goal: a transaction happens all or not at all, and what it was refused is an error that says so.

Method: a root of words and small objects; exceptions, nested blocks, a full pool, interrupts.
Threads and children are in test_transaction_places.py, what a kill leaves in test_pool_kills.py.
"""

import pytest

import pypmemobj
from pool_tools import KIND, allocate, make_pool, numbers, skip_without_libpmemobj
from pypmemobj import Pool

skip_without_libpmemobj()


# All or nothing.


def test_a_block_that_ends_well_is_durable(pool, root, path, sound):
    with pool.transaction() as change:
        change.add(root)
        root.view("Q")[2] = 5
        allocate(change, 11)
    pool.close()
    assert sound(path)
    with Pool.open(path) as pool:
        assert pool.root().view("Q").tolist() == [1, 1, 5, 1, 1, 1, 1, 1]
        assert numbers(pool, KIND) == [11]


def test_an_exception_rolls_back_and_goes_on(pool, root, path, sound):
    with pool.transaction() as change:
        old = allocate(change, 11)
    with pytest.raises(KeyError, match="mine"):
        with pool.transaction() as change:
            change.add(root, 8, 16)
            root.view("Q")[1] = root.view("Q")[2] = 9
            allocate(change, 12)
            change.free(old)
            raise KeyError("mine")
    assert root.view("Q").tolist() == [1] * 8
    assert numbers(pool, KIND) == [11]
    pool.close()
    assert sound(path)


def test_only_what_was_added_is_put_back(pool, root):
    """The test of the test: without add() the exception leaves what was written."""
    with pytest.raises(KeyError):
        with pool.transaction() as change:
            change.add(root, 8, 8)
            root.view("Q")[1] = root.view("Q")[2] = 9
            raise KeyError
    assert root.view("Q").tolist() == [1, 1, 9, 1, 1, 1, 1, 1]


def test_adding_an_empty_range_is_nothing(pool, root):
    with pool.transaction() as change:
        change.add(root, 64)
        change.add(root, 0, 0)


def test_even_an_interrupt_rolls_back(pool, root):
    with pytest.raises(KeyboardInterrupt):
        with pool.transaction() as change:
            change.add(root)
            root.view("Q")[0] = 9
            raise KeyboardInterrupt
    assert root.view("Q")[0] == 1


class Struck(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["begin", "commit", "abort", "end"])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "fails"])
def test_an_interrupt_at_a_call_of_the_library_leaves_no_transaction_open(
    pool, root, monkeypatch, *, name, after, which, fails
):
    """The *which* one, of a block in a block, that ends well or fails."""
    library, real, calls = pool._handle.library, getattr(pool._handle.library, name), []

    def struck(*arguments):
        calls.append(name)
        if len(calls) == which and not after:
            raise Struck
        result = real(*arguments)
        if len(calls) == which:
            raise Struck
        return result

    monkeypatch.setattr(library, name, struck)
    try:
        with pool.transaction() as change:
            change.add(root)
            for i in range(4):
                root.view("Q")[i] = 9
            with pool.transaction():
                for i in range(4, 8):
                    root.view("Q")[i] = 9
                if fails:
                    raise KeyError
    except (Struck, KeyError) as error:
        assert isinstance(error, Struck) or len(calls) < which
    monkeypatch.undo()
    committed = not fails and name in ("commit", "end") and which == 2 and (after or name == "end")
    rest = name == "abort" and not fails
    assert root.view("Q").tolist() == [9 if committed or rest else 1] * 8
    with pool.transaction() as change:
        change.add(root)
        root.view("Q")[0] = 5
    with pytest.raises(KeyError):
        with pool.transaction() as change:
            change.add(root)
            root.view("Q")[0] = 6
            raise KeyError
    assert root.view("Q")[0] == 5
    pool.close()


def test_an_interrupt_that_is_swallowed_where_a_block_begins_rolls_back(pool, root, monkeypatch):
    real = pool._handle.library.begin

    def struck(pool):
        real(pool)
        raise Struck

    with pytest.raises(pypmemobj.RolledBackError):
        with pool.transaction() as change:
            change.add(root)
            root.view("Q")[0] = 9
            monkeypatch.setattr(pool._handle.library, "begin", struck)
            with pytest.raises(Struck):
                with pool.transaction():
                    raise AssertionError("not begun")
            monkeypatch.undo()
    assert root.view("Q")[0] == 1


# Objects.


def test_what_is_freed_makes_room(pool):
    size = 1 << 20
    for number in range(20):
        with pool.transaction() as change:
            thing = allocate(change, number, size)
        with pool.transaction() as change:
            change.free(thing)
    assert list(pool.objects()) == []


def test_zalloc_is_zero_where_alloc_need_not_be(pool):
    with pool.transaction() as change:
        used = change.alloc(1 << 16)
        used.view()[:] = b"x" * (1 << 16)
    with pool.transaction() as change:
        change.free(used)
    with pool.transaction() as change:
        assert not any(change.zalloc(1 << 16).view())


def test_iteration_goes_by_type_and_leaves_the_root_out(pool, root):
    with pool.transaction() as change:
        for number in range(5):
            allocate(change, number, kind=KIND + number % 2)
        assert list(pool.objects()) == []  # not allocated before the commit
    assert numbers(pool, KIND) == [0, 2, 4]
    assert numbers(pool, KIND + 1) == [1, 3]
    assert numbers(pool, KIND + 2) == []
    assert len(list(pool.objects())) == 5
    assert root not in set(pool.objects())
    assert {thing.type_number for thing in pool.objects()} == {KIND, KIND + 1}


def test_objects_can_be_freed_while_they_are_listed(pool):
    with pool.transaction() as change:
        for number in range(50):
            allocate(change, number)
    for thing in pool.objects(KIND):
        with pool.transaction() as change:
            change.free(thing)
    assert list(pool.objects()) == []


def test_what_cannot_be_freed_is_refused_and_the_block_goes_on(pool, root, path):
    with make_pool(path.with_name("other")) as other, pool.transaction() as change:
        mine = allocate(change, 1)
        theirs = other.root(64)
        for use in (lambda: change.free(theirs), lambda: change.add(theirs)):
            with pytest.raises(ValueError, match="not of this transaction's pool"):
                use()
        for name in (root, pool.object(root.oid)):
            with pytest.raises(ValueError, match="root cannot be freed"):
                change.free(name)
        change.free(mine)
        with pool.transaction() as nested:
            for again in (change.free, change.add, nested.free, nested.add):
                with pytest.raises(ValueError, match="has been freed by this transaction"):
                    again(mine)


@pytest.mark.parametrize(("size", "kind"), [(0, 0), (-1, 0), (1 << 63, 0), (8, -1), (8, 1 << 64)])
def test_sizes_and_types_out_of_range_are_refused(pool, size, kind):
    with pool.transaction() as change:
        for call in (change.alloc, change.zalloc):
            with pytest.raises(ValueError, match="it must be"):
                call(size, kind)
        allocate(change, 1, kind=(1 << 64) - 1)
    assert len(list(pool.objects((1 << 64) - 1))) == 1


# Failures.


def test_a_full_pool_says_so_and_keeps_what_it_has(pool, root, path, sound):
    kept = 0
    with pytest.raises(pypmemobj.OutOfSpaceError, match="allocate 65536 bytes") as caught:
        while True:
            with pool.transaction() as change:
                change.add(root)
                root.view("Q")[0] = kept + 1
                allocate(change, kept, 1 << 16)
            kept += 1
    assert caught.value.errno
    assert kept > 8
    assert root.view("Q")[0] == kept
    assert numbers(pool, KIND) == list(range(kept))
    pool.close()
    assert sound(path)
    with Pool.open(path) as pool:
        with pool.transaction() as change:
            change.free(next(pool.objects(KIND)))
        with pool.transaction() as change:
            allocate(change, 1, 1 << 16)


def test_no_room_for_the_old_bytes_is_an_error_before_they_change(pool):
    with pool.transaction() as change:
        large = allocate(change, 3, pypmemobj.SIZE_MIN * 5 // 16)  # of the half that is to be had
    with pytest.raises(pypmemobj.OutOfSpaceError, match="add"):
        with pool.transaction() as change:
            change.add(large)
    assert large.view("Q")[0] == 3


def test_a_failure_that_is_swallowed_is_raised_at_the_end(pool, root):
    with pytest.raises(pypmemobj.RolledBackError, match="rolled back with errno 12"):
        with pool.transaction() as change:
            change.add(root)
            root.view("Q")[0] = 9
            with pytest.raises(pypmemobj.OutOfSpaceError):
                change.alloc(1 << 40)
            assert root.view("Q")[0] == 1
            for use in (
                lambda: change.alloc(8),
                lambda: change.add(root),
                lambda: change.free(root),
            ):
                with pytest.raises(pypmemobj.RolledBackError, match="leave its block"):
                    use()
            with pytest.raises(pypmemobj.RolledBackError, match="around this one"):
                with pool.transaction():
                    raise AssertionError("not begun")
    with pool.transaction() as change:
        allocate(change, 1)


# Nested blocks.


def test_nested_blocks_commit_with_the_outermost(pool, root):
    with pytest.raises(KeyError):
        with pool.transaction() as outer:
            with pool.transaction() as inner:
                inner.add(root)
                root.view("Q")[0] = 9
                outer.add(root)
            assert root.view("Q")[0] == 9
            raise KeyError
    assert root.view("Q")[0] == 1
    with pool.transaction():
        with pool.transaction() as inner:
            inner.add(root)
            root.view("Q")[0] = 9
    assert root.view("Q")[0] == 9


def test_a_nested_exception_rolls_back_the_whole_even_if_it_is_swallowed(pool, root):
    with pytest.raises(pypmemobj.RolledBackError):
        with pool.transaction() as outer:
            outer.add(root)
            root.view("Q")[0] = 9
            with pytest.raises(KeyError):
                with pool.transaction():
                    raise KeyError
            assert root.view("Q")[0] == 1
            with pytest.raises(pypmemobj.RolledBackError):
                outer.alloc(8)
    with pytest.raises(KeyError):
        with pool.transaction(), pool.transaction(), pool.transaction():
            raise KeyError
    assert root.view("Q")[0] == 1


def test_blocks_left_out_of_order_are_rolled_back(pool, root):
    outer, inner = pool.transaction(), pool.transaction()
    outer.__enter__()
    inner.__enter__()
    inner.add(root)
    root.view("Q")[0] = 9
    with pytest.raises(pypmemobj.TransactionError, match="1 nested transactions were open"):
        outer.__exit__(None, None, None)
    assert root.view("Q")[0] == 1
    with pytest.raises(pypmemobj.TransactionError, match="has ended"):
        inner.__exit__(None, None, None)
    with pool.transaction() as change:
        allocate(change, 1)
