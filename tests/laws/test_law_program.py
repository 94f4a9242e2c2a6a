"""The law of programs: whatever a program masks, scales, adds or leaves out, the density fitted is Pyro's own.

Every program has one real latent site and a Gaussian posterior, so that its evidence is an integral over a line of
``trace.log_prob_sum()``. A method either fits with that density or refuses with a remedy.
"""

from __future__ import annotations

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from pyro.infer.autoguide import AutoNormal
from test_contract import METHODS, ONE_DRAW, REPRESENTATIVES, one_of_each_kind
from torch.fx.experimental.proxy_tensor import make_fx

import pyrobnn as pb
from pyrobnn.inference.fitting.program import check_batched
from pyrobnn.inference.optim.training import Optimizer
from pyrobnn.inference.vi.elbo import Elbo
from pyrobnn.inference.vi.families import MeanField
from pyrobnn.model import Density
from pyrobnn.model.gradient import batched_gradient

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)

N = 12
X = torch.linspace(-1.5, 2.0, N, dtype=torch.float64)[:, None]
with seeded(3):
    Y = 0.8 * X + 0.4 * torch.randn(N, 1, dtype=torch.float64)
KEEP = X[:, 0] > -0.5
WEIGHTS = torch.linspace(0.2, 3.0, N, dtype=torch.float64)
PAIRS = torch.cat([X, 1 - X], 1)  # (N, 2): two outputs for every datum
KEEP_EACH = torch.arange(2 * N).reshape(N, 2) % 3 > 0
GAPS = torch.where(KEEP, Y[:, 0], math.nan)
LABELS = torch.where(KEEP, (Y[:, 0] > 0).long(), -1)


def slope():
    zero = torch.zeros((), dtype=torch.float64)
    return pyro.sample("slope", dist.Normal(zero, 1.0))


def plate(x, y):
    s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def mask(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=KEEP):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def mask_of_the_distribution(x, y):
    s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5).mask(KEEP),
            obs=y[:, 0],
        )


def mask_over_nan(x, y):
    s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5).mask(KEEP),
            obs=GAPS,
        )


def mask_of_events(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=KEEP):
        pyro.sample(
            "y",
            dist.Normal(s * PAIRS, 0.5).to_event(1),
            obs=y.expand(N, 2),
        )


def mask_inside_events(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=KEEP):
        pyro.sample(
            "y",
            dist.Normal(s * PAIRS, 0.5).mask(KEEP_EACH).to_event(1),
            obs=y.expand(N, 2),
        )


def mask_over_nested_plates(x, y):
    s = slope()
    with pyro.plate("data", len(x), dim=-2), pyro.plate("outputs", 2, dim=-1):
        with pyro.poutine.mask(mask=KEEP[:, None]):
            pyro.sample(
                "y",
                dist.Normal(s * PAIRS, 0.5),
                obs=y.expand(N, 2),
            )


