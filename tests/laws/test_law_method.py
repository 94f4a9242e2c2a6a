"""What a method is: the same ``fit`` as all others, a few facts, one file; and nobody asks for one by name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import test_contract as contract
import torch
import trees as factory

import pyrobnn as pb
from pyrobnn import cli
from pyrobnn.diagnostics.judge import reference_label
from pyrobnn.inference import method as methods
from pyrobnn.inference.method import OPTIONAL, Method, register
from pyrobnn.posterior.approximation import FAMILIES

pytestmark = contract.pytestmark

PACKAGE = Path(pb.__file__).parent
#: experiments about methods that they name, a surname, a start in trees of old, and what chooses
#: a method for a user of estimators
MAY_NAME = {
    "studies/sbc.py": "",
    "report/sentences.py": "Laplace",
    "diagnostics/evidence.py": "map",
    "estimators/auto.py": "",
    "estimators/empirical_bayes.py": "",
    "cli/options.py": "nuts",  # what `pyrobnn fit` runs
    "data/synthetic.py": "",  # data sets of studies of a method
    "references/reference.py": "NUTS",
}
PUBLIC = {name for name in pb.inference.__all__ if hasattr(getattr(pb, name), "fit")}


def test_every_public_method_is_registered_and_in_the_contract():
    assert len(PUBLIC) == 13
    assert {each.cls.__name__ for each in methods.METHODS.values()} == PUBLIC
    assert {type(method).__name__ for method in contract.METHODS.values()} == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_fit_has_the_same_signature(name):
    assert getattr(pb, name).fit is Method.fit


@pytest.mark.parametrize("option", OPTIONAL)
@pytest.mark.parametrize("name", contract.METHODS)
def test_an_option_without_use_is_refused_in_words(name, option):
    method = contract.METHODS[name]
    if option in method.uses:
        return
    model, y = contract.MODELS["fixed"]()
    with pytest.raises(pb.Refused, match=f"{option!r} is an option of .*, not of {type(method).__name__}"):
        method.fit(model, contract.X, y, **{option: 10.0})


@pytest.mark.parametrize("name", contract.METHODS)
def test_a_posterior_says_what_its_method_is(name):
    method, posterior = contract.METHODS[name], contract.fit(name)
    facts = {fact: posterior.meta[fact] for fact in ("kind", "claim", "remedy")}
    assert facts == {fact: getattr(method, fact) for fact in facts}
    assert posterior.meta["iid"] == (method.kind != "chains")
    assert (posterior.approximation is not None) == method.has_density
    default = dataclasses.replace(method, num_members=2) if hasattr(method, "num_members") else method
    assert default.default_draws >= 1 and method.remedy.endswith(".")


def test_nobody_outside_asks_for_a_method_by_name():
    commands = set(methods.METHODS)
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("inference/") or MAY_NAME.get(place) == "":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {
                ast.Name: lambda n: {n.id} & PUBLIC,
                ast.Attribute: lambda n: {n.attr} & PUBLIC,
                ast.alias: lambda n: {n.name} & PUBLIC,
                ast.Constant: lambda n: {str(n.value)} & (PUBLIC | commands),
            }.get(type(node), lambda n: set())(node)
            found += [f"{place}:{node.lineno} {name}" for name in names if name != MAY_NAME.get(place)]
    assert not found, found


def test_what_is_no_method_is_told_what_it_lacks():
    @dataclasses.dataclass(frozen=True)
    class Nothing:
        def fit(self, model, x=None, y=None, *, seed=0):
            return None

    with pytest.raises(TypeError, match="Nothing is no method: derive it"):
        register("nothing")(Nothing)

    class Empty(Method):
        kind, claim = "point", "none"

    with pytest.raises(TypeError, match="Empty lacks _fit"):
        register("empty")(Empty)

    class Whole(Method):
        kind, claim = "guess", "none"

        def _fit(self, *_):
            return None

    with pytest.raises(TypeError, match="Whole.kind must be one of"):
        register("whole")(Whole)

    class Own(Whole):
        kind = "point"

        def fit(self, model, x=None, y=None, *, seed=0):
            return None

    with pytest.raises(TypeError, match="Own has a fit of its own"):
        register("own")(Own)

    class Other(Whole):
        kind = "point"

    with pytest.raises(ValueError, match="'map' is the name of MAP"):
        register("map")(Other)
    assert {each.cls.__name__ for each in methods.METHODS.values()} == PUBLIC


@pytest.fixture(scope="module")
def student():
    """A foreign method, known from here to the end of this file."""
    module = importlib.import_module("foreign_method")
    yield module.StudentT
    del sys.modules["foreign_method"], methods.METHODS["student"], FAMILIES["student_t"]


LAWS = [law for name, law in vars(contract).items() if name.startswith("test_")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_foreign_method_in_one_file_obeys_the_contract(law, student, monkeypatch, tmp_path):
    monkeypatch.setitem(contract.METHODS, "StudentT", student(num_steps=50, compile=False))
    options = {"kind": "inferred", "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    law("StudentT", **{name: options[name] for name in inspect.signature(law).parameters if name in options})


@pytest.fixture
def table(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    y = x[:, 0] - x[:, 1] + 0.3 * torch.randn(60, generator=generator)
    path = tmp_path / "table.csv"
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).to_csv(path, index=False)
    return path


def test_a_foreign_method_in_one_file_is_compared_judged_reported_and_predicted_with(
    student, table, tmp_path, capsys
):
    out = tmp_path / "out"
    options = [
        "--target",
        "y",
        "--quick",
        "--no-compile",
        "--no-progress",
        "--hidden",
        "3",
        "--out",
        str(out),
    ]
    assert cli.main(["compare", "--data", str(table), "--methods", "student", "map", *options]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert set(summary["methods"]) == {"student", "map"} and "StudentT" in (out / "report.html").read_text(
        "utf-8"
    )
    saved = str(out / "student.nc")
    assert cli.main(["report", saved, "--out", str(tmp_path / "again.html")]) == 0
    assert cli.main(["predict", saved, str(table)]) == 0
    assert "sd" in capsys.readouterr().out


def test_the_verdict_on_a_foreign_method_gives_its_own_remedy(student):
    model, y = contract.MODELS["fixed"]()
    posterior = student(width=0.02, num_steps=50, compile=False).fit(model, contract.X, y, num_draws=100)
    verdict = pb.diagnose(posterior.to_datatree(contract.X, y))
    assert student.remedy in {check.action for check in verdict.checks if check.status in ("warn", "fail")}


def test_a_file_whose_family_nobody_has_registered_is_loaded_and_says_so(student, monkeypatch, tmp_path):
    model, y = contract.MODELS["fixed"]()
    path = student(num_steps=5, compile=False).fit(model, contract.X, y, num_draws=6).save(tmp_path / "p.nc")
    monkeypatch.delitem(FAMILIES, "student_t")
    with pytest.warns(UserWarning, match="family 'student_t' cannot be rebuilt here"):
        loaded = pb.Posterior.load(path, model)
    assert loaded.approximation is None and loaded.num_draws == 6


@pytest.mark.parametrize("attrs", [{"claim": "exact"}, {}], ids=["says so", "of before"])
def test_the_reference_is_the_first_run_of_exact_chains_whatever_its_name(attrs):
    chains = factory.regression_1d("Elliptical")
    for name in ("kind", "claim"):
        del chains.attrs[name]
    chains.attrs |= attrs
    others = {"svi": factory.regression_1d("SVI", iid=True), "nuts": factory.regression_1d("NUTS")}
    assert reference_label({"svi": others["svi"], "mine": chains, "nuts": others["nuts"]}) == "mine"
    chains.attrs["claim"] = "approximate"
    assert reference_label({"mine": chains, **others}) == "nuts"
