"""The command line, run in process: what it writes, and how it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import pyrobnn as pb
from pyrobnn import cli
from pyrobnn.posterior import storage
from pyrobnn.studies import compare
from pyrobnn.studies.study import some_rows

ROOT = Path(__file__).parents[2]

FAST = ["--quick", "--no-compile", "--no-progress", "--hidden", "5"]


@pytest.fixture(autouse=True)
def few_figures(request, monkeypatch):
    """Pages without their figures, which take the time; but for the test of the page."""
    if "summary_and_trees" not in request.node.name:
        monkeypatch.setattr("pyrobnn.report.page.build_sections", lambda trees: {})


@pytest.fixture
def table(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    y = 100 + 20 * (x[:, 0] - x[:, 1]) + torch.randn(60, generator=generator)
    frame = pd.DataFrame({"a": x[:, 0], "<script>b</script>": x[:, 1], "price": y})
    path = tmp_path / "table.csv"
    frame.to_csv(path, index=False)
    return path


def test_compare_writes_report_summary_and_trees(table, tmp_path, capsys):
    out = tmp_path / "out"
    argv = [
        "compare",
        "--data",
        str(table),
        "--target",
        "price",
        "--methods",
        "map",
        "ensemble",
        "--out",
        str(out),
    ]
    assert cli.main([*argv, *FAST]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["methods"]) == {"map", "ensemble"}
    facts = summary["facts"]
    assert facts["inputs"] == "2: a, <script>b</script>" and facts["target"].startswith(
        "price, mean"
    )
    assert (
        facts["net"] == "2-5-1, Tanh, 21 weights" and "HalfNormal(scale=1)" in facts["likelihood"]
    )
    assert facts["seed"] == "0" and facts["command"].startswith("pyrobnn compare --data ")
    assert summary["baselines"]["linear model"]["scores"]["r2"] > 0.9
    # in units of the price, not of its standard deviation
    assert 0.3 < summary["methods"]["map"]["scores"]["rmse"] < 10
    assert (out / "map.nc").is_file() and (out / "ensemble.nc").is_file()
    page = (out / "report.html").read_text()
    assert "<script>b" not in page
    # the configuration that makes the same numbers again
    assert yaml.safe_load((out / "config.yaml").read_text())["methods"]["map"]["num_steps"] == 500
    printed = capsys.readouterr().out
    assert "RMSE" in printed and "54 train and 6 test points" in printed
    assert "predict the mean" in printed and "linear model" in printed  # as on the page
    trees = [str(out / "map.nc"), str(out / "ensemble.nc")]
    assert cli.main(["report", *trees, "--out", str(tmp_path / "again.html"), "--strict"]) in (0, 1)
    assert (tmp_path / "again.html").is_file()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data", "nowhere"], "unknown data"),
        (["--methods", "magic"], "'methods' must be one of"),
        (["--device", "gpu"], "'device' must name"),
        (["--noise", "loud"], "'noise' must be"),
        (["--seed", "-1"], "'seed' must be at least 0"),
        (["--test-fraction", "2"], "test_fraction"),
    ],
)
def test_bad_options_exit_with_2_and_one_line(argv, message, tmp_path, capsys):
    assert cli.main(["compare", *FAST, "--methods", "map", "--out", str(tmp_path), *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyrobnn: ") and message in error and error.count("\n") == 1


def test_bad_tables_exit_with_2(table, tmp_path, capsys):
    argv = ["compare", *FAST, "--methods", "map", "--out", str(tmp_path), "--data", str(table)]
    assert cli.main([*argv, "--target", "cost"]) == 2
    assert "price" in capsys.readouterr().err
    table.write_text("a,price\n1,1\n2,2\nx,3\n")
    assert cli.main([*argv, "--target", "price"]) == 2
    assert "'a'" in capsys.readouterr().err


def test_reports_of_files_that_are_not_there_or_foreign(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "no.nc")]) == 2
    assert "does not exist" in capsys.readouterr().err
    foreign = tmp_path / "foreign.nc"
    foreign.write_bytes(b"something else")
    assert cli.main(["report", str(foreign)]) == 2
    assert "not a netCDF file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_of_a_large_table_takes_some_rows_and_says_so(tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    frame = pd.DataFrame(torch.randn(3000, 3, generator=generator), columns=["a", "b", "price"])
    frame.to_csv(tmp_path / "large.csv", index=False)
    argv = [
        "compare",
        "--data",
        str(tmp_path / "large.csv"),
        "--target",
        "price",
        "--methods",
        "mle",
        *FAST,
    ]
    assert cli.main([*argv, "--out", str(tmp_path)]) == 0
    told = "500 of its 3,000 rows, drawn at random for --quick"
    assert told in capsys.readouterr().out
    assert told in json.loads((tmp_path / "summary.json").read_text())["facts"]["data"]
    assert told in (tmp_path / "report.html").read_text("utf-8")
    assert storage.read(tmp_path / "mle.nc").attrs["num_data"] == 450


def test_a_quick_part_keeps_the_shares_of_the_classes_and_small_tables_whole():
    labels = torch.arange(2000) % 10 // 9
    whole = pb.data.Dataset(
        torch.arange(4000.0).reshape(2000, 2), labels, "labels", "classification"
    )
    part = some_rows(whole, 500, seed=0)
    assert part.num_data == 500 and int(part.y.sum()) == 50
    assert some_rows(part, 500, seed=0) is part


def test_an_interrupt_keeps_what_is_finished(table, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(pb.DeepEnsemble, "fit", interrupted)
    argv = ["compare", "--data", str(table), "--target", "price", "--methods", "map", "ensemble"]
    assert cli.main([*argv, "--out", str(tmp_path / "out"), *FAST]) == 130
    assert "1 of 2 methods in hand" in capsys.readouterr().err
    assert "stopped before it was done" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_an_interrupted_fit_is_kept_marked_and_the_last(table, tmp_path, monkeypatch, capsys):
    whole = pb.MAP.fit

    def stopped(*args, **kwargs):
        posterior = whole(*args, **kwargs)
        return dataclasses.replace(posterior, meta=posterior.meta | {"interrupted": True})

    monkeypatch.setattr(pb.MAP, "fit", stopped)
    out = tmp_path / "out"
    argv = [
        "compare",
        "--data",
        str(table),
        "--target",
        "price",
        "--methods",
        "mle",
        "map",
        "ensemble",
    ]
    assert cli.main([*argv, "--out", str(out), *FAST]) == 130
    content = json.loads((out / "summary.json").read_text("utf-8"))
    assert set(content["methods"]) == {"mle", "map"} and set(content["left_out"]) == {"ensemble"}
    checks = {check["code"]: check for check in content["methods"]["map"]["verdict"]["checks"]}
    assert checks["interrupted"]["status"] == "warn"
    assert "1 of 3 methods in hand" in capsys.readouterr().err
    assert "was interrupted" in (out / "report.html").read_text("utf-8")
    assert pb.diagnose(storage.read(out / "map.nc")).status == "warn"


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(FloatingPointError("the loss is nan at step 3"), marks=pytest.mark.slow),
        ValueError("an odd value"),
        pytest.param(IndexError("index 3 is out of bounds"), marks=pytest.mark.slow),
        pytest.param(
            pb.Refused("this net has no dropout layer: pass p=0.05"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_method_that_fails_is_left_out_and_named(error, table, tmp_path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(pb.DeepEnsemble, "fit", fails)
    out = tmp_path / "out"
    argv = ["compare", "--data", str(table), "--target", "price", "--methods", "ensemble", "map"]
    assert cli.main([*argv, "--out", str(out), *FAST]) == 1
    assert str(error) in capsys.readouterr().out
    content = json.loads((out / "summary.json").read_text("utf-8"))
    assert set(content["methods"]) == {"map"} and str(error) in content["left_out"]["ensemble"]
    assert str(error) in (out / "report.html").read_text("utf-8")
    assert (out / "ensemble.error.txt").is_file() != isinstance(error, pb.Refused)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_fit(
    place, table, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare, "_fitted", None)
    (tmp_path / "file").write_text("in the way")
    argv = ["compare", "--data", str(table), "--target", "price", "--methods", "map"]
    assert cli.main([*argv, "--out", str(tmp_path / place), *FAST]) == 2
    assert "cannot write to the folder" in capsys.readouterr().err
    assert cli.main(["report", str(table), "--out", str(tmp_path / place / "r.html")]) == 2


class Gone(io.TextIOWrapper):
    """A stream whose reader has left."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gone, io.TextIOWrapper])
