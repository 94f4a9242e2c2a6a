"""The estimators: scikit-learn's own checks, and what a user of scikit-learn does with them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm, skew
from sklearn.base import clone
from sklearn.datasets import make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.estimators.auto import choose, prior_facts
from pyrobnn.estimators.climb import Climb, _whitened, climb
from pyrobnn.estimators.comparison import gain
from pyrobnn.estimators.empirical_bayes import (
    empirical_bayes,
    fit_by_evidence,
    select_prior_width,
)
from pyrobnn.estimators.features import Lift
from pyrobnn.estimators.left_out import left_out, left_out_labels
from pyrobnn.estimators.members import TabularEnsemble
from pyrobnn.estimators.selection import count_likelihood, responses, search_rule
from pyrobnn.estimators.wide import Rule
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.prior import prior_precision
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.method import METHODS
from pyrobnn.likelihoods import HomoskedasticGaussian

#: a fit in a few dozen eager steps, which is enough for scikit-learn's small tables
SHORT = pb.MAP(num_steps=30, lr=0.1, polish_steps=0, compile=False)
SHORTEST = pb.MAP(num_steps=15, lr=0.2, polish_steps=0, compile=False)
CHECKED = [
    model(SHORTEST, hidden=(3,), random_state=0) for model in (pb.BNNRegressor, pb.BNNClassifier)
]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(CHECKED)
def test_scikit_learns_own_checks(estimator, check):
    state = (
        np.random.get_state()
    )  # some of the checks draw from NumPy's global generator themselves
    check(estimator)
    np.random.set_state(state)


LAPLACE = pb.Laplace(map=pb.MAP(num_steps=40, lr=0.1, polish_steps=20, compile=False))
QUICK = pytest.mark.filterwarnings("ignore:the centre is not a mode")


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    x = pd.DataFrame({"a": generator.normal(1e6, 3, 60), "b": generator.uniform(size=60)})
    y = 50 + 4 * (x["a"] - 1e6) - 20 * x["b"] ** 2 + generator.normal(size=60)
    return x, y


def regressor(method=LAPLACE, **options):
    options = {"num_draws": None if method is SHORT else 40} | options
    return pb.BNNRegressor(method, **{"hidden": (4,), "random_state": 0, **options})


@pytest.fixture(scope="module")
def fitted(table):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the centre is not a mode")
        return regressor().fit(*table)


def test_a_data_frame_and_all_that_is_predicted(table, fitted):
    (x, y) = table
    model = fitted
    assert list(model.feature_names_in_) == ["a", "b"] and model.n_features_in_ == 2
    mean, scale = model.predict(x, return_std=True)
    assert mean.shape == scale.shape == (60,) and (scale > 0.3).all()
    np.testing.assert_array_equal(model.predict(x), mean)
    assert model.score(x, y) > 0.95
    quantiles = model.predict_quantiles(x, (0.1, 0.5, 0.9))
    assert quantiles.shape == (60, 3) and (np.diff(quantiles) > 0).all()
    interval = model.predict_interval(x, level=0.8)
    np.testing.assert_allclose(interval, quantiles[:, [0, 2]])
    functions = model.sample_functions(x)
    assert functions.shape == (40, 60) and model.sample_functions(x, num_draws=7).shape == (7, 60)
    expected = model.posterior_.predict(torch.tensor(x.to_numpy())).f[0, :, :, 0]
    np.testing.assert_allclose(functions, expected, rtol=1e-9)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        model.predict(x.to_numpy())
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(x.rename(columns={"a": "c"}))


def test_a_constant_column_is_told_by_its_name(table):
    x, y = table
    with pytest.warns(UserWarning, match=r"the feature 'x1' is constant: nothing"):
        regressor(SHORT).fit(np.column_stack([x.to_numpy()[:, 0], np.ones(60)]), y)
    named = x.assign(kind="one", year=2020)
    with pytest.warns(UserWarning, match=r"'kind=one', 'year' are constant"):
        regressor(SHORT).fit(named, y)


def test_a_fit_is_repeated_by_its_random_state_in_any_order_of_the_rows(table):
    x, y = table
    first = regressor(SHORT).fit(x, y).predict(x)
    order = np.random.default_rng(1).permutation(60)
    np.testing.assert_array_equal(
        regressor(SHORT).fit(x.iloc[order], y.iloc[order]).predict(x), first
    )
    assert (regressor(SHORT, random_state=1).fit(x, y).predict(x) != first).any()
    seeds = regressor(SHORT, random_state=np.random.RandomState(0))
    assert (seeds.fit(x, y).predict(x) != seeds.fit(x, y).predict(x)).any()


def test_a_data_frame_with_more_than_numbers(table):
    x, y = table
    x = x.assign(
        city=np.where(x["b"] > 0.5, "Rome", "Oslo"), day=pd.date_range("2024-01-01", periods=60)
    )
    model = regressor(SHORT).fit(x, y)
    assert list(model.feature_names_in_) == ["a", "b", "city", "day"] and model.n_features_in_ == 4
    assert model.columns_.inputs[2:5] == ("city=Oslo", "city=Rome", "day (days)")
    assert model.score(x, y) > 0.9 and len(model.predict(x[:1])) == 1
    with pytest.warns(UserWarning, match="do not occur in the training data"):
        model.predict(x[:1].assign(city="Pisa"))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(x[["a", "b"]])
    with pytest.raises(
        TypeError, match="must be a DataFrame as it was in the fit, got .* of type ndarray"
    ):
        model.predict(x.to_numpy())
    with pytest.raises(
        ValueError, match="X has missing or infinite values in row 1 .*missing='impute'"
    ):
        regressor(SHORT).fit(x.assign(a=x["a"].where(x.index > 0)), y)
    assert model.fit(*table).columns_ is None and model.n_features_in_ == 2


@pytest.mark.parametrize("kind", ["frame", "mixed"])
def test_missing_values_are_filled_where_that_is_asked_for(table, kind):
    x, y = table
    gaps = x.assign(a=x["a"].where(np.arange(60) % 5 > 0), c=np.where(np.arange(60) % 2, "p", None))
    gaps = {"frame": gaps[["a", "b"]], "mixed": gaps}[kind]
    with pytest.raises(
        ValueError, match="NaN|missing or infinite values in row 1.*missing='impute'"
    ):
        regressor(SHORT).fit(gaps, y)
    model = regressor(SHORT, missing="impute").fit(gaps, y)
    assert (
        model.columns_.inputs[:3] == ("a", "a is missing", "b")
        and model.n_features_in_ == gaps.shape[1]
    )
    assert np.isfinite(model.predict(gaps)).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(gaps[:3]), model.predict(gaps[:3]))
    with pytest.raises(ValueError, match="must be one of 'refuse', 'impute'"):
        regressor(SHORT, missing="drop").fit(gaps, y)


@pytest.mark.slow
@QUICK
def test_several_outputs_keep_their_units_and_their_noise(table):
    x, y = table
    both = np.column_stack([y, 1e5 + 10 * np.random.default_rng(2).normal(size=60)])
    model = regressor().fit(x, both)
    mean, scale = model.predict(x, return_std=True)
    assert mean.shape == scale.shape == (60, 2) and model.predict_interval(x).shape == (60, 2, 2)
    assert scale[:, 1].min() > 5 and scale[:, 0].max() < 5
    assert regressor(SHORT, noise=0.5).fit(x, y.to_numpy()[:, None]).predict(x).shape == (60, 1)


@pytest.mark.parametrize(
    "noise, expected", [(0.5, 0.5), ("learned", None), ("heteroskedastic", None)]
)
@pytest.mark.filterwarnings("ignore:the weights use up", "ignore:left out of the fit")
def test_noise_is_in_the_units_of_y(table, noise, expected):
    x, y = table
    _, scale = regressor(SHORT, noise=noise).fit(x, y).predict(x, return_std=True)
    if expected:
        np.testing.assert_allclose(scale, expected)
    assert 0.1 < scale.mean() < 10


def test_a_net_a_prior_and_a_likelihood_of_ones_own(table):
    x, y = table
    with pb.core.seeding.seeded(0):
        net = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
        ).double()
    before = [value.clone() for value in net.parameters()]
    options = {"prior": pb.priors.IIDPrior(dist.Normal(0.0, 2.0)), "method": SHORT}
    model = regressor(net=net, likelihood=pb.likelihoods.HomoskedasticGaussian(0.1), **options).fit(
        x, y
    )
    assert all(map(torch.equal, before, net.parameters()))
    made = []
    factory = regressor(
        net=lambda *sizes: made.append(sizes) or torch.nn.Linear(*sizes), **options
    ).fit(x, y)
    assert made == [(2, 1)] and factory.posterior_.bnn.num_weights == 3
    # a prior of TyXe is made of lambdas
    assert (pickle.loads(pickle.dumps(model)).predict(x) == model.predict(x)).all()


def test_pickle_joblib_and_clone(table, fitted, tmp_path):
    x = table[0]
    expected = fitted.predict_interval(table[0])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_interval(x), expected)
    joblib.dump(fitted, tmp_path / "model.joblib")
    np.testing.assert_array_equal(
        joblib.load(tmp_path / "model.joblib").predict_interval(x), expected
    )
    with pytest.raises(NotFittedError):
        clone(fitted).predict(x)


def values_of_rows(content: bytes, x: np.ndarray) -> int:
    """How many values of the rows, but for the ends of each column, stand in the content: one by one as float64.

    As float32 two side by side: four bytes alone are somewhere in many megabytes of draws by chance.
    """
    ends = (x == x.min(0)) | (x == x.max(0))
    of_rows = [x[~ends].ravel()]
    if x.shape[1] > 1:
        of_rows.append(x[:, :2].astype(np.float32).ravel())
    wanted = np.concatenate([np.frombuffer(values.tobytes(), np.uint64) for values in of_rows])
    may_begin = np.zeros(2**16, bool)
    may_begin[wanted.view(np.uint16)[::4]] = True
    found = np.zeros(len(wanted), bool)
    # eight bytes that begin anywhere
    for start in range(min(8, len(content) - 7)):
        eights = np.frombuffer(content, np.uint64, (len(content) - start) // 8, start)
        found |= np.isin(wanted, eights[may_begin[eights.view(np.uint16)[::4]]])
    return int(found.sum())


@pytest.mark.parametrize("kind", ["regressor", "classifier", "auto"])
def test_a_pickle_of_an_estimator_holds_no_row(kind):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(100, 3))
    y = np.sin(x[:, 0]) + 0.1 * generator.normal(size=100)
    model = regressor(SHORT, hidden=(4,))
    if kind == "classifier":
        y = y > 0
        model = pb.BNNClassifier(SHORT, hidden=(4,), random_state=0)
    elif kind == "auto":
        model = pb.BNNRegressor(random_state=0)
    model.fit(x, y)
    assert values_of_rows(pickle.dumps(model._row_facts.rows), x) == 98 * 3
    narrow = dataclasses.replace(model._row_facts.rows, x=model._row_facts.rows.x.float())
    assert values_of_rows(pickle.dumps(narrow), x) == 100
    content = pickle.dumps(model)
    assert values_of_rows(content, x) == 0
    if kind == "regressor":
        assert values_of_rows(content, y[:, None]) == 0
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    far = x[:1] + 100
    with pytest.warns(UserWarning, match="1 of 1 rows lie far beyond the training data"):
        again.predict(far)
    with pytest.raises(Refused, match="holds no row .* ask for verdict_ before pickling"):
        _ = again.verdict_


@pytest.mark.usefixtures("few_moves")
def test_a_verdict_that_was_asked_for_is_in_the_pickle_and_a_copy_can_still_judge(table, fitted):
    judged = copy.deepcopy(fitted)
    verdict = judged.verdict_
    assert pickle.loads(pickle.dumps(judged)).verdict_.status == verdict.status
    assert (
        copy.deepcopy(judged)._row_facts.rows is not None
        and copy.copy(judged)._row_facts.rows is judged._row_facts.rows
    )
    judged.fit(*table)
    assert judged.verdict_.status == verdict.status


@pytest.mark.slow
def test_an_unpickled_estimator_exports(table, fitted, tmp_path):
    again = pickle.loads(pickle.dumps(fitted))
    path = again.export(tmp_path / "net.pt2", num_draws=2)
    outputs = torch.export.load(path).module()(torch.tensor(table[0].to_numpy()))
    assert "outside" in outputs and not outputs["outside"].any()


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_a_pickle_of_an_earlier_version_that_has_the_training_rows_loads(version, table, fitted):
    x = table[0]
    state = dict(fitted.__dict__)
    rows = state.pop("_row_facts").rows
    if version == "0.3.0":
        state["_rows"] = rows
    else:
        state |= {"_x": rows.x, "_y": rows.y, "_weighted": False, "_width": 1, "_held": ()}
    model = pb.BNNRegressor.__new__(pb.BNNRegressor)
    model.__setstate__(state)
    np.testing.assert_array_equal(model.predict_interval(x), fitted.predict_interval(x))
    assert model._row_facts.rows.width == 1 and torch.equal(model._row_facts.rows.y, rows.y)


def test_a_fit_that_is_refused_leaves_the_fit_before_it(table):
    x, y = table
    model = regressor(SHORT).fit(x, y)
    before = model.predict(x)
    model.set_params(max_seconds=5.0)
    with pytest.raises(ValueError, match="'max_seconds' is spent by"):
        model.fit(x[:30], y[:30])
    np.testing.assert_array_equal(model.predict(x), before)


def test_pipeline_search_and_cross_validation(table):
    x, y = table
    model = regressor(SHORT)
    pipeline = make_pipeline(StandardScaler(), model)
    search = GridSearchCV(pipeline, {"bnnregressor__hidden": [(), (5,)]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.9 and search.best_params_ == {"bnnregressor__hidden": (5,)}
    assert np.corrcoef(cross_val_predict(model, x, y, cv=3), y)[0, 1] > 0.9


def test_noise_is_found_by_the_evidence_where_rows_are_few_for_the_weights():
    laplace = choose(5000, 1000, 1)[0]

    def found(likelihood, num_data, method=laplace, width=1, exact=False):
        model = pb.BNN(pb.networks.mlp(99, (), width, seed=0), pb.priors.FanInNormal(), likelihood)
        x = torch.randn(
            num_data, 99, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        return empirical_bayes(method, model, x, x[:, :width] if exact else x[:, :width].exp())

    noise = HomoskedasticGaussian(dist.HalfNormal(1.0))
    assert found(noise, 999) is fit_by_evidence and found(noise, 1000) is None
    assert (
        found(noise, 1000, exact=True) is fit_by_evidence
    )  # under less and less noise the density has no maximum
    varying = pb.BNN(
        pb.networks.mlp(99, (), 2, seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HeteroskedasticGaussian(),
    )
    assert isinstance(choose(999, 200, 2, **prior_facts(varying))[0], pb.SGHMC)
    assert isinstance(choose(2000, 200, 2, **prior_facts(varying))[0], pb.Laplace)
    assert found(noise, 100, pb.NUTS()) is None and found(HomoskedasticGaussian(0.1), 100) is None
    assert found(pb.likelihoods.Categorical(), 10**4, width=2) is select_prior_width
    assert found(pb.likelihoods.NegativeBinomial(), 100) is None


@pytest.mark.parametrize("rows", [80, 300])
def test_an_exact_line_has_a_narrow_interval_that_holds_it(rows):
    """The density of weights and noise together has no maximum there."""
    x, new = np.split(np.random.default_rng(1).normal(size=(rows + 500, 2)), [rows])
    model = pb.BNNRegressor(hidden=(), compile=False, random_state=0).fit(x, x @ [1.0, -2.0])
    low, high = model.predict_interval(new).T
    truth = new @ [1.0, -2.0]
    assert (low <= truth).all() and (truth <= high).all() and (high - low).max() < 0.01


@pytest.mark.slow
def test_the_default_does_not_interpolate_where_there_are_more_weights_than_rows(monkeypatch):
    search = pb.MAP(num_steps=300, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose", lambda *sizes, **options: (short, "short")
    )
    generator = np.random.default_rng(0)
    x = generator.normal(size=(560, 12))
    y = 1000 * (x[:, 0] + 0.5 * np.sin(3 * x[:, 1]) + 0.5 * generator.normal(size=560))
    model = pb.BNNRegressor(hidden=(20,), random_state=0).fit(x[:160], y[:160])  # 281 weights
    lower, upper = model.predict_interval(x[160:], 0.9).T
    covered = np.mean((y[160:] >= lower) & (y[160:] <= upper))
    # maximised with the weights, the noise went to nothing: 0.75 were covered, and R² was 0.07
    assert 0.82 < covered < 0.97
    assert "times a linear model's" in model.method_reason_
    line = LinearRegression().fit(x[:160], y[:160])
    assert model.score(x[160:], y[160:]) > 0.9 * line.score(x[160:], y[160:])


@pytest.mark.usefixtures("few_moves")
@pytest.mark.slow
@QUICK
def test_the_verdict_is_kept_until_the_next_fit(table):
    x, y = table
    model = regressor(num_draws=10).fit(x, y)
    assert isinstance(model.verdict_, pb.Verdict) and model.verdict_ is model.verdict_
    verdict = model.verdict_
    assert model.fit(x, y).verdict_ is not verdict


@pytest.mark.usefixtures("few_moves")
def test_the_verdict_calls_columns_by_their_names():
    generator = np.random.default_rng(0)
    x = pd.DataFrame(generator.normal(size=(300, 2)), columns=["rain", "wind"])
    y = x["rain"] + 3 * np.sin(3 * x["wind"]) + 0.1 * generator.normal(size=300)
    model = regressor(SHORT, hidden=()).fit(x, y)
    words = " ".join(str(check) for check in model.verdict_.checks)
    assert "wind" in words and "x[" not in words


def test_classes_of_any_kind(table):
    x, y = table
    labels = pd.cut(y, 3, labels=["low", "mid", "top"]).astype(str)
    model = pb.BNNClassifier(LAPLACE, hidden=(4,), num_draws=40, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, labels)
        assert list(model.classes_) == ["low", "mid", "top"] and model.score(x, labels) > 0.8
        probs = model.predict_proba(x)
        np.testing.assert_allclose(probs.sum(1), 1)
        assert model.sample_functions(x, num_draws=5).shape == (5, 60, 3)
        expected = model.predict(x)
        assert (pickle.loads(pickle.dumps(model)).predict(x) == expected).all()
        assert set(np.unique(model.fit(x, labels == "top").predict(x))) <= {True, False}


def test_a_weight_counts_as_so_many_rows(table):
    x, y = (part.to_numpy() for part in table)
    weights = np.arange(60) % 3
    model = regressor(SHORT).fit(x, y, sample_weight=weights)
    again = regressor(SHORT).fit(np.repeat(x, weights, 0), np.repeat(y, weights))
    np.testing.assert_array_equal(model.predict(x), again.predict(x))


def test_weights_that_nothing_is_made_of(table):
    x, y = table
    with pytest.raises(pb.Refused, match="'sample_weight' must be whole numbers"):
        regressor().fit(x, y, sample_weight=np.full(60, 0.5))
    with pytest.raises(ValueError, match="at least one non-zero"):
        regressor().fit(x, y, sample_weight=np.zeros(60))
    with pytest.raises(ValueError, match="Negative"):
        regressor().fit(x, y, sample_weight=-np.ones(60))


def test_durations_are_numbers_and_levels_of_quantiles_come_alone_or_several():
    x = pd.DataFrame(
        {"a": np.arange(20.0) ** 2, "t": pd.to_timedelta(np.arange(20), unit="D")}, index=[0] * 20
    )
    model = regressor(SHORTEST, num_draws=None).fit(x, np.arange(20.0))
    np.testing.assert_array_equal(
        model.predict_quantiles(x, 0.5), model.predict_quantiles(x, [0.5])
    )
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        model.predict_quantiles(x, [])


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA])
def test_a_missing_label_is_no_class(gap):
    with pytest.raises(ValueError, match="'y' contains NaN"):
        pb.BNNClassifier(SHORTEST).fit(np.arange(4.0)[:, None], ["a", "b", gap, "a"])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"method": "nutz"}, ValueError, "'method' must be one of .*'auto', got 'nutz'"),
        ({"method": pb.Laplace}, TypeError, "'method' must be 'auto'"),
        ({"hidden": 50}, TypeError, r"write hidden=\(50,\)"),
        ({"net": "mlp"}, TypeError, "'net' must be an nn.Module or a function"),
        ({"noise": "none"}, ValueError, "'noise' must be 'inferred'"),
        ({"random_state": -1}, ValueError, "'random_state' must be at least 0"),
        ({"noise": -1.0}, ValueError, "'noise' must be > 0"),
        (
            {"likelihood": pb.likelihoods.Categorical()},
            TypeError,
            "for regression, got Categorical",
        ),
    ],
)
def test_options_that_are_wrong_are_named(options, error, message, table):
    with pytest.raises(error, match=message):
        regressor(**options).fit(*table)


def test_a_method_is_chosen_by_size_and_the_choice_is_said(capsys, monkeypatch):
    method, why = choose(100, 151, 1)
    assert (
        isinstance(method, pb.Laplace)
        and method.structure == "full"
        and "100 rows, 151 weights" in why
    )
    assert choose(100_000, 601, 1)[0].map.batch_size == 1000
    assert choose(5000, 10**6, 1)[0].structure == "kron"
    # of 12 rows the 90 % intervals of a Gaussian with one noise held 78 % of new ones, over a dozen data sets
    assert isinstance(choose(50, 151, 1)[0], pb.NUTS) and isinstance(
        choose(51, 151, 1)[0], pb.Laplace
    )
    shortened = dataclasses.replace(SHORT, num_steps=10)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose",
        lambda *sizes, **facts: (shortened, f"because of {sizes}"),
    )
    model = pb.BNNRegressor(hidden=(2,), random_state=0, verbose=1).fit(np.eye(3), np.arange(3.0))
    assert model.method_reason_ == "because of (3, 11, 1)" and model.method_ is shortened
    assert "BNNRegressor: because of (3, 11, 1)" in capsys.readouterr().out


def test_rows_far_beyond_the_training_data_are_told(table, fitted):
    x, _ = table
    far = x.assign(a=x["a"].where(x.index > 2, x["a"].max() + 0.6 * np.ptp(x["a"])))
    with pytest.warns(UserWarning, match="3 of 60 rows lie far beyond"):
        fitted.predict_interval(far)
    fitted.predict(x.assign(a=x["a"].max() + 0.4 * np.ptp(x["a"])))  # warnings are errors


@pytest.mark.slow
def test_the_default_is_good_on_few_rows():
    covered = []
    for seed in range(12):
        generator = np.random.default_rng(100 + seed)
        x = generator.normal(size=(512, 2))
        y = x[:, 0] + 0.5 * generator.normal(size=512)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = pb.BNNRegressor(random_state=0).fit(x[:12], y[:12])
            interval = model.predict_interval(x[12:])
        covered.append(((y[12:] > interval[:, 0]) & (y[12:] < interval[:, 1])).mean())
    assert np.mean(covered) > 0.83, covered  # a Gaussian with one noise: 0.78


@pytest.mark.slow
def test_the_default_is_good_on_a_hundred_rows():
    x, y = make_friedman1(400, noise=1.0, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pb.BNNRegressor(random_state=0).fit(x[:100], y[:100])
    interval = model.predict_interval(x[100:])
    covered = ((y[100:] > interval[:, 0]) & (y[100:] < interval[:, 1])).mean()
    linear = LinearRegression().fit(x[:100], y[:100]).score(x[100:], y[100:])
    assert model.score(x[100:], y[100:]) > linear and 0.82 < covered < 0.97


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:1 of 1 rows lie far beyond"
)  # MAPIE predicts at the origin to see whether it can
def test_mapies_conformal_regressors_take_it(table):
    regression = pytest.importorskip("mapie.regression")
    x = table[0].to_numpy()
    y = table[1].to_numpy()
    state = np.random.get_state()  # MAPIE draws from the global generator
    split = regression.SplitConformalRegressor(regressor(SHORT), confidence_level=0.8, prefit=False)
    split.fit(x[:40], y[:40]).conformalize(x[40:], y[40:])
    assert split.predict_interval(x)[1].shape == (60, 2, 1)
    cross = regression.CrossConformalRegressor(regressor(SHORT), cv=3, random_state=0)
    assert cross.fit_conformalize(x, y).predict_interval(x)[1].shape == (60, 2, 1)
    np.random.set_state(state)


def test_a_set_of_classes_is_the_smallest_that_has_the_probability(table):
    x = table[0].to_numpy()
    y = table[1].to_numpy()
    labels = (y > np.quantile(y, 0.3)).astype(int) + (y > np.quantile(y, 0.6))
    model = pb.BNNClassifier(SHORT, hidden=(3,), random_state=0).fit(x, labels)
    probs = model.predict_proba(x)
    sets = model.predict_set(x, level=0.8)
    assert sets.dtype == bool and sets.shape == probs.shape == (60, 3)
    assert ((sets * probs).sum(1) >= 0.8).all() and (sets.sum(1) >= 1).all()
    smallest = (probs * sets + 2.0 * ~sets).min(1)
    assert ((sets * probs).sum(1) - smallest < 0.8).all()  # none of its classes can be spared


def test_auto_is_a_method_of_the_command_line(monkeypatch, table):
    monkeypatch.setattr(
        "pyrobnn.estimators.auto.choose", lambda *sizes, **facts: (SHORT, f"because of {sizes}")
    )
    x, y = (torch.tensor(part.to_numpy()) for part in table)
    net = pb.networks.mlp(2, (3,), seed=0).double()
    model = pb.BNN(net, pb.priors.FanInNormal(), HomoskedasticGaussian(1.0))
    data = pb.data.Dataset(x, y[:, None], "table", "regression")
    model.standardizer = pb.data.Standardizer.fit(data)
    found = METHODS["auto"].cls().fit(model, x, data.y, num_draws=1, seed=0)
    expected = SHORT.fit(model, x, data.y, seed=0)
    assert (
        found.meta["chosen"] == "because of (60, 13, 1)"
        and found.meta["method"] == expected.meta["method"]
    )
    assert torch.equal(found.predict(x).mean, expected.predict(x).mean)


def test_the_lift_is_free_of_skew_and_holds_beyond_the_data():
    generator = np.random.default_rng(0)
    x = np.column_stack(
        [generator.lognormal(size=500), generator.normal(size=500), np.arange(500) % 2]
    )
    mean = x.mean(0)
    scale = x.std(0)
    lift = Lift((x - mean) / scale, -mean / scale, waves=3)
    out = lift(torch.from_numpy((x - mean) / scale))
    assert out.shape == (500, 3 + 2 * 2 * 3) and lift.width == 15
    plain = (out[:, :3] / lift.shrink).numpy()
    assert abs(skew(plain[:, :2])).max() < 0.3 < skew(x[:, 0]) and lift.powers[2] == 1
    np.testing.assert_allclose(
        float(out.var(0).sum()), 3, rtol=1e-6
    )  # as much as of three plain features
    far = lift(torch.tensor([[-50.0, 0.0, 0.0], [1e6, 0.0, 0.0]], dtype=torch.float64))
    assert far.isfinite().all()
    edge = (
        lift.start + lift.least
    )  # where the data end below, features go on as they are: intervals open on both sides
    steps = lift(torch.stack([edge - 1e-6, edge, edge + 1e-6]))[:, :2].diff(dim=0)
    assert (steps > 0).all()
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "mean_only, likelihood",
    [(True, None), (False, None), (False, pb.likelihoods.HeteroskedasticGaussian())],
)
def test_the_members_are_those_of_an_ensemble(mean_only, likelihood):
    """Their log joint in few operations on features that are computed once, traced: the draws of the general method."""
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.normal(size=(100, 3)))
    data = x, x[:, :1].sin() + 0.1
    units = pb.data.Standardizer.fit(pb.data.Dataset(*data, "sine", "regression"))
    model = Rule(3, 0.2, 0.5, likelihood, fastest=4.0).model(*data, units, mean_only)
    # all rows at once: in smaller batches each member of the general method has its own
    options = {"num_members": 2, "num_steps": 10, "batch_size": 100}
    members = TabularEnsemble(compile="trace", **options).fit(model, *data, seed=3)
    plain = pb.DeepEnsemble(compile=False, **options).fit(model, *data, seed=3)
    for name, draws in plain.draws.items():
        torch.testing.assert_close(members.draws[name], draws, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(members.predict(x).mean, plain.predict(x).mean, rtol=1e-3, atol=1e-3)
    on = TabularEnsemble(compile="trace", lr=1e-8, **options).fit(
        model, *data, init=members, seed=4
    )
    ours, theirs = (sorted(each.draws["net.1.bias"][0, :, 0].tolist()) for each in (on, members))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_the_noise_of_many_rows_is_scaled_by_rows_that_the_members_have_not_seen():
    """Members that follow 2,100 rows closely have residuals that are too small: 90 % intervals hold new rows."""
    generator = np.random.default_rng(4)
    x = torch.from_numpy(generator.normal(size=(4100, 2)))
    y = (2 * x[:, :1]).sin() + 0.5 * torch.from_numpy(generator.normal(size=(4100, 1)))
    data = (x[:2100], y[:2100])
    new = (x[2100:], y[2100:])
    units = pb.data.Standardizer.fit(pb.data.Dataset(*data, "sine", "regression"))
    rule = Rule(8, 0.05, 0.3, fastest=16.0)
    fit = rule.fit(data, units, 12, None, True, {"seed": 0})
    posterior = fit.posterior
    low, high = posterior.predict(new[0]).quantile(torch.tensor([0.05, 0.95], dtype=torch.float64))
    assert isinstance(fit.method, TabularEnsemble)
    assert fit.reason.startswith("an ensemble of 2, normal noise")
    assert len(fit.held_out) == posterior.meta["num_data"] / 9 == 210
    assert 0.85 < float(((new[1] > low) & (new[1] < high)).double().mean()) < 0.95


@pytest.mark.slow
def test_the_model_of_many_rows_is_judged_by_those_held_out():
    """By the training rows of an ensemble that follows them error bars were called too wide, whatever they were."""
    generator = np.random.default_rng(4)
    x = generator.normal(size=(2100, 2))
    y = np.sin(2 * x[:, 0]) + 0.5 * generator.normal(size=2100)
    verdict = pb.BNNRegressor(random_state=0, max_seconds=10).fit(x, y).verdict_
    assert next(each for each in verdict.checks if each.name == "pit").numbers["count"] == 210
    assert verdict.model == "pass"


@pytest.mark.slow
def test_no_draw_of_chains_that_start_from_an_ensemble_has_left_the_data():
    """The fit of the next law, of which the search has chosen this."""
    data = pb.data.gap()
    run = {"seed": 1, "progress": False}
    rule = Rule(waves=8, noise=0.87, left_out_sd=0.49)
    fit = rule.fit((data.x, data.y), pb.data.Standardizer.fit(data), None, None, True, run)
    f = fit.posterior.predict(data.x).f
    assert fit.reason.startswith("4 chains of 100 draws") and f.shape[:2] == (4, 100)
    assert float((f - data.y).square().mean((2, 3)).sqrt().max()) < float(data.y.std())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_draw_of_the_chains_of_few_rows_has_left_the_data(seed):
    """With twice SGHMC's bound on the step size one chain of four diverged, by 40 and by 250 standard deviations."""
    data = pb.data.gap(600)
    model = pb.BNNRegressor(random_state=seed).fit(data.x, data.y[:, 0])
    f = model.posterior_.predict(data.x).f
    assert "chains" in model.method_reason_ and f.shape[:2] == (4, 100)
    assert float((f - data.y).square().mean((2, 3)).sqrt().max()) < float(data.y.std())


