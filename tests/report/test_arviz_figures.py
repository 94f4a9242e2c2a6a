"""ArviZ's figures in a report of chains: folded away, by question, of few quantities; and a page without them."""

from __future__ import annotations

import re

import matplotlib
import numpy as np
import pytest
import torch
import trees as factory
import xarray as xr

import pyrobnn as pb
from pyrobnn.diagnostics.evidence import Evidence
from pyrobnn.report import arviz_figures, write_report

OF_DRAWS, OF_MODEL = arviz_figures.SPECS
SECTION = re.compile(r'<section class="fold" aria-labelledby="arviz">.*?</section>', re.DOTALL)


def needs_arviz_plots():
    return pytest.mark.skipif(
        not arviz_figures.are_installed(), reason="needs the extra 'arviz' before Python 3.12"
    )


@pytest.fixture(scope="module")
def runs():
    return {
        "nuts": factory.regression_1d(),
        "svi": factory.regression_1d("SVI", iid=True, seed=3),
        "map": factory.point_estimate(),
    }


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    path = write_report(runs, tmp_path_factory.mktemp("page") / "report.html")
    return path.read_text(encoding="utf-8")


def folds_of(tree):
    return {
        fold.question: fold.titles.split(", ")
        for fold in arviz_figures.build_folds({"it": Evidence(tree)})
    }


@needs_arviz_plots()
def test_the_figures_of_chains_are_folded_away_in_the_order_of_the_questions(page):
    (section,) = SECTION.findall(page)
    folds = re.findall(r"<details( open)?>\s*<summary><b>(\w+)</b> ([^<]+?) <", section)
    assert folds == [("", "nuts", OF_DRAWS), ("", "nuts", OF_MODEL)]
    headings = re.findall(r"<h4>(.+?)</h4>", section)
    titles = [spec.title for specs in arviz_figures.SPECS.values() for spec in specs]
    assert headings == titles and len(titles) == 7
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', section)
    assert len(images) == 7 and all(len(svg) > 10_000 and len(alt) > 60 for svg, alt in images)
    assert "pip install" not in section and "Not drawn" not in section


@needs_arviz_plots()
def test_what_is_drawn_is_identified_and_the_worst_comes_first():
    tree = factory.regression_1d()
    f = tree["function"].to_dataset()["f"].copy()
    f[3, :, 2, 0] += 5.0  # one chain is elsewhere at one input
    tree["function"]["f"] = f
    shown = list(arviz_figures.shown_quantities(Evidence(tree)))
    assert shown[:2] == ["log density", "likelihood.scale"] and len(shown) == 4
    assert shown[2].endswith("#2") and not any("weight" in name for name in shown)


@needs_arviz_plots()
def test_matplotlib_is_left_as_it_was(runs):
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    opened = plt.figure().number
    assert folds_of(runs["nuts"])
    assert plt.get_fignums() == [opened] and dict(matplotlib.rcParams) == before
    plt.close("all")


@needs_arviz_plots()
def test_a_run_is_drawn_as_far_as_it_goes():
    rng = np.random.default_rng(0)
    draws = xr.Dataset({"a/b": (("chain", "draw"), rng.normal(size=(2, 50)))})
    sites = {"posterior": draws.rename({"a/b": "w"})}
    assert folds_of(xr.DataTree.from_dict(sites)) == {OF_DRAWS: ["Trace", "Rank", "Forest"]}
    one_chain = {"posterior": sites["posterior"].isel(chain=[0])}
    assert folds_of(xr.DataTree.from_dict(one_chain)) == {OF_DRAWS: ["Trace", "Forest"]}
    # labels have neither a density nor a place in one
    of_classes = folds_of(factory.classification())
    assert not {"LOO-PIT", "Posterior predictive check"} & set(of_classes.get(OF_MODEL, []))


@needs_arviz_plots()
def test_a_figure_that_arviz_cannot_draw_says_why(runs, monkeypatch):
    import arviz_plots

    def fail(*arguments, **options):
        raise RuntimeError("no <ink>")

    monkeypatch.setattr(arviz_plots, "plot_trace", fail)
    fold = arviz_figures.build_folds({"nuts": Evidence(runs["nuts"])})[0]
    assert fold.blocks[0].note == "Not drawn: RuntimeError: no <ink>."
    assert not fold.blocks[0].image and fold.blocks[1].image


def test_without_arvizs_plots_a_line_says_how_to_get_them_and_nothing_else_changes(
    runs, page, monkeypatch, tmp_path
):
    monkeypatch.setattr(arviz_figures, "find_spec", lambda name: None)
    bare = write_report(runs, tmp_path / "bare.html").read_text(encoding="utf-8")
    (section,) = SECTION.findall(bare)
    assert "pip install arviz-plots" in section and "<details" not in section
    assert SECTION.sub("", bare) == SECTION.sub("", page)
    of_approximations = {"svi": runs["svi"]}
    assert "arviz" not in write_report(of_approximations, tmp_path / "svi.html").read_text("utf-8")


@pytest.mark.usefixtures("few_moves")
@needs_arviz_plots()
def test_arviz_draws_outcomes_of_a_method_of_few_draws():
    """Replicates beside ``y``, along a dimension that ArviZ stacks chains and draws as, were an error of its plots."""
    import arviz_base
    import arviz_plots
    import matplotlib.pyplot as plt

    rng = np.random.default_rng(0)
    x = torch.linspace(-1, 1, 30)[:, None]
    y = torch.sin(3 * x) + 0.2 * torch.as_tensor(rng.normal(size=(30, 1)), dtype=torch.float32)
    model = pb.BNN(
        pb.networks.mlp(1, (3,), seed=0),
        pb.priors.FanInNormal(1.0),
        pb.likelihoods.HomoskedasticGaussian(0.2),
    )
    few = pb.DeepEnsemble(num_members=4, num_steps=20, compile=False)
    tree = few.fit(model, x, y, seed=0).to_datatree(x, y, test=(x, y))
    drawn = arviz_plots.plot_ppc_dist(tree, num_samples=4, backend="matplotlib")
    plt.close(drawn.viz["figure"].item())
    assert list(drawn.viz["plot"].data_vars) == ["y"]
    for group in ("posterior_predictive", "predictions"):
        assert arviz_base.extract(tree, group=group).sizes["sample"] == 4
