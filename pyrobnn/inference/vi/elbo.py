r"""The evidence lower bound of a Pyro program under a guide, as a pure function of flat parameters.

.. math:: \mathrm{ELBO} = E_q[\log p(y \mid \theta)] - KL(q \| p)

Of the direction ``"forward"`` it is :math:`KL(p \| q)` in the place of that, which bounds nothing.
The program's sites are read from one trace of it at a draw of the guide. Where guide and prior are both normal the
cross entropy :math:`-E_q[\log p(\theta)]` has a closed form; elsewhere it is the value at the draw.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import generator, kept, seeded
from pyrobnn.inference.fitting.batches import row_parts
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.fitting.watch import Watch
from pyrobnn.inference.vi.families import Draw, Family, Moments
from pyrobnn.inference.vi.forward_kl import FromPrior
from pyrobnn.inference.vi.local_noise import Estimator, LocalNoise
from pyrobnn.model.density import Density, is_identity
from pyrobnn.model.distribution_kinds import elementwise, is_normal
from pyrobnn.model.gradient import at_each
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import Node, is_observed, is_subsample
from pyrobnn.posterior.approximation import Approximation
from pyrobnn.posterior.prediction import widest_layer

#: the ELBO is averaged until its standard error is this small (nats), within a number of draws
_ELBO_ERROR = 0.02
_MAX_ELBO_DRAWS = 4096

KLDirection = Literal["reverse", "forward"]

TRACKED = ("elbo", "kl", "log_likelihood", "kl_weight")


class Elbo:
    """``elbo(theta, kl_weight, key, *args) -> (loss, [elbo, kl, log_likelihood, kl_weight])``, everything in nats.

    The loss is KL weight times KL minus log likelihood; the reported ELBO is always the one of weight one. ``key``, an
    int64 scalar, is what all that is drawn depends on, but for draws of a Pyro guide or program that are not normal.

    Args:
        density: the model; ``theta`` is the guide's parameters followed by the free point parameters.
        family: the guide.
        kl: ``"closed_form"`` where there is one, ``"monte_carlo"`` throughout, or ``"auto"``: closed for independent
            weights, Monte Carlo for correlated ones, where it has the lower variance.
        estimator: None, ``"local_reparameterization"`` or ``"flipout"`` (factorised normal guides only).
        num_particles: draws averaged.
        kl_direction: ``"reverse"``, KL(q‖prior), of the bound; ``"forward"``, KL(prior‖q), of factorised normal guides.

    Raises:
        Refused: a forward KL of a guide, or from a prior, for which there is none.
    """

    def __init__(
        self,
        density: Density,
        family: Family,
        *,
        kl: Literal["auto", "closed_form", "monte_carlo"] = "auto",
        estimator: Estimator | None = None,
        num_particles: int = 1,
        kl_direction: KLDirection = "reverse",
    ):
        # the objective is noisy where the program subsamples; the sites' layout is the same
        self.density = density.subsampled()
        self.family = family
        self.estimator = estimator
        self.num_particles = num_particles
        self.latent = tuple(site for site in density.sites if site.kind == "latent")
        any_key = torch.zeros(
            (),
            dtype=torch.int64,
            device=density.device,
        )
        with seeded(0, density.device), torch.no_grad():
            gaussian = family.draw(family.initial(), Noise(any_key)).moments is not None
            wanted = kl == "closed_form" or (kl == "auto" and family.factorized)
            self.exact_entropy = wanted and gaussian
            self.closed: frozenset[str] = frozenset()
            self.constant: frozenset[str] = frozenset()
            if self.exact_entropy:
                self.closed, self.constant = self._closed_sites()
            self.from_prior: FromPrior | None = None
            if kl_direction == "forward":
                if not (gaussian and family.factorized):
                    raise Refused(
                        "kl_direction='forward' needs a guide of independent normals: use guide='mean_field' or "
                        "AutoNormal"
                    )
                closed = frozenset() if kl == "monte_carlo" else self._closed_sites()[1]
                self.from_prior = FromPrior(density, self.latent, closed)

    @property
    def exact_kl(self) -> bool:
        """Whether the KL has no noise: every site's cross entropy is in closed form and the same at every draw."""
        return self.exact_entropy and len(self.constant) == len(self.latent)

    def __call__(
        self,
        theta: Tensor,
        kl_weight: Tensor,
        key: Tensor,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        log_likelihood, kl = self.parts(theta, key, *args)
        loss = kl_weight * kl - log_likelihood
        return loss, torch.stack(
            [log_likelihood - kl, kl, log_likelihood, kl_weight + torch.zeros_like(kl)]
        )

    def parts(self, theta: Tensor, key: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates of the expected log likelihood of the whole data set and of the KL, float64 scalars."""
        phi = theta[: self.family.size]
        points = theta[self.family.size :]

        def particle(key: Tensor) -> tuple[Tensor, Tensor]:
            noise = Noise(key)
            draw = self.family.draw(phi, noise)
            log_likelihood, cross = self._terms(
                noise, torch.cat([draw.z, points]), draw.moments, *args
            )
            if self.from_prior is not None:
                return log_likelihood, cross
            if self.exact_entropy and draw.moments is not None:
                entropy = draw.moments.entropy
            else:
                entropy = -_path_log_q(draw)
            return log_likelihood, cross - entropy

        if self.num_particles == 1:
            return particle(key)
        keys = Noise(key).split(self.num_particles)
        log_likelihood, kl = torch.func.vmap(particle, randomness="different")(keys)
        return log_likelihood.mean(), kl.mean()

    def _terms(
        self,
        noise: Noise,
        z: Tensor,
        moments: Moments | None,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log likelihood at a draw, and the cross entropy to the prior, of whose sites some are in closed form.

        Of a forward KL the second is that KL itself.
        """
        values = self.density.constrain(z)
        site_moments = self._site_moments(moments)
        inside: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.estimator is not None:
            plain = [site.name for site in self.latent if is_identity(site.transform)]
            inside = LocalNoise(
                [(values[name], *site_moments[name]) for name in plain], self.estimator, noise
            )
        with inside:
            nodes = self.density.trace(values, args)
        cross = z.new_zeros((), dtype=torch.float64)
        log_likelihood = z.new_zeros((), dtype=torch.float64)
        for name, node in nodes.items():
            if node["type"] != "sample" or is_subsample(node):
                continue
            if is_observed(node):
                log_likelihood = log_likelihood + log_prob_sum(node)
            elif self.from_prior is not None:
                cross = cross + self.from_prior.divergence(node, *site_moments[name])
            elif name in self.closed:
                cross = cross + _normal_cross_entropy(node, *site_moments[name])
            else:
                log_jacobian = self.density.log_jacobian(z, self.density.site(name))
                cross = cross - log_prob_sum(node) - log_jacobian
        return log_likelihood, cross

    def _site_moments(self, moments: Moments | None) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and variance of every latent site in unconstrained space; empty where the guide has none."""
        if moments is None:
            return {}
        # one split, whose gradient is one concatenation: that of a slice is a whole vector for every site
        sizes = [site.stop - site.start for site in self.latent]
        means = moments[0].split(sizes)
        variances = moments[1].split(sizes)
        return {
            site.name: (
                mean.reshape(site.unconstrained_shape),
                var.reshape(site.unconstrained_shape),
            )
            for site, mean, var in zip(self.latent, means, variances)
        }

    def _closed_sites(self) -> tuple[frozenset[str], frozenset[str]]:
        """Sites of normal prior under a Gaussian guide, and those among them whose prior is the same at every draw.

        A prior that depends on other sites (a hierarchy) has its closed form given *their* draw, which is right only
        when the guide's coordinates are independent.
        """
        priors, priors_elsewhere = (self._priors(z) for z in self.density.sample_prior(2, seed=0))
        normal = priors.keys() & priors_elsewhere.keys()
        constant = frozenset(
            name for name in normal if all(map(torch.equal, priors[name], priors_elsewhere[name]))
        )
        closed = frozenset(normal) if self.family.factorized else constant
        return closed, constant

    def _priors(self, z: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Location and scale of every site with a plain normal prior at ``z``."""
        nodes = self.density.trace(self.density.constrain(z))
        normals = {}
        for site in self.latent:
            node = nodes[site.name]
            prior = elementwise(node["fn"])
            unmasked = node["mask"] is None or node["mask"] is True
            if is_normal(prior) and unmasked and is_identity(site.transform):
                normals[site.name] = prior.loc, prior.scale
        return normals


def _path_log_q(draw: Draw) -> Tensor:
    """log q of the draw with the gradient along its path alone (Roeder, Wu & Duvenaud, 2017).

    The other part of the gradient has mean zero; without it the noise vanishes as q approaches the posterior.
    """
    if draw.score is None:
        return draw.log_q
    return draw.log_q.detach() + (draw.score * (draw.z - draw.z.detach())).sum()


def _normal_cross_entropy(node: Node, mean: Tensor, var: Tensor) -> Tensor:
    r""":math:`-E_q[\log N(\theta; m, s^2)] = \log s + \frac{(\mu - m)^2 + \sigma^2}{2 s^2} + \frac12 \log 2\pi`."""
    prior = elementwise(node["fn"])
    terms = ((mean - prior.loc).square() + var) / (2 * prior.scale.square()) + prior.scale.log()
    total = (terms + 0.5 * math.log(2 * math.pi)).expand(node["value"].shape)
    one_factor_per_event = isinstance(node["scale"], Tensor) and node["scale"].dim() > 0
    event_dim = node["fn"].event_dim
    if one_factor_per_event and event_dim:
        total = total.flatten(total.dim() - event_dim).sum(-1)
    return (total * node["scale"]).sum(dtype=torch.float64)


def draws_per_block(num_weights: int) -> int:
    """Draws evaluated at once: 256 of a small net (2^22 numbers), where calls cost most, else 64 (2^26 numbers)."""
    return max(1, min(256, 2**22 // num_weights), min(64, 2**26 // num_weights))


@torch.no_grad()
def evaluate_elbo(
    problem: Problem,
    layout: Density,
    approximation: Approximation,
    elbo: Elbo,
    theta: Tensor,
    work: Work | None = None,
) -> tuple[float, float]:
    """The ELBO of weight one on the whole data, and its standard error, in nats.

    The KL is taken in closed form where it is exact, else at the same draws as the likelihood. Where 64 draws of all
    rows are much, they take no more than a tenth of the training's ``work``: fewer draws, and where not even 16 passes
    over the data are left, draws that see some of the rows each.
    """
    is_much = 64 * problem.num_rows * layout.dim > 2**31
    if work is not None and problem.is_bnn and is_much and work.passes(problem.num_rows) < 64:
        with _bar(work) as watch:
            return _evaluate_within(problem, layout, approximation, elbo, theta, work, watch)
    max_draws = max(16, min(_MAX_ELBO_DRAWS, 2**31 // max(problem.num_rows * layout.dim, 1)))
    exact = elbo.exact_kl
    values = torch.empty(
        0,
        dtype=torch.float64,
        device=theta.device,
    )
    kl = _exact_kl(problem, elbo, theta)
    while len(values) < max_draws:
        block = min(draws_per_block(layout.dim), max(64, max_draws - len(values)))
        z = layout.unconstrain(approximation.sample(block))
        log_prior, block_values = log_parts(problem, layout, z)
        if not exact:
            log_q = approximation.log_prob(layout.constrain(z)).double()
            block_values = block_values + log_prior - log_q
        values = torch.cat([values, block_values])
        error = float(values.std()) / math.sqrt(len(values))
        if len(values) >= 256 and error < _ELBO_ERROR:
            break
    return float(values.mean()) - kl, error


@dataclass(frozen=True)
class Work:
    """What a training has done: ``num_rows`` that it sent through the net, ``batch_size`` of them at once.

    ``progress``: whether to show a bar for what follows it.
    """

    num_rows: int
    batch_size: int
    progress: bool = False

    @property
    def allowed_rows(self) -> int:
        """Rows that take a tenth of its time: a gradient costs three passes of the net."""
        return 3 * self.num_rows // 10

    def passes(self, num_rows: int) -> int:
        """Passes over data of so many rows that take a tenth of its time."""
        return self.allowed_rows // max(num_rows, 1)


def _bar(work: Work) -> AbstractContextManager[Watch]:
    """The bar over what follows a training, in percent."""
    return Watch(
        100,
        "SVI: its ELBO on all data",
        (),
        work.progress,
        finished="evaluated",
        metrics=(),
    )


def _exact_kl(problem: Problem, elbo: Elbo, theta: Tensor) -> float:
    """The KL where it depends on no draw, else 0; of a net by two rows, for the likelihood is not asked for."""
    if not elbo.exact_kl:
        return 0.0
    no_key = torch.zeros(
        (),
        dtype=torch.int64,
        device=theta.device,
    )
    data = (problem.x[:2], problem.y[:2]) if problem.is_bnn else ()
    return float(elbo.parts(theta, no_key, *data)[1])


def _evaluate_within(
    problem: Problem,
    layout: Density,
    approximation: Approximation,
    elbo: Elbo,
    theta: Tensor,
    work: Work,
    watch: Watch,
) -> tuple[float, float]:
    r"""As :func:`evaluate_elbo`, within a tenth of the training's work.

    Two draws at each of B batches: with the variance w of two draws at one batch, v of the batches' means, and the
    share s of all rows that was seen, the squared error is :math:`w / 2B + (1 - s)\, v / B`.
    """
    num_pairs = max(8, work.allowed_rows // (2 * work.batch_size))
    pairs = []
    num_seen = 0
    for x, y in itertools.islice(_some_batches(problem, work.batch_size), num_pairs):
        z = layout.unconstrain(approximation.sample(2))
        values = _scaled_likelihood(problem, layout, z, x, y)
        if not elbo.exact_kl:
            log_prior = at_each(lambda draw: layout.log_parts(draw, x[:2], y[:2])[0], z)  # noqa: B023
            log_q = approximation.log_prob(layout.constrain(z)).double()
            values = values + log_prior - log_q
        pairs.append(values)
        num_seen += len(x)
        if watch.active:
            watch.tell(min(99, 100 * len(pairs) // num_pairs), {})
    if watch.active:
        watch.tell(100, {})
    terms = torch.stack(pairs)
    of_draws = float(terms.var(1).mean()) / (2 * len(terms))
    of_rows = float(terms.mean(1).var()) / len(terms) if len(terms) > 1 else math.nan
    unseen = max(0.0, 1.0 - num_seen / problem.num_rows)
    error = math.sqrt(of_draws + unseen * of_rows)
    return float(terms.mean()) - _exact_kl(problem, elbo, theta), error


def _some_batches(problem: Problem, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Batches of one epoch after another; rows in memory in the same order at every call, to compare guides by."""
    if problem.loader is not None:
        yield from problem.batches()
        return
    random = generator(0)
    while True:
        order = torch.randperm(problem.num_rows, generator=random).to(problem.device)
        for rows in order.split(size):
            if len(rows) == size or size > problem.num_rows:
                yield problem.x[rows], problem.y[rows]


def _scaled_likelihood(
    problem: Problem,
    layout: Density,
    z: Tensor,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """Log likelihood (draws,) of a batch, scaled to all rows; draw by draw, as in a step of the training."""

    def log_likelihood_at(draw: Tensor) -> Tensor:
        return layout.log_likelihood(draw, x, y).sum(dtype=torch.float64)

    return at_each(log_likelihood_at, z, at_once=1) * (problem.num_rows / len(x))


def log_parts(problem: Problem, layout: Density, z: Tensor) -> tuple[Tensor, Tensor]:
    """Log prior and log likelihood, (draws,), of the whole data, streamed; masks and factors as in the log joint.

    In blocks of draws, and of a net whose layers are wide in blocks of rows too.
    """
    # one block holds about 2^24 outputs of the widest layer
    has_rows = isinstance(problem.x, Tensor) and problem.x.dim() > 0
    per_row = 64
    if problem.is_bnn:
        per_row = max(64, widest_layer(problem.bnn, problem.x[:2]))
    per_draw = max(1, len(problem.x) * per_row) if has_rows else 1
    block = max(1, min(draws_per_block(layout.dim), 2**24 // per_draw))
    if problem.loader is None and problem.is_bnn and per_draw > 2**24:
        return _parts_by_rows(problem, layout, z, max(1, 2**22 // per_row))
    log_prior, log_likelihood = at_each(layout.log_parts, z, at_once=block)
    if problem.loader is None:
        return log_prior, log_likelihood

    def batched(x: Tensor, y: Tensor) -> Tensor:
        # log_parts would scale every batch to the whole data set
        def log_likelihood_at(draw: Tensor) -> Tensor:
            return layout.log_likelihood(draw, x, y).sum(dtype=torch.float64)

        return at_each(log_likelihood_at, z, at_once=block)

    value = torch.zeros(
        len(z),
        dtype=torch.float64,
        device=problem.device,
    )
    num_rows = 0
    for x, y in problem.one_pass():
        value = value + batched(x, y)
        num_rows = num_rows + len(x)
    # a pass need not show all N data, nor each of them once
    return log_prior, value * (problem.num_rows / num_rows)


def _parts_of_rows(
    layout: Density,
    x: Tensor,
    y: Tensor,
    draw: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log prior and log likelihood of one draw on some rows."""
    return layout.log_parts(draw, x, y)


def _parts_by_rows(
    problem: Problem,
    layout: Density,
    z: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Log prior and log likelihood (draws,), a draw and ``size`` rows at a time."""
    log_prior = z.new_zeros(len(z), dtype=torch.float64)
    log_likelihood = torch.zeros_like(log_prior)
    for x, y in zip(
        row_parts(problem.x, size),
        row_parts(problem.y, size),
        strict=True,
    ):
        of_rows = partial(_parts_of_rows, layout, x, y)
        log_prior, scaled = at_each(of_rows, z, at_once=1)
        # the program scales the likelihood of its rows to all of them
        log_likelihood = log_likelihood + scaled * (len(x) / len(problem.x))
    return log_prior, log_likelihood


@torch.no_grad()
def importance_stats(
    problem: Problem,
    layout: Density,
    approximation: Approximation,
    draws: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """log p and log q of the draws in constrained space, both (1, draw)."""
    z = layout.unconstrain({site.name: draws[site.name] for site in layout.sites})
    with kept(problem.device):  # a loader draws its order
        log_prior, log_likelihood = log_parts(problem, layout, z[0])
    return {
        "log_p": (log_prior + log_likelihood)[None],
        "log_q": approximation.log_prob(draws).double(),
    }


def elbo_findings(value: float, error: float, track: Tensor | None) -> list[Finding]:
    """A finding where the ELBO is not a number, or lies below what the fit had on the way.

    ``track`` is the noisy ELBO of every step, None of a tempered fit, whose end is not its best. What the fit surely
    had is the best mean of a twentieth of the steps less five standard errors. The last iterate is one step: it may lie
    the spread of single steps below, and a nat does not matter.
    """
    values = {"elbo": value, "error": error}
    if not (math.isfinite(value) and math.isfinite(error)):
        return [Finding("elbo_not_finite", values)]
    if track is None or len(track) < 20:
        return []
    width = max(20, len(track) // 20)
    windows = track[: len(track) - len(track) % width].double().reshape(-1, width)
    spreads = windows.std(1)
    reached = windows.mean(1) - 5.0 * spreads / math.sqrt(width)
    best = int(reached.argmax())
    if value + 5.0 * error < float(reached[best] - spreads[best]) - 1.0:
        return [Finding("elbo_below_best", values | {"best": float(reached[best])})]
    return []
