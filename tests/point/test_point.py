"""Point estimates against closed forms; members trained together as if alone."""

from __future__ import annotations

import functools

import pyro.distributions as dist
import pytest
import torch
from models import diabetes_linear, diabetes_model, joined, normal_prior, toy, toy_model, toy_net

import pyrobnn as pb
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.optim.training import Optimizer


def test_map_is_ridge_regression():
    truth = diabetes_linear()
    posterior = pb.MAP(num_steps=300, lr=0.05, compile=False).fit(
        diabetes_model(), truth["x"], truth["y"]
    )
    assert posterior.meta["gradient_norm"] < 1e-4  # against a curvature of about 900
    torch.testing.assert_close(joined(posterior.draws)[0, 0], truth["mean"], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_mle_is_least_squares():
    truth = diabetes_linear()
    posterior = pb.MLE(num_steps=3000, lr=0.05, compile=False).fit(
        diabetes_model(), truth["x"], truth["y"]
    )
    least_squares = torch.linalg.lstsq(truth["design"], truth["y"]).solution[:, 0]
    fitted, exact = (truth["design"] @ w for w in (joined(posterior.draws)[0, 0], least_squares))
    torch.testing.assert_close(fitted, exact, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_learned_noise_is_the_residual_scale():
    truth = diabetes_linear()
    learned = pb.likelihoods.HomoskedasticGaussian("learned")
    model = pb.BNN(diabetes_model().net, normal_prior(), learned)
    posterior = pb.MAP(num_steps=500, lr=0.05, compile=False).fit(model, truth["x"], truth["y"])
    residual = truth["y"] - posterior.predict(truth["x"]).mean
    torch.testing.assert_close(
        posterior.draws["likelihood.scale"][0, 0],
        residual.square().mean().sqrt(),
        rtol=1e-5,
        atol=0,
        check_dtype=False,
    )
    assert posterior.meta["point_sites"] == ["likelihood.scale"]


@pytest.mark.slow
def test_mini_batches_reach_the_same_mode():
    truth = diabetes_linear()
    whole = pb.MAP(num_steps=300, lr=0.05, compile=False).fit(
        diabetes_model(), truth["x"], truth["y"]
    )
    parts = pb.MAP(num_steps=1000, lr=0.02, batch_size=64, compile=False)
    batched = parts.fit(diabetes_model(), truth["x"], truth["y"])
    shift = joined(batched.draws) - joined(whole.draws)
    # in posterior standard deviations, which is what a mode is worth
    assert float((shift[0, 0] @ truth["precision"] @ shift[0, 0]).sqrt()) < 1.0


def test_a_batch_that_holds_all_rows_is_the_whole_data_and_ends_at_the_mode():
    truth = diabetes_linear()
    num_data = len(truth["x"])
    for size, whole in ((num_data, True), (10**6, True), (num_data - 1, False)):
        search = pb.MAP(num_steps=20, lr=0.05, batch_size=size, compile=False)
        posterior = search.fit(diabetes_model(), truth["x"], truth["y"])
        assert ("gradient_norm" in posterior.meta) is whole
        off = float((joined(posterior.draws)[0, 0] - truth["mean"]).abs().max())
        assert (off < 1e-7) is whole, f"batches of {size}: {off}"


def test_members_trained_together_are_as_if_alone():
    x, y = toy()
    model = toy_model()
    together = pb.DeepEnsemble(num_members=3, num_steps=50, compile=False).fit(model, x, y, seed=1)
    assert together.draws["net.0.weight"].shape == (1, 3, 8, 1)
    alone = pb.MAP(num_steps=50, polish_steps=0, compile=False)
    for member in range(3):
        one = alone.fit(model.reinitialized(3 + member), x, y)
        torch.testing.assert_close(
            one.draws["net.0.weight"][0, 0], together.draws["net.0.weight"][0, member]
        )


# of a single step the compiled code looked up a second
@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [100, 1])
def test_compiled_equals_eager(num_steps):
    x, y = toy()
    fits = [
        pb.MAP(num_steps=num_steps, polish_steps=0, compile=flag).fit(toy_model(), x, y)
        for flag in (True, False)
    ]
    torch.testing.assert_close(fits[0].draws, fits[1].draws, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_any_torch_optimizer_and_schedule():
    truth = diabetes_linear()
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    method = pb.MAP(
        num_steps=800, optimizer=Optimizer(sgd, None, clip_norm=10.0), polish_steps=0, compile=False
    )
    posterior = method.fit(diabetes_model(), truth["x"], truth["y"])
    shift = joined(posterior.draws)[0, 0] - truth["mean"]
    assert float((shift @ truth["precision"] @ shift).sqrt()) < 1.0


@pytest.mark.parametrize(
    "method", [pb.MLE, pb.MAP, pb.DeepEnsemble, pb.SVI, pb.SWA, pb.SWAG, pb.MCDropout]
)
def test_the_options_of_a_torch_optimizer_class_reach_it(method):
    x, y = toy()
    options = {"num_steps": 20, "compile": False}
    if method is pb.MCDropout:
        options["p"] = 0.1
    if method in (pb.SWA, pb.SWAG):
        options |= {"collect_every": 2, "batch_size": 8}
    rates = []

    def watch(step, metrics):
        rates.append(metrics["lr"])

    fit = method(optimizer=torch.optim.SGD, optimizer_options={"lr": 1e-6}, **options)
    schedule = Optimizer(functools.partial(torch.optim.SGD, lr=1e-6), "auto")
    same = method(optimizer=schedule, **options)
    fits = [each.fit(toy_model(), x, y, callbacks=[watch]) for each in (fit, same)]
    assert rates and 0 < max(rates) <= 1e-6
    torch.testing.assert_close(fits[0].draws, fits[1].draws, rtol=0, atol=0)


def test_options_without_a_class_are_refused():
    with pytest.raises(ValueError, match="give the class"):
        pb.MAP(optimizer_options={"lr": 0.1})
    with pytest.raises(ValueError, match="'momentun'"):
        pb.SVI(optimizer=torch.optim.SGD, optimizer_options={"momentun": 0.9})
    with pytest.raises(TypeError, match="dictionary"):
        pb.MLE(optimizer=torch.optim.SGD, optimizer_options=0.1)


def test_init_continues_from_a_net_or_a_posterior():
    x, y = toy()
    model = toy_model()
    trained = pb.MAP(num_steps=50, compile=False).fit(model, x, y)
    still = pb.MAP(num_steps=1, lr=1e-12, polish_steps=0, compile=False)
    torch.testing.assert_close(still.fit(model, x, y, init=trained).draws, trained.draws)
    net = model.reinitialized(5).net
    start = still.fit(model, x, y, init=net)
    torch.testing.assert_close(start.draws["net.0.weight"][0, 0], net[0].weight.detach())
    with pytest.raises(ValueError, match="other parameters"):
        still.fit(model, x, y, init=torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(TypeError, match="'init' must be"):
        still.fit(model, x, y, init="net")


def test_plain_programs_have_a_mode():
    import pyro
    import pyro.distributions as dist

    def program(x, y):
        rate = pyro.sample("rate", dist.Gamma(3.0, 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Exponential(rate), obs=y)

    y = torch.tensor([0.5, 1.0, 2.0])
    posterior = pb.MAP(num_steps=200, lr=0.05, compile=False).fit(program, None, y)
    # Gamma(3 + n, 2 + sum y) has its mode at (a - 1) / b
    assert posterior.draws["rate"].item() == pytest.approx(5 / 5.5, rel=1e-4)


def test_options_are_checked():
    with pytest.raises(ValueError, match="'num_steps' must be at least 1"):
        pb.MAP(num_steps=0)
    with pytest.raises(ValueError, match="'lr' must be > 0"):
        pb.MLE(lr=0.0)
    with pytest.raises(ValueError, match="'num_members'"):
        pb.DeepEnsemble(num_members=0)
    with pytest.raises(ValueError, match="'num_draws' must be 1"):
        pb.MAP().fit(toy_model(), *toy(), num_draws=5)
    with pytest.raises(TypeError, match="'seed' must be an integer"):
        pb.MAP().fit(toy_model(), *toy(), seed=0.5)


def test_a_callback_may_stop_and_see_the_model():
    x, y = toy()
    seen = []

    def callback(step, metrics):
        seen.append((step, metrics["loss"], metrics["snapshot"]().predict(x).mean.shape))
        return len(seen) == 2

    posterior = pb.MAP(num_steps=1000, compile=False).fit(toy_model(), x, y, callbacks=[callback])
    assert [step for step, *_ in seen] == [100, 200]
    assert posterior.meta["stopped"] == "callback" and posterior.history["loss"].shape == (200,)


def test_problem_keeps_its_data_in_memory():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*toy()), batch_size=8, shuffle=True
    )
    posterior = pb.MAP(num_steps=30, compile=False).fit(toy_model(), loader, seed=3)
    again = pb.MAP(num_steps=30, compile=False).fit(toy_model(), loader, seed=3)
    torch.testing.assert_close(posterior.draws, again.draws)
    assert prepare(toy_model(), loader, points="free", stream=True).num_data == 40


def test_a_start_without_a_density_is_told_from_a_large_step():
    x = torch.linspace(-1, 1, 10)[:, None]
    prior = pb.priors.IIDPrior(dist.LogNormal(0.0, 1.0))
    net = toy_net()  # its weights are not all positive
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.1))
    with pytest.raises(FloatingPointError, match="the start itself has no finite density.*support"):
        pb.MAP(num_steps=5, compile=False).fit(model, x, x, init=net)
    # of its own accord it starts at draws from the prior
    assert (pb.MAP(num_steps=5, compile=False).fit(model, x, x).draws["net.0.weight"] > 0).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the weights use up")
