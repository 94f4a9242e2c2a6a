"""Draws judged by their function, without a reference: Hamiltonian moves carry them to the posterior."""

from __future__ import annotations

import warnings

import helpers
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from models import normal_prior, toy_net

import pyrobnn as pb
from pyrobnn.core.groups import MOVED
from pyrobnn.diagnostics import Evidence, diagnose
from pyrobnn.diagnostics.check_table import TABLE
from pyrobnn.diagnostics.judge import made
from pyrobnn.model import Density
from pyrobnn.posterior import Posterior, invariance


def find(verdict, name):
    return next((check for check in verdict.checks if check.name == name), None)


def line(num_inputs, num_data, *, alike=0.0, noise=0.5):
    """A linear net, data whose inputs share `alike` of their variance, and the exact posterior: mean and covariance."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(num_data, 1, generator=generator)
    x = alike**0.5 * common + (1 - alike) ** 0.5 * torch.randn(
        num_data, num_inputs, generator=generator
    )
    y = x.sum(1, keepdim=True) / num_inputs**0.5 + noise * torch.randn(
        num_data, 1, generator=generator
    )
    with torch.random.fork_rng():
        net = torch.nn.Linear(num_inputs, 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(noise))
    design = torch.cat([x, torch.ones(num_data, 1)], 1).double()
    precision = design.T @ design / noise**2 + torch.eye(num_inputs + 1)
    covariance = torch.linalg.inv(precision)
    return model, x, y, (covariance @ design.T @ y.double()[:, 0] / noise**2, covariance)


CASES = {size: line(size, num_data) for size, num_data in ((2, 40), (150, 300))}


def of_draws(model, weights):
    """What a fit of a density gives for draws (draw, weight) of the net's weights and bias."""
    draws = {
        "net.weight": weights[None, :, None, :-1].float(),
        "net.bias": weights[None, :, -1:].float(),
    }
    meta = {
        "method": "SVI",
        "kind": "independent",
        "claim": "approximate",
        "likelihood": "gaussian",
        "iid": True,
    }
    return Posterior(model, draws, approximation=object(), meta=meta)


