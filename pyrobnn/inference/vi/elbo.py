r"""The evidence lower bound of a Pyro program under a guide, as a pure function of flat parameters.

.. math:: \mathrm{ELBO} = E_q[\log p(y \mid \theta)] - KL(q \| p)

Of the direction ``"forward"`` it is :math:`KL(p \| q)` in the place of that, which bounds nothing.
The program's sites are read from one trace of it at a draw of the guide. Where guide and prior are both normal the
cross entropy :math:`-E_q[\log p(\theta)]` has a closed form; elsewhere it is the value at the draw.
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.rng import Noise
from pyrobnn.inference.vi.families import Draw, Family, Moments
from pyrobnn.inference.vi.forward_kl import FromPrior
from pyrobnn.inference.vi.local_noise import Estimator, LocalNoise
from pyrobnn.model.compile import repeats
from pyrobnn.model.density import Density, is_identity
from pyrobnn.model.distribution_kinds import elementwise, is_normal
from pyrobnn.model.gradient import as_one_of_several
from pyrobnn.model.log_terms import log_prob_sum
from pyrobnn.model.nodes import Node, is_observed, is_subsample

KLDirection = Literal["reverse", "forward"]
KLEstimate = Literal["auto", "closed_form", "monte_carlo"]

TRACKED = ("elbo", "kl", "log_likelihood", "kl_weight")


class ElboParts(NamedTuple):
    """Estimates of what the ELBO is the difference of, for the whole data set; float64 scalars."""

    log_likelihood: Tensor
    kl: Tensor


class _Terms(NamedTuple):
    """At a draw: the log likelihood, and the cross entropy to the prior, in place of which a forward KL has itself."""

    log_likelihood: Tensor
    cross: Tensor


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
        noise_rows: of a batch that is a share of one: the number of its first row, and the step to the next.

    Raises:
        Refused: a forward KL of a guide, or from a prior, for which there is none.
    """

    def __init__(
        self,
        density: Density,
        family: Family,
        *,
        kl: KLEstimate = "auto",
        estimator: Estimator | None = None,
        num_particles: int = 1,
        kl_direction: KLDirection = "reverse",
        noise_rows: tuple[int, int] = (0, 1),
    ):
        # the objective is noisy where the program subsamples; the sites' layout is the same. Where sites belong to rows
        # it is so at rows that are given, see `at_rows`
        self.density = density if density.local else density.subsampled()
        self.family = family
        self.estimator = estimator
        self.num_particles = num_particles
        self.noise_rows = noise_rows
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
            self._merged_terms = self._in_fewer_operations()

    def _in_fewer_operations(self) -> repeats.Function | None:
        """The terms (2,) at a draw and the guide's moments, in one vector, as the density in fewer operations has them.

        None where the density has as many as the program, or where noise acts inside.
        """
        density = self.density
        if not density.is_merged or self.estimator is not None or self.from_prior is not None:
            return None
        if not self.closed:
            return self._terms_at_draw
        z = torch.cat([density.sample_prior(1, seed=0), density.sample_box(2, seed=0)])
        means = z[:, : self._num_latent]
        points = torch.cat([z, means, means.sigmoid()], 1)
        return density.merged(self._terms_by_site, points)

    @property
    def _num_latent(self) -> int:
        """Scalars that the guide draws; point parameters follow them."""
        return sum(site.size for site in self.latent)

    def _terms_at_draw(self, flat: Tensor) -> Tensor:
        """The terms (2,) where no cross entropy is in closed form."""
        log_prior, log_likelihood, log_jacobian = self.density.log_terms(
            flat[: self.density.dim]
        ).unbind()
        return torch.stack([log_likelihood, -log_prior - log_jacobian])

    def _terms_by_site(self, flat: Tensor) -> Tensor:
        """The terms (2,) as a run of the program gives them."""
        z, means, variances = flat.split([self.density.dim, self._num_latent, self._num_latent])
        moments = Moments(means, variances, means.new_zeros(()))
        no_key = torch.zeros((), dtype=torch.int64, device=flat.device)
        return torch.stack(self._terms_of_run(Noise(no_key), z, moments))

    def at_rows(self, some: Density) -> Elbo:
        """Its estimate by some rows of the plates, :meth:`Density.at_rows`: a function of the same parameters."""
        estimate = copy.copy(self)
        estimate.density = some
        estimate._merged_terms = None
        estimate.latent = tuple(site for site in some.sites if site.kind == "latent")
        estimate.family = self.family.at_rows(self.density, some)
        return estimate

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
        if self.density.is_traced_alone([theta]):
            # what raises is told by the plain run: it branches on the values of its sites
            with contextlib.suppress(RuntimeError):
                return as_one_of_several(
                    lambda one: self._at(one, kl_weight, key, *args),
                    theta,
                )
        return self._at(theta, kl_weight, key, *args)

    def _at(
        self,
        theta: Tensor,
        kl_weight: Tensor,
        key: Tensor,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss and the tracked scalars at ``theta``."""
        log_likelihood, kl = self.parts(theta, key, *args)
        loss = kl_weight * kl - log_likelihood
        return loss, torch.stack(
            [log_likelihood - kl, kl, log_likelihood, kl_weight + torch.zeros_like(kl)]
        )

    def parts(self, theta: Tensor, key: Tensor, *args: Tensor) -> ElboParts:
        """Estimates of the expected log likelihood of the whole data set and of the KL, float64 scalars."""
        phi = theta[: self.family.size]
        points = theta[self.family.size :]

        def particle(key: Tensor) -> ElboParts:
            noise = Noise(key, self.noise_rows)
            draw = self.family.draw(phi, noise)
            log_likelihood, cross = self._terms(
                noise, torch.cat([draw.z, points]), draw.moments, *args
            )
            if self.from_prior is not None:
                return ElboParts(log_likelihood, cross)
            if self.exact_entropy and draw.moments is not None:
                entropy = draw.moments.entropy
            else:
                entropy = -_path_log_q(draw)
            return ElboParts(log_likelihood, cross - entropy)

        if self.num_particles == 1:
            return particle(key)
        keys = Noise(key).split(self.num_particles)
        log_likelihood, kl = torch.func.vmap(particle, randomness="different")(keys)
        return ElboParts(log_likelihood.mean(), kl.mean())

    def _terms(
        self,
        noise: Noise,
        z: Tensor,
        moments: Moments | None,
        *args: Tensor,
    ) -> _Terms:
        """The terms at a draw ``z``; of some sites the cross entropy is in closed form."""
        if self._merged_terms is None or args:
            return self._terms_of_run(noise, z, moments, *args)
        flat = z if moments is None else torch.cat([z, moments.mean, moments.var])
        return _Terms(*self._merged_terms(flat).unbind())

    def _terms_of_run(
        self,
        noise: Noise,
        z: Tensor,
        moments: Moments | None,
        *args: Tensor,
    ) -> _Terms:
        """As :meth:`_terms`, by one run of the program."""
        values = self.density.constrain(z)
        site_moments = self._site_moments(moments)
        local_noise: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.estimator is not None:
            untransformed = [site.name for site in self.latent if is_identity(site.transform)]
            local_noise = LocalNoise(
                [(values[name], *site_moments[name]) for name in untransformed],
                self.estimator,
                noise,
            )
        with local_noise:
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
        return _Terms(log_likelihood, cross)

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
