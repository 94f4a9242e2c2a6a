from __future__ import annotations

import builtins
import sys
from types import SimpleNamespace

import pytest
import torch

from pyrobnn.callbacks import EarlyStopping, LivePlot, ProgressBar, TensorBoardLogger


class TestProgressBar:
    def test_counts_and_shows_the_latest_scalars(self, capsys):
        with ProgressBar(total=4, description="svi") as bar:
            for step in (1, 2, 4):
                assert bar(step, {"loss": 1.5, "snapshot": print, "done": True}) is None
        shown = capsys.readouterr().err
        assert bar.step == 4
        assert "svi" in shown and "4/4" in shown and "loss=1.5" in shown
        assert "snapshot" not in shown and "done" not in shown

    def test_a_second_run_starts_a_second_bar(self, capsys):
        bar = ProgressBar(total=2)
        for step in (1, 2, 1, 2):
            bar(step, {})
        assert bar.step == 2
        assert capsys.readouterr().err.count("2/2") == 2

    def test_without_a_total_and_with_chosen_metrics(self, capsys):
        with ProgressBar(metrics=("loss",)) as bar:
            bar(3, {"loss": torch.tensor(0.25), "elbo": -1.0})
        shown = capsys.readouterr().err
        assert "3it" in shown and "loss=0.25" in shown and "elbo" not in shown

    def test_bad_total(self):
        with pytest.raises(ValueError, match="'total' must be at least 1"):
            ProgressBar(total=0)


class TestTensorBoard:
    def test_scalars_can_be_read_back(self, tmp_path):
        accumulator = pytest.importorskip(
            "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra 'tracking'"
        )
        with TensorBoardLogger(tmp_path / "run") as logger:
            for step in (1, 2):
                logger(
                    step, {"loss": 1.0 / step, "elbo": torch.tensor(-3.0), "snapshot": print, "flag": True}
                )
        events = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
        assert sorted(events.Tags()["scalars"]) == ["elbo", "loss"]
        assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]

    def test_without_tensorboard_the_error_names_the_extra(self, tmp_path, monkeypatch):
        genuine = builtins.__import__

        def missing(name, *arguments, **options):
            if name.startswith("torch.utils.tensorboard"):
                raise ImportError("no tensorboard")
            return genuine(name, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(ImportError, match=r"pyrobnn\[tracking\]"):
            TensorBoardLogger(tmp_path)


def stops(callback, losses):
    for step, loss in enumerate(losses, start=1):
        if callback(step, {"loss": loss}):
            return step
    return None


class TestEarlyStopping:
    def test_stops_after_patience_steps_without_improvement(self):
        assert stops(EarlyStopping(patience=3, window=1), [5, 4, 3, 3, 3, 3, 3]) == 6
        assert stops(EarlyStopping(patience=3, window=1), [5, 4, 3, 3, 3, 2.9, 3]) is None

    def test_a_fall_below_min_delta_is_no_improvement(self):
        losses = [5 - 0.01 * step for step in range(50)]
        assert stops(EarlyStopping(patience=10, window=1), losses) is None
        assert stops(EarlyStopping(patience=10, window=1, min_delta=1.0), losses) == 11

    def test_a_slow_but_steady_fall_adds_up_to_an_improvement(self):
        losses = [5 - 0.01 * step for step in range(500)]
        assert stops(EarlyStopping(patience=20, window=1, min_delta=0.1), losses) is None

    def test_the_window_keeps_one_lucky_value_from_stopping_a_falling_loss(self):
        losses = [100.0 - step for step in range(80)]
        losses[5] = -50.0
        assert stops(EarlyStopping(patience=30, window=1), losses) == 36
        assert stops(EarlyStopping(patience=30, window=10), losses) is None

    def test_it_starts_anew_with_the_next_run(self):
        callback = EarlyStopping(patience=2, window=1)
        assert stops(callback, [1, 1, 1]) == 3
        assert stops(callback, [9, 8, 7, 6]) is None

    def test_bad_arguments_and_a_missing_metric(self):
        with pytest.raises(ValueError, match="'patience' must be at least 1"):
            EarlyStopping(patience=0)
        with pytest.raises(ValueError, match="'min_delta' must be at least 0"):
            EarlyStopping(min_delta=-1.0)
        with pytest.raises(ValueError, match="watches 'loss'.*choose one of elbo"):
            EarlyStopping()(1, {"elbo": 2.0, "snapshot": print})


class FakePosterior:
    def predict(self, x):
        one = torch.ones_like(x)
        return SimpleNamespace(mean=x, aleatoric_var=3 * one, epistemic_var=one, var=4 * one)


class TestLivePlot:
    x = torch.linspace(-1, 1, 9).unsqueeze(-1)

    def test_draws_every_so_many_steps_and_keeps_the_figure(self, tmp_path):
        plot = LivePlot(self.x, self.x.squeeze(-1), every=2)
        taken = []
        metrics = {"snapshot": lambda: taken.append(1) or FakePosterior()}
        for step in (1, 2, 3, 4):
            assert plot(step, metrics) is None
        assert len(taken) == 2
        axes = plot.figure.axes[0]
        assert axes.get_title(loc="left") == "step 4" or axes.get_title() == "step 4"
        outer, inner = (band.get_paths()[0].vertices[:, 1] for band in axes.collections)
        assert outer.max() == pytest.approx(1.5 + 2 * 1.96, rel=1e-5)  # the grid ends at 1 + 2/4
        assert inner.max() == pytest.approx(1.5 + 1.96, rel=1e-5)
        plot.figure.savefig(tmp_path / "live.png")
        assert (tmp_path / "live.png").stat().st_size > 1000

    def test_a_notebook_updates_one_display(self, monkeypatch):
        shown = []
        handle = SimpleNamespace(update=lambda figure: shown.append(("update", figure)))

        def display(figure, display_id):
            shown.append(("display", figure))
            return handle

        shell = type("ZMQInteractiveShell", (), {})()
        fake = SimpleNamespace(get_ipython=lambda: shell)
        monkeypatch.setitem(sys.modules, "IPython", fake)
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
        plot = LivePlot(self.x, self.x, every=1)
        for step in (1, 2):
            plot(step, {"snapshot": FakePosterior})
        assert [kind for kind, _ in shown] == ["display", "update"]
        assert shown[1][1] is plot.figure

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match=r"inputs \(N, 1\)"):
            LivePlot(torch.zeros(3, 2), torch.zeros(3))
        with pytest.raises(ValueError, match="x has 9 rows and y has 3"):
            LivePlot(self.x, torch.zeros(3))
        with pytest.raises(ValueError, match="'output' must lie in 0 … 0"):
            LivePlot(self.x, self.x, output=1)
        with pytest.raises(ValueError, match="no 'snapshot'"):
            LivePlot(self.x, self.x, every=1)(1, {"loss": 1.0})
