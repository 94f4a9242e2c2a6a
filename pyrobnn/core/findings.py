"""Findings: what a fit reports about itself, as a code with its numbers; and the sentence of each code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: code → a template of the values, or a function of them
_Sentences = dict[str, str | Callable[..., str]]


@dataclass(frozen=True)
class Finding:
    """One thing that a fit reports; decisions read ``code`` and ``values``, never the sentence.

    Args:
        code: short identifier, a key of :data:`SENTENCES` or :data:`TABLES`.
        values: the numbers and names that the sentence shows, plain JSON values.

    Raises:
        KeyError: as text, where the code is unknown or a value is missing.

    Example:
        >>> str(Finding("few_effective_draws", {"draws": 100, "ess": 7.0, "quantity": "f"}))[:40]
        'the effective sample size of f is 7 (of '
    """

    code: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        template = (SENTENCES | TABLES)[self.code]
        return template(**self.values) if callable(template) else template.format(**self.values)


def of_meta(meta: Mapping[str, Any]) -> list[Finding | str]:
    """What a fit has kept in its ``meta``: its findings, and the sentences that have no code."""
    coded = findings(meta["findings"])
    known = set(map(str, coded))
    return [*coded, *(text for text in meta["warnings"] if text not in known)]


def findings(records: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings of what ``meta["findings"]`` holds."""
    return [_of_record(record) for record in records]


def _of_record(record: Mapping[str, Any]) -> Finding:
    values = {name: value for name, value in record.items() if name != "code"}
    return Finding(record["code"], values)


def warn(reports: Iterable[Finding | str]) -> None:
    """Warn of each report, at the line that called this package."""
    # the frames from this one outwards; ``stacklevel`` counts this one as 1: numbered from 2 on, each name has the
    # number of the frame that called it
    names = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe())
    ]
    level = max(i for i, name in enumerate(names, 2) if name.startswith("pyrobnn."))
    for report in reports:
        warnings.warn(
            str(report),
            UserWarning,
            stacklevel=level,
        )


def as_json(reports: Iterable[Finding | str]) -> list[dict[str, Any]]:
    """Findings as they stand in ``meta["findings"]``: the code beside its numbers."""
    coded = [report for report in reports if isinstance(report, Finding)]
    return [{"code": finding.code, **finding.values} for finding in coded]


def _lost_jobs(reasons: Mapping[str, str], num_jobs: int) -> str:
    lines = "; ".join(f"job {number}: {reason}" for number, reason in reasons.items())
    return (
        f"{len(reasons)} of {num_jobs} jobs were lost, and the posterior is of the others ({lines}). Run them again "
        "with the same checkpoint, or more jobs"
    )


def _search_unfinished(
    steps: int = 0,
    gain: float | None = None,
    fall: float | None = None,
    limit: float = 0.0,
) -> str:
    remedy = "raise num_steps (or the learning rate)"
    if gain is None and fall is None:
        return f"the optimisation stopped after {steps} steps, too few to show that it reached its optimum; {remedy}"
    if gain is None:
        evidence = f"its loss still fell by {fall:.3g} nats over the last fifth"
    else:
        evidence = f"ten more steps on all data lower the loss by {gain:.3g} nats"
    return f"the optimisation stopped far from its optimum: {evidence} (at most {limit:.3g} at an optimum); {remedy}"


def _not_a_mode(
    gradient_norm: float,
    distance: float,
    given: bool,
    saddle_gain: float = 0.0,
) -> str:
    remedy = (
        "train longer (num_steps): neither the optimiser nor L-BFGS on all of the data reached it"
    )
    if saddle_gain:
        return (
            "the centre is not a mode: the search ended at a saddle, from which further steps have raised the log "
            f"joint by {saddle_gain:.3g} nats and reached no mode; log_evidence may be many nats off: {remedy}"
        )
    if given:
        remedy = "train longer, or omit 'init': a given point is not moved"
    return (
        f"the centre is not a mode: the gradient norm is {gradient_norm:.3g} (0 at a mode), and the centre lies "
        f"{distance:.3g} posterior standard deviations from one, by Newton's step, which would raise the log joint by "
        f"{0.5 * distance**2:.3g} nats: {remedy}"
    )


def _interrupted(
    method: str,
    done: int,
    total: int,
    unit: str,
    checkpoint: str = "",
) -> str:
    goes_on = f" (the same fit with checkpoint={checkpoint!r} goes on)" if checkpoint else ""
    return f"{method} was interrupted by Ctrl-C after {done} of {total} {unit}: this is not a finished fit{goes_on}"


