"""The nets of the verdicts' study: runs of NUTS on reference posteriors, and faults planted into them.

A run of 16 chains is cut into groups of four, each a case; runs kept in runs/references are taken as they are, others
are made. Every case is judged without a reference, and again beside the stored one; how far its function truly
is from that is kept too.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import pyrobnn as pb
from pyrobnn.diagnostics import Evidence, fidelity
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.datatree import prior_posterior
from pyrobnn.references import Reference

CHAINS, WARMUP, DRAWS, SHORT = 4, 500, 1000, 200
RUNS = Path("runs/references")


@functools.cache
def reference(name: str) -> Reference:
    return pb.references.load(name)


@functools.cache
def long_run(name: str, seed: int) -> Posterior:
    """Sixteen chains of the reference's posterior."""
    found, file = reference(name), RUNS / f"{name}-nuts-{seed}.nc"
    if file.exists():
        return Posterior.load(file, found.model())
    method = pb.NUTS(num_chains=4 * CHAINS, num_warmup=WARMUP)
    return method.fit(found.model(), found.data.x, found.data.y, num_draws=DRAWS, seed=seed)


def group(name: str, number: int, num_draws: int) -> Posterior:
    """The first draws of four chains, the `number`-th group of four of all runs."""
    run = long_run(name, 1 + number // 4)
    chains = slice(CHAINS * (number % 4), CHAINS * (number % 4 + 1))
    cut = [{key: value[chains, :num_draws] for key, value in part.items()} for part in (run.draws, run.sample_stats)]
    # what was said of all chains is not said of these: their own divergences are judged
    return replace(run, draws=cut[0], sample_stats=cut[1], meta=run.meta | {"warnings": []})


def with_draws(posterior: Posterior, change: Callable[[str, Tensor], Tensor]) -> Posterior:
    return replace(posterior, draws={name: change(name, value) for name, value in posterior.draws.items()})


def spread(factor: float) -> Callable[[Posterior, Reference], Posterior]:
    """Weights `factor` times as far from the mean of their chain."""

    def spoil(posterior: Posterior, _: Reference) -> Posterior:
        def scaled(name: str, value: Tensor) -> Tensor:
            mean = value.mean(1, keepdim=True)
            return mean + factor * (value - mean) if name.startswith("net.") else value

        return with_draws(posterior, scaled)

    return spoil


@functools.cache
def ten_times(name: str, seed: int) -> Posterior:
    """NUTS on ten copies of every row, short: each gradient takes ten times as long."""
    found = reference(name)
    x, y = (torch.cat([part] * 10) for part in (found.data.x, found.data.y))
    return pb.NUTS(num_chains=CHAINS, num_warmup=WARMUP).fit(found.model(), x, y, num_draws=SHORT, seed=1 + seed)


def fast_swag(name: str, seed: int) -> Posterior:
    """SWAG whose iterates are collected at five times its own rate."""
    found = reference(name)
    method = pb.SWAG(num_steps=400, compile=False)
    fit = functools.partial(method.fit, found.model(), found.data.x, found.data.y, seed=seed)
    rate = fit(num_draws=2).meta["lr"]
    return replace(method, lr=5.0 * rate).fit(found.model(), found.data.x, found.data.y, num_draws=4 * SHORT, seed=seed)


def rounded(posterior: Posterior, _: Reference) -> Posterior:
    """Every weight rounded to its sd."""
    sd = {name: value.std((0, 1)) if name.startswith("net.") else None for name, value in posterior.draws.items()}
    return with_draws(posterior, lambda name, v: v if sd[name] is None else (v / sd[name]).round() * sd[name])


def jittered(posterior: Posterior, _: Reference) -> Posterior:
    """The first chain as all four, each with noise of its own, 0.3 sd of every weight."""
    noise = torch.Generator().manual_seed(0)

    def around(name: str, value: Tensor) -> Tensor:
        first = value[:1].expand_as(value)
        if not name.startswith("net."):
            return first.clone()
        return first + 0.3 * value.std((0, 1)) * torch.randn(value.shape, generator=noise)

    return with_draws(posterior, around)


def stretched(posterior: Posterior, _: Reference) -> Posterior:
    """The output 1.5 times as large, as of targets in other units."""
    last = _last(posterior, "weight"), _last(posterior, "bias")
    return with_draws(posterior, lambda name, value: 1.5 * value if name in last else value)


def times_three(tree: xr.DataTree) -> None:
    """The log-likelihood, wherever it is kept."""
    tree["log_likelihood"]["y"] = 3.0 * tree["log_likelihood"]["y"]
    tree["function"]["log_likelihood"] = 3.0 * tree["function"]["log_likelihood"]


def one_point(posterior: Posterior, _: Reference) -> Posterior:
    """All draws within 1e-3 of the first."""
    rng = torch.Generator().manual_seed(0)
    return with_draws(posterior, lambda _, v: v[:1, :1] * (1.0 + 1e-3 * torch.randn(v.shape, generator=rng)))


def shifted(sds: float) -> Callable[[Posterior, Reference], Posterior]:
    """The function `sds` of its own sd away at every input, by the output's bias."""

    def spoil(posterior: Posterior, found: Reference) -> Posterior:
        bias = _last(posterior, "bias")
        rows = found.summary["kind"].values == "train"
        step = torch.zeros(posterior.draws[bias].shape[-1])
        step[0] = sds * float(found.summary["sd"].values[rows].mean())
        return with_draws(posterior, lambda name, value: value + step if name == bias else value)

    return spoil


def without_unit(posterior: Posterior, _: Reference) -> Posterior:
    """The first unit of the last hidden layer says nothing."""
    weight = _last(posterior, "weight")
    kept = torch.arange(posterior.draws[weight].shape[-1]) > 0
    return with_draws(posterior, lambda name, value: value * kept if name == weight else value)


def prior_chain(posterior: Posterior, _: Reference) -> Posterior:
    """The first chain drawn from the prior."""
    prior = prior_posterior(posterior.bnn, posterior.num_draws, 0)
    return with_draws(posterior, lambda name, value: torch.cat([prior.draws[name].to(value), value[1:]]))


def prior_alone(posterior: Posterior, _: Reference) -> Posterior:
    prior = prior_posterior(posterior.bnn, posterior.num_chains * posterior.num_draws, 0)
    return with_draws(posterior, lambda name, value: prior.draws[name].reshape(value.shape).to(value))


def upper_half(posterior: Posterior, found: Reference) -> Posterior:
    """Of each chain the draws whose function is above its median where it is most uncertain, twice each."""
    sd = found.summary["sd"].values * (found.summary["kind"].values == "between")
    worst = int(np.argmax(sd))
    f = posterior.function(found.probe_x)
    f = f.reshape(*f.shape[:2], -1)[:, :, worst]
    half = posterior.num_draws // 2
    keep = f.argsort(1)[:, -half:].sort(1).values
    rows = torch.arange(len(keep))[:, None]
    cut = {name: value[rows, keep] for name, value in posterior.draws.items()}
    return replace(posterior, draws=cut, sample_stats={n: v[rows, keep] for n, v in posterior.sample_stats.items()})


def chain_away(posterior: Posterior, found: Reference) -> Posterior:
    """The function of the first chain 1 sd away, by the output's bias."""
    moved, bias = shifted(1.0)(posterior, found), _last(posterior, "bias")
    value = torch.cat([moved.draws[bias][:1], posterior.draws[bias][1:]])
    return replace(posterior, draws=posterior.draws | {bias: value})


def other_sign(posterior: Posterior, _: Reference) -> Posterior:
    """A tenth of the draws, at random, with the output's sign changed."""
    shape = posterior.num_chains, posterior.num_draws
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.1
    last = _last(posterior, "weight"), _last(posterior, "bias")

    def changed(name: str, value: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * chosen.to(value)
        return value * sign.reshape(*shape, *[1] * (value.dim() - 2)) if name in last else value

    return with_draws(posterior, changed)


def in_order(posterior: Posterior, _: Reference) -> Posterior:
    """Every weight of every chain sorted."""
    return with_draws(posterior, lambda name, value: value.sort(dim=1).values)


def at_one_point(posterior: Posterior, _: Reference) -> Posterior:
    """Half of the draws, at random, the likeliest of all."""
    shape = posterior.num_chains, posterior.num_draws
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    best = divmod(int(posterior.sample_stats["lp"].argmax()), posterior.num_draws)

    def changed(name: str, value: Tensor) -> Tensor:
        return torch.where(chosen.reshape(*shape, *[1] * (value.dim() - 2)), value[best], value)

    return with_draws(posterior, changed)


def next_class(tree_data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Labels that are one class further; targets of the other sign."""
    x, y = tree_data
    return (x, -y) if y.is_floating_point() else (x, (y + 1) % (int(y.max()) + 1))


def _last(posterior: Posterior, part: str) -> str:
    return [name for name in posterior.draws if name.startswith("net.") and name.endswith(part)][-1]


@dataclass(frozen=True)
class NetFault:
    """How draws, data or tree of a case are spoiled, the checks that see it, alone or beside a reference, and its nets.

    `fit` makes draws of its own, and with `others` the tree is given the held-out rows as those it was fitted to.
    """

    draws: Callable[[Posterior, Reference], Posterior] | None = None
    data: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] | None = None
    checks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    fit: Callable[[str, int], Posterior] | None = None
    nets: tuple[str, ...] = ()
    tree: Callable[[xr.DataTree], None] | None = None
    others: bool = False


HEALTHY = "net: NUTS"
VIRIAL, SCORE, RHAT = ("virial",), ("score",), ("rhat_function",)
FAR, WIDTH, MOVES = ("reference",), ("reference",), ("function_moves",)
#: regression, noise that varies, two classes and more. Left out are nets of which a verdict rightly tells that they
#: cannot follow their data (`gap_1`), and those whose exact posterior is far less sure of its classes than it is right,
#: `digits_10` by 0.49, `wine_10` by 0.27 and `breast_cancer_5` by 0.18: a fault of their priors
NETS = (
    "gap_5",
    "gap_50",
    "gap_3x50",
    "diabetes_10",
    "polynomial_hetero_10",
    "diabetes_hetero_5",
    "moons_2x10",
    "iris_5",
)
UNSURE = ("wine_10", "breast_cancer_5", "digits_10")
FAULTS = {
    "net: weights' sd x 0.3": NetFault(spread(0.3), checks=VIRIAL, beside=WIDTH),
    "net: weights' sd x 2.5": NetFault(spread(2.5), checks=(*VIRIAL, *MOVES), beside=WIDTH),
    "net: data counted ten times": NetFault(
        checks=VIRIAL, beside=WIDTH, fit=ten_times, nets=("iris_5", "moons_2x10", "diabetes_10")
    ),
    "net: all chains at one point": NetFault(one_point, checks=VIRIAL, beside=WIDTH),
    "net: function 1 sd away": NetFault(shifted(1.0), checks=(*SCORE, *MOVES), beside=FAR),
    "net: function 3 sd away": NetFault(shifted(3.0), checks=(*SCORE, *MOVES), beside=FAR),
    "net: a chain of the prior": NetFault(prior_chain, checks=RHAT, beside=FAR),
    "net: the prior": NetFault(prior_alone, checks=("virial", "score"), beside=FAR),
    "net: half of the functions dropped": NetFault(upper_half, beside=FAR),
    "net: targets permuted": NetFault(
        data=lambda d: (d[0], d[1][torch.randperm(len(d[1]), generator=torch.Generator().manual_seed(0))]),
        checks=(*SCORE, *MOVES),
    ),
    "net: the next class, or the other sign": NetFault(data=next_class, checks=(*SCORE, *MOVES)),
    "net: the posterior of other rows": NetFault(others=True, checks=(*VIRIAL, *SCORE, *MOVES)),
    "net: draws rounded to one sd": NetFault(rounded),
    "net: one chain with noise as all": NetFault(jittered, checks=("copied_chains", *VIRIAL)),
    "net: a unit is cut off": NetFault(without_unit, beside=FAR),
    "net: output times 1.5": NetFault(stretched, checks=MOVES, beside=FAR),
    "net: log-likelihood times three": NetFault(tree=times_three, checks=("log_likelihood",)),
    "net: one chain's function 1 sd away": NetFault(chain_away, checks=RHAT),
    "net: a tenth of the functions of the other sign": NetFault(other_sign, checks=(*VIRIAL, *MOVES)),
    "net: every weight sorted": NetFault(in_order, checks=RHAT),
    "net: half of the draws at the likeliest": NetFault(at_one_point, checks=("repeated_draws", *VIRIAL)),
    "net: a prior that leaves classes unsure": NetFault(checks=("ece",), nets=UNSURE),
    "net: SWAG at a large rate": NetFault(
        checks=MOVES, beside=WIDTH, fit=fast_swag, nets=("diabetes_10", "iris_5", "gap_5")
    ),
}


def cases(healthy: int, sick: int, lengths: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str, str, int]]:
    """Kind, net, length and number of each case, of `healthy` and `sick` groups of chains of every net.

    A fault is put into one length at a time, healthy chains are judged at every length; in an order at random, so
    that a study that is stopped has some of each, but for what needs a fit of its own, which comes last.
    """
    known = [name for name in NETS if name in pb.references.names()]
    found = [(HEALTHY, *each) for each in itertools.product(known, lengths, range(healthy))]
    for index, (kind, fault) in enumerate(FAULTS.items()):
        for place, name in enumerate(fault.nets or known):
            for n in range(sick):
                at = 0 if fault.fit is not None else (index + place + n) % len(lengths)  # what is fitted is short
                found.append((kind, name, list(lengths)[at], n))
    random.Random(0).shuffle(found)
    yield from sorted(found, key=lambda case: FAULTS.get(case[0], NetFault()).fit is not None)


def run(kind: str, name: str, length: str, number: int, num_draws: int) -> Iterator[dict[str, object]]:
    """Two rows: the verdict without a reference, and beside it with the checks that this adds."""
    found, fault = reference(name), FAULTS.get(kind, NetFault())
    data = found.data.x, found.data.y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = group(name, number, num_draws) if fault.fit is None else fault.fit(name, number)
        if fault.draws is not None:
            posterior = fault.draws(posterior, found)
        own = posterior.to_datatree(*data)
        train = (found.held_out.x, found.held_out.y) if fault.others else data
        train = train if fault.data is None else fault.data(train)
        tree = posterior.to_datatree(*train, test=data if fault.others else (found.held_out.x, found.held_out.y))
        if fault.tree is not None:
            fault.tree(tree)
        evidence = Evidence.of(tree)  # what it finds is found once
        known: set[str] = set()
        for against in (False, True):
            verdict = pb.diagnose(evidence, reference=found.to_datatree() if against else None)
            audit = () if against else pb.audit(evidence).checks
            yield {
                "healthy": kind == HEALTHY,
                "kind": kind + (", beside its reference" if against else ""),
                "length": length,
                "seed": [name, number],
                "for": list(fault.beside if against else fault.checks),
                "status": verdict.status,
                "draws": verdict.draws,
                "model": verdict.model,
                "distance": None if fault.data is not None or fault.others else _distance(own, found),
                "checks": {c.name: [c.status, c.value] for c in (*verdict.checks, *audit) if c.name not in known},
            }
            known = {check.name for check in verdict.checks}  # counted once


def _distance(tree: xr.DataTree, found: Reference) -> float:
    """Mean 1-Wasserstein distance of the function at the probes, in sd of the reference."""
    return round(float(fidelity(tree, found.to_datatree()).per_point["wasserstein"].mean()), 4)