def planted(model, exact, factor, shift, num_draws=1000):
    """Draws of the exact posterior, then `factor` times as far from the mean and `shift` sd beside it."""
    mean, covariance = exact
    normal = torch.randn(
        num_draws, len(mean), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    sd = covariance.diagonal().sqrt()
    return of_draws(
        model, mean + factor * normal @ torch.linalg.cholesky(covariance).T + shift * sd
    )


@pytest.mark.parametrize("size", [2, 150])
@pytest.mark.parametrize(
    ("factor", "shift", "status"),
    [
        (1.0, 0.0, "pass"),
        (0.9, 0.0, "pass"),
        (0.3, 0.0, "fail"),
        (3.0, 0.0, "fail"),
        (1.0, 2.0, "fail"),
    ],
)
def test_the_function_of_draws_that_are_moved_says_how_far_they_were_off(
    size, factor, shift, status
):
    model, x, y, exact = CASES[size]
    tree = planted(model, exact, factor, shift).to_datatree(x, y)
    found = find(diagnose(tree), "function_moves")
    assert found.status == status, found.evidence
    assert (
        abs(np.log(found.value / factor)) < 0.3
    )  # the factor itself, whatever the number of weights


@pytest.mark.parametrize(("factor", "status"), [(1.0, "pass"), (0.4, "fail")])
def test_chains_are_judged_by_their_function_too(factor, status):
    model, x, y, exact = CASES[2]
    found = planted(model, exact, factor, 0.0)
    draws = {name: value.reshape(4, 250, *value.shape[2:]) for name, value in found.draws.items()}
    meta = {"method": "NUTS", "kind": "chains", "claim": "exact", "likelihood": "gaussian"}
    tree = Posterior(model, draws, meta=meta).to_datatree(x, y)
    check = find(diagnose(tree), "function_moves")  # was not made of chains
    assert check.status == status and "guide" not in check.action, check.evidence


@pytest.mark.parametrize("shape", ["normal", "two places", "between bounds"])
def test_chains_of_another_shape_are_told_by_their_log_density(shape):
    """Right in mean and covariance, so that neither Stein's identities nor the function's sd see them."""
    model, x, y, (mean, covariance) = CASES[2]
    rng = np.random.default_rng(3)
    z = rng.normal(size=(1000, 3))
    if shape == "two places":
        z = 0.95 * np.sign(rng.normal(size=z.shape)) + (1 - 0.95**2) ** 0.5 * z
    if shape == "between bounds":
        z = rng.uniform(-(3**0.5), 3**0.5, size=z.shape)
    weights = mean + torch.tensor(z) @ torch.linalg.cholesky(covariance).T
    found = of_draws(model, weights)
    draws = {name: value.reshape(4, 250, *value.shape[2:]) for name, value in found.draws.items()}
    meta = {"method": "NUTS", "kind": "chains", "claim": "exact", "likelihood": "gaussian"}
    verdict = diagnose(Posterior(model, draws, meta=meta).to_datatree(x, y))
    assert (find(verdict, "density_moves").status == "pass") == (shape == "normal"), (
        verdict.to_json()
    )
    assert (verdict.draws == "pass") == (shape == "normal")  # all three passed before


def test_a_mean_field_fit_of_correlated_weights_is_judged_by_what_it_predicts():
    """Along the data its sd is right, across them far too small: both are seen, and the size of each."""
    model, x, y, (mean, covariance) = line(6, 60, alike=0.98)
    sd = torch.linalg.inv(covariance).diagonal().rsqrt()
    normal = torch.randn(1000, 7, generator=torch.Generator().manual_seed(1))
    tree = of_draws(model, mean + sd * normal).to_datatree(x, y)
    probe_x = tree[MOVED]["region_x"].values
    design = np.concatenate([probe_x, np.ones((len(probe_x), 1))], 1)
    exact = np.sqrt(np.einsum("ij,jk,ik->i", design, covariance.numpy(), design))
    before, after = (tree[MOVED][name].values[..., 0].std(0) for name in ("approximate", "moved"))
    assert np.abs(np.log(before / exact)).max() > 0.5
    assert np.abs(np.log(after / exact)).max() < 0.3


MOVES = {row.code: row for row in TABLE if row.code.endswith("_moves")}
#: of each check faults that should fail, as draws of a standard normal become them
FAULTS = {
    "function_moves": (lambda z: z / 2.1, lambda z: 2.1 * z, lambda z: z + 1.1),
    "density_moves": (lambda z: z / 1.7, lambda z: 1.7 * z, lambda z: z + 1.1),
}


def moved_by(z, stayed, rng):
    """A tree whose function and log density are `z` before, and afterwards are on their way to a standard normal."""
    z = z[: len(z) - len(z) % 4].reshape(4, -1)
    after = stayed * z + (1 - stayed**2) ** 0.5 * rng.normal(size=z.shape)
    dims = ("chain", "draw", "probe", "output")
    f, g = (np.repeat(each[..., None, None], 3, axis=2) for each in (z, after))
    moved = {"before": (dims, f), "after": (dims, g), "acceptance": ((), 0.8)}
    moved |= {
        f"density_{when}": (dims[:2], each) for when, each in (("before", z), ("after", after))
    }
    tree = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"w": (dims[:2], z)}), MOVED: xr.Dataset(moved)}
    )
    tree["function"] = xr.Dataset({"f": (dims, f)})
    return Evidence(tree)


@pytest.mark.parametrize("name", MOVES)
def test_a_check_by_moves_that_could_not_have_failed_does_not_pass(name):
    rng = np.random.default_rng(0)
    for fault in FAULTS[name]:
        for stayed in (0.0, 0.3, 0.6, 0.75, 0.85, 0.95, 0.995):
            found = made(MOVES[name], moved_by(fault(rng.normal(size=8000)), stayed, rng))
            assert found.status != "pass", (stayed, found.evidence)
    healthy = [
        made(MOVES[name], moved_by(rng.normal(size=1024), stayed, rng))
        for stayed in (0.0, 0.3, 0.97)
    ]
    assert [each.status for each in healthy] == ["pass", "pass", "info"]
    assert healthy[-1].code == "moves_undecided" and "nan" not in healthy[-1].evidence


