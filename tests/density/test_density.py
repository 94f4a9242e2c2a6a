"""The traced density is the program's own log probability plus the log-Jacobian, whatever the program."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import diabetes_linear, diabetes_model, normal_prior, toy, toy_model, toy_net
from torch.func import grad, vmap

import pyrobnn as pb
from pyrobnn.core import private_torch
from pyrobnn.model import Density
from pyrobnn.model.compile import compiled


def scale_program(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], scale), obs=y[:, 0])


def dirichlet_program(x, y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs = pyro.sample("locs", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 0.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", mixture, obs=y[:, 0])


def plate_program(x, y):
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 4):
        group = pyro.sample("group", dist.Normal(loc, spread))
    index = torch.arange(len(y)) % 4
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(group[index], 1.0), obs=y[:, 0])


def minibatch_program(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 400, subsample=x):
        pyro.sample("y", dist.Normal(slope * x[:, 0], 0.3), obs=y[:, 0])


def masked_program(x, y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with (
        pyro.poutine.scale(scale=0.5),
        pyro.plate("data", len(x)),
        pyro.poutine.mask(mask=x[:, 0] > 0),
    ):
        pyro.sample("y", dist.Exponential(rate), obs=y[:, 0].abs())


INFERRED = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
BNN_MODEL = pb.BNN(toy_net(), pb.priors.ScaleMixture(), INFERRED)


def bnn_program(x, y):
    return BNN_MODEL.pyro_model(x, y)


PROGRAMS = [
    scale_program,
    dirichlet_program,
    plate_program,
    minibatch_program,
    masked_program,
    bnn_program,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_density_is_log_prob_sum_plus_log_jacobian(program):
    x, y = toy()
    density = Density(program, (x, y))
    for z in density.sample_prior(3, seed=1):
        values = density.constrain(z)
        trace = pyro.poutine.trace(pyro.poutine.condition(program, values)).get_trace(x, y)
        jacobian = sum(
            site.transform.log_abs_det_jacobian(u, site.transform(u)).sum()
            for site in density.sites
            for u in [z[site.start : site.stop].reshape(site.unconstrained_shape)]
        )
        expected = (trace.log_prob_sum() + jacobian).item()
        assert density.log_joint(z).item() == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert density.log_joint(z, jacobian=False).item() == pytest.approx(
            trace.log_prob_sum().item(), rel=1e-5, abs=1e-4
        )


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(dirichlet_program, marks=pytest.mark.slow),
        pytest.param(plate_program, marks=pytest.mark.slow),
        bnn_program,
    ],
)
def test_traced_batched_and_compiled_equal_eager(program):
    x, y = toy()
    density = Density(program, (x, y))
    z = density.sample_prior(4, seed=2)
    batched = vmap(torch.func.grad_and_value(density.log_joint))
    gradient, value = compiled(batched, z)(z)
    for row, one in enumerate(z):
        torch.testing.assert_close(value[row], density.log_joint(one), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(
            gradient[row], grad(density.log_joint)(one), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("program", PROGRAMS)
def test_flat_vectors_and_sites_are_inverse_to_each_other(program):
    density = Density(program, toy())
    z = density.sample_prior(5, seed=0)
    assert z.shape == (5, density.dim)
    torch.testing.assert_close(density.unconstrain(density.constrain(z)), z, rtol=1e-4, atol=1e-4)


def test_gradient_matches_finite_differences():
    problem = diabetes_linear()
    density = Density(diabetes_model().pyro_model, (problem["x"], problem["y"]))
    z = density.sample_prior(1, seed=0)[0]
    assert torch.autograd.gradcheck(density.log_joint, z.clone().requires_grad_())


def test_parts_add_up_and_points_have_neither_prior_nor_jacobian():
    x, y = toy()
    model = toy_model(pb.likelihoods.HomoskedasticGaussian("learned"))
    free = Density(model.pyro_model, (x, y))
    held = Density(model.pyro_model, (x, y), points="held")
    assert free.dim == held.dim + 1
    assert [s.name for s in free.sites if s.kind == "point"] == ["likelihood.scale"]
    z = free.initial()
    prior, likelihood = free.log_parts(z)
    torch.testing.assert_close(prior + likelihood, free.log_joint(z))
    torch.testing.assert_close(free.log_joint(z), held.log_joint(z[:-1]))
    torch.testing.assert_close(
        free.log_likelihood(z).double().sum(), likelihood, rtol=1e-5, atol=1e-4
    )


def test_minibatch_likelihood_is_scaled_to_the_whole_data():
    x, y = toy(40)
    model = toy_model()
    whole = Density(model.pyro_model, (x, y))
    part = Density(lambda x, y: model.pyro_model(x, y, num_data=40), (x[:10], y[:10]))
    z = whole.sample_prior(1, seed=0)[0]
    batches = [part.log_parts(z, x[i : i + 10], y[i : i + 10])[1] for i in range(0, 40, 10)]
    torch.testing.assert_close(
        torch.stack(batches).mean(), whole.log_parts(z)[1], rtol=1e-6, atol=1e-4
    )


def test_sums_are_accumulated_in_float64():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, 1, generator=generator)
    y = 3 * x + torch.randn(x.shape, generator=generator)
    density = Density(minibatch_free, (x, y))
    exact = Density(minibatch_free, (x.double(), y.double()))
    z = torch.tensor([2.9])
    assert density.log_joint(z).dtype == torch.float64
    assert (
        abs(density.log_joint(z) - exact.log_joint(z.double())) < 0.01
    )  # a float32 sum is off by several units


def minibatch_free(x, y):
    slope = pyro.sample("slope", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], 1.0), obs=y[:, 0])


def test_a_random_subsample_is_told():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x), subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(slope * x[rows, 0], 1.0), obs=y[rows, 0])

    assert Density(program, toy()).stochastic == "rows"
    assert Density(minibatch_program, toy()).stochastic is None


def test_a_deterministic_statement_is_no_datum():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        mean = pyro.deterministic("mean", slope * x[:, 0])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[:, 0])

    x, y = toy()
    density = Density(program, (x, y))
    z = torch.tensor([0.7])
    expected = dist.Normal(0.7 * x[:, 0], 1.0).log_prob(y[:, 0])
    torch.testing.assert_close(density.log_likelihood(z), expected)
    assert density.observed == ("y",)


def test_parameters_stay_out_of_the_param_store():
    model = toy_model(pb.likelihoods.HomoskedasticGaussian("learned"))
    density = Density(model.pyro_model, toy())
    density.log_joint(density.initial())
    assert list(pyro.get_param_store().keys()) == []


def test_bad_programs_are_named():
    def discrete(x, y):
        pyro.sample("k", dist.Poisson(3.0))

    with pytest.raises(ValueError, match="'k' is discrete"):
        Density(discrete, (None, None))
    with pytest.raises(ValueError, match="no latent site"):
        Density(lambda x, y: None, (None, None))
    with pytest.raises(ValueError, match="'slope' is missing"):
        Density(scale_program, toy()).unconstrain({"scale": torch.ones(())})


def test_validation_stays_as_the_user_left_it():
    with pyro.validation_enabled(True):
        Density(scale_program, toy()).log_joint(torch.zeros(2))
        with pytest.raises(ValueError):
            dist.Normal(0.0, -1.0)


def test_one_evaluation_changes_torchs_distributions_once(monkeypatch):
    """Torch forgets its look-ups of all of their classes at every change, which takes as long as a site."""
    density = Density(plate_program, toy())
    z = density.sample_prior(1, seed=0)[0]
    changes = []
    change = private_torch._make_distributions_by
    monkeypatch.setattr(
        private_torch, "_make_distributions_by", lambda *new: changes.append(new) or change(*new)
    )
    density.log_joint(z)
    assert len(changes) == 2  # there and back


def _normals(x, y):
    """Normal sites next to each other, and others that may not be taken together with them."""
    pyro.sample("first", dist.Normal(0.3, 2.0))
    row = pyro.sample("row", dist.Normal(torch.arange(3.0), 0.5).to_event(1))
    with pyro.plate("groups", 2):
        pyro.sample("group", dist.Normal(-1.0, torch.tensor([0.1, 4.0])))
    pyro.sample("after", dist.Normal(row.sum(), 1.0))
    with pyro.poutine.scale(scale=0.5):
        pyro.sample("scaled", dist.Normal(0.0, 1.0))
    pyro.sample(
        "masked", dist.Normal(torch.zeros(2), 1.0).mask(torch.tensor([True, False])).to_event(1)
    )
    pyro.sample("positive", dist.HalfNormal(1.0))
    pyro.sample("last", dist.Normal(torch.zeros(2, 2), 3.0).to_event(2))


def test_normal_sites_next_to_each_other_are_one():
    """Values to the rounding of their sum, gradients to the bit."""
    density = Density(_normals, toy())
    z = density.sample_prior(1, seed=3)[0]

    def by_site(point):
        return density.log_parts_at(density.constrain(point))[0]

    together, alone = (
        torch.func.grad_and_value(prior)(z)
        for prior in (lambda point: density.log_parts(point)[0], by_site)
    )
    torch.testing.assert_close(together[1], alone[1], rtol=1e-14, atol=0.0)
    torch.testing.assert_close(together[0], alone[0], rtol=0.0, atol=0.0)
    # what depends on another site is seen while derivatives are taken
    names = []

    def noted(point):
        values = density.constrain(point)
        for run in density._normal_runs(density.trace(values), values):
            names.append([site.name for site in run])
        return point.sum()

    grad(noted)(z)
    assert names == [["first", "row", "group"]]


def test_an_impossible_normal_among_others_has_no_density():
    def program(x, y):
        pyro.sample("first", dist.Normal(0.0, 1.0))
        pyro.sample("second", dist.Normal(torch.zeros(2), torch.tensor([1.0, -1.0])).to_event(1))

    with pyro.validation_enabled(False):
        density = Density(program, toy())
        assert density.log_joint(torch.zeros(3)) == -torch.inf
        assert grad(density.log_joint)(torch.ones(3)).tolist() == [-1.0, -1.0, 0.0]


def test_priors_of_a_bnn_are_the_sites_priors():
    model = pb.BNN(toy_net(), normal_prior(0.5), pb.likelihoods.HomoskedasticGaussian(0.2))
    x, y = toy()
    density = Density(model.pyro_model, (x, y))
    z = density.sample_prior(1, seed=0)[0]
    prior, _ = density.log_parts(z)
    torch.testing.assert_close(
        prior, dist.Normal(0.0, 0.5).log_prob(z).double().sum(), rtol=1e-6, atol=1e-5
    )