def _diverged(
    count: int,
    total: int,
    target_accept: float,
    followed: int = 0,
    impossible: int = 0,
    places: Iterable[str] = (),
) -> str:
    text = (
        f"{count} of {total} transitions diverged (few or none expected): the sampler could not follow the "
        "density there, and may have missed the region beyond; where all diverged, the draws are worthless. "
    )
    if impossible:
        text += f"Followed again, {impossible} of {followed} of them end at impossible values: {'; '.join(places)}. "
        text += (
            "There the density is zero: restrict the priors, or compute the parameter so that it is always "
            "possible. "
        )
    return text + (
        f"Raise target_accept (now {target_accept:g}), set a smaller step_size, or reparameterise the model"
    )


def _far_update(distance: float = 0.0, dip: float | None = None, **counts: int) -> str:
    """Of an update whose draws descend from few of the old ones, or, with a ``dip``, whose centre moved far."""
    if dip is None:
        way = (
            "it took {steps} steps and {gradients} gradients, and the {draws} draws descend from {ancestors} of the "
            "old draws."
        )
    else:
        down = (
            ", across a dip of {dip:.2g} nats in the log density: it may be another mode."
            if dip > 0.1
            else "."
        )
        way = "the centre of the approximation moved by {distance:.2g} standard deviations" + down
    way = way.format(distance=distance, dip=dip, **counts)
    return f"the update moved far: {way} Fit again on all rows where accuracy matters"


def _modes_unsettled(
    error: float | None = None,
    drift: float | None = None,
    worth: float = 0.0,
    change: float | None = None,
    **_: float,
) -> str:
    """Of modes whose weights exchanges did not settle, or, without a ``drift``, of exchanges not finished."""
    if drift is None:
        outcome = "were not finished"
    else:
        largest = max(drift, change or 0.0, key=abs)
        outcome = (
            "did not settle the weights of the modes: the log evidence still changed by "
            f"{largest:+.2g} nats (standard error {error:.2g})"
        )
    return (
        "the particles split into several modes between prior and posterior, and exchanges between temperatures "
        f"{outcome}; the effective sample size of the draws is {worth:.0f}. Raise num_particles"
    )


def _first_three(names: list[str]) -> str:
    named = ", ".join(map(repr, names[:3]))
    return f"{named} and {len(names) - 3} more" if len(names) > 3 else named


def _held_points(names: list[str]) -> str:
    return (
        f"{_first_three(names)}: a sampler does not fit point parameters and holds them at their initial values, "
        "which do not depend on the data; give them a prior (a learned noise: "
        "HomoskedasticGaussian(dist.HalfNormal(1.0))), "
        "or pass fitted ones: fit(init=MAP().fit(...)), or of a net DeepEnsemble's, whose members start the "
        "chains at different points"
    )


def _wrong_gradient(gradient: float, slope: float, names: list[str] | None = None) -> str:
    if names is None:
        return (
            "the gradient of the net is not its derivative: along a random direction of the weights autograd gives "
            f"{gradient:.3g} and finite differences {slope:.3g}. Weights behind torch.no_grad(), .detach(), .data or "
            "padding_idx are not fitted and keep their prior; or a custom backward is wrong. Fixed weights need "
            "no prior"
        )
    return (
        f"the gradient for {_first_three(names)} is not the derivative of the log joint density: along a random "
        f"direction autograd gives {gradient:.3g} and finite differences {slope:.3g}. Values behind torch.no_grad(), "
        ".detach(), .data, .item(), NumPy or torch.tensor([…]) are not fitted to the data; or a custom backward is "
        "wrong. Compute with the sampled tensors themselves (torch.stack instead of torch.tensor)"
    )


def _not_refined(
    seconds: float,
    transitions: int,
    nested_rhat: float | None,
    limit: float,
    drift: float | None,
    ess: float | None,
    modes: int = 1,
) -> str:
    apart = ""
    if modes > 1:
        apart = (
            f" Groups of chains stay in {modes} modes, weighted by Laplace's estimate of their evidence, which is "
            "rough: use SMC."
        )
    shown = [
        "not finite" if value is None else f"{value:.3g}" for value in (nested_rhat, drift, ess)
    ]
    return (
        f"after {seconds:g} seconds and {transitions} transitions the short chains have not arrived at the posterior: "
        f"nested R-hat is {shown[0]} (at most {limit:.3g} where they have), the means still drift by {shown[1]} sd (at "
        f"most 0.25), and the effective sample size is {shown[2]} (400 expected).{apart} Raise seconds, or run NUTS"
    )


