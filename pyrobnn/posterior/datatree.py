"""From a posterior to an ArviZ ``xarray.DataTree``: the one place that knows both vocabularies.

Everything about the data is in the units of the data, also where the model standardises. ``f`` is the mean function for
regression and the logits for classification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from arviz_base import dict_to_dataset
from torch import Tensor, nn

from pyrobnn.core import groups as group
from pyrobnn.core.seeding import generator, seeded
from pyrobnn.model import BNN, NET, Density, derived
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior.invariance import moved_functions, posterior_density
from pyrobnn.posterior.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction

#: (draws × points) above which draws are thinned in the groups that hold one value for each pair
MAX_PAIRS = 50_000_000
#: draws by which the linearised net is compared with the net itself, and roundings of a value that are no difference
_LINEARIZED_DRAWS = 100
_ROUNDINGS = 8.0
MOMENTS = ("mean", "aleatoric_var", "epistemic_var")
Dims = Mapping[str, Sequence[str | None]]

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
    probe_x = posterior.bnn.unit_exposure(probe_x)
    groups = {}
    if y is not None:
        groups = _data_groups(posterior, x, y, seed)
        moved = moved_functions(posterior, x, y, probe_x)
        if moved is not None:
            groups[group.MOVED] = moved
    groups |= _function_groups(posterior, probe_x, kinds, groups, num_prior_draws, seed)
    if posterior.meta.get("settings", {}).get("predictive") == "linearized":
        at_probes = linearization_error(posterior, probe_x)
        near_data = linearization_error(posterior, posterior.bnn.unit_exposure(probes(x)[0]))
        groups[group.FUNCTION]["linearization_error"] = max(at_probes, near_data)
    return groups | _grid_group(posterior, x, grid, true_function)


def whole_tree(
    posterior: Posterior, groups: dict[str, xr.Dataset], label: str | None
) -> xr.DataTree:
    """The tree of a posterior's own groups and of those made of data, with its provenance."""
    of_fit = {group.POSTERIOR: _draws(posterior.draws, posterior.meta.get("axes", {}))}
    if posterior.sample_stats:
        of_fit[group.SAMPLE_STATS] = _draws(posterior.sample_stats, {})
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
    thinned = _thinned(posterior, len(y))
    log_prior, log_likelihood = log_densities(thinned, x, y)
    # of use only to methods of few draws
    fewest = 200 if len(x) * 200 <= MAX_PAIRS else 0
    observed = _observed(thinned.bnn, y, "obs")
    inputs = to_numpy(x.reshape(len(x), -1))
    replicates = _replicates(thinned, thinned.predict(x), y, "obs", fewest, seed)
    return {
        group.LOG_PRIOR: _dataset(log_prior=(log_prior,)),
        group.OBSERVED_DATA: observed,
        group.LOG_LIKELIHOOD: _dataset(y=(log_likelihood, "obs")),
        group.CONSTANT_DATA: xr.Dataset({"x": (("obs", "feature"), inputs)}),
        group.POSTERIOR_PREDICTIVE: xr.Dataset(replicates),
    }


def _dataset(**values: tuple[Any, ...]) -> xr.Dataset:
    """Draws (chain, draw, …), each with the names of its other dimensions."""
    variables = {}
    for name, (value, *dims) in values.items():
        variables[name] = ((*group.SAMPLE_DIMS, *dims), to_numpy(value))
    return xr.Dataset(variables)


