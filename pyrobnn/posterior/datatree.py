"""From a posterior to an ArviZ ``xarray.DataTree``; of a plain program by :mod:`~pyrobnn.posterior.program_tree`.

Everything about the data is in the units of the data, also where the model standardises. ``f`` is the mean function for
regression and the logits for classification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyrobnn.core import groups as group
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import seeded
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.likelihoods.dense import DenseCategorical
from pyrobnn.posterior.arrays import MAX_PAIRS, few_draws, sample_dataset, site_dataset, to_numpy
from pyrobnn.posterior.invariance import (
    function_beside_posterior,
    moved_functions,
    posterior_density,
    stein_statistics,
)
from pyrobnn.posterior.model_words import describe_model
from pyrobnn.posterior.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.posterior.probes import probes
from pyrobnn.posterior.program_tree import log_densities_by_site

#: draws by which the linearised net is compared with the net itself, and roundings of a value that are no difference
_LINEARIZED_DRAWS = 100
_ROUNDINGS = 8.0
#: (draws × points) whose log likelihoods are computed together
_PAIRS_AT_ONCE = 4_000_000
MOMENTS = ("mean", "aleatoric_var", "epistemic_var")

#: also a function: ``to_datatree(posterior, x, y)``
to_datatree = Posterior.to_datatree


def network_groups(
    posterior: Posterior,
    x: Tensor,
    y: Tensor | None,
    probe_x: Tensor | None,
    grid: Tensor | None,
    true_function: Callable[[Tensor], Tensor] | None,
    num_prior_draws: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """The groups of a BNN's tree that rest on its training inputs; arguments as of ``to_datatree``."""
    if probe_x is None:
        probe_x, kinds = probes(x)
    else:
        probe_x = torch.as_tensor(probe_x)
        kinds = ["user"] * len(probe_x)
    probe_x = posterior.bnn.comparable(probe_x)
    groups = {}
    if y is not None:
        groups = _data_groups(posterior, x, y, seed)
        moved_group = _moved_group(posterior, x, y, probe_x, kinds)
        if moved_group is not None:
            groups[group.MOVED] = moved_group
        statistics = stein_statistics(posterior, posterior_density(posterior, x, y), y)
        if statistics is not None:
            groups[group.STEIN] = statistics
    groups |= _function_groups(posterior, probe_x, kinds, groups, num_prior_draws, seed)
    if posterior.meta.get("settings", {}).get("predictive") == "linearized":
        at_probes = linearization_error(posterior, probe_x)
        near_data = linearization_error(posterior, posterior.bnn.comparable(probes(x)[0]))
        groups[group.FUNCTION]["linearization_error"] = max(at_probes, near_data)
    return groups | _grid_group(posterior, x, grid, true_function)


def _moved_group(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    probe_x: Tensor,
    kinds: list[str],
) -> xr.Dataset | None:
    """The group ``MOVED``, of one of two schemas; None where the draws cannot be moved.

    Of several independent draws it is that of :func:`function_beside_posterior`: their function beside that of short
    chains which began at them. Of chains, and where short ones are too dear, it is that of
    :func:`moved_functions`: the function of thinned draws before and after they are moved.
    """
    independent = posterior.meta.get("kind") == "independent"
    if independent and posterior.num_chains * posterior.num_draws > 1:
        user_probes = probe_x[[kind == "user" for kind in kinds]]
        beside = function_beside_posterior(posterior, x, y, user_probes)
        if beside is not None:
            return beside
    return moved_functions(posterior, posterior_density(posterior, x, y), y, probe_x)


def whole_tree(
    posterior: Posterior, groups: dict[str, xr.Dataset], label: str | None
) -> xr.DataTree:
    """The tree of a posterior's own groups and of those made of data, with its provenance."""
    of_fit = {group.POSTERIOR: site_dataset(posterior.draws, posterior.meta.get("axes", {}))}
    if posterior.sample_stats:
        of_fit[group.SAMPLE_STATS] = site_dataset(posterior.sample_stats, {})
    if posterior.history:
        steps = {name: ((f"step_{name}",), to_numpy(v)) for name, v in posterior.history.items()}
        of_fit[group.HISTORY] = xr.Dataset(steps)
    tree = xr.DataTree.from_dict(of_fit | groups)
    tree.attrs.update(_attributes(posterior, label))
    return tree


