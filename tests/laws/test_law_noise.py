"""The law of free noise: a search that finds the noise along with the function does not take one for the other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import diabetes_linear, diabetes_model, normal_prior, toy_net

import pyrobnn as pb
from pyrobnn.inference.fitting.initial import fresh_starts, starts_of
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.method import FitRun
from pyrobnn.inference.optim import paths
from pyrobnn.inference.optim.descent import descend_each, descend_in_valleys
from pyrobnn.inference.optim.free_noise import FreeNoise
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.occam import (
    Units,
    log_evidences,
    log_joints,
    weight_spreads,
)
from pyrobnn.inference.optim.path_ends import Ends, best_ends
from pyrobnn.inference.optim.training import Optimizer, Training
from pyrobnn.likelihoods import HeteroskedasticGaussian, HomoskedasticGaussian
from pyrobnn.model.likelihoods.base import HeldScale

SEARCH = pb.MAP(num_steps=400, lr=0.03, compile=False)


def waves(noise=0.1, num_data=42):
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [torch.linspace(-1, -0.3, num_data // 2), torch.linspace(0.3, 1, num_data - num_data // 2)]
    )[:, None]
    return x, torch.sin(6 * x) + noise * torch.randn(x.shape, generator=generator)


def model(likelihood=None):
    return pb.BNN(
        toy_net(hidden=10),
        normal_prior(),
        likelihood or HomoskedasticGaussian(dist.HalfNormal(1.0)),
    )


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "likelihood",
    [
        HomoskedasticGaussian(dist.HalfNormal(1.0)),
        pytest.param(HomoskedasticGaussian("learned"), marks=pytest.mark.slow),
        pytest.param(pb.likelihoods.StudentT(5.0, dist.HalfNormal(1.0)), marks=pytest.mark.slow),
    ],
)
def test_the_function_is_not_taken_for_noise(likelihood, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(paths, "_MAX_TOGETHER", 0)
    search = SEARCH if at_once else replace(SEARCH, num_steps=2000)
    posterior = search.fit(model(likelihood), *waves())
    assert 0.05 < float(posterior.draws["likelihood.scale"]) < 0.2
    assert posterior.meta["noise_held"] > 0 and posterior.meta["path_gain"] > 10
    assert posterior.history["loss"].shape == (posterior.meta["num_steps"],)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pb.Laplace(map=SEARCH, compile=False),
        pb.DeepEnsemble(num_members=3, num_steps=400, lr=0.03, compile=False),
        pb.SWAG(num_steps=1000, compile=False),
    ],
)
def test_no_method_takes_the_function_for_noise(method):
    posterior = method.fit(model(), *waves())
    scales = posterior.draws["likelihood.scale"]
    assert float(scales.median()) < 0.25
    if isinstance(method, pb.DeepEnsemble):
        assert float(scales.max()) < 0.25 and scales.unique().numel() == 3


def _several_inputs(generator):
    x = 4 * torch.rand(80, 2, generator=generator) - 2
    y = torch.sin(3 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(80, 1, generator=generator)
    net = pb.networks.mlp(2, (15,), seed=6)
    return pb.BNN(net, normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0))), x, y


def _few_and_small(generator):
    x = 4 * torch.rand(30, 1, generator=generator) - 2
    y = 0.2 * torch.sin(5 * x) + 0.01 * torch.randn(30, 1, generator=generator)
    net = pb.networks.mlp(1, (20,), seed=19)
    return pb.BNN(net, normal_prior(), HomoskedasticGaussian(dist.HalfCauchy(1.0))), x, y


def _noise_that_varies(generator):
    x = 4 * torch.rand(120, 1, generator=generator) - 2
    scale = 0.05 + 0.3 * torch.sigmoid(3 * x)
    y = torch.sin(4 * x) + scale * torch.randn(120, 1, generator=generator)
    net = pb.networks.mlp(1, (20,), 2, seed=8)
    return pb.BNN(net, normal_prior(), HeteroskedasticGaussian()), x, y


def best_of_many(problem, num_starts=24):
    """The highest log joint of so many long searches with the noise held first at the truth's order of size."""
    density = problem.density
    noise = FreeNoise.of(problem)
    points = torch.cat([density.sample_prior(num_starts // 2, seed=7) / 2] * 2)
    net_starts = starts_of(problem, range(500, 500 + num_starts // 2))
    points[: len(net_starts)] = net_starts
    levels = torch.outer(torch.tensor([0.05, 0.1, 0.2, 0.4]).repeat(num_starts // 4), noise.spread)

    def loss(z, level):
        with noise.at(level) as held:
            return -held.log_joint(z, jacobian=False) / problem.num_rows

    half = itertools.repeat((levels,), 2000)
    batches = itertools.chain(half, itertools.repeat((torch.zeros_like(levels),)))
    training = Training(4000, 0.05, Optimizer(schedule="cosine"))
    ends = minimize(torch.func.vmap(loss), points, batches, training).params
    slope = torch.func.vmap(torch.func.grad_and_value(lambda z: -density.log_joint(z)))
    return float(-slope(descend_each(slope, ends, 300))[1].min())


@pytest.mark.slow
@pytest.mark.parametrize("case", [_several_inputs, _few_and_small, _noise_that_varies])
def test_the_mode_is_near_the_best_of_many_searches(case):
    bnn, x, y = case(torch.Generator().manual_seed(6))
    problem = prepare(bnn, x, y, points="free")
    best = best_of_many(problem)
    for seed in (0, 1):
        posterior = pb.MAP().fit(bnn, x, y, seed=seed)
        values = {name: value[0, 0] for name, value in posterior.draws.items()}
        # three nats are what the search may miss
        assert float(problem.density.log_joint(problem.density.unconstrain(values))) > best - 3


def test_a_path_that_diverges_leaves_the_others_alone():
    problem = prepare(model(), *waves(), points="free")
    start = problem.density.initial(model().initial_values())
    runs = [
        Result(theta, torch.zeros(1), 1, "num_steps", torch.zeros(()), {}, 1)
        for theta in (start, torch.full_like(start, math.nan), start + 0.01)
    ]

    def slope(points):
        return torch.func.vmap(torch.func.grad_and_value(lambda z: -problem.density.log_joint(z)))(
            points
        )

    refined = Ends(runs, torch.zeros(1, 3)).refined(slope, 20, problem)
    assert all(bool(run.params.isfinite().all()) for run in refined.runs)
    assert len(refined.highest(2).runs) == 2 and refined.highest(2).runs[0] is refined.runs[0]


@pytest.mark.parametrize("optimizer", ["adam", lambda params: torch.optim.SGD(params, lr=0.1)])
def test_the_code_of_a_step_gives_gradients_elsewhere(optimizer):
    centre = torch.tensor([1.0, 2.0])

    def losses(thetas, target):
        return 0.5 * (thetas - target).square().sum(1)

    rates = torch.tensor([1.0, 10.0]) if optimizer == "adam" else None
    result = minimize(
        losses,
        torch.zeros(2, 2),
        itertools.repeat((centre,)),
        Training(20, 0.01, optimizer, compile=False),
        rates=rates,
    )
    points = torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    gradients, values = result.slope(points, (centre,))
    torch.testing.assert_close(gradients, points - centre)
    torch.testing.assert_close(values.float(), losses(points, centre))
    moved = result.params.norm(dim=1)
    assert (float(moved[1]) > 5 * float(moved[0])) == (optimizer == "adam")


def test_what_is_noise_stays_noise():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(60, 1, generator=generator)
    y = torch.randn(60, 1, generator=generator)
    posterior = SEARCH.fit(model(), x, y)
    assert float(posterior.draws["likelihood.scale"]) > 0.8 * float(y.std())


def test_maximum_likelihood_without_a_bound_follows_the_plain_path_alone():
    x, y = waves(num_data=20)  # fewer rows than weights
    posterior = pb.MLE(num_steps=20, compile=False).fit(
        model(HomoskedasticGaussian("learned")), x, y
    )
    assert "path_gain" not in posterior.meta


def test_a_callback_hears_of_the_best_path_and_may_stop_or_interrupt():
    seen = []

    def stop(step, metrics):
        seen.append((metrics["loss"], metrics["snapshot"]().draws["net.0.weight"].shape))
        return step >= 80

    posterior = SEARCH.fit(model(), *waves(), callbacks=[stop])
    assert posterior.meta["stopped"] == "callback" and posterior.meta["num_steps"] == 80
    assert all(math.isfinite(loss) and shape == (1, 1, 10, 1) for loss, shape in seen)

    def press(step, metrics):
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="Ctrl-C"):
        interrupted = SEARCH.fit(model(), *waves(), callbacks=[press])
    assert interrupted.meta["stopped"] == "interrupt"


@pytest.mark.parametrize(
    "likelihood", [HomoskedasticGaussian("learned"), HeteroskedasticGaussian()]
)
def test_a_held_scale_changes_the_gradient_of_the_location_and_no_value(likelihood):
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(7, 1, generator=generator)
    y = torch.randn(7, 1, generator=generator)
    f = torch.cat([loc, 0.3 * loc], 1)[:, : likelihood.targets.heads]
    held = HeldScale(likelihood)
    params = {"likelihood.scale": torch.tensor(0.7)}

    def log_prob(f, law=likelihood):
        return law.distribution(f, params).log_prob(y).sum()

    free = torch.func.grad(log_prob)(f)
    held.level = torch.tensor([0.2])
    torch.testing.assert_close(log_prob(f, held), log_prob(f))
    slope = torch.func.grad(log_prob)(f, held)
    torch.testing.assert_close(slope[:, :1], (y - loc) / 0.2**2)
    torch.testing.assert_close(slope[:, 1:], free[:, 1:])
    held.level = torch.zeros(1)
    torch.testing.assert_close(torch.func.grad(log_prob)(f, held), free)


def test_members_far_below_the_best_take_an_end_that_nobody_has():
    worths = torch.tensor([[-70.0, -40.0, -42.0], [-71.0, -69.0, -72.0], [-41.0, -90.0, math.nan]])
    assert best_ends(worths) == [1, 2, 6]
    alike = torch.tensor([[-70.0, -71.0], [-69.0, -75.0]])
    assert best_ends(alike) == [0, 2]


@pytest.mark.parametrize("method", [SEARCH, pb.DeepEnsemble(num_members=2, num_steps=100)])
def test_where_all_paths_together_diverge_they_follow_one_another(method, monkeypatch):
    def diverged(*_):
        raise FloatingPointError

    monkeypatch.setattr(paths.Search, "_all_at_once", diverged)
    posterior = replace(method, compile=False).fit(model(), *waves())
    assert posterior.draws["likelihood.scale"].isfinite().all()


def test_every_second_continuation_of_a_search_for_evidence_is_smoothed():
    start = torch.zeros(2, 3)
    plain = paths.planned(start, 9, lambda number: torch.ones(number, 3))
    assert not plain.smoothings.any()
    smoothed = paths.planned(start, 9, lambda number: torch.ones(number, 3), smoothed=True)
    is_smoothed = smoothed.smoothings > 0
    assert is_smoothed.tolist() == [[path in (2, 4, 6, 8) for path in range(9)]] * 2
    # neither the plain path nor the first from another start holds the noise
    assert (smoothed.relative_levels[:, [0, 5]] == 0).all()
    assert (smoothed.relative_levels[is_smoothed] > 0).all()


@pytest.mark.slow
def test_smoothed_members_predict_better_where_rows_are_few(monkeypatch):
    def rows(number, seed):
        generator = torch.Generator().manual_seed(seed)
        x = 4 * torch.rand(number, 4, generator=generator) - 2
        clean = x[:, 0] * torch.sin(2 * x[:, 1]) + x[:, 2] - 0.4 * x[:, 3].square()
        return x, clean[:, None] + 0.2 * torch.randn(number, 1, generator=generator)

    net = pb.networks.mlp(4, (14,), seed=71)
    bnn = pb.BNN(net, normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0)))
    x, y = rows(500, 1071)
    densities = {}
    for smooths in (False, True):
        monkeypatch.setattr(pb.DeepEnsemble, "smooths", smooths)
        ensemble = pb.DeepEnsemble().fit(bnn, *rows(110, 71))
        densities[smooths] = float(ensemble.predict(x).log_prob(y).mean())
    assert densities[True] > densities[False] + 0.5


def test_shaken_weights_come_to_rest_and_the_noise_is_not_shaken():
    problem = prepare(model(), *waves(), points="free")
    spreads = weight_spreads(problem.density)
    scale = problem.density.site("likelihood.scale")
    assert (spreads[scale.start : scale.stop] == 0).all()
    of_weights = spreads[problem.density.site("net.0.weight").start]
    assert float(of_weights) == pytest.approx(1.0, abs=0.4)  # by the quartiles of 101 draws
    scales = torch.outer(torch.tensor([0.0, 0.1]), spreads)
    with seeded(0):
        leading = paths._shaken_first(scales, 2, lambda step: ())
        steps = [leading(step) for step in range(3)]
    shifts = torch.stack([step[0] for step in steps])
    assert not shifts[:, 0].any() and not shifts[2].any()
    assert (shifts[:2, 1].abs() > 0).sum() == 2 * (spreads > 0).sum()


def test_the_seed_moves_the_other_starts():
    problem = prepare(model(), *waves(), points="free")
    start = problem.density.initial(model().initial_values())
    first, same, other = (fresh_starts(problem, seed, start, 2) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    scale = problem.density.site("likelihood.scale")
    assert torch.equal(first[:, scale.start], start[scale.start].expand(2))


def test_each_of_several_points_descends_to_the_minimum():
    scales = torch.tensor([1.0, 30.0, 0.1], dtype=torch.float64)

    def slope(points):
        return scales * (points - 2), 0.5 * (scales * (points - 2).square()).sum(1)

    starts = torch.tensor([[0.0, 1.0, 5.0], [9.0, -3.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        descend_each(slope, starts, 200), torch.full_like(starts, 2.0), rtol=0, atol=1e-2
    )


def test_points_in_a_curved_valley_descend_to_its_bottom():
    """Of (1 - x)² / 2 + (30 (y - x²))² / 2, in the units of its Gauss-Newton matrix."""

    def slope(points):
        x, y = points.unbind(1)
        across = 30.0 * (y - x.square())
        gradient = torch.stack([x - 1.0 - 60.0 * x * across, 30.0 * across], 1)
        return gradient, 0.5 * ((1.0 - x).square() + across.square())

    def roots_at(points):
        rows = torch.zeros(len(points), 2, 2, dtype=points.dtype)
        rows[:, 0, 0] = -1.0
        rows[:, 1, 0] = -60.0 * points[:, 0]
        rows[:, 1, 1] = 30.0
        return torch.linalg.inv(torch.linalg.cholesky(rows.mT @ rows))

    starts = torch.tensor([[-1.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    near = descend_in_valleys(slope, starts, roots_at, 10)
    torch.testing.assert_close(near, torch.ones_like(near), rtol=0, atol=0.01)
    after_one = descend_in_valleys(slope, starts, roots_at, 1)
    assert slope(near)[1][0] < 0.01 < slope(after_one)[1][0] < slope(starts)[1][0]


def test_the_units_around_a_point_are_those_of_its_evidence():
    truth = diabetes_linear()
    linear = prepare(diabetes_model(), truth["x"], truth["y"], points="free")
    theta = linear.density.initial(linear.bnn.initial_values())[None]
    roots = Units.around(linear, theta).roots(theta)[0]
    torch.testing.assert_close(roots.mT @ roots, truth["cov"])
    problem = prepare(model(), *waves(), points="free")
    thetas = torch.stack([0.5 * problem.density.sample_prior(1, seed=seed)[0] for seed in (0, 1)])
    log_dets = torch.linalg.slogdet(Units.around(problem, thetas).roots(thetas)).logabsdet
    evidences = log_joints(problem, thetas) + log_dets
    evidences = evidences + 0.5 * problem.density.dim * math.log(2.0 * math.pi)
    torch.testing.assert_close(evidences, log_evidences(problem, thetas), rtol=1e-4, atol=1e-3)


def test_the_evidence_of_a_linear_model_is_exact():
    truth = diabetes_linear()
    problem = prepare(diabetes_model(), truth["x"], truth["y"], points="free")
    theta = problem.density.unconstrain(
        {"net.weight": truth["mean"][None, :10], "net.bias": truth["mean"][10:]}
    )
    torch.testing.assert_close(log_evidences(problem, theta[None])[0], truth["log_evidence"])


@pytest.mark.parametrize("prior", [dist.Laplace(0.0, 1.0), dist.StudentT(3.0, 0.0, 1.0)])
def test_the_evidence_under_a_prior_without_curvature_is_near_the_integral(prior):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    x[:, 1] *= 1e-4  # a direction that the data cannot tell
    y = 2.5 * x[:, :1] + 0.1 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    net = torch.nn.utils.skip_init(torch.nn.Linear, 2, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(net.weight)
    problem = prepare(
        pb.BNN(net, pb.priors.IIDPrior(prior), HomoskedasticGaussian(0.1)), x, y, points="free"
    )
    slopes = torch.linspace(2.2, 2.8, 601, dtype=torch.float64)
    rows = dist.Normal(slopes[:, None] * x[:, 0], 0.1)
    likelihood = rows.log_prob(y[:, 0]).sum(1) + prior.log_prob(slopes)
    integral = torch.logsumexp(likelihood, 0) + math.log(float(slopes[1] - slopes[0]))
    mode = problem.density.unconstrain({"net.weight": torch.tensor([[2.5, 0.01]])})
    evidence = log_evidences(problem, mode[None].double())[0]
    assert abs(float(evidence - integral)) < 0.5


def test_where_no_batch_of_points_can_be_run_the_paths_follow_one_another():
    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = toy_net(hidden=4)

        def forward(self, x):
            f = self.inner(x)
            return f if float(f.detach().mean()) < 1e9 else f + 1

    looks = pb.BNN(Looks(), normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0)))
    posterior = replace(SEARCH, num_steps=40, polish_steps=0).fit(looks, *waves())
    assert math.isfinite(posterior.meta["path_gain"])


def test_each_of_several_targets_keeps_its_best_path():
    x, y = waves()
    problem = prepare(model(), x, y, points="free")
    generator = torch.Generator().manual_seed(1)
    ys = torch.stack([y, 0.3 * y, torch.randn(y.shape, generator=generator)])
    start = problem.density.initial(model().initial_values(), 0)
    plain = SEARCH._search(problem, start.repeat(3, 1), FitRun(1), ys).params
    gains = []
    for posterior, targets, end in zip(SEARCH.fit_each(problem, ys, FitRun(1)), ys, plain):
        values = {name: value[0, 0] for name, value in posterior.draws.items()}
        best = problem.density.unconstrain(values)
        joint, plain_joint = (problem.density.log_joint(z, x, targets) for z in (best, end))
        gains.append(float(joint - plain_joint))
    # three nats are what the search may miss; these ends are not refined
    assert gains[0] > 3 and min(gains) > -0.01
    assert float(posterior.draws["likelihood.scale"]) > 0.8 * float(targets.std())  # pure noise


@pytest.mark.slow
def test_an_impossible_parameter_on_a_path_is_named():
    class Broken(HomoskedasticGaussian):
        def distribution(self, f, params):
            scale = self.own.value("scale", f, params).expand(f.shape)
            return dist.Normal(f, scale - 10.0).to_event(1)

    broken = model(Broken(dist.HalfNormal(1.0)))
    with pytest.raises(FloatingPointError, match=r"'scale' of the site 'likelihood\.data"):
        replace(SEARCH, num_steps=10).fit(broken, *waves())
