"""The net that ``method="auto"`` makes of itself: a lift of the features, an ensemble, and chains from its members."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyrobnn import likelihoods as lk
from pyrobnn.core.seeding import seeded
from pyrobnn.data import Standardizer
from pyrobnn.estimators.comparison import log_density, quiet
from pyrobnn.estimators.features import Heads, Layer, Lift, Offset
from pyrobnn.estimators.fits import Fit, RunOptions, with_net
from pyrobnn.estimators.members import TabularEnsemble
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.posterior import Posterior

Data = tuple[Tensor, Tensor]
#: units of each of the four hidden layers
WIDTH = 32
#: steps of training under a likelihood beside the normal
SHORT_STEPS = 400
#: steps of warm-up of chains, and between their draws, where no seconds are given
WARMUP = 1000
THINNING = 20


class Rule(NamedTuple):
    """A net on a table, and the noise around it: what a search chooses, and what an ensemble and chains fit.

    Attributes: ``waves`` of each feature; ``noise`` under which the members learn the mean; ``left_out_sd``, the
    standard deviation of left-out rows, from which they learn the noise; ``likelihood``, None for a normal of which
    mean and noise are learned; ``fastest`` of the waves.
    """

    waves: int
    noise: float
    left_out_sd: float
    likelihood: lk.Likelihood | None = None
    fastest: float = 1.0

    def model(
        self,
        x: Tensor,
        y: Tensor,
        units: Standardizer,
        mean_only: bool,
    ) -> BNN:
        """The model of data x (N, feature), y (N, 1).

        ``mean_only``: normal with known noise, of which only the mean is learned; else the noise is learned too.
        """
        lift = Lift.of(x, units, self.waves, self.fastest).float()
        likelihood, head = self._noise_model(y, mean_only)
        widths = [lift.width, WIDTH, WIDTH, WIDTH, WIDTH]
        layers: list[nn.Module] = []
        with seeded(0):
            for num_inputs, num_outputs in zip(widths, widths[1:]):
                layers += [Layer(num_inputs, num_outputs), nn.SiLU()]
            num_parameters = 2 if self.likelihood is None else self.likelihood.width(1)
            net = nn.Sequential(lift, *layers, Layer(WIDTH, num_parameters), head)
        prior = cast(Any, priors.IIDPrior)(dist.Normal(0.0, TabularEnsemble.prior_sd))
        return BNN(net, prior, likelihood, standardizer=units)

    def _noise_model(self, y: Tensor, mean_only: bool) -> tuple[lk.Likelihood, nn.Module]:
        """The likelihood, and the head that makes its parameters of the net's outputs."""
        if isinstance(self.likelihood, lk.NegativeBinomial):
            return self.likelihood, Offset(y)
        if self.likelihood is not None:
            return self.likelihood, nn.Identity()
        head = Heads(self.left_out_sd, mean_only)
        if mean_only:
            return lk.HomoskedasticGaussian(self.noise), head
        return lk.HeteroskedasticGaussian(), head

    def fit(
        self,
        data: Data,
        units: Standardizer,
        seconds: float | None,
        num_draws: int | None,
        compile: Compile,
        run: RunOptions,
    ) -> Fit:
        """Members of an ensemble, and of few rows chains that start there and spend what is left of the seconds.

        The members learn the mean alone, under noise that is known: one that may choose it explains by noise what it
        learns late. Of many rows they then learn the noise too, and some are held out to scale it.
        """
        begun = time.perf_counter()
        x, y = data
        is_small = len(x) <= MAX_WHOLE_ROWS
        held_out, training = divided(len(x), 0 if is_small else min(len(x) // 10, 500), run["seed"])
        rows = (x[training], y[training])
        ensemble = self._ensemble(len(x), seconds)
        with quiet():
            members = ensemble.fit(self.model(x, y, units, mean_only=True), *rows, **run)
        model = self.model(x, y, units, mean_only=False)
        if is_small:
            remaining = None if seconds is None else seconds - (time.perf_counter() - begun)
            fit = Chains(model, rows, members, run).fit(num_draws or 100, remaining, compile)
        else:
            fit = _noise_learned(ensemble, model, rows, members, run)
            if self.likelihood is None:
                scaled = _scaled(fit.posterior, x[held_out], y[held_out])
                fit = replace(fit, posterior=scaled)
        noise = self.likelihood or "normal noise that depends on the input"
        net = (
            f"four layers of {WIDTH} on powers of the features and {self.waves} sine waves of each"
        )
        return replace(
            fit,
            reason=f"{fit.reason}, {noise}; {net}",
            held_out=held_out,
        )

    def _ensemble(self, num_rows: int, seconds: float | None) -> TabularEnsemble:
        """The ensemble that learns the mean of so many rows, in its share of the seconds."""
        # many members predict better than few that are trained for long, whose noise becomes too small
        num_members = 4 if seconds is None else int(np.clip(seconds / 10, 2, 24))
        if num_rows <= MAX_WHOLE_ROWS:
            num_steps = 1500 * share_of_steps(seconds, most=4) ** 0.5
        else:
            # of other likelihoods for as long as in the search, beyond which nothing showed that their width holds
            usual = 3000 if self.likelihood is None else SHORT_STEPS
            num_steps = usual * share_of_steps(seconds)
        return TabularEnsemble.of(num_rows, num_members, int(num_steps))


def share_of_steps(seconds: float | None, most: float = 1.0) -> float:
    """The share of the usual number of training steps that fits into so many seconds."""
    return 1.0 if seconds is None else float(np.clip(seconds / 60, 0.1, most))


def divided(num_rows: int, num_held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of rows that are held out, and of the others, in an order by the seed."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num_rows))
    return order[:num_held_out], order[num_held_out:]


def _noise_learned(
    ensemble: TabularEnsemble,
    model: BNN,
    rows: Data,
    members: Posterior,
    run: RunOptions,
) -> Fit:
    """The members of an ensemble after a third of its steps more, in which they learn the noise too."""
    steps = max(1, ensemble.num_steps // 3)
    method = replace(
        ensemble,
        num_steps=steps,
        optimizer=Optimizer(clip_norm=1.0),
    )
    posterior = method.fit(model, *rows, init=members, **run)
    return Fit(posterior, method, _ensemble_words(members))


def _ensemble_words(members: Posterior) -> str:
    return f"an ensemble of {members.num_chains * members.num_draws}"


def _scaled(posterior: Posterior, x: Tensor, y: Tensor) -> Posterior:
    """The posterior with its noise multiplied by the factor under which rows that were held out are likeliest."""
    prediction = posterior.predict(x)
    error = (y - prediction.mean.cpu()).double().cpu().numpy()
    noise = prediction.aleatoric_var.double().cpu().numpy()
    spread = prediction.epistemic_var.double().cpu().numpy()
    factor = max(
        np.geomspace(0.5, 5, 70),
        key=lambda factor: log_density(error, factor**2 * noise + spread).mean(),
    )

    def with_factor(net: nn.Module) -> nn.Module:
        scaled = cast(nn.Sequential, copy.deepcopy(net))
        cast(Heads, scaled[-1]).factor = float(factor)
        return scaled

    return replace(posterior, model=posterior.bnn.with_nets(with_factor))


@dataclass(frozen=True, eq=False)
class Chains:
    """Chains of SGHMC for a model and its rows, that start from the ``members`` of an ensemble."""

    model: BNN
    rows: Data
    members: Posterior
    run: RunOptions

    def fit(
        self,
        num_draws: int,
        seconds: float | None,
        compile: Compile,
    ) -> Fit:
        """As many steps as fit into so many seconds."""
        method = SGHMC(
            num_chains=self.members.num_chains * self.members.num_draws,
            preconditioner="rmsprop",
            compile=compile,
        )
        effort = 1.0 if seconds is None else self._effort(method, seconds)
        # where there is time the momentum lasts for thousands of steps: chains have a long way
        method = replace(
            method,
            friction=min(1.0, 0.003 / effort),
            num_warmup=max(50, int(WARMUP * effort)),
            thinning=max(1, int(THINNING * effort)),
        )
        words = (
            f"{method.num_chains} chains of {num_draws} draws, {method.thinning} steps apart, "
            f"from {_ensemble_words(self.members)}"
        )
        return Fit(self._posterior(method, num_draws), method, words)

    def _effort(self, method: SGHMC, seconds: float) -> float:
        """The multiple of the usual number of steps that takes four fifths of the seconds.

        By the times of two short fits: both prepare, and load can hide the steps that the longer one has more.
        """
        begun = time.perf_counter()
        num_steps = max(1, int(5 * seconds))
        with quiet():
            short = self._seconds(method, 60)
            long = self._seconds(method, 60 + num_steps)
        seconds_of_step = max(long - short, long / 2) / num_steps
        remaining = 0.8 * (seconds - (time.perf_counter() - begun))
        # of 100 draws
        usual = WARMUP + 100 * THINNING
        return float(np.clip(remaining / (usual * seconds_of_step), 0.05, 50))

    def _seconds(self, method: SGHMC, num_steps: int) -> float:
        """Seconds that a fit of so many steps takes."""
        short = replace(method, num_warmup=num_steps, thinning=1)
        return cast(float, self._posterior(short, 1).meta["timings"]["fit"])

    def _posterior(self, method: SGHMC, num_draws: int) -> Posterior:
        options = RunOptions(**self.run)
        options["num_draws"] = num_draws
        return method.fit(
            self.model,
            *self.rows,
            init=self.members,
            **options,
        )


def lifted(model: BNN, x: Tensor, seed: int) -> BNN:
    """The model with a net of one hidden layer on a :class:`Lift` of data x (N, feature)."""
    units = cast(Standardizer, model.standardizer)
    waves = max(0, min(8, (256 // x.shape[1] - 1) // 2))  # some 256 inputs of the net
    lift = Lift.of(x, units, waves).double()
    net = networks.mlp(lift.width, (50,), 1, activation="silu", seed=seed).double()
    return with_net(model, nn.Sequential(lift, *net))
