"""Laplace against closed forms, and what it does when things go wrong."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, assert_var_within, seeded
from models import (
    diabetes_linear,
    diabetes_model,
    joined,
    joint_covariance,
    normal_prior,
    toy,
    toy_model,
    toy_net,
)
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    base,
)

FAST = {
    "map": pb.MAP(num_steps=1, lr=1e-6, compile=False)
}  # the polishing finds the mode of a convex problem


@contextmanager
def ignored(message: str):
    """A warning that may or may not come."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{message}")
        yield


def trained(model, x, y, num_steps: int = 100) -> pb.Posterior:
    return pb.MAP(num_steps=num_steps, compile=False).fit(model, x, y)


@pytest.mark.parametrize(
    "curvature, structure",
    [("ggn", "full"), ("ggn", "kron"), ("hessian", "full"), ("variational", "full")],
)
def test_conjugate_case_is_exact(curvature, structure):
    truth = diabetes_linear()
    method = Laplace(curvature=curvature, structure=structure, predictive="linearized", **FAST)
    posterior = method.fit(diabetes_model(), truth["x"], truth["y"], num_draws=2000)
    assert posterior.log_evidence == pytest.approx(float(truth["log_evidence"]), abs=1e-6)
    assert posterior.log_evidence == pytest.approx(-499.98742831, abs=1e-6)
    design = truth["design"][:7]
    mean, var = posterior.moments(truth["x"][:7])
    torch.testing.assert_close(mean[:, 0], design @ truth["mean"], rtol=0, atol=1e-7)
    torch.testing.assert_close(
        var[:, 0], (design @ truth["cov"] * design).sum(1), rtol=0, atol=1e-8
    )
    prediction = posterior.predict(truth["x"][:7])
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.var, var + 0.49)
    joint = joint_covariance(posterior.network, truth["x"][:7]).reshape(7, 7)
    torch.testing.assert_close(joint, design @ truth["cov"] @ design.T)
    # log p − log q is the log evidence at every draw, so every importance weight is the same
    weights = posterior.sample_stats["log_p"] - posterior.sample_stats["log_q"]
    torch.testing.assert_close(
        weights, torch.full_like(weights, float(truth["log_evidence"])), rtol=0, atol=1e-6
    )
    draws = joined(posterior.draws)
    assert_mean_within(draws, truth["mean"])
    assert_var_within(draws, truth["cov"].diagonal())
    # a linear network has linear draws: both predictives are the same functions
    design_draws = torch.einsum("cdp,np->cdn", draws, design)
    torch.testing.assert_close(posterior.function(truth["x"][:7])[..., 0], design_draws)


def test_diagonal_has_its_closed_form():
    truth = diabetes_linear()
    posterior = Laplace(structure="diag", **FAST).fit(
        diabetes_model(), truth["x"], truth["y"], num_draws=2000
    )
    prec = truth["precision"].diagonal()
    assert_var_within(joined(posterior.draws), 1 / prec)
    gap = 0.5 * (prec.log().sum() - truth["precision"].logdet())
    assert posterior.log_evidence == pytest.approx(float(truth["log_evidence"] - gap), abs=1e-6)


def test_last_layer_is_bayesian_regression_on_the_features():
    x, y = toy(dtype=torch.float64)
    with seeded(0):
        net = toy_net().double()
    model = pb.BNN(net, normal_prior(1.5), HomoskedasticGaussian(0.2))
    features = torch.cat([net[:2](x), torch.ones_like(x)], 1).detach()
    precision = features.T @ features / 0.04 + torch.eye(9).double() / 1.5**2
    best = torch.linalg.solve(precision, features.T @ y / 0.04)
    with torch.no_grad():
        net[2].weight.copy_(best[:8].T)
        net[2].bias.copy_(best[8])
    method = Laplace(subset="last_layer", predictive="linearized")
    posterior = method.fit(model, x, y, init=net, num_draws=20)
    marginal = dist.MultivariateNormal(
        torch.zeros(len(x)).double(),
        1.5**2 * features @ features.T + 0.04 * torch.eye(len(x)).double(),
    )
    assert posterior.log_evidence == pytest.approx(float(marginal.log_prob(y[:, 0])), abs=1e-8)
    mean, var = posterior.moments(x)
    torch.testing.assert_close(mean, features @ best)
    torch.testing.assert_close(var[:, 0], (features @ precision.inverse() * features).sum(1))
    first = posterior.draws["net.0.weight"]
    assert torch.equal(first, net[0].weight.detach().expand(first.shape))
    # q is a density of the last layer only; p counts the held weights' prior once, as a constant
    held = sum(dist.Normal(0.0, 1.5).log_prob(p).sum() for p in net[0].parameters()).item()
    weights = posterior.sample_stats["log_p"] - posterior.sample_stats["log_q"]
    torch.testing.assert_close(weights, torch.full_like(weights, posterior.log_evidence + held))
    drawn = Laplace(subset="last_layer", predictive="draws").fit(
        model, x, y, init=net, num_draws=20
    )
    torch.testing.assert_close(drawn.function(x), posterior.function(x))