@pytest.mark.parametrize("signal, linear", [(0.0, True), (3.0, False)])
def test_left_out_rows_say_whether_a_net_gains_on_a_linear_model(signal, linear):
    generator = np.random.default_rng(1)
    x = generator.uniform(-2, 2, (300, 2))
    y = x[:, 0] + signal * np.sin(3 * x[:, 1]) + 0.3 * generator.normal(size=300)
    data = torch.from_numpy(x), torch.from_numpy(y)[:, None]
    units = pb.data.Standardizer.fit(pb.data.Dataset(*data, "sine", "regression"))
    rule, why = search_rule(data, units, 15.0, 0, None)
    assert (rule is None) == linear and "nats likelier" in why
    if rule is not None:
        assert rule.left_out_sd < 0.4 and rule.likelihood is None


def test_a_look_at_the_target_suggests_likelihoods():
    whole = np.arange(9.0)[:, None]
    assert [type(each).__name__ for each in responses(whole)][0] == "NegativeBinomial"
    assert [type(each).__name__ for each in responses(np.exp(whole))][0] == "MixtureDensity"
    assert responses(whole - 1) == responses(whole + 0.5) == responses(whole % 2) == []


def test_the_error_of_a_left_out_row_is_that_of_a_linear_fit_without_it():
    x = np.random.default_rng(2).normal(size=(40, 2))
    y = np.random.default_rng(3).normal(size=40)
    with pb.core.seeding.seeded(0):
        net = torch.nn.Linear(2, 1, bias=False).double()
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(0.5))
    data = torch.from_numpy(x), torch.from_numpy(y)[:, None]
    laplace = pb.Laplace(map=pb.MAP(num_steps=200, compile=False))
    ours, _ = left_out(laplace.fit(model, *data, seed=0), *data)
    for row in range(3):
        kept = np.arange(40) != row
        precision = x[kept].T @ x[kept] / 0.25 + np.eye(2)
        mean = np.linalg.solve(precision, x[kept].T @ y[kept] / 0.25)
        var = 0.25 + x[row] @ np.linalg.solve(precision, x[row])
        np.testing.assert_allclose(
            ours[row], norm.logpdf(y[row], x[row] @ mean, var**0.5), rtol=1e-3
        )


