"""`judge` answers for the model alone, in every form that predictions come in, and refuses what it cannot read."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import pyrobnn as pb
from pyrobnn.cli import main
from pyrobnn.cli.saved import _coded_inputs
from pyrobnn.diagnostics.predictions import MODEL_ROWS
from pyrobnn.diagnostics.uniformity import Dependence, p_binned, p_moments

RNG = np.random.default_rng(3)
N = 300
X = RNG.normal(size=(N, 2))
F = X @ [1.0, -0.5]
Y = F + RNG.normal(size=N)
LOGITS = 2.0 * RNG.normal(size=(N, 4))
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
LABELS = (LOGITS + RNG.gumbel(size=LOGITS.shape)).argmax(axis=1)


def forms(scale: float) -> dict[str, object]:
    """The same predictions in every form, their standard deviation times a scale."""
    rng = np.random.default_rng(0)
    ppf = stats.norm.ppf
    draws = F + scale * rng.normal(size=(200, N))
    return {
        "torch": torch.distributions.Normal(torch.tensor(F), scale),
        "scipy": stats.norm(F, scale),
        "draws": draws,
        "sorted draws": np.sort(draws, axis=0),
        "ensemble of ten": draws[:10],
        "quantiles": {level: F + scale * ppf(level) for level in (0.05, 0.5, 0.95)},
    }


def powered(power: float) -> np.ndarray:
    found = PROBS**power
    return found / found.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("form", forms(1.0))
def test_right_predictions_pass_and_narrow_ones_do_not(form):
    right = pb.judge(forms(1.0)[form], Y, x=X)
    assert right.model == right.status == "pass", right.checks
    narrow = pb.judge(forms(0.6)[form], Y, x=X)
    assert "pit" in {check.name for check in (*narrow.failed, *narrow.warned)}


@pytest.mark.parametrize(
    "levels", [(0.05, 0.95), (0.05, 0.25, 0.5, 0.75, 0.95), (0.5, 0.9, 0.99), ()]
)
def test_right_predictions_have_p_values_no_smaller_than_uniform_ones(levels):
    rng = np.random.default_rng(1)
    p = np.array([p_value(rng.random(60), levels) for _ in range(120)])
    for rate in (0.02, 0.1, 0.3):
        error = np.sqrt(rate * (1.0 - rate) / len(p))
        assert (p < rate).mean() < rate + 3.0 * error
        # simulated, it is exact but for ties; of four tests in one it is not
        assert (p < rate).mean() > (rate - 3.0 * error) * bool(levels) - 0.01


def test_what_five_quantiles_say_of_skewed_errors_is_used():
    """They are too high at the lowest level, too low at the median: each by less than one test of it would see."""
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    found = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        found.append(
            p_value(stats.norm.cdf((rng.gamma(2.0, size=100) - 2.0) / np.sqrt(2.0)), levels) < 0.02
        )
    assert np.mean(found) > 0.6


def p_value(u: np.ndarray, levels: tuple[float, ...]) -> float:
    """The p-value of u, of which with levels only their bins are used."""
    return p_binned(u, levels) if levels else p_moments(u, Dependence())


def test_the_draws_are_not_checked_and_no_pass():
    verdict = pb.judge(forms(1.0)["torch"], Y, x=X)
    assert (
        not verdict.checked("draws")
        and verdict.draws != "pass"
        and "draws: not checked" in str(verdict)
    )
    assert {check.question for check in verdict.checks} == {"model"}


def test_nothing_to_judge_by_is_no_pass():
    few = pb.judge(forms(1.0)["draws"][:, :5], Y[:5])
    assert few.status == "warn" and not few.checked("model")


def test_a_wrong_mean_is_found_in_the_input_by_its_name():
    x = pd.DataFrame(X, columns=["age", "mass"])
    verdict = pb.judge(stats.norm(0.0 * F, Y.std()), Y, x=x)
    pattern = next(check for check in verdict.checks if check.name == "pattern")
    assert pattern.status == "fail" and pattern.numbers["where"] == "age"
    assert next(check for check in verdict.checks if check.name == "baseline").status == "warn"


def test_rows_of_training_are_found_and_the_line_learns_from_training():
    verdict = pb.judge(stats.norm(F, 1.0), Y, x=X, x_train=X, y_train=Y)
    assert verdict.worst("model").name == "held_out_rows" and verdict.model == "fail"
    other = np.random.default_rng(8)
    x = other.normal(size=(N, 2))
    broad = pb.judge(
        stats.norm(0.0 * F, 3.0), Y, x=X, x_train=x, y_train=x @ [1.0, -0.5] + other.normal(size=N)
    )
    assert next(check for check in broad.checks if check.name == "baseline").status == "fail"


def test_class_probabilities_are_judged_by_their_power():
    assert pb.judge(PROBS, LABELS, x=X).model == "pass"
    assert pb.judge(PROBS, np.array(list("abcd"))[LABELS]).model == "pass"
    for power in (2.0, 0.5):
        found = next(c for c in pb.judge(powered(power), LABELS).checks if c.name == "temperature")
        assert found.status == "fail" and found.value == pytest.approx(1.0 / power, rel=0.25)


@pytest.mark.slow
def test_the_power_is_tested_at_the_size_it_says(monkeypatch):
    alone = [row for row in MODEL_ROWS if row.code == "temperature"]
    monkeypatch.setattr("pyrobnn.diagnostics.predictions.MODEL_ROWS", alone)
    rng = np.random.default_rng(5)
    small = 0
    for _ in range(200):
        labels = (np.log(PROBS[:100]) + rng.gumbel(size=(100, 4))).argmax(axis=1)
        found = next(c for c in pb.judge(PROBS[:100], labels).checks if c.name == "temperature")
        small += found.numbers["p"] < 0.1
    assert stats.binomtest(small, 200, 0.1).pvalue > 1e-3


@pytest.mark.parametrize(
    ("predictions", "y", "says"),
    [
        ({0.1: F, 0.9: F - 1.0}, Y, "quantiles cross in row 0"),
        ({0.1: F[:-1], 0.9: F[:-1]}, Y, "quantile 0.1 has 299 rows and 'y' 300"),
        ({0.1: F}, Y, "two levels or more"),
        (np.full((N, 4), 0.3), LABELS, "sum to 1.2"),
        (PROBS, LABELS + 1, "labels 0 … 3"),
        (np.where(Y > 2.0, np.nan, 0.0) + np.zeros((50, 1)), Y, "holds .* NaN"),
        (np.zeros((N, 50)), Y, r"expected draws \(S, 300\)"),
        (stats.norm(F, 1.0), np.where(Y > 2.0, np.nan, Y), "'y' .*NaN"),
        (stats.norm(F, 1.0), np.where(Y > 2.0, "hot", "cold"), "'y' holds words"),
        ({"mean": F, "sd": F}, Y, "two levels or more"),
        ({0.1: F, "0.1": F}, Y, "two levels or more"),
        (0.5 + 0.0 * Y, np.where(Y > 2.0, None, "cold"), "missing labels"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(predictions, y, says):
    with pytest.raises(ValueError, match=says) as refused:
        pb.judge(predictions, y)
    assert "\n" not in str(refused.value)


def shuffled(places: list[int], names: list[object]) -> pd.DataFrame:
    return pd.DataFrame(PROBS[:, places], columns=[names[place] for place in places])


@pytest.mark.parametrize(
    ("predictions", "y"),
    [
        (shuffled([2, 0, 3, 1], list("dbca")), np.array(list("dbca"))[LABELS]),
        (shuffled([2, 0, 3, 1], ["p_d", "p_b", "p_c", "p_a"]), np.array(list("dbca"))[LABELS]),
        (shuffled([2, 0, 3, 1], [0, 1, 2, 3]), LABELS),
        (shuffled([2, 0, 3, 1], [1, 2, 3, 4]), LABELS + 1.0),
        (shuffled([0], ["p_0"]), np.where(LABELS == 0, 0, 1)),
        (shuffled([0], ["p_no"]), np.where(LABELS == 0, "no", "yes")),
        (pd.DataFrame(PROBS[:, 0]), LABELS == 0),
    ],
)
def test_columns_of_probabilities_are_those_of_the_labels_they_name(predictions, y):
    """In whatever order the columns stand, the score is that of the labels."""
    found = next(c for c in pb.judge(predictions, y).checks if c.name == "baseline").numbers["own"]
    own = predictions.shape[1] > 1
    expected = np.log(
        PROBS[np.arange(N), LABELS]
        if own
        else np.where(LABELS == 0, PROBS[:, 0], 1.0 - PROBS[:, 0])
    )
    assert found == pytest.approx(expected.mean())


def test_a_class_that_no_row_has_may_have_a_column():
    seen = LABELS != 1
    words = np.array(list("abcd"))[LABELS]
    assert pb.judge(pd.DataFrame(PROBS[seen], columns=list("abcd")), words[seen]).checked("model")


@pytest.mark.parametrize(
    "law", ["scalar torch", "scalar scipy", "column scipy", "independent", "no icdf"]
)
def test_a_law_of_any_shape_is_that_of_its_rows(law):
    y = np.random.default_rng(0).standard_t(5, size=N)
    t = torch.distributions.StudentT
    zeros = torch.zeros(N, 1)
    laws = {
        "scalar torch": t(5.0, 0.0, 1.0),
        "scalar scipy": stats.t(5),
        "column scipy": stats.t(5, np.zeros((N, 1))),
        "independent": torch.distributions.Independent(t(5.0, zeros, 1.0), 1),
        "no icdf": t(5.0, zeros, 1.0),
    }
    reference = pb.judge(stats.t(5, np.zeros(N)), y)
    for found, expected in zip(pb.judge(laws[law], y).checks, reference.checks, strict=True):
        assert (found.name, found.status) == (expected.name, expected.status)
        assert found.name != "baseline" or found.numbers["own"] == pytest.approx(
            expected.numbers["own"], rel=0.02
        )


def test_a_mean_with_its_sd_is_not_two_draws():
    with pytest.raises(TypeError, match=r"scipy.stats.norm\(mean, sd\)"):
        pb.judge((F, np.ones(N)), Y)
    with pytest.raises(TypeError, match="must be frozen"):
        pb.judge(stats.norm, Y)


def test_few_rows_are_said_to_be_few():
    (check,) = pb.judge(stats.norm(F[:5], 1.0), Y[:5]).checks
    assert "20 rows or more" in check.action and "tree" not in str(check)


@pytest.mark.parametrize(
    "form", ["quantiles", "SciPy's counts", "classes", "counts", "draws of counts"]
)
def test_what_is_randomised_is_not_what_drew_the_data(form):
    """Inputs of the commonest seed, in the first numbers of its generator, are no pattern of right predictions."""
    n = 400
    width = 2 if form == "classes" else 1
    x = torch.tensor(np.random.default_rng(0).uniform(size=(n, width)))
    if form in ("counts", "draws of counts"):
        x = torch.rand(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rate = torch.exp(0.3 * x[:, 0] - 0.5)
    others = np.random.default_rng(5)
    counts = others.poisson(rate)
    if form == "quantiles":
        y = x[:, 0].numpy() + others.normal(size=n)
        predictions = {
            level: x[:, 0].numpy() + stats.norm.ppf(level) for level in (0.05, 0.5, 0.95)
        }
    elif form == "classes":
        predictions = torch.sigmoid(x[:, 0] - 0.5)
        y = (others.uniform(size=n) < predictions.numpy()).astype(int)
    elif form == "counts":
        predictions = pb.Prediction(rate.log()[None, None, :, None], pb.likelihoods.Poisson(), {})
        y = counts[:, None]
    else:
        y = counts
        predictions = stats.poisson(rate.numpy())
        if form == "draws of counts":
            predictions = predictions.rvs((200, n), random_state=6)
    (pattern,) = (
        check for check in pb.judge(predictions, y, x=x).checks if check.name == "pattern"
    )
    assert pattern.status == "pass" and pattern.value < 0.2, pattern.evidence


def test_a_pass_names_what_was_looked_at_and_no_fault():
    """Right predictions: no line says that outcomes lie beside them, or that neighbouring errors agree."""
    for check in pb.judge(forms(1.0)["torch"], Y, x=X).checks:
        assert check.status == "pass" and not re.search(
            "above or below|agree|misses|not calibrated", check.evidence
        )


def test_assert_calibrated_passes_right_quantiles_and_raises_on_narrow_ones():
    assert pb.testing.assert_calibrated(forms(1.0)["quantiles"], Y, strict=True).model == "pass"
    with pytest.raises(AssertionError, match="fall outside their 90 % interval"):
        pb.testing.assert_calibrated(forms(0.5)["torch"], Y)
    with pytest.raises(AssertionError, match="not checked"):
        pb.testing.assert_calibrated(forms(1.0)["draws"][:, :5], Y[:5])


def test_the_command_line_judges_a_file_and_writes_a_page(tmp_path, capsys):
    table = pd.DataFrame(
        {"y": Y, "age": X[:, 0], "kind": np.where(X[:, 1] > 0, "a", "b"), "m": F, "s": 1.0}
    )
    for level in (5, 50, 95):
        table[f"q{level:02}"] = F + stats.norm.ppf(level / 100)
    file = tmp_path / "made.csv"
    out = tmp_path / "out"
    table.to_csv(file, index=False)
    given = ["judge", str(file), "--target", "y"]
    assert (
        main(
            [
                *given,
                "--quantiles",
                "q05",
                "q50",
                "q95",
                "--features",
                "age",
                "kind",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert "model: pass" in capsys.readouterr().out
    assert json.loads((out / "verdict.json").read_text())["model"] == "pass"
    page = (out / "report.html").read_text()
    assert "Coverage" in page and "Not drawn" not in page and "posterior?" in page
    stray = np.where(np.arange(len(Y)) == 2, "x", "-9")
    table.assign(s=0.5, stray05=stray, inf05=np.where(np.arange(len(Y)) == 2, np.inf, -9.0)).to_csv(
        file, index=False
    )
    assert main([*given, "--mean", "m", "--sd", "s"]) == 1
    capsys.readouterr()
    for wrong, says in (
        (["--mean", "m"], "--mean with --sd"),
        (["--quantiles", "age", "q95"], "names no level"),
        (["--mean", "m", "--sd", "z"], "no column 'z'"),
        (["--mean", "kind", "--sd", "s"], "made.csv: column 'kind' holds text such as "),
        (
            ["--quantiles", "stray05", "q95"],
            "made.csv: column 'stray05' holds numbers but for 1 of 300 cells, first 'x'",
        ),
        (["--probabilities", "kind", "s"], "made.csv: column 'kind' holds text such as "),
        (
            ["--quantiles", "q05", "q95", "--features", "AGE"],
            "has no column 'AGE', did you mean 'age'?",
        ),
        (["--quantiles", "inf05", "q95"], "infinite values in row 3"),
        (["--draws", "m"], "two are needed"),
        (["--mean", "m", "--sd", "s", "--features", "age", "y"], "'y' is the target"),
    ):
        assert main([*given, *wrong]) == 2
        error = capsys.readouterr().err
        assert says in error and len(error.splitlines()) == 1


def test_a_category_has_one_number_in_both_tables():
    """The training rows know a kind that comes first and that no row to be judged has."""
    tables = {
        "x": pd.DataFrame({"kind": ["b", "c"]}),
        "x_train": pd.DataFrame({"kind": ["a", "c", "b"]}),
    }
    numbers = {name: frame["kind"].tolist() for name, frame in _coded_inputs(tables, "y").items()}
    assert numbers == {"x": [1.0, 2.0], "x_train": [0.0, 2.0, 1.0]}