def mask_of_a_whole_site(x, y):
    s = slope()
    pyro.sample(
        "aside",
        dist.Normal(s, 0.1).mask(False),
        obs=torch.tensor(math.nan),
    )
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def scale(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.scale(scale=0.3):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def scale_of_each(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.scale(scale=WEIGHTS):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def scale_of_events(x, y):
    s = slope()
    with pyro.plate("data", len(x)), pyro.poutine.scale(scale=WEIGHTS):
        pyro.sample(
            "y",
            dist.Normal(s * PAIRS, 0.5).to_event(1),
            obs=y.expand(N, 2),
        )


def scale_and_mask_of_events(x, y):
    s = slope()
    with (
        pyro.plate("data", len(x)),
        pyro.poutine.scale(scale=WEIGHTS),
        pyro.poutine.mask(mask=KEEP),
    ):
        pyro.sample(
            "y",
            dist.Normal(s * PAIRS, 0.5).to_event(1),
            obs=y.expand(N, 2),
        )


def scale_of_the_prior(x, y):
    with pyro.poutine.scale(scale=2.5):
        s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def mask_of_the_prior(x, y):
    with pyro.poutine.mask(mask=False):
        s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def deterministic(x, y):
    mean = pyro.deterministic("mean", slope() * x[:, 0])
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(mean, 0.5),
            obs=y[:, 0],
        )


def factor(x, y):
    s = slope()
    pyro.factor("penalty", -2.0 * (s - 0.3).square())
    with pyro.plate("data", len(x)):
        pyro.factor("y", dist.Normal(s * x[:, 0], 0.5).log_prob(y[:, 0]))


def subsample(x, y):
    s = slope()
    with pyro.plate("data", len(x), subsample_size=5) as rows:
        pyro.sample(
            "y",
            dist.Normal(s * x[rows, 0], 0.5),
            obs=y[rows, 0],
        )


def subsample_nested(x, y):
    s = slope()
    outer = pyro.plate(
        "data",
        len(x),
        subsample_size=4,
        dim=-2,
    )
    inner = pyro.plate(
        "outputs",
        2,
        subsample_size=1,
        dim=-1,
    )
    with outer as rows, inner as columns, pyro.poutine.mask(mask=KEEP[rows][:, None]):
        obs = y.expand(N, 2)[rows][:, columns]
        with pyro.poutine.scale(scale=WEIGHTS[rows][:, None]):
            pyro.sample(
                "y",
                dist.Normal(s * PAIRS[rows][:, columns], 0.5),
                obs=obs,
            )


def subsample_nested_whole(x, y):
    s = slope()
    with pyro.plate("data", len(x), dim=-2), pyro.plate("outputs", 2, dim=-1):
        with pyro.poutine.mask(mask=KEEP[:, None]), pyro.poutine.scale(scale=WEIGHTS[:, None]):
            pyro.sample(
                "y",
                dist.Normal(s * PAIRS, 0.5),
                obs=y.expand(N, 2),
            )


KEPT = int(KEEP.sum())
#: the program, the same without subsampling, and how many data it has
PROGRAMS = {
    program.__name__: (program, whole, count)
    for program, whole, count in [
        (plate, plate, N),
        (mask, mask, KEPT),
        (mask_of_the_distribution, mask_of_the_distribution, KEPT),
        (mask_over_nan, mask_over_nan, KEPT),
        (mask_of_events, mask_of_events, KEPT),
        (mask_inside_events, mask_inside_events, int((KEEP & KEEP_EACH.any(1)).sum())),
        (mask_over_nested_plates, mask_over_nested_plates, 2 * KEPT),
        (mask_of_a_whole_site, mask_of_a_whole_site, N),
        (scale, scale, N),
        (scale_of_each, scale_of_each, N),
        (scale_of_events, scale_of_events, N),
        (scale_and_mask_of_events, scale_and_mask_of_events, KEPT),
        (scale_of_the_prior, scale_of_the_prior, N),
        (mask_of_the_prior, mask_of_the_prior, N),
        (deterministic, deterministic, N),
        (factor, factor, N),
        (subsample, plate, N),
        (subsample_nested, subsample_nested_whole, 2 * KEPT),
    ]
}
SUBSAMPLED = ("subsample", "subsample_nested")


def pyro_log_joint(program, value) -> torch.Tensor:
    """Pyro's own log joint density at values (…) of the slope, in float64."""
    whole = PROGRAMS[program][1]
    values = torch.as_tensor(value, dtype=torch.float64)
    parts = []
    for one in values.reshape(-1):
        conditioned = pyro.poutine.condition(whole, {"slope": one})
        with pyro.validation_enabled(False):  # it warns of the NaN that is masked
            parts.append(pyro.poutine.trace(conditioned).get_trace(X, Y).log_prob_sum())
    return torch.stack([torch.as_tensor(part, dtype=torch.float64) for part in parts]).reshape(
        values.shape
    )


def exact(program) -> tuple[float, float, float]:
    """Mean, standard deviation and log evidence, by quadrature: exact to rounding for a Gaussian on this grid."""
    grid = torch.linspace(
        -4.0,
        5.0,
        181,
        dtype=torch.float64,
    )
    log_joint = pyro_log_joint(program, grid)
    log_evidence = log_joint.logsumexp(0) + math.log(float(grid[1] - grid[0]))
    weight = log_joint.softmax(0)
    mean = (weight * grid).sum()
    return float(mean), float((weight * (grid - mean).square()).sum().sqrt()), float(log_evidence)


# -- the density -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_density_is_pyros_own(name):
    density = Density(PROGRAMS[name][0], (X, Y))
    z = torch.tensor([[-0.7], [0.4], [1.9]], dtype=torch.float64)
    expected = pyro_log_joint(name, z[:, 0])
    torch.testing.assert_close(torch.func.vmap(density.log_joint)(z), expected)
    slopes = torch.func.vmap(torch.func.grad(density.log_joint))(z)[:, 0]
    step = 1e-4  # of a quadratic: exact to rounding
    differences = pyro_log_joint(name, z[:, 0] + step) - pyro_log_joint(name, z[:, 0] - step)
    torch.testing.assert_close(
        slopes,
        differences / (2 * step),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_datum_is_told_without_the_masked(name):
    program, _, count = PROGRAMS[name]
    density = Density(program, (X, Y))
    z = torch.tensor([[-0.7], [0.4]], dtype=torch.float64)
    pointwise = torch.func.vmap(density.log_likelihood)(z)
    assert (
        pointwise.shape == (2, count)
        and bool(torch.isfinite(pointwise).all())
        and bool(pointwise.all())
    )
    penalty = -2.0 * (z[:, 0] - 0.3).square() if name == "factor" else 0.0
    whole = torch.func.vmap(lambda one: density.log_parts(one)[1])(z)
    torch.testing.assert_close(pointwise.sum(1) + penalty, whole)


def test_a_label_outside_of_the_classes_may_be_masked():
    def program(x, y):
        s = slope()
        with pyro.plate("data", N), pyro.poutine.mask(mask=KEEP):
            pyro.sample(
                "y",
                dist.Categorical(logits=torch.stack([torch.zeros(N), s * X[:, 0]], -1)),
                obs=LABELS,
            )

    density = Density(program, (X, Y))
    z = torch.tensor([0.6], dtype=torch.float64)
    logits = torch.stack([torch.zeros(N), 0.6 * X[:, 0]], -1)
    expected = logits.log_softmax(-1).gather(1, LABELS.clamp_min(0)[:, None])[KEEP, 0]
    torch.testing.assert_close(density.log_likelihood(z), expected)
    torch.testing.assert_close(density.log_parts(z)[1], expected.sum())


def test_the_closed_form_of_a_prior_counts_scales_once():
    """A normal prior of two events, each with its own scale: cross entropy in closed form."""

    def program(x, y):
        with pyro.plate("two", 2), pyro.poutine.scale(scale=torch.tensor([0.5, 3.0])):
            w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(1))
        pyro.sample(
            "y",
            dist.Normal(w.sum(), 1.0),
            obs=torch.zeros(()),
        )

    density = Density(program, (None, None))
    family = MeanField(torch.linspace(-1, 1, 6), 0.3)
    closed, noisy = (Elbo(density, family, kl=kl) for kl in ("closed_form", "monte_carlo"))
    assert closed.closed == {"w"}
    _, kl = closed.parts(family.initial(), torch.tensor(0))
    estimates = torch.func.vmap(lambda key: noisy.parts(family.initial(), key)[1])(
        torch.arange(2000)
    )
    assert_mean_within(estimates[None], float(kl))


# -- every method ------------------------------------------------------------------------------------------------------

GUIDES = {
    f"SVI-{getattr(guide, '__name__', guide)}": pb.SVI(guide=guide, num_steps=20, compile=False)
    for guide in ("full_rank", "flow", AutoNormal)
}
LAPLACE = {
    "Laplace-hessian": pb.Laplace(
        curvature="hessian",
        num_steps=50,
        compile=False,
    )
}
ALL = METHODS | GUIDES | LAPLACE
LIKE_ANOTHER = METHODS.keys() - REPRESENTATIVES | {"DeepEnsemble"}
NOT_FOR_PROGRAMS = ("SWA", "MCDropout")
#: subsampling searches and chains have laws of their own
FAST = {
    "scale_and_mask_of_events": ALL.keys() - LIKE_ANOTHER,
    "subsample": ALL.keys() - LIKE_ANOTHER - {"MAP", "SGLD"},
}
CASES = [
    pytest.param(
        method,
        name,
        marks=() if method in FAST.get(name, ()) else pytest.mark.slow,
    )
    for name in PROGRAMS
    for method in ALL
]


def refuses(method, name) -> bool:
    if method.startswith(("NUTS", "SMC")) and name in SUBSAMPLED:
        return True
    if method == "SMC" and name == "mask_of_the_prior":  # which it would begin from
        return True
    if method == "SVI-flow":  # couples two values or more
        return True
    return method.startswith(NOT_FOR_PROGRAMS) and method not in LAPLACE


@pytest.mark.covering(3)
@pytest.mark.parametrize("method, name", CASES)
def test_every_method_fits_that_density_or_refuses(method, name):
    config = ALL[method]
    program = PROGRAMS[name][0]
    if method.startswith(("MAP", "MLE", "DeepEnsemble")):
        # four rows of twelve and one column of two are noisier than the rest
        steps = (
            {"num_steps": 1500, "lr": 0.01}
            if name == "subsample_nested"
            else {"num_steps": 400, "lr": 0.03}
        )
        config = dataclasses.replace(config, **steps)
    draws = {} if method in ONE_DRAW or method == "DeepEnsemble" else {"num_draws": 10}
    if refuses(method, name):
        with pytest.raises(pb.Refused, match="use |take out"):
            config.fit(program, X, Y, **draws)
        return
    posterior = config.fit(program, X, Y, seed=1, **draws)
    mean, sd, log_evidence = exact(name)
    values = posterior.draws["slope"]
    stats = posterior.sample_stats
    for stat in {"lp", "log_p"} & set(stats):  # real site: no Jacobian
        expected = pyro_log_joint(name, values)
        torch.testing.assert_close(
            stats[stat].double(),
            expected,
            rtol=1e-6,
            atol=1e-5,
        )
    if method == "MAP":
        assert values.item() == pytest.approx(mean, abs=1e-5)
    if method == "DeepEnsemble":  # its steps are as noisy as the subsamples
        assert (values - mean).abs().max() < (sd if name in SUBSAMPLED else 0.02 * sd)
    if method in LAPLACE:
        assert posterior.log_evidence == pytest.approx(log_evidence, abs=1e-4)
    if method.startswith("SVI"):
        gap = (stats["log_p"] - stats["log_q"]).double()
        error = math.hypot(posterior.meta["elbo_error"], float(gap.std()) / math.sqrt(gap.numel()))
        assert posterior.log_evidence == pytest.approx(float(gap.mean()), abs=5 * error + 1e-6)
        assert posterior.log_evidence < log_evidence + 5 * posterior.meta["elbo_error"]


def two_sites(x, y, size=5):
    s = slope()
    noise = pyro.sample("noise", dist.HalfNormal(torch.ones((), dtype=torch.float64)))
    with pyro.plate("data", N, subsample_size=size) as rows, pyro.poutine.mask(mask=KEEP[rows]):
        with pyro.poutine.scale(scale=WEIGHTS[rows]):
            pyro.sample(
                "y",
                dist.Normal(s * PAIRS[rows], noise).to_event(1),
                obs=y.expand(N, 2)[rows],
            )


TWO = [name for name in ALL if name.startswith(("SVI", "SG")) or name in LAPLACE]


@pytest.mark.parametrize("method", one_of_each_kind(TWO, {*TWO} - {"SGLD", "SVI-low-rank"}))
def test_a_site_on_the_half_line_is_counted_with_its_jacobian(method):
    posterior = ALL[method].fit(two_sites, X, Y, num_draws=20)
    for chain in range(posterior.num_chains):
        for draw in range(0, 20, 7):
            values = {name: value[chain, draw] for name, value in posterior.draws.items()}
            trace = pyro.poutine.trace(pyro.poutine.condition(two_sites, values)).get_trace(X, Y, N)
            expected = trace.log_prob_sum() + (
                values["noise"].log() if "lp" in posterior.sample_stats else 0.0
            )
            found = posterior.sample_stats.get("lp", posterior.sample_stats.get("log_p"))[
                chain, draw
            ]
            assert float(found) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scale_and_mask_of_events", "subsample", "factor", "mask_over_nan"]
)
def test_the_elbo_of_the_exact_posterior_is_the_evidence(name):
    posterior = pb.SVI(
        num_steps=800,
        lr=0.05,
        optimizer=Optimizer(schedule="cosine"),
        compile=False,
    ).fit(PROGRAMS[name][0], X, Y)
    mean, sd, log_evidence = exact(name)
    # at the optimum log p - log q is constant; what is left is the noise of the last steps
    slack = 0.1 if name in SUBSAMPLED else 0.01
    assert posterior.log_evidence == pytest.approx(
        log_evidence, abs=slack + 5 * posterior.meta["elbo_error"]
    )
    assert posterior.draws["slope"].mean().item() == pytest.approx(mean, abs=0.5 * sd)


