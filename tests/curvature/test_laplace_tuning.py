"""Tuned prior precision and noise against brute force: refits of the evidence on scaled models at the same mode."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import diabetes_linear, normal_prior, toy, toy_net
from scipy import optimize

import pyrobnn as pb
from pyrobnn.inference.laplace import Laplace
from pyrobnn.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*not a mode", "ignore:cross-validation leaves the prior"
)


def layered_prior(scales: dict[str, float]) -> pb.priors.LambdaPrior:
    return pb.priors.LambdaPrior(lambda name, *_: dist.Normal(0.0, scales[name.split(".")[0]]))


def trained_net(num_data: int):
    x, y = toy(num_data, dtype=torch.float64)
    model = pb.BNN(toy_net().double(), normal_prior(), HomoskedasticGaussian(0.2))
    posterior = pb.MAP(num_steps=100, compile=False).fit(model, x, y)
    net = toy_net().double()
    values = {name.removeprefix("net."): value[0, 0] for name, value in posterior.draws.items()}
    net.load_state_dict(values)
    return x, y, net


def evidence(structure, x, y, net, scales, noise) -> float:
    model = pb.BNN(
        net, layered_prior({"0": scales[0], "2": scales[1]}), HomoskedasticGaussian(noise)
    )
    return Laplace(structure=structure).fit(model, x, y, init=net, num_draws=1).log_evidence


#: 25 weights: 12 data take the full structure's Gram side, 60 the other
CASES = [("full", 12), ("full", 60), ("kron", 60), ("diag", 60)]


@pytest.mark.slow
@pytest.mark.parametrize("structure, num_data", CASES)
def test_tuned_prior_precision_is_the_brute_force_maximum(structure, num_data):
    x, y, net = trained_net(num_data)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.2))
    method = Laplace(structure=structure, tune="marginal_likelihood")
    posterior = method.fit(model, x, y, init=net, num_draws=2000)
    factor = posterior.meta["tuned"]["prior_precision_factor"]["all"]

    def loss(log_tau):
        return -evidence(structure, x, y, net, [float(torch.tensor(-log_tau / 2).exp())] * 2, 0.2)

    best = optimize.minimize_scalar(loss, bounds=(-6, 6), method="bounded", options={"xatol": 1e-3})
    assert posterior.log_evidence == pytest.approx(-best.fun, abs=1e-5)
    assert factor == pytest.approx(float(torch.tensor(best.x).exp()), rel=5e-3)
    # the returned model is the tuned one: its prior has the scale that was found
    scale = posterior.model.priors["net.0.bias"].base_dist.scale[0]
    assert float(scale) == pytest.approx(factor**-0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure, num_data",
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_prior_precision_per_layer_and_noise_together(structure, num_data):
    x, y, net = trained_net(num_data)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian("learned"))
    method = Laplace(structure=structure, tune="per_layer")
    posterior = method.fit(model, x, y, init=net, num_draws=1)
    factors = posterior.meta["tuned"]["prior_precision_factor"]
    assert list(factors) == ["net.0", "net.2"]
    scales = [value**-0.5 for value in factors.values()]
    noise = float(posterior.draws["likelihood.scale"][0, 0])

    def loss(log_values):
        first, second, sigma = torch.tensor(log_values).exp().tolist()
        return -evidence(structure, x, y, net, [first, second], sigma)

    start = torch.tensor([*scales, noise]).double().log().numpy()
    assert posterior.log_evidence == pytest.approx(-loss(start), abs=1e-5)
    best = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxfev": 25})
    assert -best.fun - posterior.log_evidence < 1e-4


def test_one_factor_and_noise_together():
    x, y, net = trained_net(60)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian("learned"))
    posterior = Laplace(tune="marginal_likelihood").fit(model, x, y, init=net, num_draws=1)
    scale = posterior.meta["tuned"]["prior_precision_factor"]["all"] ** -0.5
    noise = float(posterior.draws["likelihood.scale"][0, 0])

    def loss(log_values):
        one, sigma = torch.tensor(log_values).exp().tolist()
        return -evidence("full", x, y, net, [one, one], sigma)

    start = torch.tensor([scale, noise]).double().log().numpy()
    assert posterior.log_evidence == pytest.approx(-loss(start), abs=1e-5)
    best = optimize.minimize(loss, start, method="Nelder-Mead", options={"maxfev": 25})
    assert -best.fun - posterior.log_evidence < 1e-4


def test_classes_are_tuned_too():
    x, _ = toy()
    net = toy_net(out=3)
    model = pb.BNN(net, normal_prior(), Categorical())
    y = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    fit = pb.MAP(num_steps=100, compile=False).fit(model, x, y)
    plain = Laplace(structure="kron").fit(model, x, y, init=fit, num_draws=1)
    tuned = Laplace(structure="kron", tune="marginal_likelihood").fit(
        model, x, y, init=fit, num_draws=1
    )
    assert tuned.log_evidence > plain.log_evidence
    assert tuned.meta["tuned"]["noise_factor"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cross-validation ended at the edge")
def test_cross_validation_scores_a_mode_that_has_not_seen_the_points():
    """Conjugate: the mode without the held-out fifth is ridge regression on the others."""
    truth = diabetes_linear()
    x, y, design = (truth[name][:60] for name in ("x", "y", "design"))
    with seeded(0):
        net = torch.nn.Linear(10, 1).double()
    model = pb.BNN(net, normal_prior(0.1), HomoskedasticGaussian(0.7))
    fit = Laplace(tune="cross_validation", num_steps=100, compile=False).fit(
        model, x, y, num_draws=1, seed=3
    )
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))

    def scores(held: torch.Tensor, kept: torch.Tensor, tau: float) -> torch.Tensor:
        precision = design[kept].T @ design[kept] / 0.49 + 100 * torch.eye(11).double()
        mean = torch.linalg.solve(precision, design[kept].T @ y[kept] / 0.49)
        precision.diagonal().add_(100 * (tau - 1))  # tuning leaves the mode where it is
        var = (design[held] @ torch.linalg.inv(precision) * design[held]).sum(1, keepdim=True)
        return dist.Normal(design[held] @ mean, (var + 0.49).sqrt()).log_prob(y[held])[:, 0]

    grid = torch.logspace(-4, 4, 25).double().tolist()
    table = torch.stack(
        [
            torch.cat(
                [
                    # the worse of a mode that has not seen the points and of the one that has
                    torch.minimum(
                        scores(held, order[~torch.isin(order, held)], tau), scores(held, order, tau)
                    )
                    for held in order.split(12)
                ]
            )
            for tau in grid
        ]
    )
    best = int(table.mean(1).argmax())
    gains = table[best] - table[12]
    found = fit.meta["tuned"]["held_out"]
    assert found["num_points"] == 60
    assert found["gain"] == pytest.approx(float(gains.mean()), abs=1e-5)
    assert found["error"] == pytest.approx(float(gains.std()) / 60**0.5, abs=1e-5)
    # the mildest that the best does not beat by the error of their difference
    lost = table[best] - table
    mild = [i for i in range(25) if float(lost[i].mean()) <= float(lost[i].std()) / 60**0.5]
    assert found["factor"] == pytest.approx(grid[min(mild, key=lambda i: abs(i - 12))])
    assert fit.meta["tuned"]["prior_precision_factor"] == {"all": found["factor"]}


def precise_data(num_data: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] / 2
    return x, y + 0.1 * torch.randn(num_data, 1, generator=generator)


SHORT = pb.MAP(num_steps=100, polish_steps=100, compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
def test_cross_validated_is_not_worse_than_declared(given):
    x, y = precise_data(40, 0)
    test_x, test_y = precise_data(2000, 99)
    model = pb.BNN(toy_net(4, 30), normal_prior(), HomoskedasticGaussian(0.1))
    init = pb.MAP(num_steps=200, compile=False).fit(model, x, y) if given else None

    def log_density(tune) -> torch.Tensor:
        method = Laplace(tune=tune, map=SHORT)
        mean, var = method.fit(model, x, y, init=init, num_draws=1).moments(test_x)
        return dist.Normal(mean, (var + 0.01).sqrt()).log_prob(test_y)[:, 0].double()

    gain = log_density("cross_validation") - log_density(None)
    assert (
        float(gain.mean()) >= -2 * float(gain.std()) / len(gain) ** 0.5
    )  # equal where nothing is gained


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the centre is not a mode|cross-validation")
@pytest.mark.parametrize(
    ("scale", "kind", "steps"),
    [
        (0.3, "line", 200),
        (0.3, "line", 1000),
        # the second mode is better on new rows than the given net: by its errors the widths were 0.1 to 0.5 nats worse
        (0.5, "tanh", 200),
    ],
)
def test_cross_validated_around_a_trained_net_is_worse_by_no_more_than_its_error(
    scale, kind, steps
):
    """44 rows of 7 inputs: eight of them had such small residuals that no width at all was best, by 0.4 nats."""
    data = []
    for num, seed in ((44, 2), (2000, 1001)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num, 7, generator=generator)
        f = (
            0.3 * x[:, :3].sum(1, keepdim=True)
            if kind == "line"
            else torch.tanh(x[:, :2].sum(1, keepdim=True))
        )
        data.append((x, f + 0.04 * torch.randn(num, 1, generator=generator)))
    (x, y), (test_x, test_y) = data
    with seeded(2):
        net = torch.nn.Sequential(torch.nn.Linear(7, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    model = pb.BNN(net, normal_prior(scale), HomoskedasticGaussian(0.04))

    def fitted(tune) -> tuple[torch.Tensor, pb.Posterior]:
        posterior = Laplace(tune=tune, map=SHORT).fit(model, x, y, init=net, num_draws=1)
        mean, var = posterior.moments(test_x)
        return dist.Normal(mean, (var + 0.04**2).sqrt()).log_prob(test_y)[:, 0].double(), posterior

    tuned, posterior = fitted("cross_validation")
    gain = tuned - fitted(None)[0]
    error = float(gain.var() / len(gain) + posterior.meta["tuned"]["held_out"]["error"] ** 2) ** 0.5
    assert float(gain.mean()) >= -2 * error, (float(gain.mean()), error)


@pytest.mark.slow
def test_cross_validation_needs_four_rows():
    x, y, net = trained_net(60)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.07))
    with pytest.raises(ValueError, match="at least 4"):
        Laplace(tune="cross_validation").fit(model, x[:3], y[:3], init=net)


def test_no_signal_ends_at_the_bound_and_says_so():
    truth = diabetes_linear()
    net = torch.nn.utils.skip_init(torch.nn.Linear, 10, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.7))
    with pytest.warns(UserWarning, match="at the bound of its range"):
        posterior = Laplace(tune="marginal_likelihood").fit(
            model, truth["x"], truth["y"], init=net, num_draws=5
        )
    assert all(torch.isfinite(value).all() for value in posterior.draws.values())
