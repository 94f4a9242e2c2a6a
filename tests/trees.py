"""Synthetic DataTrees in the project's layout, made without any inference: for tests of reports."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from scipy.special import logsumexp

from pyrobnn.core.groups import (
    CONSTANT_DATA,
    FUNCTION,
    GRID,
    HELD_OUT,
    HISTORY,
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    OBSERVED_DATA,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    SAMPLE_STATS,
)


def _dataset(**arrays: tuple[tuple[str, ...], np.ndarray]) -> xr.Dataset:
    return xr.Dataset({name: (dims, np.asarray(values)) for name, (dims, values) in arrays.items()})


def _attrs(method: str, *, iid: bool, likelihood: str, num_data: int) -> dict[str, object]:
    return {
        "method": method,
        "label": method.lower(),
        "settings": json.dumps({"num_draws": 200, "seed": 0}),
        "seed": 0,
        "num_data": num_data,
        "timings": json.dumps({"compile": 3.2, "fit": 1.5, "predict": 0.04}),
        "versions": json.dumps({"torch": "2.13.0", "pyro": "1.9.2"}),
        "iid": int(iid),
        "kind": "independent" if iid else "chains",
        "claim": {"NUTS": "exact", "SVI": "approximate", "Laplace": "approximate"}.get(
            method, "none"
        ),
        "temperature": 1.0,
        "warnings": json.dumps([]),
        "likelihood": likelihood,
    }


def _truth(x: np.ndarray) -> np.ndarray:
    return np.cos(2.2 * x) * 1.2 + 0.2 * x


def _mixture_log_prob(y: np.ndarray, f: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Mixture log density of y (obs,) under draws f (sample, obs) with noise scale (sample, 1)."""
    z = (y - f) / scale
    return logsumexp(-0.5 * z**2 - np.log(scale) - 0.5 * np.log(2 * np.pi), axis=0) - np.log(len(f))


def _chain_noise(rng: np.random.Generator, iid: bool, shape: tuple[int, int, int]) -> np.ndarray:
    """Random features' coefficients: independent for an approximation, mildly autocorrelated for MCMC."""
    noise = rng.standard_normal(shape)
    if not iid:
        for draw in range(1, shape[1]):
            noise[:, draw] = 0.3 * noise[:, draw - 1] + np.sqrt(1 - 0.09) * noise[:, draw]
    return noise


def _posterior_groups(rng, shape, *, iid, num_layers=2):
    chains, draws = shape
    lp = -80 - rng.gamma(6.0, 1.0, shape)
    if iid:
        stats = {"log_p": lp, "log_q": lp + 0.6 * rng.standard_normal(shape)}
    else:
        stats = {
            "lp": lp,
            "energy": -lp + rng.gamma(8.0, 1.0, shape),
            "diverging": np.zeros(shape, dtype=bool),
            "tree_depth": rng.integers(3, 6, shape),
            "n_steps": rng.integers(7, 63, shape),
            "acceptance_rate": rng.beta(8, 2, shape),
            "step_size": np.full(shape, 0.02),
        }
    posterior = _dataset(
        **{
            "net.0.weight": (
                ("chain", "draw", "net.0.weight_dim_0", "net.0.weight_dim_1"),
                rng.standard_normal((chains, draws, 5, 1)),
            ),
            "likelihood.scale": (("chain", "draw"), 0.25 + 0.02 * rng.standard_normal(shape)),
        }
    )
    norms = np.abs(rng.normal([2.5, 1.2][:num_layers], 0.2, (*shape, num_layers)))
    return posterior, _dataset(**{k: (("chain", "draw"), v) for k, v in stats.items()}), norms