def test_named_sites_and_a_users_net_left_alone():
    x, y = toy()
    model = toy_model()
    net = toy_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.warns(UserWarning, match="not a mode"):
        posterior = Laplace(subset=("net.0.bias", "net.2.weight")).fit(
            model, x, y, init=net, num_draws=5
        )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    spread = {name: float(value.std(1).sum()) for name, value in posterior.draws.items()}
    assert [name for name, value in spread.items() if value > 0] == ["net.0.bias", "net.2.weight"]
    assert len(posterior.approximation.loc) == 25


def curved(x, y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, scale), obs=y)


def test_a_pyro_program_in_unconstrained_space():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0]).double() + 0.5 * torch.randn(
        50, generator=generator, dtype=torch.float64
    )
    posterior = Laplace(curvature="hessian", **FAST).fit(curved, x, y, num_draws=500)
    assert posterior.meta["gradient_norm"] < 1e-4
    assert (posterior.draws["scale"] > 0).all()
    density = pb.Density(curved, (x, y))
    exact = -torch.autograd.functional.hessian(density.log_joint, posterior.approximation.loc)
    block = posterior.approximation.blocks[0]
    torch.testing.assert_close(block.prec_tril @ block.prec_tril.T, exact)
    wanted = (
        density.log_joint(posterior.approximation.loc)
        + 1.5 * math.log(2 * math.pi)
        - 0.5 * exact.logdet()
    )
    assert posterior.log_evidence == pytest.approx(float(wanted), abs=1e-8)
    # importance sampling from q gives the true evidence; its own standard error is the measure
    ratio = (posterior.sample_stats["log_p"] - posterior.sample_stats["log_q"])[0]
    estimate = (ratio - ratio.max()).exp()
    error = estimate.std() / estimate.mean() / math.sqrt(500)
    assert (
        abs(float(ratio.max() + estimate.mean().log()) - posterior.log_evidence) < 5 * error + 0.05
    )
    with pytest.raises(ValueError, match="curvature='hessian'"):
        Laplace(curvature="ggn").fit(curved, x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure", ["full", pytest.param("kron", marks=pytest.mark.slow), "diag"]
)
def test_heteroskedastic_precision_is_the_expected_fisher(structure):
    x, y = toy(30, dtype=torch.float64)
    model = pb.BNN(toy_net(out=2).double(), normal_prior(), HeteroskedasticGaussian())
    fit = trained(model, x, y)
    with ignored("not a mode"):
        posterior = Laplace(structure=structure, predictive="linearized").fit(
            model, x, y, init=fit, num_draws=50
        )
    jacobian = posterior.network.jacobian
    f, rows = jacobian.rows(x)
    sigma = nn.functional.softplus(f[:, 1]) + 1e-3
    slope = f[:, 1].sigmoid()
    fisher = torch.diag_embed(torch.stack([sigma**-2, 2 * slope**2 * sigma**-2], 1))
    precision = torch.einsum("nkp,nkl,nlq->pq", rows, fisher, rows) + torch.eye(jacobian.size)
    if structure == "diag":
        torch.testing.assert_close(posterior.approximation.blocks[0].prec, precision.diagonal())
    if structure == "full":
        mean, var = posterior.moments(x[:4])
        assert mean.shape == var.shape == (4, 1)
        cov = rows[:4, 0] @ precision.inverse() @ rows[:4, 0].T
        torch.testing.assert_close(var[:, 0], cov.diagonal())
    assert posterior.predict(x[:3]).mean.shape == (3, 1)


