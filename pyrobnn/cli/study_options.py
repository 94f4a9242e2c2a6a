"""The options of data, model and run that ``compare`` and ``fit`` share."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser

from pyrobnn import data
from pyrobnn.cli import EXIT_STATUS
from pyrobnn.inference.method import METHODS
from pyrobnn.studies.response import RESPONSES

PRINT_CONFIG = ("--print_config", "--print-config")
#: what a file does not say: it is of one call
NOT_IN_FILES = ("help", "config", "print_config", "methods", "method", "resume", "checkpoint")
#: and what the numbers do not rest on
NOT_KEPT = ("out", "no_progress", "tracker", "live")


def add_study_options(parser: ArgumentParser, command: str) -> None:
    """Add them to the parser of a command, with its description."""
    _add_run(parser, command)
    _add_data(parser, command)
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--hidden", type=int, nargs="+", default=[50], metavar="N", help="widths of hidden layers"
    )
    model.add_argument("--activation", type=str, default="tanh", help="of the hidden layers")
    model.add_argument(
        "--prior_scale", "--prior-scale", type=float, default=1.0, help="scale of the fan-in normal prior"
    )
    model.add_argument(
        "--noise", type=str, default="inferred", help="inferred, learned, heteroskedastic, or a number"
    )
    responses = ", ".join(name for name in RESPONSES if name != "gaussian")
    model.add_argument(
        "--response",
        type=Literal[tuple(RESPONSES)],
        default="gaussian",
        metavar="R",
        help=f"{responses} (of classes in their order) [gaussian noise of numbers, plain classes]",
    )
    model.add_argument(
        "--exposure", type=str, metavar="COL", help="of counts: the column of each row's exposure"
    )
    model.add_argument(
        "--event",
        type=str,
        metavar="COL",
        help="of a censored target: the column of 1 (observed) and 0 (censored)",
    )
    model.add_argument(
        "--bounds", type=float, nargs=2, metavar=("LOW", "HIGH"), help="of beta: what y lies between [0 1]"
    )


def _add_run(parser: ArgumentParser, command: str) -> None:
    several = command == "compare"
    example = "nuts svi-lr=svi --svi-lr.lr 1e-3" if several else "nuts --nuts.num_draws 4000"
    does = (
        "Run methods on a data set, judge them and write a report."
        if several
        else "Run one method and save it."
    )
    flag = "--methods" if several else "--method"
    parser.description = (
        f"{does} Any option of a method: --METHOD.OPTION; pyrobnn {command} {flag} svi --help "
        "lists those of svi."
    )
    parser.epilog = f"{EXIT_STATUS[0].upper()}{EXIT_STATUS[1:]}."
    parser.usage = f"pyrobnn {command} {'' if several else 'DATA '}[options] [--METHOD.OPTION VALUE ...]"
    if several:
        standard = ", ".join(name for name, known in METHODS.items() if known.standard)
        parser.add_argument(
            "--methods",
            nargs="+",
            type=str,
            metavar="M",
            help=f"{', '.join(METHODS)}, or NAME=M for one under a name of your own ({example}) [{standard}]",
        )
        parser.add_argument("--out", type=str, default="results", metavar="DIR", help="where to write")
    else:
        parser.add_argument("--method", type=str, metavar="M", help=f"{', '.join(METHODS)} [nuts]; {example}")
        parser.add_argument("--out", type=str, default="model.nc", metavar="FILE.nc", help="where to save")
        parser.add_argument(
            "--checkpoint",
            type=str,
            metavar="FILE",
            help="of a run of NUTS: written now and then, gone on from [OUT with .checkpoint]",
        )
    parser.add_argument(
        "--config", type=str, metavar="FILE.yaml", help="options by name, and methods; the command line wins"
    )
    parser.add_argument(*PRINT_CONFIG, action="store_true", help="print such a file of this run and stop")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was stopped: what is finished is not fitted again",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer steps and draws, 500 rows at most: a minute"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--device", type=str, metavar="cpu|cuda", help="where to compute [cpu]")
    parser.add_argument(
        "--no_compile",
        "--no-compile",
        action="store_true",
        help="run without a compiler: same numbers, slower",
    )
    parser.add_argument(
        "--tracker",
        type=Literal["tensorboard", "mlflow", "wandb"],
        metavar="T",
        help="tensorboard, mlflow or wandb (offline): the numbers of every fit and its figures, beside OUT",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="draw a regression on one input while it is fitted: METHOD.gif beside OUT, and in the tracker",
    )
    parser.add_argument("--no_progress", "--no-progress", action="store_true", help="no progress bars")


def _add_data(parser: ArgumentParser, command: str) -> None:
    group = parser.add_argument_group("the data")
    names = f"{', '.join(data.names())}, or a table: CSV, TSV, Parquet or Excel"
    if command == "compare":
        group.add_argument(
            "--data",
            type=str,
            default="gap",
            metavar="NAME|FILE",
            help=f"{names} (gap: a sine that was not measured in the middle)",
        )
    else:
        group.add_argument("--data", type=str, metavar="DATA", help=f"{names}; the first word says it too")
    group.add_argument("--target", type=str, metavar="COL", help="target column of the file")
    group.add_argument(
        "--features", type=str, nargs="+", metavar="COL", help="columns to predict from [all others]"
    )
    group.add_argument("--drop", type=str, nargs="+", default=[], metavar="COL", help="columns to leave out")
    group.add_argument(
        "--task",
        type=Literal["regression", "classification"],
        help="what the target is [read from its values]",
    )
    group.add_argument(
        "--missing",
        type=Literal["refuse", "drop", "impute"],
        default="refuse",
        help="where a value is missing: refuse, drop the row, or impute and mark it",
    )
    group.add_argument("--test_fraction", "--test-fraction", type=float, default=0.1, help="share held out")
