"""Goal: a transaction is used once, in its pool, its thread and its process, or refuses.

Method: two pools, threads, forked children.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import pypmemobj
from pool_tools import (
    KIND,
    SECONDS,
    allocate,
    in_child,
    make_pool,
    numbers,
    skip_without_libpmemobj,
)
from pypmemobj import Pool

skip_without_libpmemobj()


def test_a_transaction_runs_once(pool):
    change = pool.transaction()
    with pytest.raises(pypmemobj.TransactionError, match="has not begun"):
        change.alloc(8)
    with change:
        with pytest.raises(pypmemobj.TransactionError, match="is open; each runs once"):
            change.__enter__()
    for use in (lambda: change.alloc(8), change.__enter__):
        with pytest.raises(pypmemobj.TransactionError, match="has ended"):
            use()


def test_a_thread_is_in_one_pool_at_a_time(pool, path):
    with make_pool(path.with_name("other")) as other:
        with pool.transaction() as change:
            with pytest.raises(pypmemobj.TransactionError, match="of another pool"):
                with other.transaction():
                    raise AssertionError("not begun")
            allocate(change, 1)
        with other.transaction() as change:
            allocate(change, 2)
        assert (numbers(pool, KIND), numbers(other, KIND)) == ([1], [2])


def test_another_threads_transaction_is_refused(pool, root):
    with ThreadPoolExecutor(1) as threads, pool.transaction() as change:
        uses = [
            lambda: change.alloc(8), lambda: change.add(root), lambda: change.free(root),
            lambda: change.__exit__(None, None, None),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(pypmemobj.WrongThreadError, match="each thread begins its own"):
                threads.submit(use).result(SECONDS)
        allocate(change, 3)
    assert numbers(pool, KIND) == [3]


def test_a_pool_with_an_open_transaction_is_not_closed(pool):
    with pool.transaction() as change:
        with pytest.raises(pypmemobj.TransactionError, match="has 1 open transactions"):
            pool.close()
        allocate(change, 3)
        with ThreadPoolExecutor(1) as threads:
            with pytest.raises(pypmemobj.TransactionError, match="open transactions"):
                threads.submit(pool.close).result(SECONDS)
    assert numbers(pool, KIND) == [3]


def test_threads_transact_side_by_side(pool):
    count, rounds = 4, 100
    start = threading.Barrier(count, timeout=SECONDS)
    with pool.transaction() as change:
        things = [allocate(change, 0) for _ in range(count)]

    def work(thing):
        start.wait()
        for number in range(1, rounds + 1):
            try:
                with pool.transaction() as change:
                    change.add(thing)
                    thing.view("Q")[0] = number
                    if number % 3 == 0:
                        raise KeyError
            except KeyError:
                assert thing.view("Q")[0] == number - 1
        return thing.view("Q")[0]

    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(work, things, timeout=SECONDS)) == [rounds] * count


def test_a_child_does_nothing_with_its_parents_transaction(pool, root, path):
    with pool.transaction() as change:
        change.add(root)
        root.view("Q")[0] = 9

        def leave(error):
            return lambda: change.__exit__(type(error) if error else None, error, None)

        assert in_child(lambda: change.alloc(8)).startswith("ForkedError")
        assert in_child(leave(None)).startswith("ForkedError")
        assert in_child(leave(KeyError())) == "None"
        assert in_child(lambda: pool.transaction().__enter__()).startswith("ForkedError")
        assert in_child(pool.close) == "None"
        allocate(change, 4)
    assert root.view("Q")[0] == 9
    pool.close()
    with Pool.open(path) as pool:
        assert numbers(pool, KIND) == [4]


def test_a_child_that_ends_in_a_block_leaves_its_own_pool_rolled_back(path, root, pool):
    pool.close()

    def die():
        with Pool.open(path) as pool, pool.transaction() as change:
            change.add(pool.root())
            pool.root().view("Q")[0] = 9
            allocate(change, 1)
            os._exit(0)

    in_child(die)
    with Pool.open(path) as pool:
        assert pool.root().view("Q")[0] == 1
        assert numbers(pool, KIND) == []
