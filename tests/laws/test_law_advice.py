"""The laws of a verdict: codes decide and words do not, a question keeps to itself, and the nearer is never worse."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from known_posteriors import classes_tree, exact_tree, healthy_svi, linear_case, linear_tree
from models import normal_prior
from pyro.infer.autoguide import AutoNormal
from test_law_likelihood import CASES

import pyrobnn as pb
from pyrobnn import likelihoods as lk
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics import wording as wording
from pyrobnn.diagnostics.check_table import TABLE
from pyrobnn.diagnostics.judge import judge_all
from pyrobnn.report.results import compare_rows
from pyrobnn.report.sentences import recommended

LIKELIHOODS = {
    f"{name} {how}": getattr(case, how)
    for name, case in CASES.items()
    for how in ("fixed", "inferred")
}
LIKELIHOODS |= {
    "gaussian learned": lambda: lk.HomoskedasticGaussian("learned"),
    "student_t half": lambda: lk.StudentT(4.0, dist.HalfNormal(1.0)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_tree_says_how_its_noise_comes_about(name):
    """What a likelihood says of itself is what its program does."""
    likelihood = LIKELIHOODS[name]()
    inferred = {site.removeprefix("likelihood.") for site in likelihood.own.priors}
    assert {part for part, how in likelihood.own.kinds.items() if how == "inferred"} == inferred


WORSE = {"pass": 0, "warn": 1, "fail": 2}


def decisions(trees):
    """All that a verdict decides, without a word: and which run is recommended."""
    verdicts = judge_all(trees)
    found = {
        label: [(c.name, c.code, c.status, c.question, c.value, c.limit) for c in verdict.checks]
        + [verdict.draws, verdict.model, verdict.status, [c.name for c in verdict.warned]]
        for label, verdict in verdicts.items()
    }
    return found, recommended(compare_rows(trees), verdicts)


def test_words_decide_nothing(monkeypatch):
    sick = exact_tree(draws=40)
    sick["function"]["f"][2:] += 1.0
    runs = [
        {"nuts": exact_tree(), "svi": healthy_svi(), "sick": sick},
        {"it": classes_tree(sharpness=4.0)},
    ]
    before = [decisions(trees) for trees in runs]
    said = str(diagnose(sick))
    for name, other in (
        ("FAULTS", "chains are biased"),
        ("SEEN", "R-hat is biased."),
        ("ACTIONS", "Run NUTS."),
    ):
        monkeypatch.setattr(wording, name, dict.fromkeys(getattr(wording, name), other))
    assert [decisions(trees) for trees in runs] == before and str(diagnose(sick)) != said


def test_whatever_can_be_found_has_words_for_a_first_line():
    informs = {"khat_undecided", "moves_undecided", "not_comparable", "reference_undecided"}
    assert {*wording.SEEN, *wording.ACTIONS} - set(wording.FAULTS) == informs


def test_the_first_line_says_in_which_direction_the_function_is_off():
    numbers = {"inverse": 0.25, "ratio": 4.0, "shift": 1.5}
    for code in ("function_moves", "beside_posterior"):
        assert wording.fault(code, numbers).endswith("too wide and centred in the wrong place")
        assert wording.fault(code, {"inverse": 2.0, "shift": 0.1}).endswith("too narrow")
        assert wording.fault(code, {"inverse": 1.0, "shift": 0.1}) == wording.FAULTS[code]
    assert wording.fault("reference", numbers | {"shift": 0.0}).endswith("being too wide")
    assert wording.fault("reference", {}) == wording.FAULTS["reference"]
    assert wording.fault("too_wide", numbers) == wording.FAULTS["too_wide"]


@pytest.mark.parametrize(
    "method",
    [pb.SVI(), pb.SVI(guide="full_rank"), pb.Laplace(), pb.SWAG(), pb.DeepEnsemble(), pb.MAP()],
)
def test_where_a_fit_can_be_refined_its_remedy_says_how(method):
    assert "posterior.refine()" in method.remedy and "--refine" in method.remedy


def test_where_a_fit_cannot_be_refined_its_remedy_does_not_say_so():
    assert "refine" not in pb.MCDropout(p=0.1).remedy


def test_the_table_is_short_and_each_row_is_whole():
    assert len(TABLE) <= 25 and len({row.code for row in TABLE}) == len(TABLE)
    assert all(row.source and row.limits and row.statistic.__doc__ for row in TABLE)


@pytest.mark.parametrize("way", [pytest.param("mean", marks=pytest.mark.slow), "sd"])
def test_the_nearer_to_an_exact_posterior_never_gets_the_worse_answer(way):
    model, data, exact = linear_case(num_data=80)
    mean = exact.mean((0, 1))
    sd = exact.std((0, 1))
    answers = []
    for far in (0.0, 0.25, 0.5, 2.0):
        spoilt = exact + far * sd if way == "mean" else mean + (exact - mean) / (1.0 + far)
        answers.append(WORSE[diagnose(linear_tree(model, data, spoilt)).draws])
    assert answers[0] == 0 and answers[-1] == 2 and answers == sorted(answers), answers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_exact_draws_of_a_rare_class_are_right_though_the_prior_matters():
    """Five positives of 500: the prior pulls; that is the model's, and no approximation is judged better for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, generator=generator)
    y = torch.zeros(500)
    y[x[:, 0].topk(5).indices] = 1.0
    with seeded(0):
        model = pb.BNN(torch.nn.Linear(2, 1), normal_prior(3.0), lk.Bernoulli())
    y = y[:, None]
    nuts = pb.NUTS(num_warmup=300).fit(model, x, y, num_draws=300, seed=0)
    laplace = pb.Laplace(num_steps=200, compile=False).fit(model, x, y, num_draws=1000, seed=0)
    exact, near = (diagnose(each.to_datatree(x, y)) for each in (nuts, laplace))
    assert exact.draws == "pass", str(exact)
    assert WORSE[near.draws] >= WORSE[exact.draws]


