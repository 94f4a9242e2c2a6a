"""The benchmark's tasks, a method on a split of a set, and their records."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import Record, measured
from torch import Tensor
from uci.beside_published import FLOOR
from uci.linear_floor import LinearFloor
from uci.mixture_scoring import held_out_scores, mixture_scores
from uci.rule_search import Rule
from uci.rules import RULES
from uci.standard_splits import uci, uci_num_hidden, uci_splits

from pyrobnn.core.chains import ess, rhat
from pyrobnn.data import Dataset
from pyrobnn.posterior import Posterior

#: name in the tables → folder of the set; any other folder has its own name in the tables
DATASETS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


def key(record: Record) -> tuple[Any, ...]:
    """What makes two records the same work."""
    return record["dataset"], record["split"], record["method"]


def tasks(
    datasets: Sequence[str],
    methods: Sequence[str],
    numbers: Sequence[int] | None,
    root: str | Path | None,
) -> list[dict[str, Any]]:
    """Every method on every split of every data set, all methods of a split together."""
    for name in methods:
        if name not in (FLOOR, *RULES):
            raise ValueError(f"unknown method {name!r}: choose from {', '.join([FLOOR, *RULES])}")
    splits_of = {name: uci_splits(DATASETS.get(name, name), root) for name in datasets}
    num_splits = max(splits_of.values(), default=0)
    if numbers is None:
        numbers = range(num_splits)
    for split in numbers:
        if not 0 <= split < num_splits:
            raise ValueError(f"there is no split {split}: they are 0 … {num_splits - 1}")
    work = []
    for split, dataset, method in itertools.product(numbers, datasets, methods):
        if split < splits_of[dataset]:
            work.append(
                {
                    "dataset": dataset,
                    "split": split,
                    "method": method,
                }
            )
    return work


def run_task(task: Record, root: str | Path | None = None) -> dict[str, Any]:
    """Fit and score one task of :func:`tasks`; the record as :func:`records.measured` makes it."""
    torch.set_num_threads(1)  # the nets are small, and parallelism is across fits
    folder = DATASETS.get(task["dataset"], task["dataset"])
    train, test = uci(folder, task["split"], root)
    if task["method"] == FLOOR:
        work = functools.partial(_floor, train, test)
    else:
        num_hidden = uci_num_hidden(folder, root)
        rule = dataclasses.replace(RULES[task["method"]], num_hidden=num_hidden)
        work = functools.partial(
            _by_rule,
            rule,
            train,
            test,
            seed=task["split"],
        )
    return measured(
        task,
        work,
        seed=task["split"],
        num_train=train.num_data,
        num_test=test.num_data,
    )


def _floor(train: Dataset, test: Dataset) -> dict[str, Any]:
    """Scores of the linear model."""
    mean, scale = LinearFloor.fit(train).predict(test.x)
    return {"scores": rounded(mixture_scores(mean[None], scale[None], test.y[:, 0]))}


def _by_rule(rule: Rule, train: Dataset, test: Dataset, seed: int) -> dict[str, Any]:
    """Scores of the fit that a rule chooses, what it chose, and how its chains ran."""
    posterior, chosen, _ = rule.fit(train, seed)
    prediction = posterior.predict(test.x)
    return {
        "scores": rounded(held_out_scores(prediction, test)),
        "num_hidden": rule.num_hidden,
        "chosen": rule.label(chosen),
        "diagnosis": diagnosis(posterior, prediction.f),
    }


def rounded(scores: Mapping[str, float]) -> dict[str, float]:
    """Six digits are enough, and keep the records readable."""
    return {name: round(value, 6) for name, value in scores.items()}


def diagnosis(posterior: Posterior, f: Tensor) -> dict[str, float]:
    """Of chains: R-hat and ESS of the function at the test inputs."""
    if posterior.num_chains < 2 or posterior.meta.get("iid"):
        return {}
    values = f[..., 0].double().cpu().movedim(-1, 0)
    ratio = rhat(values)
    statistics = {
        "rhat_f_max": ratio.max(),
        "rhat_f_median": np.median(ratio),
        "ess_f_min": ess(values).min(),
    }
    return {
        name: round(float(value), 4) for name, value in statistics.items() if math.isfinite(value)
    }
