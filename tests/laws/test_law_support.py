"""The law of supports: a density is zero where a parameter of a distribution is impossible, as in Stan.

Every distribution of torch and of Pyro, with each parameter that has a support pushed out of it: at a site of a
program, in ``pyro.factor``, in a density of ``pb.sample`` and in a likelihood, the log density is −∞ and its gradient
finite. Inside, the density is the distribution's own, to the bit.
"""

from __future__ import annotations

import pickle
import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from torch.distributions import constraints

import pyrobnn as pb
from pyrobnn.inference.log_density import LogDensity
from pyrobnn.model import Density, guards
from pyrobnn.model.compile import compiled
from pyrobnn.model.gradient import batched_gradient
from pyrobnn.model.handlers import at_many_points
from pyrobnn.model.likelihoods.base import Likelihood, Targets
from pyrobnn.model.log_terms import without_validation


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


PAIR = real(0.7, 1.3)
VECTOR = real(0.5, 0.2, 0.3)
EYE = torch.eye(3, dtype=torch.float64)
SHARE = number(0.3)
TRIL = torch.tensor([[1.0, 0.0, 0.0], [0.4, 1.2, 0.0], [0.2, 0.3, 0.8]], dtype=torch.float64)
COVARIANCE = TRIL @ TRIL.T
FACTORS = {"loc": VECTOR, "scale_tril": TRIL}
LOC_SCALE = {"loc": SHARE, "scale": PAIR}
TWO = {"concentration1": PAIR, "concentration0": PAIR}
PROBS = {"probs": SHARE}
GAMMA = {"concentration": PAIR, "rate": PAIR}
MATRICES = [
    FACTORS,
    {"loc": VECTOR, "covariance_matrix": COVARIANCE},
    {"loc": VECTOR, "precision_matrix": COVARIANCE},
]
MIXTURE = {"locs": torch.zeros(2, 3, dtype=torch.float64), "component_logits": PAIR}
RELAXED = {"temperature": number(0.7)}
#: the parameters of each distribution that has some with a support, in each of its parametrisations
PARAMETERS = {
    "AVFMultivariateNormal": [FACTORS | {"control_var": torch.zeros(2, 1, 3, dtype=torch.float64)}],
    "AffineBeta": [TWO | LOC_SCALE],
    "AsymmetricLaplace": [LOC_SCALE | {"asymmetry": PAIR}],
    "Bernoulli": [PROBS],
    "Beta": [TWO],
    "BetaBinomial": [TWO | {"total_count": number(4.0)}],
    "Binomial": [PROBS | {"total_count": number(4.0)}],
    "Categorical": [{"probs": VECTOR}],
    "Cauchy": [LOC_SCALE],
    "Chi2": [{"df": PAIR}],
    "CoalescentTimes": [{"leaf_times": torch.zeros(3, dtype=torch.float64), "rate": number(1.2)}],
    "CoalescentTimesWithRate": [
        {"leaf_times": torch.zeros(3, dtype=torch.float64), "rate_grid": PAIR}
    ],
    "ContinuousBernoulli": [PROBS],
    "Dirichlet": [{"concentration": VECTOR}],
    "DirichletMultinomial": [{"concentration": VECTOR, "total_count": number(4.0)}],
    "Exponential": [{"rate": PAIR}],
    "ExtendedBetaBinomial": [TWO | {"total_count": number(4.0)}],
    "ExtendedBinomial": [PROBS | {"total_count": number(4.0)}],
    "FisherSnedecor": [{"df1": PAIR, "df2": PAIR}],
    "Gamma": [GAMMA],
    "GammaPoisson": [GAMMA],
    "GaussianScaleMixture": [
        {"coord_scale": VECTOR, "component_logits": PAIR, "component_scale": PAIR}
    ],
    # in float64 torch's own compares two types
    "GeneralizedPareto": [
        {"loc": SHARE.float(), "scale": PAIR.float(), "concentration": SHARE.float()}
    ],
    "Geometric": [PROBS],
    "GroupedNormalNormal": [
        {
            "prior_loc": torch.zeros(2, dtype=torch.float64),
            "prior_scale": PAIR,
            "obs_scale": VECTOR,
            "group_idx": torch.tensor([0, 1, 1]),
        }
    ],
    "Gumbel": [LOC_SCALE],
    "HalfCauchy": [{"scale": PAIR}],
    "HalfNormal": [{"scale": PAIR}],
    "InverseGamma": [GAMMA],
    "Kumaraswamy": [TWO],
    "LKJ": [{"dim": 3, "concentration": number(1.5)}],
    "LKJCholesky": [{"dim": 3, "concentration": number(1.5)}],
    "LKJCorrCholesky": [{"dim": 3, "concentration": number(1.5)}],
    "Laplace": [LOC_SCALE],
    "LogNormal": [LOC_SCALE],
    "LogNormalNegativeBinomial": [
        {"total_count": PAIR, "logits": PAIR, "multiplicative_noise_scale": PAIR}
    ],
    "Logistic": [LOC_SCALE],
    "LogisticNormal": [LOC_SCALE],
    "LowRankMultivariateNormal": [
        {"loc": VECTOR, "cov_factor": torch.ones(3, 1, dtype=torch.float64), "cov_diag": VECTOR}
    ],
    "MixtureOfDiagNormals": [MIXTURE | {"coord_scale": VECTOR.expand(2, 3)}],
    "MixtureOfDiagNormalsSharedCovariance": [MIXTURE | {"coord_scale": VECTOR}],
    "Multinomial": [{"probs": VECTOR}],
    "MultivariateNormal": MATRICES,
    "MultivariateStudentT": [FACTORS | {"df": number(4.0)}],
    "NanMaskedMultivariateNormal": MATRICES,
    "NanMaskedNormal": [LOC_SCALE],
    "NegativeBinomial": [PROBS | {"total_count": PAIR}],
    "Normal": [LOC_SCALE],
    "OMTMultivariateNormal": [FACTORS],
    "OneHotCategorical": [{"probs": VECTOR}],
    "OneHotCategoricalStraightThrough": [{"probs": VECTOR}],
    "OrderedLogistic": [{"predictor": SHARE, "cutpoints": real(-0.3, 0.4)}],
    "Pareto": [{"scale": PAIR, "alpha": PAIR}],
    "Poisson": [{"rate": PAIR}],
    "RelaxedBernoulli": [PROBS | RELAXED],
    "RelaxedBernoulliStraightThrough": [PROBS | RELAXED],
    "RelaxedOneHotCategorical": [RELAXED | {"probs": VECTOR}],
    "RelaxedOneHotCategoricalStraightThrough": [RELAXED | {"probs": VECTOR}],
    "SineBivariateVonMises": [
        {
            "phi_loc": SHARE,
            "psi_loc": SHARE,
            "phi_concentration": number(2.0),
            "psi_concentration": number(2.0),
            "correlation": number(0.1),
        }
    ],
    "SineSkewed": [
        {
            "base_dist": dist.VonMises(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1),
            "skewness": VECTOR / 4,
        }
    ],
    "SkewLogistic": [LOC_SCALE | {"asymmetry": PAIR}],
    "SoftAsymmetricLaplace": [LOC_SCALE | {"asymmetry": PAIR, "softness": PAIR}],
    "SoftLaplace": [LOC_SCALE],
    "Stable": [LOC_SCALE | {"stability": number(1.3), "skew": number(0.1)}],
    "StableWithLogProb": [LOC_SCALE | {"stability": number(1.3), "skew": number(0.1)}],
    "StudentT": [LOC_SCALE | {"df": PAIR}],
    "VonMises": [{"loc": SHARE, "concentration": PAIR}],
    "Weibull": [{"scale": PAIR, "concentration": PAIR}],
    "ZeroInflatedDistribution": [{"base_dist": dist.Poisson(PAIR), "gate": SHARE}],
    "ZeroInflatedNegativeBinomial": [PROBS | {"total_count": PAIR, "gate": SHARE}],
    "ZeroInflatedPoisson": [{"rate": PAIR, "gate": SHARE}],
}
#: values of those that cannot be drawn from
VALUES = {
    "CoalescentTimesWithRate": real(-1.2, -0.4),
    "GroupedNormalNormal": real(0.3, -0.2, 0.5),
    "LogNormalNegativeBinomial": real(2.0, 3.0),
}
#: what torch.func cannot differentiate, whatever the parameters, and torch's error: every method refuses them
WITHOUT_GRADIENT = {
    "CoalescentTimesWithRate": "setup_context",
    "GaussianScaleMixture": "modified by an inplace operation",
}


