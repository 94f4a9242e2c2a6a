"""A rehearsal: how often a method's intervals hold the truth in worlds like the data, where the truth is known."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused, as_tensor, check_count, check_finite, check_type
from pyrobnn.core.workers import executor_of, outcomes
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import FitRun, Method, check_method
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.point_methods import MAP, MLE, DeepEnsemble
from pyrobnn.inference.svi import SVI
from pyrobnn.model import BNN, check_data
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.probes import probes
from pyrobnn.studies.sbc import fit_batch

_REGIONS = {
    "train": "near data",
    "between": "gap",
    "outside": "outside",
}
_LEVELS = (0.5, 0.9)
#: quantity → level → whether the interval held the truth, (point, out)
Covered = dict[str, dict[float, Tensor]]


@dataclass(frozen=True)
class Coverage:
    """How often one kind of interval held the truth.

    Attributes: ``quantity``, ``"function"`` or ``"new rows"``; ``region``; ``level``, what the interval promises;
        ``share``, what it held, of all worlds, points and outputs; ``error``, its jackknife standard error over worlds;
        ``verdict``, ``"ok"``, or ``"too narrow"`` or ``"too wide"`` where share and level are three standard errors
        apart, the larger of ``error`` and that of one interval a world.
    """

    quantity: str
    region: str
    level: float
    share: float
    error: float
    verdict: str


@dataclass(frozen=True)
class Rehearsal:
    """Coverage of a method's intervals over rehearsed worlds, as :func:`rehearse` returns it.

    Attributes: ``method``; ``num_worlds``; ``worlds``, the method whose draws they are; ``coverage``, a row for each
        quantity, region and level; ``fit_seconds`` of the first fit, ``seconds`` of all refits.
    """

    method: str
    num_worlds: int
    worlds: str
    coverage: tuple[Coverage, ...]
    fit_seconds: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no 90 % interval was found too narrow or too wide."""
        return all(row.verdict == "ok" for row in self.coverage if row.level == 0.9)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [
            f"On data like yours, in {self.num_worlds} worlds of {self.worlds}, intervals of {self.method} held:"
        ]
        for row in self.coverage:
            where = f"{row.quantity}, {row.region}"
            share = f"{row.share:4.0%} ± {row.error:.0%}"
            lines.append(f"  {where:<22} {row.level:.0%} interval  {share:<12} {row.verdict}")
        return "\n".join(lines)


