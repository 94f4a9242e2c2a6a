"""The net that ``method="auto"`` makes of itself: a lift of the features, an ensemble, and chains from its members."""

from __future__ import annotations

import math
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
from pyrobnn.estimators.fits import Fit, RunOptions
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
#: steps of chains where no seconds are given: of warm-up, between draws, and of both together for 100 draws
_USUAL_WARMUP = 1000
_USUAL_THINNING = 20
_USUAL_STEPS = 3000
#: steps by which the cost of chains is measured, for each second that the fit may take
_MEASURED_STEPS_PER_SECOND = 5


class Rule(NamedTuple):
    """The choices that are tried for an ensemble on a table.

    Attributes: ``waves`` of each feature; ``noise`` under which the members are trained; ``left_out_sd``, the standard
    deviation of left-out rows; ``likelihood``, None for a normal; ``fastest`` of the waves; ``factor`` of the scale.
    """

    waves: int
    noise: float
    left_out_sd: float
    likelihood: lk.Likelihood | None = None
    fastest: float = 1.0
    factor: float = 1.0

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
        origin = (-units.x_mean / units.x_scale).numpy()
        lift = Lift(units.transform_x(x).numpy(), origin, self.waves, self.fastest).float()
        likelihood, head, width = self._noise_model(y, mean_only)
        widths = [lift.width, WIDTH, WIDTH, WIDTH, WIDTH]
        layers: list[nn.Module] = []
        with seeded(0):
            for num_inputs, num_outputs in zip(widths, widths[1:]):
                layers += [Layer(num_inputs, num_outputs), nn.SiLU()]
            net = nn.Sequential(lift, *layers, Layer(WIDTH, width), head)
        prior = cast(Any, priors.IIDPrior)(dist.Normal(0.0, TabularEnsemble.prior_sd))
        return BNN(net, prior, likelihood, standardizer=units)

    def _noise_model(self, y: Tensor, mean_only: bool) -> tuple[lk.Likelihood, nn.Module, int]:
        """The likelihood, the head that makes its parameters of the net's outputs, and the number of these outputs."""
        if self.likelihood:
            counted = isinstance(self.likelihood, lk.NegativeBinomial)
            link = Offset(y) if counted else nn.Identity()
            return self.likelihood, link, self.likelihood.width(1)
        head = Heads(self.left_out_sd, mean_only, self.factor)
        if mean_only:
            return lk.HomoskedasticGaussian(self.noise), head, 2
        return lk.HeteroskedasticGaussian(), head, 2

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
        clock = Clock(seconds, time.perf_counter())
        ensemble = self._ensemble(len(data[0]), seconds, compile)
        held_out, rows = _without_held_out(data, run["seed"])
        with quiet():
            members = ensemble.fit(self.model(*data, units, mean_only=True), *rows, **run)
        model = self.model(*data, units, mean_only=False)
        if len(data[0]) <= MAX_WHOLE_ROWS:
            start = ChainStart(model, rows, members, run)
            fit = start.chains_fit(num_draws or 100, clock, compile)
        else:
            fit = _noise_learned(ensemble, model, rows, members, run)
            if self.likelihood is None:
                factor = _noise_factor(fit.posterior, data[0][held_out], data[1][held_out])
                scaled = self._replace(factor=factor).model(*data, units, mean_only=False)
                fit = replace(fit, posterior=replace(fit.posterior, model=scaled))
        noise = self.likelihood or "normal noise that depends on the input"
        net = (
            f"four layers of {WIDTH} on powers of the features and {self.waves} sine waves of each"
        )
        return replace(fit, reason=f"{fit.reason}, {noise}; {net}", held_out=held_out)

    def _ensemble(
        self,
        num_rows: int,
        seconds: float | None,
        compile: Compile,
    ) -> TabularEnsemble:
        """The ensemble that learns the mean of so many rows, in its share of the seconds."""
        whole = num_rows <= MAX_WHOLE_ROWS
        # many members predict better than few that are trained for long, whose noise becomes too small
        members = 4 if seconds is None else int(np.clip(seconds / 10, 2, 24))
        effort = 1.0
        if seconds is not None:
            bound = 4 if whole else 1
            effort = float(np.clip(seconds / 60, 0.1, bound))
        if whole:
            steps = int(1500 * effort**0.5)
        elif self.likelihood is None:
            steps = int(3000 * effort)
        else:
            # for as long as in the search, beyond which nothing showed that its width holds
            steps = int(400 * effort)
        return TabularEnsemble(
            num_members=members,
            num_steps=steps,
            batch_size=min(num_rows, 128 if whole else 256),
            compile=False,
        )


