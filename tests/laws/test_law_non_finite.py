"""The law: draws that are not finite, do not move or are not there are told, never raised and never passed."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings

import numpy as np
import pytest
import torch
import trees as factory
import xarray as xr
from test_contract import METHODS, MODELS, X, Y, fit, num_draws, one_of_each_kind

import pyrobnn as pb
from pyrobnn import plots

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)
SAMPLED = {"chain", "draw"}


def changed(tree: xr.DataTree, edit, groups=None, sampled=True) -> xr.DataTree:
    """A copy of ``tree`` whose float variables went through ``edit``, an in-place function of an array."""
    found = {}
    for group in tree.children:
        data = tree[group].to_dataset().copy(deep=True)
        for name, values in data.data_vars.items():
            if (
                values.dtype.kind != "f"
                or values.size == 0
                or (groups is not None and group not in groups)
            ):
                continue
            if (
                SAMPLED <= set(values.dims)
                if sampled
                else values.ndim and not SAMPLED & set(values.dims)
            ):
                array = values.values.copy()
                edit(array)
                data[name] = (values.dims, array, values.attrs)
        found[group] = data
    out = xr.DataTree.from_dict(found)
    out.attrs = dict(tree.attrs)
    return out


def sliced(tree: xr.DataTree, **index) -> xr.DataTree:
    out = xr.DataTree.from_dict(
        {
            name: node.to_dataset().isel(
                {dim: part for dim, part in index.items() if dim in node.dims}
            )
            for name, node in tree.children.items()
        }
    )
    out.attrs = dict(tree.attrs)
    return out


def last(value):
    def edit(array):
        array[0, -1] = value

    return edit


def first(value):
    def edit(array):
        array[0] = value

    return edit


def freeze(array):
    array[0] = array[0, :1]


def hold(array):
    array[:] = array[:1, :1]


def tie(array):
    even = array.shape[1] - array.shape[1] % 2
    array[:, 1:even:2] = array[:, 0:even:2]


BROKEN = {
    "nan": lambda t: changed(t, last(np.nan)),
    "inf": lambda t: changed(t, last(np.inf)),
    "all nan": lambda t: changed(t, first(np.nan)),
    "frozen": lambda t: changed(t, freeze),
    "constant": lambda t: changed(t, hold),
    "tied": lambda t: changed(t, tie),
    "one draw": lambda t: sliced(t, draw=slice(1)),
    "nan log-likelihood": lambda t: changed(t, last(np.nan), ["log_likelihood"]),
    "no likelihood": lambda t: changed(t, first(-np.inf), ["log_likelihood"]),
    "nan prediction": lambda t: changed(t, last(np.nan), ["predictions"]),
    "nan replicate": lambda t: changed(t, last(np.nan), ["posterior_predictive"]),
    "nan statistic": lambda t: changed(t, last(np.nan), ["sample_stats"]),
    "nan summaries": lambda t: changed(t, first(np.nan), sampled=False),
}
EMPTY = {
    "one chain": lambda t: sliced(t, chain=slice(1)),
    "no test rows": lambda t: sliced(t, pred_point=slice(0)),
    "no data": lambda t: sliced(t, obs=slice(0)),
    "no draws": lambda t: sliced(t, draw=slice(0)),
    "two draws": lambda t: sliced(t, draw=slice(2)),
}
FEW = ("nan", "frozen", "tied", "nan log-likelihood", "no test rows", "no draws")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def told(verdict: pb.Verdict) -> set[tuple[str, str]]:
    return {(check.name, check.status) for check in (*verdict.failed, *verdict.warned)}


MAKERS = {"chains": factory.regression_1d, "iid": lambda: factory.regression_1d("SVI", iid=True)}


@functools.cache
def told_of_the_whole(maker: str) -> set[tuple[str, str]]:
    return told(pb.diagnose(MAKERS[maker]()))


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("maker", MAKERS)
def test_broken_draws_never_pass(maker, how):
    verdict = pb.diagnose(BROKEN[how](MAKERS[maker]()))
    assert verdict.status != "pass" and verdict.summary
    assert told(verdict) - told_of_the_whole(maker)
    json.loads(verdict.to_json(), parse_constant=refuse)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The scores of the whole tree, with no broken one beside it."""
    path = tmp_path_factory.mktemp("alone") / "alone.json"
    content = json.loads(
        pb.write_summary({"whole": factory.regression_1d()}, None, path).read_text("utf-8")
    )
    return content["methods"]["whole"]["scores"]


