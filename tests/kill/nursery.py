"""Forks trainers by the hundred: the zygote of the conformance tests, with other children.

``nursery.py FD`` forks those of trainer.py, and torch is not imported then; ``torch_nursery.py``
those of torch_trainer.py.
"""

import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import trainer
import zygote

SCRIPT = Path(__file__).resolve()
TORCH_SCRIPT = SCRIPT.with_name("torch_nursery.py")


def live(connection: Connection) -> None:
    signal.alarm(trainer.LIFE_SECONDS)
    job = trainer.Job(**connection.recv())

    def say(*words: object) -> None:
        connection.send(words)

    try:
        trainer.Trainer(job, say, lambda: connection.poll(None)).live()
    except Exception as error:
        say("error", type(error).__name__, str(error))
        raise


if __name__ == "__main__":
    zygote.serve(socket.socket(fileno=int(sys.argv[1])), live)