def _rows_together(change: float | None) -> str:
    how = (
        "is not a number" if change is None else f"changes by {change:.2g} beside seven other rows"
    )
    return (
        "the output of the net for a row depends on the other rows of its batch (that of one row "
        f"{how}; no change expected): mini-batches and predictions see different functions, and computations row by "
        "row, such as those of the curvature, are wrong. Standardise with numbers of the training data (standardizer=) "
        "instead of those of the batch"
    )


def _batch_statistics(layers: list[str]) -> str:
    return (
        f"the net is in training mode, and its batch-norm layers ({_first_three(layers)}) use the statistics of each "
        "batch: the density of a batch depends on the other rows of the batch, so what is fitted depends on the size "
        "of the batches too. Predictions use running statistics of the training data, computed for every draw. With "
        "net.eval() before building the BNN the layers use the statistics that the net has stored"
    )


def _dropout_noise(layers: list[str]) -> str:
    return (
        f"the net is in training mode, and its dropout layers ({_first_three(layers)}) draw at random in every step: "
        "this is noise of the training, which neither prior nor likelihood contains, so what is fitted is not the "
        "declared posterior. Predictions drop nothing. With net.eval() before building the BNN nothing is dropped; "
        "MCDropout makes draws of the dropout itself"
    )


def _constant(features: list[str]) -> str:
    named = ", ".join(map(repr, features))
    if len(features) == 1:
        return f"the feature {named} is constant: nothing can be learned from it"
    return f"the features {named} are constant: nothing can be learned from them"


def _category(name: str) -> str:
    return repr(name) if name else "a missing value"


def _new_categories(column: str, rows: int, new: list[str]) -> str:
    listed = ", ".join(_category(name) for name in new)
    return (
        f"the column {column!r} has categories that do not occur in the training data (rows: {rows}; {listed}): "
        "they are encoded as none of the known categories"
    )


def _new_levels(column: str, rows: int, new: list[str]) -> str:
    listed = ", ".join(_category(name) for name in new)
    return (
        f"the column {column!r} has categories that do not occur in the training data (rows: {rows}; {listed}): "
        "their effect may be any that categories have, and predictions are as wide as that"
    )


