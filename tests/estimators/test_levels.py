"""Columns of many categories: effects under a random effect, draws of them in training, the width of a new one."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import pyrobnn as pb
from pyrobnn.data.columns import Columns
from pyrobnn.estimators.levels import _RATIOS, NUM_NODES, Levels, _one_way
from pyrobnn.posterior.exported_reader import Exported
from pyrobnn.posterior.prediction import Prediction, mixed

LINE = {
    "hidden": (),
    "compile": False,
    "random_state": 0,
}


def _shops(num_levels, rows_of_each, effect_sd, seed):
    """Codes (N,), true effects (level,) and targets (N,) with noise of sd 1."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(num_levels), rows_of_each)
    effects = effect_sd * rng.normal(size=num_levels)
    return codes, effects, effects[codes] + rng.normal(size=len(codes))


def _table(num_rows=240, num_levels=30, seed=0):
    rng = np.random.default_rng(seed)
    code = rng.integers(num_levels, size=num_rows)
    code[:num_levels] = np.arange(num_levels)
    effects = 2.0 * rng.normal(size=num_levels)
    x = pd.DataFrame({"a": rng.normal(size=num_rows), "shop": [f"s{c:02}" for c in code]})
    return x, x["a"].to_numpy() + effects[code] + rng.normal(size=num_rows)


def test_effects_are_those_of_the_mixed_model():
    """By the dense covariance of all rows, each ratio of sds with its restricted likelihood and its prior."""
    rng = np.random.default_rng(0)
    codes = np.concatenate([np.arange(6), rng.integers(6, size=19)])
    residual = 1.5 * rng.normal(size=6)[codes] + rng.normal(size=25)
    one_hot = np.eye(7)[codes]
    ones = np.ones((25, 1))
    means, variances, weights = [], [], []
    for ratio, width in zip(_RATIOS, np.gradient(_RATIOS)):
        covariance = ratio**2 * one_hot @ one_hot.T + np.eye(25)
        inverse = np.linalg.inv(covariance)
        precision = (ones.T @ inverse @ ones).item()
        centre = (ones.T @ inverse @ residual).item() / precision
        error = residual - centre
        noise = error @ inverse @ error / 24
        log_likelihood = -0.5 * (
            np.linalg.slogdet(covariance)[1] + np.log(precision) + 24 * np.log(noise)
        )
        gains = ratio**2 * one_hot.T @ inverse
        # of the sum of centre and deviation, both estimated
        carried = 1.0 - (gains @ ones)[:, 0]
        means.append(centre + gains @ error)
        within = ratio**2 * np.eye(7) - ratio**2 * gains @ one_hot
        variances.append(noise * (np.diag(within) + carried**2 / precision))
        weights.append(np.log(width / (1 + ratio**2)) + log_likelihood)
    weights = np.exp(np.array(weights) - max(weights))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    var = weights @ (np.array(variances) + np.array(means) ** 2) - mean**2
    effects = _one_way(residual, codes, 6, used=0.0)
    np.testing.assert_allclose(
        effects.mean,
        mean,
        rtol=1e-8,
    )
    np.testing.assert_allclose(
        effects.var,
        var,
        rtol=1e-8,
    )


@pytest.mark.parametrize("rows_of_each", [2, 3, 5])
@pytest.mark.parametrize("effect_sd", [0.5, 2.0])
def test_a_draw_of_the_effects_stands_to_the_targets_as_the_effects_do(rows_of_each, effect_sd):
    """What is left has the noise's sd and does not depend on the draw: no target is told by its own level."""
    codes, _, y = _shops(
        3000,
        rows_of_each,
        effect_sd,
        seed=rows_of_each,
    )
    levels = Levels.fit(
        {0: 3000},
        codes[:, None].astype(float),
        {"": y},
        seed=1,
    )
    drawn = levels.drawn(codes[:, None].astype(float))[:, 0] * y.std() + y.mean()
    slope = np.cov(drawn, y)[0, 1] / drawn.var(ddof=1)
    # standard errors of a slope on 3,000 effects, and of an sd of as many
    assert abs(slope - 1.0) < 5.0 / np.sqrt(3000 * effect_sd**2)
    assert abs(np.std(y - drawn) - 1.0) < 5.0 / np.sqrt(2.0 * 3000)