def regression_1d(
    method: str = "NUTS", *, iid: bool = False, gap_sd: float = 0.6, seed: int = 0
) -> xr.DataTree:
    """A full 1-D regression tree with two clusters of data and a gap whose epistemic sd is about `gap_sd`."""
    rng = np.random.default_rng(seed)
    data_rng = np.random.default_rng(7)
    chains, draws = (1, 400) if iid else (4, 100)
    x = np.sort(np.concatenate([data_rng.uniform(-3, -1, 40), data_rng.uniform(0.8, 3, 40)]))
    y = _truth(x) + 0.25 * data_rng.standard_normal(80)
    x_test = data_rng.uniform(-3, 3, 60)
    y_test = _truth(x_test) + 0.25 * data_rng.standard_normal(60)
    grid = np.linspace(-4.5, 4.5, 160)
    coefficients = _chain_noise(rng, iid, (chains, draws, 9))
    centres = np.linspace(-4, 4, 9)
    density = np.array([np.exp(-0.5 * ((x - c) / 0.5) ** 2).sum() for c in centres])
    amplitude = gap_sd / np.sqrt(1 + 6 * density)

    def functions(points: np.ndarray) -> np.ndarray:
        features = np.exp(-0.5 * ((points[:, None] - centres) / 0.7) ** 2) * amplitude
        return _truth(points) + coefficients @ features.T

    posterior, stats, norms = _posterior_groups(rng, (chains, draws), iid=iid)
    scale = posterior["likelihood.scale"].values[..., None]
    f_train = functions(x)
    f_test = functions(x_test)
    f_grid = functions(grid)
    log_lik = -0.5 * ((y - f_train) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)
    flat = f_test.reshape(-1, 60)
    probe = np.linspace(-3.5, 3.5, 6)
    step = np.arange(1500.0)
    loss = 95 + 900 * np.exp(-step / 60) + 4 * rng.standard_normal(1500)
    groups = {
        POSTERIOR: posterior,
        SAMPLE_STATS: stats,
        FUNCTION: _dataset(
            f=(("chain", "draw", "probe", "output"), functions(probe)[..., None]),
            log_likelihood=(("chain", "draw"), log_lik.sum(-1)),
            log_prior=(("chain", "draw"), -30 + rng.standard_normal((chains, draws))),
            layer_norm=(("chain", "draw", "layer"), norms),
            noise=(("chain", "draw", "output"), scale),
            probe_x=(("probe", "feature"), probe[:, None]),
            probe_kind=(
                ("probe",),
                np.array(["outside", "train", "train", "between", "train", "outside"]),
            ),
        ).assign_coords(layer=["net.0", "net.2"]),
        LOG_LIKELIHOOD: _dataset(y=(("chain", "draw", "obs"), log_lik)),
        LOG_PRIOR: _dataset(
            log_prior=(("chain", "draw"), -30 + rng.standard_normal((chains, draws)))
        ),
        POSTERIOR_PREDICTIVE: _dataset(
            y=(("chain", "draw", "obs"), f_train + scale * rng.standard_normal(f_train.shape))
        ),
        OBSERVED_DATA: _dataset(y=(("obs",), y)),
        CONSTANT_DATA: _dataset(x=(("obs", "feature"), x[:, None])),
        PREDICTIONS: _dataset(
            f=(("chain", "draw", "pred_point", "output"), f_test[..., None]),
            y=(("chain", "draw", "pred_point"), f_test + scale * rng.standard_normal(f_test.shape)),
            mean=(("pred_point", "output"), flat.mean(0)[:, None]),
            aleatoric_var=(("pred_point", "output"), np.full((60, 1), (scale**2).mean())),
            epistemic_var=(("pred_point", "output"), flat.var(0)[:, None]),
            log_prob=(("pred_point",), _mixture_log_prob(y_test, flat, scale.reshape(-1, 1))),
        ),
        HELD_OUT: _dataset(
            x=(("pred_point", "feature"), x_test[:, None]), y=(("pred_point",), y_test)
        ),
        GRID: _dataset(
            x=(("grid_point", "feature"), grid[:, None]),
            mean=(("grid_point", "output"), f_grid.reshape(-1, 160).mean(0)[:, None]),
            aleatoric_var=(("grid_point", "output"), np.full((160, 1), (scale**2).mean())),
            epistemic_var=(("grid_point", "output"), f_grid.reshape(-1, 160).var(0)[:, None]),
            f_draws=(("grid_draw", "grid_point", "output"), f_grid.reshape(-1, 160)[::14, :, None]),
            true_f=(("grid_point", "output"), _truth(grid)[:, None]),
        ),
    }
    if iid:
        groups[HISTORY] = _dataset(loss=(("step_loss",), loss))
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = _attrs(method, iid=iid, likelihood="gaussian", num_data=80)
    if iid:
        tree.attrs |= {"log_evidence": -95.0, "log_evidence_kind": "elbo"}
    return tree