def rehearse(
    method: Method,
    model: BNN,
    x: Tensor,
    y: Tensor,
    *,
    num_worlds: int = 100,
    num_draws: int | None = None,
    worlds: Posterior | None = None,
    regions: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    workers: Executor | int | None = None,
) -> Rehearsal:
    r"""Whether a method's intervals hold what they promise on data like these: posterior simulation-based calibration.

    .. math:: \theta_w \sim p(\theta \mid y), \quad y_w \sim p(y \mid \theta_w, x), \quad
        q_w \approx p(\theta \mid y, y_w), \qquad P\big(f_{\theta_w}(x^*) \in I_{90\%}(q_w)\big) = 0.9

    A world's truth is a draw of the posterior. It makes targets of its own at ``x``, the method is fitted to those
    beside the observed ones, and its central intervals of the function and of new rows are held against the truth. For
    the exact posterior the equation holds whatever the data, since observed and simulated rows are both conditioned on.

    Args:
        method: any method. Without mini-batches MLE, MAP (not polished), ensembles and mean-field SVI fit all worlds in
            one search, Laplace where that ends at the modes, NUTS with ``num_warmup`` as chains of one machine, with
            one step size and metric; the others refit one after the other, by code that is compiled once.
        model: a BNN.
        x, y: data (N, …), (N, out) or labels (N,), in their own units.
        num_worlds: refits.
        num_draws: of each fit; default the method's own.
        worlds: where truths come from: a better posterior of the same model and data than the method's own. Default: an
            exact method's own; else a minute of NUTS, and the method's own where its chains did not agree by then, or
            where point parameters are learned.
        regions: name → points (point, …) where intervals are judged; default ``"near data"``, ``"gap"`` (in one
            dimension the widest; else between neighbours) and ``"outside"``.
        seed: of worlds and fits.
        workers: a number of processes, or an executor, that refit the worlds of a method that refits one after the
            other, to the same result; those that are fitted in one search stay here.

    Caveat: a method that is blind to a part of the posterior draws its own worlds without that part, and may hold
    there what it promises: ``worlds`` of the result says whose they are. Worlds that the model excludes are not judged.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = pb.BNN(torch.nn.Linear(1, 1), pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        ...                pb.likelihoods.HomoskedasticGaussian(0.3))
        >>> exact = pb.Laplace(num_steps=100, compile=False).fit(model, x, 2 * x)
        >>> mle = pb.MLE(num_steps=50, compile=False)
        >>> pb.rehearse(mle, model, x, 2 * x, num_worlds=10, worlds=exact).ok  # a point has no width
        False

    Reference: `Posterior SBC: Simulation-Based Calibration Checking Conditional on Data (Säilynoja et al., 2025)
    <https://arxiv.org/abs/2502.03279>`_.
    """
    _check_arguments(method, model, num_worlds, worlds, regions)
    check_data(model, x, y, model.device)
    x = model.rows(x)
    y = model.likelihood.targets.read(y)
    points_by_region = _checked_regions(_regions(x) if regions is None else regions, x)
    started = time.perf_counter()
    first_fit = method.fit(
        model,
        x,
        y,
        num_draws=num_draws,
        seed=seed,
    )
    fit_seconds = time.perf_counter() - started
    truth_source = worlds or _truth_source(method, first_fit, x, y, seed)
    truths = _truths(truth_source, num_worlds, seed)
    draws_per_fit = method.default_draws if num_draws is None else num_draws
    points = torch.cat([*points_by_region.values()])
    started = time.perf_counter()
    doubled_x = torch.cat([x, x])
    ys = _targets(model, y, x, truths, seed + 1)
    if _refits_singly(method):
        refit_world = _Refit(method, model, doubled_x, ys, truths, draws_per_fit, points, seed)
        covered = _covered_by(refit_world, workers)
    else:
        refits = _refits_together(method, model, doubled_x, ys, draws_per_fit, seed + 1)
        covered = [_covered(truths[i], refit, points, seed + i) for i, refit in enumerate(refits)]
    seconds = time.perf_counter() - started
    return Rehearsal(
        method=type(method).__name__,
        num_worlds=num_worlds,
        worlds=truth_source.meta.get("method", "a posterior"),
        coverage=_coverages(covered, points_by_region),
        fit_seconds=fit_seconds,
        seconds=seconds,
    )


def _check_arguments(
    method: Method,
    model: BNN,
    num_worlds: int,
    worlds: Posterior | None,
    regions: Mapping[str, Tensor] | None,
) -> None:
    check_count("num_worlds", num_worlds, minimum=2)
    check_method(method)
    check_type("model", model, BNN, "a pyrobnn.BNN, whose function and new rows are rehearsed")
    check_type("worlds", worlds, Posterior | None, "a Posterior")
    check_type("regions", regions, Mapping | None, "a dict of points by name")


def _regions(x: Tensor) -> dict[str, Tensor]:
    """Points near the data, in the gaps between them and outside."""
    points, kinds = probes(x)
    regions = {}
    for kind, name in _REGIONS.items():
        rows = [index for index, kind_of_point in enumerate(kinds) if kind_of_point == kind]
        if rows:
            regions[name] = points[rows]
    if "gap" in regions and x.shape[1] == 1:
        ordered = x[:, 0].sort().values
        widest = int((ordered[1:] - ordered[:-1]).argmax())
        steps = torch.linspace(0, 1, 7, dtype=x.dtype)[1:-1, None]
        regions["gap"] = ordered[widest] + steps * (ordered[widest + 1] - ordered[widest])
    return regions


