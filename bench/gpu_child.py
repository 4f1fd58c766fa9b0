"""Processes that measure on a GPU, forked from the server that lives are forked from (kills.py).

A driver may hang, crash its process, or leave it a context that is lost. So the measuring is done
in a process that can be ended and followed by another one, and that reports what it has as soon as
it has it. Whoever reads the reports has the process ended, and its children, whatever happens.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import kills

SILENCE_SECONDS_MAX = 120.0
SERVER_SECONDS_MAX = 300.0  # until the first word: the server imports everything before that


@dataclass(frozen=True)
class Work:
    """What one process measures: some strategies on one model, each with a line of its own."""

    model: str
    strategies: tuple[str, ...]
    folder: Path
    seed: int
    steps: int
    rounds: int


class EndedError(Exception):
    """A process ended, or was ended, before it had done its work; the message says how."""


def serve(work: Work, pipe: Any) -> None:
    """Measure *work*; the target of a process. Ends with the first strategy that fails.

    What failed may have left hooks, threads or a lost context, which no other is measured beside.
    """
    kills.be_killable()
    pipe.send({"say": f"{work.model}:"})
    import catalog
    import gpu

    class FailedError(Exception):
        pass

    def each(line: dict[str, Any]) -> None:
        pipe.send({"line": line})
        if any(entry.get("failed") for entry in line["strategies"].values()):
            raise FailedError

    kinds = [catalog.by_name(name) for name in work.strategies]
    try:
        gpu.run_model(
            work.model, work, work.folder, lambda words: pipe.send({"say": words}),
            kinds=kinds, rounds=work.rounds, each=each,
        )  # fmt: skip
    except FailedError:
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told as found
        pipe.send({"error": f"{type(error).__name__}: {error}"[:300]})


def reports(
    target: Callable[..., None], *arguments: Any, silence_s: float = SILENCE_SECONDS_MAX
) -> "closing[Iterator[dict[str, Any]]]":
    """Return, for a ``with`` statement, what ``target(*arguments, pipe)`` reports.

    At the end of the statement the process and its children are dead. Iterating raises EndedError
    if it reports nothing for *silence_s*, or ends with another exit status than 0.
    """
    return closing(_reports(target, arguments, silence_s))


def _reports(
    target: Callable[..., None], arguments: tuple[Any, ...], silence_s: float
) -> Iterator[dict[str, Any]]:
    ours, theirs = kills.context.Pipe(duplex=False)
    process = kills.context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        patience = max(silence_s, SERVER_SECONDS_MAX)
        while True:
            ready = wait([ours, process.sentinel], patience)
            if not ready:
                raise EndedError(f"hung: it reported nothing for {patience:.0f} s")
            patience = silence_s
            try:
                if not ours.poll():  # it has ended, and nothing of it is left
                    break
                yield ours.recv()
            except EOFError:
                break
        process.join(kills.KILLED_SECONDS)
        if process.exitcode != 0:
            raise EndedError(f"its process ended with status {process.exitcode}")
    finally:
        kills.kill(process)
        ours.close()