def _without_held_out(data: Data, seed: int) -> tuple[Tensor, Data]:
    """Positions of rows that scale the noise of an ensemble, none where chains learn it; and the rows of the fit."""
    num = len(data[0])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num))
    num_held_out = 0 if num <= MAX_WHOLE_ROWS else min(num // 10, 500)
    held_out, training = order.tensor_split([num_held_out])
    return held_out, (data[0][training], data[1][training])


def _noise_learned(
    ensemble: TabularEnsemble,
    model: BNN,
    rows: Data,
    members: Posterior,
    run: RunOptions,
) -> Fit:
    """The members of an ensemble after a third of its steps more, in which they learn the noise too."""
    steps = max(1, ensemble.num_steps // 3)
    method = replace(ensemble, num_steps=steps, optimizer=Optimizer(clip_norm=1.0))
    posterior = method.fit(model, *rows, init=members, **run)
    return Fit(posterior, method, _ensemble_words(members))


def _ensemble_words(members: Posterior) -> str:
    return f"an ensemble of {members.num_chains * members.num_draws}"


class Clock(NamedTuple):
    """The seconds that a fit may take, None without a limit, and when it began."""

    seconds: float | None
    begun: float

    def remaining(self) -> float:
        """Seconds that are left, without end where there is no limit."""
        limit = math.inf if self.seconds is None else self.seconds
        return limit - (time.perf_counter() - self.begun)


@dataclass(frozen=True)
class ChainStart:
    """What chains start from: a model, its rows, and the members of an ensemble."""

    model: BNN
    rows: Data
    members: Posterior
    run: RunOptions

    def chains_fit(self, num_draws: int, clock: Clock, compile: Compile) -> Fit:
        """Chains from the members, of as many steps as fit into what is left of the seconds."""
        chains = SGHMC(
            num_chains=self.members.num_chains * self.members.num_draws,
            preconditioner="rmsprop",
            compile=compile,
        )
        chains = _lasting(chains, self._effort(chains, clock))
        posterior = self._fit(chains, num_draws)
        words = (
            f"{chains.num_chains} chains of {num_draws} draws, {chains.thinning} steps apart, "
            f"from {_ensemble_words(self.members)}"
        )
        return Fit(posterior, chains, words)

    def _effort(self, chains: SGHMC, clock: Clock) -> float:
        """What the seconds that are left allow, of the usual number of steps; a fifth of the time is kept back."""
        if clock.seconds is None:
            return 1.0
        cost = self._cost(chains, int(_MEASURED_STEPS_PER_SECOND * clock.seconds))
        # the usual steps cost multiple · cost / seconds
        multiple = _USUAL_STEPS // _MEASURED_STEPS_PER_SECOND
        remaining = 0.8 * clock.remaining()
        return float(np.clip(remaining * clock.seconds / (multiple * cost), 0.05, 50))

    def _cost(self, chains: SGHMC, steps: int) -> float:
        """Seconds that so many steps take, by two fits: both prepare, and load can hide the steps."""
        seconds = []
        with quiet():
            for num_warmup in (60, 60 + steps):
                posterior = self._fit(replace(chains, num_warmup=num_warmup, thinning=1), 1)
                seconds.append(posterior.meta["timings"]["fit"])
        short, long = seconds
        return max(long - short, long / 2)

    def _fit(self, chains: SGHMC, num_draws: int) -> Posterior:
        options = RunOptions(**self.run)
        options["num_draws"] = num_draws
        return chains.fit(self.model, *self.rows, init=self.members, **options)


def _lasting(chains: SGHMC, effort: float) -> SGHMC:
    """Chains whose momentum lasts for thousands of steps where there is time: they have a long way."""
    return replace(
        chains,
        friction=min(1.0, 0.003 / effort),
        num_warmup=max(50, int(_USUAL_WARMUP * effort)),
        thinning=max(1, int(_USUAL_THINNING * effort)),
    )


def _noise_factor(posterior: Posterior, x: Tensor, y: Tensor) -> float:
    """The factor on the scale of the noise under which rows that were held out are likeliest."""
    prediction = posterior.predict(x)
    error = (y - prediction.mean.cpu()).double().cpu().numpy()
    noise = prediction.aleatoric_var.double().cpu().numpy()
    spread = prediction.epistemic_var.double().cpu().numpy()
    return max(
        np.geomspace(0.5, 5, 70),
        key=lambda factor: log_density(error, factor**2 * noise + spread).mean(),
    )


def lifted(model: BNN, x: Tensor, y: Tensor, seed: int) -> BNN:
    """The model with a net of one hidden layer on a :class:`Lift` of data x (N, feature)."""
    units = cast(Standardizer, model.standardizer)
    waves = max(0, min(8, (256 // x.shape[1] - 1) // 2))  # some 256 inputs of the net
    lift = Lift(
        units.transform_x(x).numpy(), (-units.x_mean / units.x_scale).numpy(), waves
    ).double()
    net = networks.mlp(
        lift.width,
        (50,),
        1,
        activation="silu",
        seed=seed,
    ).double()
    return BNN(
        nn.Sequential(lift, *net),
        model.prior,
        model.likelihood,
        standardizer=units,
    )
