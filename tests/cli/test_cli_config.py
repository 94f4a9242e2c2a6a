"""The command line's files: any option of any method, the same numbers again, runs that are gone on with."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import pyrobnn as pb
from pyrobnn import cli
from pyrobnn.cli.options import read
from pyrobnn.inference.method import METHODS
from pyrobnn.inference.vi.kl_schedules import Linear
from pyrobnn.posterior import storage
from pyrobnn.studies import compare

ROOT = Path(__file__).parents[2]
FAST = ["--quick", "--no-compile", "--no-progress", "--hidden", "3", "--data", "sinusoid"]


def written(folder: Path, text: str) -> str:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def draws(path: Path) -> dict[str, torch.Tensor]:
    tree = storage.read(path)
    return {
        str(name): torch.tensor(each.values) for name, each in tree["posterior"].data_vars.items()
    }


def assert_same(first: Path, second: Path) -> None:
    one = draws(first)
    other = draws(second)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def unjudged(monkeypatch):
    """Runs that are fitted and saved alone."""
    monkeypatch.setattr("pyrobnn.cli.saved.judge_saved", lambda *written: {})


def test_every_field_of_every_method_is_an_option():
    config = read(["--methods", *METHODS], "compare")
    assert set(config.methods) == set(METHODS)
    for name, known in METHODS.items():
        method, arguments = config.methods[name]
        options = {**known.full}
        assert arguments.get("num_draws") == options.pop("num_draws", None)
        assert method == known.cls(**options)


def test_compare_runs_the_four_ways_to_a_posterior_and_the_mode_where_nobody_names_methods():
    assert set(read([], "compare").methods) == {"map", "laplace", "nuts", "svi", "swag"}


@pytest.mark.parametrize("command", ["compare", "fit"])
def test_the_help_has_defaults_as_values_and_types_in_words(command, capsys):
    flag = {"compare": "--methods", "fit": "--method"}[command]
    for words in ([], *([flag, name] for name in METHODS)):
        with pytest.raises(SystemExit):
            read([*words, "--help"], command)
        text = " ".join(capsys.readouterr().out.split())
        assert "seed of everything random (whole number; default: 0)" in text
        assert "columns to predict from (default: all others)" in text
        assert "where to compute: cpu or cuda (default: cpu)" in text
        assert "widths of hidden layers (whole number; default: 50)" in text
        of_types = ("null", "type:", "Literal", "Unvalidated", "Optional[", "Union", "Compile")
        for mark in (*of_types, "``", ":class:", ":func:", ":math:", "\\"):
            assert mark not in text, mark


def test_no_option_of_a_method_is_without_words(capsys):
    """The words of one that a docstring leaves to another method are that method's."""
    with pytest.raises(SystemExit):
        read(["--methods", *METHODS, "--help"], "compare")
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "K, the number of last deviations kept; 0 for s^2 Sigma_diag alone (whole number;" in text
    )
    for option in (
        "--swag.lr LR learning rate on the loss per datum, -log p(theta, y) / N;",
        "--swa.lr LR learning rate on the loss per datum, -log p(theta, y) / N;",
        "--mle.lr LR its peak learning rate",
        "--ensemble.lr LR its peak learning rate",
    ):
        assert option in text
    assert re.findall(r"(--\S+) [A-Z_]+ (?=\(|--)", text) == []


def test_the_help_names_what_compare_runs(capsys):
    with pytest.raises(SystemExit):
        read(["--help"], "compare")
    text = " ".join(capsys.readouterr().out.split())
    assert f"(default: {', '.join(read([], 'compare').methods)})" in text


