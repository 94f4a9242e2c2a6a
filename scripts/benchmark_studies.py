"""The five studies that the notebooks retell: what they reported, and ours on the same points by the same recipe.

    python scripts/benchmark_studies.py                       # all parts
    python scripts/benchmark_studies.py images --root FOLDER  # where MNIST lies, or is to be downloaded to

Numbers that depend on where a net starts are means over ``STARTS`` nets, with their standard deviation: the studies do
not tell theirs. The images are MNIST's where torchvision can have them, else scikit-learn's digits, as the record says.
Records are appended to ``scripts/results/studies.jsonl``; what is there is not run again, and reported numbers are read
from ``scripts/published_studies.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyro.distributions as dist
import torch

import pyrobnn as pb
from pyrobnn.likelihoods import Categorical, HeteroskedasticGaussian, HomoskedasticGaussian
from pyrobnn.studies.uci import append_record, read_records

HERE = Path(__file__).parent
RESULTS, PUBLISHED = HERE / "results" / "studies.jsonl", HERE / "published_studies.json"
STARTS = range(42, 47)
#: noise of the data → its points
POINTS = {"homoskedastic": "uncertainty", "heteroskedastic": "uncertainty_heteroskedastic"}
#: noise of the model → likelihood, outputs, learning rate
NOISES: dict[str, tuple[Callable[[], Any], int, float]] = {
    "fixed": (lambda: HomoskedasticGaussian(0.5), 1, 0.01),
    "learned": (lambda: HomoskedasticGaussian("learned"), 1, 0.01),
    "heteroskedastic": (lambda: HeteroskedasticGaussian(min_scale=0.01), 2, 0.001),
}
#: priors of the variational study: its own mixture, and one with scales that a net of this kind has weights of
PRIORS: dict[str, Callable[[], Any]] = {
    "normal, sd 1": lambda: pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
    "normal, fan-in": lambda: pb.priors.FanInNormal(3.0, 3.0),
    "mixture, sd 0.001 and 100": lambda: pb.priors.ScaleMixture(0.5, 100.0, 0.001),
    "mixture, sd 0.1 and 2": lambda: pb.priors.ScaleMixture(0.5, 2.0, 0.1),
    "mixture, sd 1 and 5": lambda: pb.priors.ScaleMixture(0.5, 5.0, 1.0),
}


def nll(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Final training NLL of maximum likelihood, and what the truth scores on the same points."""
    for name, points in POINTS.items():
        data = pb.data.study(points)
        for noise, (likelihood, outputs, lr) in NOISES.items():
            what = f"nll {name}, {noise}"
            if options.known(what):
                continue
            mle = pb.MLE(num_steps=1000, lr=lr, lr_schedule=None, compile=False)
            found = []
            for seed in STARTS:
                net = pb.networks.mlp(1, (10, 10), outputs, activation="relu", seed=seed)
                model = pb.BNN(net, pb.priors.FanInNormal(), likelihood())
                posterior = mle.fit(model, data.x, data.y, seed=seed)
                found.append(-float(posterior.predict(data.x).log_prob(data.y).mean()))
            sigma = {"fixed": torch.tensor(0.5), "learned": data.true_noise.square().mean().sqrt()}
            truth = dist.Normal(data.true_f, sigma.get(noise, data.true_noise)).log_prob(data.y).mean()
            yield record(what, found, truth=round(-float(truth), 3))


