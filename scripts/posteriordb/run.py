"""Methods at their defaults on reference posteriors: which are right, which wrong, and whether a fit said so.

    python scripts/posteriordb/run.py FOLDER --results rows.jsonl
    python scripts/posteriordb/run.py --sbibm WHEEL

FOLDER holds one JSON file per posterior (data, and mean, sd and their Monte-Carlo errors of every scalar), made from
posteriordb (Magnusson, Bürkner & Vehtari, 2023); WHEEL is sbibm (Lueckmann et al., 2021), unpacked. claim.md says when
a run is right.
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import json
import math
import time
import warnings
from math import hypot, sqrt
from pathlib import Path

import numpy as np
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
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return program


flat_linear = linear(flat, lambda: flat(support=constraints.positive))
cauchy_linear = linear(flat, lambda: dist.HalfCauchy(2.5))
blr = linear(lambda size: dist.Normal(0.0, 10.0).expand([size]).to_event(1), lambda: dist.HalfNormal(10.0))


def autoregression(x, y):
    """AR(K) with ``x`` the lagged values (time, K)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(alpha + x @ beta, sigma), obs=y)


def trend(x, y):
    """A line with given normal priors; ``x`` is (inputs, prior means and sds of intercept and slope)."""
    inputs, (a, sa, b, sb) = x
    alpha = pyro.sample("alpha", dist.Normal(a, sa))
    beta = pyro.sample("beta", dist.Normal(b, sb))
    sigma = pyro.sample("sigma", flat(support=constraints.positive))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(alpha + beta * inputs, sigma), obs=y)


def schools_centred(x, y):
    """Eight schools; ``x`` holds the standard errors."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, x), obs=y)


def schools(x, y):
    """Eight schools, non-centred."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = mu + tau * pyro.sample("theta_trans", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(theta, x), obs=y)


def garch(x, y):
    """GARCH(1, 1); ``x`` is the first sd."""
    mu = pyro.sample("mu", flat())
    alpha0 = pyro.sample("alpha0", flat(support=constraints.positive))
    alpha1 = pyro.sample("alpha1", dist.Uniform(0.0, 1.0))
    beta1 = pyro.sample("beta1", flat(support=constraints.interval(0.0, 1.0 - alpha1)))
    var = [x**2]
    for t in range(1, len(y)):
        var.append(alpha0 + alpha1 * (y[t - 1] - mu) ** 2 + beta1 * var[-1])
    pyro.sample("y", dist.Normal(mu, torch.stack(var).sqrt()).to_event(1), obs=y)


def gaussian_process(x, y):
    """Squared-exponential kernel; sigma is the noise variance."""
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    cov = alpha**2 * torch.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + sigma * torch.eye(len(y), dtype=x.dtype)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(y), cov), obs=y)


def mixture(x, y):
    """Two normals; ``theta`` is the weight of the lower one."""
    mu = pyro.sample("mu", flat(2, constraints.ordered_vector))
    pyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    parts = dist.Normal(mu, sigma).log_prob(y[:, None])
    both = torch.logaddexp(theta.log() + parts[:, 0], torch.log1p(-theta) + parts[:, 1])
    pyro.factor("likelihood", both.sum())


