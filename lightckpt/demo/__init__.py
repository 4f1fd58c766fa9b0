"""The demo: a real training run that is killed again and again, and does not notice.

A byte-level GPT is trained three times over: left alone, without checkpoints; with a checkpoint
every step, killed by SIGKILL at random moments and restarted; and measured, with and without
checkpoints. ``results`` defines what the printed numbers mean. The exit code is 0 if every kill
lost at most one finished step and the killed run ended with the bits of the one left alone, 1 if
not, and 2 if the demo could not be run.

The supervisor needs no torch; only the trainers that it starts import it.
"""

import argparse
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on *parser*."""
    from .options import declare

    declare(parser)


def run(arguments: Sequence[str] | argparse.Namespace) -> int:
    """Run the demo and return its exit code.

    Args:
        arguments: a command line, or what a parser with :func:`add_arguments` made of one.
    """
    from .main import main

    if not isinstance(arguments, argparse.Namespace):
        parser = argparse.ArgumentParser(prog="lightckpt demo", description=__doc__)
        add_arguments(parser)
        arguments = parser.parse_args(arguments)
    return main(arguments)
