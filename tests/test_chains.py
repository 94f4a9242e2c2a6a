"""R-hat and effective sample sizes equal ArviZ's, and are computed in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import arviz_stats
import numpy as np
import pytest
import scipy.signal
import xarray as xr

import pyrobnn
from pyrobnn.core.chains import ess, rhat


@pytest.mark.parametrize("shape", [(40, 4, 1000), (9, 2, 101), (5, 3, 7)])
def test_rhat_of_many_quantities_is_that_of_arviz(shape):
    rng = np.random.default_rng(0)
    draws = rng.normal(size=shape) + 0.3 * rng.normal(size=(*shape[:2], 1))
    coarse = np.round(draws, 1)
    held = np.repeat(draws, 3, axis=2)
    still = np.zeros(shape)
    apart = np.zeros(shape)
    apart[:, 0] = 1.0
    for values in (
        draws,
        draws.astype(np.float32),
        coarse,
        held,
        np.sign(draws),
        draws.cumsum(-1),
        still,
        apart,
    ):
        data = xr.Dataset({"w": (("quantity", "chain", "draw"), values.astype(np.float64))})
        with np.errstate(all="ignore"):
            theirs = arviz_stats.rhat(data)["w"].values
        np.testing.assert_allclose(rhat(values), theirs, rtol=1e-12)


@pytest.mark.parametrize("correlation", [0.999, 0.7, 0.0, -0.8])
@pytest.mark.parametrize("shape", [(4, 300), (3, 101), (1, 64), (2, 7), (4, 4)])
def test_effective_sample_sizes_are_those_of_arviz(shape, correlation):
    noise = np.random.default_rng(3).normal(size=(40, *shape))
    draws = scipy.signal.lfilter([1.0], [1.0, -correlation], noise, axis=2)
    draws[:5] += 2.0 * np.arange(shape[0])[:, None]  # chains that disagree
    draws[5:10] = draws[5:10].round()  # ties
    draws[10] = 1.0
    draws[11, 0, 0] = np.nan
    data = xr.Dataset({"w": (("quantity", "chain", "draw"), draws)})
    for ours, theirs in (
        (ess(draws, "mean"), arviz_stats.ess(data, method="mean")),
        (ess(draws), arviz_stats.ess(data, method="bulk")),
        (ess(draws, "tail"), arviz_stats.ess(data, method="tail", prob=(0.05, 0.95))),
    ):
        np.testing.assert_allclose(ours, theirs["w"].values, rtol=1e-9)


def test_what_is_not_finite_has_neither_and_short_chains_are_refused():
    draws = np.random.default_rng(0).normal(size=(2, 4, 50))
    draws[1, 0, 3] = np.inf
    for found in (rhat(draws), ess(draws), ess(draws, "tail"), ess(draws, "mean")):
        assert np.isfinite(found).tolist() == [True, False]
    with pytest.raises(ValueError, match="at least 4 draws"):
        rhat(draws[..., :3])


def test_no_other_file_computes_them():
    """Calls of ArviZ's, and of anything else named so, stand in one file."""
    names = {"rhat", "ess", "rhat_nested", "_rhat", "_ess"}
    found = set()
    for path in Path(pyrobnn.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        made = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} & names
        called = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if getattr(node.func.value, "id", "") in ("arviz_stats", "array_stats", "az")
        } & names
        if made | called:
            found.add(path.name)
    assert found == {"chains.py"}


@pytest.mark.slow
def test_the_first_draws_of_a_fit_do_not_wait_for_arviz():
    code = """if True:
        import sys, torch, pyro, pyro.distributions as dist, pyrobnn as pb
        program = lambda x, y: pyro.sample("z", dist.Normal(0.0, 1.0))
        pb.NUTS(num_warmup=200, num_chains=2, max_tree_depth=3, compile=False).fit(program, num_draws=5, progress=False)
        assert "arviz_stats" not in sys.modules"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
