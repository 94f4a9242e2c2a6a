"""Every number by the package of an earlier commit and by this one, each repeat in a process of its own."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from records import commit, peak_mb, versions
from speed.numbers_of_speed import NUMBERS, worse
from speed.short_fits import laplace_and_predict, nuts, scores, svi

#: this repository
ROOT = Path(__file__).parents[2]
#: chance that an unchanged number is measured again
SUSPECTED = 0.1


def measure_again_if_worse(against: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Every number of both codes, by as many repeats again where one looks worse."""
    now = {"against": against, **measure(range(repeats), folder)}
    if worse(now, SUSPECTED):
        again = measure(range(repeats, 2 * repeats), folder)
        for name in NUMBERS:
            now["old"][name] += again["old"][name]
            now["new"][name] += again["new"][name]
    return now


def unpack(revision: str, folder: Path) -> None:
    """Write the package as it was at a commit."""
    command = ["git", "-C", str(ROOT), "archive", revision, "pyrobnn"]
    archive = subprocess.run(
        command,
        capture_output=True,
        check=True,
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")


def measure(seeds: Sequence[int], old: Path) -> dict[str, Any]:
    """Every number of the package in ``old`` and of this one, in turn, each repeat in a process of its own."""
    folders = {"old": old, "new": ROOT}
    values: dict[str, dict[str, list[float]]] = {}
    for code in folders:
        values[code] = {name: [] for name in NUMBERS}
    os.environ["OMP_NUM_THREADS"] = "1"
    for seed, turn in itertools.product(seeds, (0, 1)):
        code = ("old", "new")[(seed + turn) % 2]  # each goes first in every other repeat
        numbers = in_a_process(seed, folders[code])
        print(
            code,
            "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()),
            flush=True,
        )
        for name, value in numbers.items():
            values[code][name].append(value)
    return {
        "peak_mb": peak_mb(children=True),
        "commit": commit() or "?",
        "versions": versions(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **values,
    }


def in_a_process(seed: int, folder: Path) -> dict[str, float]:
    """Every number once, by the package in ``folder``."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(repeat, seed, folder).result()


def repeat(seed: int, folder: Path) -> dict[str, float]:
    """Every number once, in a process that has not imported the package yet."""
    sys.path.insert(0, str(folder))
    import torch

    import pyrobnn as pb

    if not Path(pb.__file__).is_relative_to(folder):
        raise RuntimeError(f"the package was imported from {pb.__file__}, not from {folder}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that are short on purpose
    return {
        **nuts(seed),
        **svi(seed),
        **laplace_and_predict(seed),
        **scores(seed),
    }