@pytest.mark.parametrize("rows_of_each", [2, 4, 20])
def test_intervals_of_effects_hold_them(rows_of_each):
    codes, effects, y = _shops(500, rows_of_each, 1.0, seed=3)
    levels = Levels.fit(
        {0: 500},
        codes[:, None].astype(float),
        {"": y},
        seed=1,
    )
    law = levels.laws[0]
    z = (effects - (law.mean[:-1] * y.std() + y.mean())) / (np.sqrt(law.var[:-1]) * y.std())
    held = np.mean(np.abs(z) < stats.norm.ppf(0.95))
    assert abs(held - 0.9) < 4.0 * np.sqrt(0.09 / 500)
    # a new one: the sd between levels, to four standard errors of an sd
    assert abs(np.sqrt(law.var[-1]) * y.std() - 1.0) < 4.0 / np.sqrt(2.0 * 500) * 1.5


def test_predictions_of_new_categories_are_as_wide_as_categories_differ():
    x, y = _table()
    model = pb.BNNRegressor("laplace", **LINE).fit(x, y)
    known = x.groupby("shop").head(1)
    widths = np.diff(model.predict_interval(known), axis=1)[:, 0]
    new = known.assign(shop="elsewhere")
    with pytest.warns(
        UserWarning, match=r"'shop' has categories .*\(rows: 30; 'elsewhere'\).* as wide"
    ):
        wider = np.diff(model.predict_interval(new), axis=1)[:, 0]
    # sds of 1, and of the square root of 1 + 4, but for what eight rows of each say
    assert np.median(widths) == pytest.approx(2 * 1.645 * np.sqrt(1 + 1 / 9), rel=0.15)
    assert np.median(wider) == pytest.approx(2 * 1.645 * np.sqrt(1 + 4), rel=0.25)


def test_a_prediction_of_a_row_does_not_depend_on_the_others():
    x, y = _table()
    model = pb.BNNRegressor("laplace", **LINE).fit(x, y)
    rows = x[:5].assign(shop=["s01", "new", "s02", "s01", "other"])
    with pytest.warns(UserWarning, match="do not occur"):
        mean, scale = model.predict(rows, return_std=True)
        again = [model.predict(rows[i : i + 1], return_std=True) for i in (1, 4)]
    np.testing.assert_allclose(
        [mean[1], mean[4]],
        [m[0] for m, _ in again],
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        [scale[1], scale[4]],
        [s[0] for _, s in again],
        rtol=1e-10,
    )
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict(x), model.predict(x))
    order = np.random.default_rng(0).permutation(len(x))
    shuffled = pb.BNNRegressor("laplace", **LINE).fit(x.iloc[order], y[order])
    np.testing.assert_array_equal(shuffled.predict(x), model.predict(x))


def test_classes_of_new_categories_are_as_unsure_as_categories_differ():
    rng = np.random.default_rng(0)
    code = np.repeat(np.arange(40), 12)
    p = np.where(np.arange(40) < 30, 0.95, 0.05)[code]
    x = pd.DataFrame({"a": rng.normal(size=480), "shop": [f"s{c}" for c in code]})
    y = np.where(rng.uniform(size=480) < p, "yes", "no")
    model = pb.BNNClassifier("laplace", **LINE).fit(x, y)
    known = model.predict_proba(pd.DataFrame({"a": [0.0, 0.0], "shop": ["s0", "s39"]}))
    assert known[0, 1] > 0.8 and known[1, 1] < 0.25
    with pytest.warns(UserWarning, match="do not occur"):
        new = model.predict_proba(pd.DataFrame({"a": [0.0], "shop": ["new"]}))
    # three quarters of the categories are mostly "yes"
    assert 0.55 < new[0, 1] < 0.85
    assert model.sample_functions(x[:3], num_draws=7).shape == (7, 3, 2)


@pytest.mark.slow
def test_several_targets_have_effects_of_their_own():
    x, y = _table()
    targets = np.column_stack([y, np.random.default_rng(1).normal(size=len(y))])
    model = pb.BNNRegressor("laplace", **LINE).fit(x, targets)
    assert model._names(np.zeros((1, 3)), model._row_facts.levels) == [
        "a",
        "effect of shop 0",
        "effect of shop 1",
    ]
    assert model.predict_interval(x).shape == (240, 2, 2)
    mean = model.predict(x)
    assert np.corrcoef(mean[:, 0], y)[0, 1] > 0.8 and mean[:, 1].std() < 0.5


