"""A row of records.jsonl: NUTS at its defaults on one reference posterior."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from posteriordb.distance_from_reference import distance, outcome_of, scalars
from posteriordb.reference_posteriors import Inputs, Reference, problem
from torch import Tensor

import pyrobnn as pb


def row(
    name: str,
    posterior: Reference,
    *,
    dtype: torch.dtype,
    seed: int,
    num_draws: int,
) -> dict[str, Any]:
    """One fit at the defaults, judged against the reference."""
    program, x, y = problem(name, posterior["data"])
    record = {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": seed,
    }
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = pb.NUTS().fit(
                program,
                _cast(x, dtype),
                y.to(dtype),
                num_draws=num_draws,
                seed=seed,
            )
        except Exception as error:  # a refusal is an answer too, and is counted as one
            refusal = f"{type(error).__name__}: {error}"
            return record | {"outcome": "refused", "warnings": [refusal[:300]]}
        status = pb.diagnose(fitted.to_datatree()).status
    seconds = time.perf_counter() - started
    off = distance(scalars(fitted.draws), posterior["parameters"])
    right = off.rhat <= 1.05 and off.ess >= 100 and off.errors <= 4
    texts = fitted.meta["warnings"]
    return record | {
        "outcome": outcome_of(right, bool(texts), "warned"),
        "errors": off.errors,
        "where": off.where,
        "rhat": off.rhat,
        "ess": off.ess,
        "status": status,
        **_of_trajectories(fitted.sample_stats),
        "gradients": fitted.meta["num_gradients"],
        "seconds": round(seconds, 1),
        "warnings": texts,
    }


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with their tensor in ``dtype``."""
    if isinstance(inputs, tuple):
        tensor, numbers = inputs
        return tensor.to(dtype), numbers
    return None if inputs is None else inputs.to(dtype)


def _of_trajectories(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """Acceptance rate, the first chain's last step size, mean tree depth, and the number of divergences."""
    return {
        "acceptance": float(stats["acceptance_rate"].mean()),
        "step_size": float(stats["step_size"][0, -1]),
        "tree_depth": float(stats["tree_depth"].double().mean()),
        "divergences": int(stats["diverging"].sum()),
    }
