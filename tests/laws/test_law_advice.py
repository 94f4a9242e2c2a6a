"""The law of advice: no check advises what a model, a method or a run has already."""

from __future__ import annotations

import json
import re

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from known_posteriors import classes_tree, exact_tree
from models import normal_prior
from pyro.infer.autoguide import AutoNormal
from test_law_likelihood import CASES

import pyrobnn as pb
from pyrobnn import likelihoods as lk
from pyrobnn.diagnostics import diagnose
from pyrobnn.diagnostics.advice import Advice
from pyrobnn.groups import CONSTANT_DATA, HELD_OUT, POSTERIOR_PREDICTIVE, PREDICTIONS

LIKELIHOODS = {
    f"{name} {how}": getattr(case, how) for name, case in CASES.items() for how in ("fixed", "inferred")
}
LIKELIHOODS |= {
    "gaussian learned": lambda: lk.HomoskedasticGaussian("learned"),
    "student_t half": lambda: lk.StudentT(4.0, dist.HalfNormal(1.0)),
}
#: words of an action → whether what they ask for is so already, of the advised
HAS = {
    r"[Ii]nfer the noise|noise be inferred": lambda noise, task, exact: (
        not {"fixed", "learned"} & {how for name, how in noise.items() if name != "df"}
    ),
    r"degrees of freedom be inferred": lambda noise, task, exact: noise.get("df") == "inferred",
    r"[Hh]eteroskedastic": lambda noise, task, exact: "by input" in noise.values(),
    r"[Hh]eav\w+-tailed likelihood": lambda noise, task, exact: "df" in noise,
    r"NegativeBinomial": lambda noise, task, exact: task == "negative_binomial",
    r"more components": lambda noise, task, exact: task != "mixture_density",
    r"richer (posterior|approximation|guide)|[Rr]un NUTS": lambda noise, task, exact: exact,
    r"prior on the noise": lambda noise, task, exact: not noise,
}


def already(text: str, noise: dict[str, str], task: str, exact: bool) -> list[str]:
    return [words for words, has in HAS.items() if re.search(words, text) and has(noise, task, exact)]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_nothing_is_advised_of_the_noise_that_the_likelihood_has(name, exact):
    likelihood = LIKELIHOODS[name]()
    advice = Advice(likelihood.noise, likelihood.task, exact)
    for text in (advice.intervals("narrow"), advice.intervals("wide"), advice.tails(), advice.by("x")):
        assert not already(text, likelihood.noise, likelihood.task, exact), text
        assert re.fullmatch(r"[A-Z][^:]+: \w[^:]+[\w)]\.?", text), text


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_tree_says_how_its_noise_comes_about(name):
    """What a likelihood says of itself is what its program does."""
    likelihood = LIKELIHOODS[name]()
    inferred = {site.removeprefix("likelihood.") for site in likelihood.priors}
    assert {part for part, how in likelihood.noise.items() if how == "inferred"} == inferred
    assert ("by input" in likelihood.noise.values()) == (likelihood.heads > 1)


def widened(tree, by):
    """The tree with replicates `by` times as far from their mean, a number or one for each point."""
    for group, x in ((PREDICTIONS, HELD_OUT), (POSTERIOR_PREDICTIVE, CONSTANT_DATA)):
        y = tree[group]["y"]
        factor = by(tree[x]["x"].values[:, 0]) if callable(by) else by
        mean = y.values.mean(axis=(0, 1))
        tree[group] = tree[group].to_dataset().assign(y=(y.dims, mean + factor * (y.values - mean)))
    return tree


FAULTS = {
    "narrow": lambda: widened(exact_tree(), 0.4),
    "wide": lambda: widened(exact_tree(), 3.0),
    "by region": lambda: widened(exact_tree(), lambda x: np.where(x < 0.0, 0.1, 10.0)),
    "classes": lambda: classes_tree(sharpness=4.0),
    "another": exact_tree,
}
NOISES = {
    "exact": ({"scale": "inferred"}, {"df": "fixed", "scale": "inferred"}),
    "approximate": ({"scale": "by input"}, {"df": "inferred", "scale": "learned"}),
}


@pytest.mark.parametrize(("claim", "noise"), [(claim, noise) for claim in NOISES for noise in NOISES[claim]])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_action_of_a_verdict_advises_what_is_so(fault, noise, claim):
    tree, reference = FAULTS[fault](), None
    if fault == "another":
        reference, f = exact_tree(), tree["function"]["f"]
        tree["function"] = tree["function"].to_dataset().assign(f=(f.dims, 0.2 * f.values + 1.0))
    task = tree.attrs["likelihood"] if "df" not in noise else "student_t"
    method = pb.NUTS if claim == "exact" else pb.SVI
    tree.attrs |= {"claim": claim, "noise": json.dumps(noise), "likelihood": task, "remedy": method.remedy}
    spoken = [each for each in diagnose(tree, reference=reference).checks if each.status in ("warn", "fail")]
    assert any(each.action for each in spoken)
    for each in spoken:
        assert not already(each.action, noise, task, claim == "exact"), each


def test_the_action_says_where_errors_differ_before_that_they_differ():
    tree = FAULTS["by region"]()
    failed = [each.name for each in diagnose(tree).failed if each.name != "log_likelihood_scale"]
    assert {"coverage_by_region", "pit"} <= set(failed) and failed[0] == "coverage_by_region"


@pytest.mark.parametrize("guide", ["mean_field", "low_rank", "full_rank", "flow", "AutoNormal"])
def test_no_guide_is_advised_itself_or_a_poorer_one(guide):
    order = ["mean_field", "low_rank", "full_rank", "flow"]
    method = pb.SVI(guide=AutoNormal if guide == "AutoNormal" else guide, num_steps=5, compile=False)
    model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), normal_prior(), lk.HomoskedasticGaussian(0.5))
    x = torch.linspace(-1, 1, 8)[:, None]
    said = method.fit(model, x, x, num_draws=4).meta["remedy"]
    named = {each for each in order if each in said}
    assert named <= set(order[order.index(guide) + 1 :] if guide in order else ()) and "NUTS" in said


def test_linearised_predictions_are_advised_only_where_there_are_none():
    model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), normal_prior(), lk.HomoskedasticGaussian(0.5))
    x = torch.linspace(-1, 1, 8)[:, None]
    for predictive, said in (("linearized", False), ("draws", True)):
        laplace = pb.Laplace(predictive=predictive, num_steps=20, compile=False)
        assert ("linearised" in laplace.fit(model, x, x, num_draws=4).meta["remedy"]) == said


def test_chains_that_time_has_stopped_are_not_advised_more_draws_than_they_were_allowed():
    for draws in (3, 40):
        tree = exact_tree(draws=draws)
        assert "num_draws" in "".join(each.action for each in diagnose(tree).checks)
        tree.attrs["stopped"] = "max_seconds"
        said = "".join(each.action for each in diagnose(tree).checks)
        assert "max_seconds" in said and "num_draws" not in said
