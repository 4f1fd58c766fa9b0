"""Goal: a pool opens as what it is or not at all, keeps its root, and no view outlives it.

Method: small pools on a plain file; files that are none; children, and a second opening.
"""

import gc
import os
import random
import shutil
import subprocess
import weakref

import numpy as np
import pytest

import pypmemobj
from pool_tools import LAYOUT, SECONDS, in_child, make_pool, skip_without_libpmemobj
from pypmemobj import Pool

skip_without_libpmemobj()


# Opening.


def test_a_pool_opens_again_with_its_layout_or_with_any(path):
    with make_pool(path) as pool:
        uuid = pool.uuid
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == pypmemobj.SIZE_MIN
    for layout in (LAYOUT, None):
        with Pool.open(path, layout) as pool:
            assert (pool.uuid, pool.path, pool.closed) == (uuid, str(path), False)
        assert pool.closed


def test_another_layout_is_refused(path):
    make_pool(path).close()
    with pytest.raises(pypmemobj.PoolError, match="wrong layout"):
        Pool.open(path, "another")
    with pytest.raises(pypmemobj.PoolError, match="wrong layout"):
        pypmemobj.check(path, "another")


def test_a_layout_that_does_not_fit_is_refused(path):
    for layout in ("x" * (pypmemobj.LAYOUT_BYTES_MAX + 1), "a\0b"):
        with pytest.raises(ValueError, match="layout has"):
            Pool.create(path, layout, pypmemobj.SIZE_MIN)
    assert not path.exists()


def test_what_is_missing_is_named(path):
    for call in (Pool.open, pypmemobj.check):
        with pytest.raises(pypmemobj.PoolNotFoundError, match=str(path)):
            call(path)


def test_no_pool_is_made_over_a_file(path):
    path.write_bytes(b"precious")
    with pytest.raises(pypmemobj.PoolExistsError, match=str(path)):
        make_pool(path)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "content",
    [b"", b"short", random.randbytes(9 << 20), bytes(9 << 20), b"PMEMPOOLSET\n1G nowhere\n"],
    ids=["empty", "short", "random", "zeros", "set"],
)
def test_a_foreign_file_is_refused_and_left_alone(path, content):
    path.write_bytes(content)
    for call in (Pool.open, pypmemobj.check):
        with pytest.raises(pypmemobj.PoolError):
            call(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, 4096, 2 << 20, 4 << 20, (8 << 20) - 1, 8 << 20, 12 << 20])
def test_a_pool_cut_short_is_refused(path, size):
    make_pool(path, 16 << 20).close()
    os.truncate(path, size)
    with pytest.raises(pypmemobj.PoolError):
        Pool.open(path)
    if size < pypmemobj.SIZE_MIN:
        with pytest.raises(pypmemobj.PoolError, match=f"{size} bytes are no pool"):
            pypmemobj.check(path)
    else:
        assert not pypmemobj.check(path)


def test_a_pool_that_does_not_fit_is_not_made(path):
    with pytest.raises(pypmemobj.PoolError) as caught:
        make_pool(path, 1 << 60)
    assert caught.value.errno
    assert not path.exists()


def test_a_pool_is_open_once_at_a_time(pool, path):
    for call in (Pool.open, pypmemobj.check):
        with pytest.raises(pypmemobj.PoolBusyError):
            call(path)
    assert in_child(lambda: Pool.open(path)).startswith("PoolBusyError")
    pool.close()
    Pool.open(path).close()


def test_a_new_pool_is_sound(path, sound):
    make_pool(path).close()
    assert sound(path)


def test_a_pool_that_was_not_closed_opens(path):
    def leave():
        with Pool.open(path) as pool:
            pool.root(8).write(b"12345678")
            os._exit(0)

    make_pool(path).close()
    in_child(leave)
    with Pool.open(path) as pool:
        assert pool.root().view().tobytes() == b"12345678"