def test_only_columns_of_many_categories_are_pooled():
    few = pd.DataFrame({"kind": [f"k{i % 19}" for i in range(190)]})
    many = pd.DataFrame({"kind": [f"k{i % 20}" for i in range(200)]})
    assert Columns.fit(few, "refuse", "X", pool=True) == Columns.fit(few, "refuse", "X")
    pooled = Columns.fit(many, "refuse", "X", pool=True)
    assert pooled.inputs == ("kind",) and [*map(len, pooled.pooled.values())] == [20]
    assert Columns.of(pooled.settings()) == pooled
    assert not Columns.fit(many, "refuse", "X").pooled


def test_a_gap_is_a_category_that_is_pooled():
    x, y = _table()
    x.loc[::9, "shop"] = None
    model = pb.BNNRegressor(
        "laplace",
        missing="impute",
        **LINE,
    ).fit(x, y)
    assert "" in model.columns_.columns[1].categories
    x, y = _table()
    model = pb.BNNRegressor(
        "laplace",
        missing="impute",
        **LINE,
    ).fit(x, y)
    with pytest.warns(UserWarning, match="rows: 1; a missing value"):
        assert np.isfinite(model.predict(x[:1].assign(shop=None))).all()


def test_a_mixture_of_predictions_is_that_of_their_draws():
    rng = np.random.default_rng(0)
    likelihood = pb.likelihoods.HomoskedasticGaussian(0.5)
    values = torch.from_numpy(rng.normal(size=(3, 2, 4, 5, 1)))
    moments = [(f.mean((0, 1)), f.var((0, 1), correction=0)) for f in values]
    units = {"y_mean": 2.0, "y_scale": 3.0}
    predictions = [
        Prediction(f, likelihood, {}, moments=m, **units) for f, m in zip(values, moments)
    ]
    mixture = mixed(predictions)
    joined = Prediction(
        torch.cat(list(values), 1),
        likelihood,
        {},
        **units,
    )
    torch.testing.assert_close(mixture.mean, joined.mean)
    torch.testing.assert_close(mixture.epistemic_var, joined.epistemic_var)
    y = torch.from_numpy(rng.normal(size=(5, 1)))
    by_part = torch.stack([prediction.log_prob(y) for prediction in predictions])
    torch.testing.assert_close(mixture.log_prob(y), by_part.logsumexp(0) - np.log(3))


def test_nodes_are_equally_likely_values_of_a_normal():
    codes, _, y = _shops(30, 4, 1.0, seed=0)
    x = codes[:, None].astype(float)
    levels = Levels.fit({0: 30}, x, {"": y}, seed=1)
    nodes = np.stack(list(levels.nodes(x)))[:, :, 0]
    law = levels.laws[0]
    assert len(nodes) == NUM_NODES
    np.testing.assert_allclose(
        nodes.mean(0),
        law.mean[codes],
        atol=1e-12,
    )
    np.testing.assert_allclose(
        nodes.std(0),
        np.sqrt(law.var[codes]),
        rtol=1e-10,
    )


@pytest.mark.slow
def test_an_exported_file_takes_effects_and_has_those_of_every_category(tmp_path):
    x, y = _table()
    model = pb.BNNRegressor(pb.Laplace(num_steps=200), **LINE).fit(x, y)
    path = model.export(tmp_path / "shops.pt2", num_draws=8)
    exported = Exported(path)
    effects = exported.meta["effects"]["effect of shop"]
    assert exported.meta["inputs"] == ["a", "effect of shop"]
    assert sorted(effects["categories"]) == sorted(set(x["shop"]))
    first = effects["categories"]["s00"]
    likely = model.sample_functions(x[:1].assign(shop="s00"))
    inputs = torch.tensor([[x["a"].iloc[0], first[0]]], dtype=torch.float32)
    mean = float(exported(inputs)["mean"])
    assert abs(mean - likely.mean()) < 3 * likely.std()
    assert effects["new"][1] > first[1] > 0
