"""Programs in their trees: deterministic sites, plates as dimensions, replicates before and after the data."""

from __future__ import annotations

import json
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded

import pyrobnn as pb
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.model import Density, derived
from pyrobnn.model.gradient import at_each
from pyrobnn.model.log_terms import without_validation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(errors, effects):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with pyro.plate("school", 8):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        pyro.sample("effect", dist.Normal(theta, errors), obs=effects)


def closed(x=None, y=None):
    schools(ERRORS, EFFECTS)


SHORT = {
    "NUTS": pb.NUTS(num_chains=2, num_warmup=20, compile=False),
    "SVI": pb.SVI(num_steps=5, compile=False),
    "MAP": pb.MAP(num_steps=5, compile=False),
    "SGLD": pb.SGLD(num_chains=2, num_warmup=20, compile=False),
}


def fitted(program=schools, *args, num_draws=100):
    args = args or (ERRORS, EFFECTS)
    return pb.SVI(num_steps=20, compile=False).fit(program, *args, num_draws=num_draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [*("NUTS", "SVI", "MAP"), pytest.param("SGLD", marks=pytest.mark.slow)]
)
def test_deterministic_sites_are_in_the_draws_whatever_the_method(method):
    posterior = SHORT[method].fit(schools, ERRORS, EFFECTS, num_draws=1 if method == "MAP" else 20)
    draws = posterior.draws
    expected = draws["mu"][..., None] + draws["tau"][..., None] * draws["eta"]
    torch.testing.assert_close(draws["theta"], expected)
    assert posterior.meta["deterministic_sites"] == ["theta"] and "theta" not in posterior.stacked()
    tree = posterior.to_datatree(ERRORS, EFFECTS)
    assert tree["posterior"]["theta"].dims == ("chain", "draw", "school")
    for group in ("log_likelihood", "posterior_predictive", "prior_predictive"):
        assert tree[group]["effect"].dims == ("chain", "draw", "school"), group
    assert tree["observed_data"]["effect"].dims == ("school",)
    assert tree["constant_data"]["x"].dims == ("school", "feature")
    assert set(tree["prior"].data_vars) == {"mu", "tau", "eta", "theta"}


def test_a_program_with_data_of_its_own_has_all_groups_without_being_given_any():
    posterior = fitted(closed, None, None)
    tree = posterior.to_datatree()
    assert {"log_likelihood", "posterior_predictive", "prior_predictive", "observed_data"} <= set(
        tree.children
    )
    np.testing.assert_array_equal(tree["observed_data"]["effect"], EFFECTS)
    assert "posterior_predictive" not in fitted().to_datatree().children  # its data are not at hand


@pytest.mark.parametrize("method", ["NUTS", "SVI"])
def test_all_that_judges_a_program_takes_one_density_of_it(method, monkeypatch):
    """Each test of the draws made a density of its own, and merged the operations of a long loop anew."""
    posterior = SHORT[method].fit(schools, ERRORS, EFFECTS, num_draws=200)
    densities = []
    build = Density.__init__

    def counted(density, *args, **options):
        # what components may be exchanged is seen in float64
        if not options.get("double"):
            densities.append(density)
        build(density, *args, **options)

    monkeypatch.setattr(Density, "__init__", counted)
    tree = posterior.to_datatree(ERRORS, EFFECTS)
    assert "stein" in tree.children
    assert "moved" in tree.children or method == "NUTS"
    assert len(densities) == 1


@pytest.mark.slow
def test_replicates_have_the_moments_of_the_program():
    posterior = fitted(num_draws=2000)
    values = posterior.to_datatree(ERRORS, EFFECTS)["posterior_predictive"]["effect"].values[0]
    theta = posterior.draws["theta"][0].double().numpy()
    expected = np.sqrt(theta.var(0) + ERRORS.numpy() ** 2)
    error = expected / math.sqrt(len(values))
    assert (np.abs(values.mean(0) - theta.mean(0)) < 5 * error).all()
    assert (np.abs(values.std(0) / expected - 1) < 5 / math.sqrt(2 * len(values))).all()


