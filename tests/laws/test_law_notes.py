"""The law of notes: what a fit warns of, it keeps in ``meta["warnings"]``, and the other way round; each once."""

from __future__ import annotations

import dataclasses
import warnings

import pyro.distributions as dist
import pytest
import torch
from models import normal_prior, toy_net
from test_contract import FEW, METHODS, NO_POINTS, X, Y, num_draws, one_of_each_kind

import pyrobnn as pb
from pyrobnn.core.findings import FINDINGS, SENTENCES, Finding, as_json
from pyrobnn.inference.mc_dropout import CAVEAT
from pyrobnn.inference.optim.minimize import Result

HELD = "do not depend on the data"


def told(method, model, *data, **options) -> tuple[pb.Posterior, list[str]]:
    """The posterior, and every text that was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.fit(model, *data, seed=0, **options)
    assert {warning.filename for warning in caught} <= {
        __file__
    }  # the caller's line, whatever lies between
    return posterior, [str(warning.message) for warning in caught]


def model_of(scale="learned", net=None) -> pb.BNN:
    return pb.BNN(net or toy_net(), normal_prior(), pb.likelihoods.HomoskedasticGaussian(scale))


def loader() -> torch.utils.data.DataLoader:
    # drops the last batch, of which a note is made
    data = torch.utils.data.TensorDataset(X, Y)
    return torch.utils.data.DataLoader(data, batch_size=len(X) // 2 + 1, drop_last=True)


CASES = {"tensors": lambda: (X, Y), "loader": lambda: (loader(),), "few": lambda: (X[:3], Y[:3])}


@pytest.mark.covering(2)
@pytest.mark.parametrize("case", ["tensors", "few", pytest.param("loader", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_of_each_kind(fast=FEW - {"SGLD"}))
def test_what_is_warned_of_is_kept_and_what_is_kept_was_warned_of_once(name, case):
    model = model_of(dist.HalfNormal(1.0) if name in NO_POINTS else "learned")
    posterior, said = told(METHODS[name], model, *CASES[case](), **num_draws(name))
    kept = [
        text for text in posterior.meta["warnings"] if text != CAVEAT
    ]  # stands in the docstring, for every fit
    assert sorted(said) == sorted(kept)
    assert len(set(kept)) == len(kept)
    if case == "loader":
        assert said


@pytest.mark.filterwarnings("ignore:'likelihood.scale'")
@pytest.mark.parametrize("name", sorted(NO_POINTS))
def test_a_point_parameter_is_refused_where_it_cannot_be_held(name):
    with pytest.raises(
        pb.Refused, match="'likelihood.scale': a point parameter has no prior .*HalfNormal"
    ):
        METHODS[name].fit(model_of(), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each_kind(["NUTS", "SGLD", "SGHMC"], {"NUTS"}))
def test_a_point_parameter_that_nobody_fitted_is_told(name):
    begun = {"num_warmup": 3} if name == "NUTS" else {"num_warmup": 3, "init_steps": 3}
    method = dataclasses.replace(METHODS[name], **begun)
    fitted = pb.MAP(num_steps=50, polish_steps=0, compile=False).fit(model_of(), X, Y)
    members = METHODS["DeepEnsemble"].fit(model_of(), X, Y)
    hidden = pb.BNN(
        toy_net(),
        pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide=["2.bias"]),
        pb.likelihoods.HomoskedasticGaussian(0.2),
    )
    for model, init, expected in (
        (model_of(), None, "'likelihood.scale'"),
        (model_of(), fitted, None),
        (model_of(), members, None),
        (model_of(dist.HalfNormal(1.0)), None, None),
        (hidden, None, "'net.2.bias'"),
        (hidden, toy_net(), None),
    ):
        posterior, said = told(method, model, X, Y, init=init, num_draws=6)
        found = [text for text in said if HELD in text]
        assert len(found) == (expected is not None)
        assert expected is None or found[0].startswith(expected)


def test_the_notes_of_a_search_are_those_of_the_fit_that_began_with_it(monkeypatch):
    seen = "found on the way"
    monkeypatch.setattr(Result, "notes", lambda result, method: [seen])
    posterior, said = told(METHODS["Laplace"], model_of(), X, Y, num_draws=6)
    assert said.count(seen) == posterior.meta["warnings"].count(seen) == 1
    assert not [text for text in said if HELD in text]  # the mode has fitted the noise


def test_every_code_has_one_question():
    assert sorted(code for codes in FINDINGS.values() for code in codes) == sorted(SENTENCES)


@pytest.mark.slow
def test_the_verdict_says_what_the_fit_found_of_its_draws_and_of_nothing_else():
    posterior, _ = told(METHODS["SVI"], model_of(0.2), X, Y, num_draws=6)

    def warned(**kept):
        meta = {name: value for name, value in posterior.meta.items() if name != "findings"} | kept
        checks = pb.diagnose(dataclasses.replace(posterior, meta=meta).to_datatree(X, Y)).checks
        return next((check for check in checks if check.code == "fit_warned"), None)

    rounded = Finding("prior_averaged")
    others = [
        Finding("loader_epoch", {"drawn": 8, "size": 4, "points": 8, "num_data": 4}),
        Finding("one_island"),
    ]
    found = warned(findings=as_json([*others, rounded]), warnings=[*map(str, others), str(rounded)])
    assert found.status == "warn" and found.value == 1.0 and str(rounded) in found.evidence
    assert warned(findings=as_json(others), warnings=list(map(str, others))) is None
    # a file of 0.2.0 holds sentences alone
    found = warned(warnings=["the noise is too small.", "b"])
    assert found.value == 2.0 and "the noise is too small" in found.evidence
    assert warned(warnings=[]) is None


@pytest.mark.parametrize(
    "seen", [{"steps": 9}, {"fall": 3.0, "limit": 0.1}, {"gain": 2.0, "limit": 0.1}]
)
def test_an_unfinished_search_is_told_whatever_shows_it(seen):
    """A fall without a gain ended every short fit by a TypeError."""
    shown = next(iter(seen.values()))
    assert f"{shown:.3g}" in str(Finding("search_unfinished", seen))