def as_chains(posterior):
    """The same draws as those of four chains."""
    draws = {
        name: value.reshape(4, -1, *value.shape[2:]) for name, value in posterior.draws.items()
    }
    meta = {"method": "NUTS", "kind": "chains", "claim": "exact", "likelihood": "gaussian"}
    return Posterior(posterior.model, draws, meta=meta)


def test_draws_of_which_nothing_can_be_said_by_moves(monkeypatch):
    model, x, y, exact = CASES[2]
    chains = as_chains(planted(model, exact, 1.0, 0.0))
    assert MOVED not in chains.thin(25).to_datatree(x, y).children
    still = chains.to_datatree(x, y)
    still[MOVED] = still[MOVED].to_dataset().assign(acceptance=0.01)
    assert find(diagnose(still), "function_moves").status == "info"
    short = chains.to_datatree(x, y)
    before = short[MOVED].to_dataset()["before"]
    short[MOVED] = (
        short[MOVED].to_dataset().assign(after=before + 0.02 * before.std() * np.cos(1e6 * before))
    )
    found = find(diagnose(short), "function_moves")
    assert found.status == "info" and found.numbers["stayed"] > 0.9
    monkeypatch.setattr(invariance, "_MAX_WORK", 1e3)
    monkeypatch.setattr(invariance, "_BUDGET", 1e-3)
    dear = planted(model, exact, 1.0, 0.0).to_datatree(x, y)
    assert MOVED not in dear.children and find(diagnose(dear), "function_moves") is None