def made(kind, **parameters):
    """A distribution by its parameters' names; an old class has other names for them."""
    if kind is dist.LKJCorrCholesky:
        return kind(parameters["dim"], parameters["concentration"])
    return kind(**parameters)


def is_limited(constraint):
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return constraint is not constraints.real and not constraints.is_dependent(constraint)


def outside_of(constraint, inside):
    """Values of the shape of ``inside`` that break the constraint."""
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    name = type(constraint).__name__.strip("_").lower()
    if name == "simplex":
        return [real(-0.5, 0.7, 0.8)]
    if name == "positivedefinite":
        return [-EYE, TRIL + 2 * EYE]
    if name in ("lowercholesky", "lowertriangular"):
        return [COVARIANCE] if name == "lowertriangular" else [COVARIANCE, TRIL - 2 * EYE]
    if name == "orderedvector":
        return [inside.flip(-1)]
    if name == "integer":
        return [inside + 0.5]
    first = inside.new_tensor([1.0] + [0.0] * (max(inside.numel(), 1) - 1)).reshape(inside.shape)
    low, high = (getattr(constraint, bound, None) for bound in ("lower_bound", "upper_bound"))
    values = [low - 0.5, low - 1.0, low - 1.5] if high is None else [low - 0.5, high + 0.5]
    # of a vector one element alone, and all of them
    return [inside + first * (value - inside) for value in values] + [
        torch.full_like(inside, values[0])
    ]