def test_inferred_noise_has_its_own_exact_block():
    truth = diabetes_linear()
    model = pb.BNN(seeded_linear(), normal_prior(), noise_prior())
    posterior = Laplace(**FAST).fit(model, truth["x"], truth["y"], num_draws=400)
    assert posterior.meta["gradient_norm"] < 1e-3
    weights, noise = posterior.approximation.blocks
    assert len(weights.index) == 11 and noise.index.tolist() == [11]
    density = pb.Density(model.pyro_model, (truth["x"], truth["y"]))
    exact = -torch.autograd.functional.hessian(density.log_joint, posterior.approximation.loc)
    torch.testing.assert_close(weights.prec_tril @ weights.prec_tril.T, exact[:11, :11])
    torch.testing.assert_close(noise.prec_tril.square(), exact[11:, 11:])
    assert float(posterior.draws["likelihood.scale"].std()) > 0
    joint = Laplace(curvature="hessian", **FAST).fit(model, truth["x"], truth["y"], num_draws=5)
    torch.testing.assert_close(
        joint.approximation.blocks[0].prec_tril, torch.linalg.cholesky(exact), rtol=1e-4, atol=1e-3
    )


def test_float32_networks_have_inferred_noise_too():
    x, y = toy()
    model = toy_model(HomoskedasticGaussian(dist.HalfNormal(1.0)))
    for curvature in ("ggn", "hessian"):
        with ignored("not a mode"), ignored("the Hessian is not positive definite"):
            posterior = Laplace(curvature=curvature).fit(model, x, y, init=toy_net(), num_draws=50)
        assert float(posterior.draws["likelihood.scale"].std()) > 0
        assert torch.isfinite(posterior.predict(x).f).all()


def seeded_linear() -> nn.Module:
    with seeded(0):
        return nn.Linear(10, 1).double()


def noise_prior() -> HomoskedasticGaussian:
    return HomoskedasticGaussian(
        dist.LogNormal(torch.tensor(-0.5).double(), torch.tensor(0.5).double())
    )


def test_learned_noise_of_a_users_net_is_found():
    truth = diabetes_linear()
    net = seeded_linear()
    with torch.no_grad():
        net.weight.copy_(truth["mean"][None, :10])
        net.bias.copy_(truth["mean"][10:])
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian("learned"))
    posterior = Laplace().fit(model, truth["x"], truth["y"], init=net, num_draws=3)
    residual = truth["y"][:, 0] - truth["design"] @ truth["mean"]
    assert float(posterior.draws["likelihood.scale"][0, 0]) == pytest.approx(
        float(residual.square().mean().sqrt()), abs=1e-6
    )


LIKELIHOODS = {
    "categorical": (Categorical(), 3, torch.arange(40) % 3),
    "bernoulli": (Bernoulli(), 1, (torch.arange(40) % 2)[:, None]),
    "two outputs": (HomoskedasticGaussian(torch.tensor([0.2, 0.5])), 2, toy(out=2)[1]),
    "heteroskedastic": (HeteroskedasticGaussian(), 4, toy(out=2)[1]),
}
QUICK = {"full-categorical", "diag-categorical", "kron-bernoulli", "kron-two outputs"}


@pytest.mark.parametrize(
    "structure, name",
    [
        pytest.param(
            structure, name, marks=() if f"{structure}-{name}" in QUICK else pytest.mark.slow
        )
        for structure in ("full", "kron", "diag")
        for name in LIKELIHOODS
    ],
)
def test_every_likelihood_and_structure(structure, name):
    likelihood, out, y = LIKELIHOODS[name]
    x, _ = toy()
    model = toy_model(likelihood, out=out)
    fit = trained(model, x, y, 60)
    with ignored("not a mode"):
        posterior = Laplace(structure=structure, predictive="linearized").fit(
            model, x, y, init=fit, num_draws=1000
        )
    assert math.isfinite(posterior.log_evidence)
    f, cov = posterior.network.output_moments(x[:5])
    joint = joint_covariance(posterior.network, x[:5])
    torch.testing.assert_close(
        torch.stack([joint[i, :, i] for i in range(5)]), cov, rtol=1e-3, atol=1e-5
    )
    draws = posterior.standard_function(x[:5])
    assert_mean_within(draws, f)
    assert_var_within(draws, cov.diagonal(dim1=1, dim2=2))
    if likelihood.task != "gaussian":  # the probit approximation, as cross-validation takes it
        labels = (
            torch.zeros(5, 1)
            if likelihood.task == "bernoulli"
            else torch.zeros(5, dtype=torch.long)
        )
        probs = base.log_predictive(likelihood, f, cov, labels, {}).exp()
        assert float((probs - posterior.predict(x[:5]).log_prob(labels).exp()).abs().max()) < 0.1


