"""What lies beside a store, and what a path leads to. Goal: a store touches nothing but what is its
own, whatever is called as its lock file or its unfinished self is; and a path that names no file
here is refused. Method: stores and files of such names, links of /proc, and their bytes afterwards.
"""

import os
import threading

import numpy as np
import pytest

from lightckpt._core import Op, Store, make_sizes, make_spans


def save(store, step, keep=1):
    array = np.full(5000, step, np.uint8)
    store.begin(step=step, keep=keep, extents=make_sizes([array.nbytes]), blob=b"{}", host_bytes=4)
    store.wait(store.submit(Op.WRITE, make_spans([(array.ctypes.data, 0)])), 60)
    store.wait(store.commit(b"host"), 60)


def steps(path):
    with Store(path, read_only=True) as store:
        return [version.step for version in store.versions()]


@pytest.mark.parametrize("name", [".lock", ".tmp"])
def test_a_store_of_that_name_is_left_alone(path, name):
    with Store(path + name, create=True) as other:
        save(other, 7)
    with Store(path, create=True) as store:
        save(store, 1)
    assert steps(path) == [1]
    assert steps(path + name) == [7]


@pytest.mark.parametrize("name", [".lock", ".tmp"])
@pytest.mark.parametrize("content", [b"mine\n", b"x" * 64, b"LIGHTCKP" + b"y" * 500_000])
def test_a_file_of_that_name_is_left_alone(path, name, content):
    with open(path + name, "wb") as file:
        file.write(content)
    mode = os.stat(path + name).st_mode
    with Store(path, create=True) as store:
        save(store, 1)
    assert steps(path) == [1]
    with open(path + name, "rb") as file:
        assert file.read() == content
    assert os.stat(path + name).st_mode == mode


def test_what_a_kill_has_left_of_a_new_store_is_replaced(path):
    with Store(path, create=True):
        pass
    os.rename(path, path + ".tmp")
    with Store(path, create=True) as store:
        save(store, 1)
    assert steps(path) == [1]
    assert not os.path.exists(path + ".tmp")


def test_a_link_of_proc_to_a_file_without_a_name_is_refused(path):
    memory = os.memfd_create("nameless")
    try:
        with pytest.raises(ValueError, match="has no name here"):
            Store(f"/proc/self/fd/{memory}", create=True)
    finally:
        os.close(memory)
    with Store(path, create=True) as store:
        save(store, 1)
    held = os.open(path, os.O_RDWR)
    try:
        assert steps(f"/proc/self/fd/{held}") == [1]
        assert steps(f"/proc/self/root{path}") == [1]
        os.unlink(path)
        with pytest.raises(ValueError, match="has no name here"):
            steps(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


def test_a_path_with_a_null_byte_is_refused(path):
    with pytest.raises(ValueError, match="null byte"):
        Store(path + "\0other", create=True)
    assert not os.path.exists(path)


def viewed_at_once(store, count):
    """Return the newest version's host state as so many threads get it that look at once."""
    views, version = [], store.versions()[0].version
    store.pin(version)
    threads = [
        threading.Thread(target=lambda: views.append(store.view(version)[1])) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return views


def test_views_of_many_threads_end_with_their_store(path):
    with Store(path, create=True) as store:
        save(store, 1)
    for _ in range(20):
        store = Store(path, read_only=True, workers=1)
        views = viewed_at_once(store, 6)
        store.close()
        assert len(views) == 6
        for view in views:
            with pytest.raises(ValueError, match="released"):
                bytes(view)