def test_max_seconds_are_of_what_is_open(table):
    for options in ({"hidden": (3,)}, {"noise": "heteroskedastic"}, {"method": SHORT}):
        with pytest.raises(ValueError, match="'max_seconds' is spent by method='auto'"):
            pb.BNNRegressor(**{"max_seconds": 9, "random_state": 0} | options).fit(*table)


SPREAD = np.exp(np.random.default_rng(1).normal(size=60))
COUNTS = {
    "poisson": (lambda f: np.random.default_rng(1).poisson(np.exp(0.5 + 0.8 * f)), True),
    "clustered": (
        lambda f: np.random.default_rng(1).negative_binomial(1.5, 1 / (1 + np.exp(0.5 + f))),
        True,
    ),
    "thousands": (lambda f: np.random.default_rng(1).poisson(np.exp(7 + f)), True),
    "population": (lambda f: 1e6 * np.exp(f) * SPREAD**0.3, True),
    "years": (lambda f: 1990 + 8 * f + 5 * SPREAD, False),
    "ratings": (lambda f: np.clip(5 + 1.5 * f, 0, 10), False),
    "one of 100,000": (
        lambda f: np.where(np.arange(60) == 3, 1e5, np.random.default_rng(1).poisson(np.exp(f))),
        False,
    ),
}


