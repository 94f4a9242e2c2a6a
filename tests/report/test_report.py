"""The report: self-contained, escaped, legible to a screen reader, and honest about what a tree lacks."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import trees as factory
import xarray as xr
from helpers import seeded
from matplotlib.figure import Figure
from models import normal_prior

import pyrobnn as pb
from pyrobnn.diagnostics import Check, Verdict
from pyrobnn.diagnostics.baselines import baselines
from pyrobnn.diagnostics.evidence import Evidence, gather
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.diagnostics.labels import output_names
from pyrobnn.report import write_report, write_summary
from pyrobnn.report.figures import as_image
from pyrobnn.report.results import COLUMNS, best_labels, compare_rows
from pyrobnn.report.sentences import conclude, facts, headline, recommended

ATTACK = '<script>alert("x")</script>'


class Page(HTMLParser):
    """What the tests ask of a page: its tags with attributes, ids, and the text of one table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


#: tests of a page's words and numbers, which need none of its figures
WORDS_ALONE = ("fitted_to_what", "sites_by_their_names")


@pytest.fixture(autouse=True)
def figures_where_they_are_tested(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(words in request.node.name for words in WORDS_ALONE):
        monkeypatch.setattr("pyrobnn.report.page.build_sections", lambda trees: {})
    monkeypatch.setattr("pyrobnn.report.arviz_figures.build_folds", lambda trees: [])


@pytest.fixture(scope="module")
def one_dimensional() -> dict[str, xr.DataTree]:
    return {
        "nuts": factory.regression_1d(),
        "svi": factory.regression_1d("SVI", iid=True, gap_sd=0.15, seed=3),
        "map": factory.point_estimate(),
    }


@pytest.fixture(scope="module")
def html(one_dimensional: dict[str, xr.DataTree], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report(one_dimensional, tmp_path_factory.mktemp("report") / "new" / "report.html")
    return path.read_text(encoding="utf-8")


def test_a_short_run_says_so_above_every_number() -> None:
    tree = factory.regression_1d()
    assert "run" not in facts({"it": Evidence(tree)})
    tree.attrs["config"] = json.dumps({"quick": True, "methods": {}})
    assert "500 rows at most" in facts({"it": Evidence(tree)})["run"]


def test_the_page_refers_to_nothing_outside_itself(html: str) -> None:
    page = Page(html)
    for tag in ("link", "script", "iframe", "object", "embed", "base"):
        assert not page.named(tag)
    for _, attrs in page.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (name, value)
    assert "@import" not in html
    for target in re.findall(r"url\(([^)]*)\)", html):
        assert target.startswith("#")


def test_every_figure_has_a_text_alternative(html: str) -> None:
    page = Page(html)
    figures = page.named("img")
    assert len(page.named("figure")) == len(figures) >= 3
    assert all(len(a.get("alt") or "") > 15 for a in figures)


def test_the_page_is_semantic(html: str) -> None:
    page = Page(html)
    assert page.named("html") == [{"lang": "en"}]
    assert len(page.named("h1")) == len(page.named("main")) == 1
    assert any(a.get("name") == "viewport" for a in page.named("meta"))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:href="|url\()#([^")]+)', html):
        assert reference in ids


def test_verdicts_come_before_numbers_before_figures(html: str) -> None:
    order = [
        html.index(f'id="{name}"')
        for name in ("verdicts", "comparison", "predictions", "checks", "settings")
    ]
    assert order == sorted(order)
    assert html.index('class="lead') < order[0]


def test_a_table_that_is_cut_on_a_phone_says_so(html: str) -> None:
    start = html.index('class="numbers"')
    shown = html.count('scope="col"', start, html.index("</table>", start)) - 1
    assert f"{shown} columns: scroll the table sideways" in html
    assert "background-attachment: local, scroll" in html  # a shade where the table goes on


