"""The net that ``method="auto"`` makes of itself: features without skew, waves of them, an ensemble, chains from it.

What is open of it is chosen by the log density of rows that are left out, beside that of a Bayesian linear regression.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pyro.distributions as dist
import torch
from scipy.stats import nbinom, skew
from sklearn.linear_model import BayesianRidge, PoissonRegressor
from sklearn.model_selection import KFold, cross_val_predict
from torch import Tensor, nn

from pyrobnn import likelihoods as lk
from pyrobnn.core.seeding import seeded
from pyrobnn.data import Standardizer
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS
from pyrobnn.inference.fitting.initial import start_chains
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.method import FitRun, Method
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.training import Optimizer, Training
from pyrobnn.inference.point_methods import DeepEnsemble
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.model import BNN, Density
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.posterior import Posterior

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TabularEnsemble(DeepEnsemble):
    """An ensemble that may go on from the members of another."""

    uses: ClassVar[tuple[str, ...]] = ("init",)
    prior_sd: ClassVar[float] = 1.1  # of a weight

    def _start(self, problem: Problem, run: FitRun) -> Tensor:
        if run.init is None:
            return super()._start(problem, run)
        with seeded(run.seed, problem.device):
            return start_chains(problem.model, problem.density, run.init, self.num_members)

    def _search(
        self,
        problem: Problem,
        start: Tensor,
        run: FitRun,
        *_: Any,
        **__: Any,
    ) -> Result:
        """Of a normal the same log joint, but for a constant, and its gradient in half of autograd's operations."""
        noise = cast(Any, problem.bnn.likelihood)
        head = cast(Any, problem.bnn.net)[-1]
        if type(noise) not in (lk.HomoskedasticGaussian, lk.HeteroskedasticGaussian):
            return super()._search(problem, start, run)
        shrink = 1 / (self.prior_sd**2 * problem.num_rows)
        gradient = _MemberGradient(problem.density, noise, head, shrink)
        batches = problem.batches(self.batch_size)
        training = Training.of(replace(self, compile=False), "cosine")
        return minimize(
            gradient,
            start,
            batches,
            training,
            slopes=True,
            progress=run.progress,
            name="the ensemble",
        )


