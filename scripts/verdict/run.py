"""How often a verdict raises a false alarm, and how often it misses a fault: exact draws, healthy and planted faults.

    python scripts/verdict/run.py --healthy 60 --sick 6
    python scripts/page.py

Every case is a linear net with data from its own prior (1 to 20 inputs, 40 to 200 data, any noise), whose posterior is
known: its draws are exact, and so is every fault put into them. Each case has data of its own. One JSON line a case;
cases that the file has are not run again. At its end the rates of every check go to the package, for reports to say.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from scipy import stats

import pyrobnn as pb
from pyrobnn.posterior import Posterior

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402

HELD_OUT = 100
RATES = Path(__file__).parents[2] / "pyrobnn" / "diagnostics" / "rates.json"
LENGTHS = {"4x200": (4, 200), "4x1000": (4, 1000)}


@dataclass
class Case:
    """Data of a line with Gaussian noise, and exact draws (chain, draw, weight) of the net's posterior."""

    rng: np.random.Generator
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    noise: float
    shape: tuple[int, int]
    prior: float = 1.0
    iid: bool = False
    errors: tuple[np.ndarray, ...] = ()

    def exact(
        self, *, count: float = 1.0, prior: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the posterior, of data counted `count` times."""
        design = np.concatenate([self.x, np.ones((len(self.x), 1))], axis=1)
        precision = count * design.T @ design / self.noise**2
        covariance = np.linalg.inv(precision + np.eye(design.shape[1]) / (prior or self.prior) ** 2)
        return count * covariance @ design.T @ self.y / self.noise**2, covariance

    @property
    def sd(self) -> np.ndarray:
        return np.sqrt(np.diag(self.exact()[1]))

    def draws(
        self,
        *,
        correlation: float = 0.0,
        count: float = 1.0,
        prior: float | None = None,
    ) -> np.ndarray:
        """Stationary chains of it, with `correlation` from draw to draw."""
        mean, covariance = self.exact(count=count, prior=prior)
        normal = self.rng.normal(size=(*self.shape, len(mean)))
        for draw in range(1, self.shape[1] if correlation else 0):
            normal[:, draw] = (
                correlation * normal[:, draw - 1] + np.sqrt(1 - correlation**2) * normal[:, draw]
            )
        return mean + normal @ np.linalg.cholesky(covariance).T


def make_case(
    seed: list[int], shape: tuple[int, int], change: Callable[[Case], None] | None = None
) -> Case:
    """A problem from the model's own prior; `change` may spoil the data before anything is inferred."""
    rng = np.random.default_rng(seed)
    inputs = int(rng.integers(1, 21))
    num = int(rng.integers(40, 201))
    noise = float(np.exp(rng.uniform(np.log(0.1), np.log(2.0))))
    weights = rng.normal(size=inputs + 1)
    x = rng.normal(size=(num, inputs))
    x_test = rng.normal(size=(HELD_OUT, inputs))
    errors = rng.normal(size=num)
    errors_test = rng.normal(size=HELD_OUT)
    y = x @ weights[:-1] + weights[-1] + noise * errors
    y_test = x_test @ weights[:-1] + weights[-1] + noise * errors_test
    case = Case(
        rng,
        x,
        y,
        x_test,
        y_test,
        noise,
        shape,
        errors=(errors, errors_test),
    )
    if change is not None:
        change(case)
    return case


def tree_of(case: Case, draws: np.ndarray):
    """The DataTree that the library makes of the draws, as of NUTS chains or of a fitted normal."""
    net = torch.nn.Linear(case.x.shape[1], 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, case.prior))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(case.noise))
    values = torch.tensor(draws, dtype=torch.float32)
    x = torch.tensor(case.x, dtype=torch.float32)
    y = torch.tensor(case.y[:, None], dtype=torch.float32)
    x_test = torch.tensor(case.x_test, dtype=torch.float32)
    y_test = torch.tensor(case.y_test[:, None], dtype=torch.float32)
    meta = {
        "method": "NUTS",
        "kind": "chains",
        "claim": "exact",
        "likelihood": "gaussian",
        "iid": case.iid,
    }
    sample_stats = {"lp": torch.zeros(draws.shape[:2])}
    if case.iid:
        meta |= {
            "method": "SVI",
            "kind": "independent",
            "claim": "approximate",
            "log_evidence_kind": "elbo",
        }
        sample_stats = {name: torch.tensor(value) for name, value in densities(case, draws).items()}
    sites = {"net.weight": values[..., None, :-1], "net.bias": values[..., -1:]}
    posterior = Posterior(model, sites, sample_stats, meta=meta)
    return posterior.to_datatree(
        x,
        y,
        test=(x_test, y_test),
    )


