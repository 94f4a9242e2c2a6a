"""SWA and SWAG: the formula on fixed iterates, the guide, batch-norm statistics, and what can go wrong."""

from __future__ import annotations

import math
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from torch.utils.data import DataLoader, TensorDataset

from pyrobnn.core.checks import Refused
from pyrobnn.inference.optim.training import Optimizer, _summed_variance, constant_rate
from pyrobnn.inference.point_methods import MAP
from pyrobnn.inference.swag import SWA, SWAG, SWAGMoments
from pyrobnn.likelihoods import HomoskedasticGaussian
from pyrobnn.model import BNN, Density
from pyrobnn.networks import mlp
from pyrobnn.posterior.approximation import FlatApproximation
from pyrobnn.priors import IIDPrior

QUICK = {"num_steps": 60, "collect_every": 3, "batch_size": 8, "compile": False}


def iterates(num=12, dim=5):
    generator = torch.Generator().manual_seed(0)
    # far from zero: a second moment minus a squared mean would lose its digits
    return 1e4 + torch.randn(num, dim, generator=generator, dtype=torch.float64)


def collected(rows, **options):
    moments = SWAGMoments(rows.shape[1], **options)
    for row in rows:
        moments.update(row)
    return moments


def formula(rows, rank):
    """Mean, Σ_diag and D of the definition, with nothing running."""
    means = torch.stack([rows[: i + 1].mean(0) for i in range(len(rows))])
    return rows.mean(0), rows.var(0, correction=0), (rows - means)[-rank:].T


def flat_program(dim=5, dtype=torch.float64):
    def program(x=None, y=None):
        pyro.sample("z", dist.Normal(torch.zeros(dim, dtype=dtype), 1.0).to_event(1))

    return program


def data(n=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator)
    return x, x[:, :1] - 0.5 * x[:, 1:] + 0.3 * torch.randn(n, 1, generator=generator)


def model(scale=0.3, net=None):
    net = mlp(2, (6,), 1, seed=0) if net is None else net
    return BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(scale))


def batch_norm_net():
    with seeded(2):
        return torch.nn.Sequential(
            torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
        )


@pytest.mark.parametrize("rank", [3, 20])
def test_the_covariance_is_the_formula_on_fixed_iterates(rank):
    rows = iterates()
    mean, variance, deviations = formula(rows, rank)
    name, state = collected(rows, rank=rank, scale=1.5).family()
    assert name == "low_rank" and state["cov_factor"].shape == (5, min(rank, 12))
    covariance = torch.diag(state["cov_diag"]) + state["cov_factor"] @ state["cov_factor"].T
    num_columns = deviations.shape[1]
    expected = 1.5**2 / 2 * (torch.diag(variance) + deviations @ deviations.T / (num_columns - 1))
    torch.testing.assert_close(covariance, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state["loc"], mean, rtol=1e-14, atol=0)


def test_the_diagonal_is_the_whole_variance():
    rows = iterates()
    name, state = collected(rows, rank=0, scale=0.5).family()
    assert name == "normal"
    torch.testing.assert_close(state["scale"], 0.5 * rows.std(0, correction=0), rtol=1e-11, atol=0)


def test_the_covariance_of_draws_converges_to_the_formula():
    name, state = collected(iterates(), rank=4).family()
    approximation = FlatApproximation(Density(flat_program()), name, state)
    with seeded(3):
        draws = approximation.sample(20_000)["z"] - state["loc"]
    products = draws[:, :, None] * draws[:, None, :]
    expected = torch.diag(state["cov_diag"]) + state["cov_factor"] @ state["cov_factor"].T
    assert_mean_within(products[None], expected)


def test_too_few_or_resting_iterates_are_refused():
    with pytest.raises(ValueError, match="at least 2 iterates"):
        collected(iterates(1)).family()
    with pytest.raises(ValueError, match="do not move"):
        collected(torch.ones(4, 2)).family()


def test_a_weight_that_rests_gets_the_smallest_variance_and_is_counted():
    rows = iterates()
    rows[:, 2] = 7.0
    moments = collected(rows, rank=4)
    assert moments.num_floored() == 1
    assert 0 < float(moments.family()[1]["cov_diag"][2]) < 1e-6