def test_options_reach_the_methods_from_the_command_line_and_from_a_file(tmp_path):
    path = written(
        tmp_path,
        "data: clusters\nhidden: [7]\nmethods:\n  nuts-long: {method: nuts, num_draws: 4000}\n"
        "  svi: {lr: 1e-3, kl_weight: {class_path: Linear, init_args: {warmup: 0.2}}}\n  größe_2: {method: mle}\n",
    )
    config = read(
        ["--config", path, "--svi.guide", "full_rank", "--nuts-long.num_warmup=9"], "compare"
    )
    assert config.methods["nuts-long"] == (pb.NUTS(num_warmup=9), {"num_draws": 4000})
    assert config.methods["svi"][0] == pb.SVI(
        guide="full_rank", lr=1e-3, kl_weight=Linear(warmup=0.2)
    )
    assert config.study.hidden == [7] and config.study.data == "clusters"
    assert config.methods["größe_2"][0] == pb.MLE()
    assert list(read(["--config", path, "--methods", "nuts-long", "map"], "compare").methods) == [
        "nuts-long",
        "map",
    ]
    guide = read(
        ["--methods", "svi", "--svi.guide", "pyro.infer.autoguide.AutoDiagonalNormal"], "compare"
    )
    assert guide.methods["svi"][0].guide.__name__ == "AutoDiagonalNormal"
    path = written(
        tmp_path,
        "methods: {swag: {optimizer: torch.optim.SGD, optimizer_options: {lr: 0.5, momentum: 0.0}}}",
    )
    expected = pb.SWAG(optimizer=torch.optim.SGD, optimizer_options={"lr": 0.5, "momentum": 0.0})
    assert read(["--config", path], "compare").methods["swag"][0] == expected


def test_the_file_of_a_run_asks_for_the_same_run(tmp_path):
    words = [
        "--methods",
        "a=svi",
        "nuts",
        "--a.optimizer",
        "SGD",
        "--a.optimizer.lr",
        "0.1",
        "--seed",
        "3",
    ]
    path = written(tmp_path, str(read([*words, "--quick"], "compare")))
    again = read(["--config", path], "compare")
    assert again.plain == read([*words, "--quick"], "compare").plain
    assert again.plain["methods"]["a"]["num_steps"] == METHODS["svi"].quick["num_steps"]


def test_quick_on_the_command_line_shortens_what_a_file_says(tmp_path):
    path = written(
        tmp_path, "methods: {svi: {num_steps: 7777, lr: 0.5}, nuts: {max_tree_depth: 12}}"
    )
    assert read(["--config", path], "compare").methods["svi"][0].num_steps == 7777
    config = read(["--config", path, "--quick"], "compare")
    assert config.methods["svi"][0] == pb.SVI(num_steps=METHODS["svi"].quick["num_steps"], lr=0.5)
    assert config.methods["nuts"][0].max_tree_depth == METHODS["nuts"].quick["max_tree_depth"]
    path = written(tmp_path, "quick: true\nmethods: {svi: {num_steps: 7777}}")
    assert read(["--config", path], "compare").methods["svi"][0].num_steps == 7777


