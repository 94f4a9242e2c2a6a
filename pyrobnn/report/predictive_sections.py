"""The figures of predictions and of their calibration."""

from __future__ import annotations

from pyrobnn import plots
from pyrobnn.diagnostics.leave_one_out import leave_one_out, loo_pit
from pyrobnn.diagnostics.points import class_points, has_classes, regression_points, replicates
from pyrobnn.groups import GRID, PRIOR_PREDICTIVE
from pyrobnn.plots.checks import expected, num_inputs
from pyrobnn.plots.style import ALEATORIC, EPISTEMIC, PALETTE
from pyrobnn.report.blocks import Block, Trees, line_key, outputs, panels, where
from pyrobnn.report.svg import inline_svg

BAND_KEY = (
    (f"--fig-{PALETTE.index(EPISTEMIC)}", "line", "mean and single functions"),
    (f"--fig-{PALETTE.index(EPISTEMIC)}", "band", "95 % of the function (epistemic)"),
    (f"--fig-{PALETTE.index(ALEATORIC)}", "band", "95 % with noise (aleatoric added)"),
    ("--fig-ink", "dot", "data"),
    ("--fig-ink", "dash", "true function, where known"),
    ("--fig-muted", "band", "widest gap in the data"),
)

_RANGE = "dashed: the range of the data. A prior far beyond the data, or inside them, is the wrong one."
PRIOR_WORDS = {
    "probabilities": "Probability of the likeliest class at the probes. Grey: 50 and 90 % of what the prior expects; "
    "blue: of the posterior. A prior near 1 is sure before it has seen any data: its weights are too large.",
    "function": "Grey: 50 and 90 % of the functions that the prior expects at the probes; blue: those of the "
    f"posterior; {_RANGE}",
    "outcome": f"Grey: 50 and 90 % of what the prior expects of each datum; blue: of the posterior; {_RANGE}",
}


def predictions(trees: Trees) -> list[Block]:
    """What is predicted, and whether the model makes data like those that it was fitted to."""
    blocks = []
    gridded = where(trees, lambda t: t.variable(GRID, "mean") is not None)
    observed = where(trees, lambda t: regression_points(t) is not None)
    for output, of, prefix in outputs(gridded or observed):
        if gridded:
            blocks.append(
                Block(
                    f"Predictive bands{of}",
                    "One panel per method, same axes. Between and beyond the data the blue band should open: "
                    "there the function is unknown. Below each, the two sds against the input.",
                    panels(
                        plots.predictive_bands(gridded, output=output),
                        f"bands{prefix}",
                        f"data, predictive mean, 95 % bands and sds against the input{of}",
                        stack=2,
                    ),
                    BAND_KEY,
                )
            )
        elif observed:
            blocks.append(
                Block(
                    f"Predicted against observed{of}",
                    f"Each {_points(observed)} with its 95 % interval; orange crosses are points whose interval "
                    "misses the diagonal. One in twenty should.",
                    panels(
                        plots.predicted_vs_observed(observed, output=output),
                        f"observed{prefix}",
                        f"observed against predicted outcome with 95 % intervals{of}",
                    ),
                )
            )
    labelled = where(trees, lambda t: class_points(t) is not None)
    if labelled:
        blocks.append(
            Block(
                "Most uncertain items",
                "The held-out items with the highest epistemic entropy: bars are class probabilities, the "
                "true class is outlined.",
                tuple(
                    inline_svg(
                        plots.most_uncertain({label: tree}),
                        alt=f"{label}: the most uncertain items with their class probabilities",
                        prefix=f"items-{index}",
                    )
                    for index, (label, tree) in enumerate(labelled.items())
                ),
                wide=True,
            )
        )
    return blocks + _checks_of_the_model(trees)


def _points(trees: Trees) -> str:
    """What the points of these trees are: held out, where all have such."""
    found = [regression_points(each) for each in trees.values()]
    held_out = all(points is not None and points.held_out for points in found)
    return "held-out point" if held_out else "point, of the training data where none were held out,"