def _checked_regions(regions: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The points of each region (point, …)."""
    points_by_region = {name: as_tensor("regions", points) for name, points in regions.items()}
    for name, points in points_by_region.items():
        check_finite(f"regions[{name!r}]", points)
    wrong = [name for name, points in points_by_region.items() if points.shape[1:] != x.shape[1:]]
    empty = [name for name, points in points_by_region.items() if not len(points)]
    if not points_by_region or wrong or empty:
        raise ValueError(
            f"'regions' must map names to points of shape (point, {x.shape[1:].numel()}), one at least"
        )
    return points_by_region


def _truths(truth_source: Posterior, num_worlds: int, seed: int) -> list[Posterior]:
    """The draws that are the truths of the worlds, in random order; again from the first where there are too few."""
    total = truth_source.num_chains * truth_source.num_draws
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return [_one_draw(truth_source, int(order[world % total])) for world in range(num_worlds)]


def _one_draw(posterior: Posterior, index: int) -> Posterior:
    """A posterior of one of the draws."""
    chain, draw = divmod(index, posterior.num_draws)
    draws = {name: value[chain, draw][None, None] for name, value in posterior.draws.items()}
    return Posterior(
        posterior.model,
        draws,
        network=posterior.network,
        meta=posterior.meta,
    )


def _truth_source(
    method: Method,
    first_fit: Posterior,
    x: Tensor,
    y: Tensor,
    seed: int,
) -> Posterior:
    """Where truths come from: the posterior itself of an exact method or NUTS's; else the method's own."""
    if method.claim == "exact" or first_fit.meta["point_sites"]:
        return first_fit
    nuts = NUTS(
        until="converged",
        max_seconds=60.0,
        compile=getattr(method, "compile", True),
    )
    with contextlib.suppress(Refused), warnings.catch_warnings(action="ignore"):
        chains = nuts.fit(
            first_fit.bnn,
            x,
            y,
            num_draws=2000,
            seed=seed,
        )
        # chains that mix this badly still cover more than the one mode of the method, and make better truths
        if chains.meta["convergence"]["rhat"] < 1.1:
            return chains
    return first_fit


def _targets(
    model: BNN,
    y: Tensor,
    x: Tensor,
    truths: list[Posterior],
    seed: int,
) -> list[Tensor]:
    """The observed targets and those of each world behind them, each (2 N, …)."""
    targets = model.likelihood.targets
    y = y if targets.kind == "label" or y.dim() > 1 else y[:, None]
    ys = []
    for world, truth in enumerate(truths):
        simulated = targets.observed(truth.predict(x).sample(seed=seed + world)[0, 0])
        ys.append(torch.cat([y, simulated.to(y)]))
    return ys


@dataclass(frozen=True, eq=False)
class _Refit:
    """The refit of a world by its number, and whether its intervals hold the truth; a worker may do it."""

    method: Method
    model: BNN
    x: Tensor
    ys: Sequence[Tensor]
    truths: Sequence[Posterior]
    num_draws: int
    points: Tensor
    seed: int

    def __call__(self, number: int) -> Covered:
        with warnings.catch_warnings(action="ignore"):  # the first fit has said it
            refit = self.method.fit(
                self.model,
                self.x,
                self.ys[number],
                num_draws=self.num_draws,
                seed=self.seed + 1 + number,
            )
        return _covered(self.truths[number], refit, self.points, self.seed + number)


def _covered_by(refit: _Refit, workers: Executor | int | None) -> list[Covered]:
    """What the intervals of each world hold, by a refit of each, here or on the workers."""
    numbers = range(len(refit.ys))
    if workers is None:
        return [refit(number) for number in numbers]
    covered = []
    with executor_of(workers) as executor:
        for _, outcome in outcomes(executor, refit, numbers):
            if isinstance(outcome, BaseException):
                raise outcome
            covered.append(outcome)
    return covered


def _refits_singly(method: Method) -> bool:
    """Whether every world has a fit of its own."""
    return not (isinstance(method, NUTS) and method.num_warmup) and not _searches_together(method)


def _refits_together(
    method: Method,
    model: BNN,
    x: Tensor,
    ys: list[Tensor],
    num_draws: int,
    seed: int,
) -> Iterator[Posterior]:
    """The posterior of each world, given its rows and those observed: of all by one run of chains, or in one search."""
    with warnings.catch_warnings(action="ignore"):  # the first fit has said it
        if isinstance(method, NUTS) and method.num_warmup:
            yield from fit_batch(
                method,
                model,
                x,
                ys,
                num_draws=num_draws,
                seed=seed,
            )
        else:
            yield from _common_search(method, model, x, ys, num_draws, seed)


def _search_of(method: Method) -> Any:
    """What looks for the points of a method that has any."""
    return method.search if isinstance(method, Laplace) else method


def _searches_together(method: Method) -> bool:
    """Whether one search can look for the points of all worlds."""
    search = _search_of(method)
    mean_field = isinstance(search, SVI) and search.options.family == "mean_field"
    points = isinstance(search, MLE | MAP | DeepEnsemble)
    return (mean_field or points) and search.batch_size is None


def _common_search(
    method: Method,
    model: BNN,
    x: Tensor,
    ys: list[Tensor],
    num_draws: int,
    seed: int,
) -> Iterator[Posterior]:
    """The posterior of each world from one search; of Laplace, which begins where that ended, from a fit of its own."""
    problem = prepare(model, x, ys[0], points=method.points)
    stacked = torch.stack([check_data(model, x, y, problem.device)[1] for y in ys])
    search = _search_of(method)
    for world, posterior in enumerate(search.fit_each(problem, stacked, FitRun(num_draws, seed))):
        if search is not method:
            options: dict[str, Any] = {"num_draws": num_draws, "seed": seed + world}
            posterior = method.fit(
                model,
                x,
                ys[world],
                init=posterior,
                **options,
            )
            # a mode that the common search did not reach is not the method's fault
            if "not_a_mode" in {finding["code"] for finding in posterior.meta["findings"]}:
                posterior = method.fit(model, x, ys[world], **options)
        yield posterior


def _covered(
    truth: Posterior,
    fitted: Posterior,
    points: Tensor,
    seed: int,
) -> Covered:
    """Whether the intervals of the function and of new rows hold the truth of a world."""
    true = truth.predict(points)
    prediction = fitted.predict(points)
    f = prediction.f.double().flatten(0, 1)
    target = true.f.double()[0, 0]
    observed = prediction.likelihood.targets.observed
    if prediction.likelihood.targets.kind == "label":  # what logits have in common says nothing
        f = f - f.mean(-1, keepdim=True)
        target = target - target.mean(-1, keepdim=True)
    pit = prediction.pit(observed(true.sample(seed=seed)[0, 0]), seed=seed)
    function = {}
    new_rows = {}
    for level in _LEVELS:
        tails = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=f.dtype)
        low, high = f.quantile(tails, 0)
        function[level] = (low <= target) & (target <= high)
        new_rows[level] = (pit - 0.5).abs() <= level / 2
    return {"function": function, "new rows": new_rows}


def _coverages(
    covered: Sequence[Covered], points_by_region: Mapping[str, Tensor]
) -> tuple[Coverage, ...]:
    """One for each quantity, region and level."""
    sizes = [len(points) for points in points_by_region.values()]
    rows = []
    for quantity in ("function", "new rows"):
        regions_at_level: dict[float, tuple[Tensor, ...]] = {}
        for level in _LEVELS:
            of_worlds = torch.stack([world[quantity][level] for world in covered])
            regions_at_level[level] = of_worlds.split(sizes, 1)
        for index, region in enumerate(points_by_region):
            for level in _LEVELS:
                rows.append(_coverage(quantity, region, level, regions_at_level[level][index]))
    return tuple(rows)


def _coverage(
    quantity: str,
    region: str,
    level: float,
    covered: Tensor,
) -> Coverage:
    """Of intervals that held the truth or not, (world, point, out); points of one world depend on each other."""
    by_world = covered.double().flatten(1).mean(1)
    share = float(by_world.mean())
    error = float(by_world.std()) / len(covered) ** 0.5
    limit = 3 * max(error, (level * (1 - level) / len(covered)) ** 0.5)
    verdict = "ok"
    if share < level - limit:
        verdict = "too narrow"
    elif share > level + limit:
        verdict = "too wide"
    return Coverage(quantity, region, level, share, error, verdict)