def regression_nd(
    method: str = "NUTS", *, iid: bool = False, noise: float = 0.5, seed: int = 0
) -> xr.DataTree:
    """Regression on five features, without a grid; the reported noise is right at `noise` 0.5."""
    tree = regression_1d(method, iid=iid, seed=seed)
    rng = np.random.default_rng(seed + 1)
    data_rng = np.random.default_rng(11)
    chains = tree[POSTERIOR].sizes["chain"]
    draws = tree[POSTERIOR].sizes["draw"]
    x = data_rng.standard_normal((90, 5))
    spread = np.exp(0.5 * np.abs(x[:, 0])) * 0.2
    mean = 140 + 30 * x @ np.array([1.0, -0.5, 0.2, 0.0, 0.4])
    f = mean + 30 * spread * rng.standard_normal((chains, draws, 90))
    y = mean + 30 * (spread * data_rng.standard_normal(90) + noise * data_rng.standard_normal(90))
    flat = f.reshape(-1, 90)
    groups = {name: node.to_dataset() for name, node in tree.children.items() if name != GRID}
    groups[PREDICTIONS] = _dataset(
        f=(("chain", "draw", "pred_point", "output"), f[..., None]),
        y=(("chain", "draw", "pred_point"), f + 15.0 * rng.standard_normal(f.shape)),
        mean=(("pred_point", "output"), flat.mean(0)[:, None]),
        aleatoric_var=(("pred_point", "output"), np.full((90, 1), 225.0)),
        epistemic_var=(("pred_point", "output"), flat.var(0)[:, None]),
        log_prob=(("pred_point",), _mixture_log_prob(y, flat, np.full((len(flat), 1), 15.0))),
    )
    groups[HELD_OUT] = _dataset(x=(("pred_point", "feature"), x), y=(("pred_point",), y))
    out = xr.DataTree.from_dict(groups)
    out.attrs = dict(tree.attrs)
    return out


def classification(
    method: str = "NUTS", *, iid: bool = False, num_classes: int = 3, seed: int = 0
) -> xr.DataTree:
    """Classes with probabilities that are right on average; x has 64 features, as the digits have."""
    rng = np.random.default_rng(seed)
    data_rng = np.random.default_rng(5)
    chains, draws, points = (1, 200, 120) if iid else (4, 50, 120)
    logits = 2.0 * data_rng.standard_normal((points, num_classes))
    f = logits + 0.7 * rng.standard_normal((chains, draws, points, num_classes))
    per_draw = np.exp(f - logsumexp(f, axis=-1, keepdims=True))
    probs = per_draw.mean((0, 1))
    y = np.array([data_rng.choice(num_classes, p=p / p.sum()) for p in probs])
    aleatoric = -(per_draw * np.log(per_draw)).sum(-1).mean((0, 1))
    total = -(probs * np.log(probs)).sum(-1)
    posterior, stats, _ = _posterior_groups(rng, (chains, draws), iid=iid)
    tree = xr.DataTree.from_dict(
        {
            POSTERIOR: posterior.drop_vars("likelihood.scale"),
            SAMPLE_STATS: stats,
            PREDICTIONS: _dataset(
                f=(("chain", "draw", "pred_point", "output"), f),
                probs=(("pred_point", "class"), probs),
                aleatoric_entropy=(("pred_point",), aleatoric),
                epistemic_entropy=(("pred_point",), total - aleatoric),
                log_prob=(("pred_point",), np.log(probs[np.arange(points), y])),
            ),
            HELD_OUT: _dataset(
                x=(("pred_point", "feature"), data_rng.uniform(0, 16, (points, 64))),
                y=(("pred_point",), y),
            ),
        }
    )
    tree.attrs = _attrs(method, iid=iid, likelihood="categorical", num_data=300)
    return tree


def point_estimate(method: str = "MAP") -> xr.DataTree:
    """One draw: no epistemic uncertainty, no sample statistics, a loss curve."""
    tree = regression_1d(method, iid=True)
    groups = {
        name: (node.to_dataset().isel(draw=[0]) if "draw" in node.dims else node.to_dataset())
        for name, node in tree.children.items()
        if name not in (SAMPLE_STATS, LOG_PRIOR)
    }
    groups[PREDICTIONS] = groups[PREDICTIONS].assign(
        epistemic_var=groups[PREDICTIONS].epistemic_var * 0
    )
    grid = groups[GRID].isel(grid_draw=[0])
    groups[GRID] = grid.assign(epistemic_var=grid.epistemic_var * 0)
    out = xr.DataTree.from_dict(groups)
    out.attrs = dict(tree.attrs)
    return out


def numpyro_like(seed: int = 0) -> xr.DataTree:
    """What `arviz_base.from_numpyro` gives: no attributes, no predictions, no function values."""
    tree = regression_1d(seed=seed)
    keep = (POSTERIOR, SAMPLE_STATS, LOG_LIKELIHOOD, POSTERIOR_PREDICTIVE, OBSERVED_DATA)
    return xr.DataTree.from_dict({name: tree[name].to_dataset() for name in keep})


def posterior_only(seed: int = 0) -> xr.DataTree:
    """The least that the report accepts."""
    return xr.DataTree.from_dict({POSTERIOR: regression_1d(seed=seed)[POSTERIOR].to_dataset()})