def test_trees_of_programs_hold_the_data_that_count():
    posterior = pb.SVI(num_steps=20, compile=False).fit(
        mask_over_nan,
        X,
        Y,
        num_draws=100,
    )
    tree = posterior.to_datatree(X, Y)
    assert tree["log_likelihood"]["y"].shape == (1, 100, KEPT)
    joint = tree["log_prior"]["log_prior"] + tree["log_likelihood"]["y"].sum("y_dim_0")
    torch.testing.assert_close(torch.tensor(joint.values), posterior.sample_stats["log_p"])
    assert "importance" in {check.name for check in pb.diagnose(tree).checks}


def test_a_factor_outside_of_the_plates_is_in_the_log_prior_of_the_tree():
    posterior = pb.SVI(num_steps=20, compile=False).fit(
        factor,
        X,
        Y,
        num_draws=100,
    )
    tree = posterior.to_datatree(X, Y)
    joint = tree["log_prior"]["log_prior"] + tree["log_likelihood"]["y"].sum("data")
    torch.testing.assert_close(torch.tensor(joint.values), posterior.sample_stats["log_p"])


def test_a_program_of_factors_alone_has_no_data_to_leave_out():
    def program(x, y):
        pyro.factor("all", dist.Normal(slope() * x[:, 0], 0.5).log_prob(y[:, 0]).sum())

    tree = (
        pb.SVI(num_steps=20, compile=False)
        .fit(
            program,
            X,
            Y,
            num_draws=100,
        )
        .to_datatree(X, Y)
    )
    assert "log_likelihood" not in tree.children
    assert "not_checked_model" in {check.name for check in pb.diagnose(tree).checks}


