from __future__ import annotations

import pytest
import torch

from pyrobnn.callbacks import EarlyStopping, ProgressBar


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


def test_a_fit_stops_where_held_out_rows_get_worse():
    from test_contract import METHODS, gaussian, toy

    x, y = toy()
    losses = []

    def held_out(step, metrics):
        losses.append(-metrics["snapshot"]().predict(x[::4]).log_prob(y[::4]).mean().item())
        metrics["val_loss"] = losses[-1]

    METHODS["MAP"].fit(gaussian(), x, y, callbacks=[held_out, EarlyStopping(metric="val_loss")])
    assert len(losses) > 1 and losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:the mean of the iterates is worse")  # after 20 steps
def test_a_callback_is_told_when_the_run_is_over():
    from test_contract import METHODS, X, Y, gaussian

    class Ending:
        ended = 0

        def __call__(self, step, metrics):
            return False

        def end(self):
            self.ended += 1

    for name in ("MAP", "Laplace", "SWA"):
        callback = Ending()
        METHODS[name].fit(gaussian(), X, Y, callbacks=[callback])
        assert callback.ended == 1, name