@pytest.mark.slow
def test_prior_replicates_have_the_moments_of_the_prior():
    density = Density(schools, (ERRORS, EFFECTS))
    sites, data = derived.prior(density, 2000, seed=1)
    expected = torch.sqrt(
        25.0 + 25.0 + ERRORS**2
    )  # mu, tau (whose second moment is 25) times eta, noise
    ratio = data["effect"][0].double().std(0) / expected
    assert bool(((ratio - 1).abs() < 0.12).all())
    torch.testing.assert_close(
        sites["theta"], sites["mu"][..., None] + sites["tau"][..., None] * sites["eta"]
    )


def test_all_prior_draws_that_are_asked_for_are_made_where_they_are_made_at_once():
    density = Density(schools, (ERRORS, EFFECTS))
    sites, data = derived.prior(density, 5000, seed=1, seconds=0.0)
    assert sites["mu"].shape == (1, 5000) and data["effect"].shape == (1, 5000, 8)


def counts(x, y):
    """Likelihoods whose samplers torch.func.vmap does not take, and data that depend on data."""
    a = pyro.sample("a", dist.Gamma(2.0, 1.0))
    with pyro.plate("row", 4):
        first = pyro.sample("first", dist.StudentT(5.0, a, 1.0), obs=None if y is None else y[:, 0])
        pyro.sample("second", dist.Normal(100.0 * first, 0.01), obs=None if y is None else y[:, 1])


def test_replicates_of_later_data_follow_the_replicates_of_earlier_ones():
    y = torch.arange(8.0).reshape(4, 2)
    tree = fitted(counts, torch.zeros(4), y).to_datatree(torch.zeros(4), y)
    first, second = (tree["posterior_predictive"][name].values for name in ("first", "second"))
    np.testing.assert_allclose(second, 100.0 * first, atol=0.2)
    assert first.std() > 0.5 and len(np.unique(first)) == first.size


NOISES = {
    "normal": lambda a: dist.Normal(a, 1.0),
    "normal of constants": lambda a: dist.Normal(torch.zeros(()), 1.0),
    "log-normal": lambda a: dist.LogNormal(a, 1.0),
    "Student's t": lambda a: dist.StudentT(5.0, a, 1.0),
    "Laplace": lambda a: dist.Laplace(a, 1.0),
    "Cauchy": lambda a: dist.Cauchy(a, 1.0),
    "exponential": lambda a: dist.Exponential(a.exp()),
    "Weibull": lambda a: dist.Weibull(a.exp(), 2.0),
    "multivariate": lambda a: dist.MultivariateNormal(a.expand(2), torch.eye(2)),
    "in place": lambda a: dist.Delta(torch.empty(2).normal_() + a),
}


@pytest.mark.parametrize("noise", NOISES)
def test_replicates_are_drawn_at_many_draws_at_once(noise):
    """A program with a loop would take minutes, were it run once for each draw."""
    runs = []

    def program(a):
        runs.append(a)
        return NOISES[noise](a)()

    with seeded(0), without_validation():
        found = at_each(program, torch.linspace(-1.0, 1.0, 400))
    assert len(runs) == 1 and len(found.unique(dim=0)) == 400