# -- data with gaps ----------------------------------------------------------------------------------------------------


def test_nan_data_are_taken_where_the_program_masks_them():
    def program(x, y):
        s = slope()
        known = ~torch.isnan(y[:, 0])
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=known):
            pyro.sample(
                "y",
                dist.Normal(s * x[:, 0], 0.5),
                obs=y[:, 0],
            )

    posterior = pb.MAP(num_steps=20, compile=False).fit(program, X, GAPS[:, None])
    assert posterior.draws["slope"].item() == pytest.approx(exact("mask")[0], abs=1e-6)
    tree = posterior.to_datatree(X, GAPS[:, None])
    assert (
        tree["observed_data"]["y"].isnull().sum() == N - KEPT
    )  # what is missing by design is no fault of the tree
    assert "finite" not in [
        check.name for check in pb.diagnose(tree).checks if check.status != "pass"
    ]
    tree["log_likelihood"]["y"][0, 0, 0] = math.nan
    assert "finite" in [check.name for check in pb.diagnose(tree).checks if check.status != "pass"]
    with pytest.raises(ValueError, match="'y' holds .* NaN"):
        pb.MAP(num_steps=20, compile=False).fit(plate, X, GAPS[:, None])


# -- each datum counts once, in every run the same values are latent, and y is observed -------------------------------


