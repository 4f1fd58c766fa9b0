"""SIGBUS beside Python's own handlers of it. Goal: a store that is cut short is an error, whoever
has set a handler and when; and a SIGBUS that is not the store's does what it did without us.

Method: interpreters of their own, which enable faulthandler or call signal.signal before or after
they open a store, cut it short, and then touch a mapping that is nobody's, or send the signal.
"""

import signal
import subprocess
import sys

import pytest

CODE = """
import faulthandler, mmap, os, signal, sys
import numpy as np
from lightckpt._core import Op, Store, make_sizes, make_spans
from lightckpt.errors import MediaLostError

path, handler, when, end = sys.argv[1:]

def handle():
    if handler == "faulthandler":
        faulthandler.enable()
    elif handler == "python":
        signal.signal(signal.SIGBUS, lambda *_: print("handled", flush=True))
    elif handler == "ignored":
        signal.signal(signal.SIGBUS, signal.SIG_IGN)
    elif handler == "disabled":
        faulthandler.enable()
        faulthandler.disable()

def save(store, step):
    array = np.ones(1 << 20, np.uint8)
    store.begin(step=step, keep=1, extents=make_sizes([array.nbytes]), blob=b"{}", host_bytes=4)
    store.wait(store.submit(Op.WRITE, make_spans([(array.ctypes.data, 0)])))
    store.wait(store.commit(b"host"))

if when == "early":
    handle()
with Store(path, create=True, workers=2) as store:
    save(store, 1)
    save(store, 2)
    if when == "late":
        handle()
    os.truncate(path, 0)  # its slots too, which are looked at first
    try:
        save(store, 3)
    except MediaLostError:
        print("lost", flush=True)
with Store(path + "2", create=True, workers=1) as store:
    save(store, 1)
    with Store(path + "2", read_only=True, workers=1) as reader:
        version = reader.versions()[0].version
        if when == "late":
            handle()
        os.truncate(path + "2", 1 << 17)
        try:
            bad = reader.wait(reader.submit(Op.VERIFY, make_spans([(0, 0)]), version=version))
        except MediaLostError:
            print("lost", flush=True)
if end == "fault":
    file = os.memfd_create("foreign")
    os.ftruncate(file, 4096)
    foreign = mmap.mmap(file, 4096)
    os.ftruncate(file, 0)
    print(foreign[0])
elif end == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
print("went on", flush=True)
"""


def run(path, handler, when, end):
    command = [sys.executable, "-c", CODE, path, handler, when, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("handler", ["none", "faulthandler", "disabled", "python", "ignored"])
def test_a_store_that_is_cut_short_is_an_error_whoever_handles_the_signal(path, handler, when):
    code, told, errors = run(path, handler, when, "nothing")
    assert (code, told, errors) == (0, ["lost", "lost", "went on"], "")


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("handler", ["none", "faulthandler", "disabled", "python", "ignored"])
def test_a_fault_of_somebody_else_ends_the_process_by_its_signal(path, handler, when):
    code, told, errors = run(path, handler, when, "fault")
    assert (code, told) == (-signal.SIGBUS, ["lost", "lost"])
    assert errors.count("Fatal Python error: Bus error") == (handler == "faulthandler")


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize(
    ("handler", "code", "last"),
    [
        ("none", -signal.SIGBUS, ["lost"]),
        ("faulthandler", -signal.SIGBUS, ["lost"]),
        ("python", 0, ["lost", "handled", "went on"]),
        ("ignored", 0, ["lost", "went on"]),
    ],
)
def test_a_signal_that_is_sent_does_what_it_did(path, handler, when, code, last):
    found, told, errors = run(path, handler, when, "sent")
    assert (found, told[1:]) == (code, last)
    assert errors.count("Fatal Python error: Bus error") == (handler == "faulthandler")
