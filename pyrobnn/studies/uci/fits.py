"""The protocol: one fit of one method to one split of one data set, and its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyrobnn.chains import ess, rhat
from pyrobnn.data import Dataset, uci, uci_num_hidden, uci_splits
from pyrobnn.posterior import Posterior
from pyrobnn.studies.uci.linear_floor import LinearFloor
from pyrobnn.studies.uci.provenance import code, commit, versions
from pyrobnn.studies.uci.rules import RULES, Rule, held_out_scores
from pyrobnn.studies.uci.scores import mixture_scores

#: name in the tables → folder of the set; a folder that is not here has its own name in the tables
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
FLOOR = "linear"


def tasks(
    datasets: Sequence[str],
    methods: Sequence[str],
    splits: Sequence[int] | None = None,
    rules: Mapping[str, Rule] = RULES,
    *,
    root: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Every method on every split of every data set, all methods of a split together, split by split.

    Args:
        datasets: names of :data:`DATASETS`, or of folders in the same layout.
        methods: names of rules, or ``"linear"``.
        splits: their numbers, of which a set leaves out those that it does not have; None for all that it has.
        rules: by name.
        root: directory of the sets, as in :func:`pyrobnn.data.uci`.

    Raises:
        ValueError: an unknown data set or method, or a split that none of the sets has.
    """
    known = [FLOOR, *rules]
    for name in methods:
        if name not in known:
            raise ValueError(f"unknown method {name!r}: choose from {', '.join(known)}")
    has = {name: _num_splits(name, root) for name in datasets}
    most = max(has.values(), default=0)
    for split in splits or ():
        if not 0 <= split < most:
            raise ValueError(f"there is no split {split}: they are 0 … {most - 1}")
    return [
        {"dataset": dataset, "split": split, "method": method, "rule": rule_id(method, rules)}
        for split in (range(most) if splits is None else splits)
        for dataset in datasets
        if split < has[dataset]
        for method in methods
    ]


def _num_splits(name: str, root: str | Path | None) -> int:
    folder = DATASETS.get(name, name)
    try:
        uci_num_hidden(folder, root)  # a file of it that is no number is an error here, before anything runs
        return uci_splits(folder, root)
    except ValueError as error:
        raise ValueError(f"data set {name!r}: {error}. The usual ones are {', '.join(DATASETS)}") from error


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two records the same work."""
    return record["dataset"], record["split"], record["method"], record["rule"]


def rule_id(method: str, rules: Mapping[str, Rule] = RULES) -> str:
    """Eight letters that change with the rule."""
    text = FLOOR if method == FLOOR else json.dumps(rules[method].describe(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def code_of(method: str, rules: Mapping[str, Rule] = RULES) -> str:
    """Eight letters that change with any line that a method's scores depend on: its own, its rule's and the data's."""
    parts = {"data.dataset", "data.uci_sets", "studies.uci.linear_floor", "studies.uci.scores"}
    fitted: list[Any] = []
    if method != FLOOR:
        parts |= {"model", "likelihoods.gaussian", "networks", "priors", "posterior.predict"}
        fitted = [rules[method].method, rules[method].validate_with, rules[method].init]
    roots = {f"pyrobnn.{part}" for part in parts}
    roots |= {type(each).__module__ for each in fitted if each is not None}
    # not what it imports, which is every method
    own = Path(__file__).with_name("rules.py").read_text(encoding="utf-8")
    return hashlib.sha256((code(*sorted(roots)) + own).encode()).hexdigest()[:8]


def run_task(
    task: Mapping[str, Any], *, root: str | Path | None = None, rules: Mapping[str, Rule] = RULES
) -> dict[str, Any]:
    """Fit and score; the test part is touched once, after everything is chosen.

    Args:
        task: one of :func:`tasks`.
        root: directory of the UCI sets, as in :func:`pyrobnn.data.uci`.

    Returns:
        The task with ``scores``, ``seconds`` (wall clock of everything, choice of hyper-parameters included),
        ``cpu_seconds``, ``peak_mb`` as in :func:`peak_mb`, ``chosen``, ``criterion`` of each candidate, ``diagnosis``
        of chains, ``num_hidden`` of the net, ``warnings``, ``seed``, ``versions``, the ``commit`` (None outside of a
        checkout), and ``code`` as in :func:`code_of`.
    """
    folder = DATASETS.get(task["dataset"], task["dataset"])
    train, test = uci(folder, task["split"], root)
    seed = task["split"]

    def work() -> dict[str, Any]:
        if task["method"] == FLOOR:
            mean, scale = LinearFloor.fit(train).predict(test.x)
            return {"scores": mixture_scores(mean[None], scale[None], test.y[:, 0])}
        rule = dataclasses.replace(rules[task["method"]], num_hidden=uci_num_hidden(folder, root))
        details, found = _fit(rule, train, test, seed)
        return {"scores": found, "num_hidden": rule.num_hidden, **details}

    facts = {"seed": seed, "num_train": train.num_data, "num_test": test.num_data}
    return measured(task, work, facts | {"code": code_of(task["method"], rules)})


def measured(
    task: Mapping[str, Any], work: Callable[[], Mapping[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a piece of work: the task, what it gave, what it cost, and all that its numbers depend on.

    Args:
        task: what identifies the work.
        work: the work; gives ``scores``, metric → value, and whatever else the record is to keep.
        facts: further entries, such as the seed, the sizes of the data, and ``code`` where less than the whole package
            counts.

    Returns:
        As :func:`run_task`.
    """
    started, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = dict(work())
    return {
        **task,
        "scores": {name: round(value, 6) for name, value in found.pop("scores").items()},
        "seconds": round(time.perf_counter() - started, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "peak_mb": peak_mb(),
        "code": code(),
        **found,
        **facts,
        "warnings": sorted({str(warning.message)[:200] for warning in caught}),
        "versions": versions(),
        "commit": commit(),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_mb() -> int | None:
    """The most memory that this process has held so far, in MB; None where neither the system nor psutil tells it."""
    try:
        import resource
    except ImportError:  # Windows
        try:
            import psutil
        except ImportError:
            return None
        return round(psutil.Process().memory_info().peak_wset / 2**20)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def _fit(rule: Rule, train: Dataset, test: Dataset, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    posterior, chosen, criterion = rule.fit(train, seed)
    prediction = posterior.predict(test.x)
    details = {
        "chosen": {**chosen.describe(), "label": rule.label(chosen)},
        "criterion": criterion,
        "timings": posterior.meta.get("timings", {}),
        "diagnosis": diagnosis(posterior, prediction.f),
    }
    return details, held_out_scores(prediction, test)


def diagnosis(posterior: Posterior, f: torch.Tensor) -> dict[str, float]:
    """Of chains: R-hat and ESS of the function at the test inputs, and what the sampler says about itself."""
    if posterior.num_chains < 2 or posterior.meta.get("iid"):
        return {}
    values = f[..., 0].double().cpu().numpy()
    points = np.moveaxis(values, -1, 0)
    ratios, worth = rhat(points), ess(points)
    found = {
        "rhat_f_median": float(np.median(ratios)),
        "rhat_f_max": float(np.max(ratios)),
        "ess_f_median": float(np.median(worth)),
        "ess_f_min": float(np.min(worth)),
    }
    stats = posterior.sample_stats
    for name, value in (("divergences", "diverging"), ("tree_depth", "tree_depth"), ("steps", "n_steps")):
        if value in stats:
            numbers = stats[value].double()
            found[name] = float(numbers.sum() if name == "divergences" else numbers.mean())
    return {name: round(value, 4) for name, value in found.items() if math.isfinite(value)}