@pytest.mark.parametrize(
    ("loc", "obs", "said"),
    [
        (
            X[:, 0],
            Y,
            r"shape \(12, 1\), and the program computes with one number a row",
        ),  # each with each: 144 terms
        (X, Y, r"shape \(12, 1\) and their distribution \(12, 12\)"),  # a plate spreads a column
        (X[:, 0], Y[:9, 0], r"shape \(9,\) and their distribution \(12,\)"),
        (X[:, 0], Y[:, 0].numpy(), "'y' holds a ndarray"),
    ],
)
def test_the_values_of_a_site_have_the_shape_of_its_distribution(loc, obs, said):
    def program(x, y):
        s = slope()
        with pyro.plate("data", N):
            pyro.sample(
                "y",
                dist.Normal(s * loc, 0.5),
                obs=y,
            )

    for method in (pb.MAP(), pb.NUTS()):
        with pytest.raises((ValueError, TypeError), match=said):
            method.fit(program, X, obs)


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (dist.Poisson(3.0), [1.0, 2.5]),
        (dist.Bernoulli(0.4), [0.0, 2.0]),
        (dist.Exponential(2.0), [1.0, -1.0]),  # whose density torch continues to negative numbers
        (dist.Categorical(torch.ones(3)), [0.0, 3.0]),
        (dist.Dirichlet(torch.ones(2)), [0.5, 0.6]),
    ],
)
def test_data_outside_of_a_fixed_support_are_an_error(fn, values):
    def program(x, y):
        slope()
        pyro.sample("y", fn, obs=y)

    with pytest.raises(ValueError, match="'y' lie outside of the support"):
        Density(program, (None, torch.tensor(values)))