def test_nothing_that_is_printed_costs_the_page(kind, table, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", kind(io.BytesIO(), encoding="ascii"))
    argv = ["compare", "--data", str(table), "--target", "price", "--methods", "map"]
    assert cli.main([*argv, "--out", str(tmp_path / "out"), *FAST]) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert sys.stdout.errors == "strict"


def test_the_version_is_told_and_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "pyrobnn", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["pyrobnn", pb.__version__]


@pytest.mark.parametrize("user", ["folder", "name"])
def test_a_read_only_cache_or_a_user_without_a_name_costs_a_word_and_no_run(
    user, tmp_path, monkeypatch
):
    from pyrobnn.model.compile import code_folder

    monkeypatch.setenv(code_folder.FOLDER, "/proc/none/cache")
    if user == "name":  # of a container's user
        monkeypatch.delenv(code_folder.FOLDER)
        monkeypatch.setattr(code_folder.getpass, "getuser", lambda: {}["uid not found: 1234"])
    monkeypatch.setattr(code_folder.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match="set TORCHINDUCTOR_CACHE_DIR"):
        code_folder.provide_folder()
    assert Path(code_folder.os.environ[code_folder.FOLDER]).parent == tmp_path
    code_folder.provide_folder()  # which it now does not say again


class Answers:
    """A verdict whose draws pass and whose model fails."""

    def answer(self, question):
        return "pass" if question == "draws" else "fail"

    def checked(self, question):
        return True


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 0),
        (["--strict", "draws"], 0),
        (["--strict", "model"], 1),
        (["--strict", "all"], 1),
        (["--strict"], 1),
    ],
)
def test_strict_asks_the_question_that_it_names(words, status, tmp_path, monkeypatch):
    monkeypatch.setattr("pyrobnn.cli.saved.judge_saved", lambda *written: {"a": Answers()})
    monkeypatch.setattr(storage, "read", lambda path: path)
    file = str(tmp_path / "a.nc")
    assert cli.main(["report", file, "--out", str(tmp_path / "r.html"), *words]) == status


@pytest.mark.slow
def test_the_doctor_has_a_line_for_each_thing_and_its_fit_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # no machine code of an earlier process
    monkeypatch.setattr(
        "pyrobnn.core.private.lacks_compiler", lambda: True
    )  # and nothing is compiled
    assert cli.main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert pb.__version__ in lines["packages"] and lines["compiler"].startswith(
        "none: every fit runs"
    )
    assert lines["fit"].startswith("MAP in ") and float(lines["fit"].split()[-3]) < 0.6
    assert "could not be compiled" in lines["warning"]


def test_the_doctor_reports_a_fit_that_fails(capsys, monkeypatch):
    def fit(*args, **options):
        raise RuntimeError("no such device")

    monkeypatch.setattr(pb.MAP, "fit", fit)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("failed: RuntimeError: no such device\n")


@pytest.mark.parametrize("given", [None, "7"])
def test_the_threads_of_the_command_line_wait_asleep_unless_the_user_says_otherwise(
    given, monkeypatch
):
    monkeypatch.setenv("GOMP_SPINCOUNT", "before")  # what the test leaves behind
    monkeypatch.setattr(sys, "argv", ["pyrobnn", "--version"])
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    else:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["GOMP_SPINCOUNT"] == (given or "1000")