def of_a_program(dtype):
    """A program with a loop of its own, its data, and draws as of an approximation."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(6, generator=generator, dtype=dtype)

    def program(x, y):
        level = pyro.sample("level", dist.Normal(torch.zeros((), dtype=dtype), 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), dtype=dtype)))
        for row in range(6):
            pyro.sample(f"y_{row}", dist.Normal(level, scale), obs=y[row])

    draws = {
        "level": 0.5 * torch.randn(1, 400, generator=generator, dtype=dtype),
        "scale": 0.5 + torch.rand(1, 400, generator=generator, dtype=dtype),
    }
    return program, draws, None, y


def of_a_net(dtype):
    """A net in standard units, its data, and draws as of an approximation."""
    model, x, y, exact = line(2, 40)
    posterior = planted(model, exact, 1.2, 0.1, num_draws=400)
    return model, posterior.draws, x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [of_a_program, of_a_net])
def test_moves_by_a_trace_are_those_by_the_programs_own_python_bit_for_bit(
    make, dtype, monkeypatch
):
    model, draws, x, y = make(dtype)
    meta = {"method": "SVI", "kind": "independent", "claim": "approximate"}
    posterior = Posterior(model, draws, approximation=object(), meta=meta)
    probes = None if x is None else x[:3]
    log_joint = Density.log_joint
    runs = []

    def counted(density, *args, **options):
        runs.append(density)
        return log_joint(density, *args, **options)

    monkeypatch.setattr(Density, "log_joint", counted)
    with helpers.seeded(0):
        density = invariance.posterior_density(posterior, x, y)
        traced = invariance.moved_functions(posterior, density, y, probes)
        num_of_trace = len(runs)
        monkeypatch.setattr(invariance, "_MAX_TRACED", 0)
        eager = invariance.moved_functions(posterior, density, y, probes)
    # more than the gradients of ten trajectories of six steps
    assert num_of_trace <= 5 and len(runs) - num_of_trace > 60
    xr.testing.assert_identical(traced, eager)


@pytest.mark.parametrize(("factor", "status"), [(1.0, "info"), (4.0, "fail")])
def test_chains_that_have_not_arrived_accuse_and_never_acquit(factor, status):
    model, x, y, exact = CASES[2]
    tree = planted(model, exact, factor, 0.0).to_datatree(x, y)
    tree[MOVED] = tree[MOVED].to_dataset().assign(arrived=0)
    found = find(diagnose(tree), "function_moves")
    assert found.status == status, found.evidence


def test_draws_whose_chains_have_not_arrived_are_not_checked_for_that_reason():
    """It was said that too little was stored, or that the net had been compared as linearised alone."""
    tree = short_of_arrival(1.0, 0.5, 0).tree
    tree.attrs |= {"iid": 1, "claim": "exact"}
    verdict = diagnose(tree)
    assert not verdict.checked("draws") and verdict.draws == "warn", verdict.to_json()
    assert verdict.worst("draws").code == "moves_short"
    assert "short chains" in verdict.summary and "posterior.refine()" in verdict.action


def short_of_arrival(factor, memory, seed, num_points=12):
    """A tree of draws `factor` times as wide as a standard normal, and chains on their way from a dozen of them."""
    rng = np.random.default_rng(seed)
    approximate = factor * rng.normal(size=(1000, 1))
    points = approximate[:num_points, 0].repeat(200)
    moved = memory * points + (1 - memory**2) ** 0.5 * rng.normal(size=len(points))
    f = {"approximate": approximate, "moved": moved[:, None]}
    dims = ("region_probe", "output")
    moves = {name: ((f"{name}_draw", *dims), values[..., None]) for name, values in f.items()}
    moves |= {"moved_start": ("moved_draw", np.arange(num_points).repeat(200))}
    moves |= {"region": ("region_probe", np.array(["train"]))}
    moves |= {"arrived": 0, "starts": num_points, "transitions": 16}
    groups = {"posterior": xr.Dataset({"w": (("chain", "draw"), approximate.T)})}
    return Evidence(xr.DataTree.from_dict(groups | {MOVED: xr.Dataset(moves)}))


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9, 1.0])
def test_chains_on_their_way_do_not_accuse_right_draws_by_the_chance_of_where_they_began(memory):
    """A dozen points that chains have not forgotten differ from all draws by chance: that accuses no right draws."""
    trees = [short_of_arrival(1.0, memory, seed) for seed in range(40)]
    statuses = [made(MOVES["function_moves"], tree).status for tree in trees]
    assert statuses.count("info") >= 39 and "fail" not in statuses, statuses


@pytest.mark.parametrize(("factor", "memory"), [(0.4, 0.0), (2.5, 0.0), (0.4, 0.3)])
def test_the_less_chains_remember_where_they_began_the_surer_they_accuse(factor, memory):
    """Two standard errors of a dozen points would leave .4 of the sd a warning, though the chains have left them."""
    found = made(MOVES["function_moves"], short_of_arrival(factor, memory, 0))
    assert found.status == "fail", found.evidence
    tree = short_of_arrival(factor, memory, 0).tree
    tree[MOVED] = tree[MOVED].to_dataset().drop_vars("moved_start")
    # a file of an earlier version
    assert made(MOVES["function_moves"], Evidence(tree)).status == "warn"


def test_the_worst_region_decides_by_name():
    """Two inputs that are nearly one: a fit that is right along them is too narrow where they part."""
    model, x, y, (mean, covariance) = line(2, 40, alike=0.995)
    sd = torch.linalg.inv(covariance).diagonal().rsqrt()
    normal = torch.randn(1000, 3, generator=torch.Generator().manual_seed(1))
    found = find(diagnose(of_draws(model, mean + sd * normal).to_datatree(x, y)), "function_moves")
    assert found.status == "fail" and found.numbers["region"] in ("permuted", "beyond")
    assert found.value < 0.5


def test_a_small_net_is_held_against_its_own_posterior():
    """An ensemble whose members are nearly one net is too narrow, half a net too wide; a linearised net is named."""
    x = torch.linspace(-1.5, 1.5, 20)[:, None]
    y = 0.8 * x + 0.3 * torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    model = pb.BNN(pb.networks.mlp(1, (4,), 1, seed=0), pb.priors.FanInNormal(1.0), noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = pb.DeepEnsemble(num_members=5, num_steps=300, compile=False).fit(model, x, y)
        laplace = pb.Laplace(num_steps=300, compile=False).fit(model, x, y)
        dropout = pb.MCDropout(p=0.5, num_steps=300, compile=False).fit(model, x, y)
    for posterior, sign in ((ensemble, -1.0), (dropout, 1.0)):
        verdict = posterior.diagnose()
        found = find(verdict, "function_moves")
        assert verdict.draws == "fail" and sign * np.log(found.value) > np.log(1.5), found.evidence
        # it was also said that nothing can test draws without a density
        tree = posterior.to_datatree(x, y)
        tree[MOVED] = tree[MOVED].to_dataset().assign(arrived=0)
        for claim in (find(verdict, "claim"), find(diagnose(tree), "claim")):
            assert claim is None or claim.code == "one_point"
    found = find(laplace.diagnose(), "function_moves")
    assert (
        "the linearised net" in found.evidence and "posterior of the net itself" in found.evidence
    )


@pytest.mark.parametrize(("shift", "status"), [(0.0, "pass"), (0.2, "pass"), (0.5, "warn")])
def test_weights_that_cannot_be_used_decide_only_where_the_moves_do_not(shift, status):
    """Else of two approximations the nearer fails where the posterior's tail is heavier than a normal's.

    A shift of 0.2 sd passes the moves, whose limit is 0.25 sd, and not 0.1, a probability; half an sd is no failure.
    """
    model, x, y, exact = CASES[2]
    tree = planted(model, exact, 1.0, shift).to_datatree(x, y)
    heavy = np.exp(2.0 * np.random.default_rng(0).normal(size=(1, 1000)))
    stats = {
        name: (("chain", "draw"), value)
        for name, value in {"log_p": heavy, "log_q": 0.0 * heavy}.items()
    }
    tree["sample_stats"] = xr.Dataset(stats)
    verdict = diagnose(tree)
    assert find(verdict, "function_moves").status == status
    assert find(verdict, "importance").code == "khat_undecided"
    assert (verdict.draws == "pass") == (status == "pass")
    tree[MOVED] = tree[MOVED].to_dataset().assign(arrived=0)
    assert find(diagnose(tree), "importance").status == "fail"


@pytest.mark.slow
def test_importance_weights_that_hold_judge_the_function_of_a_linearised_net():
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(40, 1, generator=generator) - 2
    y = torch.sin(2 * x) + 0.3 * torch.randn(40, 1, generator=generator)
    model = pb.BNN(toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.3))
    tree = pb.Laplace(num_steps=100, compile=False).fit(model, x, y, seed=0).to_datatree(x, y)
    # as where no short chains were run
    tree = tree.drop_nodes(MOVED)
    verdict = diagnose(tree)
    before = find(verdict, "importance")
    # against the linearised net, for which the Gaussian is exact: that it holds decides nothing
    assert before.status == "info"
    stats = tree["sample_stats"].to_dataset()
    f = tree["function"]["f"].values
    pull = (f - f.mean((0, 1)))[:, :, 0, 0] / f[:, :, 0, 0].std()
    tree["sample_stats"] = stats.assign(log_q=stats["log_q"] - pull)
    moved = find(diagnose(tree), "importance")
    assert moved.numbers["distance"] > 2.0 * before.numbers["distance"]
    tree["sample_stats"] = stats.assign(log_q=stats["log_q"] - 30 * pull)
    assert find(diagnose(tree), "importance").code.startswith("khat")


@pytest.mark.slow
@pytest.mark.parametrize(("scales", "status"), [((1.0, 0.1), "fail"), ((1.0, 1.0), "pass")])
def test_moves_find_the_wide_mode_around_the_narrow_one_of_a_program(scales, status):
    """Half of the mass lies outside of the mode that Laplace finds, where none of its draws is: no weight tells."""

    def program(x, y):
        pyro.sample("scalar", dist.Normal(0.0, 1.0))
        at = pyro.sample("at", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
        pyro.factor(
            "likelihood",
            torch.logaddexp(*(dist.Normal(at, scale).log_prob(y).sum() for scale in scales)),
        )

    y = torch.tensor([1.0, -1.0], dtype=torch.float64)
    laplace = pb.Laplace(curvature="hessian", num_steps=200, compile=False).fit(
        program, None, y, seed=0
    )
    found = find(diagnose(laplace.to_datatree(None, y)), "function_moves")
    assert found.status == status
    assert status == "pass" or found.numbers["inverse"] > 2.0


def counts(x, y):
    """Two rates and how often each event was seen; the posterior of a rate is a gamma distribution."""
    with pyro.plate("kinds", 2):
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
    offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
    pyro.sample("seen", dist.Poisson(rate).to_event(1), obs=y[:2])
    pyro.sample("measured", dist.Normal(offset, 1.0), obs=y[2])


COUNTS = torch.tensor([2.0, 5.0, 0.7])


def of_counts(factor, shift, heavy):
    """Exact draws of the rates and of the offset, then those of the rates spread or shifted, in sds."""
    rng = np.random.default_rng(5)
    rate = rng.gamma(1.0 + COUNTS[:2].numpy(), 0.5, size=(1, 1000, 2))
    mean = (1.0 + COUNTS[:2].numpy()) / 2.0
    rate = np.abs(mean + factor * (rate - mean) + shift * (mean / 2.0) ** 0.5)
    offset = rng.normal(0.35, 0.5**0.5, size=(1, 1000))
    draws = {"rate": torch.tensor(rate).float(), "offset": torch.tensor(offset).float()}
    log_ratio = torch.tensor(heavy * np.exp(2.0 * rng.normal(size=(1, 1000))))
    stats = {"log_p": log_ratio, "log_q": torch.zeros_like(log_ratio)}
    meta = {"method": "SVI", "kind": "independent", "claim": "approximate", "iid": True}
    return Posterior(counts, draws, stats, approximation=object(), meta=meta)


@pytest.mark.parametrize(
    ("factor", "shift", "status"),
    [(1.0, 0.0, "pass"), (0.4, 0.0, "fail"), (3.0, 0.0, "fail"), (1.0, 1.5, "fail")],
)
def test_a_programs_sites_are_held_against_short_chains_and_the_worst_is_named(
    factor, shift, status
):
    """A heavy tail of the weights failed draws that are those of the posterior."""
    posterior = of_counts(factor, shift, heavy=1.0)
    verdict = diagnose(posterior.to_datatree(COUNTS, COUNTS))
    found = find(verdict, "function_moves")
    assert found.code == "sites_beside_posterior" and found.status == status, found.evidence
    assert find(verdict, "importance").code == "khat_undecided"
    assert verdict.draws == status
    if status == "fail":
        assert found.numbers["region"].startswith("rate[") and "the sd of rate[" in found.evidence


def test_sites_are_moved_where_chains_are_too_dear(monkeypatch):
    """Then a tail of the weights decides again: moves do not find the neck of a funnel."""
    monkeypatch.setattr(invariance, "_BUDGET", 0.0)
    tree = of_counts(1.0, 0.0, heavy=1.0).to_datatree(COUNTS, COUNTS)
    assert "before" in tree[MOVED] and "approximate" not in tree[MOVED]
    assert find(diagnose(tree), "importance").status == "fail"


def test_a_site_with_a_heavy_tail_has_an_sd_that_chance_decides():
    """Exact draws of Student's t of two degrees of freedom, which has no variance."""

    def tailed(x, y):
        pyro.sample("far", dist.StudentT(2.0, 0.0, 1.0).expand([8]).to_event(1))
        pyro.sample("near", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y[0])

    rng = np.random.default_rng(2)
    draws = {"far": torch.tensor(rng.standard_t(2.0, size=(1, 1000, 8))).float()}
    draws["near"] = torch.tensor(rng.normal(size=(1, 1000))).float()
    meta = {"method": "SVI", "kind": "independent", "claim": "approximate", "iid": True}
    posterior = Posterior(tailed, draws, approximation=object(), meta=meta)
    found = find(diagnose(posterior.to_datatree(COUNTS, COUNTS)), "function_moves")
    assert found.status in ("pass", "info"), found.evidence


def test_what_a_tenth_of_the_inputs_exceeds_is_that_of_the_region_that_decides():
    model, x, y, exact = CASES[2]
    tree = planted(model, exact, 1.0, 0.0).to_datatree(x, y)
    moved = tree[MOVED].to_dataset()
    f = moved["approximate"]
    places = np.flatnonzero((moved["region"] == "data").values)[:3]
    shifted = f.values.copy()
    shifted[:, places] += 0.8 * f.values[:, places].std(0)
    tree[MOVED] = moved.assign(approximate=(f.dims, shifted))
    found = find(diagnose(tree), "function_moves")
    assert found.status == "warn" and found.numbers["region"] == "data"
    assert found.numbers["shift"] < 0.25 and 0.6 < found.numbers["worst_shift"] < 1.0
    assert "for one input in ten the mean is" in found.evidence