@pytest.mark.parametrize(
    "how",
    [
        how if how in {*FEW, *EMPTY} else pytest.param(how, marks=pytest.mark.slow)
        for how in BROKEN | EMPTY
    ],
)
def test_the_other_methods_keep_their_numbers(how, alone, tmp_path):
    whole = factory.regression_1d()
    trees = {
        "broken": (BROKEN | EMPTY)[how](factory.regression_1d("SVI", iid=True)),
        "whole": whole,
    }
    content = json.loads(
        pb.write_summary(trees, None, tmp_path / "summary.json").read_text("utf-8"),
        parse_constant=refuse,
    )
    assert content["methods"]["whole"]["scores"] == alone
    nulls = [value for value in content["methods"]["broken"]["scores"].values() if value is None]
    assert content["not_finite"] == len(nulls)
    if how == "nan summaries":
        assert nulls


def spoilt(name: str, ways) -> dict[str, xr.DataTree]:
    tree = fit(name, "inferred").to_datatree(X, Y, test=(X[:5], Y[:5]))
    return {how: (BROKEN | EMPTY)[how](tree) for how in ways}


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("name", one_of_each_kind(fast={"MAP", "NUTS", "Laplace"}))
def test_no_verdict_or_summary_raises(name, tmp_path):
    trees = spoilt(name, FEW)
    content = json.loads(
        pb.write_summary(trees, None, tmp_path / "summary.json").read_text("utf-8"),
        parse_constant=refuse,
    )
    assert set(content["methods"]) == set(trees)
    assert all(entry["status"] != "pass" for entry in content["methods"].values())


@pytest.mark.slow
def test_a_page_of_broken_trees_says_so(tmp_path):
    check_page(spoilt("NUTS", ("nan", "frozen", "no test rows", "no draws")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_no_page_or_figure_raises(name, tmp_path):
    check_page(spoilt(name, BROKEN | EMPTY), tmp_path)


def check_page(trees: dict[str, xr.DataTree], tmp_path) -> None:
    html = pb.write_report(trees, tmp_path / "report.html").read_text("utf-8")
    assert all(f"<b>{how}</b>" in html for how in trees)
    for plot in set(plots.__all__) - {"style"}:
        assert getattr(plots, plot)(trees).axes is not None


ATTRIBUTES = (
    "timings",
    "settings",
    "versions",
    "iid",
    "temperature",
    "seed",
    "label",
    "point_sites",
)
MORE = ("likelihood", "created_at", "num_data", "interrupted", "warnings", "method", "log_evidence")


@pytest.mark.parametrize(
    "value",
    [
        "{",
        np.nan,
        *(
            pytest.param(value, marks=pytest.mark.slow)
            for value in ("12 s", "", "[1]", b"raw", 12.5, np.array([1, 2]), None)
        ),
    ],
)
def test_attributes_of_any_type_are_read(value, tmp_path):
    tree = factory.numpyro_like()
    del tree["log_likelihood"]
    tree.attrs = dict.fromkeys((*ATTRIBUTES, *MORE), value)
    assert pb.diagnose(tree).checks
    content = json.loads(
        pb.write_summary({"it": tree}, None, tmp_path / "s.json").read_text("utf-8")
    )
    assert not content["methods"]["it"]["lost"]
    assert pb.write_report({"it": tree}, tmp_path / "report.html").is_file()


def overflowing(name):
    """Residuals whose squares float32 cannot hold."""
    return METHODS[name], MODELS["fixed"]()[0], 1e25 * Y


def leaping(name):
    """Steps that leave the finite numbers at once."""
    method = METHODS[name]
    size = {field: 1e25 for field in ("lr", "step_size") if hasattr(method, field)}
    return dataclasses.replace(method, **size), *MODELS["fixed"]()


@pytest.mark.parametrize("make", [overflowing, leaping])
@pytest.mark.parametrize("name", one_of_each_kind())
def test_a_fit_that_diverges_says_so(name, make):
    method, model, y = make(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = method.fit(model, X, y, seed=3, **num_draws(name))
        except (FloatingPointError, ValueError) as error:
            assert len(str(error)) > 30
            return
    finite = all(bool(torch.isfinite(value).all()) for value in posterior.draws.values())
    assert finite or any(warning.category is UserWarning for warning in caught)