def _checks_of_the_model(trees: Trees) -> list[Block]:
    """Replicates, residuals, and what the prior expected."""
    blocks = []
    replicated = where(trees, lambda t: replicates(t, whole=True) is not None)
    for output, of, prefix in outputs(replicated):
        figure = plots.posterior_predictive(replicated, output=output)
        shares = any(ax.get_ylabel() == "share" for ax in figure.axes)
        blocks.append(
            Block(
                f"Posterior predictive check{of}",
                "Blue: the share of each value in 50 and 95 % of the data sets that the posterior makes; dark: in the "
                "observed data. A dark line beyond the blue is a value that the model makes too rarely or too often."
                if shares
                else "Blue: densities of data sets that the posterior makes; dark: the observed data. They should look "
                "alike: skew, tails, bounds, number of modes.",
                panels(
                    figure,
                    f"replicates{prefix}",
                    f"{'shares of each value in' if shares else 'densities of'} observed and replicated data{of}",
                ),
            )
        )
    prior = where(
        trees,
        lambda t: expected(t) is not None and t.likelihood != "ordinal" and not t.is_point,
    )
    # the prior is that of the model, whatever the method: beside the posterior of chains, where there are any
    prior = dict(sorted(prior.items(), key=lambda item: item[1].is_iid)[:1])
    classes = any(has_classes(each) for each in prior.values())
    functions = any(each.variable(PRIOR_PREDICTIVE, "f") is not None for each in prior.values())
    kind = "probabilities" if classes else "function" if functions else "outcome"
    for output, of, prefix in outputs(prior):
        blocks.append(
            Block(
                f"Prior and posterior of the {kind}{of}",
                PRIOR_WORDS[kind],
                panels(
                    plots.prior_and_posterior(prior, output=output),
                    f"prior{prefix}",
                    f"prior and posterior of the {kind} at the {'data' if kind == 'outcome' else 'probes'}{of}",
                ),
            )
        )
    residual = where(trees, lambda t: num_inputs(t) > 0)
    for output, of, prefix in outputs(residual):
        figure = plots.residuals(residual, output=output)
        shown, all_of = len(figure.axes), num_inputs(next(iter(residual.values())))
        blocks.append(
            Block(
                f"Residuals against each input{of}",
                "Mean of (observed − predicted) / predicted sd in bins, one line per method; it should stay in the "
                "grey range. A slope or a bend is what the mean function misses.",
                panels(figure, f"residuals{prefix}", f"standardised residuals of each method{of}"),
                line_key(residual),
                notes=(f"The {shown} of {all_of} inputs with the largest differences.",)
                if shown < all_of
                else (),
            )
        )
    return blocks


def calibration(trees: Trees) -> list[Block]:
    """Coverage, leave-one-out PIT, reliability, and errors beside their predicted size."""
    blocks = []
    observed = where(trees, lambda t: (p := regression_points(t)) is not None and p.draws is not None)
    for output, of, prefix in outputs(observed):
        blocks.append(
            Block(
                f"Coverage{of}",
                "A calibrated method stays in the grey range; below the diagonal it is overconfident.",
                (
                    inline_svg(
                        plots.calibration(observed, output=output),
                        alt=f"Observed against claimed coverage, one line per method{of}",
                        prefix=f"coverage{prefix}",
                    ),
                ),
            )
        )
    drawn = where(trees, lambda t: loo_pit(t) is not None)
    unreliable = [
        label
        for label, t in trees.items()
        if label not in drawn and leave_one_out(t) is not None and replicates(t) is not None
    ]
    if observed and drawn:
        blocks.append(
            Block(
                "Leave-one-out PIT",
                "On the training data. An S that rises, then falls, is overconfidence.",
                (
                    inline_svg(
                        plots.loo_pit(trees),
                        alt="Leave-one-out PIT: its ECDF minus the uniform, one line per method",
                        prefix="loopit",
                    ),
                ),
                notes=(
                    f"Not drawn, since leave-one-out weights (k-hat) are unreliable and the lines would mislead: "
                    f"{', '.join(unreliable)}.",
                )
                if unreliable
                else (),
            )
        )
    labelled = where(trees, lambda t: class_points(t) is not None)
    if labelled:
        blocks.append(
            Block(
                "Reliability",
                "Accuracy in bins of confidence; below the diagonal is overconfidence. Grey bars show where "
                "the confidences lie.",
                panels(plots.reliability(labelled), "reliability", "accuracy against confidence"),
            )
        )
    blocks += _uncertainty(trees)
    for output, of, prefix in outputs(observed):
        blocks.append(
            Block(
                f"Error against uncertainty{of}",
                "Errors should grow along the dashed diagonal; a flat line says that the predicted sd knows "
                "nothing about where the errors are.",
                panels(
                    plots.error_vs_uncertainty(observed, output=output),
                    f"error{prefix}",
                    f"absolute error against predicted standard deviation{of}",
                ),
            )
        )
    return blocks


def _uncertainty(trees: Trees) -> list[Block]:
    labelled = where(trees, lambda t: (p := class_points(t)) is not None and p.epistemic is not None)
    split = where(trees, lambda t: (p := regression_points(t)) is not None and p.epistemic_sd is not None)
    blocks = []
    for output, of, prefix in [(0, "", "")] if labelled else outputs(split):
        blocks.append(
            Block(
                f"Aleatoric and epistemic{of}",
                "Sand is noise that stays, however many data there are; blue is doubt that more data would remove. Dot:"
                " median over held-out points; thick line: middle half; thin line: middle 90 %.",
                (
                    inline_svg(
                        plots.uncertainty_decomposition(trees, output=output),
                        alt=f"Aleatoric and epistemic uncertainty of each method at the held-out points{of}",
                        prefix=f"split{prefix}",
                    ),
                ),
            )
        )
    if labelled:
        blocks.append(
            Block(
                "Entropy of right and wrong predictions",
                "A useful model has its wrong predictions (orange outline) further right than its right "
                "ones.",
                panels(
                    plots.entropy_split(labelled),
                    "entropy",
                    "histograms of aleatoric and epistemic entropy, right and wrong predictions apart",
                    stack=2,
                ),
            )
        )
    return blocks