#: of the draws: these alone lower a verdict on them
DRAWS: _Sentences = {
    "elbo_not_finite": (
        "the ELBO is {elbo:g}, not finite: some draws of the guide have no finite density. Use a smaller lr, "
        "Optimizer(clip_norm=…), or a simpler guide"
    ),
    "elbo_below_best": (
        "the ELBO ends at {elbo:.1f} +/- {error:.2g} and was at least {best:.1f} before: the fit has not "
        "converged. Use a smaller lr, more steps, or the schedule 'hold_cosine'"
    ),
    "interrupted": _interrupted,
    "search_unfinished": _search_unfinished,
    "not_a_mode": _not_a_mode,
    "prior_raised": (
        "the log prior of {sites} is flat or convex at the mode: the prior precision was raised by up to "
        "{raised:.3g}, so the posterior may be too narrow there"
    ),
    "prior_averaged": "the prior precision varies over a layer's outputs: the Kronecker factors use its mean",
    "form_by_cost": (
        "all correlations of {size:,} weights take about {gigabytes:,.1f} GB and {seconds:,.0f} s of one core, so the "
        "precision has structure={chosen!r}{loss}; structure='full' keeps all of them"
    ),
    "costly_curvature": (
        "the full precision of {size:,} weights takes about {gigabytes:,.1f} GB and {seconds:,.0f} s of one core: "
        "structure='kron' is cheaper, and so are subset='last_layer' and structure='diag'"
    ),
    "curvature_unresolved": (
        "the curvature of the likelihood reaches {top:.2g} times the prior precision, and float64 resolves "
        "nothing below "
        "{cut:.2g} times it: in {count} directions the posterior keeps the width of the prior, which may be too "
        "wide, and log_evidence may be too high by {error:.2g} nats. Use a larger noise or a tighter prior"
    ),
    "hessian_indefinite": (
        "the Hessian is not positive definite (lowest curvature {lowest:.3g}), so {added:.3g} was added to it: the "
        "standard deviations are not those of the posterior. Find a better mode, or use curvature='ggn'"
    ),
    "hessian_indefinite_of_program": (
        "the Hessian is not positive definite (lowest curvature {lowest:.3g}), so {added:.3g} was added to it: the "
        "standard deviations are not those of the posterior. The search may have ended where the joint density has no "
        "mode, as in a hierarchy whose scale goes to zero: use NUTS, or give the scale a prior that keeps it from zero"
    ),
    "draws_unresolved": (
        "{count} of {total} weights are the same in all draws: {dtype} does not resolve so narrow a posterior. Use a "
        "larger noise, or a float64 net (net.double())"
    ),
    "diverged": _diverged,
    "stuck_chains": (
        "{stuck} of {num_chains} chains did not move: all draws of such a chain are the same. Start elsewhere "
        "(another seed, init), or reparameterise the model"
    ),
    "tree_depth": (
        "{share:.0%} of the draws reached the maximum tree depth {max_tree_depth}: trajectories are cut short, "
        "and the chains mix slowly. Raise max_tree_depth, run a longer warm-up, or scale the inputs"
    ),
    "chains_disagree": (
        "the chains have not mixed: R-hat of {quantity} is {rhat:.3g} (at most 1.01 where chains have mixed), so the "
        "draws are not yet those of the posterior. A longer run does not join chains that stay in separate "
        "modes: use "
        "SMC, which weights modes by their mass. Otherwise raise num_warmup and num_draws, or reparameterise "
        "the model"
    ),
    "few_effective_draws": (
        "the effective sample size of {quantity} is {ess:.0f} (of {draws} draws): raise num_draws, scale the inputs, "
        "or reparameterise the model"
    ),
    "slow_energy": (
        "the energy of chain {chain} changes slowly (BFMI {bfmi:.2f}, at least 0.3 expected): the chain may "
        "have missed "
        "the tails of the posterior, or a narrow part of it, such as near a scale of zero. Reparameterise the model "
        "(non-centred), or raise num_draws"
    ),
    "log_density_gap": (
        "the chains differ in log density: that of chain {low} is {gap:.3g} nats below that of chain {high}, "
        "while within "
        "a chain it varies by {spread:.2g}. Raise num_warmup; chains are slower the smaller an inferred noise is: a "
        "LogNormal prior keeps it above the accuracy of the targets"
    ),
    "warmup_unfinished": "the warm-up was not finished after {num_warmup} transitions: {reason}",
    "not_converged": (
        "NUTS(until='converged') has not converged, stopped by {stopped}: after {draws} draws of each chain the "
        "largest R-hat is {rhat:.3f} ({worst}; at most 1.01 where chains have converged), and the smallest effective "
        "sample size is {ess:.0f} ({slowest}; 400 were asked for). Raise num_draws or max_seconds; chains in "
        "separate modes never agree: use SMC, which weights modes by their mass"
    ),
    "not_refined": _not_refined,
    "not_repaired": (
        "nothing that repair tried in {seconds:.0f} seconds has helped ({tried}); still wrong: {wrong}. The draws are "
        "those that were given: do not rely on them"
    ),
    "particles_lag": (
        "at one temperature after the other the MCMC steps still raised the log likelihood of the particles: these "
        "lag behind the posterior, many of the draws lie outside of it, and the log evidence is too low by {lag:.2g} "
        "nats or more. Raise num_particles, max_moves and max_leapfrogs; after an update fit again on all rows"
    ),
    "modes_unsettled": _modes_unsettled,
    "far_update": _far_update,
    "wrong_gradient": _wrong_gradient,
    "lost_jobs": _lost_jobs,
    "worse_mean": (
        "the mean of the iterates is worse than the start by {rise:.3g} nats per datum: SGD left the mode; use a "
        "smaller lr than {lr:g}"
    ),
}
#: of the model and its data
MODEL: _Sentences = {
    "tuning_at_bound": "the tuned prior precision or noise is at the bound of its range: the data do not "
    "determine it",
    "cross_validation_at_edge": (
        "cross-validation ended at the edge of the factors it tries, {factor:g}: the held-out data do not determine "
        "this prior precision. There is no log_evidence: the mode is that of the declared prior, not of one so far "
        "from it"
    ),
    "loader_epoch": (
        "an epoch of the DataLoader draws {drawn} times from {size} points and contains {points} of them: the "
        "posterior is "
        "as wide as for {num_data} points, and each counts as often as it is drawn. Draw every point once "
        "(drop_last=False)"
    ),
    "prior_cut": (
        "the prior of {site!r} is a {law} with {share:.1%} of its mass where {place}: that part is cut off, and the "
        "model is the one with the rest of the prior. Give {site!r} a prior on the positive numbers (HalfNormal, "
        "LogNormal, Gamma)"
    ),
    "impossible_under_prior": (
        "{place}, and is not in {share:.0%} of the draws from the prior of the program: there the density is zero, so "
        "the model is the one with the rest of its prior, and the draws end where that does. Compute it so that it "
        "always is (exp or softplus of a scale, sigmoid of a probability), or restrict the priors"
    ),
    "held_points": _held_points,
    "rows_together": _rows_together,
    "constant_function": (
        "the fitted function is constant: over {rows} rows of the training data its predictions vary by {spread:.2g} "
        "of the spread of the targets, or in probability. Either the inputs tell nothing of the targets, and this is "
        "right, or the prior outweighs the data, as FanInNormal's does in deep ReLU nets whose weights outnumber the "
        "rows by far: give the weights a wider prior, IIDPrior(Normal(0, 1)), or SVI a kl_weight below one; or train "
        "the net by MLE and pass it to pb.posthoc(net, x, y)"
    ),
    "no_better_than_shares": (
        "the fitted probabilities are no better than the shares of the classes: {density:.3f} nats a row at {rows} "
        "rows of the training data, and the shares have {shares:.3f}. The inputs tell nothing of the classes, or the "
        "fit has not found what they tell: raise num_steps, change lr, give the weights a wider prior, "
        "IIDPrior(Normal(0, 1)), or SVI a kl_weight below one; or train the net by MLE and pass it to "
        "pb.posthoc(net, x, y)"
    ),
    "batch_statistics": _batch_statistics,
    "dropout_noise": _dropout_noise,
    "rows_outside": (
        "{count} new rows lie further outside the earlier inputs than these spread: the inputs are standardised "
        "as in the first fit, and the net extrapolates there. Fit again with a new standardizer"
    ),
    "deterministic_too_large": (
        "the deterministic sites {names} would take {gib:.1f} GiB and are not kept: pyro.infer.Predictive(program, "
        "posterior_samples=posterior.stacked()) computes them in parts"
    ),
    "deterministic_failed": "the deterministic sites {names} could not be computed at every draw ({reason}) and "
    "are not kept",
    "deterministic_gaps": "the deterministic site {name!r} is NaN or infinite in {count} of {draws} draws",
}
#: of how it ran
RUN: _Sentences = {
    "prior_narrowed": (
        "the standard deviations of the prior are {share:.2g} times those that FanInNormal() sets by a rule in large "
        "nets, which nobody declared: the evidence is {gain:,.0f} nats higher. To keep the rule's, pass tune=None; to "
        "declare your own, pass IIDPrior(Normal(0, s)) or FanInNormal(floor=s)"
    ),
    "unbatched_chains": "the chains run one after the other, much slower: {why}",
    "float64_run": (
        "the run went on in float64, 1.3 to 2.4 times as slow: {reason}. The draws are float64, and "
        "posterior.stacked() rounds them to the type of the program; centre and scale the data to stay in float32"
    ),
    "launched_one_by_one": (
        "{why}: Python launches every operation of every step on {device}, one at a time, and a small model may run "
        "slower than on the CPU"
    ),
}
#: of the log evidence
EVIDENCE: _Sentences = {
    "one_island": (
        "a single island shows neither the error of log_evidence nor whether there are enough particles: "
        "use num_islands=4"
    ),
    "evidence_uncertain": (
        "the log evidence is uncertain: its 95 % interval, by the spread of the islands, goes from {low:.2f} to "
        "{high:.2f}, and each island makes up an equal share of the draws. Raise num_particles"
    ),
}
#: of tables and their rows, not of a fit: not in SENTENCES
TABLES: _Sentences = {
    "constant_features": _constant,
    "far_rows": "{rows:,} of {total:,} rows lie far beyond the training data, most of them in {feature!r}, "
    "which goes from {low:.6g} to {high:.6g} there: predictions for such rows rest on the prior, not on the data",
    "equals_target": "the feature {feature!r} equals the target {target!r}: drop it",
    "merged_classes": "classes of the target {target!r} that differ only in upper and lower case, such as "
    "{one!r}, are merged",
    "rows_dropped": "{count} of {rows} rows have a missing value and are dropped",
    "column_of_labels": "the column {column!r} is text with {values} different values in {rows} rows ({first!r} …): "
    "taken for a row label and dropped",
    "rare_categories": "the column {column!r} has {categories} categories: the {kept} most frequent have an input "
    "each, and the other {rest} rows have none",
    "new_categories": _new_categories,
    "new_levels": _new_levels,
    "new_gaps": "the column {column!r} has missing values (rows: {rows}) and had none in the training data: they "
    "are filled with the median there, {fill:g}",
    "decimal_commas": "decimal commas are read as decimal points",
    "unnamed_columns": "{count} of {total} columns have no name and are dropped: name those to be used",
}

#: by the question that they bear on; every code of a fit has one
FINDINGS = {
    "draws": DRAWS,
    "model": MODEL,
    "run": RUN,
    "evidence": EVIDENCE,
}
SENTENCES = DRAWS | MODEL | RUN | EVIDENCE
