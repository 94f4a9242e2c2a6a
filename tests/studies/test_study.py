"""The study's two questions: is NUTS exact where the truth is known, and does it doubt where there are no data?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_mean_within, assert_var_within
from models import diabetes_linear, diabetes_model, joined

import pyrobnn as pb
from pyrobnn.cli.options import read
from pyrobnn.report.results import Results
from pyrobnn.report.sentences import beside_reference
from pyrobnn.studies.compare import run_study
from pyrobnn.studies.study import make_study


@pytest.mark.slow
def test_nuts_is_the_conjugate_posterior():
    truth = diabetes_linear()
    nuts = pb.NUTS(num_chains=8, num_warmup=150, mass_matrix="dense")
    posterior = nuts.fit(diabetes_model(), truth["x"], truth["y"], num_draws=400)
    draws = joined(posterior.draws)
    assert_mean_within(draws, truth["mean"])
    assert_var_within(draws, truth["cov"].diagonal(), mean=truth["mean"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(of the draws|transitions diverged)")
def test_nuts_doubts_in_the_gap_between_clusters(tmp_path):
    study = make_study(pb.data.clusters(), prior_scale=1.5)
    ratios = {}
    prepared = read(["--methods", "svi", "nuts"], "compare").methods
    for name, tree in run_study(study, prepared, tmp_path, progress=False):
        left, right = study.train.widest_gap()
        grid = torch.tensor(tree["grid"]["x"].values[:, 0])
        sd = torch.tensor(tree["grid"]["epistemic_var"].values[:, 0]).sqrt()
        inside = (grid[:, None] - study.train.x[:, 0]).abs().min(1).values < 0.05
        ratios[name] = float(sd[(grid - (left + right) / 2).abs().argmin()] / sd[inside].median())
    assert ratios["nuts"] >= 3.0
    assert ratios["svi"] < ratios["nuts"]


def test_an_approximation_is_refined_as_a_run_of_its_own(tmp_path):
    study = make_study(pb.data.sinusoid(num_data=30), hidden=[4])
    prepared = {"map": (pb.MAP(num_steps=50, compile=False), {})}
    runs = run_study(
        study,
        prepared,
        tmp_path,
        progress=False,
        refine=60.0,
    )
    trees = dict(runs)
    assert list(trees) == ["map", "map_refined"]
    assert {path.name for path in tmp_path.iterdir()} == {"map.nc", "map_refined.nc"}
    results = Results.of(trees)
    assert results.reference == "map_refined"
    first, second = results.rows
    assert second.values["fit_seconds"] > second.values["refine_seconds"] > 0
    # a point estimate has no spread
    assert first.values["sd_ratio"] < 1e-6 and first.values["shift"] > 0
    *doubt, sentence = beside_reference(results)
    assert sentence.startswith(
        "The function of map compared with map_refined: at the data it is off "
    )
    # a reference whose own draws are in doubt is said to be
    assert [words.startswith("The draws of map_refined did not pass") for words in doubt] == [
        True
    ] * (results.verdicts["map_refined"].draws != "pass")
    with pytest.raises(ValueError, match="'refine' must be"):
        next(run_study(study, prepared, tmp_path, refine=0.0))


@pytest.mark.slow
def test_workers_run_the_methods_of_a_study_side_by_side(tmp_path):
    study = make_study(pb.data.sinusoid(num_data=30), hidden=[4])
    methods = {
        "map": pb.MAP(num_steps=20, compile=False),
        "mle": pb.MLE(num_steps=20, compile=False),
    }
    prepared = {name: (method, {}) for name, method in methods.items()}
    here = dict(run_study(study, prepared, tmp_path / "here", progress=False))
    said: list[str] = []
    with ThreadPoolExecutor(2) as workers:
        there = dict(
            run_study(study, prepared, tmp_path / "there", announce=said.append, workers=workers)
        )
    assert list(there) == list(here) and [text.split(":")[0] for text in said] == [*methods]
    for name, tree in here.items():
        assert tree["posterior"].equals(there[name]["posterior"])
        assert (tmp_path / "there" / f"{name}.nc").exists()