def test_the_shutdown_state_is_kept_only_as_asked_and_the_setting_put_back(path):
    if (tool := shutil.which("pmempool")) is None:
        pytest.skip("needs pmempool: install pmdk-tools")
    for number, wanted in enumerate((False, None, False)):
        path = path.with_name(str(number))
        try:
            Pool.create(path, "", pypmemobj.SIZE_MIN, shutdown_state=wanted).close()
        except pypmemobj.PoolError as error:
            pytest.skip(f"this libpmemobj makes no pool here with a shutdown state: {error}")
        command = [tool, "feature", "--query", "SHUTDOWN_STATE", path]
        state = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout
        assert int(state) == (wanted is None)


# The root, and what is named by its place.


def test_the_root_persists(path):
    with make_pool(path) as pool:
        root = pool.root(16)
        assert root.view().tobytes() == bytes(16)
        root.view("Q")[0], root.view("Q")[1] = 7, 8
        root.persist()
        oid = root.oid
    with Pool.open(path) as pool:
        assert pool.root(1).oid == oid
        assert pool.root().view("Q").tolist() == [7, 8]


def test_the_root_grows_and_never_shrinks(pool):
    pool.root(8).write(b"12345678")
    assert pool.root(4096).view().tobytes() == b"12345678" + bytes(4088)
    assert pool.root(8).size_bytes == 4096


def test_there_is_no_root_until_one_is_asked_for(pool):
    with pytest.raises(ValueError, match="has no root yet"):
        pool.root()
    with pytest.raises(ValueError, match="size_bytes is -1"):
        pool.root(-1)
    with pytest.raises(pypmemobj.OutOfSpaceError):
        pool.root(1 << 40)
    assert pool.root(8).size_bytes == 8


def test_a_name_that_was_kept_finds_its_object_in_the_next_process(path):
    with make_pool(path) as pool:
        with pool.transaction() as change:
            thing = change.alloc(100, 9)
            thing.view()[:] = bytes(range(100))
        pool.root(8).write(thing.oid.offset.to_bytes(8, "little"))
    with Pool.open(path) as pool:
        found = pool.object(pool.root().view("Q")[0], 100)
        assert found.view().tobytes() == bytes(range(100))
        assert (found.oid, found.type_number) == (thing.oid, 9)
        assert pool.object(thing.oid).size_bytes >= 100


def test_a_name_of_no_object_here_is_refused(pool):
    root = pool.root(64)
    for oid in (0, -1, pypmemobj.SIZE_MIN, 1 << 63, root.oid._replace(pool_uuid=1)):
        with pytest.raises(ValueError, match="is not within"):
            pool.object(oid)
    for size in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="has room for"):
            pool.object(root.oid, size)


def test_equal_objects_have_one_name(pool):
    first, second = pool.root(8), pool.root(8)
    assert first == second
    assert len({first, second}) == 1
    assert first != "root"
    assert "root at" in repr(first)


# Bytes.


def test_a_view_is_the_pool_itself_with_its_exact_size(pool):
    view, again = pool.root(100).view(), pool.root(100).view()
    assert (len(view), view.readonly, view.format) == (100, False, "B")
    view[:3] = b"abc"
    assert again[:3] == b"abc"


def test_a_typed_view_needs_whole_items_of_a_known_kind(pool):
    assert len(pool.root(24).view("d")) == 3
    with pytest.raises(ValueError, match="25 bytes are no multiple of 8"):
        pool.root(25).view("d")
    with pytest.raises(ValueError, match="format"):
        pool.root(25).view("nonsense")


def test_a_range_that_is_not_the_objects_is_refused(pool):
    root = pool.root(16)
    for offset, size in ((-1, 1), (0, 17), (16, 1), (8, -1), (17, None)):
        with pytest.raises(ValueError, match="of an object with 16"):
            root.persist(offset, size)
    with pytest.raises(ValueError, match="of an object with 16"):
        root.write(bytes(17))
    root.write(memoryview(np.zeros(2, dtype=np.uint64)))
    root.write(b"", 16)


