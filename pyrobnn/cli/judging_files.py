"""``pyrobnn judge``: predictions in a table, whoever made them, held against the outcomes beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrobnn.cli.terminal import EXIT_STATUS, OneLineParser, say

if TYPE_CHECKING:
    import pandas as pd


def _parser() -> OneLineParser:
    """The options of ``pyrobnn judge``."""
    parser = OneLineParser(
        prog="pyrobnn judge",
        description="Judge predictions of rows that were not trained on: are they calibrated, everywhere, and as sharp "
        "as a linear model's? Give one of --quantiles, --mean with --sd, --draws, --probabilities.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument("file", metavar="FILE", help="CSV, TSV, Parquet or Excel: outcomes and predictions")
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the outcome")
    how = "columns of quantiles, the level in their name (q05 q50 q975) or behind it (low=0.05)"
    parser.add_argument("--quantiles", nargs="+", metavar="COLUMN", help=how)
    parser.add_argument("--mean", metavar="COLUMN", help="mean of a normal")
    parser.add_argument("--sd", metavar="COLUMN", help="standard deviation of a normal, noise included")
    parser.add_argument("--draws", metavar="PREFIX", help="how the names of the columns of draws begin")
    parser.add_argument(
        "--probabilities", nargs="+", metavar="COLUMN", help="of the classes, in their sorted order"
    )
    parser.add_argument(
        "--features", nargs="+", metavar="COLUMN", help="inputs, along which errors are looked at"
    )
    parser.add_argument("--train", metavar="FILE", help="training rows: the target and the features")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write report.html and verdict.json")
    return parser


def judge(argv: Sequence[str], command: str) -> int:
    """Judge and print; exit status 1 where the model fails or nothing could be checked."""
    asked = _parser().parse_args(argv)
    ways = [asked.quantiles, asked.mean or asked.sd, asked.draws, asked.probabilities]
    if sum(map(bool, ways)) != 1 or bool(asked.mean) != bool(asked.sd):
        raise ValueError("give one of --quantiles, --mean with --sd, --draws, --probabilities")

    import torch

    from pyrobnn.data.table import read_frame
    from pyrobnn.judging import judged

    frame = read_frame(asked.file)
    predictions: Any
    if asked.quantiles:
        pairs = [_level(each) for each in asked.quantiles]
        predictions = {level: _columns(frame, [name], asked.file)[name].to_numpy() for name, level in pairs}
        if len(predictions) < len(pairs):
            raise ValueError(f"--quantiles: two columns have the same level: {', '.join(asked.quantiles)}")
    elif asked.mean:
        both = _columns(frame, [asked.mean, asked.sd], asked.file)
        mean, sd = (torch.tensor(both[name].to_numpy(dtype=float)) for name in (asked.mean, asked.sd))
        if not bool((sd > 0.0).all()):
            raise ValueError(f"{asked.sd!r} must be above 0: it is {sd.min():.4g} in row {int(sd.argmin())}")
        predictions = torch.distributions.Normal(mean, sd)
    elif asked.draws:
        names = [name for name in frame.columns if name.startswith(asked.draws) and name != asked.target]
        if len(names) < 2:
            raise ValueError(
                f"{asked.file} has {len(names)} columns that begin with {asked.draws!r}: two are needed"
            )
        predictions = _columns(frame, names, asked.file).to_numpy().T
    else:
        predictions = _columns(frame, asked.probabilities, asked.file).to_numpy()
    inputs: dict[str, Any] = {"x": _features(frame, asked.features, asked.file)}
    y = _columns(frame, [asked.target], asked.file, words=bool(asked.probabilities))[asked.target].to_numpy()
    if asked.train:
        train = read_frame(asked.train)
        inputs["x_train"] = _features(train, asked.features, asked.train)
        known = _columns(train, [asked.target], asked.train, words=bool(asked.probabilities))
        inputs["y_train"] = known[asked.target].to_numpy()
    verdict, evidence = judged(predictions, y, label=Path(asked.file).stem, **inputs)
    say("\n".join([str(verdict), *map(str, verdict.checks)]))
    if asked.out is not None:
        from pyrobnn.report import write_report

        asked.out.mkdir(parents=True, exist_ok=True)
        title = "Do these predictions fit the outcomes?"
        page = write_report(
            {verdict.label: evidence},
            asked.out / "report.html",
            title=title,
            verdicts={verdict.label: verdict},
        )
        (asked.out / "verdict.json").write_text(verdict.to_json() + "\n", encoding="utf-8")
        say(f"report: {page}")
    return int(verdict.model == "fail" or not verdict.checked("model"))


def _level(given: str) -> tuple[str, float]:
    """Name and level of a column of quantiles: q05 0.05, q975 0.975, p5 0.05, low=0.1 0.1."""
    name, _, said = given.partition("=")
    digits = re.search(r"(\d*\.?\d+)\D*$", said or name)
    if digits is None:
        raise ValueError(f"--quantiles: {given!r} names no level: write {given}=0.05")
    text = digits.group(1)
    if "." in text:
        level = float(text)
    else:
        level = float(f"0.{text}") if text.startswith("0") or len(text) > 2 else int(text) / 100.0
    return name, level


def _columns(frame: pd.DataFrame, names: Sequence[str], file: str, *, words: bool = False) -> pd.DataFrame:
    """Columns of numbers (or words) without a gap; the first that is not says so."""
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"{file} has no column {name!r}: it has {', '.join(map(str, frame.columns))}")
        if frame[name].isna().any():
            row = int(frame[name].isna().to_numpy().argmax())
            raise ValueError(
                f"{name!r} of {file} is empty in row {row}: leave out rows without an outcome or prediction"
            )
        if not words and frame[name].dtype.kind not in "biuf":
            raise ValueError(f"{name!r} of {file} holds {frame[name].iloc[0]!r}, not numbers")
    return frame[list(names)]


def _features(frame: pd.DataFrame, names: Sequence[str] | None, file: str) -> pd.DataFrame | None:
    """The inputs as numbers, categories by their place in sorted order; None where none are named."""
    if not names:
        return None
    found = _columns(frame, names, file, words=True)
    return found.apply(
        lambda one: one if one.dtype.kind in "biuf" else one.astype("category").cat.codes
    ).astype(float)
