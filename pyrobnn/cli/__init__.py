"""The command line: ``pyrobnn COMMAND …``; what a command needs is imported once it is asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pyrobnn import __version__
from pyrobnn.cli.say import OneLineParser, one_line, printable, say

#: command → what it does; each is a module of this package with ``run(argv, command) -> exit status``
COMMANDS = {
    "compare": "run several methods on one data set and write a report",
    "fit": "run one method on a table and save it",
    "predict": "predict new rows with a method that was saved",
    "report": "judge saved DataTrees, also of NumPyro or PyMC",
}
#: commands whose options are those of the methods: to write their help takes torch, Pyro and two seconds, to show it
#: not (``scripts/store_help.py``)
STORED_HELP = {name: Path(__file__).parent / "help" / f"{name}.txt" for name in ("compare", "fit")}
USAGE_ERROR, INTERRUPTED = 2, 130
EXIT_STATUS = (
    "exit status: 0 done, 1 a method was left out or failed (report --strict: a verdict did), "
    "2 bad input, nothing was run, 130 stopped by Ctrl-C, what was found is kept"
)


def main(argv: Sequence[str] | None = None, **told: Any) -> int:
    """Run the command line; exit status 0 done, 1 a method or verdict failed, 2 bad input, 130 stopped.

    Args:
        argv: its words; None for those of the process.
        told: arguments of the command's ``run``, from a script that is made of commands.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with printable():
        try:
            asked = _parser().parse_args(words[:1])
            if asked.command in STORED_HELP and words[1:] in (["--help"], ["-h"]):
                say(STORED_HELP[asked.command].read_text(encoding="utf-8").rstrip("\n"))
                raise SystemExit(0)  # as argparse ends where it shows help
            module = import_module(f"pyrobnn.cli.{asked.command}")
            return int(module.run(words[1:], **{"command": shlex.join(["pyrobnn", *words])} | told))
        except (ValueError, TypeError, OSError, ImportError, argparse.ArgumentError) as error:
            say(f"pyrobnn: {one_line(error)}", sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            say("\nstopped", sys.stderr)
            return INTERRUPTED


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="pyrobnn",
        description="Bayesian neural networks, compared and judged.",
        epilog=f"Options of a command: pyrobnn COMMAND --help. {EXIT_STATUS[0].upper()}{EXIT_STATUS[1:]}.",
    )
    parser.add_argument("--version", action="version", version=f"pyrobnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, does in COMMANDS.items():
        commands.add_parser(name, help=does, add_help=False)
    return parser
