"""``pyrobnn report``: saved DataTrees judged, ours or those of NumPyro or PyMC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyrobnn.cli import EXIT_STATUS
from pyrobnn.cli.say import OneLineParser, check_file


def run(argv: Sequence[str], command: str) -> int:
    """Judge and write; exit status 0, with ``--strict`` 1 where a verdict is a fail or nothing was checked."""
    parser = OneLineParser(
        prog="pyrobnn report",
        description="Judge saved DataTrees, also of NumPyro or PyMC, and write a report.",
        epilog=f"{EXIT_STATUS[0].upper()}{EXIT_STATUS[1:]}.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.nc")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="where to write [report.html]",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if any verdict is a fail, or nothing was checked"
    )
    asked = parser.parse_args(argv)

    from pyrobnn.cli.judged import write
    from pyrobnn.posterior.storage import read

    check_file(asked.out, "report.html")
    trees = {path.stem: read(path) for path in asked.files}
    if len(trees) < len(asked.files):
        raise ValueError("two files have the same name: rename one, names label the methods in the report")
    verdicts = write(trees, asked.out, asked.out.with_suffix(".json"), {})
    # what nothing was checked of has not passed: a script that relies on the exit status must not take it for well
    failed = [label for label, verdict in verdicts.items() if verdict.status == "fail" or not verdict.passed]
    return 1 if asked.strict and failed else 0