LONG = ("poisson", "thousands", "ratings")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in COUNTS],
)
def test_whole_numbers_are_fitted_as_counts_where_they_are_counts(name):
    """Without a warning of what was tried; of a Poisson's counts the 90 % interval of a normal went down to -6."""
    target, whether = COUNTS[name]
    X = np.random.default_rng(1).normal(size=(60, 2))
    y = np.round(target(X[:, 0]))
    likelihood, _ = count_likelihood(X, y[:, None])
    assert (likelihood is not None) == whether
    if name not in LONG:
        return  # a fit each, of those that look most alike
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = pb.BNNRegressor(compile=False, random_state=0).fit(X, y)
    assert (model.posterior_.bnn.likelihood.task == "gaussian") != whether
    assert ("of counts" in model.method_reason_) == whether
    if whether:
        assert model.predict_interval(X).min() >= 0


@pytest.mark.parametrize("rows", [3, 5, 9])
def test_a_handful_of_whole_numbers_is_looked_at_too(rows):
    x = np.random.default_rng(0).normal(size=(rows, 2))
    for y in (
        np.arange(rows),
        np.arange(rows) ** 4,
        np.eye(1, rows)[0] + np.eye(1, rows, 1)[0] * 2,
    ):
        assert count_likelihood(x, y[:, None].astype(float)) == (None, "")