def cases():
    chosen = {}
    for module in (torch.distributions, dist):
        for name, kind in vars(module).items():
            is_kind = isinstance(kind, type) and issubclass(kind, torch.distributions.Distribution)
            supports = getattr(kind, "arg_constraints", None)
            if not is_kind or not isinstance(supports, dict):
                continue
            for parameter in (one for one in supports if is_limited(supports[one])):
                # one that the table lacks fails: a new distribution of torch or Pyro needs a line in it
                known = [
                    known
                    for known in PARAMETERS.get(name, [{}])
                    if parameter in known or name not in PARAMETERS
                ]
                chosen[f"{module.__name__.split('.')[0]}-{name}-{parameter}"] = (
                    kind,
                    parameter,
                    known[0],
                )
    return chosen


CASES = cases()


def program_of(kind, known, parameter, outside, value, *, site):
    """A program whose parameter goes from inside, at t = 0, to ``outside``, at t = 1."""

    def program(x=None, y=None):
        t = pyro.sample("t", dist.Normal(number(0.0), 1.0))
        inside = known[parameter]
        fn = made(kind, **known | {parameter: inside + t * (outside - inside)})
        if site:  # where Pyro takes no distribution of torch's
            pyro.sample("y", fn.to_event(len(fn.batch_shape)), obs=value)
        else:
            pyro.factor("f", fn.log_prob(value).sum())

    return program


def a_value(name, fn):
    if name in VALUES:
        return VALUES[name]
    with seeded(0):
        return fn.sample().detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "site"),
    [
        (case, site)
        for case in CASES
        for site in (False, True)
        if case.startswith("pyro") or not site
    ],
)
def test_an_impossible_parameter_has_density_zero(case, site):
    kind, parameter, known = CASES[case]
    with without_validation(), at_many_points():
        fn = made(kind, **known)
        value = a_value(kind.__name__, fn)
    with pyro.validation_enabled(False):
        own = made(kind, **known).log_prob(value)
    # a factor is summed by the program, a site by the density
    sums = {own.sum().double(), own.sum(dtype=torch.float64)}
    for outside in outside_of(kind.arg_constraints[parameter], known[parameter]):
        density = Density(
            program_of(kind, known, parameter, outside, value, site=site), (None, None)
        )
        points = real(0.0, 1.0)[:, None]
        if kind.__name__ in WITHOUT_GRADIENT:
            with pytest.raises(RuntimeError, match=WITHOUT_GRADIENT[kind.__name__]):
                torch.func.grad(density.log_joint)(points[0])
            values = torch.stack([density.log_joint(point) for point in points])
        else:
            gradient, _ = batched_gradient(density.log_joint, points)
            gradients, values = gradient(points)
            assert gradients[1].isfinite().all(), (outside, gradients)
        assert values[0].isfinite()
        assert values[1] == -torch.inf, (outside, values)
        assert {place.parameter for place in density.impossible(points[1])} >= {parameter}
        assert not density.impossible(points[0])
        assert float(density.log_parts(points[0])[1]) in map(float, sums)