def densities(case: Case, draws: np.ndarray) -> dict[str, np.ndarray]:
    """log p of the exact posterior, and log q of the normal that fits the draws."""
    flat = draws.reshape(-1, draws.shape[-1])
    fitted = flat.mean(0), np.atleast_2d(np.cov(flat.T))
    pairs = {"log_p": case.exact(), "log_q": fitted}
    log_densities = {}
    for name, (mean, covariance) in pairs.items():
        scaled = np.linalg.solve(np.linalg.cholesky(covariance), (flat - mean).T)
        log_det = np.linalg.slogdet(covariance)[1]
        log_densities[name] = (-0.5 * ((scaled**2).sum(0) + log_det)).reshape(draws.shape[:2])
    return log_densities


EVERY = slice(None)
PREDICTED = {"f", "y", "mean", "y_sample"}


def spread(
    factor: float, chains: slice = EVERY, correlation: float = 0.0
) -> Callable[[Case], np.ndarray]:
    """Chains whose sd is `factor` times the posterior's."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws(correlation=correlation)
        mean = case.exact()[0]
        draws[chains] = mean + factor * (draws[chains] - mean)
        return draws

    return spoil


def moved(
    sds: float,
    chains: slice = EVERY,
    draws: slice = EVERY,
    weights: slice = EVERY,
    correlation: float = 0.0,
) -> Callable[[Case], np.ndarray]:
    """Some of the draws `sds` posterior sd away, in some weights."""

    def spoil(case: Case) -> np.ndarray:
        shifted = case.draws(correlation=correlation)
        shifted[chains, draws, weights] += sds * case.sd[weights]
        return shifted

    return spoil


def stuck(case: Case) -> np.ndarray:
    draws = case.draws()
    draws[1] = draws[1, :1]
    return draws


def copied(case: Case) -> np.ndarray:
    return np.repeat(
        case.draws()[:1],
        case.shape[0],
        axis=0,
    )


def marginals(case: Case) -> np.ndarray:
    """The posterior's conditional sds without its correlations, as of a mean-field fit."""
    mean, covariance = case.exact()
    sd = 1.0 / np.sqrt(np.diag(np.linalg.inv(covariance)))
    return mean + sd * case.rng.normal(size=(*case.shape, len(mean)))


def other_data(case: Case) -> np.ndarray:
    draws = case.draws()
    y = case.x_test @ case.rng.normal(size=case.x.shape[1])
    draws[0] = replace(case, x=case.x_test, y=y).draws()[0]
    return draws


def doubled(case: Case) -> None:
    case.x, case.x_test = (np.concatenate([x, x[:, :1]], axis=1) for x in (case.x, case.x_test))


def collinear(case: Case) -> None:
    case.x = case.x[:, :1] + 0.1 * case.rng.normal(size=(len(case.x), max(2, case.x.shape[1])))
    case.x_test = case.x_test[:, :1] + 0.1 * case.rng.normal(size=(HELD_OUT, case.x.shape[1]))
    weights = case.rng.normal(size=case.x.shape[1])
    case.y = case.x @ weights + case.noise * case.rng.normal(size=len(case.x))
    case.y_test = case.x_test @ weights + case.noise * case.rng.normal(size=HELD_OUT)


def test_is_train(case: Case) -> None:
    case.x_test = case.x[:HELD_OUT].copy()
    case.y_test = case.y[:HELD_OUT].copy()


def changed(name: str, change: Callable[[Case], np.ndarray | float]) -> Callable[[Case], None]:
    """One part of the data, held out or not, as `change` makes it."""
    return lambda case: setattr(case, name, change(case))


def swallowed(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Case], None]:
    """A function of the first input that no line has, as large as the noise, which takes both."""

    def change(case: Case) -> None:
        for x, y in ((case.x, case.y), (case.x_test, case.y_test)):
            extra = function(x[:, 0])
            y += 2.0 * case.noise * (extra - extra.mean()) / extra.std()
        case.noise *= np.sqrt(5.0)

    return change


def renoised(draw: Callable[[Case, np.ndarray], np.ndarray]) -> Callable[[Case], None]:
    """Other errors than the model's: `draw` gives them in units of its noise."""

    def change(case: Case) -> None:
        pairs = (case.x, case.y), (case.x_test, case.y_test)
        for (x, y), error in zip(pairs, case.errors, strict=True):
            y += case.noise * (draw(case, x[:, 0]) - error)

    return change


