"""Every figure: of every kind of tree, outside pyplot, with nothing global changed."""

from __future__ import annotations

import inspect

import matplotlib
import numpy as np
import pytest
import trees as factory
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from pyrobnn import plots
from pyrobnn.diagnostics.gap import gap_between, widest_gap
from pyrobnn.diagnostics.leave_one_out import leave_one_out
from pyrobnn.diagnostics.points import regression_points
from pyrobnn.plots.canvas import PAGE, bands, panels
from pyrobnn.plots.look import ALEATORIC, EPISTEMIC, PALETTE, style

KINDS = {
    "regression_1d": factory.regression_1d(),
    "regression_nd_iid": factory.regression_nd("SVI", iid=True),
    "classification": factory.classification(),
    "point_estimate": factory.point_estimate(),
    "numpyro_like": factory.numpyro_like(),
    "posterior_only": factory.posterior_only(),
}

#: what is drawn with, not what is drawn
HELPERS = {"style", "panels", "bands", "legend_below", "colours"}
FIGURES = [name for name in plots.__all__ if name not in HELPERS and name.islower()]


def texts(figure: Figure) -> str:
    return " ".join(
        t.get_text() for ax in figure.axes for t in (*ax.texts, ax.title, ax._left_title)
    )


def words(figure: Figure) -> list[Text]:
    """Titles, labels of axes and the legend, in order."""
    of_axes = [
        text
        for ax in figure.axes
        for text in (ax._left_title, ax._right_title, ax.xaxis.label, ax.yaxis.label)
    ]
    return [*of_axes, *figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_every_kind_of_tree(name: str) -> None:
    figure = getattr(plots, name)(KINDS)
    assert isinstance(figure, Figure)
    assert figure.get_size_inches()[0] <= PAGE + 0.01  # six trees fit the width of a page
    figure.draw_without_rendering()


def test_no_two_of_eleven_fits_have_the_same_line() -> None:
    figure = plots.calibration({f"fit {i}": KINDS["regression_1d"] for i in range(11)})
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines[:11]}
    assert len(looks) == 11


def test_names_of_any_length_lie_within_the_figure() -> None:
    tree = KINDS["regression_1d"].copy()
    for path in (
        "observed_data",
        "predictions_observed_data",
        "posterior_predictive",
        "predictions",
    ):
        if path in tree and "output" in tree[path].dims:
            tree[path] = (
                tree[path].to_dataset().assign_coords(output=["a name that goes on and on and on"])
            )
    figure = plots.predicted_vs_observed(
        {f"fit of a method with a long name {i}": tree for i in range(3)}
    )
    figure.draw_without_rendering()
    ends = [
        text.get_window_extent()
        for ax in figure.axes
        for text in (ax.title, ax._left_title, ax.xaxis.label)
    ]
    assert (
        min(each.x0 for each in ends) >= 0 and max(each.x1 for each in ends) <= figure.bbox.x1 + 1
    )
    assert all("…" in ax.get_title(loc="left") + ax.get_title() for ax in figure.axes)


def test_the_diagonal_leaves_the_limits_to_the_data() -> None:
    ax = matplotlib.figure.Figure().subplots()
    ax.plot([100.0, 140.0], [110.0, 130.0])
    plots.canvas.reference_line(ax)
    assert ax.get_xlim()[0] > 90 and ax.get_ylim()[0] > 90


def test_one_tree_needs_no_mapping_and_brings_its_label() -> None:
    assert "nuts" in texts(plots.predictive_bands(KINDS["regression_1d"]))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_documented_and_leave_pyplot_alone(name: str) -> None:
    function = getattr(plots, name)
    assert "Args:" in inspect.getdoc(function) and "Returns:" in inspect.getdoc(function)
    before = dict(matplotlib.rcParams)
    function(KINDS["regression_1d"])
    assert dict(matplotlib.rcParams) == before


def test_a_figure_for_slides_has_no_background(tmp_path) -> None:
    for kind, corner in (("slides", 0.0), ("paper", 1.0)):
        with style(kind), style():
            figure, _ = panels(1)
            figure.savefig(tmp_path / f"{kind}.png")
        assert matplotlib.image.imread(tmp_path / f"{kind}.png")[0, 0, 3] == corner
    with (
        pytest.raises(ValueError, match="'kind' must be one of 'paper', 'slides', 'dark_slides'"),
        style("poster"),
    ):
        pass


