"""The curvature of a linear last layer from its structure, against the rows of its Jacobian."""

from __future__ import annotations

import time
import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyrobnn as pb
from pyrobnn.inference.curvature import forms, linear_head
from pyrobnn.inference.curvature.ggn import ggn
from pyrobnn.likelihoods import (
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*not a mode")


def seeded_net(*sizes: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for width, out in zip(sizes, sizes[1:]):
            layers += [nn.Linear(width, out), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()


def problem(name: str, num_data: int):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(num_data, 3, generator=g, dtype=torch.float64)
    if name == "classes":
        return x, torch.randint(0, 4, (num_data,), generator=g), 4, Categorical()
    y = torch.randn(num_data, 2, generator=g, dtype=torch.float64)
    if name == "noise by input":
        return x, y, 4, HeteroskedasticGaussian()
    if name == "counts":
        return x, torch.poisson(y.exp(), generator=g), 2, Poisson()
    return x, y, 2, HomoskedasticGaussian("learned")


def fitted(
    name: str, num_data: int = 60, prior=None, num_hidden: int = 6, **options
) -> pb.Posterior:
    x, y, width, likelihood = problem(name, num_data)
    net = seeded_net(3, num_hidden, width)
    model = pb.BNN(net, prior or pb.priors.FanInNormal(), likelihood)
    method = pb.Laplace(subset="last_layer", compile=False, **options)
    return method.fit(model, x, y, init=net, num_draws=3)


@pytest.fixture
def by_structure(monkeypatch):
    monkeypatch.setattr(forms, "_FEW_WEIGHTS", 0)
    monkeypatch.setattr(forms.Cost, "of_head", lambda *_: forms.Cost(0, 0.0))


PROBLEMS = ["classes", "noise by input", "counts", "same noise"]


@pytest.mark.parametrize("num_data", [5, 60])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_structure_gives_the_posterior_of_the_rows(name, num_data, request):
    prior = pb.priors.LambdaPrior(lambda _name, *_: dist.Normal(0.0, 0.7))
    by_rows = fitted(name, num_data, prior)
    request.getfixturevalue("by_structure")
    by_layer = fitted(name, num_data, prior)
    assert by_rows.meta["curvature"]["by"] == "rows"
    assert by_layer.meta["curvature"]["by"] == "structure of the last layer"
    assert by_layer.log_evidence == pytest.approx(by_rows.log_evidence, abs=1e-8)
    draws = {site: value[0, :2] for site, value in by_rows.draws.items()}
    torch.testing.assert_close(by_layer.log_q(draws), by_rows.log_q(draws))
    x = problem(name, 4)[0]
    for one, other in zip(by_rows.network.output_moments(x), by_layer.network.output_moments(x)):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("by_structure")
def test_equal_curvatures_of_rows_are_one_product():
    record = fitted("same noise").meta["curvature"]
    assert record["form"] == "kron"
    assert record["relative_error"] == 0.0


def test_a_prior_that_differs_by_output_is_no_product(request):
    def prior(_name, _module, parameter):
        scale = torch.linspace(0.5, 2.0, len(parameter)).double()
        scale = scale.reshape(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
        return dist.Normal(torch.zeros_like(scale), scale).to_event(parameter.dim())

    by_rows = fitted("same noise", prior=pb.priors.LambdaPrior(prior))
    request.getfixturevalue("by_structure")
    by_layer = fitted("same noise", prior=pb.priors.LambdaPrior(prior))
    assert "form" not in by_layer.meta["curvature"]
    assert by_layer.log_evidence == pytest.approx(by_rows.log_evidence, abs=1e-8)


@pytest.mark.parametrize("name", PROBLEMS)
def test_tuning_finds_the_prior_to_its_stated_error(name, request):
    exact = fitted(name, num_hidden=60, tune="marginal_likelihood")
    request.getfixturevalue("by_structure")
    found = fitted(name, num_hidden=60, tune="marginal_likelihood")
    factors = [fit.meta["tuned"]["prior_precision_factor"]["all"] for fit in (exact, found)]
    error = found.meta["tuned"].get("log_factor_error", 0.0)
    assert abs(float(torch.tensor(factors[1] / factors[0]).log())) <= 4 * error + 1e-5
    assert found.log_evidence == pytest.approx(exact.log_evidence, abs=0.1)


def test_an_uncertain_quadrature_gives_way_to_the_eigenvalues(request, monkeypatch):
    exact = fitted("classes", tune="marginal_likelihood")
    request.getfixturevalue("by_structure")
    monkeypatch.setattr(linear_head, "_LARGEST_ERROR", 0.0)
    found = fitted("classes", tune="marginal_likelihood")
    assert "log_factor_error" not in found.meta["tuned"]
    assert found.meta["tuned"]["prior_precision_factor"]["all"] == pytest.approx(
        exact.meta["tuned"]["prior_precision_factor"]["all"], rel=1e-6
    )


def head_of(name: str, num_data: int = 60):
    x, _, width, likelihood = problem(name, num_data)
    net = seeded_net(3, 6, width)
    model = pb.BNN(net, pb.priors.FanInNormal(), likelihood)
    found = {}

    def remember(jacobian, centre, *arguments):
        found["jacobian"], found["centre"] = jacobian, centre
        return forms.chosen_curvature(jacobian, centre, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyrobnn.inference.curvature.precision.chosen_curvature", remember)
        fit = pb.Laplace(subset="last_layer", compile=False).fit
        fit(model, x, problem(name, num_data)[1], init=net, num_draws=1)
    jacobian, centre = found["jacobian"], found["centre"]
    head = linear_head.LinearHead.of(
        jacobian, centre.problem.x, centre.root, isinstance(likelihood, Categorical)
    )
    return jacobian, centre, head


def test_one_product_and_its_stated_error_are_those_of_the_matrix():
    jacobian, centre, head = head_of("classes")
    ones = torch.ones(jacobian.size, dtype=torch.float64)
    x = centre.problem.x
    by_rows = ggn(jacobian, x, centre.root, "kron", ones)
    product = linear_head.HeadKronCurvature(jacobian, head, ones)
    torch.testing.assert_close(product.layers[0].values, by_rows.layers[0].values)
    matrix = linear_head.HeadCurvature(jacobian, head, ones).matrix
    in_factor, out_factor = head.factors()
    order = jacobian.positions(head.layer).reshape(-1)
    true = matrix[order][:, order]
    wrong = torch.kron(out_factor, in_factor)
    assert product.error == pytest.approx(float((true - wrong).norm() / true.norm()), rel=1e-8)


@pytest.mark.parametrize("tail", [nn.Softplus(), nn.LogSoftmax(1)], ids=["link", "softmax"])
def test_a_layer_that_is_not_the_output_is_no_head(tail):
    net = nn.Sequential(seeded_net(3, 4).float(), tail)
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    model = pb.BNN(net, pb.priors.FanInNormal(), Categorical())
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "_FEW_WEIGHTS", 0)
        patch.setattr(forms, "head_curvature", lambda *given: seen.append(given))
        pb.Laplace(subset=("net.0.0.weight", "net.0.0.bias"), compile=False).fit(
            model, x, torch.arange(9) % 4, init=net, num_draws=1
        )
    assert not seen


def wide_problem():
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(300) % 10, seeded_net(40, 200, 10).float()


def test_the_default_form_is_chosen_by_cost_and_says_so():
    x, y, net = wide_problem()
    model = pb.BNN(net, pb.priors.FanInNormal(), Categorical())
    with pytest.warns(UserWarning, match="about .* GB and .* s of one core.*structure='kron'"):
        posterior = pb.Laplace(compile=False).fit(model, x, y, init=net, num_draws=2)
    assert posterior.meta["curvature"] == {"structure": "kron", "by": "rows"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = pb.Laplace(structure="kron", compile=False).fit(model, x, y, init=net, num_draws=2)
    assert same.log_evidence == posterior.log_evidence


def test_a_costly_form_is_announced_before_it_begins(monkeypatch):
    x, y, net = wide_problem()
    model = pb.BNN(net, pb.priors.FanInNormal(), Categorical())
    monkeypatch.setattr("pyrobnn.inference.laplace.find_centre", lambda *_: 1 / 0)
    with (
        pytest.warns(UserWarning, match="structure='kron' is cheaper"),
        pytest.raises(ZeroDivisionError),
    ):
        pb.Laplace(structure="full", compile=False).fit(model, x, y, init=net)


def test_a_layer_without_products_has_a_diagonal_where_all_is_too_much():
    x = torch.randint(0, 900, (400, 6), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = nn.Embedding(900, 10)
        nets = {
            "diag": nn.Sequential(words, nn.Flatten(), nn.AvgPool1d(6)),
            "kron": nn.Sequential(words, nn.Flatten(), nn.Linear(60, 10)),
        }
    for structure, net in nets.items():
        model = pb.BNN(net, pb.priors.FanInNormal(), Categorical())
        with pytest.warns(UserWarning, match=f"structure='{structure}'"):
            posterior = pb.Laplace(compile=False).fit(
                model, x, torch.arange(400) % 10, init=net, num_draws=2
            )
        assert posterior.meta["curvature"]["structure"] == structure
    assert posterior.meta["curvature"]["without_factors"] == ["net.0.weight"]


def fitted_to_noise(num_data: int, sizes: tuple[int, ...], num_draws: int) -> pb.Posterior:
    """The last layer of a net as it begins, tuned, of inputs and labels that know nothing of each other."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, sizes[0], generator=g)
    y = torch.randint(0, sizes[-1], (num_data,), generator=g)
    net = seeded_net(*sizes).float()
    model = pb.BNN(net, pb.priors.FanInNormal(), Categorical())
    method = pb.Laplace(subset="last_layer", tune="marginal_likelihood", compile=False)
    return method.fit(model, x, y, init=net, num_draws=num_draws)


@pytest.mark.slow
def test_the_last_layer_of_five_thousand_weights_costs_less_than_its_eigenvalues():
    start = time.process_time()
    posterior = fitted_to_noise(1200, (64, 512, 10), num_draws=1000)
    fit = time.process_time() - start
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(5130, 5130, generator=g, dtype=torch.float64)
    start = time.process_time()
    torch.linalg.eigvalsh(matrix + matrix.T)
    assert fit < time.process_time() - start
    assert posterior.meta["curvature"]["structure"] == "full"
    assert posterior.meta["tuned"]["log_factor_error"] < 0.05


@pytest.mark.slow
def test_a_thousand_classes_are_one_product_with_its_error():
    with pytest.warns(UserWarning, match="one Kronecker product"):
        posterior = fitted_to_noise(500, (16, 128, 1000), num_draws=5)
    assert 0 < posterior.meta["curvature"]["relative_error"] < 0.5