def _data_groups(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    seed: int,
) -> dict[str, xr.Dataset]:
    """Log prior and likelihood of each draw, the data, and outcomes drawn anew at their inputs."""
    thinned = few_draws(posterior, len(y))
    prediction = thinned.predict(x)
    log_prior, log_likelihood = log_densities(thinned, x, y, prediction)
    # a method of few draws gets at least 200 replicates, unless they would fill the memory
    least_replicates = 200 if len(x) * 200 <= MAX_PAIRS else 0
    observed = _observed(thinned.bnn, y, "obs")
    inputs = to_numpy(x.reshape(len(x), -1))
    replicates = _replicates(thinned, prediction, y, "obs", least_replicates, seed)
    groups = {
        group.LOG_PRIOR: sample_dataset(log_prior=(log_prior,)),
        group.OBSERVED_DATA: observed,
        group.LOG_LIKELIHOOD: sample_dataset(y=(log_likelihood, "obs")),
        group.CONSTANT_DATA: xr.Dataset({"x": (("obs", "feature"), inputs)}),
        group.POSTERIOR_PREDICTIVE: xr.Dataset({"y": replicates["y"]}),
    }
    if "y_sample" in replicates:
        groups[group.REPLICATES] = xr.Dataset({"y": replicates["y_sample"]})
    return groups