def test_figures_fold_on_a_phone_but_for_the_first(html: str) -> None:
    cards = [a for a in Page(html).named("details") if "figures" in (a.get("class") or "")]
    assert len(cards) >= 3 and ["open" in a for a in cards] == [True] + [False] * (len(cards) - 1)


def test_light_dark_and_print(html: str) -> None:
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    assert not re.search(
        r"#[0-9a-fA-F]{6}\b", html[html.index("<body>") :]
    )  # colours are the style's


def test_the_gap_ratio_and_the_distance_are_shown(
    html: str, one_dimensional: dict[str, xr.DataTree]
) -> None:
    rows = {row.label: row for row in compare_rows(one_dimensional)}
    for label in ("nuts", "svi"):
        assert f"× {rows[label].values['gap_ratio']:.1f}" in html
    assert "gap_ratio" not in rows["map"].values
    assert rows["svi"].values["distance"] > 0 and "distance" not in rows["nuts"].values


def test_independent_draws_have_no_r_hat(tmp_path: Path) -> None:
    trees = {
        "svi": factory.regression_1d("SVI", iid=True),
        "laplace": factory.regression_1d("Laplace", iid=True),
    }
    html = write_report(trees, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "R-hat ↓" not in html.replace("&nbsp;", " ")
    for row in compare_rows(trees):
        assert "rhat" not in row.values and "ess" not in row.values
        assert "khat" in row.values


def test_chains_have_r_hat_and_no_k_hat(one_dimensional: dict[str, xr.DataTree]) -> None:
    row = compare_rows({"nuts": one_dimensional["nuts"]})[0]
    assert {"rhat", "ess"} <= set(row.values) and "khat" not in row.values


def test_r_hat_of_f_is_that_of_f() -> None:
    tree = factory.regression_1d("NUTS")
    before = compare_rows({"nuts": tree})[0].values
    apart = (
        100.0 * np.arange(tree["posterior"].sizes["chain"])[:, None]
    )  # chains agree on f, not on its density
    function = tree["function"].to_dataset()
    function["log_likelihood"] = (
        function["f"][..., 0, 0].drop_vars(("probe", "output"), errors="ignore") + apart
    )
    tree["function"] = function
    verdicts = judge_all({"nuts": tree})
    worst = {check.name: check.value for check in verdicts["nuts"].checks}["rhat_function"]
    values = compare_rows({"nuts": tree})[0].values
    assert worst > 2 > values["rhat"] == before["rhat"] and values["ess"] == before["ess"]


def test_user_strings_stay_text(tmp_path: Path) -> None:
    tree = factory.regression_1d(f"NUTS {ATTACK}")
    tree.attrs |= {
        "label": ATTACK,
        "settings": json.dumps({ATTACK: ATTACK}),
        "warnings": json.dumps([ATTACK]),
        "likelihood": ATTACK,
        "versions": json.dumps({ATTACK: "1"}),
        "created_at": ATTACK,
    }
    numbers = {"seen": ATTACK, "next": ATTACK}
    check = Check(ATTACK, "fail", "draws", 1.0, 2.0, ATTACK, ATTACK, numbers)
    verdict = Verdict.from_checks(ATTACK, ATTACK, [check])
    path = write_report(
        {ATTACK: tree}, tmp_path / "report.html", title=ATTACK, verdicts={ATTACK: verdict}
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.named("script")
    assert page.text.count("alert") >= 8
    assert "onload" not in {name for _, attrs in page.tags for name in attrs}


@pytest.mark.parametrize(
    "make",
    [factory.numpyro_like, factory.posterior_only, factory.classification, factory.regression_nd],
)
def test_trees_that_lack_groups_still_make_a_page(make, tmp_path: Path) -> None:
    html = write_report({"it": make()}, tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="verdicts"' in html and "nan" not in Page(html).text.lower().split()


@pytest.mark.parametrize(
    "group", ["sample_stats", "function", "predictions", "observed_data", "constant_data"]
)
def test_any_single_group_may_be_missing(group: str, tmp_path: Path) -> None:
    tree = factory.regression_1d("SVI", iid=True)
    del tree[group]
    assert write_report({"svi": tree}, tmp_path / "report.html").stat().st_size > 10_000


def test_the_page_of_a_program_speaks_of_its_sites_by_their_names(tmp_path: Path) -> None:
    draws = np.random.default_rng(0).normal(size=(4, 100, 3))
    draws[3, :, 1] += 2.0
    sites = xr.Dataset(
        {"theta": (("chain", "draw", "city"), draws)}, {"city": ["Oslo", "Rome", "Bern"]}
    )
    log_likelihood = xr.Dataset({"obs": (("chain", "draw", "row"), np.abs(draws[:, :, [0, 2]]))})
    tree = xr.DataTree.from_dict({"posterior": sites, "log_likelihood": log_likelihood})
    tree.attrs |= {
        "timings": json.dumps({"fit": 2.0}),
        "model": json.dumps({"program": "my_model"}),
    }
    (check,) = [
        each
        for each in judge_all(gather({"it": tree}))["it"].checks
        if each.name == "rhat_function"
    ]
    assert check.numbers["where"] == "theta[Rome]"
    page = write_report({"it": tree}, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<dt>program</dt><dd>my_model" in page and "<dt>net</dt>" not in page
    assert 'id="comparison"' not in page  # seconds alone are no comparison


def test_the_same_trees_make_the_same_page(
    one_dimensional: dict[str, xr.DataTree], tmp_path: Path
) -> None:
    chosen = {"svi": one_dimensional["svi"]}
    verdicts = judge_all({"svi": one_dimensional["svi"]})
    pages = [
        write_report(chosen, tmp_path / name, verdicts=verdicts).read_bytes() for name in ("a", "b")
    ]
    assert pages[0] == pages[1]


def test_summary_is_strict_json(one_dimensional: dict[str, xr.DataTree], tmp_path: Path) -> None:
    path = write_summary(one_dimensional, None, tmp_path / "summary.json")

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert content["reference"] == "nuts" and set(content["methods"]) == set(one_dimensional)
    assert content["recommended"] in one_dimensional
    svi = content["methods"]["svi"]
    assert {"rmse", "log_prob", "crps", "coverage_90", "khat", "fit_seconds"} <= set(svi["scores"])
    verdict = judge_all(one_dimensional)["svi"]
    assert svi["status"] == verdict.status
    assert [check["name"] for check in svi["verdict"]["checks"]] == [c.name for c in verdict.checks]


def test_missing_verdicts_are_named(
    one_dimensional: dict[str, xr.DataTree], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="svi"):
        write_report(
            one_dimensional, tmp_path / "report.html", verdicts={"nuts": judged("nuts", "pass")}
        )


def judged(label: str, status: str) -> Verdict:
    return Verdict.from_checks(
        label,
        label,
        [Check("one", status, numbers={"seen": f"{label} saw {status}.", "next": "Do more."})],
    )


def test_the_best_verdict_is_recommended_before_the_best_score(
    one_dimensional: dict[str, xr.DataTree],
) -> None:
    trees = {"good": one_dimensional["svi"], "bad": one_dimensional["nuts"]}
    verdicts = {"good": judged("good", "pass"), "bad": judged("bad", "fail")}
    rows = compare_rows(trees)
    assert recommended(rows, verdicts) == "good"
    first, second = conclude(rows, verdicts)
    assert first.startswith("Trust the draws of good") and second == "Do not rely on bad (one)."
    bent = Check("two", "fail", "model", numbers={"seen": "bent.", "next": "Change the model."})
    verdicts["good"] = Verdict.from_checks("good", "good", [*verdicts["good"].checks, bent])
    assert (
        conclude(rows, verdicts)[1] == "Do not rely on bad (one). Next for good: Change the model."
    )


def test_when_everything_fails_nothing_is_recommended(
    one_dimensional: dict[str, xr.DataTree],
) -> None:
    verdicts = {label: judged(label, "fail") for label in one_dimensional}
    first, second = conclude(compare_rows(one_dimensional), verdicts)
    assert first.startswith("No method can be trusted yet") and second == "Next for nuts: Do more."


def test_a_point_estimate_is_recommended_last(one_dimensional: dict[str, xr.DataTree]) -> None:
    verdicts = {"svi": judged("svi", "warn")}
    claim = Check("claim", "warn", code="point_estimate", numbers={"method": "MAP"})
    verdicts["map"] = Verdict.from_checks("MAP", "map", [claim])
    trees = {label: one_dimensional[label] for label in ("map", "svi")}
    assert recommended(compare_rows(trees), verdicts) == "svi"


def test_of_draws_with_a_warning_and_draws_not_checked_the_better_predictions_win(
    one_dimensional: dict[str, xr.DataTree],
) -> None:
    """An ensemble's draws warn by what it is; those of a Laplace that predicts better may not be examined at all."""
    fits = Check("two", "pass", "model")
    verdicts = {
        label: Verdict.from_checks(label, label, [*judged(label, "warn").checks, fits])
        for label in one_dimensional
    }
    rows = compare_rows(one_dimensional)
    best = recommended(rows, verdicts)
    assert best is not None
    verdicts[best] = Verdict.from_checks(best, best, [fits])
    assert verdicts[best].shown_answer("draws") == "not checked"
    assert recommended(rows, verdicts) == best


def test_the_page_says_what_was_fitted_to_what(tmp_path: Path) -> None:
    tree = factory.regression_nd()
    train = tree["constant_data"].to_dataset()
    x = np.random.default_rng(0).normal(size=(train.sizes["obs"], 5))
    tree["constant_data"] = xr.Dataset({"x": (("obs", "feature"), x)}).assign_coords(
        feature=["age", "sex", "bmi", "bp", ATTACK]
    )
    tree["observed_data"]["y"].attrs["units"] = "mmHg"
    tree.attrs |= {
        "data": "ward",
        "target": "pressure",
        "command": "pyrobnn compare --data ward",
        "model": json.dumps(
            {"net": "5-20-1, Tanh", "prior": "FanInNormal(scale=1)", "likelihood": "Gaussian"}
        ),
    }
    page = Page(write_report({"nuts": tree}, tmp_path / "report.html").read_text(encoding="utf-8"))
    y = tree["observed_data"]["y"].values
    for words in (
        "ward: 80 training and 90 held-out points",
        f"5: age, sex, bmi, bp, {ATTACK}",
        f"sd {y.std():.3g} mmHg",
        "5-20-1, Tanh",
        "FanInNormal(scale=1)",
        "pyrobnn compare --data ward",
    ):
        assert words in page.text
    summary = json.loads(
        write_summary({"nuts": tree}, None, tmp_path / "s.json").read_text(encoding="utf-8")
    )
    assert {"data", "inputs", "target", "net", "prior", "likelihood", "command", "seed"} == set(
        summary["facts"]
    )


def linear_tree(slope: float, seed: int = 0) -> xr.DataTree:
    """A tree whose method predicts `slope` times the first of three inputs, on data whose slope is 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(200, 3))
    x_new = rng.normal(size=(100, 3))
    y, y_new = (10 + each[:, 0] + 0.5 * rng.normal(size=len(each)) for each in (x, x_new))
    mean = 10 + slope * x_new[:, 0]
    draws = mean + 0.5 * rng.normal(size=(1, 200, 100))
    point = ("pred_point",)
    log_prob = -0.5 * ((y_new - mean) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))
    groups = {
        "posterior": xr.Dataset({"w": (("chain", "draw"), rng.normal(size=(1, 200)))}),
        "observed_data": xr.Dataset({"y": (("obs",), y)}),
        "constant_data": xr.Dataset({"x": (("obs", "feature"), x)}),
        "predictions": xr.Dataset(
            {
                "y": (("chain", "draw", *point), draws),
                "mean": ((*point, "output"), mean[:, None]),
                "log_prob": (point, log_prob),
            }
        ),
        "predictions_constant_data": xr.Dataset(
            {"x": ((*point, "feature"), x_new), "y": (point, y_new)}
        ),
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = {"method": "SVI", "iid": 1, "likelihood": "gaussian"}
    return tree


def test_baselines_see_the_same_rows_as_the_methods() -> None:
    tree = linear_tree(1.0)
    mean, linear = (row.values for row in compare_rows(baselines([Evidence(tree)])))
    (own,) = (row.values for row in compare_rows({"it": tree}))
    train, test = (tree[g]["y"].values for g in ("observed_data", "predictions_constant_data"))
    assert mean["rmse"] == pytest.approx(np.sqrt(((test - train.mean()) ** 2).mean()))
    assert mean["r2"] == pytest.approx(0.0, abs=1e-12)
    # the truth is linear: least squares is at its noise, and no method can be far below
    assert linear["rmse"] == pytest.approx(own["rmse"], rel=0.05) and 0.7 < linear["r2"] < 0.9
    assert linear["coverage_90"] == pytest.approx(0.9, abs=0.08)
    assert linear["crps"] < 0.6 * mean["crps"] and linear["log_prob"] > mean["log_prob"] + 0.5


def test_of_censored_rows_nothing_is_explained_and_no_baseline_takes_them_for_observed() -> None:
    tree = linear_tree(1.0)
    for group, dim in (("observed_data", "obs"), ("predictions_constant_data", "pred_point")):
        seen = np.arange(tree[group].sizes[dim]) % 3 > 0
        tree[group] = tree[group].to_dataset().assign(observed=(dim, seen.astype(float)))
    tree.attrs["likelihood"] = "censored_normal"
    (own,) = compare_rows({"it": tree})
    assert not {"r2", "rmse"} & own.values.keys() and "crps" in own.values
    assert baselines([Evidence(tree)]) == {}


def test_baselines_of_classes() -> None:
    tree = factory.classification()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 300)
    tree["observed_data"] = xr.Dataset({"y": (("obs",), labels)})
    x_new = tree["predictions_constant_data"]["x"].values
    tree["constant_data"] = xr.Dataset({"x": (("obs", "feature"), rng.uniform(0, 16, (300, 64)))})
    rows = {row.label: row.values for row in compare_rows(baselines([Evidence(tree)]))}
    y = tree["predictions_constant_data"]["y"].values
    assert set(rows) == {"class shares", "logistic regression"} and len(x_new) == len(y)
    assert rows["class shares"]["accuracy"] == np.mean(y == np.bincount(labels).argmax())


def test_bold_is_within_two_standard_errors_of_the_best() -> None:
    trees = {"right": linear_tree(1.0), "close": linear_tree(0.97), "wrong": linear_tree(0.5)}
    rows = [*compare_rows(trees), *compare_rows(baselines(gather(trees).values()))]
    for key in ("rmse", "r2", "log_prob", "crps"):
        (column,) = (column for column in COLUMNS if column.key == key)
        best = best_labels(rows, column)
        assert {"right", "close"} <= best and best.isdisjoint({"wrong", "predict the mean"}), key


@pytest.fixture(scope="module")
def two_outputs() -> xr.DataTree:
    """A regression of two outputs with names, as several functions of the same features."""
    tree = factory.regression_nd()
    groups = {}
    for name, node in tree.children.items():
        stored = node.to_dataset()
        doubled = {
            variable: xr.concat([array, 2 * array], "output").transpose(..., "output")
            for variable, array in stored.data_vars.items()
            if "output" in array.dims or variable == "y" and name != "log_likelihood"
        }
        data = xr.Dataset({**stored.drop_dims("output", errors="ignore").data_vars, **doubled})
        groups[name] = (
            data.assign_coords(output=["depth", "speed"]) if "output" in data.dims else data
        )
    found = xr.DataTree.from_dict(groups)
    found.attrs = dict(tree.attrs)
    return found


def test_every_output_is_shown_by_its_name(two_outputs: xr.DataTree, tmp_path: Path) -> None:
    page = Page(
        write_report({"nuts": two_outputs}, tmp_path / "r.html").read_text(encoding="utf-8")
    )
    for heading in ("Predicted against observed", "Coverage"):
        for name in ("depth", "speed"):
            assert f"{heading}: {name}" in page.text
    assert "depth, mean" in page.text and "speed, mean" in page.text


def test_the_names_of_features_reach_the_checks() -> None:
    tree = linear_tree(0.2)
    named = {"feature": ["age", "dose", "sex"]}
    for group in ("constant_data", "predictions_constant_data"):
        tree[group] = tree[group].to_dataset().assign_coords(named)
    pattern = next(
        check for check in judge_all({"it": tree})["it"].checks if check.name == "pattern"
    )
    assert pattern.status == "fail" and pattern.numbers["where"] == "age"


def test_the_headline_tells_a_scientist_what_is_wrong_and_where_it_was_seen() -> None:
    tree = linear_tree(0.5)
    trees = gather({"it": tree})
    rows = [*compare_rows(trees), *compare_rows(baselines(trees.values()))]
    numbers = {"outer": 0.5, "count": 100, "which": "held-out", "p": 1e-9}
    narrow = Check("pit", "fail", "model", 0.5, code="too_narrow", numbers=numbers)
    said = headline("it", trees["it"], Verdict.from_checks("SVI", "it", [narrow]), rows)
    assert said.startswith(
        "it: whether the draws are the posterior was not checked; the model does not fit the data: "
    )
    assert "On 100 held-out points it explains " in said
    assert "of the variance of y, and predicts worse than a linear model." in said
    exact = [
        dataclasses.replace(row, values={**row.values, "r2": 0.9996}) for row in rows
    ]  # no share is 100 %
    assert "explains over 99% of" in headline(
        "it", trees["it"], Verdict.from_checks("SVI", "it", [narrow]), exact
    )
    fine = Verdict.from_checks("SVI", "it", [Check("virial", "pass")])
    only = gather({"it": factory.numpyro_like()})["it"]
    said = headline("it", only, fine, [])
    assert said.startswith(
        "it: the draws can be relied on; whether the model fits the data was not checked."
    )
    assert said.endswith("is judged on its training data.")
    only.tree["observed_data"] = only.tree["observed_data"].to_dataset().rename(y="effect")
    assert output_names(only, 1) == ["effect"] and "effect, mean" in facts({"it": only})["target"]


def of_another_library() -> xr.DataTree:
    """What NumPyro leaves of a mean, with draws of its prior, as ArviZ's converter notes them."""
    rng = np.random.default_rng(0)
    dims = ("chain", "draw", "school")
    y = rng.normal(size=8)
    mean = 0.3 * rng.normal(size=(4, 200))
    made = mean[..., None] + rng.normal(size=(4, 200, 8))
    before = 3.0 * rng.normal(size=(1, 100, 1)) + rng.normal(size=(1, 100, 8))
    groups = {
        "posterior": xr.Dataset({"mean": (dims[:2], mean)}, attrs={"inference_library": "numpyro"}),
        "log_likelihood": xr.Dataset({"effect": (dims, -0.5 * (y - mean[..., None]) ** 2 - 0.919)}),
        "observed_data": xr.Dataset({"effect": ("school", y)}),
        "posterior_predictive": xr.Dataset({"effect": (dims, made)}),
        "prior_predictive": xr.Dataset({"effect": (dims, before)}),
    }
    return xr.DataTree.from_dict(groups)


def test_the_draws_of_another_librarys_tree_are_said_to_be_its(tmp_path):
    verdict = judge_all({"run": of_another_library()})["run"]
    assert verdict.method == "NumPyro" and verdict.draws == "pass"  # it was "unknown"


@pytest.mark.parametrize("size", [np.float32(1e30), 1e200])
def test_a_prior_too_vague_for_numbers_is_no_fault_of_the_draws(size):
    tree = of_another_library()
    tree["prior_predictive"]["effect"] = (
        tree["prior_predictive"]["effect"].astype(np.asarray(size).dtype) * size
    )
    verdict = judge_all({"run": tree})["run"]
    assert verdict.draws == "pass"


def test_few_draws_of_classes_have_replicates_enough_for_a_check():
    """Four members of an ensemble had four replicates of the data, and no posterior predictive check."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=rng)
    y = torch.randint(0, 3, (30,), generator=rng)
    with seeded(0):
        model = pb.BNN(torch.nn.Linear(2, 3), normal_prior(), pb.likelihoods.Categorical())
    draws = {
        name: torch.randn(1, 4, *site.shape(), generator=rng) for name, site in model.priors.items()
    }
    tree = pb.Posterior(
        model, draws, meta={"method": "DeepEnsemble", "kind": "independent"}
    ).to_datatree(x, y)
    assert tree["replicates"]["y"].shape == (200, 30)
    assert list(tree["posterior_predictive"].data_vars) == ["y"]
    # files of 0.2 have them beside y
    old = tree.copy()
    several = old["replicates"]["y"].rename({"replicate": "sample"})
    old["posterior_predictive"]["y_sample"] = several
    del old["replicates"]
    replicates = [Evidence(stored).replicates(whole=True)[0] for stored in (tree, old)]
    np.testing.assert_array_equal(*replicates)
    assert len(replicates[0]) == 200


def test_the_settings_are_said_in_words_and_compiling_stands_beside_the_fit(tmp_path: Path) -> None:
    tree = factory.regression_1d()
    tree.attrs |= {
        "settings": json.dumps({"num_chains": 4, "step_size": None, "compile": True}),
        "num_gradients": 797504,
        "findings": "[]",
        "log_evidence": "null",
        "interrupted": 0,
    }
    page = write_report({"nuts": tree}, tmp_path / "report.html").read_text(encoding="utf-8")
    settings = page[page.index('id="settings"') :]
    assert "<dt>settings</dt><dd>number of chains 4, compile yes</dd>" in settings
    assert "<dt>number of gradients</dt><dd>797,504</dd>" in settings
    assert "<dt>interrupted</dt><dd>no</dd>" in settings
    assert not re.search(r"null|None|[{}]|&#34;", settings[: settings.index("</section>")])
    for name in ("findings", "log evidence"):  # there are none
        assert f"<dt>{name}</dt>" not in settings
    assert '<td>1.5 <span class="se">+ 3.2</span></td>' in page
    assert "4 chains of 100 draws" in settings


@pytest.mark.parametrize("layout", ["constrained", "tight", "none", None])
def test_an_image_is_the_one_that_matplotlib_saves_and_is_drawn_once(layout):
    def figure():
        made = Figure(figsize=(5.0, 3.0), layout=layout)
        for axes in made.subplots(1, 2):
            axes.plot([0.0, 1.0, 2.0], [1e3, -1e4, 2e4], label="a long name")
            axes.set(xlabel="input", ylabel="outcome", title="title")
            axes.legend()
        return made

    saved = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pyrobnn"}):
        figure().savefig(saved, format="svg", metadata=metadata)
    drawn = figure()
    draws = []
    drawn.canvas.mpl_connect("draw_event", draws.append)
    _, _, encoded = as_image(drawn).partition("base64,")
    assert base64.b64decode(encoded) == saved.getvalue()
    assert len(draws) == 1