@pytest.mark.slow
def test_a_search_that_ends_at_a_linear_model_of_counts_warns_of_nothing_it_tried():
    r = np.random.default_rng(3)
    X = r.normal(size=(300, 3))
    y = r.negative_binomial(1, 0.2, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = pb.BNNRegressor(compile=False, random_state=0, max_seconds=40).fit(X, y)
    assert "of counts" in model.method_reason_ and not model.posterior_.meta["findings"]


def five_steps(monkeypatch):
    """Of MAP in place of whatever method suits."""
    five = pb.MAP(num_steps=5, compile=False), "five steps"
    monkeypatch.setattr("pyrobnn.estimators.estimator.choose", lambda *_, **__: five)


@pytest.mark.filterwarnings("ignore")
def test_small_nets_are_fitted_in_one_thread(monkeypatch):
    """Two, on two cores that others use as well, took ten times as long."""
    found = []
    before = torch.get_num_threads()

    def look(*_):
        found.append(torch.get_num_threads())
        return None, "nothing is gained"

    monkeypatch.setattr("pyrobnn.estimators.estimator.search_rule", look)
    five_steps(monkeypatch)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.left_out", lambda *_: (np.zeros(9), np.full(9, -3.0))
    )
    torch.set_num_threads(2)
    try:
        regressor("auto", hidden=None, num_draws=1).fit(
            np.linspace(0, 1, 510)[:, None], np.sin(np.arange(510.0))
        )
        assert found == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the centre is not a mode")
