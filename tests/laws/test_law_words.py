"""The law of named faults: a cut prior, data that were not given, a tolerance, label switching."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from helpers import seeded

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.diagnostics import Check, Verdict
from pyrobnn.diagnostics.wording import evidence
from pyrobnn.inference.fitting.problem import prepare

STATUSES = ("pass", "info", "warn", "fail")
X = torch.linspace(-1.0, 1.0, 30)
with seeded(0):
    Y = X + 0.5 * torch.randn(30)


def line(prior):
    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("noise", prior)
        with pyro.plate("row", len(x)):
            pyro.sample("y", dist.Normal(slope * x, scale), obs=y)

    return program


def findings(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = prepare(program, X, Y, points="free")
    return [note for note in problem.notes if not isinstance(note, str)]


@pytest.mark.parametrize(
    "prior, share",
    [
        (dist.Normal(0.0, 1.0), 0.5),
        (dist.Normal(1.0, 1.0), 0.16),
        (dist.Normal(10.0, 1.0), None),
        (dist.HalfNormal(1.0), None),
        (dist.LogNormal(0.0, 1.0), None),
    ],
)
def test_a_prior_that_is_cut_by_a_scale_is_named(prior, share):
    cut = [note for note in findings(line(prior)) if note.code == "prior_cut"]
    assert len(cut) == (share is not None)
    for note in cut:
        assert abs(note.values["share"] - share) < 0.05
        assert "'noise'" in str(note) and "'scale' of the site 'y'" in str(note)


def test_a_share_below_a_percent_is_not_said_to_be_none():
    (note,) = [note for note in findings(line(dist.Normal(4.5, 1.6))) if note.code == "prior_cut"]
    assert 0.0 < note.values["share"] < 0.005
    assert " 0% of its mass" not in str(note)
    assert " 0.0% of its mass" not in str(note)


def test_a_flat_prior_of_a_scale_is_fitted():
    flat = line(dist.ImproperUniform(dist.constraints.real, (), ()))
    assert [note for note in findings(flat) if note.code == "prior_cut"] == []


METHODS = (
    pb.NUTS(num_chains=2, num_warmup=5, compile=False),
    pb.SVI(num_steps=5, compile=False),
    pb.Laplace(num_steps=5, compile=False),
    pb.SMC(num_particles=16, compile=False),
    pb.MAP(num_steps=5, compile=False),
)


def in_a_plate(size, dim=None):
    def program(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", size, dim=dim):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    return program


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_plate_of_another_size_is_a_sentence(method):
    words = "the plate 'row' has 29 rows, and the site 'y' inside has 30 along dimension -1: give"
    with pytest.raises(ValueError, match=words) as caught:
        method.fit(in_a_plate(29), X, Y)
    assert "Trace Shapes" not in str(caught.value)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_plate_along_a_dimension_that_the_data_have_not_is_named(method):
    words = r"a dim of the plate 'row' .*counts 30 rows along dimension -2"
    with pytest.raises(ValueError, match=words) as caught:
        method.fit(in_a_plate(30, dim=-2), X, Y)
    assert "squeeze" not in str(caught.value)


def test_a_column_of_means_is_squeezed():
    with pytest.raises(ValueError, match=r"squeeze\(-1\)"):
        METHODS[0].fit(in_a_plate(30), X[:, None], Y)


def test_a_scale_that_is_transformed_is_not_named():
    def program(x, y):
        log_scale = pyro.sample("log_scale", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, log_scale.exp()).to_event(1), obs=y)

    assert [note for note in findings(program) if note.code == "prior_cut"] == []


def test_outcomes_that_are_not_given_are_asked_for():
    with pytest.raises(ValueError, match=r"'y' is not given.*would sample 'y'.*fit\(program, x, y"):
        pb.MAP().fit(line(dist.HalfNormal(1.0)), X)


def test_a_passing_approximation_says_its_tolerance():
    of_approximation = [Check("importance", "pass"), Check("virial", "pass")]
    verdict = Verdict.from_checks("SVI", "svi", of_approximation)
    assert "the draws can be relied on: standard deviations are within 25%" in verdict.summary
    of_chains = Verdict.from_checks("NUTS", "nuts", [Check("rhat_function", "pass")])
    assert "within" not in of_chains.summary


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pattern", "depend most on"),
        ("row_order", "depend on each other"),
        ("loo_khat", "which dominate the fit"),
    ],
)
def test_a_check_that_passes_does_not_state_its_fault(name, fault):
    numbers = {"where": "x", "value": 0.2, "limit": 0.15, "p": 0.3, "count": 2, "total": 60}
    said = {status: evidence(name, name, numbers | {"status": status}) for status in STATUSES}
    assert [status for status in STATUSES if fault in said[status]] == ["warn", "fail"]
    none = evidence("loo_khat", "loo_khat", numbers | {"status": "pass", "count": 0})
    assert none.startswith("Leave-one-out estimates are reliable for all 60 observations")


@pytest.mark.parametrize("code", ["beside_posterior", "sites_beside_posterior"])
def test_where_a_tenth_of_the_function_decides_the_sentence_says_so(code):
    """It showed medians that are right, and said that the draws are not those of the posterior."""
    numbers = {"region": "beyond", "arrived": True, "linearized": False, "status": "warn"}
    tail = {"worst_shift": 0.61, "worst_factor": 1.23}
    by_tail = evidence(code, "function_moves", numbers | tail | {"inverse": 1.02, "shift": 0.2})
    assert "0.61 sd away or more" in by_tail and "a factor of 1.23 or more" in by_tail
    by_median = evidence(code, "function_moves", numbers | tail | {"inverse": 2.0, "shift": 0.2})
    assert by_median.endswith(": the draws are too narrow.") and "in ten" not in by_median


def mixture_tree(order, rng, apart=4.0):
    """Chains of a mixture of three components, each chain with the components in an order of its own."""
    location = apart * np.arange(3.0) + 0.3 * rng.normal(size=(4, 500, 3))
    weight = rng.dirichlet([50.0, 30.0, 20.0], size=(4, 500))
    for chain, components in enumerate(order):
        location[chain] = location[chain][:, components]
        weight[chain] = weight[chain][:, components]
    level = rng.normal(size=(4, 500))
    dims = ("chain", "draw")
    sites = {
        "location": ((*dims, "component"), location),
        "weight": ((*dims, "component"), weight),
        "level": (dims, level),
    }
    return xr.DataTree.from_dict({"posterior": xr.Dataset(sites)})


def test_switched_labels_are_named():
    rng = np.random.default_rng(0)
    same = [[0, 1, 2]] * 4
    assert pb.diagnose(mixture_tree(same, rng)).draws == "pass"
    switched = [[0, 1, 2], [2, 0, 1], [0, 1, 2], [1, 0, 2]]
    verdict = pb.diagnose(mixture_tree(switched, rng))
    worst = verdict.worst("draws")
    assert worst.code == "labels_switched" and verdict.draws == "fail"
    assert "label switching" in verdict.summary and "'location', 'weight'" in worst.evidence
    assert "OrderedTransform" in worst.action


def chains_of(rng, exchanged=(1,), num=2):
    """Sites of two regressions and a share, (4, 500, component), the chains ``exchanged`` in the other order."""
    centres = {"slope": [2.0, -1.0], "level": [0.5, -0.5], "share": [0.3, 0.7]}
    sites = {}
    for name, centre in centres.items():
        noise = 0.03 * rng.normal(size=(4, 500, 1 if name == "share" else num))
        values = np.array(centre) + noise * ([1.0, -1.0] if name == "share" else 1.0)
        for chain in exchanged:
            values[chain] = values[chain][:, ::-1]
        sites[name] = values
    return sites


def regressions_tree(kind, rng):
    """Chains of two regressions as programs write them: with an axis, with numbers, with letters."""
    values = chains_of(rng)
    dims = ("chain", "draw")
    if kind == "axis":
        sites = {name: ((*dims, "line"), values[name]) for name in ("slope", "level")}
    else:
        suffixes = {"numbers": ("1", "2"), "letters": ("_a", "_b")}[kind]
        sites = {
            name + suffix: (dims, values[name][..., place])
            for name in ("slope", "level")
            for place, suffix in enumerate(suffixes)
        }
    sites["share"] = (dims, values["share"][..., 0])
    sites["noise"] = (dims, 0.2 + 0.01 * rng.normal(size=(4, 500)))
    return xr.DataTree.from_dict({"posterior": xr.Dataset(sites)})


@pytest.mark.parametrize("kind", ["axis", "numbers", "letters"])
def test_exchanged_regressions_are_named_however_their_sites_are_written(kind):
    verdict = pb.diagnose(regressions_tree(kind, np.random.default_rng(0)))
    worst = verdict.worst("draws")
    assert worst.code == "labels_switched" and verdict.draws == "fail"
    assert "'share'" in worst.evidence and "'noise'" not in worst.evidence


@pytest.mark.slow
def test_a_fit_of_two_regressions_whose_chains_have_exchanged_them_is_named():
    rng = np.random.default_rng(0)
    x = torch.linspace(-2.0, 2.0, 30)
    of_first = torch.arange(30) % 3 == 0
    noise = torch.as_tensor(0.2 * rng.normal(size=30), dtype=x.dtype)
    y = torch.where(of_first, 2 * x + 1, -x - 1) + noise

    def program(x, y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        lines = []
        for number in (1, 2):
            level = pyro.sample(f"level{number}", dist.Normal(0.0, 2.0))
            lines.append(level + x * pyro.sample(f"slope{number}", dist.Normal(0.0, 2.0)))
        components = dist.Normal(torch.stack(lines, -1), 0.2)
        shares = dist.Categorical(torch.stack([share, 1 - share]))
        with pyro.plate("row", len(x)):
            pyro.sample("y", dist.MixtureSameFamily(shares, components), obs=y)

    method = pb.NUTS(num_chains=2, num_warmup=60, max_tree_depth=5, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(program, x, y, num_draws=60, seed=0)
    codes = [check.code for check in exchanged_in_one_chain(posterior).diagnose().checks]
    assert "labels_switched" in codes


def exchanged_in_one_chain(posterior):
    """The posterior of two regressions with the lines of its second chain in the other order than in its first."""
    draws = {name: value.clone() for name, value in posterior.draws.items()}
    slopes = draws["slope1"].mean(1)
    if abs(float(slopes[0] - slopes[1])) < 1.0:
        for name in ("slope", "level"):
            first = draws[name + "1"][1].clone()
            draws[name + "1"][1] = draws[name + "2"][1]
            draws[name + "2"][1] = first
        draws["share"][1] = 1 - draws["share"][1]
    return dataclasses.replace(posterior, draws=draws)


def bimodal_tree(kind, rng):
    """Chains in modes that no exchange of components carries into each other."""
    values = chains_of(rng, exchanged=())
    slope = values["slope"]
    log_density = rng.normal(size=(4, 500))
    if kind == "sign":
        slope[1] = -slope[1] + 0.5
    elif kind == "density":  # exchanged, and the other mode has another density
        slope[1] = slope[1][:, ::-1]
        log_density[1] += 8.0
    else:  # exchanged, and the components differ in their spread
        slope[..., 0] = 2.0 + 5.0 * (slope[..., 0] - 2.0)
        slope[1] = np.stack([slope[1, :, 1], 1.0 + (slope[1, :, 0])], axis=-1)
    dims = ("chain", "draw")
    sites = {f"slope{place + 1}": (dims, slope[..., place]) for place in range(2)}
    groups = {"posterior": xr.Dataset(sites)}
    groups["sample_stats"] = xr.Dataset({"lp": (dims, log_density)})
    return xr.DataTree.from_dict(groups)


@pytest.mark.parametrize("kind", ["sign", "density", "spread"])
def test_other_modes_are_not_taken_for_switched_labels(kind):
    verdict = pb.diagnose(bimodal_tree(kind, np.random.default_rng(0)))
    assert verdict.draws == "fail"
    assert "labels_switched" not in [check.code for check in verdict.checks]


PRIORS_THAT_MAKE_IMPOSSIBLE = {
    "tanh": lambda a, x, y: dist.Normal(x, torch.tanh(a)),
    "line": lambda a, x, y: dist.Normal(x, 0.5 + a * x),
    "share": lambda a, x, y: dist.MixtureSameFamily(
        dist.Categorical(probs=torch.stack([a, 1 - a])), dist.Normal(torch.zeros(2), 1.0)
    ),
    "degrees": lambda a, x, y: dist.StudentT(a + 1.0, x, 1.0),
    "partly masked": lambda a, x, y: dist.Normal(x, a.expand(len(x))).mask(x > x.median()),
    "one of two": lambda a, x, y: dist.MaskedMixture(
        x > x.median(), dist.Normal(x, 1.0), dist.Normal(x, a.expand(len(x)))
    ),
}
PRIORS_THAT_DO_NOT = {
    "exp": lambda a, x, y: dist.Normal(x, torch.exp(a)),
    "softplus": lambda a, x, y: dist.Normal(x, torch.nn.functional.softplus(a)),
    "chosen": lambda a, x, y: dist.Normal(x, torch.where(a > 0, a, 1 - a)),
    "rarely": lambda a, x, y: dist.Normal(x, a + 4.0),
    "masked": lambda a, x, y: dist.Normal(x, torch.tanh(a)).mask(a > 0),
    "masked out": lambda a, x, y: dist.Normal(x, torch.where(x > 0, 1.0, a)).mask(x > 0),
}


def with_a_law(law):
    def program(x, y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(x)):
            pyro.sample("y", law(a, x, y), obs=y)

    return program


@pytest.mark.parametrize("name", PRIORS_THAT_MAKE_IMPOSSIBLE)
def test_a_parameter_that_the_prior_makes_impossible_is_named_with_its_share(name):
    notes = findings(with_a_law(PRIORS_THAT_MAKE_IMPOSSIBLE[name]))
    (note,) = [note for note in notes if note.code == "impossible_under_prior"]
    assert "'y'" in str(note) and 0.05 < note.values["share"] < 1.0


def test_a_bound_that_is_a_parameter_of_its_own_is_named_by_both():
    notes = findings(with_a_law(lambda a, x, y: dist.Uniform(a, torch.full_like(x, 0.5))))
    named = [str(note) for note in notes if note.code == "impossible_under_prior"]
    assert sorted(text.split()[0] for text in named) == ["'high'", "'low'"]


@pytest.mark.parametrize("name", PRIORS_THAT_DO_NOT)
def test_a_parameter_that_is_possible_almost_everywhere_is_not_named(name):
    codes = [note.code for note in findings(with_a_law(PRIORS_THAT_DO_NOT[name]))]
    assert "impossible_under_prior" not in codes


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_keeps_what_the_prior_makes_impossible(method):
    program = with_a_law(lambda a, x, y: dist.Normal(x, a + 1.0))
    options = {} if method.kind == "point" else {"num_draws": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method.fit(program, X, Y, seed=0, **options)
    assert any("'scale' of the site 'y'" in warning for warning in posterior.meta["warnings"])


def marking(how):
    """Rows that are out once marked, as of a capture and recapture: the mask is written into in place."""

    def program(x, y):
        share = pyro.sample("share", dist.Beta(1.0, 1.0))
        marked = torch.zeros(len(y), dtype=torch.bool)
        for time in range(y.shape[1]):
            law = dist.Bernoulli(share).expand([len(y)])
            if how == "mask":
                pyro.sample(f"y{time}", law.mask(marked), obs=y[:, time])
            elif how == "poutine":
                with pyro.poutine.mask(mask=marked):
                    pyro.sample(f"y{time}", law, obs=y[:, time])
            else:
                pyro.sample(f"y{time}", law, obs=y[:, time], obs_mask=marked)
            marked |= y[:, time].bool()

    return program


def spoiling_scale(x, y):
    scale = torch.ones(len(x))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Normal(slope * x, scale), obs=y[:, 0])
    scale *= 2.0


def spoiling_data(x, y):
    x *= 2.0
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y[:, 0])


OVERWRITES = {
    "mask": (marking("mask"), r"the mask of the site 'y0' in place.*marked \| …"),
    "poutine": (marking("poutine"), "the mask of the site 'y0' in place"),
    "obs_mask": (marking("obs_mask"), "the mask of the site 'y0_observed' in place"),
    "scale": (spoiling_scale, "'scale' of the site 'y' in place"),
    "data": (spoiling_data, r"writes into its data in place.*x = x.clone\(\)"),
}


@pytest.mark.parametrize("name", OVERWRITES)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_what_a_site_needs_later_is_not_written_into(method, name):
    program, words = OVERWRITES[name]
    x = X.clone()
    y = torch.stack([(X > 0).float(), (X < 0.5).float()], 1)
    before = y.clone()
    with pytest.raises(Refused, match=words):
        method.fit(program, x, y)
    assert torch.equal(x, X) and torch.equal(y, before)


def test_chains_that_disagree_under_every_order_are_not_taken_for_switched_labels():
    rng = np.random.default_rng(0)
    tree = mixture_tree([[0, 1, 2]] * 4, rng)
    tree["posterior"]["location"].values[0, :, 1] += 1.5
    assert pb.diagnose(tree).worst("draws").code == "chains_disagree"