@pytest.mark.slow
def test_saved_and_loaded(tmp_path):
    x, y = toy()
    model = toy_model()
    fit = trained(model, x, y)
    for method in (
        Laplace(structure="kron", predictive="linearized"),
        Laplace(subset="last_layer", predictive="draws"),
        Laplace(curvature="variational"),
    ):
        with ignored("not a mode"):
            posterior = method.fit(model, x, y, init=fit, num_draws=10)
        loaded = pb.Posterior.load(posterior.save(tmp_path / "fit.nc"), model)
        torch.testing.assert_close(loaded.log_q(), posterior.log_q())
        torch.testing.assert_close(loaded.predict(x).f, posterior.predict(x).f)
        if posterior.moments is not None:
            torch.testing.assert_close(loaded.moments(x), posterior.moments(x))


@pytest.mark.parametrize("net", ["linear", "tanh"])
def test_variational_is_nearest_to_the_posterior_of_the_linearized_network(net):
    """Classes that a line separates: no other mean or scale has a larger ELBO, by common random numbers."""
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).unsqueeze(1)
    y = (x[:, 0] > 0).long()
    with seeded(0):
        module = (nn.Linear(1, 2) if net == "linear" else toy_net(out=2)).double()
    model = pb.BNN(module, normal_prior(), Categorical())
    posterior = Laplace(curvature="variational", **FAST).fit(model, x, y, num_draws=1)
    network = posterior.network
    blocks = posterior.approximation.blocks
    cov = torch.cat([block.whitened(torch.eye(len(block.index)).double()) for block in blocks])
    prior = dist.Normal(torch.zeros(len(cov)).double(), 1.0).to_event(1)
    cov = cov @ cov.T
    noise = torch.randn(
        2**15, len(cov), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    noise = torch.cat([noise, -noise])
    names = [site.name for site in network.jacobian.sites]
    shapes = [site.shape for site in network.jacobian.sites]

    def elbo(mean, scale):
        root = torch.linalg.cholesky(cov * scale)
        z = mean + noise @ root.T
        parts = [
            part.reshape(-1, *shape)
            for part, shape in zip(z.split([s.numel() for s in shapes], 1), shapes)
        ]
        f = torch.func.vmap(lambda *each: network(dict(zip(names, each)), x))(*parts)
        terms = Categorical().log_prob(f, y, {}).sum(-1) + prior.log_prob(z)
        return float(terms.mean() + root.diagonal().log().sum()) + len(cov) * (0.5 + 0.919)

    mean = posterior.approximation.loc
    best = elbo(mean, 1.0)
    direction = torch.linalg.cholesky(cov) @ torch.ones_like(mean) / len(mean) ** 0.5
    worse = [
        elbo(mean + step * direction, scale)
        for step, scale in ((0.3, 1), (-0.3, 1), (0, 1.3), (0, 0.75))
    ]
    assert max(worse) < best
    laplace = Laplace(**FAST).fit(model, x, y, num_draws=1)
    assert best > elbo(laplace.approximation.loc, 1.0)


def test_it_is_a_pyro_guide():
    truth = diabetes_linear()
    model = diabetes_model()
    posterior = Laplace(subset=("net.weight",), **FAST).fit(
        model, truth["x"], truth["y"], num_draws=2
    )
    predictive = pyro.infer.Predictive(model, guide=posterior.guide, num_samples=600)
    with seeded(0):
        drawn = predictive(truth["x"][:3])
    weight = drawn["net.weight"].reshape(600, 10)
    cov = torch.linalg.inv(truth["precision"][:10, :10])
    assert_var_within(weight[None], cov.diagonal(), min_ess=200)
    trace = pyro.poutine.trace(posterior.guide)
    with seeded(0):
        found = trace.get_trace()
    values = {name: found.nodes[name]["value"] for name in ("net.weight", "net.bias")}
    torch.testing.assert_close(found.log_prob_sum(), posterior.log_q(values))


# -- when things go wrong ------------------------------------------------------------------------


def test_not_positive_definite_is_damped_and_reported():
    x, y = toy(dtype=torch.float64)
    model = pb.BNN(toy_net().double(), normal_prior(), HomoskedasticGaussian(0.2))
    net = toy_net().double()  # untrained: far from a mode, where the Hessian is indefinite
    with pytest.warns(UserWarning) as caught:
        posterior = Laplace(curvature="hessian").fit(model, x, y, init=net, num_draws=50)
    text = " ".join(str(one.message) for one in caught)
    assert "not positive definite" in text and "not a mode" in text
    assert posterior.meta["damping"] > 0
    assert posterior.meta["warnings"]
    for value in posterior.draws.values():
        assert torch.isfinite(value).all() and (value.std(1) > 0).all()
    with pytest.warns(UserWarning, match="not positive definite"), ignored("not a mode"):
        diagonal = Laplace(curvature="hessian", structure="diag").fit(
            model, x, y, init=net, num_draws=5
        )
    assert diagonal.meta["damping"] > 0


def test_an_unconverged_mode_is_reported():
    truth = diabetes_linear()
    with pytest.warns(UserWarning, match="gradient norm"):
        posterior = Laplace().fit(
            diabetes_model(), truth["x"], truth["y"], init=seeded_linear(), num_draws=2
        )
    assert posterior.meta["gradient_norm"] > 100
    # for a quadratic log joint Newton's step is the exact distance
    step = torch.cat([seeded_linear().weight[0], seeded_linear().bias]).detach() - truth["mean"]
    assert posterior.meta["newton_distance"] == pytest.approx(
        float((step @ truth["precision"] @ step).sqrt()), rel=1e-6
    )


def test_a_precision_that_does_not_fit_is_refused():
    with seeded(0):
        net = nn.Sequential(nn.Linear(20_000, 20), nn.Linear(20, 1))
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(1.0))
    with pytest.raises(MemoryError, match=r"[\d,]{12,} bytes.*structure='kron'"):
        Laplace(curvature="hessian").fit(model, torch.zeros(3, 20_000), torch.zeros(3, 1), init=net)