@pytest.mark.parametrize(("kind", "light"), [("slides", False), ("dark_slides", True)])
def test_a_figure_for_slides_has_text_of_a_slide_s_size(kind: str, light: bool) -> None:
    trees = {"nuts": KINDS["regression_1d"], "svi": KINDS["regression_1d"]}
    page = plots.predictive_bands(trees)
    with style(kind):
        slide = plots.predictive_bands(trees)
    slide.draw_without_rendering()
    assert texts(page) == texts(slide)
    for small, large in zip(words(page), words(slide), strict=True):
        assert large.get_fontsize() == pytest.approx(1.5 * small.get_fontsize())
        assert (np.mean(to_rgb(large.get_color())) > 0.6) == light
    (data,) = (line for line in slide.axes[0].lines if line.get_label() == "data")
    assert (np.mean(to_rgb(data.get_color())) > 0.6) == light
    legend = slide.legends[0].get_window_extent()
    assert legend.x0 >= 0 and legend.x1 <= slide.bbox.x1
    # a figure that is drawn after the block is one for a page
    assert plots.predictive_bands(trees).axes[0].title.get_fontsize() == 10.0


def test_style_is_restored_after_an_error() -> None:
    before = dict(matplotlib.rcParams)
    with pytest.raises(RuntimeError), style():
        raise RuntimeError
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("bad", "error"), [({}, ValueError), ({"a": 1}, TypeError), ([], TypeError)]
)
def test_wrong_trees_are_refused(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="trees"):
        plots.training(bad)


@pytest.mark.parametrize("num_data", [20, 60, 200])
def test_uniform_inputs_have_a_gap_one_time_in_twenty(num_data: int) -> None:
    samples = np.random.default_rng(num_data).uniform(size=(2000, num_data))
    found = np.mean([gap_between(inputs) is not None for inputs in samples])
    assert found < 0.049 + 3 * (0.049 * 0.951 / 2000) ** 0.5
    assert gap_between(np.concatenate([samples[0], 1.5 + samples[1]])) is not None


def test_gap_ratio_is_the_ratio_of_the_two_sds() -> None:
    x = np.concatenate([np.linspace(-2, -1, 30), np.linspace(1, 2, 30)])
    grid = np.linspace(-3, 3, 601)
    sd = np.where(np.abs(grid) < 0.9, 4.0, 0.5)
    tree = xr.DataTree.from_dict(
        {
            "constant_data": xr.Dataset({"x": (("obs", "feature"), x[:, None])}),
            "grid": xr.Dataset(
                {
                    "x": (("grid_point", "feature"), grid[:, None]),
                    "epistemic_var": (("grid_point", "output"), sd[:, None] ** 2),
                }
            ),
        }
    )
    gap = widest_gap(tree)
    assert (gap.low, gap.high) == (-1.0, 1.0)
    assert gap.ratio == pytest.approx(8.0)


def test_the_words_about_the_gap_lie_over_no_axes() -> None:
    tree = factory.regression_1d()
    tree["constant_data"]["x"] = xr.DataArray(
        np.linspace(-3, 3, 80)[:, None] ** 3, dims=("obs", "feature")
    )
    x = tree["constant_data"]["x"]
    tree["constant_data"]["x"] = xr.where(x >= 0, x + 20, x)
    assert widest_gap(tree) is not None
    figure = plots.predictive_bands(tree)
    figure.draw_without_rendering()
    words = [
        text
        for text in figure.findobj(Text)
        if "epistemic sd" in text.get_text() and text.axes is not None
    ]
    words = [
        text for text in words if "gap" in text.get_text() or text.get_text().startswith("no ")
    ]
    assert len(words) == 1
    assert not any(words[0].get_window_extent().overlaps(ax.bbox) for ax in figure.axes)


def test_a_function_without_doubt_has_no_blue_band_in_the_legend() -> None:
    x = np.linspace(0, 1, 5)
    sd = np.ones(5)
    with style():
        figure, axes = panels(2)
        for ax, doubt in zip(axes[:, 0], (0 * sd, 0.5 * sd), strict=True):
            bands(ax, x, 0 * x, doubt, sd)
    named = [ax.get_legend_handles_labels()[1] for ax in axes[:, 0]]
    assert named == [["95 % with noise"], ["95 % with noise", "95 % of the function"]]
    assert figure.axes == list(axes[:, 0])


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))]
)
def test_the_last_row_of_panels_is_not_left_half_empty(count: int, shape: tuple[int, int]) -> None:
    _, axes = panels(count)
    assert axes[0, 0].get_gridspec().get_geometry() == shape


def test_evenly_spread_data_have_no_gap() -> None:
    tree = factory.regression_1d()
    tree["constant_data"]["x"] = xr.DataArray(
        np.linspace(-3, 3, 80)[:, None], dims=("obs", "feature")
    )
    assert widest_gap(tree) is None


