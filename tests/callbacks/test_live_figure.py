"""The figure that follows a fit, with and without a notebook."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from models import normal_prior, toy, toy_model, toy_net

import pyrobnn as pb
from pyrobnn.callbacks import LiveFigure


class FakeHandle:
    """What IPython's ``display`` returns with a ``display_id``."""

    def __init__(self, shown):
        self.shown = shown

    def update(self, picture):
        self.shown.append(("updated", picture))


@pytest.fixture
def notebook(monkeypatch):
    """A fake of the parts of IPython that a notebook has; yields what it has been shown."""
    shown = []

    def display(picture, display_id=False):
        assert display_id is True
        shown.append(("displayed", picture))
        return FakeHandle(shown)

    fake = types.ModuleType("IPython")
    # matplotlib asks these two
    fake.version_info = (9, 0)
    fake.get_ipython = lambda: None
    core = types.ModuleType("IPython.core")
    getter = types.ModuleType("IPython.core.getipython")
    shower = types.ModuleType("IPython.display")
    getter.get_ipython = object
    shower.display = display
    shower.Image = lambda data, retina: data
    for module in (fake, core, getter, shower):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shown


@pytest.fixture
def no_ipython(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)


def curve(live):
    return live.figure.axes[0].lines[0].get_xydata().tolist()


def test_in_a_notebook_one_figure_is_drawn_anew(notebook):
    x, y = toy()
    live = LiveFigure(every=20)
    fit = pb.MAP(num_steps=100, polish_steps=0, compile=False).fit(
        toy_model(), x, y, callbacks=[live]
    )
    words = [word for word, _ in notebook]
    assert words == ["displayed", *["updated"] * 4]
    assert all(picture.startswith(b"\x89PNG") for _, picture in notebook)
    assert notebook[0][1] != notebook[-1][1]
    # of every report, whether it was drawn or not
    steps, losses = zip(*curve(live), strict=True)
    assert steps == tuple(range(10, 101, 10))
    assert losses[-1] == pytest.approx(float(fit.history["loss"][-1]))


def test_in_a_notebook_another_fit_has_a_figure_below_its_own_cell(notebook):
    live = LiveFigure(every=1)
    for loss in (1.0, 2.0):
        for step in (1, 2):
            live(step, {"loss": loss})
        live.end()
    assert [word for word, _ in notebook] == ["displayed", "updated"] * 2


@pytest.mark.usefixtures("no_ipython")
def test_without_ipython_the_figure_itself_is_drawn_anew():
    live = LiveFigure(every=2, metric="elbo")
    for step in range(1, 6):
        assert live(step, {"elbo": -float(step)}) is None
    assert len(curve(live)) == 4 and live.figure.axes[0].get_ylabel() == "elbo"
    live.end()
    assert curve(live)[-1] == [5.0, -5.0]
    figure = live.figure
    live.end()
    assert live.figure is figure
    # steps that begin again are another run
    live(2, {"elbo": 7.0})
    assert curve(live) == [[2.0, 7.0]]


@pytest.mark.usefixtures("no_ipython")
@pytest.mark.parametrize("with_probe", [True, False])
def test_with_data_the_bands_so_far_are_drawn(with_probe):
    x, y = toy()
    probe = torch.tensor([[3.0], [-3.0], [0.0]]) if with_probe else None
    live = LiveFigure(every=10, probe=probe, data=(x, y[:, 0]))
    posterior = pb.SVI(num_steps=50, compile=False).fit(toy_model(), x, y, callbacks=[live])
    assert posterior.num_draws and len(live.figure.axes) == 2
    _, ax = live.figure.axes
    mean, points = ax.lines
    assert points.get_xydata().shape == (40, 2)
    places = torch.tensor(mean.get_xdata())
    assert torch.equal(places, places.sort().values)
    if with_probe:
        assert places.tolist() == [-3.0, 0.0, 3.0]
    else:
        assert places[0] == -3.0 and places[-1] == 3.0  # a quarter of [-2, 2] beyond it
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["95 % with noise", "95 % of the function", "mean", "data"]
    # with noise the band is the wider one
    outer, inner = (band.get_paths()[0].get_extents().height for band in ax.collections)
    assert outer > inner > 0


def test_what_it_cannot_draw_is_said():
    with pytest.raises(ValueError, match="'every'"):
        LiveFigure(every=0)
    with pytest.raises(ValueError, match=r"'probe' must be \(N, 1\)"):
        LiveFigure(probe=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="'loss', which this method does not report.*step_size"):
        LiveFigure()(1, {"step_size": 0.1})


def test_bands_of_classes_are_refused():
    x, _ = toy()
    model = pb.BNN(toy_net(out=2), normal_prior(), pb.likelihoods.Categorical())
    live = LiveFigure(every=1, probe=x)
    with pytest.raises(ValueError, match="these are classes"):
        pb.MAP(num_steps=20, compile=False).fit(model, x, (x[:, 0] > 0).long(), callbacks=[live])
