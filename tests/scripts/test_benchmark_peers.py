"""The peers' benchmark: scores of known answers, and a peer that fails is told."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pyrobnn.studies.uci import read_records

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import benchmark_peers as peers  # noqa: E402
import readme_tables  # noqa: E402


def known(sd=0.3, shift=0.0, num_new=500):
    """A problem whose function is N(0, sd²) at every input, its targets with the noise on top."""
    generator = np.random.default_rng(0)
    points = num_new + len(peers.AT_DATA) + len(peers.IN_GAP)
    y = np.hypot(sd, peers.NOISE) * generator.standard_normal(num_new)
    return {"y_new": y}, {"mean": np.full(points, shift), "var": np.full(points, sd**2)}


def test_scores_of_a_known_answer():
    data, answer = known()
    exact = peers.score(answer, data, {"gap sd": 0.6})
    assert exact["coverage"] == pytest.approx(peers.LEVEL, abs=5 * (0.09 / 500) ** 0.5)
    assert exact["gap sd / reference"] == pytest.approx(0.5, rel=1e-4) and "ess" not in exact
    spread = 0.3**2 + peers.NOISE**2
    expected = -0.5 * (np.log(2 * np.pi * spread) + (data["y_new"] ** 2).mean() / spread)
    assert exact["log_density"] == pytest.approx(expected, abs=1e-4)
    narrow = peers.score(answer | {"var": answer["var"] / 100}, data, None)
    assert narrow["coverage"] < exact["coverage"] - 0.1 and narrow["log_density"] < exact["log_density"]
    # the same as draws
    f = 0.3 * np.random.default_rng(1).standard_normal((4, 100, len(answer["mean"])))
    drawn = peers.score({"f": f}, data, {"gap sd": 0.6})
    assert drawn["log_density"] == pytest.approx(exact["log_density"], abs=0.02)
    assert drawn["gap sd / reference"] == pytest.approx(0.5, rel=0.1)
    assert drawn["ess"] > 200 and drawn["rhat"] < 1.05
    # a net's own noise counts instead of the known one
    assert peers.score({"f": f, "noise": np.full_like(f, 2.0)}, data, None)["coverage"] == 1.0


def test_a_peer_that_fails_is_a_row_that_says_so(tmp_path, monkeypatch, capsys):
    data, answer = known()
    monkeypatch.setattr(
        peers,
        "FITS",
        {"missing": ("missing", None), "broken": (None, None), "wild": (None, None), "right": (None, None)},
    )
    monkeypatch.setattr(
        peers, "reference_scores", lambda _: {"name": "reference", "scores": {"gap sd": 0.3}} | cost
    )
    cost = {"commit": "c0ffee", "cpu": 1.0}
    monkeypatch.setattr(peers, "problem", lambda: data)

    def environment(package, folder):
        raise RuntimeError(f"pip could not install {package}: no | such thing")

    def fit(python, name, *_):
        if name == "broken":
            raise RuntimeError("AttributeError: gone in the newest release")
        if name == "wild":
            return {"f": np.full((1, 1, 3), np.nan), "cpu": np.array(3.0)}
        return answer | {"cpu": np.array(3.0), "compile": np.array(1.0), "gradients": np.array(5000)}

    monkeypatch.setattr(peers, "environment", environment)
    monkeypatch.setattr(peers, "fit", fit)
    monkeypatch.setattr(
        peers,
        "score",
        lambda given, *_: {"gap sd / reference": 1.0, "coverage": 0.9, "log_density": 0.1, "gap sd": 0.3},
    )
    cost["scores"] = peers.score(answer, data, None)
    path = tmp_path / "peers.jsonl"
    assert (
        peers.main(["--results", str(path), "--environments", str(tmp_path), "--only", "missing", "right"])
        == 1
    )
    shown = capsys.readouterr().out
    assert (
        shown.startswith("about 4 min for 2 fits (2 of them a guess)") and "1 environments to make" in shown
    )
    assert (
        peers.main(["--results", str(path), "--environments", str(tmp_path), "--only", "broken", "wild"]) == 1
    )
    rows = peers.table(read_records(path)).splitlines()[2:]
    assert rows[1].startswith("| missing |  | failed: pip could not install missing: no / such thing |")
    assert (
        rows[2].startswith("| broken | ")
        and "| failed: AttributeError: gone in the newest release |" in rows[2]
    )
    assert "| failed: its function is not finite: the chains diverged |" in rows[3]
    assert "| 2.0 | 1.0 | 2,500 |" in rows[4] and rows[4].endswith("| 90 % | 0.100 | 1.00 |")
    assert {row.count("|") for row in rows} == {11}


def test_a_worker_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        peers.fit(Path(sys.executable), "nobody", {"x": np.zeros(1)}, 60.0)


def test_the_recorded_peers_are_on_the_page():
    records = read_records(peers.RESULTS)
    assert {record["name"] for record in records} == {peers.REFERENCE, *peers.FITS}
    assert readme_tables.TABLES["peers"]() in (peers.HERE / "results" / "README.md").read_text()
