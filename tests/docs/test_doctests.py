"""Every example in a docstring runs, with the result it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from helpers import seeded

import pyrobnn

ROOT = Path(pyrobnn.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)
#: fits with all that an estimator tries, and a compile
DEAR = ("estimators.regressor", "estimators.classifier", "optim.minimize")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=pytest.mark.slow if name.endswith(DEAR) else ()) for name in MODULES],
)
def test_the_examples_of_docstrings_give_what_they_say(module, capsys):
    with seeded(0):  # an example may draw initial weights as a user would
        failed, attempted = doctest.testmod(importlib.import_module(module), optionflags=FLAGS)
    assert attempted > 0
    assert failed == 0, capsys.readouterr().out