def _thinned(posterior: Posterior, num_points: int) -> Posterior:
    """Few enough draws to hold one value for each and every point."""
    return posterior.thin(max(1, MAX_PAIRS // max(num_points * posterior.num_chains, 1)))


def log_densities(posterior: Posterior, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Log prior (chain, draw) and log likelihood of each datum (chain, draw, N) of every draw, in the units of y.

    Of a program: :meth:`pyrobnn.Density.log_likelihood` says what is a datum and what it contributes; factors
    that belong to no datum are counted with the prior.
    """
    if not isinstance(posterior.model, BNN):
        log_prior, terms = _log_densities_by_site(
            posterior, cast(Density, posterior_density(posterior, x, y))
        )
        flat = [value.flatten(2) for value in terms.values()]
        return log_prior, torch.cat([log_prior.new_zeros(*log_prior.shape, 0), *flat], -1)
    prior = sum(
        site.log_prob(posterior.draws[name]) for name, site in posterior.model.priors.items()
    )
    x = torch.as_tensor(x)
    size = max(1, 4_000_000 // (posterior.num_chains * posterior.num_draws))  # points at once
    pieces = zip(x.split(size), torch.as_tensor(y).split(size))
    return prior, torch.cat([posterior.predict(px).log_prob_draws(py) for px, py in pieces], -1)


def _function_groups(
    posterior: Posterior,
    probe_x: Tensor,
    kinds: list[str],
    known: Mapping[str, xr.Dataset],
    num_prior: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    norms = layer_norms(posterior.draws)
    likelihood = posterior.bnn.likelihood
    dataset = _dataset(
        f=(posterior.function(probe_x), "probe", "output"),
        layer_norm=(torch.stack(list(norms.values()), -1), "layer"),
    )
    dataset["probe_x"] = (("probe", "feature"), to_numpy(probe_x.reshape(len(probe_x), -1)))
    dataset["probe_kind"] = (("probe",), np.array(kinds))
    log_likelihood = known.get(group.LOG_LIKELIHOOD)
    if log_likelihood is not None and log_likelihood.sizes["draw"] == posterior.num_draws:
        dataset["log_likelihood"] = log_likelihood["y"].sum("obs")
        dataset["log_prior"] = known[group.LOG_PRIOR]["log_prior"]
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
    if num_draws == 0:
        return {}
    prior = prior_posterior(model, num_draws, seed)
    functions = _dataset(f=(prior.function(probe_x), "probe", "output"))
    return {group.PRIOR: _draws(prior.draws, {}), group.PRIOR_PREDICTIVE: functions}


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
    keep = torch.linspace(0, len(functions) - 1, min(30, len(functions))).round().long()
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
    y: Any,
    seed: int,
) -> dict[str, xr.Dataset]:
    """The groups of held-out points: what is predicted there, and what was observed."""
    x = torch.as_tensor(x)
    y = posterior.bnn.likelihood.targets.read(y)
    thinned = _thinned(posterior, len(x))
    prediction = thinned.predict(x)
    dataset = _dataset(f=(prediction.f, "pred_point", "output"))
    dataset["log_prob"] = (("pred_point",), to_numpy(prediction.log_prob(y)))
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


def _replicates(
    posterior: Posterior,
    prediction: Prediction,
    y: Tensor,
    point: str,
    fewest: int,
    seed: int,
) -> dict[str, Any]:
    """New outcomes as they would have been seen where ``y`` was: one of each draw, and several where draws are few."""
    total = posterior.num_chains * posterior.num_draws
    cut = prediction.likelihood.targets.as_observed
    replicates = {"y": _targets(cut(prediction.sample(seed=seed), y), *group.SAMPLE_DIMS, point)}
    if total < fewest:
        drawn = cut(prediction.sample(seed=seed, per_draw=math.ceil(fewest / total)), y)
        replicates["y_sample"] = _targets(drawn.flatten(0, 1), "sample", point)
    return replicates


def _observed(model: BNN, y: Tensor, point: str) -> xr.Dataset:
    """What was observed of the columns that are predicted; numbers are floating, whatever their type was."""
    targets = model.likelihood.targets
    values = targets.values(y)
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


def probes(x: Tensor) -> tuple[Tensor, list[str]]:
    """Inputs where functions are compared: ten train points, five gaps between neighbours, and four points outside.

    Args:
        x: training inputs (N, …).

    Returns:
        Probe inputs (probe, …) and the kind of each, ``"train"``, ``"between"`` or ``"outside"``. Images and other
        structured inputs have train probes only.
    """
    order = _along_spread(x)
    train = x[order[torch.linspace(0, len(x) - 1, min(10, len(x))).round().long().unique()]]
    if x.dim() != 2 or not x.is_floating_point() or len(x) < 3:
        return train, ["train"] * len(train)
    ordered = x[order]
    gaps = (ordered[1:] - ordered[:-1]).norm(dim=1)
    # in one dimension the widest gaps; in many, midpoints of neighbours along the spread, which are as far apart as any
    widest = gaps.topk(min(5, len(gaps))).indices.sort().values
    between = (ordered[widest] + ordered[widest + 1]) / 2
    center = x.mean(0)
    far = torch.stack([ordered[0], ordered[-1]])
    reach = torch.tensor([1.25, 1.5], dtype=x.dtype)
    outside = (center + reach[:, None, None] * (far - center)).reshape(-1, x.shape[1])
    kinds = ["train"] * len(train) + ["between"] * len(between) + ["outside"] * len(outside)
    return torch.cat([train, between, outside]), kinds


def _along_spread(x: Tensor) -> Tensor:
    """Order of the points along their first principal axis."""
    flat = x.reshape(len(x), -1).double()
    if flat.shape[1] == 1:
        return flat[:, 0].argsort()
    centered = flat - flat.mean(0)
    scale = centered.std(0, correction=0)
    centered = centered / torch.where(scale > 0, scale, torch.ones_like(scale))
    direction = torch.randn(
        flat.shape[1],
        dtype=flat.dtype,
        generator=generator(0),
    )
    for _ in range(20):  # power iteration: no need for the whole decomposition
        direction = centered.T @ (centered @ direction)
        direction = direction / direction.norm().clamp_min(1e-300)
    return (centered @ direction).argsort()


def layer_norms(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norm of all weights of each layer, (chain, draw), which no exchange of hidden units changes."""
    squares: dict[str, Tensor] = {}
    for name, value in draws.items():
        if name.startswith(NET) and value.is_floating_point():
            layer = name.removeprefix(NET).rpartition(".")[0] or "net"
            squares[layer] = squares.get(layer, 0) + value.flatten(2).square().sum(-1)
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


def _attribute(value: Any) -> str | float | int:
    """A value of ``meta`` as an attribute of a netCDF file: a text or a number, JSON of anything else."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (str, int, float)) and value == value:
        return value
    return json.dumps(value)


def describe_model(model: BNN | Callable[..., Any]) -> dict[str, str]:
    """Net, prior and likelihood of a BNN, each in a few words; of a plain program its name.

    Example:
        >>> import pyrobnn as pb
        >>> noise = pb.likelihoods.HomoskedasticGaussian(0.1)
        >>> describe_model(pb.BNN(pb.networks.mlp(3, (20,), seed=0), pb.priors.FanInNormal(), noise))["net"]
        '3-20-1, Tanh, 101 weights'
    """
    if not isinstance(model, BNN):
        return {"program": getattr(model, "__name__", type(model).__name__)}
    likelihood = [repr(model.likelihood)]
    for name, prior in model.likelihood.own.priors.items():
        likelihood.append(f"{name.rpartition('.')[-1]} ~ {_written(prior)}")
    numbers = not model.likelihood.targets.classes
    units = " (in standard units)" if model.standardizer is not None and numbers else ""
    return {
        "net": f"{_layers_in_words(model.net)}, {model.num_weights:,} weights",
        "prior": _written(model.prior),
        "likelihood": "; ".join(likelihood) + units,
    }


def _layers_in_words(net: nn.Module) -> str:
    """The widths of a net of linear layers and the names of its other modules; else its name and theirs."""
    layers = [module for module in net.modules() if not list(module.children())]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    with_weights = [layer for layer in layers if list(layer.parameters(recurse=False))]
    names = [*dict.fromkeys(type(layer).__name__ for layer in layers)]
    if "Linear" in names:
        names.remove("Linear")
    if linear and linear == with_weights:
        widths = [linear[0].in_features, *(layer.out_features for layer in linear)]
        return ", ".join(["-".join(map(str, widths)), *names])
    if linear:
        names.insert(0, "Linear")
    return f"{type(net).__name__} of {', '.join(names)}"


def _written(prior: Any) -> str:
    """A prior or distribution as one would write it: its name and its numbers."""
    while type(prior).__name__ in ("Independent", "ExpandedDistribution"):
        prior = prior.base_dist
    if isinstance(prior, torch.distributions.Distribution):
        arguments = {name: getattr(prior, name, None) for name in prior.arg_constraints}
    else:
        arguments = dict(vars(prior))
    shown = {}
    for name, value in arguments.items():
        words = _argument(value)
        if words is not None:
            shown[name.lstrip("_")] = words
    written = ", ".join(f"{name}={words}" for name, words in shown.items())
    return f"{type(prior).__name__}({written})"


def _argument(value: Any) -> str | None:
    """A text, a number or a distribution as one would write it; None of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, torch.distributions.Distribution):
        return _written(value)
    if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1):
        return format(float(value), ".4g")
    return None


# -- plain programs: every observed site under its own name ----------------------------------------------------------


def program_groups(
    posterior: Posterior,
    x: Any,
    y: Any,
    num_prior_draws: int,
    seed: int,
) -> dict[str, xr.Dataset]:
    """What the program says of its data, before and after them; arguments as of ``to_datatree``."""
    density = cast(Density, posterior_density(posterior, x, y))
    axes = density.derived.axes
    sizes = density.derived.replicated
    thinned = _thinned(posterior, max(sum(sizes.values()), 1))
    log_prior, terms = _log_densities_by_site(thinned, density)
    prior_draws: dict[str, Tensor] = {}
    prior_data: dict[str, Tensor] = {}
    if num_prior_draws:
        prior_draws, prior_data = derived.prior(density, num_prior_draws, seed)
    values = _values_at(density, thinned.draws, (0, 0))
    values_at_last = _values_at(density, thinned.draws, (-1, -1))
    data = {n: values[n] for n in sizes if _is_data(values[n], values_at_last[n])}
    replicates = derived.replicates(density, thinned.draws, seed)
    groups = {
        group.LOG_PRIOR: _dataset(log_prior=(log_prior,)),
        group.LOG_LIKELIHOOD: _draws(terms, _axes_of_terms(terms, values, axes)),
        group.OBSERVED_DATA: _draws(data, axes, sample_dims=[]),
        group.POSTERIOR_PREDICTIVE: _draws({name: replicates[name] for name in data}, axes),
        group.PRIOR: _draws(prior_draws, axes),
        group.PRIOR_PREDICTIVE: _draws(
            {name: value for name, value in prior_data.items() if name in data}, axes
        ),
    }
    if isinstance(x, Tensor) and x.dim():
        groups[group.CONSTANT_DATA] = _program_inputs(x, data, axes)
    moved = moved_functions(posterior, x, y, None)
    if moved is not None:
        groups[group.MOVED] = moved
    return {name: dataset for name, dataset in groups.items() if dataset.data_vars}


def _values_at(
    density: Density, draws: Mapping[str, Tensor], index: tuple[int, int]
) -> dict[str, Tensor]:
    """The values of all sites in a run of the program at the draw ``index`` (chain, draw)."""
    nodes = density.trace({name: value[index] for name, value in draws.items()})
    return {name: node["value"] for name, node in nodes.items() if "value" in node}


def _is_data(value: Tensor, at_last_draw: Tensor) -> bool:
    """Whether an observed site has the same value at two draws, for half of its scalars or more.

    Residuals that a program computes from latent values are not data; gaps that those fill may stay.
    """
    same = (value == at_last_draw) | (value.isnan() & at_last_draw.isnan())
    return 2 * int(same.sum()) >= value.numel()


def _axes_of_terms(terms: Mapping[str, Tensor], values: Mapping[str, Tensor], axes: Dims) -> Dims:
    """The names of the axes of each datum's terms (chain, draw, …), where those are the first axes of its site."""
    names = {}
    for site, term in terms.items():
        shape = values[site].shape[: term.dim() - 2]
        if site in axes and term.shape[2:] == shape:
            names[site] = axes[site][: len(shape)]
    return names


def _program_inputs(x: Tensor, data: Mapping[str, Tensor], axes: Dims) -> xr.Dataset:
    """Inputs whose rows have the name of the observed sites' one first axis, if it is as long; else ``"obs"``."""
    names = set()
    for site, value in data.items():
        if value.dim():
            names.add((axes[site][0] if site in axes else None, len(value)))
    name, length = names.pop() if len(names) == 1 else (None, None)
    dims = (name if name and length == len(x) else "obs", "feature")
    return xr.Dataset({"x": (dims, to_numpy(x.reshape(len(x), -1)))})


def _log_densities_by_site(
    posterior: Posterior, density: Density
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log prior (chain, draw) with the factors of no datum, and each datum's terms, site → (chain, draw, \\*axes)."""
    z = density.unconstrain(posterior.draws)

    def densities(point: Tensor) -> dict[str, Tensor]:
        # no site has the name ""
        return {"": density.log_base(point), **density.data_terms(point)}

    terms = at_each(
        densities,
        z.reshape(-1, density.dim),
        at_once=64,
    )
    base = terms.pop("").reshape(z.shape[:-1])
    by_site = {}
    for name, value in terms.items():
        by_site[name] = value.reshape(*z.shape[:-1], *(value.shape[1:] or (1,)))
    return base, by_site


def _draws(
    values: Mapping[str, Tensor], dims: Dims, sample_dims: Sequence[str] = group.SAMPLE_DIMS
) -> xr.Dataset:
    """A dataset of (\\*sample_dims, \\*shape), its other dimensions named by ``dims``, else ``<site>_dim_0``."""
    known: dict[Hashable, Sequence[Hashable]]
    known = {group.variable(n): [*sample_dims, *dims[n]] for n in values if n in dims}
    arrays = {group.variable(name): to_numpy(value) for name, value in values.items()}
    # an interrupted run may have more chains than draws
    dataset = dict_to_dataset(
        arrays,
        dims=known,
        sample_dims=[*sample_dims],
        check_conventions=False,
    )
    for site in values:
        dataset[group.variable(site)].attrs["site"] = site
    return dataset


def to_numpy(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()