@pytest.mark.parametrize("guide", ["mean_field", "low_rank", "full_rank", "flow", "AutoNormal"])
def test_no_guide_is_advised_itself_or_a_poorer_one(guide):
    order = ["mean_field", "low_rank", "full_rank", "flow"]
    method = pb.SVI(
        guide=AutoNormal if guide == "AutoNormal" else guide, num_steps=5, compile=False
    )
    model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), normal_prior(), lk.HomoskedasticGaussian(0.5))
    x = torch.linspace(-1, 1, 8)[:, None]
    said = method.fit(model, x, x, num_draws=4).meta["remedy"]
    named = {each for each in order if each in said}
    assert (
        named <= set(order[order.index(guide) + 1 :] if guide in order else ()) and "NUTS" in said
    )


def test_linearised_predictions_are_advised_only_where_there_are_none():
    model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), normal_prior(), lk.HomoskedasticGaussian(0.5))
    x = torch.linspace(-1, 1, 8)[:, None]
    for predictive, said in (("linearized", False), ("draws", True)):
        laplace = pb.Laplace(predictive=predictive, num_steps=20, compile=False)
        assert ("linearised" in laplace.fit(model, x, x, num_draws=4).meta["remedy"]) == said


def test_chains_that_time_has_stopped_are_not_advised_more_draws_than_they_were_allowed():
    for draws in (3, 40):
        tree = exact_tree(draws=draws)
        assert any(each.numbers.get("more") == "num_draws" for each in diagnose(tree).checks)
        tree.attrs["stopped"] = "max_seconds"
        said = "".join(each.action for each in diagnose(tree).checks)
        assert "max_seconds" in said and "num_draws" not in said


# an advice that is followed is not refused


def numbered(line: torch.Tensor, y: torch.Tensor) -> None:
    pyro.sample("y", dist.Normal(line, 0.3), obs=y)


def whole(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        numbered(slope * x, y)


def drawn(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x), subsample_size=10) as rows:
        numbered(slope * x[rows], y[rows])


STEPS = {"num_steps": 20, "compile": False}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", [pb.MLE, pb.MAP, pb.DeepEnsemble, pb.SGLD, pb.SGHMC])
def test_a_program_takes_its_batches_as_the_refusal_says(method):
    x = torch.linspace(-1, 1, 40)
    steps = STEPS
    options = {}
    if method in (pb.SGLD, pb.SGHMC):
        steps = {"num_chains": 2, "num_warmup": 20, "init_steps": 20, "compile": False}
        options = {"num_draws": 5}
    with pytest.raises(pb.Refused, match="subsample_size=100"):
        method(batch_size=10, **steps).fit(whole, x, x, **options)
    method(**steps).fit(drawn, x, x, **options)