def test_one_value_for_many_rows_is_the_same_datum_in_each():
    def program(x, y):
        s = slope()
        with pyro.plate("data", N):
            pyro.sample(
                "y",
                dist.Normal(s * x[:, 0], 0.5),
                obs=y,
            )

    z = torch.ones(1, dtype=torch.float64)
    spread = Density(program, (X, Y[0, 0].expand(N))).log_joint(z)
    torch.testing.assert_close(Density(program, (X, Y[0, 0])).log_joint(z), spread)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "method", [pb.MAP(), pb.NUTS(compile=False), pb.SVI(), pb.SMC(), ALL["Laplace-hessian"]]
)
def test_a_program_whose_latent_sites_come_and_go_has_no_density(method, first):
    def program(x, y):
        s = slope()
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0)) if bool(s > 0) is first else 0.0
        with pyro.plate("data", N):
            pyro.sample(
                "y",
                dist.Normal(s * x[:, 0] + offset, 0.5),
                obs=y[:, 0],
            )

    with pytest.raises(pb.Refused, match="'offset' are in some runs"):
        method.fit(program, X, Y)


def test_y_that_no_site_observes_is_an_error():
    def forgotten(x, y):
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(slope() * x[:, 0], 0.5))

    with pytest.raises(ValueError, match="the program observes nothing: .* obs=y"):
        pb.NUTS().fit(forgotten, X, Y)
    with pytest.raises(ValueError, match="no latent site to infer"):
        Density(lambda: pyro.sample("none", dist.Normal(torch.zeros(0), 1.0).to_event(1)))


def missing(x, y):
    s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=GAPS,
            obs_mask=KEEP,
        )


def masked_prior(x, y):
    s = slope()
    with pyro.plate("data", len(x)):
        with pyro.poutine.mask(mask=~KEEP):
            pyro.sample("alone", dist.Normal(s * x[:, 0], 0.5))
        with pyro.poutine.mask(mask=KEEP):
            pyro.sample(
                "y",
                dist.Normal(s * x[:, 0], 0.5),
                obs=GAPS,
            )


IMPROPER = [
    name for name in ALL if name.startswith(("SVI", "NUTS", "SMC", "SG")) or name in LAPLACE
]


@pytest.mark.parametrize("method", IMPROPER)
def test_values_without_any_density_are_refused(method):
    with pytest.raises(pb.Refused, match="'alone'.*the missing values alone"):
        ALL[method].fit(masked_prior, X, Y)


def test_density_of_missing_values_is_their_own_and_of_the_others_apart():
    """``obs_mask=`` gives the data that are there a latent twin, on which nothing depends."""
    density = Density(missing, (X, Y))
    z = torch.randn(density.dim, generator=torch.Generator().manual_seed(0))
    values = density.constrain(z)
    law = dist.Normal(values["slope"] * X[:, 0], 0.5)
    twins = values["y_unobserved"]
    standard = dist.Normal(0.0, 1.0).log_prob(twins)
    data = torch.where(KEEP, torch.nan_to_num(GAPS), twins)
    expected = law.log_prob(data).sum() + torch.where(KEEP, standard, 0.0).sum()
    plain = Density(lambda x, y: slope(), (X, Y))
    expected = expected + plain.log_joint(plain.unconstrain({"slope": values["slope"]}))
    torch.testing.assert_close(density.log_joint(z).float(), expected.float())