def test_calibration_tells_overconfidence_from_calibration() -> None:
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4, 200, 300))
    y = rng.standard_normal(300)

    def covered_at_half(scale: float) -> float:
        tree = xr.DataTree.from_dict(
            {
                "posterior": xr.Dataset({"w": (("chain", "draw"), np.zeros((4, 200)))}),
                "posterior_predictive": xr.Dataset(
                    {"y": (("chain", "draw", "obs"), scale * draws)}
                ),
                "observed_data": xr.Dataset({"y": (("obs",), y)}),
            }
        )
        line = plots.calibration(tree).axes[0].lines[0]
        return float(np.interp(0.5, line.get_xdata(), line.get_ydata()))

    assert abs(covered_at_half(1.0) - 0.5) < 5 * np.sqrt(0.25 / 300)
    assert covered_at_half(0.3) < 0.5 - 5 * np.sqrt(0.25 / 300)


def test_a_point_estimate_is_judged_by_its_gaussian() -> None:
    points = regression_points(factory.point_estimate())
    assert np.all(points.epistemic_sd == 0)
    assert points.sample.std(0) == pytest.approx(points.aleatoric_sd, rel=0.02)


def test_leave_one_out_needs_log_q_of_an_approximation() -> None:
    tree = factory.regression_1d("SVI", iid=True)
    assert len(leave_one_out(tree).k) == 80
    bare = tree.copy()
    bare["sample_stats"] = tree["sample_stats"].to_dataset().drop_vars("log_q")
    assert leave_one_out(bare) is None


def test_a_dollar_in_a_label_is_text() -> None:
    figure = plots.predictive_bands({"cost $x^ and $y": factory.regression_1d()})
    figure.draw_without_rendering()
    assert "cost $x^ and $y" in texts(figure)


def test_training_puts_every_fit_into_one_axes() -> None:
    steps = np.arange(100.0)
    trees = {
        f"weight {w}": xr.DataTree.from_dict(
            {"history": xr.Dataset({"kl": ("step", w * steps), "loss": ("step", -steps)})}
        )
        for w in (1, 2, 3)
    }
    figure = plots.training(trees)
    assert [ax._left_title.get_text() for ax in figure.axes] == ["kl", "loss"]
    assert [len(ax.lines) for ax in figure.axes] == [3, 3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(trees)
    assert len(plots.training(trees, names=["kl"]).axes) == 1
    assert not {line.get_color() for line in figure.axes[0].lines} & {
        ALEATORIC,
        EPISTEMIC,
        PALETTE[1],
    }
    with pytest.raises(ValueError, match=r"has \['no'\], but the histories have"):
        plots.training(trees, names=["no"])
    trees["weight 3"].attrs["method"] = "MAP"
    trees["weight 2"].attrs["method"] = "SVI"
    titles = [ax._left_title.get_text() for ax in plots.training(trees, names=["loss"]).axes]
    assert titles == ["loss", "loss, SVI", "loss, MAP"]  # each on its own scale


def test_a_history_of_means_over_blocks_is_drawn_against_its_steps() -> None:
    tree = xr.DataTree.from_dict({"history": xr.Dataset({"loss": ("step", -np.arange(100.0))})})
    tree.attrs["num_steps"] = 300
    assert max(
        line.get_xdata().max() for line in plots.training(tree).axes[0].lines
    ) == pytest.approx(300, rel=0.02)


def test_counts_have_intervals_of_counts():
    rng = np.random.default_rng(0)
    x = (np.arange(60) % 2).astype(float)[:, None]
    rate = 0.4 + x[:, 0]
    draws = rng.poisson(rate, (400, 60))
    y = rng.poisson(rate)
    point = ("pred_point",)
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset({"w": (("chain", "draw"), rng.normal(size=(1, 400)))}),
            "predictions": xr.Dataset(
                {
                    "y": (("chain", "draw", *point), draws[None].astype(float)),
                    "mean": ((*point, "output"), rate[:, None]),
                    "aleatoric_var": ((*point, "output"), rate[:, None]),
                    "epistemic_var": ((*point, "output"), 0 * rate[:, None]),
                }
            ),
            "predictions_constant_data": xr.Dataset(
                {"x": ((*point, "feature"), x), "y": (point, y.astype(float))}
            ),
        }
    )
    tree.attrs = {"method": "Laplace", "iid": 1, "likelihood": "poisson"}
    bars = plots.predicted_vs_observed(tree).axes[0].collections[0].get_segments()
    ends = np.array([segment[:, 0] for segment in bars])
    assert (ends >= 0).all() and (ends == ends.round()).all()  # mean ± 1.96 sd is -0.8 to 1.6