def test_a_fit_is_the_formula_on_its_own_iterates():
    x, y = data()
    seen = []

    def watch(step, metrics):
        if step > 15:
            seen.append(metrics["iterate"]())

    posterior = SWAG(rank=5, **QUICK).fit(model(), x, y, num_draws=7, seed=5, callbacks=(watch,))
    rows = torch.stack(seen).double()
    mean, variance, deviations = formula(rows, 5)
    _, state = posterior.approximation.state()
    torch.testing.assert_close(state["loc"], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["cov_diag"], variance / 2, rtol=1e-10, atol=1e-18)
    torch.testing.assert_close(state["cov_factor"], deviations / 8**0.5, rtol=1e-10, atol=1e-12)
    assert posterior.meta["num_collected"] == len(rows) == 15 and posterior.meta["rank"] == 5
    assert posterior.draws["net.0.weight"].shape == (1, 7, 6, 2) and posterior.meta["iid"]
    torch.testing.assert_close(posterior.log_q(), posterior.sample_stats["log_q"])
    average = SWA(**QUICK).fit(model(), x, y, seed=5)
    flat = torch.cat([value.reshape(-1) for value in average.draws.values()])
    torch.testing.assert_close(flat, mean.float())
    assert average.num_draws == 1


@pytest.mark.slow
def test_the_posterior_guide_runs_in_predictive():
    x, y = data()
    bnn = model()
    posterior = SWAG(rank=5, **QUICK).fit(bnn, x, y, num_draws=3)
    with seeded(6):
        predictive = pyro.infer.Predictive(bnn.pyro_model, guide=posterior.guide, num_samples=4)
        assert predictive(x)["likelihood.data"].shape == (4, 48, 1)


@pytest.mark.slow
def test_learned_noise_is_trained_along_and_held():
    x, y = data()
    bnn = model(scale="learned")
    posterior = SWAG(rank=5, num_steps=400, collect_every=5, batch_size=8, compile=False).fit(
        bnn, x, y, num_draws=6
    )
    scale = posterior.draws["likelihood.scale"]
    assert bool((scale == scale[0, 0]).all()) and 0.2 < float(scale[0, 0]) < 0.45
    assert posterior.meta["point_sites"] == ["likelihood.scale"]
    assert posterior.approximation.distribution.event_shape == (25,)


@pytest.mark.slow
def test_starts_at_a_posterior_or_a_net_without_training_first():
    x, y = data()
    start = MAP(num_steps=50, compile=False).fit(model(), x, y)
    still = {**QUICK, "lr": 1e-7}
    for init in (start, None):
        posterior = SWAG(rank=2, **still).fit(model(), x, y, num_draws=2, init=init)
        gap = posterior.draws["net.0.weight"][0, 0] - start.draws["net.0.weight"][0, 0]
        assert (float(gap.abs().max()) < 1e-4) == (init is start)
    net = mlp(2, (6,), 1, seed=9)
    posterior = SWAG(rank=2, **still).fit(model(), x, y, num_draws=2, init=net)
    torch.testing.assert_close(
        posterior.draws["net.0.weight"][0, 0], net[0].weight.data, atol=1e-4, rtol=0
    )