def test_events_axes_outside_of_plates_and_deterministic_events_are_named_as_arviz_names_them():
    def program(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("group", 2, dim=-2), pyro.plate("row", 4, dim=-1):
            v = pyro.sample("v", dist.Normal(torch.zeros(2, 4, 3), 1.0).to_event(1))
            pyro.deterministic("pair", v[..., :2] * w[:2], event_dim=1)
            pyro.sample("y", dist.Normal(v * w, 1.0).to_event(1), obs=y)
        pyro.deterministic("total", v.sum((0, 1)))

    y = torch.zeros(2, 4, 3)
    tree = fitted(program, torch.zeros(2), y).to_datatree(torch.zeros(2), y)
    dims = {name: values.dims[2:] for name, values in tree["posterior"].data_vars.items()}
    assert dims == {
        "w": ("w_dim_0",),
        "v": ("group", "row", "v_dim_0"),
        "pair": ("group", "row", "pair_dim_0"),
        "total": ("total_dim_0",),
    }
    assert tree["log_likelihood"]["y"].dims[2:] == ("group", "row")
    assert tree["posterior_predictive"]["y"].dims[2:] == ("group", "row", "y_dim_0")


def test_a_posterior_that_was_saved_gives_the_same_tree(tmp_path):
    posterior = fitted()
    loaded = pb.Posterior.load(posterior.save(tmp_path / "p.nc"), schools)
    before, after = (each.to_datatree(ERRORS, EFFECTS) for each in (posterior, loaded))
    for group in ("posterior", "posterior_predictive", "prior", "log_likelihood", "observed_data"):
        assert before[group].to_dataset().equals(after[group].to_dataset()), group


def test_a_posterior_of_an_earlier_version_names_its_dimensions_by_number():
    posterior = fitted()
    for name in ("axes", "deterministic_sites", "data_given"):
        del posterior.meta[name]
    del posterior.draws["theta"]
    tree = posterior.to_datatree(ERRORS, EFFECTS)
    assert tree["posterior"]["eta"].dims == ("chain", "draw", "eta_dim_0")


@pytest.mark.slow
def test_the_verdict_judges_deterministic_sites():
    def program(x, y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        pyro.deterministic(
            "net.sign", (mu > 0).float()
        )  # not a net's weight, whatever it is called
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = torch.tensor(0.0)
    posterior = pb.NUTS(num_chains=2, num_warmup=100, compile=False).fit(
        program, None, y, num_draws=100
    )
    with seeded(0):
        posterior.draws["net.sign"] = torch.randn(2, 100) + torch.tensor([[0.0], [5.0]])
    verdict = pb.diagnose(posterior.to_datatree(None, y))
    rhat = next(check for check in verdict.checks if check.name.startswith("rhat"))
    assert rhat.status != "pass" and "net.sign" in rhat.evidence


def test_gaps_of_the_data_in_a_deterministic_site_are_no_fault_and_others_are_told():
    x = torch.tensor([1.0, math.nan])

    def program(x, y):
        a = pyro.sample("a", dist.Normal(torch.zeros(()), 1.0))
        pyro.deterministic("mean", a * x)
        pyro.deterministic("root", a.sqrt())
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    posterior = fitted(program, torch.zeros(2), torch.zeros(()))
    assert any("'root' is NaN or infinite" in note for note in posterior.meta["warnings"])
    posterior = fitted(lambda _, y: program(x, y), torch.zeros(2), torch.zeros(()))
    assert not any("'mean'" in note for note in posterior.meta["warnings"])
    verdict = pb.diagnose(posterior.to_datatree())
    assert not any(check.name == "finite" and check.status == "fail" for check in verdict.checks)


def test_deterministic_sites_that_do_not_fit_or_change_shape_are_left_out_with_a_word(monkeypatch):
    from pyrobnn.inference.fitting import program as module

    def shapes(x, y):
        a = pyro.sample("a", dist.Normal(torch.zeros(()), 1.0))
        pyro.deterministic("many", a.expand(2 if a > 0 else 1))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    posterior = pb.MAP(num_steps=5, compile=False).fit(shapes, None, torch.zeros(()))
    assert posterior.draws["many"].shape[:2] == (1, 1)
    with seeded(0):
        draws = {"a": torch.randn(1, 50)}
    density = Density(shapes, (None, torch.zeros(())))
    values, _, notes = module.what_program_says(density, draws, {})
    assert values == {} and notes[0].code == "deterministic_failed"
    monkeypatch.setattr(module, "_MAX_DERIVED", 100)
    large = fitted()
    assert "theta" not in large.draws and any(
        "'theta' would take" in w for w in large.meta["warnings"]
    )
    assert json.loads(large.to_datatree().attrs["deterministic_sites"]) == []


def test_an_improper_prior_has_no_predictive():
    def program(x, y):
        a = pyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    y = torch.zeros(3).sum()
    posterior = pb.MAP(num_steps=5, compile=False).fit(program, None, y)
    tree = posterior.to_datatree(None, y)
    assert "posterior_predictive" in tree.children and "prior_predictive" not in tree.children


def test_prior_draws_at_which_the_data_cannot_be_drawn_are_left_out_with_a_word(monkeypatch):
    """A rate that overflows: some draws of a vague prior have no data."""
    # a slow machine gets as many draws
    monkeypatch.setattr("pyrobnn.posterior.program_tree._LEAST_SECONDS", 600.0)

    def growing(_, counts):
        rate = pyro.sample("rate", dist.Normal(0.0, 3.0))
        infected = torch.exp(40.0 * rate.exp())
        mean = 3.0 * infected / (1.0 + infected)
        with pyro.plate("day", len(counts)):
            pyro.sample("count", dist.Poisson(mean), obs=counts)

    posterior = fitted(growing, None, torch.ones(10))
    with pytest.warns(UserWarning, match="draws from the prior .* are left out: .* cannot be"):
        tree = posterior.to_datatree(None, torch.ones(10))
    rates = tree["prior"]["rate"].values
    counts = tree["prior_predictive"]["count"].values
    assert 25 < rates.shape[1] < 200 and rates.max() < np.log(np.log(3.5e38) / 40.0)
    assert counts.shape[:2] == rates.shape and np.isfinite(counts).all()


def test_columns_of_x_that_a_program_observes_are_no_inputs():
    table = torch.arange(60.0).reshape(20, 3).sin()

    def chain(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(x)):
            first = pyro.sample("first", dist.Normal(slope * x[:, 0], 1.0), obs=x[:, 1])
            pyro.sample("second", dist.Normal(first, 1.0), obs=x[:, 2].double())

    posterior = fitted(chain, table, None)
    inputs = posterior.to_datatree(table)["constant_data"]["x"]
    np.testing.assert_array_equal(inputs.values, table[:, :1])

    def own(x, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([20]).to_event(1), obs=x)

    series = table[:, 0]
    assert "constant_data" not in fitted(own, series, None).to_datatree(series)


TIMES = torch.linspace(0.05, 2.0, 40)
SEEN = (torch.arange(40) % 3 > 0) & (TIMES < 1.5)


def censored_by_masks(x, y):
    rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
    with pyro.plate("row", 40):
        with pyro.poutine.mask(mask=SEEN):
            pyro.sample("time", dist.Exponential(rate), obs=y)
        with pyro.poutine.mask(mask=~SEEN):
            pyro.sample("late", dist.Exponential(rate), obs=y)


def censored_by_factor(x, y):
    rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
    with pyro.plate("row", 40):
        with pyro.poutine.mask(mask=SEEN):
            pyro.sample("time", dist.Exponential(rate), obs=y)
        pyro.factor("longer", torch.where(SEEN, 0.0, -rate * y))


def censored_by_ones(x, y):
    rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
    pyro.sample("time", dist.Exponential(rate).expand([int(SEEN.sum())]).to_event(1), obs=y[SEEN])
    survival = torch.exp(-rate * y[~SEEN])
    with pyro.plate("censored", len(survival)):
        pyro.sample("late", dist.Bernoulli(survival), obs=torch.ones_like(survival))


@pytest.mark.parametrize("program", [censored_by_masks, censored_by_ones, censored_by_factor])
def test_censoring_that_a_program_writes_by_hand_is_not_held_against_replicates(program):
    posterior = fitted(program, None, TIMES)
    verdict = pb.diagnose(posterior.to_datatree(None, TIMES))
    assert not verdict.checked("model") and verdict.model == "warn"
    codes = [check.code for check in verdict.checks if check.question == "model" and check.decides]
    assert codes == ["selected_by_outcome"]
    assert "by its outcome" in verdict.warned[-1].evidence


def test_gaps_that_are_masked_and_events_that_may_not_happen_are_judged():
    """One mask, or labels of two kinds, selects nothing by the outcome."""

    def program(x, y):
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        with pyro.plate("row", 40):
            with pyro.poutine.mask(mask=SEEN):
                pyro.sample("time", dist.Exponential(rate), obs=y)
            pyro.sample("label", dist.Bernoulli(0.5), obs=(torch.arange(40) % 2).float())

    posterior = fitted(program, None, TIMES)
    assert pb.diagnose(posterior.to_datatree(None, TIMES)).checked("model")


def seen_once_marked(x, y):
    """Whether animals are seen a second time, of which some die before; what is not marked yet is masked."""
    seen = pyro.sample("seen", dist.Beta(8.0, 2.0))
    with pyro.plate("animal", len(y)):
        alive = pyro.sample("alive", dist.Bernoulli(0.9), infer={"enumerate": "parallel"})
        with pyro.poutine.mask(mask=y[:, 0] > 0):
            pyro.sample("first", dist.Bernoulli(seen), obs=y[:, 0])
            pyro.sample("second", dist.Bernoulli(seen * alive), obs=y[:, 1])
        with pyro.poutine.mask(mask=torch.zeros(len(y), dtype=torch.bool)):
            pyro.sample("zeroth", dist.Bernoulli(seen * alive), obs=0.0 * y[:, 0])


def test_what_a_program_masks_is_not_held_against_replicates():
    """A right capture-recapture model was said not to fit: zeros before an animal is marked are no data."""
    marked = (torch.arange(90) % 3 > 0).float()
    second = ((torch.arange(90) % 4 > 0) & (marked > 0)).float()
    y = torch.stack([marked, second], 1)
    with seeded(0):
        draws = {"seen": 0.8 + 0.04 * torch.randn(4, 100)}
    meta = {"method": "NUTS", "kind": "chains", "claim": "exact", "data_given": [False, True]}
    posterior = pb.Posterior(seen_once_marked, draws, meta=meta)
    evidence = Evidence.of(posterior.to_datatree(None, y))
    counts = {}
    for view in evidence.by_outcome:
        replicates = view.replicates()
        counts[view.outcome] = 0 if replicates is None else len(replicates[1])
    assert counts == {"first": 60, "second": 60, "zeroth": 0}


def test_residuals_that_a_program_observes_are_no_data_and_gaps_that_it_fills_do_not_hide_them():
    def recursion(y, _=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        errors = [torch.zeros(())]
        for i in range(1, len(y)):
            errors.append(y[i] - slope * y[i - 1])
        pyro.sample(
            "error", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1), obs=torch.stack(errors)
        )

    def gaps(y, _=None):
        gap = y.isnan()
        filled = pyro.sample("filled", dist.Normal(0.0, 1.0).expand([int(gap.sum())]).to_event(1))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=y.clone().masked_scatter(gap, filled))

    y = torch.randn(20, generator=torch.Generator().manual_seed(0))
    tree = fitted(recursion, y, None).to_datatree(y, None)
    assert (
        "log_likelihood" in tree
        and "posterior_predictive" not in tree
        and "observed_data" not in tree
    )
    assert "not_checked_model" in {check.name for check in pb.diagnose(tree).checks}
    y[3] = math.nan
    tree = fitted(gaps, y, None).to_datatree(y, None)
    assert tree["observed_data"]["y"].shape == (20,) and tree["posterior_predictive"]["y"].shape[
        2:
    ] == (20,)


@pytest.mark.slow
def test_draws_of_scalar_sites_are_judged_without_chains():
    def program(x, y=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    x = torch.zeros(20, 1)
    y = torch.linspace(-1.0, 2.0, 20)
    posterior = pb.Laplace(num_steps=200, curvature="hessian", compile=False).fit(
        program, x, y, num_draws=400, seed=0
    )
    checks = {check.name: check.status for check in pb.diagnose(posterior.to_datatree(x, y)).checks}
    assert checks["function_moves"] == "pass"


def test_every_site_has_a_name_of_its_own_in_trees_and_files(tmp_path):
    """The law: what one program tells apart is told apart wherever it is stored."""
    strange = [
        "a/b",
        "a|b",
        "a~|b",
        "a/|b",
        "",
        "_",
        ".",
        "..",
        "./a",
        "chain",
        "chain_",
        "a",
        "a_dim_0",
        "a_dim_0_",
    ]

    def program(x, y):
        for index, name in enumerate(strange):
            pyro.sample(name, dist.Normal(float(index), 1.0).expand([2]).to_event(1))
        with pyro.plate("rows/all", 3):
            pyro.sample("b", dist.Normal(0.0, 1.0))

    with seeded(0):
        drawn = Density(program, (None, None)).trace({})
    draws = {name: drawn[name]["value"][None, None].repeat(2, 3, 1) for name in [*strange, "b"]}
    axes = Density(program, (None, None)).derived.axes
    posterior = pb.Posterior(program, draws, meta={"axes": axes})
    tree = posterior.to_datatree()
    tree.to_netcdf(tmp_path / "tree.nc", engine="h5netcdf")
    stored = {data.attrs["site"]: data for data in tree["posterior"].data_vars.values()}
    loaded = pb.Posterior.load(posterior.save(tmp_path / "posterior.nc"), program).draws
    assert [*stored] == [*loaded] == [*strange, "b"] and stored["b"].dims[-1] == "rows|all"
    for name, draws in posterior.draws.items():
        assert torch.equal(loaded[name], draws) and (stored[name].values == draws.numpy()).all()
