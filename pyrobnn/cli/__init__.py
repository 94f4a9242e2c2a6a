"""The command line: ``pyrobnn COMMAND …``; what a command needs is imported once it is asked for."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from pyrobnn import __version__
from pyrobnn.cli.terminal import (
    EXIT_STATUS,
    INTERRUPTED,
    USAGE_ERROR,
    OneLineParser,
    one_line,
    printable,
    say,
)

#: command → the module of this package that has a function of its name, (argv, command line) -> exit status
COMMANDS = {
    "compare": ("runs", "run several methods on one data set and write a report"),
    "fit": ("runs", "run one method on a table and save it"),
    "predict": ("saved", "predict new rows with a method that was saved"),
    "judge": ("saved", "judge predictions that anyone made, in a table beside the outcomes"),
    "doctor": ("runs", "versions, compiler, device and a short fit, one line each"),
    "report": ("saved", "judge saved DataTrees, also of NumPyro or PyMC"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 done, 1 a method or verdict failed, 2 bad input, 130 stopped.

    Args:
        argv: its words; None for those of the process.
    """
    if argv is None:
        _wait_asleep()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(
        prog="pyrobnn",
        description="Bayesian neural networks, compared and judged.",
        epilog=f"Options of a command: pyrobnn COMMAND --help. {EXIT_STATUS}",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"pyrobnn {__version__}",
    )
    commands = parser.add_subparsers(
        required=True,
        metavar="COMMAND",
        dest="command",
    )
    for name, (_, does) in COMMANDS.items():
        commands.add_parser(
            name,
            help=does,
            add_help=False,
        )
    with printable():
        try:
            command = parser.parse_args(words[:1]).command
            module = import_module(f"pyrobnn.cli.{COMMANDS[command][0]}")
            return int(getattr(module, command)(words[1:], shlex.join(["pyrobnn", *words])))
        except (ValueError, TypeError, OSError, ImportError, argparse.ArgumentError) as error:
            say(f"pyrobnn: {one_line(error)}", sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            say("\nstopped", sys.stderr)
            return INTERRUPTED


def _wait_asleep() -> None:
    """Let torch's threads, where its OpenMP is GNU's, wait for each other asleep after a few microseconds.

    Otherwise each keeps a core that another program, or the process that compiles ahead, may need for what they wait
    for: a fit takes several times as long. It has to be said before torch is imported.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
