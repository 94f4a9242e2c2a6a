"""What the checks of a verdict say, by code: the fault in a few words, what was seen, and what helps against it.

What was seen stands by the code that was found, or else by the name of the check; both show the check's numbers. An
action stands here only where a record shows that following it helped; of the model none does, so none is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

#: a sentence with {names} of numbers, or a function that returns one; what it returns is formatted again, so what is
#: filled in later stands in {…}, in an f-string in {{…}}
Template = str | Callable[..., str]
#: what a sentence shows of a check, plain JSON values by their names
Value: TypeAlias = str | float | Sequence[str | float] | None
Numbers: TypeAlias = Mapping[str, Value]

#: code → what is wrong, in a few words
FAULTS = {
    "not_checked": "part of this could not be checked",
    "few_data": "there are too few data",
    "few_replicates": "there are too few replicates of the data",
    "joint_event": "the data are one event whose values depend on each other",
    "own_latents": "each datum, or a few data together, have a latent value of their own",
    "selected_by_outcome": "which distribution a row has depends on its outcome",
    "factor_only": "the program states its data by pyro.factor, which no replicates can be drawn from",
    "no_data_stored": "the tree holds no data",
    "linearized_only": "the draws were compared only with the posterior of the linearised network",
    "conditional_only": "the draws were compared only with the posterior of some weights, given the others",
    "failed_to_run": "a check could not be computed",
    "unreadable": "the stored draws cannot be judged",
    # the draws as they are
    "finite": "some values are NaN or infinite",
    "no_draws": "there are no draws",
    "draws_not_finite": "some draws are NaN or infinite",
    "interrupted": "the fit was interrupted",
    "unfinished": "the optimisation stopped before its optimum",
    "few_steps": "the optimisation took too few steps",
    "tempered": "the draws are of a tempered posterior, not of the posterior itself",
    "fit_warned": "the fit gave a warning",
    "point_estimate": "it is a point estimate, without uncertainty about its parameters",
    "no_density": "its draws have no density and cannot be tested against the posterior",
    "density_missing": "its log densities were not computed, so nothing tests it against the posterior",
    "one_point": "its draws are all nearly the same",
    "chain_stuck": "a chain never moved",
    "draws_repeat": "many draws repeat the draw before",
    "moving": "many draws repeat the draw before",
    # convergence
    "one_chain": "a single chain cannot show what it missed",
    "chains_short": "the chains are too short to show whether they converged",
    "chains_exchanged": "the chains are too short, or the dimensions of chains and draws are exchanged",
    "common_start": "all chains started at one point, so their agreement shows little",
    "nothing_identified": "nothing that is stored shows whether the chains converged",
    "rhat_function": "the chains disagree with each other",
    "chains_disagree": "the chains disagree with each other",
    "labels_switched": "the chains agree but for the order of a mixture's components (label switching)",
    "one_order": "the draws keep one order of a mixture's components",
    "chains_slow": "the chains mix too slowly",
    "ess_function": "the effective sample size is too small",
    "divergences": "the sampler diverged, and may have missed part of the posterior",
    "bfmi": "the sampler explores the tails too slowly",
    # the target
    "importance": "the approximation differs from the posterior",
    "khat": "the approximation is too narrow in some direction",
    "khat_infinite": "the approximation is too narrow in some direction",
    "few_draws": "there are too few draws",
    "density_not_finite": "the log density is not finite at some draws",
    "function_moves": "the draws of the function do not have the posterior's mean and spread",
    "beside_posterior": "the function does not have the posterior's mean and spread",
    "sites_beside_posterior": "a site does not have the posterior's mean and spread",
    "moves_short": "short chains from these draws did not reach the posterior in the time that a check may take",
    "density_moves": "the log density of the draws does not have the posterior's mean and spread",
    "virial": "the draws are narrower or wider than the posterior",
    "score": "the draws are centred in the wrong place",
    "reference": "the function differs from that of the reference run",
    # the model
    "held_out_rows": "held-out rows also occur among the training rows",
    "rows_repeated": "training rows occur more than once",
    "pattern": "the errors depend on an input, so the model misses a pattern",
    "row_order": "the errors of neighbouring rows depend on each other",
    "coverage_by_region": "the intervals are too narrow in one region and too wide in another",
    "across_outputs": "the errors of the outputs depend on each other otherwise than in the model",
    "pit": "the predictions are not calibrated",
    "loo_pit": "the predictions are not calibrated",
    "ece": "the class probabilities are not calibrated",
    "too_narrow": "the predictive intervals are too narrow",
    "too_wide": "the predictive intervals are too wide",
    "biased": "the predictions are biased",
    "heavy_tails": "the errors have heavier tails than the model's noise",
    "overconfident": "the class probabilities are overconfident",
    "underconfident": "the class probabilities are underconfident",
    "class_shares": "the classes are not as frequent as predicted",
    "loo_khat": "a few observations dominate the fit",
    "loo_exact": "a few observations dominate the fit",
    "temperature": "the class probabilities are too sharp or too flat",
    "baseline": "a linear model predicts better",
    # on request
    "copied_chains": "some chains are copies of others",
    "repeated_draws": "draws occur more than once",
    "log_likelihood": "the stored log-likelihood is not that of these data",
}


# directions, which a sentence gives where its check did not pass


def _draws_are(
    status: str,
    ratio: float,
    shift: float = 0.0,
) -> str:
    """What the sd of draws over the right one, and the shift of their mean in sds, say of the draws."""
    if status not in ("warn", "fail"):
        return ""
    return f": the draws are {_direction(ratio, shift) or 'not those of the posterior'}"


def _direction(ratio: float, shift: float) -> str:
    """What an sd over the right one, and the shift of a mean in sds, say; empty where both are nearly right.

    >>> _direction(2.0, 1.0), _direction(0.5, 0.0), _direction(1.1, 0.1)
    ('too wide and centred in the wrong place', 'too narrow', '')
    """
    faults = []
    if ratio > 1.25:
        faults.append("too wide")
    elif ratio < 0.8:
        faults.append("too narrow")
    if shift > 0.25:
        faults.append("centred in the wrong place")
    return " and ".join(faults)


def _changed(inverse: float) -> str:
    """How an sd became so many times as large.

    >>> _changed(0.5), _changed(2.0)
    ('fell to 0.50 times its value', 'rose to 2.00 times its value')
    """
    return f"{'fell' if inverse < 1.0 else 'rose'} to {inverse:.2f} times its value"


_MOVED = "Moved by Hamiltonian Monte Carlo, which should not change correct draws,"


def _function_moves(
    status: str,
    inverse: float,
    shift: float,
    **_: Value,
) -> str:
    return (
        f"{_MOVED} the sd of the function (of a program: of its sites) {_changed(inverse)} and its mean shifted by "
        f"{shift:.2f} sd (medians; 1 and 0 expected){_draws_are(status, 1.0 / inverse, shift)}."
    )


_REGIONS = {
    "data": "at the data",
    "permuted": "at rows whose columns were permuted",
    "beyond": "in the box of the data widened by a quarter",
    "user": "at the inputs that were asked for",
}


def _beside(
    status: str,
    ratio: float,
    shift: float,
    worst_shift: float,
    worst_factor: float,
    noun: str,
) -> str:
    """What a comparison says of the draws: in the median of inputs or values, or of a tenth where that is right."""
    if status in ("warn", "fail") and not _direction(ratio, shift):
        return (
            f": for one {noun} in ten the mean is {worst_shift:.2f} sd away or more, and for one in ten the sd is off "
            f"by a factor of {worst_factor:.2f} or more"
        )
    return _draws_are(status, ratio, shift)


def _beside_posterior(
    status: str,
    inverse: float,
    shift: float,
    region: str,
    arrived: bool,
    linearized: bool,
    worst_shift: float = 0.0,
    worst_factor: float = 1.0,
    **_: Value,
) -> str:
    where = _REGIONS.get(region, region)
    draws = "the linearised net" if linearized else "these draws"
    if arrived:
        compared = (
            "the posterior of the net itself, which short chains from these draws have reached"
        )
    else:
        compared = "short chains that began at these draws and have not yet reached the posterior of the net"
    return (
        f"Compared with {compared}, the sd of the function by {draws} is {1.0 / inverse:.2f} times as large and its "
        f"mean is {shift:.2f} sd away {where} (medians; 1 and 0 expected)"
        f"{_beside(status, 1.0 / inverse, shift, worst_shift, worst_factor, 'input')}."
    )


def _sites_beside_posterior(
    status: str,
    inverse: float,
    shift: float,
    worst_shift: float = 0.0,
    worst_factor: float = 1.0,
    **_: Value,
) -> str:
    fault = _beside(status, 1.0 / inverse, shift, worst_shift, worst_factor, "value")
    return (
        "Compared with the posterior, which short chains from these draws have reached, the sd of {region} is "
        f"{1.0 / inverse:.2f} times as large and its mean is {shift:.2f} sd away (1 and 0 expected; medians where it "
        f"has many values){fault}."
    )


def _density_moves(
    status: str,
    inverse: float,
    shift: float,
    **_: Value,
) -> str:
    conclusion = ""
    if status in ("warn", "fail"):
        conclusion = ": it is centred in the wrong place"
        if not 0.8 <= inverse <= 1.25:
            amount = "much" if inverse < 1.0 else "little"
            conclusion = f": it varies too {amount} over the draws"
    return (
        f"{_MOVED} the sd of the log density {_changed(inverse)} and its mean shifted by {shift:.2f} sd "
        f"(1 and 0 expected){conclusion}."
    )


def _virial(status: str, value: float, **_: Value) -> str:
    template = "The variance of the draws of {where} is {value:.2f} times what the model's density implies (1 expected)"
    if status not in ("warn", "fail"):
        return f"{template}."
    return f"{template}: the draws are too {'wide' if value > 1.0 else 'narrow'}."


def _score(status: str, **_: Value) -> str:
    template = (
        "The gradient of the log density with respect to {where}, averaged over the draws, is {value:.2f} "
        "of its sd from zero (0 expected)"
    )
    if status not in ("warn", "fail"):
        return f"{template}."
    return f"{template}: the draws are centred in the wrong place."


def _importance(status: str, ratio: float, **_: Value) -> str:
    return (
        "Importance weights, which correct the draws towards the posterior, change probabilities by up to "
        f"{{distance:.2f}} and multiply sds by {ratio:.2f} (0 and 1 expected){_draws_are(status, 1.0 / ratio)}."
    )


def _reference(
    status: str,
    at: str,
    ratio: float,
    **_: Value,
) -> str:
    where = "test inputs in and around the data" if at == "probes" else "the held-out points"
    return (
        "Compared with the reference run (chains that sample the posterior itself once they have converged), at "
        f"{where} the function lies {{distance:.2f}} sd away and its sd is {ratio:.2f} times as large "
        f"(0 and 1 expected){_draws_are(status, ratio)}."
    )


# the model

#: where PIT values come from → what they are of
_VALUES = {
    "held-out": "held-out values",
    "left-out": "training values, each predicted without itself,",
    "training": "training values",
    "one-step": "values, each predicted from those before it,",
}
_OUTSIDE = (
    "{outer:.0%} of {count:,} {values} fall outside their 90 % interval (10% expected, p = {p:.2g})"
)


def _biased(mean: float, **_: Value) -> str:
    return (
        "{count:,} {values} lie at quantile {mean:.2f} of their predictions on average (0.50 expected, p = {p:.2g}): "
        f"the predictions are too {'low' if mean > 0.5 else 'high'}."
    )


def _temperature(status: str, value: float, **_: Value) -> str:
    template = (
        "Raised to the power {value:.2f}, the class probabilities fit the {count:,} labels best "
        "(1 expected, p = {p:.2g})"
    )
    if status not in ("warn", "fail"):
        return f"{template}."
    return f"{template}: the probabilities are too {'sharp' if value < 1.0 else 'flat'}."


def _class_shares(
    status: str,
    seen: float,
    said: float,
    **_: Value,
) -> str:
    template = (
        "Class {which} makes up {seen:.0%} of the {count:,} {where} values, and {said:.0%} were predicted "
        "(p = {p:.2g})"
    )
    if status not in ("warn", "fail"):
        return f"{template}."
    return f"{template}: it is predicted too {'rarely' if said < seen else 'often'}."


def _confidence(gap: float, **_: Value) -> str:
    side = "above" if gap > 0.0 else "below"
    fault = "sharp" if gap > 0.0 else "flat"
    return (
        f"On {{count:,}} held-out values the mean confidence is {abs(gap):.3f} {side} the accuracy (calibration error "
        f"{{value:.3f}}, up to {{limit:.3f}} expected by chance): the probabilities are too {fault}."
    )


#: how large an effect on the errors may be: one that chance explains is no fault, however large
_ALLOWED = "(up to {limit:.2g} allowed, p = {p:.2g})"
_ALLOWED_BY_CHANCE = "(up to {limit:.2g} allowed, more where chance explains it; p = {p:.2g})"


def _pattern(status: str, **_: Value) -> str:
    if status in ("warn", "fail"):
        return f"The errors depend most on {{where}}: effect {{value:.2f}} {_ALLOWED}."
    return (
        "The errors show no dependence that matters: the largest effect, of {where}, is {value:.2f} "
        f"{_ALLOWED_BY_CHANCE}."
    )


def _row_order(status: str, **_: Value) -> str:
    if status in ("warn", "fail"):
        return (
            "The errors of neighbouring rows depend on each other: effect {value:.2f} "
            f"{_ALLOWED}."
        )
    return (
        "The errors of neighbouring rows show no dependence that matters: effect {value:.2f} "
        f"{_ALLOWED_BY_CHANCE}."
    )


def _loo_khat(status: str, count: int, **_: Value) -> str:
    khats = "(Pareto k-hat up to {value:.2f}; reliable up to {limit:.2f})"
    if count == 0:
        return f"Leave-one-out estimates are reliable for all {{total:,}} observations {khats}."
    dominate = ", which dominate the fit" if status in ("warn", "fail") else ""
    return (
        "Leave-one-out estimates are unreliable for {count:,} of {total:,} observations"
        f"{dominate} {khats}."
    )


_SCORES = {
    "crps": "CRPS (lower is better)",
    "crps_standardized": "CRPS in standard deviations of the outcomes (lower is better)",
    "log_prob": "log density (higher is better)",
}


def _baseline(score: str, **_: Value) -> str:
    return (
        f"The {_SCORES.get(score, score)} of these predictions is {{own:.4g}}, and that of the baseline ({{which}}) is "
        "{floor:.4g}."
    )


_RHAT = "R-hat of {where} is {value:.3f} (at most {limit:.3g} where chains have converged): "

#: code, or name of a check → what was seen
SEEN: dict[str, Template] = {
    "not_checked": "Too little is stored to check the {part}.",
    "few_data": "There are {count:,} observed values, and a check of the model needs {needed} or more.",
    "few_replicates": lambda count, **_: (
        f"There {'is 1 replicate' if count == 1 else f'are {count} replicates'} of the data, and a check of the model "
        "needs {needed} or more."
    ),
    "joint_event": "The values of {where} are one event (or a few), in which they depend on each other given the "
    "parameters. The event is not Gaussian, is masked, or is too large to predict each value from those before it.",
    "own_latents": "A site has {num_values:,} values for {num_data:,} observed ones. Each is drawn to its data: the "
    "errors of data that it has seen depend on their prediction in a right model too, and importance weights do not "
    "show the predictions without them. Held-out data would.",
    "selected_by_outcome": "Each row has its term in one of several sites ({where}) by its outcome, as censored and "
    "uncensored times have. Data drawn from such sites are not like those observed, so the two are not compared.",
    "factor_only": "The program states its data by pyro.factor, which has no distribution to draw replicates from.",
    "no_data_stored": "The tree holds no observed data to compare the model with: give to_datatree the data of the "
    "fit, x and y.",
    "linearized_only": "The predictions are those of the network linearised at the mode. The Gaussian is the posterior "
    "of that linear model by construction; nothing here compares it with the posterior of the network itself.",
    "conditional_only": "Some weights (or sites) were held at one value. The draws are of the others given these; "
    "nothing here compares them with the posterior of all of them.",
    "failed_to_run": "This check could not be computed: {error}.",
    "unreadable": "These stored draws cannot be judged: {error}.",
    # the draws as they are
    "finite": "{count:,} values are NaN or infinite (none expected): {listed}.",
    "no_draws": "There are no draws.",
    "draws_not_finite": "{count:,} values of the draws are NaN or infinite (none expected).",
    "interrupted": "The fit was interrupted when it had {count:,} draws.",
    "unfinished": "A few more steps of the optimisation would gain {value:.3g} nats of log density (at most "
    "{limit:.3g} at an optimum): it stopped too early.",
    "few_steps": "The optimisation took {value:.0f} steps; fewer than {limit:.0f} cannot show that it reached its "
    "optimum.",
    "tempered": lambda value, **_: (
        f"The draws are at temperature {value:.3g}, not 1: they are too {'wide' if value > 1.0 else 'narrow'}."
    ),
    "fit_warned": "The fit warned: {first}.",
    "point_estimate": "{method} is a point estimate: its predictions have no uncertainty about the parameters.",
    "no_density": "{method} has no density of its draws, so they cannot be tested against the posterior.",
    "density_missing": "The log densities of the draws of {method} were not computed, so the draws cannot be tested "
    "against the posterior.",
    "one_point": "The draws leave {value:.2g} parameters uncertain (one or more expected): they are nearly the same.",
    "moving": "{value:.0%} of the draws repeat the draw before.",
    "chain_stuck": lambda chains, **_: (
        f"All draws of chain {', '.join(map(str, chains))} are the same."
    ),
    # convergence
    "one_chain": "There is one chain; a single chain cannot show whether it missed a mode.",
    "chains_short": "The chains have {draws} draws each, too few to show whether they converged.",
    "chains_exchanged": "There are {chains} chains of {draws} draws: they are too short, or the two dimensions are "
    "exchanged.",
    "common_start": "All chains started around one point, so their agreement cannot show whether they missed "
    "a mode.",
    "nothing_identified": "Besides the weights of the network, which are not identified, nothing that varies is "
    "stored.",
    "rhat_function": "The largest R-hat of {count:,} identified quantities is {value:.3f}, of {where} (at most "
    "{limit:.3g} where chains have converged).",
    "chains_disagree": _RHAT + "the chains disagree.",
    "labels_switched": _RHAT
    + "the chains disagree, but agree (R-hat {after:.3f}) once the components of {sites} are "
    "put into the same order in all chains. The posterior of a mixture is the same under every order (label "
    "switching).",
    "one_order": "The draws keep one of the {value:,.0f} orders of the components of {sites}, which the model does not "
    "tell apart (label switching). Predictions, densities and whatever else depends on no order are the posterior's. "
    "What is said of one component holds in this order: name it by its values and not by its number, compare runs "
    "only after they are put into one order, or give the components an order (transforms.OrderedTransform).",
    "chains_slow": _RHAT + "the chains mix too slowly.",
    "ess_function": "The smallest effective sample size is {value:.0f} of {draws:,} draws ({kind}, {where}; at least "
    "{limit:.0f} expected).",
    "divergences": "{count:,} of {total:,} transitions diverged (up to {chance} expected by chance).",
    "bfmi": "The lowest energy fraction (BFMI) is {value:.2f}, in chain {chain} (at least {limit:.2g} expected).",
    # the target
    "importance": _importance,
    "khat": "Pareto k-hat, which grows with the tails of the posterior that the draws miss, is {value:.2f} (reliable "
    "up to {limit:.2f}): the draws are too narrow in some direction.",
    "khat_infinite": "One draw carries all of the importance weight (Pareto k-hat is infinite): the draws are too "
    "narrow in some direction.",
    "khat_undecided": "Pareto k-hat over all parameters is {khat} (reliable up to {limit:.2f}), which does not say how "
    "far the function is off.",
    "few_draws": "There are {value:.0f} independent draws (at least {limit:.0f} expected).",
    "density_not_finite": "The log density of the model or of the approximation is not finite at {count:,} draws.",
    "function_moves": _function_moves,
    "density_moves": _density_moves,
    "beside_posterior": _beside_posterior,
    "sites_beside_posterior": _sites_beside_posterior,
    "moves_short": "In {transitions:.0f} transitions the short chains that began at these draws have not arrived at "
    "the posterior, so nothing is compared with it.",
    "moves_undecided": "Hamiltonian Monte Carlo moved the draws too little to test them: {acceptance:.0%} of its steps "
    "were accepted, and the draws before and after correlate by {stayed:.2f}.",
    "virial": _virial,
    "score": _score,
    "reference": _reference,
    "reference_undecided": "The reference run has not been shown to have converged, so nothing is compared with it.",
    "not_comparable": "The reference run was evaluated at other inputs, so nothing can be compared with it.",
    # the model
    "held_out_rows": "{value:.0%} of the {count:,} held-out rows also occur among the training rows (up to {limit:.0%} "
    "expected): held-out scores are too good.",
    "rows_repeated": "{value:.0%} of the {count:,} training rows are copies of others, and each counts as new data: "
    "the posterior is too narrow.",
    "pattern": _pattern,
    "row_order": _row_order,
    "coverage_by_region": "90 % intervals cover {low:.0%} where {low_at} and {high:.0%} where {high_at} (90% expected "
    "in both, p = {p:.2g}).",
    "across_outputs": "The errors of {where} correlate by {value:+.2f} beyond what the model has (up to {limit:.2g} "
    "allowed either way, p = {p:.2g}).",
    "pit": _OUTSIDE + ".",
    "loo_pit": _OUTSIDE + ".",
    "too_narrow": _OUTSIDE + ": the intervals are too narrow.",
    "too_wide": _OUTSIDE + ": the intervals are too wide.",
    "biased": _biased,
    "heavy_tails": "{outer:.0%} of {count:,} {values} fall outside their 90 % interval and {extreme:.1%} outside their "
    "99 % interval (10% and 1% expected, p = {p:.2g} for all intervals): the tails of the predictions are too light.",
    "ece": "Confidence and accuracy differ by {value:.3f} on average over {count:,} held-out values (up to "
    "{limit:.3f} expected by chance).",
    "overconfident": _confidence,
    "underconfident": _confidence,
    "class_shares": _class_shares,
    "temperature": _temperature,
    "baseline": _baseline,
    "loo_khat": _loo_khat,
    "loo_exact": "{removed:,} of {total:,} observations were left out by fitting again; leave-one-out estimates of the "
    "others are reliable (Pareto k-hat up to {value:.2f}).",
    # on request
    "copied_chains": lambda named, **_: (
        "Chains move together, draw by draw: {named}." if named else "No two chains move together."
    ),
    "repeated_draws": "{value:.0%} of the draws are copies of draws elsewhere in the chains.",
    "log_likelihood": "The stored log-likelihood differs by {value:.2g} nats per observation from what the predictive "
    "draws imply (up to {limit:.2g} expected).",
}

#: code, or name of a check → what to do
ACTIONS: dict[str, str] = {
    **dict.fromkeys(
        ["linearized_only", "conditional_only"],
        "Fit NUTS to the same data and compare with its draws: diagnose(tree, reference=nuts_tree).",
    ),
    "moves_short": "Refine the draws (posterior.refine(), which goes on until the chains arrive or says how far they "
    "came), or run NUTS and compare.",
    "failed_to_run": "Look at the draws and data that this check reads.",
    "no_draws": "Fit again, for longer.",
    "draws_not_finite": "Standardise x and y, lower the learning rate or step size, and fit again.",
    "interrupted": "Run the fit again to its end before relying on it.",
    "unfinished": "Raise num_steps (or the learning rate), and fit again.",
    "few_steps": "Raise num_steps, and fit again.",
    "tempered": "End the KL schedule at weight 1 (temperature 1), or report the posterior as tempered.",
    "point_estimate": "Use the point estimate as a baseline; for uncertainty fit Laplace around it, SVI or NUTS.",
    "no_density": "Judge the predictions by held-out scores, or compare them with a NUTS run: "
    "diagnose(tree, reference=nuts_tree).",
    "density_missing": "Run the fit to its end, where the log densities are computed.",
    "one_point": "Start every member from another seed, or report the run as a point estimate.",
    "chain_stuck": "Lower the step size or raise num_warmup, and try another seed.",
    "one_chain": "Run at least four chains from different starting points.",
    "chains_short": "Raise {more}, for at least 500 draws per chain.",
    "chains_exchanged": "Check which dimension holds the chains; if it is the right one, draw more from fewer chains.",
    "common_start": "Fit again and leave out init, so that every chain starts elsewhere.",
    "nothing_identified": "Store values of the function or the log-likelihood beside the weights: "
    "posterior.to_datatree(x, y).",
    "labels_switched": "Use only what does not depend on the labels (predictions, densities), or give the components "
    "an order: transforms.OrderedTransform of their locations.",
    "chains_disagree": "Raise num_warmup, and try another seed; where the chains disagree again, use SMC, which "
    "weights modes by their mass.",
    "chains_slow": "Raise {more}.",
    "ess_function": "Raise {more}: about {needed} draws per chain suffice.",
    "divergences": "Raise target_accept (0.95, then 0.99), and make a hierarchical prior non-centred.",
    "bfmi": "Reparameterise scale sites (non-centred, or on the log scale).",
    "few_draws": "Raise num_draws to 1000: draws from an approximation cost little.",
    "density_not_finite": "Fit again with a smaller step size or learning rate.",
    **dict.fromkeys(
        ["importance", "function_moves", "density_moves", "virial", "score", "reference"],
        "{remedy}",
    ),
    "held_out_rows": "Hold out rows that the fit has not seen.",
    "rows_repeated": "Fit to each row once.",
    "copied_chains": "Fit again with another seed and start for every chain.",
}


def fault(code: str, numbers: Numbers | None = None) -> str:
    """What is wrong in a few words, with its direction where the numbers have one; of a code not ours, the code.

    >>> fault("reference", {"ratio": 2.6})
    'the function differs from that of the reference run, being too wide'
    """
    words = FAULTS.get(code, code.replace("_", " "))
    direction = _direction_of(code, numbers or {})
    return f"{words}, being {direction}" if direction else words


#: checks of the function that measure how wide it is, and the number that says so: 1 / ratio or the ratio of sds
_WIDTHS = {
    "function_moves": "inverse",
    "beside_posterior": "inverse",
    "sites_beside_posterior": "inverse",
    "reference": "ratio",
}


def _direction_of(code: str, numbers: Numbers) -> str:
    """Whether the function is too wide or too narrow, and in the wrong place; empty where the check does not say."""
    width = numbers.get(_WIDTHS.get(code, ""))
    if not isinstance(width, int | float) or not width > 0.0:
        return ""
    ratio = width if _WIDTHS[code] == "ratio" else 1.0 / width
    shift = numbers.get("shift", 0.0)
    return _direction(ratio, shift if isinstance(shift, int | float) else 0.0)


def evidence(code: str, name: str, numbers: Numbers) -> str:
    """What a check of this name saw, in one sentence; of codes that are not ours, the number ``"seen"``."""
    template = SEEN.get(code, SEEN.get(name, "{seen}"))
    if callable(template):
        template = template(**numbers)
    defaults = {
        "seen": "",
        "part": name.removeprefix("not_checked_"),
        "values": _VALUES.get(str(numbers.get("which")), "values"),
    }
    return template.format(**defaults | dict(numbers))


def action(code: str, name: str, numbers: Numbers) -> str:
    """What to do next after a check of this name, in a sentence; empty where nothing is known to help."""
    key = code if code in ACTIONS else name
    if key not in ACTIONS:
        return str(numbers.get("next", ""))
    return ACTIONS[key].format(**numbers)


_OPENINGS = {
    "draws": {
        "pass": "the draws can be relied on",
        "warn": "use the draws with care",
        "fail": "do not rely on the draws",
        "not checked": "whether the draws are the posterior was not checked",
    },
    "model": {
        "pass": "the model fits the data",
        "warn": "the model may not fit the data",
        "fail": "the model does not fit the data",
        "not checked": "whether the model fits the data was not checked",
    },
}


#: before a fault of the model that was seen by draws which fail
BY_DRAWS = "judged by these draws,"


def opening(question: str, answer: str, fault: str) -> str:
    """The answer to a question of a verdict, and the worst fault that was found, or why nothing was checked."""
    text = _OPENINGS[question][answer]
    return f"{text}: {fault}" if fault else text