def log_densities(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    prediction: Prediction | None = None,
) -> tuple[Tensor, Tensor]:
    """Log prior (chain, draw) and log likelihood of each datum (chain, draw, N) of every draw, in the units of y.

    Of a program: :meth:`pyrobnn.Density.log_likelihood` says what is a datum and what it contributes; factors
    that belong to no datum are counted with the prior.

    Args:
        prediction: of a net, the posterior's own at ``x``, where it has been made already; its points are computed
            anew where they are too many to be taken together.
    """
    if not isinstance(posterior.model, BNN):
        log_prior, terms = log_densities_by_site(
            posterior, cast(Density, posterior_density(posterior, x, y))
        )
        flat = [value.flatten(2) for value in terms.values()]
        return log_prior, torch.cat([log_prior.new_zeros(*log_prior.shape, 0), *flat], -1)
    prior = sum(
        site.log_prob(posterior.draws[name]) for name, site in posterior.model.priors.items()
    )
    x = torch.as_tensor(x)
    points_at_once = max(1, _PAIRS_AT_ONCE // (posterior.num_chains * posterior.num_draws))
    if prediction is not None and len(x) <= points_at_once:
        return prior, prediction.log_prob_draws(torch.as_tensor(y))
    pieces = zip(x.split(points_at_once), torch.as_tensor(y).split(points_at_once))
    return prior, torch.cat([posterior.predict(px).log_prob_draws(py) for px, py in pieces], -1)


def _function_groups(
    posterior: Posterior,
    probe_x: Tensor,
    kinds: list[str],
    data_groups: Mapping[str, xr.Dataset],
    num_prior: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """The function at the probes, with norms, noise and log densities of each draw; and the groups of the prior."""
    norms = layer_norms(posterior.draws)
    likelihood = posterior.bnn.likelihood
    dataset = sample_dataset(
        f=(posterior.function(probe_x), "probe", "output"),
        layer_norm=(torch.stack(list(norms.values()), -1), "layer"),
    )
    dataset["probe_x"] = (("probe", "feature"), to_numpy(probe_x.reshape(len(probe_x), -1)))
    dataset["probe_kind"] = (("probe",), np.array(kinds))
    log_likelihood = data_groups.get(group.LOG_LIKELIHOOD)
    if log_likelihood is not None and log_likelihood.sizes["draw"] == posterior.num_draws:
        dataset["log_likelihood"] = log_likelihood["y"].sum("obs")
        dataset["log_prior"] = data_groups[group.LOG_PRIOR]["log_prior"]
    if likelihood.own.priors and likelihood.targets.normal:
        noise = posterior.predict(probe_x[:1]).scale[:, :, 0]
        dataset["noise"] = ((*group.SAMPLE_DIMS, "output"), to_numpy(noise))
    groups = {group.FUNCTION: dataset.assign_coords(layer=list(norms))}
    return groups | _prior_groups(posterior.bnn, probe_x, num_prior, seed)


def _prior_groups(
    model: BNN,
    probe_x: Tensor,
    num_draws: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """Draws of the prior, and their functions at the probes; none where no draws are asked for."""
    if num_draws == 0:
        return {}
    prior = prior_posterior(model, num_draws, seed)
    functions = sample_dataset(f=(prior.function(probe_x), "probe", "output"))
    return {group.PRIOR: site_dataset(prior.draws, {}), group.PRIOR_PREDICTIVE: functions}


def linearization_error(posterior: Posterior, x: Tensor) -> float:
    """How far the function that a linearised net predicts lies from the net's own at the same weights.

    Root mean square over at most 100 draws, in standard deviations of the prediction, at the input and the output where
    it is largest; infinite where a prediction that does not vary is not the net's.
    """
    thinned = posterior.thin(_LINEARIZED_DRAWS)
    predicted = thinned.function(x).double().flatten(0, 1)
    by_net = replace(thinned, network=None, moments=None).function(x).double().flatten(0, 1)
    rounding = _ROUNDINGS * torch.finfo(thinned.bnn.dtype).eps * predicted.abs().amax(0)
    error = ((predicted - by_net).square().mean(0).sqrt() - rounding).clamp_min(0.0)
    ratio = error / predicted.std(0, correction=0)
    return float(torch.where(error > 0.0, ratio, 0.0).amax())


def prior_posterior(model: BNN, num_draws: int, seed: int) -> Posterior:
    """Draws from the prior as a :class:`Posterior`, which predicts and is plotted like any other."""
    with seeded(seed, model.device):
        draws = {name: site.sample((1, num_draws)) for name, site in model.priors.items()}
    fixed = dict(model.initial_values())
    for name, (initial, _) in model.likelihood.own.points.items():
        fixed[name] = initial
    for name, value in fixed.items():
        if name not in draws:
            draws[name] = value.expand(1, num_draws, *value.shape)
    return Posterior(
        model,
        draws,
        meta={"method": "Prior", "iid": True},
    )


def _grid_group(
    posterior: Posterior,
    x: Tensor,
    grid: Tensor | None,
    true_function: Callable[[Tensor], Tensor] | None,
) -> dict[str, xr.Dataset]:
    """Functions and moments along a single input; none of several inputs, or of classes."""
    if x.dim() != 2 or x.shape[1] != 1 or posterior.bnn.likelihood.targets.classes:
        return {}
    if grid is None:
        low = float(x.min())
        high = float(x.max())
        reach = 0.5 * (high - low)
        grid = torch.linspace(
            low - reach,
            high + reach,
            200,
            dtype=x.dtype,
        )[:, None]
    prediction = posterior.predict(grid)
    point = ("grid_point", "output")
    functions = prediction.f.flatten(0, 1)
    keep = evenly_spaced(len(functions), min(30, len(functions)))
    variables = {
        "x": (("grid_point", "feature"), to_numpy(grid)),
        "f_draws": (("grid_draw", *point), to_numpy(functions[keep])),
        **{name: (point, to_numpy(getattr(prediction, name))) for name in MOMENTS},
    }
    if true_function is not None:
        variables["true_f"] = (point, to_numpy(true_function(grid)))
    return {group.GRID: xr.Dataset(variables)}


def held_out_groups(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    seed: int,
) -> dict[str, xr.Dataset]:
    """The groups of held-out points: what is predicted there, and what was observed."""
    x = posterior.bnn.rows(x)
    y = posterior.bnn.likelihood.targets.read(y)
    thinned = few_draws(posterior, len(x))
    prediction = thinned.predict(x)
    log_prob = prediction.log_prob(y)
    if prediction.likelihood.targets.kind == "labels":
        x, log_prob = _rows_with_labels(prediction, x, y, log_prob)
        prediction, y = prediction.one_position(y)
    dataset = sample_dataset(f=(prediction.f, "pred_point", "output"))
    dataset["log_prob"] = (("pred_point",), to_numpy(log_prob))
    dataset = dataset.assign(_replicates(thinned, prediction, y, "pred_point", 1000, seed))
    if prediction.likelihood.targets.classes:
        dataset["probs"] = (("pred_point", "class"), to_numpy(prediction.probs))
        for name in ("aleatoric_entropy", "epistemic_entropy"):
            dataset[name] = (("pred_point",), to_numpy(getattr(prediction, name)))
    else:
        for name in MOMENTS:
            dataset[name] = (("pred_point", "output"), to_numpy(getattr(prediction, name)))
    inputs = (("pred_point", "feature"), to_numpy(x.reshape(len(x), -1)))
    return {
        group.PREDICTIONS: dataset,
        group.HELD_OUT: _observed(thinned.bnn, y, "pred_point").assign(x=inputs),
    }


def _rows_with_labels(
    prediction: Prediction,
    x: Tensor,
    y: Tensor,
    log_prob: Tensor,
) -> tuple[Tensor, Tensor]:
    """Inputs and log densities of the rows (N, …) of which any position has a label."""
    likelihood = cast(DenseCategorical, prediction.likelihood)
    rows = likelihood.observed(likelihood.targets.columns(y)).any(1)
    return x[rows.to(x.device)], log_prob[rows.to(log_prob.device)]


def _replicates(
    posterior: Posterior,
    prediction: Prediction,
    y: Tensor,
    point: str,
    least_replicates: int,
    seed: int,
) -> dict[str, Any]:
    """New outcomes as they would have been seen where ``y`` was: one of each draw, and several where draws are few."""
    total = posterior.num_chains * posterior.num_draws
    as_observed = prediction.likelihood.targets.as_observed
    one_each = as_observed(prediction.sample(seed=seed), y)
    replicates = {"y": _targets(one_each, *group.SAMPLE_DIMS, point)}
    if total < least_replicates:
        per_draw = math.ceil(least_replicates / total)
        several_each = as_observed(prediction.sample(seed=seed, per_draw=per_draw), y)
        replicates["y_sample"] = _targets(several_each.flatten(0, 1), group.REPLICATE, point)
    return replicates


def _observed(model: BNN, y: Tensor, point: str) -> xr.Dataset:
    """What was observed of the columns that are predicted; numbers are floating, whatever their type was."""
    targets = model.likelihood.targets
    values = targets.values(targets.columns(y))
    if not targets.classes and not values.is_floating_point():
        values = values.double()
    dataset = xr.Dataset({"y": _targets(values, point)})
    if targets.censoring is not None:
        dataset["observed"] = ((point,), to_numpy(y[..., 1]))
    return dataset


def _targets(y: Tensor, *dims: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Targets without the output dimension where there is only one."""
    if y.dim() > len(dims) and y.shape[-1] == 1:
        y = y.squeeze(-1)
    if y.dim() > len(dims):
        dims = (*dims, "output")
    return dims, to_numpy(y)


def layer_norms(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norm of all weights of each layer, (chain, draw), which no exchange of hidden units changes."""
    squares: dict[str, Tensor] = {}
    for name, value in draws.items():
        if name.startswith(NET) and value.is_floating_point():
            layer = name.removeprefix(NET).rpartition(".")[0] or "net"
            # of a parameter without dimensions there is nothing to flatten
            weights = value.reshape(*value.shape[:2], -1)
            squares[layer] = squares.get(layer, 0) + weights.square().sum(-1)
    return {layer: total.sqrt() for layer, total in squares.items()}


def _attributes(posterior: Posterior, label: str | None) -> dict[str, str | float | int]:
    meta = posterior.meta
    attributes = {
        "method": meta.get("method", "unknown"),
        "label": label or str(meta.get("method", "unknown")).lower(),
        "iid": int(bool(meta.get("iid", False))),
        "model": json.dumps(describe_model(posterior.model), ensure_ascii=False),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if posterior.log_evidence is not None:
        attributes["log_evidence"] = float(posterior.log_evidence)
    for name, value in meta.items():
        if name not in attributes and value is not None:
            attributes[name] = _attribute(value)
    return attributes


def _attribute(value: str | float | list | dict) -> str | float | int:
    """A value of ``meta`` as an attribute of a netCDF file: a text or a number, JSON of anything else."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (str, int, float)) and value == value:
        return value
    return json.dumps(value)