def joint(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Minus the log joint of the 1-10-10-1 net, untrained and at the mode; N(0, 1) on all or on the last weights."""
    data = pb.data.study("uncertainty")
    if options.known("joint at the mode, last layer"):
        return
    start: dict[str, list[float]] = {"all": [], "last layer": []}
    mode = []
    for seed in STARTS:
        net = pb.networks.mlp(1, (10, 10), 1, activation="relu", seed=seed)
        last = list(dict(net.named_parameters()))[-2]
        for which, expose in (("all", None), ("last layer", [last])):
            prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose=expose)
            model = pb.BNN(net, prior, HomoskedasticGaussian(0.5))
            start[which].append(minus_log_joint(model.net, data, expose))
        best = pb.MAP(num_steps=1000, lr=0.01, lr_schedule=None, polish_steps=0, compile=False)
        fitted = best.fit(model, data.x, data.y, seed=seed)
        weights = {name.removeprefix("net."): value[0, 0] for name, value in fitted.draws.items()}
        trained = copy.deepcopy(net)
        trained.load_state_dict(weights)
        mode.append(minus_log_joint(trained, data, [last]))
    for which, found in start.items():
        yield record(f"joint at the start, {which}", found)
    yield record("joint at the mode, last layer", mode)


def minus_log_joint(net: torch.nn.Module, data: pb.data.Dataset, sites: list[str] | None) -> float:
    """In nats, with the noise 0.5 of the study and N(0, 1) on the weights that are named, or on all."""
    with torch.no_grad():
        log_prior = sum(
            float(dist.Normal(0.0, 1.0).log_prob(weights).sum())
            for name, weights in net.named_parameters()
            if sites is None or name in sites
        )
        return -log_prior - float(dist.Normal(net(data.x), 0.5).log_prob(data.y).sum())


def scale(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The Laplace study's three curvatures at one mode: what each claims, in units of the Gaussian's own."""
    what = "doubt of the identity / of the Hessian"
    if options.known(what):
        return
    data = pb.data.study("laplace")
    found: dict[str, list[float]] = {what: [], "doubt of the mean of squares / of the Hessian": []}
    for seed in STARTS:
        net = pb.networks.mlp(1, (10,), 1, seed=seed)
        units = pb.data.Standardizer.fit(data)
        prior, sigma = pb.priors.FanInNormal(2.0, 2.0), 0.3 / float(units.y_scale)
        model = pb.BNN(net, prior, HomoskedasticGaussian(sigma), standardizer=units)
        mode = pb.MAP(compile=False).fit(model, data.x, data.y, seed=seed)
        sds = []
        # a likelihood's curvature is 1 / noise²; in the study 1, and 2 / N of the mean of squares
        for noise in (sigma, 1.0, math.sqrt(data.num_data / 2)):
            claimed = pb.BNN(net, prior, HomoskedasticGaussian(noise), standardizer=units)
            laplace = pb.Laplace(importance=False, compile=False)
            posterior = laplace.fit(claimed, data.x, data.y, init=mode, num_draws=10)
            sds.append(float(posterior.predict(data.x).epistemic_var.sqrt().mean()))
        for each, sd in zip(found.values(), sds[1:], strict=True):
            each.append(sd / sds[0])
    for name, ratios in found.items():
        yield record(name, ratios)


def priors(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The variational study's net under normal and scale-mixture priors: error of the mean function, and ELBO."""
    data = pb.data.study("variational")
    units = pb.data.Standardizer.fit(data)
    for name, prior in PRIORS.items():
        if options.known(f"error, {name}"):
            continue
        errors, elbos = [], []
        for seed in STARTS[:3]:
            net = pb.networks.mlp(1, (50,), 1, seed=seed)
            noise = HomoskedasticGaussian(2.0 / float(units.y_scale))
            model = pb.BNN(net, prior(), noise, standardizer=units)
            svi = pb.SVI(num_steps=4000, lr=0.01, local_reparameterization=True)
            posterior = svi.fit(model, data.x, data.y, seed=seed, num_draws=200)
            errors.append(pb.metrics.rmse(posterior.predict(data.x).mean, data.true_f))
            elbos.append(posterior.log_evidence)
        yield record(f"error, {name}", errors, elbo=None if None in elbos else round(fmean(elbos), 1))


def curve(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """SWA and SWAG from a poorly trained net: error of the mean function."""
    if options.known("error, SWAG"):
        return
    data = pb.data.study("swag")
    units = pb.data.Standardizer.fit(data)
    found: dict[str, list[float]] = {"the poor net": [], "SWA": [], "SWAG": []}
    for seed in STARTS:
        net = pb.networks.mlp(1, (10,), 1, activation="relu", seed=seed)
        prior = pb.priors.IIDPrior(dist.Normal(0.0, 3.0))
        model = pb.BNN(net, prior, HomoskedasticGaussian("learned"), standardizer=units)
        poor = copy.deepcopy(model.net)
        optimizer = torch.optim.SGD(poor.parameters(), lr=0.001)
        x, y = units.transform_x(data.x), units.transform_y(data.y)
        for _ in range(200):
            optimizer.zero_grad()
            (poor(x) - y).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            found["the poor net"].append(pb.metrics.rmse(units.inverse_mean(poor(x)), data.true_f))
        path = {"num_steps": 2000, "lr": 0.01, "collect_every": 15, "burn_in": 0.5, "compile": False}
        for name, method in (("SWA", pb.SWA(**path)), ("SWAG", pb.SWAG(**path))):
            fit = method.fit(model, data.x, data.y, init=poor, seed=seed)
            found[name].append(pb.metrics.rmse(fit.predict(data.x).mean, data.true_f))
    for name, errors in found.items():
        yield record(f"error, {name}", errors)


def images(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A P-64-10 net, trained, then SWA and SWAG with 500 draws: share of the test images that are right."""
    if options.known("images, SWAG"):
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        train, test = (pb.data.mnist(options.root, train=part) for part in (True, False))
    for warning in told[:1]:
        print(warning.message)
    found: dict[str, list[float]] = {"start": [], "SWA": [], "SWAG": []}
    pixels, epochs = train.x[0].numel(), 20 if train.num_data < 10_000 else 5
    steps = math.ceil(train.num_data / 64) * epochs
    for seed in STARTS[: options.nets]:
        net = pb.networks.mlp(pixels, (64,), 10, activation="relu", seed=seed)
        prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
        model = pb.BNN(torch.nn.Sequential(torch.nn.Flatten(), net), prior, Categorical())
        start = pb.MAP(num_steps=steps, batch_size=64, polish_steps=0, compile=False)
        begun = start.fit(model, train.x, train.y, seed=seed)
        path = {"num_steps": 2 * steps, "lr": 0.05, "batch_size": 64, "collect_every": steps // 20}
        path |= {"burn_in": 0.5, "compile": False}
        fits = {"start": begun}
        for name, method, draws in (("SWA", pb.SWA(**path), None), ("SWAG", pb.SWAG(**path), 500)):
            fits[name] = method.fit(model, train.x, train.y, init=begun, seed=seed, num_draws=draws)
        for name, fit in fits.items():
            found[name].append(float(pb.metrics.accuracy(fit.predict(test.x).probs, test.y)))
    shape = f"{pixels}-64-10 on {train.name}, {train.num_data:,} + {test.num_data:,} images"
    for name, accuracies in found.items():
        yield record(f"images, {name}", accuracies, data=shape)


def record(what: str, values: list[float], **more: Any) -> dict[str, Any]:
    """A row: mean, sd over starts, and how many there were."""
    spread = stdev(values) if len(values) > 1 else None
    return {"what": what, "mean": fmean(values), "sd": spread, "starts": len(values), **more}


PARTS = {"nll": nll, "joint": joint, "scale": scale, "priors": priors, "curve": curve, "images": images}
#: what the rows of the table are called, by study
TITLES = {
    "nll homoskedastic, fixed": "1: training NLL, constant noise, model's noise 0.5",
    "nll homoskedastic, learned": "1: constant noise, one number learned",
    "nll homoskedastic, heteroskedastic": "1: constant noise, second output",
    "nll heteroskedastic, fixed": "1: varying noise, model's noise 0.5",
    "nll heteroskedastic, learned": "1: varying noise, one number learned",
    "nll heteroskedastic, heteroskedastic": "1: varying noise, second output",
    "joint at the start, all": "1: −log joint of the untrained net, N(0, 1) on all weights",
    "joint at the start, last layer": "1: the same, N(0, 1) on the last layer's",
    "joint at the mode, last layer": "1: −log joint after MAP, N(0, 1) on the last layer's",
    "doubt of the identity / of the Hessian": "2: sd at the data, the identity for the Hessian, over the Gaussian's",
    "doubt of the mean of squares / of the Hessian": "2: with the Hessian of the mean of squares, over the Gaussian's",
    "error, normal, sd 1": "4: RMSE of the mean function, prior N(0, 1)",
    "error, normal, fan-in": "4: prior N(0, 9 / fan-in)",
    "error, mixture, sd 0.001 and 100": "4: the study's scale mixture, sd 0.001 and 100",
    "error, mixture, sd 0.1 and 2": "4: scale mixture, sd 0.1 and 2",
    "error, mixture, sd 1 and 5": "4: scale mixture, sd 1 and 5",
    "error, the poor net": "5: RMSE of the mean function, poorly trained net",
    "error, SWA": "5: after SWA",
    "error, SWAG": "5: after SWAG",
    "images, start": "5: test images that are right, trained net",
    "images, SWA": "5: after SWA",
    "images, SWAG": "5: after SWAG, 500 draws",
}
#: words of a study in place of a number
SAID = {
    "doubt of the identity / of the Hessian": "“much smoother”",
    "error, mixture, sd 0.001 and 100": "better than the normal prior",
    "error, SWA": "a proper curve",
}


def table(records: list[dict[str, Any]]) -> str:
    """What was reported and what we find, row by row; the truth's own score where that is known."""
    reported = json.loads(PUBLISHED.read_text(encoding="utf-8"))["reported"]
    found = {row["what"]: row for row in records}
    lines = ["| study | reported | ours | starts | beside it |", "|---|---|---|---|---|"]
    for what, title in TITLES.items():
        row = found.get(what)
        if row is None:
            continue
        digits = 4 if what.startswith("images") else 3 if what.startswith("nll") else 2
        told = f"{reported[what]:.{digits}f}" if what in reported else SAID.get(what, "")
        ours = f"{row['mean']:.{digits}f}" + (f" ± {row['sd']:.{digits}f}" if row["sd"] is not None else "")
        beside = [f"the truth {row['truth']:.3f}"] if "truth" in row else []
        beside += [f"ELBO {row['elbo']:.1f}"] if row.get("elbo") is not None else []
        beside += [row["data"]] if "data" in row else []
        lines.append(f"| {title} | {told} | {ours} | {row['starts']} | {', '.join(beside)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the parts that are asked for; print and append their records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} [all]")
    parser.add_argument("--root", type=Path, help="folder of the images")
    parser.add_argument("--nets", type=int, default=3, help="nets of the images")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    done = {row["what"] for row in (read_records(options.results) if options.results.exists() else [])}
    options.known = done.__contains__
    for part in options.parts or PARTS:
        begun = time.process_time()
        for row in PARTS[part](options):
            print(*(f"{key}={value}" for key, value in row.items()), sep="  ", flush=True)
            append_record(options.results, row)
        print(f"{part}: {time.process_time() - begun:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
