"""What the checks of a verdict say, by code: the fault in a few words, what was seen, and what helps against it.

An action stands here only where a record shows that following it helped; of the model none does, so none is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Template = str | Callable[..., str]


def _plural(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"


#: code → the fault, what was seen, what to do (a template of the check's numbers, or a function of them)
WORDS: dict[str, tuple[str, Template, Template]] = {
    # nothing known
    "not_checked": ("part of it could not be checked", "Nothing in the tree lets this be checked.", ""),
    "failed_to_run": (
        "a check could not be made",
        "This check could not be made: {error}.",
        "Look at the draws and data that it rests on.",
    ),
    "unreadable": ("it cannot be judged", "The tree cannot be judged: {error}.", ""),
    # the draws as they are
    "finite": ("values are not finite", "{count} values are NaN or infinite: {listed}.", ""),
    "no_draws": ("there are no draws", "There are no draws.", "Fit again, for longer."),
    "draws_not_finite": (
        "draws are not finite",
        "{count} draws are NaN or infinite.",
        "Standardise x and y, lower the learning rate or step size, and fit again.",
    ),
    "fit": ("the fit ended as it should", "The fit ran to its end and had nothing to report.", ""),
    "interrupted": (
        "the fit was cut short",
        lambda count, **_: f"The fit was interrupted; it had {_plural(count, 'draw')} by then.",
        "Run it again to the end before relying on it.",
    ),
    "unfinished": (
        "the search was stopped before its optimum",
        "A few more steps would gain {value:.3g} nats (at most {limit:.3g} at an optimum).",
        "Raise num_steps (or the learning rate), and fit again.",
    ),
    "few_steps": (
        "the search was too short",
        "The search took {value:.0f} steps, too few to show that it has found its optimum.",
        "Raise num_steps, and fit again.",
    ),
    "tempered": (
        "the draws are of a tempered posterior",
        "The effective temperature is {value:.3g}, not 1.",
        "End the KL schedule at weight 1 (temperature 1), or report the run as tempered.",
    ),
    "fit_warned": ("the fit warned", "The fit warned: {first}.", ""),
    "claim": ("the draws have uncertainty of their own", "The draws differ as draws of a posterior do.", ""),
    "point_estimate": (
        "it is a point estimate without uncertainty of its own",
        "{method} is a point estimate: no epistemic uncertainty.",
        "Use it as a baseline; for uncertainty fit Laplace around it, SVI or NUTS.",
    ),
    "no_density": (
        "its draws are not those of this model's posterior",
        "{method} has no density of its draws, so nothing can compare them with the posterior.",
        "Judge it by held-out scores, or compare it with a NUTS run as reference.",
    ),
    "density_missing": (
        "nothing can compare its draws with the posterior",
        "The log densities of the draws of {method} were not computed.",
        "Fit it to its end.",
    ),
    "one_point": (
        "all of its draws are one point",
        "Together the draws leave {value:.2g} parameters open: they are one point.",
        "Give every member a start of its own, or report the run as a point estimate.",
    ),
    "moving": ("the chains move", "{value:.0%} of the draws repeat the one before.", ""),
    "chain_stuck": (
        "a chain never moved",
        lambda chains, **_: f"All draws of chain {', '.join(map(str, chains))} are the same.",
        "Lower the step size or raise num_warmup, and draw new starts (another seed).",
    ),
    "draws_repeat": ("draws repeat one another", "{value:.0%} of the draws repeat the one before.", ""),
    # convergence
    "chains": ("chains are enough and long", "There are {chains} chains of {draws} draws.", ""),
    "one_chain": (
        "there is a single chain, so nothing shows what it missed",
        "There is one chain, so nothing can show whether it missed a mode.",
        "Run at least four chains from different starting points.",
    ),
    "chains_short": (
        "the chains are too short to judge",
        "Chains of {draws} draws are too short to show whether they converged.",
        "Raise {more}, for at least 500 draws per chain.",
    ),
    "chains_exchanged": (
        "the chains are too short, or chains and draws are exchanged",
        "There are {chains} chains of {draws} draws: too short to judge, or the two dimensions are exchanged.",
        "Check which dimension is the chain; if this one is, draw more from fewer chains.",
    ),
    "common_start": (
        "all chains began at one point, so their agreement shows little",
        "All chains started around one point, so their agreement cannot show whether they missed a mode.",
        "Fit again from starts of the chains' own: leave out init.",
    ),
    "nothing_identified": (
        "nothing shows whether the chains converged",
        "Besides a net's weights, which are not identified, the tree holds nothing that moves.",
        "Store values of the function or the log-likelihood beside the weights: posterior.to_datatree(x, y).",
    ),
    "rhat_function": (
        "the chains agree",
        "The largest R-hat over {count} identified quantities is {value:.3f}, of {where}.",
        "",
    ),
    "chains_disagree": (
        "the chains do not agree with each other",
        "R-hat of {where} is {value:.3f} (at most {limit:.3g} where chains have converged).{starts}",
        "Raise num_warmup, and draw new starts (another seed); where they stay apart, use SMC, which weights modes by "
        "their mass.",
    ),
    "chains_slow": (
        "the chains move too slowly",
        "R-hat of {where} is {value:.3f} (at most {limit:.3g} where chains have converged).{starts}",
        "Raise {more}.",
    ),
    "modes": (
        "the chains sit in different places",
        "At {where} chains {low} and {high} lie {gap:.1f} within-chain sd apart.{levels}{starts}",
        "Draw new starts (another seed); where they part again, use SMC, which weights modes by their mass.",
    ),
    "ess_function": (
        "there are too few independent draws",
        "The smallest effective sample size is {value:.0f} ({kind}, {where}) of {draws} draws.",
        "Draw more: about {needed} draws per chain would do; raise {more}.",
    ),
    "divergences": (
        "the sampler could not enter part of the posterior",
        "{count} of {total} transitions diverged; by chance {chance} may.",
        "Raise target_accept (0.95, then 0.99), and make a hierarchical prior non-centred.",
    ),
    "bfmi": (
        "the sampler explores the tails too slowly",
        "The lowest energy fraction (BFMI) is {value:.2f}, in chain {chain}.",
        "Reparameterise scale sites (non-centred, or on the log scale).",
    ),
    # the target
    "importance": (
        "the approximation is close to the posterior",
        "Weighted to the posterior, means move by {shift:.2f} sd and sds change to {ratio:.2f} times in the median.",
        "",
    ),
    "importance_far": (
        "the approximation misses the posterior",
        "Weighted to the posterior, means move by {shift:.2f} sd and sds change to {ratio:.2f} times in the median.",
        "{remedy}",
    ),
    "khat": (
        "the approximation misses the posterior",
        "Pareto k-hat of posterior over approximation is {value:.2f}; above {limit:.2f} its weights are unreliable.",
        "{remedy}",
    ),
    "khat_infinite": (
        "the approximation misses the posterior",
        "One draw carries all the importance weight (k-hat is infinite).",
        "{remedy}",
    ),
    "khat_undecided": (
        "importance weights cannot judge this net",
        "k-hat over all weights of the net is {khat}: of its function that says nothing.",
        "",
    ),
    "few_draws": (
        "there are too few draws",
        "There are {value:.0f} independent draws.",
        "Raise num_draws to 1000: draws from an approximation cost little.",
    ),
    "density_not_finite": (
        "some draws lie where the model has no density",
        "log p or log q is not finite for {count} draws.",
        "Fit again with a smaller step size or more damping.",
    ),
    "function_moves": (
        "its uncertainty about the function is not the posterior's",
        "Moved by Hamiltonian Monte Carlo, the function's sd changes to {inverse:.2f} times and its mean by "
        "{shift:.2f} sd in the median: draws of the posterior would stay.",
        "{remedy}",
    ),
    "density_moves": (
        "the draws have another shape than the posterior",
        "Moved by Hamiltonian Monte Carlo, the sd of the log density changes to {inverse:.2f} times and its mean by "
        "{shift:.2f} sd: draws of the posterior would stay.",
        "{remedy}",
    ),
    "range_moves": (
        "the draws lack a part of the posterior",
        "Moved by Hamiltonian Monte Carlo, {value:.1%} of the draws leave the range of all draws.",
        "{remedy}",
    ),
    "moves_undecided": (
        "the draws could not be moved far enough to judge them",
        "The moves were accepted at a rate of {acceptance:.0%} and leave a correlation of {stayed:.2f}: too little.",
        "",
    ),
    "virial": (
        "the draws are not spread as the posterior is",
        "The variance of the draws of {where} is {value:.2f} times what the model's density implies.",
        "{remedy}",
    ),
    "score": (
        "the draws lie beside the posterior",
        "The mean gradient of the log density is {value:.2f} of its sd from zero, for {where}.",
        "{remedy}",
    ),
    "reference": (
        "its function differs from the reference's",
        "Against the reference, f at the {at} is {distance:.2f} sd off in the median and its sd {ratio:.2f} times "
        "as large.",
        "{remedy}",
    ),
    "reference_classes": (
        "its classes differ from the reference's",
        "Classes agree with the reference's at {agreement:.1%} of points; probabilities are {value:.3f} apart.",
        "{remedy}",
    ),
    "reference_undecided": (
        "there is no converged reference to compare with",
        "The reference has not been shown to have converged.",
        "",
    ),
    "not_comparable": (
        "the reference is of other points",
        "The reference was evaluated at other points.",
        "",
    ),
    # the model
    "held_out_rows": (
        "held-out rows are training rows",
        "{value:.0%} of the {count} held-out rows are training rows.",
        "Hold out rows that the fit has not seen: these scores are of the training data.",
    ),
    "rows_repeated": (
        "rows occur more than once in the data",
        "{value:.0%} of the {count} training rows are copies of others: each counts as news.",
        "Fit to each row once.",
    ),
    "pattern": (
        "the model misses a pattern in the data",
        "Outcomes lie above or below what is predicted by {where} (effect {value:.2f}, p = {p:.2g}).",
        "",
    ),
    "row_order": (
        "neighbouring rows depend on each other",
        "Errors of rows that stand together agree (effect {value:.2f}, p = {p:.2g}), but rows count as independent.",
        "",
    ),
    "coverage_by_region": (
        "error bars are too narrow in one region and too wide in another",
        "90 % intervals hold {low:.0%} where {low_at}, and {high:.0%} where {high_at} (p = {p:.2g}).",
        "",
    ),
    "calibrated": (
        "intervals hold what they say",
        "Of {count} {which} values {outer:.0%} lie in the outer 10 % of their predictions (p = {p:.2g}).",
        "",
    ),
    "too_narrow": (
        "error bars are too narrow",
        "{outer:.0%} of {count} {which} values lie in the outer 10 % of their predictions (p = {p:.2g}).",
        "",
    ),
    "too_wide": (
        "error bars are too wide",
        "{outer:.0%} of {count} {which} values lie in the outer 10 % of their predictions (p = {p:.2g}).",
        "",
    ),
    "biased": (
        "predictions are biased",
        "{count} {which} values lie at quantile {mean:.2f} of their predictions on average (p = {p:.2g}).",
        "",
    ),
    "heavy_tails": (
        "errors have heavier tails than the noise",
        "{extreme:.1%} of {count} {which} values lie in the outer 1 % of their predictions (p = {p:.2g}).",
        "",
    ),
    "ece": (
        "probabilities match the observed frequencies",
        "Confidence and accuracy differ by {value:.3f} on average over {count} held-out values.",
        "",
    ),
    "overconfident": (
        "its probabilities are overconfident",
        "Mean confidence minus accuracy is {gap:+.3f} over {count} held-out values (error {value:.3f}).",
        "",
    ),
    "underconfident": (
        "its probabilities are underconfident",
        "Mean confidence minus accuracy is {gap:+.3f} over {count} held-out values (error {value:.3f}).",
        "",
    ),
    "class_shares": (
        "classes are not as frequent as predicted",
        "Class {which} makes {seen:.0%} of the {count} {where} values and is predicted for {said:.0%} (p = {p:.2g}).",
        "",
    ),
    "prior_sensitivity": (
        "the prior has as much influence as the data",
        "Power-scaling sensitivity of f is {value:.2f} to the prior and {likelihood:.2f} to the likelihood (median).",
        "",
    ),
    "loo_khat": (
        "single data decide the fit",
        "Leave-one-out is unreliable at {count} of {total} data (Pareto k-hat up to {value:.2f}).",
        "",
    ),
    # on request
    "copied_chains": (
        "chains are copies of one another",
        "Chains hold the same moves: {named}.",
        "Give every chain a seed and a start of its own, and fit again.",
    ),
    "repeated_draws": (
        "draws occur more than once",
        "{value:.0%} of the draws are copies of draws elsewhere.",
        "",
    ),
    "clumped_draws": (
        "draws lie in clumps",
        lambda value, **_: (
            "The draws of different chains lie in "
            + ("no clumps." if value is None else f"about {value:.0f} clumps.")
        ),
        "",
    ),
    "rounded_draws": (
        "draws are rounded",
        "Draws of {where} stand on a grid with steps of {value:.2g} of their sd.",
        "Store the draws as they were made.",
    ),
    "held_weights": (
        "weights never move",
        "{value:.0f} weights (in {where}) have one value in all draws.",
        "",
    ),
    "log_likelihood_rows": (
        "the log-likelihood is of other rows",
        "The log-likelihood does not fall with the distance of outcomes from replicates (correlation {value:.2f}).",
        "",
    ),
    "log_likelihood_scale": (
        "the log-likelihood is on another scale",
        "The log-likelihood is {value:.2g} nats per datum off what the replicates say.",
        "",
    ),
}


def fault(code: str) -> str:
    """What is wrong in a few words; of a code that is not ours, the code."""
    return WORDS[code][0] if code in WORDS else code.replace("_", " ")


def evidence(code: str, numbers: Mapping[str, Any]) -> str:
    """What was seen, in one sentence; of a code that is not ours, the number ``"seen"``."""
    return _filled(WORDS[code][1], numbers) if code in WORDS else str(numbers.get("seen", ""))


def action(code: str, numbers: Mapping[str, Any]) -> str:
    """What to do next, in a sentence; empty where nothing is known to help."""
    return _filled(WORDS[code][2], numbers) if code in WORDS else str(numbers.get("next", ""))


def _filled(template: Template, numbers: Mapping[str, Any]) -> str:
    return template(**numbers) if callable(template) else template.format(**numbers)


def opening(draws: tuple[str, str], model: tuple[str, str]) -> str:
    """The first sentence of a verdict, from both answers (or "not checked") and the worst fault that each found."""
    trust = {
        "pass": "the draws can be relied on",
        "warn": "use the draws with care",
        "fail": "do not rely on the draws",
        "not checked": "whether the draws are the posterior was not checked",
    }
    fits = {
        "pass": "the model fits the data",
        "warn": "the model may not fit the data",
        "fail": "the model does not fit the data",
        "not checked": "whether the model fits the data was not checked",
    }
    parts = (trust[draws[0]], draws), (fits[model[0]], model)
    return "; ".join(f"{text}: {why}" if said in ("warn", "fail") else text for text, (said, why) in parts)