@pytest.mark.parametrize(
    "prior", [pb.priors.ScaleMixture(), pb.priors.IIDPrior(dist.Cauchy(0.0, 1.0))]
)
def test_learned_noise_under_a_prior_without_a_variance(prior):
    x, y = toy(8)
    model = pb.BNN(toy_net(), prior, pb.likelihoods.HomoskedasticGaussian("learned"))
    posterior = pb.MAP(num_steps=20, compile=False).fit(model, x, y)
    assert bool(torch.isfinite(posterior.predict(x).var).all())


def test_a_package_without_metadata_costs_no_fit(monkeypatch):
    """As where PYTHONPATH finds a checkout."""
    monkeypatch.setattr("importlib.metadata.Distribution.discover", lambda **_: iter(()))
    versions = pb.MLE(num_steps=1, compile=False).fit(toy_model(), *toy()).meta["versions"]
    assert versions["pyrobnn"] == pb.__version__ and versions["tyxe"] == "unknown"


@pytest.mark.parametrize(
    ("method", "scale", "num_steps"),
    [
        (pb.MAP(num_steps=40, compile=False), dist.HalfNormal(1.0), 20),
        (pb.MAP(num_steps=40, compile=False), 0.3, 40),
        # without L-BFGS, and by their evidence, the ends are what the steps make of them
        (pb.MAP(num_steps=40, polish_steps=0, compile=False), dist.HalfNormal(1.0), 40),
        (pb.DeepEnsemble(num_steps=40, compile=False), dist.HalfNormal(1.0), 40),
    ],
)
def test_a_search_whose_ends_go_on_to_their_modes_takes_half_of_the_steps(method, scale, num_steps):
    x, y = toy()
    likelihood = pb.likelihoods.HomoskedasticGaussian(scale)
    posterior = method.fit(pb.BNN(toy_net(), normal_prior(), likelihood), x, y)
    assert posterior.history["loss"].shape[-1] == num_steps


@pytest.mark.parametrize(
    "method",
    [
        pb.MAP(compile=False),
        pb.Laplace(compile=False),
        pb.SVI(num_steps=50, compile=False),
    ],
    ids=["MAP", "Laplace", "SVI"],
)
def test_a_batch_norm_net_of_fixed_noise_does_not_end_the_process(method):
    """Its noise has no coordinate, and torch divided by that number behind a batch-norm layer."""
    first, *others = toy_net()
    net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(first.out_features), *others).eval()
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
    x, y = toy()
    posterior = method.fit(pb.BNN(net, normal_prior(), likelihood), x, y, seed=0)
    assert bool(posterior.predict(x).mean.isfinite().all())
