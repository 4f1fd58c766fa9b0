"""A process that changes a pool in transactions until it is killed, or kills itself.

Each turn k writes k into all words of the root but the last, and into a new object, whose offset
the last word has; the object of the turn before is freed. ``pool_victim.py PATH DIE_TURN DIE_AT
CARELESS`` dies at the point of that name in that turn; with CARELESS it adds nothing to the
transaction, as it should. It says "ready", then "open K", then "done k" for each turn.
"""

import os
import signal
import sys

import pypmemobj
from pool_tools import KIND, SECONDS

WORDS = 512
POINTS = ["begun", "added", "half", "allocated", "written", "freed", "committed", "told"]


def size_of(turn: int) -> int:
    """Return the size of a turn's object, in bytes.

    There are few sizes, since libpmemobj sets 256 KiB aside for each class of them.
    """
    return (72, 1000, 60_000, 320_000)[turn % 4]


def live(path: str, die_turn: int, die_at: str, careless: bool) -> None:
    def say(words: str) -> None:
        os.write(1, f"{words}\n".encode())

    def reach(point: str) -> None:
        if (turn, point) == (die_turn, die_at):
            os.kill(os.getpid(), signal.SIGKILL)

    say("ready")
    with pypmemobj.Pool.open(path) as pool:
        root = pool.root(8 * WORDS)
        words = root.view("Q")
        turn = words[0]
        say(f"open {turn}")
        while True:
            turn += 1
            with pool.transaction() as change:
                reach("begun")
                if not careless:
                    change.add(root)
                reach("added")
                for i in range(WORDS // 2):
                    words[i] = turn
                reach("half")
                new = change.alloc(size_of(turn), KIND)
                new.view()[:] = turn.to_bytes(8, "little") * (new.size_bytes // 8)
                reach("allocated")
                for i in range(WORDS // 2, WORDS - 1):
                    words[i] = turn
                old, words[-1] = words[-1], new.oid.offset
                reach("written")
                if old:
                    change.free(pool.object(old))
                reach("freed")
            reach("committed")
            say(f"done {turn}")
            reach("told")


if __name__ == "__main__":
    signal.alarm(SECONDS)
    live(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "careless")