@pytest.mark.slow
def test_missing_values_leave_the_posterior_of_the_others():
    method = pb.NUTS(
        num_chains=2,
        num_warmup=200,
        compile=False,
    )
    posterior = method.fit(missing, X, Y, num_draws=400, seed=0)
    mean, sd, _ = exact("mask")
    assert posterior.draws["slope"].mean().item() == pytest.approx(
        float(mean), abs=0.25 * float(sd)
    )
    assert posterior.draws["slope"].std().item() == pytest.approx(float(sd), rel=0.2)
    # the completed data are a deterministic site
    assert torch.equal(posterior.draws["y"][..., KEEP], GAPS[KEEP].expand(2, 400, -1))


def test_map_fits_beside_values_without_density():
    posterior = pb.MAP(num_steps=100, compile=False).fit(missing, X, Y)
    # the missing values are at their mean, where they say nothing
    assert posterior.draws["slope"].item() == pytest.approx(exact("mask")[0], abs=1e-4)


# -- subsamples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBSAMPLED)
def test_subsamples_are_fresh_and_unbiased(name):
    density = Density(PROGRAMS[name][0], (X, Y))
    noisy = density.subsampled()
    z = torch.tensor([0.3], dtype=torch.float64)
    slopes = torch.func.grad_and_value(density.log_joint)
    gradient, value = slopes(z)
    sampled = torch.func.vmap(torch.func.grad_and_value(noisy.log_joint), randomness="different")
    with seeded(0):
        gradients, values = sampled(z.expand(4000, 1))
    assert_mean_within(gradients[None], gradient)
    assert_mean_within(values[None], value)
    assert values.unique().numel() > 10
    assert density.subsampled().subsampled().stochastic == density.stochastic == "data"


def test_a_traced_graph_draws_another_subsample_at_every_call():
    noisy = Density(subsample, (X, Y)).subsampled()
    z = torch.tensor([0.3], dtype=torch.float64)
    with seeded(0):
        graph = make_fx(noisy.log_joint)(z)
        assert len({float(graph(z)) for _ in range(10)}) > 5


def test_the_mode_of_a_subsampling_program_is_that_of_all_data():
    posterior = pb.MAP(num_steps=50, compile=False).fit(subsample, X, Y)
    assert posterior.draws["slope"].item() == pytest.approx(exact("subsample")[0], abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pb.SGLD(step_size=2e-3, thinning=50), pb.SGHMC(step_size=5e-4, thinning=20)]
)
def test_stochastic_gradient_chains_of_a_subsampling_program(method):
    config = dataclasses.replace(
        method,
        num_chains=16,
        num_warmup=2000,
        compile=False,
    )
    posterior = config.fit(subsample, X, Y, num_draws=150)
    mean, sd, _ = exact("subsample")
    draws = posterior.draws["slope"]
    assert_mean_within(draws, mean, min_ess=100)
    assert float(draws.std()) == pytest.approx(
        sd, rel=0.15
    )  # heated by the subsamples, O(step_size)


def test_a_latent_value_for_every_row_of_a_subsample_is_refused():
    def local(x, y):
        with pyro.plate("data", N, subsample_size=5) as rows:
            s = slope()
            pyro.sample(
                "y",
                dist.Normal(s * x[rows, 0], 0.5),
                obs=y[rows, 0],
            )

    for method in (pb.MAP(), pb.SGLD(), pb.NUTS(), pb.DeepEnsemble()):
        with pytest.raises(pb.Refused, match="'slope' has a value for every row"):
            method.fit(local, X, Y)


def test_a_subsample_drawn_once_outside_of_the_program_is_refused():
    with seeded(0):
        rows = pyro.plate("data", N, subsample_size=5)

    def program(x, y):
        s = slope()
        with rows as index:
            pyro.sample(
                "y",
                dist.Normal(s * x[index, 0], 0.5),
                obs=y[index, 0],
            )

    with pytest.raises(pb.Refused, match="'data' was made outside of the program"):
        pb.MAP().fit(program, X, Y)


def branching(x, y):
    s = slope()
    if s > 0:
        pyro.factor("positive", torch.tensor(-1.0))
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(s * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def row_by_row(x, y):
    s = slope()
    for row in pyro.plate("data", len(x), subsample_size=5):
        pyro.sample(
            f"y_{row}",
            dist.Normal(s * x[row, 0], 0.5),
            obs=y[row, 0],
        )


@pytest.mark.parametrize(
    "method", ["SVI", "SGLD", "SGHMC", "SMC", "DeepEnsemble", "Laplace-hessian"]
)
def test_programs_that_cannot_be_batched_are_refused_beforehand(method):
    with pytest.raises(pb.Refused, match="write it with tensors.*or use MAP or NUTS"):
        ALL[method].fit(branching, X, Y)
    if method in ("SGLD", "SGHMC", "DeepEnsemble"):
        with pytest.raises(pb.Refused, match="write it with tensors"):
            ALL[method].fit(row_by_row, X, Y)


def writes_in_place(x, y):
    bias = torch.zeros(2)
    bias[1] = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.Normal(bias[1] * x[:, 0], 0.5),
            obs=y[:, 0],
        )