@pytest.mark.slow
def test_batch_norm_statistics_belong_to_each_draw():
    x, y = data()
    net = batch_norm_net()
    bnn = BNN(net, IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior = SWAG(rank=4, **QUICK).fit(bnn, x, y, num_draws=5, seed=7)
    for index in range(5):
        weight, bias = (posterior.draws[f"net.0.{name}"][0, index] for name in ("weight", "bias"))
        hidden = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(posterior.draws["net.1.running_mean"][0, index], hidden.mean(0))
        torch.testing.assert_close(posterior.draws["net.1.running_var"][0, index], hidden.var(0))
    # evaluation with these statistics is (up to the variance's n - 1) the training-mode function
    one = {name: value[0, 2] for name, value in posterior.draws.items()}
    net.train()
    weights = {name.removeprefix("net."): v for name, v in one.items() if "running" not in name}
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    expected = torch.func.functional_call(net, weights | buffers, (x,))
    torch.testing.assert_close(posterior.function(x)[0, 2], expected, atol=0.05, rtol=0.05)
    assert all(bool((value == before[name]).all()) for name, value in net.state_dict().items())
    assert bool(torch.isfinite(posterior.sample_stats["log_p"]).all())


@pytest.mark.slow
def test_a_loader_is_streamed():
    x, y = data()
    with seeded(8):
        loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
        posterior = SWAG(rank=3, num_steps=30, compile=False).fit(model(), loader, num_draws=4)
    assert posterior.meta["num_collected"] == 30 // 3 - 8 // 3
    assert "log_p" not in posterior.sample_stats
    with pytest.raises(ValueError, match="the DataLoader sets the size of batches"):
        SWAG(**QUICK).fit(model(), loader)


@pytest.mark.slow
def test_compiled_is_eager():
    x, y = data()
    fits = [
        SWAG(rank=5, **(QUICK | {"compile": compile})).fit(model(), x, y, num_draws=3, seed=9)
        for compile in (True, False)
    ]
    torch.testing.assert_close(
        fits[0].draws["net.0.weight"], fits[1].draws["net.0.weight"], rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_a_rank_above_the_iterates_is_recorded():
    x, y = data()
    assert SWAG(rank=20, **QUICK).fit(model(), x, y, num_draws=2).meta["rank"] == 15


def test_what_cannot_work_is_refused_beforehand():
    x, y = data()
    with pytest.raises(ValueError, match="takes 1 iterates, but at least 2"):
        SWAG(**(QUICK | {"collect_every": 30, "burn_in": 0.5})).fit(model(), x, y)
    with pytest.raises(Refused, match="must be a pyrobnn.BNN"):
        SWAG(**QUICK).fit(flat_program(), x, y)
    net = torch.nn.Sequential(mlp(2, (), 4, seed=0), torch.nn.Dropout(0.1), mlp(4, (), 1, seed=1))
    with pytest.raises(ValueError, match="its layers 1 are random"):
        SWAG(**QUICK).fit(model(net=net), x, y)


@pytest.mark.slow
def test_a_diverging_learning_rate_names_step_and_loss():
    x, y = data()
    net = mlp(2, (6,), 1, activation="relu", seed=0)
    with pytest.raises(
        FloatingPointError, match=r"loss of SWAG is .* at step \d+ .*smaller lr than 5"
    ):
        SWAG(**(QUICK | {"lr": 5.0, "num_steps": 400})).fit(model(scale=0.05, net=net), x, y)


@pytest.mark.slow
def test_a_rate_that_leaves_the_mode_without_diverging_warns_and_is_recorded():
    x, y = data()
    config = SWAG(rank=5, **(QUICK | {"num_steps": 300, "lr": 0.04}))
    with pytest.warns(UserWarning, match="use a smaller lr than 0.04"):
        posterior = config.fit(model(), x, y, num_draws=2)
    assert "left the mode" in posterior.meta["warnings"][0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 1}, "'rank' must be at least 2"),
        ({"scale": 0.0}, "'scale' must be > 0"),
        ({"lr": 0.0}, "'lr' must be > 0"),
        ({"burn_in": 1.0}, "'burn_in' must be"),
        ({"collect_every": 0}, "'collect_every' must be at least 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SWAG(**settings)


def test_the_rate_is_the_formula_where_noise_decides_and_the_bound_where_there_is_none():
    y = 3.0 * torch.randn(6400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(theta, y):
        return 0.5 * (theta - y).square().mean()

    start = torch.zeros(1, dtype=torch.float64)
    batches = [(part,) for part in y.split(100)]
    noise = torch.stack([part.mean() for (part,) in batches]).var()
    with seeded(0):
        rate = constant_rate(loss, start, iter(batches), num_data=6400, momentum=0.5)
        bound = constant_rate(loss, start, iter(batches), num_data=1, momentum=0.5)
    assert rate == pytest.approx(float(0.5 * 2 / (6400 * noise)), rel=1e-9)
    assert bound == pytest.approx(0.5, rel=1e-6)


def test_the_python_of_a_loss_runs_a_few_times_for_a_rate_and_the_rate_is_the_same():
    y = torch.randn(640, 3, generator=torch.Generator().manual_seed(0))
    runs = []

    def loss(theta, y):
        runs.append(len(y))
        return (theta - y).square().mean() + 0.1 * (theta - y).abs().pow(3).mean()

    def rate_of(batches):
        runs.clear()
        with seeded(0):
            rate = constant_rate(loss, torch.zeros(3), iter(batches), num_data=640, momentum=0.5)
        return rate, len(runs)

    batches = [(part,) for part in y.split(10)]
    rate, num_runs = rate_of(batches)
    # the same numbers at other addresses: the first batch is not laid out as the others are
    apart = [(torch.stack([batches[0][0]] * 2, -1)[..., 0],), *batches[1:]]
    same_rate, num_eager_runs = rate_of(apart)
    assert rate == same_rate
    # those of the products with the Hessian are not traced
    assert num_runs < 64 < 3 * 64 < num_eager_runs


def test_the_noise_of_gradients_is_had_without_keeping_them():
    gradients = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) + 1e3
    alive = []

    def one_by_one():
        for gradient in gradients:
            vector = gradient.clone()
            alive.append(weakref.ref(vector))
            yield vector
            del vector
            assert sum(ref() is not None for ref in alive) <= 1

    expected = float(gradients.double().var(0).sum())
    assert _summed_variance(one_by_one()) == pytest.approx(expected, rel=1e-12)
    assert len(alive) == 64
    assert _summed_variance(iter([gradients[0]] * 3)) == 0.0
    gradients[1, 2] = torch.nan
    assert not math.isfinite(_summed_variance(iter(gradients)))


def test_the_rate_is_halved_where_the_curvature_at_the_mode_says_nothing_of_its_surroundings():
    y = 0.01 * torch.randn(640, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(theta, y):
        return 0.25 * (theta - y).pow(4).mean()

    batches = [(part,) for part in y.split(10)]
    with seeded(0):
        rate = constant_rate(loss, torch.zeros(1, dtype=torch.float64), iter(batches), num_data=640)
    bound = 1 / (3 * float(y.square().mean()))
    assert 0.1 * bound < rate < 0.5 * bound  # the trial at the bound itself left the mode


@pytest.mark.slow
def test_at_the_default_rate_the_width_is_about_the_posteriors():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    y = x[:, :1] + 0.5 * torch.randn(400, 1, generator=generator, dtype=torch.float64)
    with seeded(0):
        net = torch.nn.Linear(3, 1).double()
    start = MAP(compile=False, num_steps=10).fit(model(scale=0.5, net=net), x, y)
    config = SWAG(rank=0, num_steps=20_000, collect_every=50)
    posterior = config.fit(model(scale=0.5, net=net), x, y, num_draws=2, init=start)
    design = torch.cat([x, torch.ones_like(y)], 1)
    exact = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(4).double()).diag().sqrt()
    # the formula is of first order in the rate: within a third, not exact
    ratio = posterior.approximation.distribution.base_dist.scale / exact
    assert bool(((ratio > 0.75) & (ratio < 1.33)).all()), ratio


def quick_swag(**options):
    return SWAG(rank=25, **{**QUICK, **options})


def test_a_torch_optimizer_makes_the_steps_in_place_of_the_rule():
    x, y = data()
    seen = []

    def watch(step, metrics):
        seen.append((metrics["iterate"](), metrics["lr"]))

    start = MAP(num_steps=50, polish_steps=0, compile=False).fit(model(), x, y)
    method = quick_swag(optimizer=torch.optim.Adam, optimizer_options={"lr": 0.02}, burn_in=0.0)
    posterior = method.fit(model(), x, y, num_draws=4, init=start, callbacks=(watch,))
    assert posterior.meta["lr"] == 0.02 and {lr for _, lr in seen} == {0.02}
    # fewer iterates than columns asked for
    assert posterior.meta["rank"] == posterior.meta["num_collected"] == 20
    settings = posterior.meta["settings"]
    assert settings["optimizer"] == "Adam" and settings["optimizer_options"] == {"lr": 0.02}

    # Adam of torch and ours, at one rate on the same batches
    ours = quick_swag(optimizer="adam", lr=0.02, burn_in=0.0)
    again = ours.fit(model(), x, y, num_draws=4, init=start)
    torch.testing.assert_close(
        again.approximation.state()[1]["loc"],
        posterior.approximation.state()[1]["loc"],
        rtol=1e-3,
        atol=1e-4,
    )


def test_sgd_by_its_class_at_the_rate_of_the_rule_is_the_default():
    x, y = data()
    plain = quick_swag().fit(model(), x, y, num_draws=4)
    lr = plain.meta["lr"]
    same = quick_swag(optimizer=torch.optim.SGD, optimizer_options={"lr": lr, "momentum": 0.9}).fit(
        model(), x, y, num_draws=4
    )
    # the rule draws batches of its own before the steps: the runs differ in their noise, not in their rate
    assert same.meta["lr"] == lr
    explicit = quick_swag(lr=lr).fit(model(), x, y, num_draws=4)
    torch.testing.assert_close(same.draws, explicit.draws, rtol=0, atol=0)
    assert (
        SWA(**QUICK, optimizer=torch.optim.SGD, optimizer_options={"lr": lr})
        .fit(model(), x, y)
        .meta["lr"]
        == lr
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_options": {"lr": 0.1}}, "give the class too"),
        ({"optimizer": "adam", "optimizer_options": {"lr": 0.1}}, "optimizer=torch.optim.SGD"),
        ({"optimizer": torch.optim.SGD, "optimizer_options": {"rate": 1}}, "'rate'"),
        ({"optimizer": torch.optim.SGD, "lr": 0.1}, "rate of its own"),
        ({"optimizer": Optimizer(average=0.5)}, "'average'"),
        ({"optimizer": "sgd"}, "'optimizer'"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        SWAG(**options)