# -- where and how -----------------------------------------------------------------------------------------------------

COUNTS = real(2.0, 0.0, 5.0)


def beta_by_mean_and_sd(x=None, y=None):
    mean = pyro.sample("mean", dist.Uniform(number(0.0), 1.0))
    sd = pyro.sample("sd", dist.HalfCauchy(number(1.0)))
    size = mean * (1 - mean) / sd**2 - 1  # negative where sd is too large
    with pyro.plate("groups", 3):
        p = pyro.sample("p", dist.Beta(mean * size, (1 - mean) * size))
        pyro.sample("k", dist.Binomial(10, p), obs=COUNTS)


@pytest.mark.slow
def test_compiled_and_eager_densities_are_the_same():
    density = Density(beta_by_mean_and_sd, (None, None))
    points = density.sample_box(40, seed=0)
    function, _ = batched_gradient(density.log_joint, points)
    gradients, values = function(points)
    assert 0 < (values == -torch.inf).sum() < 40
    assert gradients.isfinite().all()
    step = compiled(function, points, enabled=True, name="a density", clone=False)
    compiled_gradients, compiled_values = step(points)
    torch.testing.assert_close(compiled_values, values)
    torch.testing.assert_close(compiled_gradients, gradients)


def test_traced_and_eager_derivatives_are_the_same_to_the_bit():
    """A trace and a run of Python keep the gradient of what is impossible away in two ways."""
    density = Density(beta_by_mean_and_sd, (None, None))
    points = density.sample_box(40, seed=0)
    function, _ = batched_gradient(density.log_joint, points)
    step = compiled(function, points, enabled="trace", clone=False)
    assert step.tier == "trace"
    gradients, values = function(points)
    assert 0 < (values == -torch.inf).sum() < 40
    for traced, eager in zip(step(points), (gradients, values), strict=True):
        assert torch.equal(traced, eager)
    for point, gradient in zip(points, gradients, strict=True):
        for axis, direction in enumerate(torch.eye(density.dim)):
            along = (direction.to(point),)
            slope = torch.func.jvp(density.log_joint, (point,), along)[1]
            torch.testing.assert_close(slope, gradient[axis].to(slope))


def test_second_derivatives_are_finite_and_those_inside_right():
    y = real(0.4, 0.9)

    def log_prob(t, guarded=True):
        if not guarded:
            return dist.Weibull(1.0 + t[1], t[0]).log_prob(y).sum()
        with without_validation():
            return dist.Weibull(1.0 + t[1], t[0]).log_prob(y).sum()

    inside = real(0.7, 0.2)
    outside = real(0.0, 0.2)
    expected = torch.func.hessian(lambda t: log_prob(t, guarded=False))(inside)
    for hessian in (torch.func.hessian(log_prob), torch.func.jacrev(torch.func.grad(log_prob))):
        torch.testing.assert_close(hessian(inside), expected)
        assert hessian(outside).isfinite().all()


