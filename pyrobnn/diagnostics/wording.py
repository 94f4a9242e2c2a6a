"""What the checks of a verdict say, by code: the fault in a few words, what was seen, and what helps against it.

What was seen stands by the code that was found, or else by the name of the check; both show the check's numbers. An
action stands here only where a record shows that following it helped; of the model none does, so none is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Template = str | Callable[..., str]

#: code → what is wrong, in a few words
FAULTS = {
    "not_checked": "part of it could not be checked",
    "linearized_only": "the draws were compared with a linearised net only",
    "conditional_only": "the draws were compared with the posterior of some weights only, given the others",
    "failed_to_run": "a check could not be made",
    "unreadable": "it cannot be judged",
    # the draws as they are
    "finite": "values are not finite",
    "no_draws": "there are no draws",
    "draws_not_finite": "draws are not finite",
    "interrupted": "the fit was cut short",
    "unfinished": "the search was stopped before its optimum",
    "few_steps": "the search was too short",
    "tempered": "the draws are of a tempered posterior",
    "fit_warned": "the fit warned",
    "point_estimate": "it is a point estimate without uncertainty of its own",
    "no_density": "its draws are not those of this model's posterior",
    "density_missing": "nothing can compare its draws with the posterior",
    "one_point": "all of its draws are one point",
    "chain_stuck": "a chain never moved",
    "draws_repeat": "draws repeat one another",
    "moving": "draws repeat one another",
    # convergence
    "one_chain": "there is a single chain, so nothing shows what it missed",
    "chains_short": "the chains are too short to judge",
    "chains_exchanged": "the chains are too short, or chains and draws are exchanged",
    "common_start": "all chains began at one point, so their agreement shows little",
    "nothing_identified": "nothing shows whether the chains converged",
    "rhat_function": "the chains do not agree with each other",
    "chains_disagree": "the chains do not agree with each other",
    "chains_slow": "the chains move too slowly",
    "ess_function": "there are too few independent draws",
    "divergences": "the sampler could not enter part of the posterior",
    "bfmi": "the sampler explores the tails too slowly",
    # the target
    "importance": "the approximation misses the posterior",
    "khat": "the approximation misses the posterior",
    "khat_infinite": "the approximation misses the posterior",
    "few_draws": "there are too few draws",
    "density_not_finite": "some draws lie where the model has no density",
    "function_moves": "its uncertainty about the function is not the posterior's",
    "density_moves": "the draws have another shape than the posterior",
    "virial": "the draws are not spread as the posterior is",
    "score": "the draws lie beside the posterior",
    "reference": "its function differs from the reference's",
    # the model
    "held_out_rows": "held-out rows are training rows",
    "rows_repeated": "rows occur more than once in the data",
    "pattern": "the model misses a pattern in the data",
    "row_order": "neighbouring rows depend on each other",
    "coverage_by_region": "error bars are too narrow in one region and too wide in another",
    "pit": "predictions are not calibrated",
    "loo_pit": "predictions are not calibrated",
    "ece": "its probabilities are not calibrated",
    "too_narrow": "error bars are too narrow",
    "too_wide": "error bars are too wide",
    "biased": "predictions are biased",
    "heavy_tails": "errors have heavier tails than the noise",
    "overconfident": "its probabilities are overconfident",
    "underconfident": "its probabilities are underconfident",
    "class_shares": "classes are not as frequent as predicted",
    "loo_khat": "single data decide the fit",
    "loo_exact": "single data decide the fit",
    "temperature": "its probabilities are too sharp or too flat",
    "baseline": "a linear model predicts better",
    # on request
    "copied_chains": "chains are copies of one another",
    "repeated_draws": "draws occur more than once",
    "log_likelihood": "the log-likelihood is not that of these data",
}

_OUTER = "{outer:.0%} of {count} {which} values lie in the outer 10 % of their predictions (p = {p:.2g})."
_GAP = (
    "Mean confidence minus accuracy is {gap:+.3f} over {count} held-out values (error {value:.3f})."
)
_RHAT = "R-hat of {where} is {value:.3f} (at most {limit:.3g} where chains have converged)."

#: code, or name of a check → what was seen
SEEN: dict[str, Template] = {
    "not_checked": "There is too little here to check the {part}.",
    "linearized_only": "Predictions are those of the net linearised at the mode. The Gaussian is the posterior of that "
    "linear model by construction, and nothing here compares it with the posterior of the net itself.",
    "conditional_only": "Some weights (or sites) were held at one value. The draws are of the others given these, and "
    "nothing here compares them with the posterior of all of them.",
    "failed_to_run": "This check could not be made: {error}.",
    "unreadable": "The tree cannot be judged: {error}.",
    # the draws as they are
    "finite": "{count} values are NaN or infinite: {listed}.",
    "no_draws": "There are no draws.",
    "draws_not_finite": "{count} draws are NaN or infinite.",
    "interrupted": "The fit was interrupted; the draws it had by then: {count}.",
    "unfinished": "A few more steps would gain {value:.3g} nats (at most {limit:.3g} at an optimum).",
    "few_steps": "The search took {value:.0f} steps, too few to show that it has found its optimum.",
    "tempered": "The effective temperature is {value:.3g}, not 1.",
    "fit_warned": "The fit warned: {first}.",
    "point_estimate": "{method} is a point estimate: no epistemic uncertainty.",
    "no_density": "{method} has no density of its draws, so nothing can compare them with the posterior.",
    "density_missing": "The log densities of the draws of {method} were not computed.",
    "one_point": "Together the draws leave {value:.2g} parameters open: they are one point.",
    "moving": "{value:.0%} of the draws repeat the one before.",
    "chain_stuck": lambda chains, **_: (
        f"All draws of chain {', '.join(map(str, chains))} are the same."
    ),
    # convergence
    "one_chain": "There is one chain, so nothing can show whether it missed a mode.",
    "chains_short": "Chains of {draws} draws are too short to show whether they converged.",
    "chains_exchanged": "There are {chains} chains of {draws} draws: too short, or the two dimensions are exchanged.",
    "common_start": "All chains started around one point, so their agreement cannot show whether they missed a mode.",
    "nothing_identified": "Besides a net's weights, which are not identified, the tree holds nothing that moves.",
    "rhat_function": "The largest R-hat over {count} identified quantities is {value:.3f}, of {where}.",
    "chains_disagree": _RHAT,
    "chains_slow": _RHAT,
    "ess_function": "The smallest effective sample size is {value:.0f} ({kind}, {where}) of {draws} draws.",
    "divergences": "{count} of {total} transitions diverged; by chance {chance} may.",
    "bfmi": "The lowest energy fraction (BFMI) is {value:.2f}, in chain {chain}.",
    # the target
    "importance": "Weighted to the posterior, probabilities move by up to {distance:.2f}, sds to {ratio:.2f} times.",
    "khat": "Pareto k-hat of posterior over approximation is {value:.2f} (reliable up to {limit:.2f}).",
    "khat_infinite": "One draw carries all the importance weight (k-hat is infinite).",
    "khat_undecided": "k-hat over all parameters is {khat}: it does not say how far the function is off.",
    "few_draws": "There are {value:.0f} independent draws.",
    "density_not_finite": "log p or log q is not finite for {count} draws.",
    "function_moves": "Hamiltonian Monte Carlo steps, which leave the posterior unchanged, multiply the sd of the "
    "function (or of a program's sites) by {inverse:.2f} and shift its mean by {shift:.2f} sd (medians).",
    "density_moves": "Hamiltonian Monte Carlo steps, which leave the posterior unchanged, multiply the sd of the log "
    "density by {inverse:.2f} and shift its mean by {shift:.2f} sd.",
    "moves_undecided": "Moves accepted at a rate of {acceptance:.0%} leave a correlation of {stayed:.2f}: too far.",
    "virial": "The variance of the draws of {where} is {value:.2f} times what the model's density implies.",
    "score": "The mean gradient of the log density is {value:.2f} of its sd from zero, for {where}.",
    "reference": "At the {at} the mean of f lies {distance:.2f} sd from the reference's, and its sd is {ratio:.2f} "
    "times the reference's.",
    "reference_undecided": "The reference has not been shown to have converged.",
    "not_comparable": "The reference was evaluated at other points.",
    # the model
    "held_out_rows": "{value:.0%} of the {count} held-out rows are training rows.",
    "rows_repeated": "{value:.0%} of the {count} training rows are copies of others: each counts as news.",
    "pattern": "The largest dependence of errors on the inputs is on {where}: effect {value:.2f} (p = {p:.2g}).",
    "row_order": "The dependence of errors on those of neighbouring rows has effect {value:.2f} (p = {p:.2g}).",
    "coverage_by_region": "90 % intervals hold {low:.0%} where {low_at}, and {high:.0%} where {high_at} (p = {p:.2g}).",
    "pit": _OUTER,
    "loo_pit": _OUTER,
    "biased": "{count} {which} values lie at quantile {mean:.2f} of their predictions on average (p = {p:.2g}).",
    "heavy_tails": "{extreme:.1%} of {count} {which} values lie in the outer 1 % of their predictions (p = {p:.2g}).",
    "ece": "Confidence and accuracy differ by {value:.3f} on average over {count} held-out values.",
    "overconfident": _GAP,
    "underconfident": _GAP,
    "class_shares": "Class {which} makes {seen:.0%} of the {count} {where} values and is predicted for {said:.0%} "
    "(p = {p:.2g}).",
    "temperature": "Probabilities to the power {value:.2f} fit the {count} labels best (p = {p:.2g}): below 1 they "
    "are too sharp, above 1 too flat.",
    "baseline": "The {score} is {own:.4g}, and {floor:.4g} for the baseline ({which}).",
    "loo_khat": "Leave-one-out is unreliable at {count} of {total} data (Pareto k-hat up to {value:.2f}).",
    "loo_exact": "Leave-one-out is by removal at {removed} of {total} data, reliable at others (k-hat {value:.2f}).",
    # on request
    "copied_chains": "Chains hold the same moves: {named}.",
    "repeated_draws": "{value:.0%} of the draws are copies of draws elsewhere.",
    "log_likelihood": "The log-likelihood is {value:.2g} nats per datum off what the replicates say.",
}

#: code, or name of a check → what to do
ACTIONS: dict[str, str] = {
    **dict.fromkeys(
        ["linearized_only", "conditional_only"],
        "Fit NUTS to the same data, and give its tree as the reference: diagnose(tree, reference=nuts_tree).",
    ),
    "failed_to_run": "Look at the draws and data that it rests on.",
    "no_draws": "Fit again, for longer.",
    "draws_not_finite": "Standardise x and y, lower the learning rate or step size, and fit again.",
    "interrupted": "Run it again to the end before relying on it.",
    "unfinished": "Raise num_steps (or the learning rate), and fit again.",
    "few_steps": "Raise num_steps, and fit again.",
    "tempered": "End the KL schedule at weight 1 (temperature 1), or report the run as tempered.",
    "point_estimate": "Use it as a baseline; for uncertainty fit Laplace around it, SVI or NUTS.",
    "no_density": "Judge it by held-out scores, or compare it with a NUTS run as reference.",
    "density_missing": "Fit it to its end.",
    "one_point": "Give every member a start of its own, or report the run as a point estimate.",
    "chain_stuck": "Lower the step size or raise num_warmup, and draw new starts (another seed).",
    "one_chain": "Run at least four chains from different starting points.",
    "chains_short": "Raise {more}, for at least 500 draws per chain.",
    "chains_exchanged": "Check which dimension is the chain; if this one is, draw more from fewer chains.",
    "common_start": "Fit again from starts of the chains' own: leave out init.",
    "nothing_identified": "Store values of the function or the log-likelihood beside the weights: "
    "posterior.to_datatree(x, y).",
    "chains_disagree": "Raise num_warmup. Draw new starts (another seed); where they part again, use SMC, which "
    "weights modes by their mass.",
    "chains_slow": "Raise {more}.",
    "ess_function": "Draw more: about {needed} draws per chain would do; raise {more}.",
    "divergences": "Raise target_accept (0.95, then 0.99), and make a hierarchical prior non-centred.",
    "bfmi": "Reparameterise scale sites (non-centred, or on the log scale).",
    "few_draws": "Raise num_draws to 1000: draws from an approximation cost little.",
    "density_not_finite": "Fit again with a smaller step size or learning rate.",
    **dict.fromkeys(
        ["importance", "function_moves", "density_moves", "virial", "score", "reference"],
        "{remedy}",
    ),
    "held_out_rows": "Hold out rows that the fit has not seen: these scores are of the training data.",
    "rows_repeated": "Fit to each row once.",
    "copied_chains": "Give every chain a seed and a start of its own, and fit again.",
}


def fault(code: str) -> str:
    """What is wrong in a few words; of a code that is not ours, the code."""
    return FAULTS.get(code, code.replace("_", " "))


def evidence(code: str, name: str, numbers: Mapping[str, Any]) -> str:
    """What a check of this name saw, in one sentence; of codes that are not ours, the number ``"seen"``."""
    template = SEEN.get(code, SEEN.get(name, "{seen}"))
    if callable(template):
        return template(**numbers)
    defaults = {"seen": "", "part": name.removeprefix("not_checked_")}
    return template.format(**defaults | dict(numbers))


def action(code: str, name: str, numbers: Mapping[str, Any]) -> str:
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


def opening(question: str, answer: str, fault: str) -> str:
    """The answer to a question of a verdict, and the worst fault that was found, or why nothing was checked."""
    text = _OPENINGS[question][answer]
    return f"{text}: {fault}" if fault else text