def test_a_view_of_more_than_two_gigabytes_reaches_its_end(path):
    size = (2 << 30) + 4096
    if shutil.disk_usage(path.parent).free < 2 * size:
        pytest.skip(f"needs {2 * size} free bytes at {path.parent}")
    with make_pool(path, size + (64 << 20)) as pool:
        with pool.transaction() as change:
            view = change.alloc(size).view()
            view[-1] = 77
            change.alloc(8)
        assert len(view) == size
        view[(2 << 30) :] = b"x" * 4096
        assert (view[-1], view[2 << 30]) == (ord("x"), ord("x"))


# The end.


def test_closing_releases_views(pool):
    view = pool.root(16).view("Q")
    pool.close()
    with pytest.raises(ValueError, match="released"):
        view[0]


@pytest.mark.parametrize(
    "made_from",
    [lambda view: view[1:], lambda view: view.cast("B"), lambda view: np.frombuffer(view, "B")],
    ids=["slice", "cast", "array"],
)
def test_what_was_made_from_a_view_keeps_the_pool_open(pool, made_from):
    made = made_from(pool.root(16).view("Q"))
    with pytest.raises(pypmemobj.ViewsAliveError, match=r"1 views .* are in use"):
        pool.close()
    assert not pool.closed
    assert made[0] == 0
    del made
    pool.close()
    assert pool.closed


def test_a_pool_that_an_array_kept_open_goes_on(pool):
    array = np.frombuffer(pool.root(16).view(), "Q")
    with pytest.raises(pypmemobj.ViewsAliveError):
        pool.close()
    pool.root(16).view("Q")[0] = 5
    assert array[0] == 5
    del array
    pool.close()


def test_a_view_keeps_a_forgotten_pool(path):
    view = make_pool(path).root(8).view()
    gc.collect()
    view[0] = 5
    with pytest.raises(pypmemobj.PoolBusyError):
        Pool.open(path)
    del view
    Pool.open(path).close()


def test_a_forgotten_pool_is_closed(path):
    pool = make_pool(path)
    gone = weakref.ref(pool._handle)
    del pool
    assert gone() is None
    Pool.open(path).close()


def test_an_exception_is_not_replaced_by_that_of_closing(path):
    with pytest.raises(KeyError) as caught, make_pool(path) as pool:
        part = pool.root(8).view()[1:]
        raise KeyError("mine")
    assert "are in use" in caught.value.__notes__[0]
    del part
    pool.close()


def test_a_closed_pool_refuses_everything(pool):
    root = pool.root(8)
    change = pool.transaction()
    for _ in range(2):
        pool.close()
    uses = [
        lambda: pool.root(8), lambda: pool.object(4096), lambda: list(pool.objects()),
        pool.transaction, change.__enter__, root.view, root.persist, lambda: root.write(b"x"),
        lambda: root.type_number,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(pypmemobj.ClosedError, match="is closed"):
            use()


# Children.


def test_in_a_child_a_pool_is_inert(pool, path):
    root = pool.root(8)
    root.write(b"parent's")
    uses = [
        lambda: pool.root(8), lambda: pool.object(4096), lambda: list(pool.objects()),
        pool.transaction, root.view, lambda: root.write(b"child's."),
    ]  # fmt: skip
    for use in uses:
        assert in_child(use).startswith("ForkedError")
    assert in_child(pool.close) == "None"
    assert in_child(pool._handle.__del__) == "None"
    assert root.view().tobytes() == b"parent's"
    root.write(b"stillopn")


def test_a_child_opens_a_pool_of_its_own(pool, path):
    pool.root(8)

    def use():
        with make_pool(path.with_name("own")) as own, own.transaction() as change:
            change.alloc(8)
        return own.closed

    assert in_child(use) == "True"
