"""A fit and what is known of it: its verdict, the widths of its uncertainty, how its chains ran."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svi_against_mcmc.study_cases import UNSEEN, fresh, model_of
from torch import Tensor
from xarray import DataTree

import pyrobnn as pb
from pyrobnn.data import Dataset
from pyrobnn.diagnostics import Evidence
from pyrobnn.diagnostics.gap import widest_gap


@dataclass(frozen=True)
class Settings:
    """Of all fits of a run: scales of the prior's weights and biases, NUTS, and where its checkpoints go."""

    prior: tuple[float, float]
    nuts: pb.NUTS
    checkpoints: Path | None


def judged(
    method: pb.NUTS | pb.SVI,
    name: str,
    data: Dataset,
    noise: str,
    settings: Settings,
    seed: int,
    draws: Path | None = None,
) -> dict[str, Any]:
    """A fit to one case and its verdict; fifty draws of each chain are written to ``draws``."""
    started = time.process_time()
    checkpoint = {}
    if settings.checkpoints is not None and isinstance(method, pb.NUTS):
        file = settings.checkpoints / f"{name}-{noise}-{seed}.checkpoint"
        checkpoint = {"checkpoint": file}
    posterior = method.fit(
        model_of(data, noise, *settings.prior),
        data.x,
        data.y,
        seed=seed,
        **checkpoint,
    )
    seconds = time.process_time() - started
    if draws is not None:
        posterior.thin(50).save(draws)
    tree = posterior.to_datatree(
        data.x,
        data.y,
        true_function=data.true_function,
    )
    verdict = pb.diagnose(tree)
    values = {check.name: check.value for check in verdict.checks}
    record: dict[str, Any] = {
        "status": verdict.status,
        "not passed": [f"{c.name} {c.status}" for c in verdict.checks if c.status != "pass"],
        "gap_ratio": _gap_ratio(tree),
        **_sds_at(posterior, data.x),
        **_scores(posterior, fresh(name, UNSEEN)),
        "cpu seconds": round(seconds, 1),
    }
    record |= {
        key: values[key] for key in ("rhat_function", "ess_function", "khat") if key in values
    }
    if isinstance(method, pb.NUTS):
        record |= _of_chains(method, posterior)
    return record


def _gap_ratio(tree: DataTree) -> float | None:
    """Epistemic sd in the widest gap over that at the data, where there is a gap."""
    gap = widest_gap(Evidence(tree))
    return None if gap is None or gap.ratio is None else round(gap.ratio, 3)


def _sds_at(posterior: pb.Posterior, x: Tensor) -> dict[str, float]:
    """Median epistemic sd and root mean square of the noise at inputs."""
    prediction = posterior.predict(x)
    return {
        "sd at data": round(float(prediction.epistemic_var.sqrt().median()), 5),
        "noise at data": round(float(prediction.aleatoric_var.mean().sqrt()), 5),
    }


def _scores(posterior: pb.Posterior, unseen: Dataset) -> dict[str, float | None]:
    """Log density a fresh point, and the ELBO where there is one."""
    evidence = posterior.log_evidence
    return {
        "log density": round(float(posterior.predict(unseen.x).log_prob(unseen.y).mean()), 4),
        "elbo": None if evidence is None else round(evidence, 2),
    }


def _of_chains(method: pb.NUTS, posterior: pb.Posterior) -> dict[str, Any]:
    """How long the trajectories were, and how the run ended."""
    stats = posterior.sample_stats
    return {
        "draws": posterior.num_chains * posterior.num_draws,
        "cut": round(float((stats["tree_depth"] >= method.max_tree_depth).float().mean()), 4),
        "leapfrogs": round(float(stats["n_steps"].float().mean()), 1),
        "divergences": int(stats["diverging"].sum()),
        "stopped": posterior.meta["stopped"],
        "accept": method.target_accept,
        "depth": method.max_tree_depth,
    }