def problem(name, data):
    """The program, its arguments in float64, and a function from draws to the reference's scalars."""
    d = {key: torch.tensor(value, dtype=torch.float64) for key, value in data.items() if not isinstance(value, str)}

    def columns(*parts):
        return torch.stack([torch.ones_like(parts[0]), *parts], 1)

    def log(*names):
        return [d[key].log() for key in names]

    if name.startswith("sblr"):
        return blr, d["X"], d["y"]
    if name == "arK-arK":
        order, y = int(data["K"]), d["y"]
        return autoregression, torch.stack([y[order - k : -k] for k in range(1, order + 1)], 1), y[order:]
    if name == "earnings-logearn_height":
        return flat_linear, columns(d["height"]), d["earn"].log()
    if name.startswith("kidiq"):
        hs, iq = d["mom_hs"], d["mom_iq"]
        parts = {"momhs": [hs], "momiq": [iq], "interaction": [hs, iq, hs * iq]}[name.rpartition("_")[2]]
        return cauchy_linear, columns(*parts), d["kid_score"]
    if name == "nes1976-nes":
        ages = [(d["age_discrete"] == age).double() for age in (2, 3, 4)]
        x = columns(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
        return flat_linear, x, d["partyid7"]
    if name.startswith("mesquite"):
        one, two, canopy, total, dense = log("diam1", "diam2", "canopy_height", "total_height", "density")
        first = [one, two, canopy]
        if name.endswith("logvas"):
            first = [one + two + canopy, one + two, one - two]
        return flat_linear, columns(*first, total, dense, d["group"]), d["weight"].log()
    if name.startswith("kilpisjarvi"):
        priors = tuple(float(data[key]) for key in ("pmualpha", "psalpha", "pmubeta", "psbeta"))
        return trend, (d["x"], priors), d["y"]
    if name.startswith("eight_schools"):
        return (schools if name.endswith("noncentered") else schools_centred), d["sigma"], d["y"]
    if name == "garch-garch11":
        return garch, d["sigma1"], d["y"]
    if name == "gp_pois_regr-gp_regr":
        return gaussian_process, d["x"], d["y"]
    if name == "low_dim_gauss_mix-low_dim_gauss_mix":
        return mixture, None, d["y"]
    raise ValueError(f"no program for {name!r}")


def scalars(draws):
    """Reference names to draws (chain, draw): vectors are numbered from 1."""
    draws = dict(draws)
    if "theta_trans" in draws:
        draws["theta"] = draws["mu"][..., None] + draws["tau"][..., None] * draws.pop("theta_trans")
    out = {}
    for name, value in draws.items():
        value = value.double().numpy()
        if value.ndim == 2:
            out[name] = value
        else:
            out |= {f"{name}[{i + 1}]": value[..., i] for i in range(value.shape[-1])}
    return out


def judged(draws, reference):
    """The worst R-hat, the least bulk ESS, and the largest distance in Monte-Carlo errors with its scalar."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    rhat, bulk, worst = 0.0, float("inf"), (0.0, "")
    for name, ref in reference.items():
        x = draws[name]
        if not x.std() > 0:
            return float("inf"), 0.0, (float("inf"), name)
        rhat = max(rhat, float(array_stats.rhat(x, **axes)))
        bulk = min(bulk, float(array_stats.ess(x, method="bulk", **axes)))
        ess = array_stats.ess(x, method="mean", **axes)
        square = array_stats.ess((x - x.mean()) ** 2, method="mean", **axes)
        mcse = max(array_stats.mcse(x, method="mean", **axes), ref["sd"] / sqrt(ess))
        mcse_sd = max(array_stats.mcse(x, method="sd", **axes), ref["mcse_sd"] * sqrt(ref["ess"] / square))
        z = abs(x.mean() - ref["mean"]) / hypot(mcse, ref["mcse_mean"])
        z_sd = abs(x.std(ddof=1) - ref["sd"]) / hypot(mcse_sd, ref["mcse_sd"])
        worst = max(worst, (float(z), name), (float(z_sd), f"sd of {name}"))
    return rhat, bulk, worst


def cast(value, dtype):
    """Tensors in ``dtype``, in a tuple too; the rest as it is."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def row(name, posterior, *, dtype, seed, num_draws):
    """One fit at the defaults, judged against the reference."""
    program, x, y = problem(name, posterior["data"])
    record = {"name": name, "dtype": str(dtype).removeprefix("torch."), "seed": seed}
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = pb.NUTS().fit(program, cast(x, dtype), cast(y, dtype), num_draws=num_draws, seed=seed)
        except Exception as error:  # a refusal is an answer too, and is counted as one
            said = f"{type(error).__name__}: {error}"
            return record | {"outcome": "refused", "warnings": [said[:300]]}
        status = pb.diagnose(fitted.to_datatree()).status
    seconds = time.perf_counter() - started
    rhat, bulk, (z, where) = judged(scalars(fitted.draws), posterior["parameters"])
    right = rhat <= 1.05 and bulk >= 100 and z <= 4
    said = fitted.meta["warnings"]
    stats = fitted.sample_stats
    return record | {
        "outcome": "right" if right else "warned" if said else "WRONG",
        **{"errors": z, "where": where, "rhat": rhat, "ess": bulk, "status": status},
        "acceptance": float(stats["acceptance_rate"].mean()),
        "step_size": float(stats["step_size"][0, -1]),
        "tree_depth": float(stats["tree_depth"].double().mean()),
        **{"divergences": int(stats["diverging"].sum()), "gradients": fitted.meta["num_gradients"]},
        "seconds": round(seconds, 1),
        "warnings": said,
    }


def table(records):
    """How many runs of each posterior are right, and the worst of them by each number."""
    lines = [
        "| posterior | runs | right | warned of | wrong, and silent | largest error, in Monte-Carlo errors | of what "
        "| largest R-hat | least ESS | divergences | 1000 gradients, all chains |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    runs = {(r["name"], r["dtype"], r["seed"]): r for r in records}  # the last of each
    for name in sorted({name for name, _, _ in runs}):
        rows = [run for run in runs.values() if run["name"] == name]
        outcomes = [each["outcome"] for each in rows]
        cells = [len(rows), *(outcomes.count(each) for each in ("right", "warned", "WRONG"))]
        if ran := [each for each in rows if each["outcome"] != "refused"]:
            worst = max(ran, key=lambda each: each["errors"])
            gradients = sorted(each["gradients"] / 1e3 for each in ran)
            cells += [f"{worst['errors']:.1f}", worst["where"], f"{max(each['rhat'] for each in ran):.3f}"]
            cells += [f"{min(each['ess'] for each in ran):.0f}", sum(each["divergences"] for each in ran)]
            cells.append(f"{gradients[0]:.0f} to {gradients[-1]:.0f}")
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    outcomes = [run["outcome"] for run in runs.values()]
    told = sum(run["outcome"] == "right" and bool(run["warnings"]) for run in runs.values())
    right, warned, refused, wrong = map(outcomes.count, ("right", "warned", "refused", "WRONG"))
    text = f"Of {len(outcomes)} runs {right} are right ({told} of them warned all the same), {warned} are not and were "
    return "\n".join([*lines, "", f"{text}warned of, {refused} were refused, and {wrong} are wrong without a warning."])


# sbibm: likelihoods after Lueckmann et al. (2021), appendix T


def box(size, bound):
    """A uniform prior."""
    return pyro.sample("theta", dist.Uniform(-bound, bound).expand([size]).to_event(1))


def gaussian_mixture(x, y):
    """One mean, and a noise of sd 1 or 0.1."""
    theta = box(2, 10.0)
    pyro.factor("likelihood", torch.logaddexp(*(dist.Normal(theta, sd).log_prob(y).sum() for sd in (1.0, 0.1))))


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
    first, second = ((y.reshape(4, 2) - theta[:2]) / theta[2:4] ** 2).unbind(-1)
    rho = theta[4].tanh()
    square = (first**2 - 2 * rho * first * second + second**2) / (1 - rho**2)
    pyro.factor("likelihood", -square.sum() / 2 - 8 * theta[2:4].abs().log().sum() - 2 * torch.log1p(-(rho**2)))


def bernoulli_glm(x, y):
    """A logistic regression with a smooth filter as prior; ``x`` is the design."""
    size = x.shape[1] - 1
    step = torch.eye(size) - torch.ones(size - 1).diag(-1)
    factor = step @ step + (torch.arange(size) / size).sqrt().diag()
    precision = torch.block_diag(torch.tensor([[0.5]]), factor.T @ factor)
    theta = pyro.sample("theta", dist.MultivariateNormal(torch.zeros(size + 1), precision_matrix=precision))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)


SBIBM = {each.__name__: each for each in (gaussian_mixture, two_moons, slcp, bernoulli_glm)}
METHODS = {"NUTS": pb.NUTS(), "SMC": pb.SMC(), "SVI": pb.SVI(guide="full_rank")}
METHODS |= {"Laplace": pb.Laplace(curvature="hessian")}


def sbibm_row(folder, task, number, method):
    """One fit at the defaults, judged against the 10,000 draws of an observation."""
    files = folder / "sbibm" / "tasks" / task / "files"
    here, glm = files / f"num_observation_{number}", task == "bernoulli_glm"
    x = torch.load(files / "design_matrix.pt").double() if glm else None
    y = np.loadtxt(here / f"observation{'_raw' * glm}.csv", delimiter=",", skiprows=1)
    with bz2.open(here / "reference_posterior_samples.csv.bz2", "rt", encoding="utf-8") as file:
        truth = np.loadtxt(file, delimiter=",", skiprows=1)
    y, record, started = torch.tensor(y), {"task": task, "observation": number, "method": method}, time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = METHODS[method].fit(SBIBM[task], x, y, num_draws=1000, seed=number)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            return record | {"outcome": "told", "warnings": [f"refused: {error}"[:300]]}
        seconds = time.process_time() - started
        verdict = pb.diagnose(fitted.to_datatree(x, y)).draws
    theta, n, reference, off = fitted.draws["theta"].double().numpy(), len(truth), {}, []
    for i, column in enumerate(truth.T):
        draws, sd, fourth = theta[..., i].ravel(), column.std(), ((column - column.mean()) ** 4).mean()
        errors = {"mcse_mean": sd / sqrt(n), "mcse_sd": sd * sqrt((fourth / sd**4 - 1) / (4 * n))}
        reference[f"theta[{i + 1}]"] = {"mean": column.mean(), "sd": sd, "ess": n, **errors}
        distance = ks_2samp(draws, column).statistic
        off.append([abs(draws.mean() - column.mean()) / sd, abs(np.log(draws.std() / sd)), distance])
    rhat, _, (errors, where) = judged({name: theta[..., i] for i, name in enumerate(reference)}, reference)
    shift, log_sd, distance = np.max(off, axis=0).round(3).tolist()
    right = rhat <= 1.05 and errors <= 4
    if method in ("SVI", "Laplace"):
        right = shift <= 0.25 and log_sd <= np.log(1.25) and distance <= 0.1
    told = verdict != "pass" or bool(fitted.meta["warnings"])
    return record | {
        "outcome": "right" if right else "told" if told else "WRONG",
        **{"verdict": verdict, "shift": shift, "log_sd": log_sd, "distance": distance, "errors": round(errors, 2)},
        **{"where": where, "rhat": round(rhat, 3), "cpu_seconds": round(seconds, 1)},
        "warnings": [str(text)[:200] for text in fitted.meta["warnings"]],
    }


def sbibm_table(records):
    """Runs that are right, warned of and silent, by task and method."""
    runs = {(each["task"], each["observation"], each["method"]): each["outcome"] for each in records}
    lines = [f"| task (right / warned / silent) | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    for task in SBIBM:
        own = [[o for (t, _, m), o in runs.items() if (t, m) == (task, method)] for method in METHODS]
        cells = [" / ".join(str(each.count(o)) for o in ("right", "told", "WRONG")) for each in own]
        lines += [f"| {task} | {' | '.join(cells)} |"] * any(own)
    wrong = list(runs.values()).count("WRONG")
    return "\n".join([*lines, "", f"Of {len(runs)} runs {wrong} are wrong without a warning."])


def sbibm(options):
    """A row per task, observation and method; of repeated runs the last counts."""
    torch.set_default_dtype(torch.float64)
    path = options.results or Path(__file__).with_name("sbibm.jsonl")
    for key in itertools.product(SBIBM, options.observations, METHODS):
        if any(part in "-".join(map(str, key)) for part in options.only):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sbibm_row(options.sbibm, *key)) + "\n")


def main():
    """Print a row per posterior, and how many are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--sbibm", type=Path, help="the unpacked wheel; rows go to sbibm.jsonl")
    parser.add_argument("--observations", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--results", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    torch.set_default_dtype(getattr(torch, options.dtype))
    if options.sbibm:
        return sbibm(options)
    outcomes = []
    for path in sorted(options.folder.glob("*.json")):
        if not any(part in path.stem for part in options.only):
            continue
        posterior = json.loads(path.read_text(encoding="utf-8"))
        for seed in options.seeds:
            dtype = torch.get_default_dtype()
            result = row(path.stem, posterior, dtype=dtype, seed=seed, num_draws=options.draws)
            outcomes.append(result["outcome"])
            print(json.dumps(result), flush=True)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})


if __name__ == "__main__":
    main()