@pytest.mark.slow
def test_priors_that_are_not_normal():
    x, y = toy()
    prior = pb.priors.IIDPrior(dist.Laplace(0.0, 1.0))
    model = pb.BNN(toy_net(), prior, HomoskedasticGaussian(0.2))
    fit = trained(model, x, y)
    with pytest.warns(UserWarning, match="flat or convex"), ignored("not a mode"):
        posterior = Laplace().fit(model, x, y, init=fit, num_draws=100)
    assert posterior.meta["damping"] > 0
    assert all(torch.isfinite(value).all() for value in posterior.draws.values())
    with (
        pytest.raises(ValueError, match="normal priors"),
        ignored("flat or convex"),
        ignored("not a mode"),
    ):
        Laplace(tune="marginal_likelihood").fit(model, x, y, init=fit)
    student = pb.BNN(
        toy_net(), pb.priors.IIDPrior(dist.StudentT(5.0, 0.0, 10.0)), HomoskedasticGaussian(0.2)
    )
    with ignored("not a mode"):
        tail = Laplace().fit(student, x, y, init=trained(student, x, y), num_draws=10)
    # near the centre of a wide Student t the exact curvature is (ν + 1)/(ν s²)
    assert tail.meta["damping"] < 0.01


@pytest.mark.parametrize(
    "options, match",
    [
        ({"curvature": "fisher"}, "'curvature' must be one of"),
        ({"structure": "lowrank"}, "'structure' must be one of"),
        ({"tune": "grid"}, "'tune' must be one of"),
        ({"predictive": "probit"}, "'predictive' must be one of"),
        ({"subset": "first_layer"}, "'subset' must be one of"),
        ({"curvature": "hessian", "structure": "kron"}, "no Kronecker factors"),
        ({"curvature": "hessian", "tune": "marginal_likelihood"}, "positive semidefinite"),
        ({"curvature": "variational", "structure": "kron"}, "needs structure='full'"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        Laplace(**options)


def test_bad_subsets():
    x, y = toy()
    with pytest.raises(ValueError, match=r"'subset' names \['net.5.weight'\].*net.0.weight"):
        Laplace(subset=("net.5.weight",)).fit(toy_model(), x, y)
    model = toy_model(HomoskedasticGaussian(dist.HalfNormal(1.0)))
    with pytest.raises(ValueError, match="no weights"):
        Laplace(subset=("likelihood.scale",)).fit(model, x, y, init=toy_net())
    with pytest.raises(TypeError, match="tuple of site names"):
        Laplace(subset=["net.0.weight"])
    with pytest.raises(TypeError, match="'map'"):
        Laplace(map="adam")