def dependent(case: Case, x: np.ndarray) -> np.ndarray:
    """Errors of one row that carry over to the next, as in a time series."""
    error = case.rng.normal(size=len(x))
    for row in range(1, len(x)):
        error[row] = 0.7 * error[row - 1] + np.sqrt(1 - 0.7**2) * error[row]
    return error


def grouped(case: Case, x: np.ndarray) -> np.ndarray:
    """Half of the variance is that of groups of ten rows."""
    of_group = np.repeat(case.rng.normal(size=-(-len(x) // 10)), 10)[: len(x)]
    return (case.rng.normal(size=len(x)) + of_group) / np.sqrt(2.0)


def without_an_input(case: Case) -> None:
    """One more input, with an effect twice as large as the noise, that the net is not given."""
    for y in (case.y, case.y_test):
        y += 2.0 * case.noise * case.rng.normal(size=len(y))


def opposite(case: Case) -> np.ndarray:
    """Every other chain the mirror image of the one before."""
    draws = case.draws(correlation=0.2)
    mean = case.exact()[0]
    draws[1::2] = 2.0 * mean - draws[::2]
    return draws


def delayed(case: Case) -> np.ndarray:
    chain_draws = case.draws(correlation=0.2)[0]
    return np.stack([np.roll(chain_draws, 37 * chain, axis=0) for chain in range(case.shape[0])])


def drawn_again(case: Case) -> np.ndarray:
    """Draws of each chain drawn from it again with replacement, in their order."""
    rows = np.sort(
        case.rng.integers(
            0,
            case.shape[1],
            size=case.shape[1],
        )
    )
    return case.draws(correlation=0.2)[:, rows]


def test_is_nearly_train(case: Case) -> None:
    test_is_train(case)
    case.x_test += 1e-4 * case.rng.normal(size=case.x_test.shape)
    case.y_test += 1e-4 * case.rng.normal(size=case.y_test.shape)


def jittered(sds: float) -> Callable[[Case], np.ndarray]:
    """One chain as all, each with a little noise of its own."""

    def spoil(case: Case) -> np.ndarray:
        draws = copied(case)
        sd = case.sd
        return draws + sds * sd * case.rng.normal(size=draws.shape)

    return spoil


def dealt(case: Case) -> np.ndarray:
    """Slow chains dealt out like cards: each of those that are made holds draws of all, in turn."""
    chains, num = case.shape
    slow_draws = case.draws(correlation=0.995).transpose(1, 0, 2).reshape(num, chains, -1)
    turns = (np.arange(chains)[:, None] + np.arange(num)) % chains
    return slow_draws[np.arange(num), turns]


def without_tails(case: Case) -> np.ndarray:
    """The half of the draws that is nearest to the mean, each twice as often, in an order at random."""
    mean, covariance = case.exact()
    flat = case.draws().reshape(-1, len(mean))
    candidates = np.concatenate([flat, case.draws().reshape(-1, len(mean))])
    far = np.einsum("si,ij,sj->s", candidates - mean, np.linalg.inv(covariance), candidates - mean)
    return case.rng.permutation(candidates[np.argsort(far)[: len(flat)]]).reshape(*case.shape, -1)


def a_fifth_is_train(case: Case) -> None:
    count = min(HELD_OUT // 5, len(case.x))
    case.x_test[:count] = case.x[:count]
    case.y_test[:count] = case.y[:count]


def remade(
    group: str, change: Callable[[Case, np.ndarray], np.ndarray], names: Iterable[str] = ("y",)
) -> Callable[[Case, xr.DataTree], None]:
    """Variables of a group of the tree, those of `names` that it has, as `change` makes them."""

    def spoil(case: Case, tree: xr.DataTree) -> None:
        for name in {*names} & {*tree[group].data_vars}:
            values = tree[group][name]
            tree[group][name] = values.copy(data=change(case, values.values))

    return spoil


def times(factor: float, constant: float = 0.0) -> Callable[[Case, xr.DataTree], None]:
    """The log-likelihood group alone, as of data that count more than once, are tempered or lack a constant."""
    return remade("log_likelihood", lambda _, values: factor * values + constant)


def widened(_: Case, values: np.ndarray) -> np.ndarray:
    """Outcomes twice as far from the mean of each row."""
    mean = values.mean(tuple(range(values.ndim - 1)), keepdims=True)
    return mean + 2.0 * (values - mean)


def throughout(factor: float) -> Callable[[Case, xr.DataTree], None]:
    """The log-likelihood wherever the tree holds it."""

    def spoil(case: Case, tree: xr.DataTree) -> None:
        times(factor)(case, tree)
        tree["function"]["log_likelihood"] = factor * tree["function"]["log_likelihood"]

    return spoil


def without_noise(case: Case, tree: xr.DataTree) -> None:
    """Replicates and predictions that are values of the mean."""
    f = tree["predictions"]["f"].values[..., 0]
    tree["predictions"]["y"] = tree["predictions"]["y"].copy(data=f)
    if "y_sample" in tree["predictions"]:
        sample = tree["predictions"]["y_sample"]
        count = -(-sample.shape[0] // (f.shape[0] * f.shape[1]))
        flat = np.repeat(
            f.reshape(-1, f.shape[2]),
            count,
            axis=0,
        )[: sample.shape[0]]
        tree["predictions"]["y_sample"] = sample.copy(data=flat.reshape(sample.shape))


def blocks(case: Case) -> np.ndarray:
    """Every ten draws twice, one after the other."""
    starts = range(0, case.shape[1] // 2, 10)
    rows = np.concatenate([np.r_[at : at + 10, at : at + 10] for at in starts])
    return case.draws(correlation=0.2)[:, rows]


def at_the_mode(sds: float) -> Callable[[Case], np.ndarray]:
    """Half of the draws, at random, within `sds` of the mode."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws(correlation=0.2)
        mean, covariance = case.exact()
        chosen = case.rng.random(case.shape) < 0.5
        noise = case.rng.normal(size=(int(chosen.sum()), len(mean)))
        draws[chosen] = mean + sds * np.sqrt(np.diag(covariance)) * noise
        return draws

    return spoil


def of_the_prior(share: float) -> Callable[[Case], np.ndarray]:
    """A share of the draws, at random, from the prior."""

    def spoil(case: Case) -> np.ndarray:
        draws = case.draws()
        chosen = case.rng.random(case.shape) < share
        draws[chosen] = case.prior * case.rng.normal(size=(int(chosen.sum()), draws.shape[-1]))
        return draws

    return spoil


def shaped(
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray],
) -> Callable[[Case], np.ndarray]:
    """Draws of another distribution with the posterior's mean and, where `draw` has variance one, its covariance."""

    def spoil(case: Case) -> np.ndarray:
        mean, covariance = case.exact()
        return mean + draw(case.rng, (*case.shape, len(mean))) @ np.linalg.cholesky(covariance).T

    return spoil


def swinging(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Not random at all: each weight of each chain a wave of its own frequency and phase."""
    chains, draws, weights = shape
    frequency = rng.uniform(0.2, 3.0, weights)
    phase = rng.uniform(0.0, 2.0 * np.pi, (chains, 1, weights))
    return np.sqrt(2.0) * np.sin(np.arange(draws)[:, None] * frequency + phase)


def cut_on_one_side(case: Case) -> np.ndarray:
    """Draws whose first weight is at most half an sd above its mean."""
    mean, covariance = case.exact()
    chains = []
    for _ in range(case.shape[0]):
        candidates = case.draws().reshape(-1, len(mean))
        low = candidates[:, 0] - mean[0] < 0.5 * np.sqrt(covariance[0, 0])
        chains.append(candidates[low][: case.shape[1]])
    return np.stack(chains)


def one_far_draw(case: Case) -> np.ndarray:
    draws = case.draws(correlation=0.2)
    draws[1, case.shape[1] // 10] += 1e4
    return draws


def one_slow_weight(case: Case) -> np.ndarray:
    draws = case.draws()
    draws[..., 0] = case.draws(correlation=0.995)[..., 0]
    return draws


def wider_later(case: Case) -> np.ndarray:
    draws = case.draws(correlation=0.2)
    mean = case.exact()[0]
    half = case.shape[1] // 2
    draws[:, half:] = mean + 1.6 * (draws[:, half:] - mean)
    return draws


def shuffled_with_noise(case: Case) -> np.ndarray:
    """One chain as all, each in an order of its own and with a little noise."""
    chain_draws = case.draws()[0]
    draws = np.stack([case.rng.permutation(chain_draws) for _ in range(case.shape[0])])
    return draws + 0.05 * case.sd * case.rng.normal(size=draws.shape)


def of_other_rows(case: Case, tree: xr.DataTree) -> None:
    """Predictions in another order than the held-out rows."""
    order = case.rng.permutation(HELD_OUT)
    for name in PREDICTED & set(tree["predictions"].data_vars):
        values = tree["predictions"][name]
        axis = next(i for i, dim in enumerate(values.dims) if values.sizes[dim] == HELD_OUT)
        tree["predictions"][name] = values.copy(data=np.take(values.values, order, axis))


def few_with_noise(case: Case) -> np.ndarray:
    """Fifty draws again and again, each time with a tenth of an sd of noise."""
    distinct = case.draws()[0, :50]
    draws = distinct[
        case.rng.integers(
            0,
            len(distinct),
            size=case.shape,
        )
    ]
    return draws + 0.1 * case.sd * case.rng.normal(size=draws.shape)


def by_density(case: Case) -> np.ndarray:
    """The draws of each chain in the order of their density."""
    draws = case.draws()
    mean, covariance = case.exact()
    far = np.einsum("csi,ij,csj->cs", draws - mean, np.linalg.inv(covariance), draws - mean)
    return np.take_along_axis(
        draws,
        far.argsort(axis=1)[..., None],
        axis=1,
    )


def other_inputs(case: Case) -> np.ndarray:
    """Weights of the inputs in the reverse order; of one input with the other sign."""
    draws = case.draws(correlation=0.2)
    draws[..., :-1] = draws[..., -2::-1] if draws.shape[-1] > 2 else -draws[..., :-1]
    return draws


@dataclass(frozen=True)
class Fault:
    """How the draws, the data or the tree of a case are spoiled, and the checks that are there to see it."""

    draws: Callable[[Case], np.ndarray] = Case.draws
    data: Callable[[Case], None] | None = None
    iid: bool = False
    tree: Callable[[Case, xr.DataTree], None] | None = None
    checks: tuple[str, ...] = ()


HEALTHY = {
    "independent chains": Fault(),
    "correlated chains": Fault(lambda case: case.draws(correlation=0.2)),
    "a fitted normal": Fault(iid=True),
    "a column twice": Fault(data=doubled),
}
VIRIAL = ("virial",)
SCORE = ("score",)
RHAT = ("rhat_function",)
SHAPE = ("density_moves",)
CALIBRATION = ("pit", "loo_pit")
LIKELIHOOD = ("log_likelihood",)
SICK = {
    "sd x 0.5": Fault(spread(0.5), checks=VIRIAL),
    "sd x 2": Fault(spread(2.0), checks=VIRIAL),
    "mean off by 1 sd": Fault(moved(1.0), checks=SCORE),
    "mean off by 3 sd": Fault(moved(3.0), checks=SCORE),
    "one weight off by 3 sd": Fault(moved(3.0, weights=slice(1)), checks=SCORE),
    "data counted twice": Fault(lambda case: case.draws(count=2.0), checks=VIRIAL),
    "data counted ten times": Fault(lambda case: case.draws(count=10.0), checks=VIRIAL),
    "noise taken for half of it": Fault(lambda case: case.draws(count=4.0), checks=VIRIAL),
    "tempered to 0.5": Fault(spread(np.sqrt(0.5)), checks=VIRIAL),
    "targets permuted": Fault(
        lambda case: replace(case, y=case.rng.permutation(case.y)).draws(), checks=SCORE
    ),
    "no bias": Fault(
        lambda case: case.draws() * (np.arange(len(case.sd)) < len(case.sd) - 1),
        checks=("virial", "score"),
    ),
    "a chain of other data": Fault(other_data, checks=RHAT),
    "a chain that never moved": Fault(stuck, checks=("moving", "rhat_function")),
    "a chain in another mode": Fault(moved(4.0, slice(1)), checks=("rhat_function",)),
    "half of the chains 1 sd away": Fault(moved(1.0, slice(2)), checks=RHAT),
    "chains that are copies": Fault(copied, checks=("copied_chains",)),
    "chains that are nearly copies": Fault(
        lambda case: copied(case) + 1e-6 * case.rng.normal(size=(*case.shape, len(case.sd))),
        checks=("copied_chains",),
    ),
    "draws from 150 distinct ones": Fault(
        lambda case: case.draws().reshape(-1, len(case.sd))[
            case.rng.integers(0, 150, size=case.shape)
        ],
        checks=("repeated_draws",),
    ),
    "every draw twice": Fault(
        lambda case: np.repeat(
            case.draws()[:, : case.shape[1] // 2],
            2,
            axis=1,
        ),
        checks=("moving",),
    ),
    "all chains at one point": Fault(
        lambda case: (
            case.exact()[0] + 1e-3 * case.sd * case.rng.normal(size=(*case.shape, len(case.sd)))
        ),
        checks=VIRIAL,
    ),
    "chains that mirror each other": Fault(opposite, checks=("copied_chains",)),
    "chains that follow one another": Fault(delayed, checks=("repeated_draws",)),
    "half of the draws from the prior": Fault(of_the_prior(0.5), checks=VIRIAL),
    "the posterior of other data": Fault(
        lambda case: replace(
            case,
            y=case.x @ case.rng.normal(size=case.x.shape[1])
            + case.noise * case.rng.normal(size=len(case.y)),
        ).draws(),
        checks=SCORE,
    ),
    "the posterior of half the data": Fault(
        lambda case: replace(
            case,
            x=case.x[: len(case.x) // 2],
            y=case.y[: len(case.x) // 2],
        ).draws(),
        checks=VIRIAL,
    ),
    "draws drawn again": Fault(drawn_again, checks=("moving",)),
    "chains with a trend": Fault(
        lambda case: case.draws() + np.linspace(-2, 2, case.shape[1])[:, None] * case.sd,
        checks=RHAT,
    ),
    "warm-up kept": Fault(moved(10.0, slice(None), slice(40)), checks=("ess_function",)),
    "slow chains": Fault(lambda case: case.draws(correlation=0.99), checks=("ess_function",)),
    "mean field on collinear inputs": Fault(
        marginals,
        collinear,
        iid=True,
        checks=("importance",),
    ),
    "a normal of half the sd": Fault(
        spread(0.5),
        iid=True,
        checks=("importance", "virial"),
    ),
    "test rows are training rows": Fault(data=test_is_train, checks=("held_out_rows",)),
    "test rows are training rows, rounded": Fault(
        data=test_is_nearly_train, checks=("held_out_rows",)
    ),
    "log-likelihood of other rows": Fault(
        tree=remade("log_likelihood", lambda c, y: y[..., c.rng.permutation(y.shape[-1])]),
        checks=LIKELIHOOD,
    ),
    "log-likelihood of the other sign": Fault(tree=times(-1.0), checks=LIKELIHOOD),
    "a sine in the noise": Fault(data=swallowed(lambda x: np.sin(3 * x)), checks=("pattern",)),
    "a square in the noise": Fault(data=swallowed(np.square), checks=("pattern",)),
    "noise twice the model's": Fault(
        data=renoised(lambda c, x: 2.2 * c.rng.normal(size=len(x))), checks=CALIBRATION
    ),
    "noise that grows with an input": Fault(
        data=renoised(lambda c, x: np.exp(0.8 * x - 0.64) * c.rng.normal(size=len(x))),
        checks=("coverage_by_region",),
    ),
    "noise with heavy tails": Fault(
        data=renoised(lambda c, x: 2.0 * c.rng.standard_t(1.5, size=len(x))), checks=CALIBRATION
    ),
    "draws rounded to one sd": Fault(lambda case: np.round(case.draws() / case.sd) * case.sd),
    "log-likelihood times three": Fault(tree=times(3.0), checks=LIKELIHOOD),
    "log-likelihood times three throughout": Fault(tree=throughout(3.0), checks=LIKELIHOOD),
    "log-likelihood halved throughout": Fault(tree=throughout(0.5), checks=LIKELIHOOD),
    "chains sorted": Fault(lambda case: np.sort(case.draws(), axis=1), checks=RHAT),
    "weights shuffled apart": Fault(
        lambda case: case.rng.permuted(case.draws().reshape(-1, len(case.sd)), axis=0).reshape(
            *case.shape, -1
        ),
        collinear,
        checks=("virial", "score"),
    ),
    "one chain with little noise as all": Fault(jittered(0.1), checks=("copied_chains",)),
    "one chain with noise as all": Fault(jittered(0.5), checks=("copied_chains", "virial")),
    "slow chains dealt into one another": Fault(dealt, checks=("ess_function", "score", "virial")),
    "two places shuffled": Fault(
        lambda case: case.draws() + 4.0 * case.sd * (case.rng.random(case.shape) < 0.5)[..., None],
        checks=VIRIAL,
    ),
    "without its tails": Fault(without_tails, checks=VIRIAL),
    "of targets in other units": Fault(
        lambda case: replace(case, y=1.5 * case.y).draws(), checks=SCORE
    ),
    "of inputs that were moved": Fault(
        lambda case: replace(case, x=case.x + 0.5).draws(), checks=SCORE
    ),
    "a fifth of the test rows are training rows": Fault(
        data=a_fifth_is_train, checks=("held_out_rows",)
    ),
    "test targets that have moved": Fault(
        data=changed("y_test", lambda c: c.y_test + 1.5 * c.noise), checks=("pit",)
    ),
    "predictions without noise": Fault(tree=without_noise, checks=("pit",)),
    "a weight of one chain 1 sd away": Fault(
        moved(
            1.0,
            slice(1),
            weights=slice(1),
            correlation=0.2,
        ),
        checks=RHAT,
    ),
    "every ten draws twice": Fault(blocks, checks=("repeated_draws",)),
    "half of the draws at the mode": Fault(at_the_mode(0.0), checks=("repeated_draws", "virial")),
    "half of the draws near the mode": Fault(at_the_mode(0.01), checks=VIRIAL),
    "tempered to 2": Fault(spread(np.sqrt(2.0)), checks=VIRIAL),
    "noise taken for twice of it": Fault(lambda case: case.draws(count=0.25), checks=VIRIAL),
    "of a prior a tenth as wide": Fault(lambda case: case.draws(prior=0.1), checks=SCORE),
    "a tenth of the draws of the other sign": Fault(
        lambda case: (
            case.draws(correlation=0.2)
            * np.where(case.rng.random(case.shape) < 0.1, -1.0, 1.0)[..., None]
        ),
        checks=VIRIAL,
    ),
    "a tenth of the draws from the prior": Fault(of_the_prior(0.1), checks=VIRIAL),
    "cut off at 1.5 sd": Fault(
        shaped(
            lambda rng, shape: stats.truncnorm.rvs(
                -1.5,
                1.5,
                size=shape,
                random_state=rng,
            )
        ),
        checks=VIRIAL,
    ),
    "every weight in two places": Fault(
        shaped(
            lambda rng, shape: (
                0.95 * rng.choice([-1.0, 1.0], size=shape)
                + np.sqrt(1 - 0.95**2) * rng.normal(size=shape)
            )
        ),
        checks=SHAPE,
    ),
    "every weight between bounds": Fault(
        shaped(lambda rng, shape: rng.uniform(-np.sqrt(3.0), np.sqrt(3.0), shape)), checks=SHAPE
    ),
    "every weight with heavy tails": Fault(
        shaped(lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3.0)), checks=SHAPE
    ),
    "every weight skewed": Fault(
        shaped(lambda rng, shape: rng.exponential(size=shape) - 1.0), checks=SHAPE
    ),
    "waves": Fault(shaped(swinging), checks=SHAPE),
    "fifty draws with noise": Fault(few_with_noise),
    "draws in the order of their density": Fault(by_density, checks=RHAT),
    "weights of other inputs": Fault(other_inputs, checks=SCORE),
    "one chain 1.5 times as wide": Fault(spread(1.5, slice(1), 0.2), checks=RHAT),
    "a fifth of the rows twice": Fault(
        lambda case: replace(
            case,
            x=np.r_[case.x, case.x[: len(case.x) // 5]],
            y=np.r_[case.y, case.y[: len(case.y) // 5]],
        ).draws(),
        checks=("virial", "score"),
    ),
    "of targets times 1.1": Fault(lambda case: replace(case, y=1.1 * case.y).draws(), checks=SCORE),
    "test targets moved by half of their sd": Fault(
        data=changed("y_test", lambda c: c.y_test + 0.5 * c.y.std()), checks=("pit",)
    ),
    "test inputs permuted": Fault(
        data=changed("x_test", lambda c: c.rng.permutation(c.x_test)), checks=("pit",)
    ),
    "test inputs in other columns": Fault(
        data=changed(
            "x_test", lambda c: c.x_test[:, ::-1].copy() if c.x_test.shape[1] > 1 else -c.x_test
        ),
        checks=("pit",),
    ),
    "test targets with noise": Fault(
        data=changed("y_test", lambda c: c.y_test + 1.5 * c.noise * c.rng.normal(size=HELD_OUT)),
        checks=("pit",),
    ),
    "a model of twice the noise": Fault(
        data=changed("noise", lambda c: 2.0 * c.noise), checks=CALIBRATION
    ),
    "a model of half the noise": Fault(
        data=changed("noise", lambda c: 0.5 * c.noise), checks=CALIBRATION
    ),
    "predictions in other units": Fault(
        tree=remade("predictions", lambda _, y: 1.5 * y + 0.5, PREDICTED), checks=("pit",)
    ),
    "predictions with twice the spread": Fault(
        tree=remade("predictions", widened, ("y", "y_sample")), checks=("pit",)
    ),
    "replicates without spread": Fault(
        tree=remade(
            "posterior_predictive", lambda _, y: np.broadcast_to(y.mean((0, 1)), y.shape).copy()
        ),
        checks=("loo_pit",),
    ),
    "log-likelihood without its constant": Fault(
        tree=times(1.0, 0.5 * np.log(2.0 * np.pi)), checks=LIKELIHOOD
    ),
    "observed targets permuted": Fault(
        tree=remade("observed_data", lambda c, y: c.rng.permutation(y)), checks=LIKELIHOOD
    ),
    "errors that carry over to the next row": Fault(
        data=renoised(dependent), checks=("row_order",)
    ),
    "errors that drift": Fault(
        data=renoised(
            lambda c, x: (
                (c.rng.normal(size=len(x)) + np.linspace(-1.5, 1.5, len(x))) / np.sqrt(1.75)
            )
        ),
        checks=("row_order",),
    ),
    "errors of groups of rows": Fault(data=renoised(grouped), checks=("row_order",)),
    "an input that the net is not given": Fault(data=without_an_input, checks=CALIBRATION),
    "cut off on one side of a weight": Fault(cut_on_one_side, checks=SCORE),
    "one draw far away": Fault(one_far_draw, checks=("function_moves",)),
    "a weight that moves slowly": Fault(one_slow_weight, checks=(*RHAT, "ess_function")),
    "wider in the second half": Fault(wider_later, checks=(*RHAT, "virial")),
    "one chain shuffled and with noise as all": Fault(shuffled_with_noise),
    "predictions of other rows": Fault(tree=of_other_rows, checks=("pit",)),
}


def run(kind: str, fault: Fault, length: str, seed: int) -> dict[str, object]:
    """One row: the verdict of one case, and every check's status and value."""
    case = make_case([seed, zlib.crc32(f"{kind} {length}".encode())], LENGTHS[length], fault.data)
    if fault.iid:
        case = replace(
            case,
            iid=True,
            shape=(1, case.shape[0] * case.shape[1]),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = tree_of(case, fault.draws(case))
        if fault.tree is not None:
            fault.tree(case, tree)
        verdict = pb.diagnose(tree)
        audit = pb.audit(tree)
    return {
        "healthy": kind in HEALTHY,
        "kind": kind,
        "length": length,
        "seed": seed,
        "status": verdict.status,
        "draws": verdict.draws,
        "model": verdict.model,
        "audit": audit.status,
        "words": len(str(verdict).split()),
        "checks": {
            check.name: [check.status, check.value] for check in (*verdict.checks, *audit.checks)
        },
    }


def rates(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Of each check: on what share of healthy posteriors it warns or fails, and of the faults that it is for."""
    well = [row for row in rows if row["healthy"]]
    names: set[str] = set()
    for row in rows:
        names |= row["checks"].keys()
    rates_of_checks = {}
    for name in sorted(names):
        # some checks say nothing where nothing is wrong: they were made of every healthy case
        silent = all(_spoke(row, name, absent="warn") for row in well)
        healthy = _alarms(well, name, silent)
        planted = [row for row in rows if name in SICK.get(row["kind"], Fault()).checks]
        # one that was not made, as leave-one-out whose weights are useless, has let nothing pass
        sick = _alarms(planted, name, silent)
        if any(healthy) or sick:
            rates_of_checks[name] = {
                "healthy": len(healthy),
                "false_alarms": sum(healthy),
                "sick": len(sick),
                "seen": sum(sick),
            }
    return rates_of_checks


def _alarms(rows: list[dict], name: str, silent: bool) -> list[bool]:
    """Whether a check warned or failed, for each row that has it; all rows where a check is silent on a pass."""
    return [_spoke(row, name) for row in rows if silent or name in row["checks"]]


def _spoke(row: dict, name: str, absent: str = "pass") -> bool:
    """Whether a check warned or failed; one that the row lacks has the status ``absent``."""
    return row["checks"].get(name, [absent])[0] in ("warn", "fail")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).with_name("records.jsonl"),
    )
    parser.add_argument(
        "--rates",
        type=Path,
        default=RATES,
        help="where the package keeps what follows from them",
    )
    parser.add_argument(
        "--healthy",
        type=int,
        default=60,
        help="cases of each healthy kind and length",
    )
    parser.add_argument(
        "--sick",
        type=int,
        default=6,
        help="cases of each fault and length",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        choices=LENGTHS,
        default=list(LENGTHS),
        help="of the runs",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    done = {(row["kind"], row["length"], row["seed"]) for row in read_records(arguments.results)}
    for seed in range(max(arguments.healthy, arguments.sick)):
        for length in arguments.lengths:
            for kinds, number in ((HEALTHY, arguments.healthy), (SICK, arguments.sick)):
                for kind, fault in kinds.items():
                    if seed < number and (kind, length, seed) not in done:
                        append_record(arguments.results, run(kind, fault, length, seed))
    rows = read_records(arguments.results)
    arguments.rates.write_text(json.dumps(rates(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