@pytest.mark.parametrize(
    ("truth", "noise"),
    [(np.sign, 0.05), (lambda x: np.sin(3 * x), 0.0), (lambda x: np.sin(3 * x), 0.01)],
    ids=["step", "wave", "noisy wave"],
)
def test_one_row_at_an_edge_does_not_speak_for_a_line(truth, noise):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (90, 1))
    model = regressor("auto", hidden=None, compile=False).fit(
        x, truth(x[:, 0]) + noise * rng.normal(size=90)
    )
    assert "linear model predicts these" not in model.method_reason_
    grid = np.linspace(-2, 2, 101)[:, None]
    assert np.sqrt(np.mean((model.predict(grid) - truth(grid[:, 0])) ** 2)) < 0.35  # of a line: .6


def test_a_gain_is_seen_in_left_out_rows():
    rows = np.full(100, -1.0)
    edge = np.where(np.arange(100) == 7, -60.0, -0.5)  # one row decides
    assert gain(rows + 0.1, rows)[0] and not gain(rows + 0.01, rows)[0] and not gain(edge, rows)[0]


def test_a_climb_of_a_linear_model_ends_at_the_evidence_of_bayesian_ridge():
    x = np.random.default_rng(5).normal(size=(60, 4))
    y = np.random.default_rng(6).normal(size=60)
    y += x @ [1.0, -0.5, 0.2, 0.0]
    flat = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
    line = BayesianRidge(
        **flat, fit_intercept=False, compute_score=True, max_iter=1000, tol=1e-9
    ).fit(x, y)
    with pb.core.seeding.seeded(0):
        net = torch.nn.Linear(4, 1, bias=False).double()
    model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian("learned"))
    data = torch.from_numpy(x), torch.from_numpy(y)[:, None]
    start = torch.full((1,), 2.0, dtype=torch.float64)
    least = torch.full((1,), 1e-6, dtype=torch.float64)
    evidence, scale, factor, weights = climb(model, *data, start, least, 1.0, tune=True)
    assert evidence == pytest.approx(line.scores_[-1], abs=0.01)
    assert scale.item() == pytest.approx(line.alpha_**-0.5, rel=0.01) and factor == pytest.approx(
        line.lambda_, rel=0.1
    )
    np.testing.assert_allclose(weights["net.weight"][0], line.coef_, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("rows", [15, 200])  # below and above the number of weights
@pytest.mark.parametrize("alike", [True, False], ids=["one scale a layer", "a scale each"])
def test_products_of_layers_are_the_jacobian_in_units_of_prior_and_noise(rows, alike):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=g).double()
    model = pb.BNN(
        pb.networks.mlp(3, (6, 5), 1, seed=1).double(),
        pb.priors.FanInNormal(),
        HomoskedasticGaussian(0.5),
    )
    problem = prepare(model, x, x[:, :1], points="free")
    theta = problem.density.initial(model.initial_values())
    jacobian = NetworkJacobian(model, problem.density, theta, {}, list(model.priors))
    jacobian.prefer_products(x)
    assert jacobian.layers
    prec = prior_precision(jacobian).prec * (
        1.0 if alike else torch.rand(jacobian.size, generator=g) + 0.5
    )

    def root(f):
        return model.likelihood.curvature_root(f, x[:, :1], {})

    f, white = _whitened(jacobian, x, root, prec)
    dense = (jacobian.rows(x)[1] / 0.5 * prec.rsqrt()).flatten(0, 1)
    assert len(white.parts) == (3 if alike and rows == 15 else 1)
    v = torch.randn(jacobian.size, generator=g).double()
    u = torch.randn(rows, generator=g).double()
    torch.testing.assert_close(f, model.forward(model.initial_values(), x))
    torch.testing.assert_close(white.times(v), dense @ v)
    torch.testing.assert_close(white.transposed_times(u), dense.T @ u)
    prec = torch.eye(jacobian.size).double()
    gram = dense.T @ dense
    torch.testing.assert_close(white.solve(v, 0.3), torch.linalg.solve(gram + 0.3 * prec, v))
    covariance = torch.linalg.inv(gram + prec)
    torch.testing.assert_close(white.leverages(), (dense @ covariance * dense).sum(1))
    torch.testing.assert_close(-2 * white.cholesky(1.0).diagonal().log().sum(), covariance.logdet())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_where_no_climb_ends_at_a_mode_each_fit_has_known_noise(monkeypatch):
    climbs = []
    monkeypatch.setattr(
        "pyrobnn.estimators.empirical_bayes.climb",
        lambda *given, **rest: climbs.append(given) or Climb(-np.inf, torch.ones(1), 1.0, {}),
    )
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.choose",
        lambda *_, **__: (pb.Laplace(tune="marginal_likelihood", map=SHORT), "short"),
    )
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = regressor("auto", hidden=(3,), num_draws=5).fit(x, np.sin(2 * x[:, 0]))
    assert len(climbs) == 3 and "by the evidence" in model.method_reason_
    assert np.isfinite(model.predict(x)).all()


