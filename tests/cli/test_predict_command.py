"""`pyrobnn predict`: a saved run predicts as the posterior that it was, for every method and kind of model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

from pyrobnn import cli
from pyrobnn.cli.options import read
from pyrobnn.data import from_csv
from pyrobnn.inference.method import METHODS
from pyrobnn.posterior.storage import write_atomically
from pyrobnn.studies.compare import to_tree
from pyrobnn.studies.saved_runs import load_run, prediction_blocks, prediction_table
from pyrobnn.studies.study import make_study

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = {
    "inferred": {},
    "heteroskedastic": {"noise": "heteroskedastic"},
    "learned": {"noise": "learned"},
    "classes": {"target": "kind"},
}
SHORT = {
    "num_steps": 30,
    "num_warmup": 10,
    "init_steps": 20,
    "num_particles": 8,
    "max_moves": 2,
    "ess": 0.5,
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 2))
    y = 1e4 + 20 * (x[:, 0] - x[:, 1]) + generator.normal(size=40)
    frame = pd.DataFrame(
        {"a": x[:, 0], "b, ß": 1e6 + x[:, 1], "price": y, "kind": np.where(y > 1e4, "hi", "lo")}
    )
    path = tmp_path_factory.mktemp("table") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def saved(table, folder, name, kind):
    """A short fit, saved as `pyrobnn compare` does: the posterior, its study and the file."""
    options = dict(KINDS[kind])
    target = options.pop("target", "price")
    whole = pd.read_csv(table)
    path = folder / "train.csv"
    whole.drop(columns=[{"price": "kind", "kind": "price"}[target]]).to_csv(path, index=False)
    study = make_study(from_csv(path, target), hidden=[3], **options)
    method, arguments = read(["--methods", name, "--quick", "--no-compile"], "compare").methods[
        name
    ]
    known = {key: value for key, value in SHORT.items() if hasattr(method, key)}
    method = dataclasses.replace(method, **known)
    if arguments:
        arguments = {"num_draws": 8}
    posterior = method.fit(study.model, study.train.x, study.train.y, seed=0, **arguments)
    return (
        posterior,
        study,
        write_atomically(to_tree(posterior, study, name), folder / f"{name}.nc"),
    )


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "name, kind",
    # a point parameter has no prior for SMC to start from: refused
    [(name, kind) for name in METHODS for kind in KINDS if (name, kind) != ("smc", "learned")],
)
def test_a_saved_run_predicts_as_its_posterior(name, kind, table, tmp_path):
    posterior, study, path = saved(table, tmp_path, name, kind)
    again, settings = load_run(path)
    whole = pd.read_csv(table)
    x = torch.tensor(whole[["a", "b, ß"]].to_numpy())
    expected = prediction_table(posterior, x, study.settings)
    pd.testing.assert_frame_equal(
        prediction_table(again, x, settings), expected, rtol=1e-6, atol=1e-6
    )
    whole[["b, ß", "price", "a"]].to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "predictions.csv"
    assert cli.main(["predict", str(path), str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    found = pd.read_csv(out)
    assert found.pop("outside").isna().all()  # rows of the training data
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    return saved(table, tmp_path_factory.mktemp("run"), "map", "inferred")[2]


@pytest.mark.parametrize(
    "rows, message",
    [
        ("a,c\n1,2\n", "has no column 'b, ß': its columns are a, c"),
        ('a,"b, ß"\n1,2\n,3\n1,\n', "missing or infinite values in row 2, 3"),
        ('a,"b, ß"\n1,2\nx,3\n1,3\n4,4\n', "first 'x' in row 2"),
        ('a,"b, ß"\n1,2\ninf,3\n', "missing or infinite values in row 2"),
        ('a,"b, ß"\n', "no rows of data"),
        ("", "cannot be read as a table of text"),
    ],
)
def test_new_rows_that_cannot_be_read_are_named(run, rows, message, tmp_path, capsys):
    new = tmp_path / "new.csv"
    new.write_text(rows, encoding="utf-8")
    assert cli.main(["predict", str(run), str(new)]) == 2
    assert message in capsys.readouterr().err


def test_without_a_file_predictions_go_to_standard_output(run, table, tmp_path, capsys):
    assert cli.main(["predict", str(run), str(table)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0] == "mean,aleatoric_sd,epistemic_sd,sd,q0.025,q0.5,q0.975,outside"
        and len(printed) == 41
    )


def test_what_cannot_be_predicted_from_is_refused(run, table, tmp_path, capsys):
    assert cli.main(["predict", str(tmp_path / "no.nc"), str(table)]) == 2
    assert "does not exist" in capsys.readouterr().err
    posterior, _ = load_run(run)
    assert cli.main(["predict", str(posterior.save(tmp_path / "p.nc")), str(table)]) == 2
    assert "does not say what model" in capsys.readouterr().err
    assert cli.main(["predict", str(run), str(table), "--out", str(table / "below.csv")]) == 2
    assert "cannot write to the folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "report"])
def test_a_folder_is_no_file_to_write_to(command, run, table, tmp_path, capsys):
    given = [str(run), str(table)] if command == "predict" else [str(run)]
    assert cli.main([command, *given, "--out", str(tmp_path)]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", [pytest.param("drop", marks=pytest.mark.slow), "impute"])
def test_a_mixed_table_from_file_to_predictions(missing, tmp_path, capsys):
    generator = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "size": generator.normal(size=40),
            "city": generator.choice(["Rome", "Oslo"], 40),
            "day": pd.date_range("2024-01-01", periods=40).strftime("%Y-%m-%d"),
            "grade": np.arange(40) % 3,
        }
    )
    frame.loc[[2, 5], "size"] = np.nan
    path = tmp_path / "train.csv"
    out = tmp_path / "run"
    frame.to_csv(path, index=False, sep=";", decimal=",")
    command = [
        "compare",
        "--data",
        str(path),
        "--target",
        "grade",
        "--methods",
        "map",
        "--hidden",
        "2",
        "--quick",
    ]
    command += ["--out", str(out), "--no-progress", "--no-compile", "--missing", missing]
    assert cli.main(command) == 2
    assert "may be numbers or classes: say task=" in capsys.readouterr().err
    assert cli.main([*command, "--task", "classification", "--drop", "city"]) == 0
    assert "decimal commas" in capsys.readouterr().err
    new = tmp_path / "new.csv"
    new.write_text("day,size,city\n2024-01-05,0.5,Pisa\n2024-01-06,,Rome\n", encoding="utf-8")
    assert (
        cli.main(["predict", str(out / "map.nc"), str(new), "--out", str(tmp_path / "p.csv")]) == 0
    )
    found = pd.read_csv(tmp_path / "p.csv")
    assert len(found) == 2 and list(found)[:4] == ["class", "p_0", "p_1", "p_2"]
    assert found["p_0"].isna().tolist() == [False, missing == "drop"]
    assert (
        "1 rows have a missing value: their predictions are left empty" in capsys.readouterr().err
    ) == (missing == "drop")


def test_many_rows_go_to_parquet_block_by_block_with_their_gaps(table, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from pyrobnn.posterior import streaming

    posterior, study, file = saved(table, tmp_path, "map", "learned")
    new = pd.read_csv(table).drop(columns="price")
    new.loc[5, "a"] = 100.0
    new.to_csv(tmp_path / "new.csv", index=False)
    whole = tmp_path / "whole.csv"
    assert cli.main(["predict", str(file), str(tmp_path / "new.csv"), "--out", str(whole)]) == 0
    # of one draw: blocks of four rows
    monkeypatch.setattr(streaming, "BLOCK_SCALARS", 4)
    for name in ("blocks.csv", "blocks.parquet"):
        out = str(tmp_path / name)
        assert cli.main(["predict", str(file), str(tmp_path / "new.csv"), "--out", out]) == 0
    expected = pd.read_csv(whole)
    assert len(expected) == 40 and expected.loc[5, "outside"] == "a"
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "blocks.csv"), expected, rtol=1e-5)
    by_parquet = pd.read_parquet(tmp_path / "blocks.parquet")
    numeric = expected.columns.drop("outside")
    pd.testing.assert_frame_equal(
        by_parquet[numeric].astype(float), expected[numeric].astype(float), rtol=1e-5
    )
    assert by_parquet.loc[5, "outside"] == "a"
    # rows with gaps have no prediction: at the start, at the end of a block and at the end of the file
    keep = ~np.isin(np.arange(40), [0, 3, 4, 39])
    x = torch.tensor(new[["a", "b, ß"]].to_numpy())[keep]
    blocks = list(prediction_blocks(posterior, x, keep, study.settings))
    assert len(blocks) == 9
    joined = pd.concat(blocks)
    assert list(joined.index) == list(range(40))
    assert list(joined["mean"].isna()) == list(~keep)
    np.testing.assert_allclose(joined["mean"][keep], expected["mean"][keep], rtol=1e-5)
