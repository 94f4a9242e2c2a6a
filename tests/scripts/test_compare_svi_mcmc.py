"""The study of SVI and MCMC: its settings are today's, it runs small, goes on, and names what has not converged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from pyrobnn.cli.options import read
from pyrobnn.studies import compare

SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from svi_against_mcmc.study_cases import DATA, fresh  # noqa: E402

from pyrobnn.data import study  # noqa: E402

SCRIPT = runpy.run_path(str(SCRIPTS / "compare_svi_mcmc.py"))


@pytest.mark.parametrize("name", ["STUDY", "QUICK"])
def test_every_option_of_the_study_is_one_of_today(name, tmp_path):
    settings = yaml.safe_load(SCRIPT[name])
    file = tmp_path / "study.yaml"
    file.write_text(
        yaml.safe_dump(settings | {"data": "gap", "noise": "inferred"}, sort_keys=False)
    )
    methods = read(["--config", str(file)], "compare").methods
    assert list(methods) == list(settings["methods"])
    svi = methods["svi-study"][0]
    assert (svi.num_steps, svi.lr, svi.init_scale, svi.guide.max_scale) == (2000, 0.01, 1e-4, 2.0)
    assert (svi.kl_weight.warmup, svi.kl_weight.full) == (0.05, 0.05)
    # the study searches for no mode before it begins
    assert svi.guide.init_loc == "net"


@pytest.mark.parametrize("name", DATA)
def test_a_fresh_draw_of_a_study_has_its_clusters_and_other_points(name):
    data = fresh(name, 1000)
    ours = data.x.sort(0).values
    theirs = study(name).x.sort(0).values
    assert ours.shape == theirs.shape == (400, 1) and not torch.equal(ours, theirs)
    # the widest cluster has 200 points on 1.2, or 100 on 2.1
    torch.testing.assert_close(ours.double(), theirs.double(), atol=0.4, rtol=0.0)


@pytest.mark.slow
def test_a_small_study_runs_and_is_not_fitted_again(tmp_path, monkeypatch, capsys):
    file = tmp_path / "study.yaml"
    file.write_text(
        "data: [gap, clusters]\nnoise: [inferred, learned]\nhidden: [3]\nno_compile: true\nno_progress: true\n"
        "methods:\n  wide: {method: svi, init_scale: 0.5, num_steps: 20, num_draws: 5}\n  mle: {num_steps: 5}\n"
    )
    out = tmp_path / "out"
    words = ["--config", str(file), "--out", str(out), "--noise", "inferred", "--data", "gap"]
    words += ["--seeds", "0", "1", "--methods", "wide"]
    assert SCRIPT["main"](words) == 0
    table = pd.read_csv(out / "table.csv")
    assert list(table["method"]) == ["wide"] * 2 and list(table["seed"]) == [0, 1]
    assert table["in gap"].nunique() == 2 and " ± " in capsys.readouterr().out
    assert {"report.html", "bands.png", "wide.nc"} <= {
        each.name for each in (out / "gap-inferred-0").iterdir()
    }
    assert (out / "gaps.png").exists()
    monkeypatch.setattr(compare, "_fitted", None)  # nothing is fitted again
    assert SCRIPT["main"](words) == 0
    assert SCRIPT["main"]([*words, "--wide.num_step", "3"]) == 2


def test_what_has_not_converged_is_named(tmp_path, capsys):
    checks = [
        {"name": "rhat_function", "status": "pass"},
        {"name": "ess_function", "status": "warn"},
    ]
    assert SCRIPT["_converged"](checks) is False and SCRIPT["_converged"](checks[:1])
    assert SCRIPT["_converged"]([{"name": "khat", "status": "pass"}]) is None
    row = {"data": "gap", "noise": "inferred", "seed": 0, "verdict": "fail"}
    row |= dict.fromkeys(SCRIPT["COLUMNS"].values(), 2.0)
    rows = [
        row | {"method": "nuts", "converged": False},
        row | {"method": "svi", "converged": None},
    ]
    SCRIPT["_tell"](pd.DataFrame(rows), tmp_path)
    told = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not converged")
    ]
    assert len(told) == 1 and "nuts, gap" in told[0]