ROUNDED = {
    "a simplex of many float32": lambda: dist.Multinomial(3, probs=torch.full((3000,), 1 / 3000)),
    "a simplex of float32": lambda: dist.Categorical(
        probs=torch.rand(1000, generator=torch.Generator().manual_seed(0))
    ),
    "a covariance, not quite symmetric": lambda: dist.MultivariateNormal(
        VECTOR, COVARIANCE + 1e-12 * TRIL
    ),
    "a float32 covariance": lambda: dist.MultivariateNormal(
        VECTOR.float(), (COVARIANCE * 1e4).float() + 1e-3 * TRIL.float()
    ),
    "a probability above one": lambda: dist.Bernoulli(probs=torch.tensor(1 + 1e-7)),
    "a probability that is clamped": lambda: dist.ContinuousBernoulli(torch.tensor(1 + 1e-7)),
    "a rate below zero": lambda: dist.Poisson(torch.tensor(-1e-9)),
    "the bound itself": lambda: dist.Poisson(number(0.0)),
    "two equal cutpoints": lambda: dist.OrderedLogistic(SHARE, real(0.1, 0.1)),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_what_is_inside_up_to_rounding_keeps_its_density(what):
    with without_validation():
        fn = ROUNDED[what]()
        mask = guards.possible(fn)
        assert mask is None or bool(mask.all()), guards.impossible(fn)


MEAN = number(0.3)
WRAPPED = {
    "independent": lambda s: dist.Normal(MEAN, s.expand(3)).to_event(1),
    "expanded": lambda s: dist.Gamma(s, 1.0).expand([3]).to_event(1),
    "clamped and expanded": lambda s: dist.ContinuousBernoulli(s).expand([3]).to_event(1),
    "transformed": lambda s: dist.TransformedDistribution(
        dist.Normal(MEAN, s).expand([3]), [torch.distributions.transforms.ExpTransform()]
    ),
    "folded": lambda s: dist.FoldedDistribution(dist.Normal(MEAN, s).expand([3])),
    "mixture": lambda s: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3, 2)),
        dist.Normal(MEAN, torch.stack([s, s * 0 + 1.0]).expand(3, 2)),
    ),
    "masked": lambda s: dist.Normal(MEAN, s).expand([3]).mask(torch.tensor([True, False, True])),
    "a constraint that depends": lambda s: dist.Uniform(number(0.0), 3 * s).expand([3]),
    "of a user's own": lambda s: OfMyOwn(s.expand(3)),
}


class OfMyOwn(dist.TorchDistribution):
    arg_constraints = {"width": constraints.positive}
    support = constraints.real

    def __init__(self, width, validate_args=None):
        self.width = width
        super().__init__(width.shape, validate_args=validate_args)

    def expand(self, batch_shape, _instance=None):
        return OfMyOwn(self.width.expand(batch_shape))

    def log_prob(self, value):
        return -value.square() * self.width


@pytest.mark.parametrize("what", WRAPPED)
def test_what_wraps_an_impossible_distribution_has_density_zero(what):
    value = real(0.3, 0.8, 0.5)

    def program(x=None, y=None):
        s = pyro.sample("s", dist.Normal(number(0.0), 1.0))
        pyro.sample("y", WRAPPED[what](s).to_event(len(WRAPPED[what](s).batch_shape)), obs=value)

    def by_factor(x=None, y=None):
        s = pyro.sample("s", dist.Normal(number(0.0), 1.0))
        pyro.factor("f", WRAPPED[what](s).log_prob(value).sum())

    for each in (program, by_factor):
        density = Density(each, (None, None))
        gradient, log_joint = torch.func.grad_and_value(density.log_joint)(real(-1.5))
        assert log_joint == -torch.inf and gradient.isfinite().all()
        with pyro.validation_enabled(False):
            own = WRAPPED[what](number(0.8)).log_prob(value).sum()
        torch.testing.assert_close(density.log_parts(real(0.8))[1], own)


def test_what_is_masked_out_may_be_impossible():
    known = torch.tensor([True, False, True])

    def program(x=None, y=None):
        s = pyro.sample("s", dist.Normal(number(0.0), 1.0))
        with pyro.plate("rows", 3), pyro.poutine.mask(mask=known):
            pyro.sample(
                "y", dist.Normal(0.0, torch.stack([s * s, -1 - s * s, s * s + 1])), obs=VECTOR
            )

    density = Density(program, (None, None))
    gradient, value = torch.func.grad_and_value(density.log_joint)(real(0.8))
    expected = dist.Normal(0.0, real(0.64, 1.64)).log_prob(VECTOR[known]).sum() + dist.Normal(
        0.0, 1.0
    ).log_prob(SHARE + 0.5)
    torch.testing.assert_close(value, expected)
    assert gradient.isfinite().all() and gradient != 0
    assert not density.impossible(real(0.8))


def inverse_gamma(values):
    law = torch.distributions.InverseGamma(values["c"], number(1.0))
    return law.log_prob(real(1.2, 0.7, 2.0)).sum() - values["c"].square() / 2