def test_a_program_with_a_value_for_each_row_is_told_when_it_cannot_draw_batches():
    def local(x, y=None):
        with pyro.plate("rows", len(x), subsample_size=10) as rows:
            numbered(pyro.sample("level", dist.Normal(0.0, 1.0)), y[rows])

    x = torch.linspace(-1, 1, 40)
    with pytest.raises(pb.Refused, match="no latent site has a value for each row"):
        pb.MAP(batch_size=10, **STEPS).fit(whole, x, x)
    with pytest.raises(pb.Refused, match="take out subsample_size, .* or use SVI"):
        pb.MAP(**STEPS).fit(local, x, x)
    pb.SVI(batch_size=10, **STEPS).fit(whole, x, x)
    pb.SVI(**STEPS).fit(local, x, x)


class Shaped(torch.nn.Module):
    """A linear net whose output has another shape than rows and columns."""

    def __init__(self, shape: tuple[int, ...] | None, width: int = 6):
        super().__init__()
        self.linear = torch.nn.Linear(2, width)
        self.shape = shape

    def forward(self, x: torch.Tensor):
        f = self.linear(x)
        return {"out": f} if self.shape is None else f.reshape(len(x), *self.shape)


@pytest.mark.parametrize(
    ("shape", "likelihood", "said"),
    [
        (None, lk.HomoskedasticGaussian(1.0), "return one tensor"),
        ((), lk.HomoskedasticGaussian(1.0), r"return f.reshape\(len\(x\), -1\)"),
        ((), lk.Poisson(), r"return f.reshape\(len\(x\), -1\)"),
        ((2, 3), lk.Categorical(), r"nn.Flatten\(\) and a linear layer"),
    ],
)
def test_an_output_of_another_shape_becomes_columns_as_the_error_says(shape, likelihood, said):
    with seeded(0):
        net = Shaped(shape, 1 if shape == () else 6)
        flat = torch.nn.Sequential(net, torch.nn.Flatten(), torch.nn.Linear(6, 3))
    x = torch.linspace(-1, 1, 20).reshape(10, 2)
    y = (x.sum(1, keepdim=True) > 0).float()
    classes = isinstance(likelihood, lk.Categorical)
    if classes:
        y = y[:, 0].long() + 1
    map_ = pb.MAP(polish_steps=0, **STEPS)
    with pytest.raises((ValueError, TypeError), match=said):
        map_.fit(pb.BNN(net, normal_prior(), likelihood), x, y)
    if classes:
        map_.fit(pb.BNN(flat, normal_prior(), likelihood), x, y)
        return
    net.shape = (-1,)
    columns = y.expand(10, net.linear.out_features)
    map_.fit(pb.BNN(net, normal_prior(), likelihood), x, columns)


@pytest.mark.parametrize(
    ("shape", "class_dim", "positions"),
    [((3, 2), 1, (2,)), ((3, 1, 2), 1, (1, 2)), ((2, 3), -1, (2,))],
)
def test_labels_of_every_position_are_taken_as_the_error_says(shape, class_dim, positions):
    with seeded(0):
        net = Shaped(shape)
    x = torch.linspace(-1, 1, 20).reshape(10, 2)
    y = (x > 0).long().reshape(10, *positions)
    map_ = pb.MAP(polish_steps=0, **STEPS)
    advice = f"pb.likelihoods.DenseCategorical(num_classes=3, class_dim={class_dim})"
    with pytest.raises(ValueError, match=re.escape(advice)):
        map_.fit(pb.BNN(net, normal_prior(), lk.Categorical()), x, y)
    map_.fit(pb.BNN(net, normal_prior(), lk.DenseCategorical(3, class_dim)), x, y)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_discrete_site_is_summed_out_as_the_page_says():
    x = torch.tensor([-1.0, -1.1, 0.9, 1.0])

    def summed(x, y=None):
        at = pyro.sample("at", dist.Normal(0.0, 2.0))
        terms = torch.stack([dist.Normal(sign * at, 0.3).log_prob(x) for sign in (-1.0, 1.0)])
        pyro.factor("sum", (terms.logsumexp(0) - 0.693).sum())

    def mixture(x, y=None):
        at = pyro.sample("at", dist.Normal(0.0, 2.0))
        parts = dist.Normal(torch.stack([-at, at]), 0.3)
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts), obs=x)

    for program in (summed, mixture):
        pb.SVI(**STEPS).fit(program, x)