@pytest.mark.slow
@pytest.mark.parametrize("better", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_of_two_nets_the_one_that_predicts_left_out_rows_better_is_kept(better, monkeypatch):
    scores = iter([np.full(60, -2.0), np.full(60, -1.0)][:: 1 if better else -1])
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.left_out", lambda *_: (next(scores), np.full(60, -3.0))
    )
    five_steps(monkeypatch)
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = regressor("auto", hidden=None, num_draws=1).fit(x, np.sin(x[:, 0]))
    assert (type(model.posterior_.bnn.net[0]) is Lift) == bool(better)
    assert model.predict(x).shape == (60,)


@pytest.mark.slow
def test_inputs_of_two_values_only(monkeypatch):
    five_steps(monkeypatch)
    monkeypatch.setattr(
        "pyrobnn.estimators.estimator.left_out", lambda *_: (np.full(9, -1.0), np.full(9, -3.0))
    )
    x = (np.random.default_rng(0).normal(size=(60, 3)) > 0) * 1.0
    model = regressor("auto", hidden=None, num_draws=1).fit(x, x[:, 0] * x[:, 1])
    assert np.isfinite(model.predict(x)).all()


@pytest.mark.slow
def test_powers_and_sines_of_the_features_are_tried():
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(210, 2)))
    y = np.sin(4 * np.log(x[:, 0])) + 0.5 * np.log(x[:, 1]) + 0.1 * rng.normal(size=210)
    model = regressor("auto", hidden=None, compile=False).fit(x[:150], y[:150])
    assert type(model.posterior_.bnn.net[0]) is Lift
    assert np.sqrt(np.mean((model.predict(x[150:]) - y[150:]) ** 2)) < 0.5 * y.std()


