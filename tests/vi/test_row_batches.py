"""A latent value for each row, fitted by mini-batches: unbiased, as with all rows at once, and refused where not."""

from __future__ import annotations

import functools
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.inference.fitting import checkpoints
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Training
from pyrobnn.inference.vi.guide_fit import GuideFit
from pyrobnn.inference.vi.start import own_start
from pyrobnn.model.density import Density

N = 40
B = 8
POSITIVE = dist.constraints.positive


def levels():
    """y of a level for each row, which vary about a mean."""
    generator = torch.Generator().manual_seed(0)
    return 1.0 + 1.4142 * torch.randn(N, generator=generator)


Y = levels()


def mean_of_levels():
    return pyro.sample("mean", dist.Normal(0.0, 10.0))


def drawing(x, y):
    """The plate draws the rows."""
    mean = mean_of_levels()
    with pyro.plate("rows", N, subsample_size=B) as rows:
        level = pyro.sample("level", dist.Normal(mean, 1.0))
        pyro.sample(
            "y",
            dist.Normal(level, 1.0),
            obs=y[rows],
        )


def given(x, y):
    """The program is given the data of the rows."""
    mean = mean_of_levels()
    with pyro.plate("rows", len(y)):
        level = pyro.sample("level", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def numbered(x, y):
    """The numbers of the rows are data."""
    mean = mean_of_levels()
    with pyro.plate("rows", N, subsample=x):
        level = pyro.sample("level", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def widths(x, y):
    """Positive local values, and columns that are subsampled too."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    columns = pyro.plate(
        "columns",
        6,
        subsample_size=3,
        dim=-1,
    )
    with pyro.plate("rows", 9, subsample_size=3, dim=-2) as rows:
        width = pyro.sample("width", dist.Gamma(2.0, 2.0 / scale))
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        with columns as column:
            tilt = pyro.sample("tilt", dist.Normal(0.0, width))
            y_some = y[rows][:, column]
            pyro.sample(
                "y",
                dist.Normal(tilt + shares[..., 0], width),
                obs=y_some,
            )


def guide_mean():
    loc = pyro.param("mean_loc", torch.tensor(0.0))
    pyro.sample(
        "mean",
        dist.Normal(
            loc,
            pyro.param(
                "mean_sd",
                torch.tensor(0.3),
                constraint=POSITIVE,
            ),
        ),
    )


def by_rows(x, y):
    """A hand-written guide whose parameters are taken by the plate's rows."""
    guide_mean()
    with pyro.plate("rows", N, subsample_size=B) as rows:
        loc = pyro.param("loc", torch.zeros(N))[rows]
        sd = pyro.param(
            "sd",
            0.5 * torch.ones(N),
            constraint=POSITIVE,
        )[rows]
        pyro.sample("level", dist.Normal(loc, sd))


def by_event_dim(x, y):
    """A hand-written guide whose plate takes the parameters of its rows itself."""
    guide_mean()
    with pyro.plate("rows", len(y)):
        loc = pyro.param("loc", torch.zeros(N), event_dim=0)
        sd = pyro.param(
            "sd",
            0.5 * torch.ones(N),
            constraint=POSITIVE,
            event_dim=0,
        )
        pyro.sample("level", dist.Normal(loc, sd))


with seeded(0):
    ENCODER = torch.nn.Linear(1, 2)


def encoded(net, y):
    loc, raw = net(y[:, None]).unbind(-1)
    pyro.sample("level", dist.Normal(loc, torch.nn.functional.softplus(raw)))


def amortised(x, y):
    """A net that is registered by pyro.module."""
    net = pyro.module("encoder", ENCODER)
    guide_mean()
    with pyro.plate("rows", N, subsample_size=B) as rows:
        encoded(net, y[rows])


class Amortised(PyroModule):
    """A module that holds its net, and is given the rows."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 2)

    def forward(self, x, y):
        guide_mean()
        with pyro.plate("rows", len(y)):
            encoded(self.net, y)


def made(guide):
    """The guide; an instance of a module whose parameters are drawn."""
    with seeded(0):
        return guide() if guide is Amortised else guide


def fitted(
    program,
    guide,
    x=None,
    y=Y,
    num_steps=1500,
    num_draws=2000,
    **options,
):
    method = pb.SVI(
        guide=made(guide),
        num_steps=num_steps,
        lr=0.02,
        compile=False,
        **options,
    )
    return method.fit(program, x, y, num_draws=num_draws)


# -- unbiased ----------------------------------------------------------------------------------------------------------


def partition(size, count):
    return torch.randperm(size, generator=torch.Generator().manual_seed(1)).split(count)


def places(some, whole, z):
    """The part of a whole vector that some rows have, by the axes of the sites."""
    parts = []
    for site in some.sites:
        value = z[whole.site(site.name).start : whole.site(site.name).stop]
        value = value.reshape(whole.site(site.name).unconstrained_shape)
        for plate, axis in some.rows.axes[site.name].items():
            value = value.index_select(axis, some.rows.numbers[plate])
        parts.append(value.reshape(-1))
    return torch.cat(parts)


def test_the_log_joint_at_rows_is_unbiased_value_and_gradient():
    y = torch.randn(
        9,
        6,
        generator=torch.Generator().manual_seed(2),
    )
    whole = Density(widths, (None, y), double=True)
    z = 0.5 * torch.randn(whole.dim, generator=torch.Generator().manual_seed(3)).double()
    gradient, value = torch.func.grad_and_value(whole.log_joint)(z)
    estimates = []
    for rows, columns in itertools.product(partition(9, 3), partition(6, 3)):
        some = whole.at_rows({"rows": rows, "columns": columns}, whole.plate_sizes)

        def estimate(z, some=some):
            return some.log_joint(places(some, whole, z))

        estimates.append(torch.func.grad_and_value(estimate)(z))
    gradients, values = zip(*estimates, strict=True)
    torch.testing.assert_close(torch.stack(values).mean(), value)
    torch.testing.assert_close(torch.stack(gradients).mean(0), gradient)
    assert torch.stack(values).std() > 1


@pytest.mark.parametrize(
    ("program", "guide", "options"),
    [
        (drawing, "mean_field", {}),
        (drawing, AutoNormal, {}),
        (drawing, by_rows, {}),
        (drawing, amortised, {}),
        (given, "mean_field", {"batch_size": B}),
        (given, AutoNormal, {"batch_size": B}),
        (given, by_event_dim, {"batch_size": B}),
        (given, Amortised, {"batch_size": B}),
        (numbered, AutoNormal, {"batch_size": B}),
    ],
)
def test_the_elbo_of_batches_has_the_mean_of_all_rows(program, guide, options):
    x = torch.arange(N) if program is numbered else None
    problem = prepare(
        program,
        x,
        Y,
        points="free",
        local_rows=True,
    )
    fit = GuideFit(pb.SVI(guide=made(guide), **options), problem, own_start(problem), 0)
    num_keys = 400

    def values(elbo):
        keys = torch.arange(num_keys, dtype=torch.int64)
        parts = torch.func.vmap(lambda key: torch.stack(elbo.parts(fit.start, key)))(keys)
        return parts.double()

    whole = values(fit.elbo)
    batches = [values(fit.elbo.at_rows(fit.rows.at((rows,)))) for rows in partition(N, B)]
    mean = torch.stack(batches).mean(0)
    error = (whole.var(0) / num_keys + mean.var(0) / num_keys).sqrt()
    assert bool(((whole.mean(0) - mean.mean(0)).abs() < 5 * error + 1e-3).all())


def slopes_at(guide, kl, phi=None, num_keys=400):
    """Gradients of the loss by batches, (batch, key, parameter), at parameters of the guide."""
    problem = prepare(
        given,
        None,
        Y,
        points="free",
        local_rows=True,
    )
    method = pb.SVI(guide=guide, kl=kl, batch_size=B)
    fit = GuideFit(method, problem, own_start(problem), 0)
    theta = fit.start if phi is None else phi
    keys = torch.arange(num_keys, dtype=torch.int64)
    slopes = []
    for rows in partition(N, B):
        elbo = fit.elbo.at_rows(fit.rows.at((rows,)))

        def slope(key, elbo=elbo):
            return torch.func.grad(lambda theta: elbo(theta, torch.tensor(1.0), key)[0])(theta)

        slopes.append(torch.func.vmap(slope)(keys))
    return torch.stack(slopes).double()


@pytest.mark.parametrize("guide", ["mean_field", AutoNormal])
def test_either_estimate_of_the_kl_has_the_same_gradient_in_the_mean(guide):
    means = []
    squared_errors = []
    for kl in ("closed_form", "monte_carlo"):
        means_of_keys = slopes_at(guide, kl).mean(0)
        means.append(means_of_keys.mean(0))
        squared_errors.append(means_of_keys.var(0) / len(means_of_keys))
    error = (squared_errors[0] + squared_errors[1]).sqrt()
    assert bool(((means[0] - means[1]).abs() < 5 * error + 1e-3).all())


def best_normals():
    """Means, then softplus⁻¹ of the sds, of the normals that are the best for the levels of rows and their mean."""
    sds = torch.cat([torch.tensor([MEAN_SD]), torch.full((N,), LEVEL_SD)])
    locs = torch.cat([torch.tensor([exact_mean()]), (Y + exact_mean()) / 2])
    return torch.cat([locs, torch.log(torch.expm1(sds))])


@pytest.mark.parametrize("guide", ["mean_field", AutoNormal])
def test_a_rows_gradient_is_quiet_where_its_guide_has_arrived(guide):
    """What is left is the noise of what the rows share, .16 of .7."""
    phi = best_normals()
    noise = [
        float(slopes_at(guide, kl, phi)[..., 1 : 1 + N].var(1).sum())
        for kl in ("closed_form", "monte_carlo")
    ]
    assert noise[1] < 0.2 * noise[0]


# -- as with all rows --------------------------------------------------------------------------------------------------

#: of the mean-field optimum: the mean is N(y's mean, ·), a level half-way between it and its y
LEVEL_SD = math.sqrt(0.5)
MEAN_SD = 1 / math.sqrt(N + 0.01)


@functools.cache
def exact_mean():
    return float(Y.sum() / 2 / (N / 2 + 0.01))


def check_moments(posterior, tolerance=0.1):
    draws = posterior.draws
    assert draws["level"].shape == (1, 2000, N)
    assert float(draws["mean"].mean()) == pytest.approx(exact_mean(), abs=0.08)
    assert float(draws["mean"].std()) == pytest.approx(MEAN_SD, rel=0.15)
    expected = (Y + exact_mean()) / 2
    assert float((draws["level"].mean((0, 1)) - expected).abs().mean()) < tolerance
    assert float(draws["level"].std((0, 1)).mean()) == pytest.approx(LEVEL_SD, rel=0.1)


@pytest.mark.parametrize(
    ("program", "guide", "options"),
    [
        (drawing, "mean_field", {}),
        (drawing, AutoNormal, {}),
        (drawing, by_rows, {}),
        (drawing, amortised, {}),
        (given, "mean_field", {"batch_size": B}),
        (given, by_event_dim, {"batch_size": B}),
        (given, Amortised, {"batch_size": B}),
        (numbered, AutoNormal, {"batch_size": B}),
        (given, "mean_field", {}),
    ],
)
def test_a_fit_by_batches_has_the_moments_of_all_rows(program, guide, options):
    before = [parameter.clone() for parameter in ENCODER.parameters()]
    x = torch.arange(N) if program is numbered else None
    posterior = fitted(program, guide, x, **options)
    check_moments(posterior)
    assert posterior.log_evidence is not None
    whole = fitted(given, "mean_field")
    assert posterior.log_evidence == pytest.approx(whole.log_evidence, abs=1.0)
    # a net that the guide registers is as it was
    assert all(map(torch.equal, before, ENCODER.parameters()))


@pytest.mark.slow
def test_a_loader_of_a_program_is_its_batches():
    loader = DataLoader(
        TensorDataset(torch.arange(N), Y),
        batch_size=B,
        shuffle=True,
    )
    method = pb.SVI(
        guide=AutoNormal,
        num_steps=1500,
        lr=0.02,
        compile=False,
    )
    check_moments(method.fit(numbered, loader, num_draws=2000))
    with pytest.raises(ValueError, match="the DataLoader sets the size of batches"):
        pb.SVI(batch_size=4, compile=False).fit(numbered, loader)


@pytest.mark.parametrize(
    ("program", "guide", "options"),
    [
        (given, Amortised, {"batch_size": B}),
        (drawing, AutoNormal, {}),
    ],
)
@pytest.mark.slow
def test_a_compiled_step_is_the_one_that_is_not(program, guide, options):
    losses = []
    for compile_ in (False, True):
        method = pb.SVI(guide=made(guide), num_steps=30, compile=compile_, **options)
        posterior = method.fit(program, None, Y, num_draws=50)
        losses.append(posterior.history["loss"])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


def test_the_fitted_guide_draws_rows_in_pyro_as_the_program_does():
    posterior = fitted(
        drawing,
        AutoNormal,
        num_steps=20,
        num_draws=10,
    )
    program = Predictive(
        drawing,
        guide=posterior.guide,
        num_samples=5,
    )
    with seeded(0):
        samples = program(None, Y)
    assert samples["level"].shape == (5, B)


# -- other rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "y", "law"),
    [
        (Amortised, torch.tensor([5.0, -3.0, 1.0]), "guide"),
        (Amortised, None, "program"),
        ("mean_field", torch.tensor([5.0, -3.0, 1.0]), "program"),
        (by_event_dim, Y.flip(0), "program"),
    ],
)
def test_values_of_other_rows_are_from_the_guide_or_the_population(guide, y, law):
    def program(x, y):
        mean = mean_of_levels()
        with pyro.plate("rows", len(x)):
            level = pyro.sample("level", dist.Normal(mean, 1.0))
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    posterior = fitted(
        program,
        guide,
        torch.zeros(N),
        batch_size=B,
    )
    x = torch.zeros(3 if y is None else len(y))
    drawn = posterior.infer_local(x, y)
    level = drawn.values["level"]
    assert drawn.drawn_from == law and level.shape == (1, 2000, len(x))
    mean = posterior.draws["mean"]
    expected = (y + exact_mean()) / 2 if law == "guide" else mean.mean().expand(len(x))
    sd = LEVEL_SD if law == "guide" else math.sqrt(1 + float(mean.var()))
    assert float((level.mean((0, 1)) - expected).abs().max()) < (0.25 if law == "guide" else 0.1)
    assert float(level.std((0, 1)).mean()) == pytest.approx(sd, rel=0.1)
    if law == "program":
        # each beside its own draw of what the rows share
        together = torch.corrcoef(torch.stack([level.mean(2)[0], mean[0]]))[0, 1]
        assert float(together) > 0.15


def test_a_model_without_values_of_rows_says_so():
    def program(x, y):
        pyro.sample(
            "y",
            dist.Normal(mean_of_levels(), 1.0).expand([len(y)]),
            obs=y,
        )

    posterior = pb.SVI(num_steps=5, compile=False).fit(
        program,
        None,
        Y,
        num_draws=10,
    )
    with pytest.raises(ValueError, match="no latent site with a value for each row"):
        posterior.infer_local(None, Y)


# -- nets of the model -------------------------------------------------------------------------------------------------


def test_a_net_that_the_model_registers_is_fitted_and_left_as_it_was():
    with seeded(0):
        net = torch.nn.Linear(1, 1)
    before = [parameter.clone() for parameter in net.parameters()]

    def program(x, y):
        pyro.module("line", net)
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample(
                "y",
                dist.Normal(net(x)[:, 0], scale),
                obs=y,
            )

    x = torch.linspace(-1, 1, N)[:, None]
    y = 3.0 * x[:, 0] + 0.1 * Y
    design = torch.cat([x, torch.ones(N, 1)], 1)
    expected = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    for method in (pb.SVI(num_steps=1500, lr=0.05, compile=False), pb.MAP(compile=False)):
        posterior = method.fit(program, x, y)
        slope = posterior.draws["line$$$weight"].mean()
        assert float(slope) == pytest.approx(float(expected[0]), abs=0.05)
        assert all(map(torch.equal, before, net.parameters()))


# -- refused -----------------------------------------------------------------------------------------------------------


def fixed_size(x, y):
    mean = mean_of_levels()
    with pyro.plate("rows", N):
        level = pyro.sample("level", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def no_plate(x, y):
    mean = mean_of_levels()
    pyro.sample(
        "y",
        dist.Normal(mean, 1.0).expand([len(y)]).to_event(1),
        obs=y,
    )


def other_size(x, y):
    guide_mean()
    with pyro.plate("rows", N, subsample_size=B + 1):
        pyro.sample("level", dist.Normal(0.0, pyro.param("sd", torch.tensor(1.0))))


def of_all_rows(x, y):
    guide_mean()
    with pyro.plate("rows", N):
        pyro.sample("level", dist.Normal(pyro.param("loc", torch.zeros(N)), 1.0))


def of_the_first_rows(x, y):
    guide_mean()
    with pyro.plate("rows", len(y)) as rows:
        pyro.sample("level", dist.Normal(pyro.param("loc", torch.zeros(N))[rows], 1.0))


SOME = torch.arange(B)


@pytest.mark.parametrize(
    ("program", "guide", "options", "words"),
    [
        (no_plate, "mean_field", {"batch_size": B}, "'y' has a value for each row .* no plate"),
        (fixed_size, "mean_field", {"batch_size": B}, "'rows' has 40 rows however many"),
        (drawing, "mean_field", {"batch_size": B}, "draws a subsample itself"),
        (drawing, "full_rank", {}, "draws all rows together"),
        (drawing, AutoMultivariateNormal, {}, "draws all rows together"),
        (drawing, other_size, {}, "draws 9 of 40 rows where the program of the model draws 8"),
        (drawing, of_all_rows, {}, "the guide cannot be run at 8 of 40 rows of 'rows'"),
        (given, of_the_first_rows, {"batch_size": B}, "parameter 'loc' .* of other rows"),
        (drawing, "mean_field", {"kl_direction": "forward"}, "sees all rows"),
    ],
)
def test_what_mini_batches_do_not_estimate_is_refused(program, guide, options, words):
    seen = []
    method = pb.SVI(
        guide=guide,
        num_steps=5,
        compile=False,
        **options,
    )
    with pytest.raises(pb.Refused, match=words):
        method.fit(
            program,
            None,
            Y,
            callbacks=[lambda step, metrics: seen.append(step)],
        )
    assert not seen


def test_a_posterior_of_some_rows_does_not_stand_for_all():
    method = pb.SVI(num_steps=5, compile=False)
    with pytest.raises(pb.Refused, match="8 of the 40 rows .* the same in every run"):
        method.fit(numbered, SOME, Y[:B])


def test_other_methods_want_all_rows():
    for method in (pb.MAP(), pb.SGLD(), pb.NUTS(), pb.DeepEnsemble()):
        with pytest.raises(pb.Refused, match="'level' has a value for every row"):
            method.fit(drawing, None, Y)


# -- Adam by the visits of a row ---------------------------------------------------------------------------------------


def test_a_row_moves_at_its_visits_alone():
    """Dense Adam goes on moving a row after its visit."""
    batches = itertools.cycle([(torch.tensor([0]),), (torch.tensor([1]),), (torch.tensor([2]),)])
    of_rows = torch.tensor([True, True, True, False])

    def loss(theta, row):
        return (theta[row] - 1.0).square().sum() + (theta[3] - 1.0).square()

    def end(num_steps):
        start = torch.zeros(4)
        training = Training(num_steps, lr=0.01, compile=False)
        return minimize(
            loss,
            start,
            batches,
            training,
            of_rows=of_rows,
        ).params

    first = end(1)
    assert first[0] > 0.0 and first[3] > 0.0 and (first[1:3] == 0.0).all()
    batches = itertools.cycle([(torch.tensor([0]),), (torch.tensor([1]),)])
    # the schedule is of the steps altogether: a move of 0.01 sqrt(2) at the first visit
    second = end(2)
    assert torch.allclose(
        second[:3],
        torch.tensor([0.0141421, 0.0141421, 0.0]),
        atol=1e-6,
    )


@pytest.mark.slow
def test_what_rows_share_is_right_where_a_row_is_seen_at_every_twentieth_step():
    """Adam of all parameters at every step ended at a whole sd of the mean, and more."""
    num = 1000
    y = 1.0 + 1.4142 * torch.randn(num, generator=torch.Generator().manual_seed(0))
    exact = float(y.sum() / 2 / (num / 2 + 0.01))
    posterior = pb.SVI(num_steps=4000, batch_size=50).fit(
        given,
        torch.zeros(num),
        y,
        num_draws=2000,
        seed=0,
    )
    mean = float(posterior.draws["mean"].mean())
    # of mean-field, whose sd is that of the mean given the levels
    assert abs(mean - exact) < 0.5 / math.sqrt(num)
    levels_off = posterior.draws["level"][0].mean(0) - (exact + y) / 2
    assert float(levels_off.square().mean().sqrt()) < 0.1 * math.sqrt(0.5)


def test_the_visits_of_rows_are_in_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    y = levels()

    def fit(**options):
        return pb.SVI(num_steps=60, batch_size=B, compile=False).fit(
            given,
            torch.zeros(N),
            y,
            num_draws=50,
            seed=0,
            **options,
        )

    def kill(step, metrics):
        if step >= 30:
            raise ZeroDivisionError

    whole = fit()
    with pytest.raises(ZeroDivisionError):
        fit(checkpoint=tmp_path / "fit", callbacks=[kill])
    resumed = fit(checkpoint=tmp_path / "fit")
    assert torch.equal(whole.draws["level"], resumed.draws["level"])