class _MemberGradient:
    """Minus the log joint of each member, per row, and its gradient by the chain rule written out.

    A fit takes a half to a third of the CPU seconds that it takes by automatic differentiation, at the same numbers.
    ``head`` makes location and scale of the last layer's outputs; ``shrink`` is the prior's precision, per row.
    """

    def __init__(
        self,
        density: Density,
        noise: Any,
        head: nn.Module,
        shrink: float,
    ):
        self.density = density
        self.noise = noise
        self.head = head
        self.shrink = shrink

    def __call__(self, thetas: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (member, P) at weights (member, P), and losses (1, member)."""
        # of each layer weight and bias
        values = [value for _, value in self.density.parts(thetas)]
        weights = values[::2]
        inputs, sums = self._forward(weights, values[1::2], x)
        mean, scale = self.noise.loc_scale(self.head(sums[-1]), {})
        error = (y - mean) / scale
        square = error.square()
        loss = thetas.square().sum(1) * (self.shrink / 2)
        loss += (square / 2 + scale.log()).mean((1, 2))
        slope = self._slope(error, scale)
        gradients = self._backward(slope, weights, inputs, sums)
        return gradients.add_(thetas, alpha=self.shrink), loss[None].double()

    def _forward(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        x: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs of each layer and its sums before the activation, (member, row, unit)."""
        inputs = [x.expand(len(weights[0]), *x.shape)]
        sums = []
        for weight, bias in zip(weights, biases):
            sums.append(torch.baddbmm(bias[:, None], inputs[-1], weight.mT))
            inputs.append(nn.functional.silu(sums[-1]))
        return inputs, sums

    def _slope(self, error: Tensor, scale: Tensor) -> Tensor:
        """The gradient at the last layer's two outputs, (member, row, 2); known noise has none of its own."""
        if isinstance(self.noise, lk.HomoskedasticGaussian):
            raw = torch.zeros_like(error)
        else:
            # the derivative of a softplus, by its value
            raw = (1 - error.square()) * torch.expm1(self.noise.min_scale - scale)
        return torch.cat([error, raw], -1) / (scale * -error.shape[-2])

    def _backward(
        self,
        slope: Tensor,
        weights: list[Tensor],
        inputs: list[Tensor],
        sums: list[Tensor],
    ) -> Tensor:
        """Gradients (member, P) of all weights and biases, from the last layer to the first."""
        gradients = list[Tensor]()
        for layer in reversed(range(len(weights))):
            gradients[:0] = [torch.bmm(slope.mT, inputs[layer]).flatten(1), slope.sum(1)]
            if layer:
                pulled = slope @ weights[layer]
                slope = torch.ops.aten.silu_backward(pulled, sums[layer - 1])
        return torch.cat(gradients, 1)


class Lift(nn.Module):
    r"""Features without skew, and sines and cosines of each: (N, feature) to (N, lifted), all shrunk together.

    .. math:: z = \frac{(x - x_0)^\lambda - 1}{\lambda}, \qquad (z, \sin \omega z, \cos \omega z)

    with Box and Cox's λ of largest likelihood; a feature of two values stays as it is. A net of small weights is
    smooth: what is fast in a feature, or in its logarithm, it learns last.

    Args:
        x: training inputs (N, feature), in standard units.
        origin: where a feature is zero in these units, (feature,).
        waves: sines of each feature.
        fastest: the standard deviation of the last one's frequency, of the first one's.

    Reference: Fourier Features Let Networks Learn High Frequency Functions (Tancik et al., 2020).
    """

    def __getattr__(self, name: str) -> Any:  # its buffers
        return super().__getattr__(name)

    def __init__(
        self,
        x: np.ndarray,
        origin: np.ndarray,
        waves: int,
        fastest: float = 1.0,
    ):
        super().__init__()
        least = x.min(0)
        continuous = np.flatnonzero([len(np.unique(column)) > 2 for column in x.T])
        # a logarithm is of values that are positive and not all far from zero; of others, of a shift
        start = np.where(
            (origin < least) & (least < origin + 1000), origin, least - 1 - 0.1 * np.ptp(x, 0)
        )
        powers = np.ones(x.shape[1])
        powers[continuous] = _likeliest_powers(np.log(x[:, continuous] - start[continuous]))
        normals = np.random.default_rng(0).normal(size=(len(continuous), waves))
        self._hold(
            start=start,
            least=least - start,
            powers=powers,
            rates=normals * np.geomspace(1, fastest, waves or 1)[:waves],
            many=continuous,
            centre=0,
            scale=1,
            shrink=1,
        )
        raised = self._raised(torch.from_numpy(x))
        self._hold(centre=raised.mean(0), scale=raised.std(0).clamp_min(1e-6))
        lifted = self(torch.from_numpy(x))
        self._hold(shrink=(x.shape[1] / lifted.var(0).sum()).sqrt())
        self.width = lifted.shape[1]

    def _hold(self, **values: np.ndarray | Tensor | float) -> None:
        for name, value in values.items():
            self.register_buffer(name, torch.as_tensor(value))

    def _raised(self, x: Tensor) -> Tensor:
        # below the least row that was seen the tangent goes on: a logarithm ends somewhere
        within = torch.maximum(x - self.start, self.least)
        tangent = (x - self.start - within) * within ** (self.powers - 1)
        return torch.expm1(self.powers * within.log()) / self.powers + tangent

    def forward(self, x: Tensor) -> Tensor:
        plain = (self._raised(x) - self.centre) / self.scale
        angle = (plain[..., self.many].unsqueeze(-1) * self.rates).flatten(-2)
        return self.shrink * torch.cat([plain, angle.sin(), angle.cos()], -1)


def _likeliest_powers(log: np.ndarray) -> np.ndarray:
    """Box and Cox's λ of largest likelihood, (feature,), of the logarithms (N, feature) of features."""
    # 1e-4 stands for zero
    grid = np.linspace(-2, 2, 17) + 1e-4 * (np.arange(17) == 8)
    # up to a constant
    log_likelihoods = [
        (p - 1) * log.mean(0) - np.log(np.exp(p * log).std(0) / abs(p)) for p in grid
    ]
    return grid[np.argmax(log_likelihoods, 0)]


class Layer(nn.Linear):
    """Weights start with variance 1 / inputs: torch's third of it, four layers damp."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -math.sqrt(3) * bound, math.sqrt(3) * bound)
        nn.init.uniform_(self.bias, -bound, bound)


class Heads(nn.Module):
    """Of two outputs the mean alone, or mean and scale, ``factor`` times ``noise`` where the second output is zero."""

    def __init__(
        self,
        noise: float,
        mean_only: bool,
        factor: float = 1.0,
    ):
        super().__init__()
        self.raw = math.log(math.expm1(noise))
        self.mean_only = mean_only
        self.factor = factor

    def forward(self, f: Tensor) -> Tensor:
        mean, raw = f.chunk(2, -1)
        if self.mean_only:
            return mean
        raw = raw + self.raw
        if self.factor != 1:
            scale = self.factor * nn.functional.softplus(raw)
            raw = scale + (-torch.expm1(-scale)).log()
        return torch.cat([mean, raw], -1)


class Offset(nn.Module):
    """Adds a constant (): the logarithm of the mean count, around which a net has its prior."""

    constant: Tensor

    def __init__(self, y: Tensor):
        super().__init__()
        self.register_buffer("constant", y.mean().log())

    def forward(self, f: Tensor) -> Tensor:
        return f + self.constant.to(f)


class Rule(NamedTuple):
    """What is open of a fit.

    Attributes: ``waves`` of each feature; ``noise`` under which the members are trained; ``left``, the standard
    deviation of left-out rows; ``likelihood``, None for a normal; ``fastest`` of the waves; ``factor`` of the scale.
    """

    waves: int
    noise: float
    left: float
    likelihood: Any = None
    fastest: float = 1.0
    factor: float = 1.0

    def model(
        self,
        x: Tensor,
        y: Tensor,
        units: Standardizer,
        mean_only: bool,
    ) -> BNN:
        """The model of data x (N, feature), y (N, 1); of a normal with known noise where it is of the ``mean_only``."""
        origin = (-units.x_mean / units.x_scale).numpy()
        lift = Lift(units.transform_x(x).numpy(), origin, self.waves, self.fastest).float()
        likelihood: lk.Likelihood
        head: nn.Module
        if self.likelihood:
            likelihood = self.likelihood
            width = likelihood.width(1)
            counted = isinstance(likelihood, lk.NegativeBinomial)
            head = Offset(y) if counted else nn.Identity()
        else:
            if mean_only:
                likelihood = lk.HomoskedasticGaussian(self.noise)
            else:
                likelihood = lk.HeteroskedasticGaussian()
            width = 2
            head = Heads(self.left, mean_only, self.factor)
        widths = [lift.width, 32, 32, 32, 32]
        layers: list[nn.Module] = []
        with seeded(0):
            for num_inputs, num_outputs in zip(widths, widths[1:]):
                layers += [Layer(num_inputs, num_outputs), nn.SiLU()]
            net = nn.Sequential(lift, *layers, Layer(32, width), head)
        prior = cast(Any, priors.IIDPrior)(dist.Normal(0.0, TabularEnsemble.prior_sd))
        return BNN(net, prior, likelihood, standardizer=units)

    def fit(
        self,
        data: Data,
        units: Standardizer,
        seconds: float | None,
        num_draws: int | None,
        compile: bool,
        **run: Any,
    ) -> tuple[Posterior, Method, str, Tensor]:
        """Members of an ensemble, and of few rows chains that start there and spend what is left of the seconds.

        The members learn the mean alone, under noise that is known: one that may choose it explains by noise what it
        learns late. Of many rows they then learn the noise too, and some are held out (the last result) to scale it.
        """
        begun = time.perf_counter()
        whole = len(data[0]) <= MAX_WHOLE_ROWS
        model = self.model(*data, units, False)
        ensemble = self._ensemble(len(data[0]), seconds, compile)
        held_out, rows = _without_held_out(data, run["seed"])
        with quiet():
            start = ensemble.fit(
                self.model(*data, units, True),
                *rows,
                **run,
            )
        words = f"an ensemble of {ensemble.num_members}"
        method: Method
        if whole:
            num_draws = num_draws or 100
            chains = _timed_chains(
                ensemble.num_members,
                compile,
                seconds,
                begun,
                model,
                rows,
                {"init": start, **run},
            )
            words = (
                f"{chains.num_chains} chains of {num_draws} draws, {chains.thinning} steps apart, "
                f"from {words}"
            )
            method = chains
        else:
            num_draws = None
            steps = max(1, ensemble.num_steps // 3)
            method = replace(
                ensemble,
                num_steps=steps,
                optimizer=Optimizer(clip_norm=1.0),
            )
        posterior = method.fit(
            model,
            *rows,
            init=start,
            num_draws=num_draws,
            **run,
        )
        if not whole and self.likelihood is None:
            factor = _noise_factor(posterior, data[0][held_out], data[1][held_out])
            scaled = self._replace(factor=factor).model(*data, units, False)
            posterior = replace(posterior, model=scaled)
        words += f", {self.likelihood or 'normal noise that depends on the input'}; four layers of 32 on powers of the"
        words += f" features and {self.waves} sine waves of each"
        return posterior, method, words, held_out

    def _ensemble(
        self,
        num: int,
        seconds: float | None,
        compile: bool,
    ) -> TabularEnsemble:
        """The ensemble that learns the mean of so many rows, in its share of the seconds."""
        whole = num <= MAX_WHOLE_ROWS
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
            batch_size=min(num, 128 if whole else 256),
            compile=cast(Any, "trace" if compile else False),
        )


def _without_held_out(data: Data, seed: int) -> tuple[Tensor, Data]:
    """Positions of rows that scale the noise of an ensemble, none where chains learn it; and the rows of the fit."""
    num = len(data[0])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num))
    num_held_out = 0 if num <= MAX_WHOLE_ROWS else min(num // 10, 500)
    held_out, training = order.tensor_split([num_held_out])
    return held_out, (data[0][training], data[1][training])


def _timed_chains(
    num_chains: int,
    compile: bool,
    seconds: float | None,
    begun: float,
    model: BNN,
    rows: Data,
    fit_options: dict[str, Any],
) -> SGHMC:
    """Chains of as many steps as fit into what is left of the seconds since ``begun``."""
    options: dict[str, Any] = {
        "num_chains": num_chains,
        "preconditioner": "rmsprop",
        "compile": compile,
    }
    effort = 1.0
    if seconds is not None:
        cost = _cost(options, int(5 * seconds), model, rows, fit_options)
        remaining = 0.8 * (seconds - (time.perf_counter() - begun))
        effort = float(np.clip(remaining * seconds / (600 * cost), 0.05, 50))
    return _chains(effort, options)


def _cost(
    options: dict[str, Any],
    steps: int,
    model: BNN,
    rows: Data,
    fit_options: dict[str, Any],
) -> float:
    """Seconds that so many steps of the chains take, by two fits: both prepare, and load can hide the steps."""
    seconds = []
    with quiet():
        for num_warmup in (60, 60 + steps):
            chains = SGHMC(
                num_warmup=num_warmup,
                thinning=1,
                **options,
            )
            posterior = chains.fit(
                model,
                *rows,
                num_draws=1,
                **fit_options,
            )
            seconds.append(posterior.meta["timings"]["fit"])
    short, long = seconds
    return max(long - short, long / 2)


def _chains(effort: float, options: dict[str, Any]) -> SGHMC:
    """Chains whose momentum lasts for thousands of steps where there is time: they have a long way."""
    return SGHMC(
        friction=min(1.0, 0.003 / effort),
        num_warmup=max(50, int(1000 * effort)),
        thinning=max(1, int(20 * effort)),
        **options,
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


def log_density(error: np.ndarray, var: np.ndarray | np.floating | float) -> np.ndarray:
    """Of normal errors (N,)."""
    return -0.5 * (error**2 / var + np.log(2 * np.pi * var))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of fits that are tried: those of the one that is kept follow."""
    with warnings.catch_warnings(action="ignore"):
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """With small tensors several threads are slower than one, and far slower on cores that other processes use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gain(ours: np.ndarray, linear: np.ndarray) -> tuple[bool, str]:
    """Whether log densities (N,) gain on a linear model's, in words: log 20 in sum and two standard errors."""
    mean = float((ours - linear).mean())
    error = float((ours - linear).std()) / math.sqrt(len(ours))
    words = f"a held-out row is {mean:+.2f} ± {error:.2f} nats likelier than under a linear model"
    return mean > 2 * error and mean * len(ours) > math.log(20), words


class _Trial(NamedTuple):
    """A rule, and the log densities (N,) of held-out rows under its short fit."""

    rule: Rule
    log_densities: np.ndarray

    def score(self) -> float:
        return float(self.log_densities.mean())


@dataclass(eq=False)
class _Trials:
    """Short fits of rules to ``training`` rows, which predict held-out rows, ``targets`` in standard units."""

    method: TabularEnsemble
    data: Data
    units: Standardizer
    held_out: Tensor
    training: Tensor
    targets: np.ndarray
    seconds: float | None
    seed: int
    device: torch.device | str | None
    trials: list[_Trial] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    def best(self) -> _Trial:
        return max(self.trials, key=_Trial.score)

    @quiet()
    def attempt(self, rule: Rule) -> None:
        """Try a rule, unless a quarter of the seconds has passed."""
        seconds = self.seconds
        if self.trials and seconds is not None and time.perf_counter() - self.begun > seconds / 4:
            return
        x = self.data[0][self.training]
        y = self.data[1][self.training]
        normal = rule.likelihood is None
        model = rule.model(x, y, self.units, normal)
        method = self.method
        if not normal:
            method = replace(method, num_steps=min(method.num_steps, 400))
        posterior = method.fit(
            model,
            x,
            y,
            seed=self.seed,
            device=self.device,
        )
        prediction = posterior.predict(self.data[0][self.held_out])
        mean = self.units.transform_y(prediction.mean)[:, 0].double().cpu().numpy()
        error = self.targets - mean
        if normal:
            log_densities = log_density(error, np.mean(error**2))
        else:
            log_prob = prediction.log_prob(self.data[1][self.held_out]).double().cpu().numpy()
            log_densities = log_prob + math.log(float(self.units.y_scale[0]))
        rule = rule._replace(left=float(np.sqrt(np.mean(error**2))))
        self.trials.append(_Trial(rule, log_densities))


def search(
    data: Data,
    units: Standardizer,
    seconds: float | None,
    seed: int,
    device: torch.device | str | None,
) -> tuple[Rule | None, str]:
    """The rule that predicts left-out rows best, None where none gains on a linear model; and the gain in words.

    Tried on a fifth of the rows, with short training of two members: how closely to follow the data, whether waves
    help, and for counts and skewed positive targets their likelihoods.
    """
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data[0])))[:25_000]
    held_out, training = order.tensor_split([min(len(order) // 5, 2000)])
    targets = units.transform_y(data[1])[:, 0].numpy()[held_out]
    error = targets - _linear_prediction(data, units, training, held_out)
    method = _short_training(len(training), len(data[0]) <= MAX_WHOLE_ROWS, seconds)
    trials = _Trials(method, data, units, held_out, training, targets, seconds, seed, device)
    best = _best_normal(trials, float(np.std(error)))
    for likelihood in responses(data[1].numpy()):
        trials.attempt(best._replace(likelihood=likelihood))
    top = trials.best()
    gained, words = gain(top.log_densities, log_density(error, np.mean(error**2)))
    if not gained:
        return None, words
    # normal noise that varies is what the ensemble learns anyway, after the mean
    return best if isinstance(top.rule.likelihood, lk.HeteroskedasticGaussian) else top.rule, words


def _linear_prediction(
    data: Data,
    units: Standardizer,
    training: Tensor,
    held_out: Tensor,
) -> np.ndarray:
    """Of held-out rows by a Bayesian linear regression of the training rows, in standard units."""
    x = units.transform_x(data[0]).numpy()
    y = units.transform_y(data[1])[:, 0].numpy()
    return cast(np.ndarray, BayesianRidge().fit(x[training], y[training]).predict(x[held_out]))


def _short_training(num: int, whole: bool, seconds: float | None) -> TabularEnsemble:
    """Two members for the trials of so many rows, for longer where there is time: fewer steps favour fast learners."""
    effort = 1 if seconds is None else np.clip(seconds / 60, 0.125, 4 / 3)
    return TabularEnsemble(
        num_members=2,
        num_steps=int(1200 * effort),
        batch_size=min(128 if whole else 256, num),
        compile=cast(Any, "trace"),
    )


def _best_normal(trials: _Trials, line: float) -> Rule:
    """The best rule of normal noise: shares of the linear model's noise ``line``, then fast waves, then none."""
    num_rows, num_features = trials.data[0].shape
    waves = max(1, min(8, 256 // num_features))
    for share in (0.1, 0.3, 1.0) if num_rows <= MAX_WHOLE_ROWS else (1.0,):
        trials.attempt(Rule(waves, share * line, line))
    for change in ({"fastest": 16.0}, {"waves": 0}):
        trials.attempt(trials.best().rule._replace(**change))
    return trials.best().rule


def responses(y: np.ndarray) -> list[lk.Likelihood]:
    """Likelihoods beside a normal that suit the look of targets (N, 1)."""
    if not (y >= 0).all() or len(np.unique(y)) < 3:
        return []
    if (y == y.round()).all() and y.min() <= y.std():  # never near zero, a normal does as well
        # a Poisson is its limit: one prior for counts that are clustered and for thousands that are hardly
        return [lk.NegativeBinomial(dist.LogNormal(3.0, 3.0)), lk.HeteroskedasticGaussian()]
    return [lk.MixtureDensity(), lk.HeteroskedasticGaussian()] if skew(y[:, 0]) > 1 else []


def counts(x: np.ndarray, y: np.ndarray) -> tuple[lk.Likelihood | None, str]:
    """A negative binomial where targets (N, 1) are counts, and why; None where they are not.

    They are where rows left out of a log-linear model, its dispersion by the moments, are likelier than under a normal.
    """
    likelihood = next(iter(responses(y)), None)
    if not isinstance(likelihood, lk.NegativeBinomial):
        return None, ""
    folds = KFold(
        min(10, len(y)),
        shuffle=True,
        random_state=0,
    )
    y = y[:, 0]
    models = BayesianRidge(), PoissonRegressor(alpha=1 / len(y))
    with quiet():
        mean, rate = (cross_val_predict(model, x, y, cv=folds) for model in models)
    error = y - mean
    square = (rate**2).sum()
    size = square / max(((y - rate) ** 2 - rate).sum(), 1e-6 * square)
    ours = nbinom.logpmf(y, size, size / (size + rate))
    normal = log_density(error, np.mean(error**2))
    gained, words = gain(ours, normal)
    if not gained:
        return None, ""
    return likelihood, f"{likelihood!r} of counts: in a log-linear model {words}"