def test_a_density_of_pb_sample_is_zero_there():
    program = LogDensity(inverse_gamma, {"c": number(1.0)})
    density = Density(program, (None, None))
    gradient, value = torch.func.grad_and_value(density.log_joint)(real(-1.5))
    assert value == -torch.inf and gradient.isfinite().all()
    # chains start around 'init', and not where torch's own validation would stop them
    assert (program.starts(20, seed=0).draws["c"] > 0).all()
    with pytest.raises(ValueError, match="finite number"):
        LogDensity(inverse_gamma, {"c": number(-1.0)})


class WeibullCounts(Likelihood):
    """A likelihood of a user's own whose parameter the net gives as it is."""

    task = "mine"
    targets = Targets()
    valid = (constraints.positive, "positive numbers")

    def distribution(self, f, params):
        return dist.Weibull(1.0, f).to_event(1)


def test_a_likelihood_is_zero_there():
    with seeded(0):
        net = torch.nn.Linear(1, 1).double()
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), WeibullCounts())
    density = Density(
        model.pyro_model, (real(1.0, 2.0)[:, None], real(0.5, 1.5)[:, None]), points="held"
    )
    gradient, value = torch.func.grad_and_value(density.log_joint)(real(1.0, -1.5))
    assert value == -torch.inf and gradient.isfinite().all()
    assert density.log_joint(real(1.0, 0.5)).isfinite()


# -- what methods make of it -------------------------------------------------------------------------------------------


def concentration(x=None, y=None):
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.InverseGamma(c, 1.0), obs=torch.tensor([1.2, 0.7, 2.0]))


METHODS = {
    "NUTS": pb.NUTS(num_chains=2, num_warmup=150, compile=False),
    "SVI": pb.SVI(num_steps=300, lr=0.02, compile=False),
    "MAP": pb.MAP(num_steps=200, compile=False),
    "Laplace": pb.Laplace(curvature="hessian", num_steps=200, compile=False),
    "SMC": pb.SMC(num_particles=200, compile=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_no_draw_is_impossible(method):
    num_draws = None if method == "MAP" else 100
    posterior = METHODS[method].fit(concentration, seed=0, num_draws=num_draws)
    assert (
        posterior.draws["c"] > 0
    ).double().mean() > 0.95  # a Gaussian's tail may reach below zero
    if method != "Laplace":
        assert (posterior.draws["c"] > 0).all()


@pytest.mark.filterwarnings("ignore:the prior of 'c' is a Normal")
def test_divergences_there_are_named_by_site_and_parameter():
    with pytest.warns(
        UserWarning,
        match="'concentration' of the site 'y' must be",
    ):
        METHODS["NUTS"].fit(concentration, seed=0, num_draws=200)


def test_a_search_that_ends_there_says_so():
    def scale(x=None, y=None):
        s = pyro.sample("s", dist.Normal(0.5, 0.1))
        pyro.factor("f", -100 * s)
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Poisson(s), obs=torch.zeros(3))

    with pytest.raises(FloatingPointError, match="'rate' of the site 'y' must be 0 or more"):
        pb.MAP(num_steps=2000, lr=0.05, compile=False).fit(scale, seed=0)


def test_a_prior_that_cannot_be_drawn_is_drawn_again():
    def program(x=None, y=None):
        s = pyro.sample("s", dist.Normal(0.0, 1.0))
        pyro.sample("m", dist.Normal(0.0, s))  # torch draws none of a negative scale

    density = Density(program, (None, None))
    assert (density.sample_prior(30, seed=0)[:, 0] > 0).all()
    assert not density.impossible(density.initial())


def test_only_distributions_made_in_a_run_of_this_thread_are_guarded():
    seen = {}

    def elsewhere():
        seen["kind"] = type(dist.Beta(1.0, 1.0))
        seen["probs"] = dist.ContinuousBernoulli(number(1.5)).probs

    outside = dist.Beta(1.0, 1.0)
    with without_validation():
        inside = dist.Beta(1.0, 1.0)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert dist.ContinuousBernoulli(number(1.5)).probs.isnan()
    assert seen["probs"] == dist.ContinuousBernoulli(number(1.5)).probs < 1  # as torch clamps it
    assert type(outside) is type(dist.Beta(1.0, 1.0)) is seen["kind"] is dist.Beta
    assert type(inside) is not dist.Beta and isinstance(inside, dist.Beta)
    again = pickle.loads(pickle.dumps(inside))
    assert again.log_prob(SHARE) == outside.log_prob(SHARE)
    assert repr(again) == repr(outside)