@pytest.mark.slow
@pytest.mark.parametrize(
    "frequency", [2.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (1.0, 1.7, 4.0))]
)
def test_a_narrow_prior_does_not_keep_a_net_from_a_wave(frequency, tmp_path):
    """Under the declared prior alone the mode is a straight line, and the noise what it leaves."""
    x = torch.empty(70, 1, dtype=torch.float64).uniform_(
        -2, 2, generator=torch.Generator().manual_seed(0)
    )
    y = torch.sin(frequency * x) + 0.2 * torch.from_numpy(
        np.random.default_rng(0).standard_t(3, x.shape)
    )
    method = pb.Laplace(
        tune="marginal_likelihood", map=pb.MAP(num_steps=100, compile="trace"), compile=False
    )
    net = pb.networks.mlp(1, (50,), seed=0)
    free = HomoskedasticGaussian("learned")
    units = pb.data.Standardizer.fit(pb.data.Dataset(x, y, "wave", "regression"))
    model = pb.BNN(net, pb.priors.FanInNormal(), free, standardizer=units)
    posterior, _ = fit_by_evidence(method, model, x, y, {"num_draws": 10})
    assert (posterior.predict(x).mean - torch.sin(frequency * x)).square().mean().sqrt() < 0.2
    (factor,) = posterior.meta["tuned"]["prior_precision_factor"].values()
    loaded = pb.Posterior.load(posterior.save(tmp_path / "wave.nc"), model)
    for prior in (posterior.bnn.priors, loaded.bnn.priors):
        wider = prior["net.0.bias"].base_dist.scale / model.priors["net.0.bias"].base_dist.scale
        torch.testing.assert_close(wider, torch.full_like(wider, factor**-0.5))


@pytest.mark.parametrize(
    ("likelihood", "width", "curvature"),
    [
        (pb.likelihoods.Categorical(), 3, "ggn"),
        (pb.likelihoods.Categorical(), 3, "variational"),
        (pb.likelihoods.Ordinal(3), 1, "ggn"),
    ],
)
def test_labels_that_are_left_out_are_as_likely_as_under_fits_without_them(
    likelihood, width, curvature
):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    y = torch.bucketize(
        x[:, 0] + 0.7 * torch.randn(40, dtype=torch.float64, generator=generator),
        torch.tensor([-0.5, 0.5]),
    )
    net = pb.networks.mlp(3, (), width, seed=0).double()
    model = pb.BNN(net, pb.priors.FanInNormal(), likelihood)
    method = pb.Laplace(curvature=curvature, map=pb.MAP(num_steps=200, lr=0.05, compile=False))
    found = left_out_labels(method.fit(model, x, y, num_draws=1, seed=0), x, y)
    fitted = method.fit(model, x, y, num_draws=4000, seed=0).predict(x).log_prob(y).numpy()
    rows = [0, 7, 13, 21, 34]
    for row in rows:
        kept = torch.arange(40) != row
        without = method.fit(model, x[kept], y[kept], num_draws=4000, seed=0).predict(
            x[row : row + 1]
        )
        assert found[row] == pytest.approx(float(without.log_prob(y[row : row + 1])), abs=0.1)
    assert found.mean() < fitted.mean()


@pytest.mark.parametrize("linear", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_classifier_is_linear_unless_a_net_gains(linear):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1100, 3))
    odds = 2 * x[:, 0] if linear else 4 * (x[:, 0] ** 2 + x[:, 1] ** 2 - 1.4)
    y = (generator.uniform(size=1100) < 1 / (1 + np.exp(-odds))).astype(int)
    model = pb.BNNClassifier(random_state=0, compile=False).fit(x[:100], y[:100])
    assert model.method_reason_.startswith("a linear model predicts these rows as well") == linear
    loss = -np.log(model.predict_proba(x[100:])[np.arange(1000), y[100:]]).mean()
    best = -np.log(1 / (1 + np.exp(np.where(y[100:] == 1, -odds[100:], odds[100:])))).mean()
    assert loss < best + (0.1 if linear else 0.25)  # of 0.69 for a constant


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_target_that_is_a_line_does_not_hide_one_that_is_none(seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(70, 3))
    functions = np.column_stack([np.sin(2 * x[:, 0]), 100 * x[:, 0]])
    y = functions + np.array([0.1, 1.0]) * generator.normal(size=(70, 2))
    model = pb.BNNRegressor(random_state=0, compile=False).fit(x, y)
    error = np.sqrt(np.mean((model.predict(x) - functions) ** 2, axis=0))
    assert (error < [0.15, 2.0]).all()  # of 0.7 and 100 for a constant


@pytest.mark.parametrize("words", [["low", "high"] * 5, np.array(["1", "two"] * 5)])
def test_a_regressor_of_words_names_the_target_and_the_classifier(words):
    with pytest.raises(ValueError, match="'y' must hold numbers.*BNNClassifier"):
        pb.BNNRegressor().fit(np.arange(10.0)[:, None], words)