@pytest.mark.slow
def test_a_run_from_the_file_that_a_run_has_written_gives_the_same_numbers(unjudged, tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    options = ["--methods", "svi-a=svi", "--svi-a.guide", "low_rank", "--svi-a.num_steps", "30"]
    options += [
        "--svi-a.num_draws",
        "4",
        "--seed",
        "5",
        "--svi-a.optimizer",
        "SGD",
        "--svi-a.optimizer.lr",
        "1e-6",
    ]
    assert cli.main(["compare", *FAST, *options, "--out", str(first)]) == 0
    assert cli.main(["compare", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0
    assert_same(first / "svi-a.nc", second / "svi-a.nc")
    # what a saved tree says asks for it too
    tree = storage.read(first / "svi-a.nc")
    own = json.loads(tree.attrs["config"])
    again = read(["--config", written(tmp_path, yaml.safe_dump(own))], "compare")
    assert again.of("svi-a") == own and again.methods["svi-a"][0].optimizer.func is torch.optim.SGD
    assert tree.attrs["config"] == storage.read(second / "svi-a.nc").attrs["config"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("nose: learned", "Option 'nose' is not accepted"),
        ("methods: {svi: {guid: flow}}", "does not accept option 'guid'"),
        ("methods: {svi: {num_warmup: 3}}", "'svi' does not accept option 'num_warmup'"),
        ("methods: {mine: {num_draws: 3}}", "'methods' must be one of 'mle', "),
        ("methods: 3", "'methods' names to options"),
        ("methods: {svi: [1, 2]}", "'methods' names to options"),
        ("methods: {svi: {lr: x}}", "'svi.lr': expected float, got x"),
        ("methods: {svi: {lr: -1}}", "svi: 'lr' must be > 0"),
        (
            "methods: {svi: {kl_weight: Linnear}}",
            "Subtypes: [float, KLSchedule] Errors: - Expected a float",
        ),
        ("methods: {svi: {guide: no.where.Guide}}", "'no.where.Guide' cannot be imported"),
        ("svi: {lr: 1}", "Option 'svi.lr' is not accepted"),
        ("quick: 3", "'quick': expected bool, got 3"),
        ("hidden: some", "'hidden'"),
        ("- svi\n- nuts", "must map options to values, such as 'data: diabetes'"),
        ("", "must map options to values"),
        ("a: [1", "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line_before_any_compute(
    text, message, tmp_path, capsys
):
    assert cli.main(["compare", "--config", written(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyrobnn: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--methods", "nuts", "--nuts.num_warmup", "-5"],
            "nuts: 'num_warmup' must be at least 0, got -5",
        ),
        (["--methods", "svi", "--nuts.num_warmup", "5"], "name the method in --methods"),
        (["--methods", "svi", "--method.num_steps", "5"], "as in --svi.num_steps"),
        (["--methods", "nuts", "--nuts.num_warmups", "5"], "--nuts.num_warmups"),
        (
            ["--methods", "nuts", "--nuts.num_draws", "few"],
            "'nuts.num_draws': expected int, got few",
        ),
        (
            ["--methods", "svi", "--svi.kl", "cl"],
            "expected one of ['auto', 'closed_form', 'monte_carlo'], got cl",
        ),
        (["--methods", "a=svi", "a=nuts"], "two methods are called 'a'"),
        (["--methods", "svi=nuts"], "'svi' cannot name this nuts"),
        (["--methods", "x.y=nuts"], "'x.y' cannot name this nuts"),
        (["--metods", "svi"], "--metods"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml' does not exist"),
    ],
)
def test_wrong_words_on_the_command_line_are_named(words, message, capsys):
    assert cli.main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["", "compare", "fit", "predict", "report"])
def test_help_says_what_the_exit_status_means(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        ended.value.code == 0
        and "130 stopped by Ctrl-C" in said
        and "--nuts.target_accept" not in said
    )
    if command in ("compare", "fit"):
        with pytest.raises(SystemExit):
            cli.main(
                [command, "--methods" if command == "compare" else "--method", "nuts", "--help"]
            )
        # from the field and the docstring
        assert (
            "--nuts.target_accept" in (said := capsys.readouterr().out)
            and "acceptance rate aimed at" in said
        )


@pytest.mark.parametrize("written", [False, True])
def test_a_stopped_fit_says_whether_it_goes_on(written, unjudged, tmp_path, monkeypatch, capsys):
    def stopped(name, method, study, announce, arguments, *rest):
        if written:
            arguments["checkpoint"].write_bytes(b"draws")
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_fitted", stopped)
    assert cli.main(["fit", *FAST, "--method", "nuts", "--out", str(tmp_path / "n.nc")]) == 130
    said = "with --resume goes on" if written else "starts anew: no checkpoint was written yet"
    assert f"the same command {said}" in capsys.readouterr().err


def test_a_stopped_fit_that_is_saved_goes_on_too(unjudged, tmp_path, monkeypatch, capsys):
    fitted = compare._fitted
    out = tmp_path / "m.nc"

    def press(step, metrics):
        signal.raise_signal(signal.SIGINT)

    def stopped(name, method, study, announce, arguments, *rest):
        return fitted(name, method, study, announce, arguments | {"callbacks": [press]}, *rest)

    monkeypatch.setattr(compare, "_fitted", stopped)
    assert cli.main(["fit", *FAST, "--method", "map", "--out", str(out)]) == 130 and out.exists()
    assert "the same command with --resume goes on\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_fits_nothing_again(unjudged, tmp_path, monkeypatch, capsys):
    fitted = compare._fitted
    out = tmp_path / "out"
    options = ["compare", *FAST, "--methods", "mle", "nuts", "--nuts.num_warmup", "15"]
    options += [
        "--nuts.num_draws",
        "20",
        "--nuts.checkpoint_every",
        "0",
        "--nuts.max_tree_depth",
        "3",
    ]
    options += ["--mle.num_steps", "5"]
    assert cli.main([*options, "--out", str(tmp_path / "whole")]) == 0

    def press(step, metrics):
        if metrics.get("phase") == "sampling":
            signal.raise_signal(signal.SIGINT)

    def stopped(name, method, study, announce, arguments, *rest):
        return fitted(name, method, study, announce, arguments | {"callbacks": [press]}, *rest)

    def only_nuts(name, *rest):
        assert name == "nuts"
        return fitted(name, *rest)

    monkeypatch.setattr(compare, "_fitted", stopped)
    assert cli.main([*options, "--out", str(out)]) == 130
    assert "with --resume goes on" in capsys.readouterr().err and (out / "nuts.checkpoint").exists()
    monkeypatch.setattr(compare, "_fitted", only_nuts)
    assert cli.main([*options, "--out", str(out), "--resume"]) == 0
    assert (
        "mle: finished before" in capsys.readouterr().out and not (out / "nuts.checkpoint").exists()
    )
    assert_same(tmp_path / "whole" / "nuts.nc", out / "nuts.nc")
    # other options are another run
    assert cli.main([*options, "--mle.num_steps", "6", "--out", str(out), "--resume"]) == 1


@pytest.mark.slow
def test_fit_saves_what_predict_needs_and_flags_rows_beyond_the_data(tmp_path, capsys):
    folder = tmp_path / "mit Raum"
    folder.mkdir()
    x = torch.linspace(0, 1, 40)
    frame = pd.DataFrame({"größe": x, "ort": ["Rom", "Oslo"] * 20, "preis": 3 * x})
    table = folder / "tabelle.csv"
    model = folder / "modell.nc"
    new = folder / "neu.csv"
    frame.to_csv(table, sep=";", decimal=",", index=False)
    pd.DataFrame({"ort": ["Oslo", "Rom"], "größe": [0.5, 7.5]}).to_csv(
        new, sep=";", decimal=",", index=False
    )
    options = [
        "--target",
        "preis",
        "--method",
        "mle",
        "--mle.num_steps",
        "20",
        "--no-compile",
        "--no-progress",
    ]
    assert cli.main(["fit", str(table), *options, "--hidden", "3", "--out", str(model)]) == 0
    said = capsys.readouterr().out
    assert f"saved: {model}" in said and "(MLE): " in said and f"pyrobnn predict '{model}'" in said
    assert cli.main(["predict", str(model), str(new), "--out", str(folder / "p.csv")]) == 0
    assert "1 of 2 rows lie beyond the training data" in capsys.readouterr().err
    found = pd.read_csv(folder / "p.csv", keep_default_na=False)
    assert list(found["outside"]) == ["", "größe"] and (found["epistemic_sd"] == 0).all()
    assert list(folder.glob("*.checkpoint")) == []


def test_the_default_method_fits_numbers_of_a_file(tmp_path, capsys, monkeypatch):
    search = pb.MAP(num_steps=40, lr=0.05, polish_steps=30, compile=False)
    short = pb.Laplace(tune="marginal_likelihood", map=search)
    monkeypatch.setattr("pyrobnn.estimators.auto.choose", lambda *sizes, **facts: (short, "short"))
    x = torch.linspace(-2, 2, 60)
    table = tmp_path / "t.csv"
    model = tmp_path / "t.nc"
    pd.DataFrame({"a": x, "y": x.sin()}).to_csv(table, index=False)
    words = [
        str(table),
        "--target",
        "y",
        "--hidden",
        "3",
        "--quick",
        "--no-compile",
        "--no-progress",
    ]
    assert cli.main(["fit", *words, "--out", str(model)]) == 0
    assert "by the evidence" in capsys.readouterr().out and model.exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name the data"),
        (["gap", "--out", "model"], "must be a file FILE.nc: use 'model.nc'"),
        (["nowhere"], "unknown data 'nowhere'"),
    ],
)
def test_a_fit_that_cannot_be_is_refused_before_any_compute(words, message, capsys):
    assert cli.main(["fit", *words]) == 2
    assert message in capsys.readouterr().err