def counted(x, y):  # torch's multinomial overwrites its impossible logits
    impossible = torch.tensor([-torch.inf], dtype=x.dtype)
    logits = torch.cat([slope() * x[:2, 0], impossible])
    pyro.sample(
        "y",
        dist.Multinomial(7, logits=logits),
        obs=torch.tensor([3.0, 4.0, 0.0], dtype=x.dtype),
    )


def with_gaps(x, y):  # Pyro's picks the values that are known
    s = slope()
    with pyro.plate("data", len(x)):
        pyro.sample(
            "y",
            dist.NanMaskedNormal(s * x[:, 0], 0.5),
            obs=GAPS,
        )


@pytest.mark.parametrize("program", [counted, with_gaps])
def test_distributions_that_pick_or_overwrite_values_are_run_at_many_points_at_once(program):
    density = Density(program, (X, Y))
    z = torch.tensor([[0.3], [-1.2], [2.0]])
    single = torch.func.grad_and_value(density.log_joint)
    gradient, why = batched_gradient(density.log_joint, z)
    assert not why
    for found, expected in zip(
        gradient(z),
        zip(*[single(one) for one in z], strict=True),
        strict=True,
    ):
        torch.testing.assert_close(found, torch.stack(expected))
    for one, found in zip(
        z, gradient(z)[0], strict=True
    ):  # as the program itself has it, without our handlers

        def plain(value):
            site = {"slope": value.to(X.dtype).squeeze()}
            return (
                pyro.poutine.trace(pyro.poutine.condition(program, site))
                .get_trace(X, Y)
                .log_prob_sum()
            )

        step = torch.tensor([1e-2], dtype=torch.float64)  # programs compute partly in float32
        torch.testing.assert_close(density.log_joint(one.double()).double(), plain(one).double())
        slope_of = (plain(one + step) - plain(one - step)) / (2 * step)
        torch.testing.assert_close(
            found.double(),
            slope_of,
            rtol=1e-2,
            atol=1e-2,
        )
    check_batched(density, "SVI")  # refused it


@pytest.mark.parametrize("program", [branching, writes_in_place])
@pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so
def test_a_program_that_cannot_be_batched_has_its_tree_verdict_and_prediction(program):
    fits = [
        pb.NUTS(
            num_chains=2,
            num_warmup=20,
            compile=False,
        ).fit(
            program,
            X,
            Y,
            num_draws=20,
        ),
        pb.MAP(num_steps=20, compile=False).fit(program, X, Y),
    ]
    for posterior in fits:
        tree = posterior.to_datatree(X, Y)
        expected = [
            pyro.poutine.trace(pyro.poutine.condition(program, {"slope": value}))
            .get_trace(X, Y)
            .log_prob_sum()
            for value in posterior.draws["slope"].flatten()
        ]
        found = tree["log_likelihood"]["y"].sum("data") + tree["log_prior"]["log_prior"]
        torch.testing.assert_close(
            torch.from_numpy(found.values).flatten(),
            torch.stack(expected),
            check_dtype=False,
            rtol=1e-4,
            atol=1e-3,
        )
        assert pb.diagnose(tree).summary


def test_a_loop_over_the_rows_of_a_subsample_is_fitted_by_map_and_svi():
    mean, sd, log_evidence = exact("subsample")
    assert pb.MAP(num_steps=20, compile=False).fit(row_by_row, X, Y).draws[
        "slope"
    ].item() == pytest.approx(mean)
    posterior = pb.SVI(num_steps=20, compile=False).fit(
        row_by_row,
        X,
        Y,
        num_draws=10,
    )
    expected = pyro_log_joint("subsample", posterior.draws["slope"])
    torch.testing.assert_close(posterior.sample_stats["log_p"], expected)
