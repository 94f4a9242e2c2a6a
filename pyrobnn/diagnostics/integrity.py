"""Whether the draws themselves are whole: there at all, finite, moving, and of a run that was let finish."""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy.spatial import cKDTree

from pyrobnn.diagnostics import thresholds
from pyrobnn.diagnostics.convergence import quantities
from pyrobnn.diagnostics.evidence import Evidence, flattened
from pyrobnn.diagnostics.verdict import Check, Status
from pyrobnn.groups import (
    CONSTANT_DATA,
    FUNCTION,
    GRID,
    HELD_OUT,
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    OBSERVED_DATA,
    POSTERIOR,
    POSTERIOR_PREDICTIVE,
    PREDICTIONS,
    SAMPLE_DIMS,
    SAMPLE_STATS,
)

_DRAWS = (POSTERIOR, FUNCTION)
#: what the other checks, scores and figures are made of; of a sampler's statistics only these are read
_READ = (
    LOG_LIKELIHOOD,
    LOG_PRIOR,
    POSTERIOR_PREDICTIVE,
    OBSERVED_DATA,
    PREDICTIONS,
    HELD_OUT,
    GRID,
)
_STATS = ("lp", "energy", "log_p", "log_q", "diverging", "tree_depth", "acceptance_rate")
_LISTED = 3
#: quantities by whose moves chains are compared, and the moves that this takes
_FOLLOWED, _FEWEST_MOVES = 8, 20
#: share of the distance between neighbours that is rounding, and training values above which none is looked for
_ROUNDING, _MOST_VALUES = 0.01, 1_000_000
#: steps below which losses show nothing
_FEWEST_STEPS = 20


def hopeless(evidence: Evidence) -> Check | None:
    """A failing check if there are no draws, or draws that are NaN or infinite: nothing else can then be computed."""
    if evidence.num_draws == 0:
        return Check(
            "num_draws", "fail", 0.0, "≥ 1 draw", "numerical", "There are no draws.", "Fit again, for longer."
        )
    # what a program computes from its draws is read by no other check, and the fit has told of it
    bad = {
        (group, name): count
        for group in _DRAWS
        for name, count in _not_finite(evidence, group).items()
        if name not in evidence.computed and set(SAMPLE_DIMS) <= set(evidence.tree[group][name].dims)
    }
    if not bad:
        return None
    total = sum(evidence.tree[group][name].size for group, name in bad)
    return Check(
        "finite",
        "fail",
        sum(bad.values()) / total,
        "0 values that are NaN or infinite",
        "numerical",
        f"{sum(bad.values())} of {total} draws are NaN or infinite.",
        "Standardise x and y, lower the learning rate or step size, and fit again.",
    )


def check_interrupted(evidence: Evidence) -> Check | None:
    """A warning if the fit was stopped from the keyboard, in which case the draws are what it had by then."""
    if evidence.number("interrupted", 0.0) == 0.0:
        return None
    return Check(
        "interrupted",
        "warn",
        None,
        "a fit that ran to its end",
        "",
        f"The fit was interrupted; what it had by then: {evidence.num_draws} "
        f"{'draw' if evidence.num_draws == 1 else 'draws'}.",
        "Run it again to the end before relying on it.",
    )


def check_optimum(evidence: Evidence) -> Check | None:
    """Whether the search ended at its optimum, by what the fit found that more steps would gain."""
    measured, fall, limit = (
        evidence.number(name, np.nan) for name in ("gain_left", "fall_left", "gain_limit")
    )
    gain = measured if np.isfinite(measured) else fall
    if not (np.isfinite(gain) and np.isfinite(limit)):
        return _check_steps(evidence)
    # what the losses of a run let expect is rougher than what further steps have gained
    far = measured > thresholds.UNFINISHED_FAIL * limit
    status: Status = "pass" if gain <= limit else "fail" if far else "warn"
    return Check(
        "optimum",
        status,
        gain,
        f"≤ {limit:.3g} nats; {thresholds.UNFINISHED_FAIL:.0f} times as many, gained by further steps, fail",
        "numerical",
        f"A few more steps would gain {gain:.3g} nats"
        + ("." if status == "pass" else ": the search was stopped far from its optimum."),
        "" if status == "pass" else "Raise num_steps (or the learning rate), and fit again.",
    )


def _check_steps(evidence: Evidence) -> Check | None:
    """A warning of a search whose steps are too few to show by their losses where it was going."""
    steps = evidence.number("num_steps", np.inf)
    if steps >= _FEWEST_STEPS or evidence.text("stopped") != "num_steps":
        return None
    return Check(
        "optimum",
        "warn",
        None,
        f"≥ {_FEWEST_STEPS} steps",
        "numerical",
        f"The search took {steps:.0f} steps, too few to show that it has found its optimum.",
        "Raise num_steps, and fit again.",
    )


def check_fit_warnings(evidence: Evidence) -> Check | None:
    """A warning if the fit itself had something to say: what it told its user then, whoever reads its tree is told."""
    notes = evidence.json("warnings")
    notes = [str(note) for note in notes] if isinstance(notes, list) else []
    if not notes:
        return None
    more = "" if len(notes) == 1 else f" (and {len(notes) - 1} more, in the tree's attribute 'warnings')"
    return Check(
        "fit_warnings",
        "warn",
        float(len(notes)),
        "a fit without warnings",
        "",
        f"The fit warned: {notes[0].rstrip('.')}{more}.",
        "Do what the warning says, and fit again.",
    )


def check_finite(evidence: Evidence) -> Check | None:
    """A warning if anything else that is read holds NaN or infinity."""
    bad = {f"{group}/{name}": n for group in _READ for name, n in _not_finite(evidence, group).items()}
    bad |= {f"{SAMPLE_STATS}/{k}": n for k, n in _not_finite(evidence, SAMPLE_STATS).items() if k in _STATS}
    if not bad:
        return None
    listed = ", ".join(f"{count} of {name}" for name, count in list(bad.items())[:_LISTED])
    more = "" if len(bad) <= _LISTED else f" and of {len(bad) - _LISTED} more"
    return Check(
        "finite",
        "warn",
        float(sum(bad.values())),
        "0 values that are NaN or infinite",
        "numerical",
        f"Values are NaN or infinite: {listed}{more}; what rests on them is not checked.",
        "Look for draws or data that the model gives no density to, mend them and fit again.",
    )


def check_moving(evidence: Evidence) -> Check | None:
    """Whether each chain moves, and whether independent draws differ."""
    draws = evidence.draws_per_chain
    if draws < 2 or evidence.is_point:
        return None
    still = _stayed(evidence)
    frozen = [int(chain) for chain in np.flatnonzero(still.all(axis=1))]
    share = float(still.mean())
    if not frozen and share <= thresholds.STILL_WARN:
        return None
    independent = evidence.is_iid
    if frozen and not independent:
        return Check(
            "moving",
            "fail",
            float(len(frozen)),
            "every chain moves",
            thresholds.RHAT_SOURCE,
            f"{'Chain' if len(frozen) == 1 else 'Chains'} {', '.join(map(str, frozen))} never moved: all "
            f"{draws} draws of it are the same.",
            "Lower the step size or raise num_warmup, and draw new starts (another seed).",
        )
    if independent and still.all():
        return Check(
            "moving",
            "fail",
            share,
            "draws that differ",
            thresholds.RHAT_SOURCE,
            f"All {evidence.num_draws} draws are the same: they have no epistemic uncertainty to be judged.",
            "Give every member a start of its own, or report the run as a point estimate.",
        )
    what = (
        "draws repeat the one before, though they ought to be independent"
        if independent
        else ("transitions did not move")
    )
    return Check(
        "moving",
        "warn",
        share,
        f"≤ {thresholds.STILL_WARN:.0%} repeat the draw before",
        thresholds.ESS_SOURCE,
        f"{share:.0%} of the {what}.",
        "Raise num_draws, and look at how the draws were made: copies carry no information."
        if independent
        else "Lower the step size (raise target_accept): the sampler rejects most of its proposals.",
    )


def check_copies(evidence: Evidence) -> Check | None:
    """Whether chains repeat one another draw by draw: R-hat calls that agreement, and the ESS counts every copy."""
    draws = [evidence.stored(POSTERIOR, name) for name in evidence.names(POSTERIOR)]
    flat = [flattened(each, 2).reshape(len(each), -1) for each in draws if each is not None]
    if not flat or len(flat[0]) < 2 or evidence.is_point:
        return None
    groups: dict[bytes, list[int]] = {}
    for chain in range(len(flat[0])):
        groups.setdefault(b"".join(each[chain].tobytes() for each in flat), []).append(chain)
    copies = [group for group in groups.values() if len(group) > 1] or _followers(evidence)
    if not copies:
        return None
    named = "; ".join(", ".join(map(str, group)) for group in copies)
    return Check(
        "copied_chains",
        "fail",
        float(sum(len(group) - 1 for group in copies)),
        "no chain is a copy of another",
        thresholds.RHAT_SOURCE,
        f"Chains hold the same draws: {named}. R-hat and ESS take them for chains that agree.",
        "Give every chain a seed and a start of its own, and fit again.",
    )


def _followers(evidence: Evidence) -> list[list[int]]:
    """Groups of chains that make the same moves, draw by draw, though not to the last digit, or the opposite ones."""
    steps = [np.diff(draws, axis=1) for draws in list(quantities(evidence).values())[:_FOLLOWED]]
    if not steps:
        return []
    moves = np.stack(steps)
    if moves.ndim < 3 or moves.shape[2] < _FEWEST_MOVES or (moves.std(axis=2) == 0.0).any():
        return []
    moves = moves - moves.mean(axis=2, keepdims=True)
    moves /= np.linalg.norm(moves, axis=2, keepdims=True)
    alike = np.abs(np.einsum("qcs,qds->qcd", moves, moves)).min(axis=0) > thresholds.COPY_CORRELATION
    groups = {tuple(np.flatnonzero(row).tolist()) for row in alike}
    return sorted(list(group) for group in groups if len(group) > 1)


def check_repeats(evidence: Evidence) -> Check | None:
    """Whether draws occur again elsewhere than right after themselves: a continuous posterior never gives one twice."""
    stored = [evidence.stored(POSTERIOR, name) for name in evidence.names(POSTERIOR)]
    flat = [flattened(draws, 2) for draws in stored if draws is not None and draws.dtype.kind == "f"]
    if not flat or evidence.is_point:
        return None
    seen: set[bytes] = set()
    repeated = 0
    for chain in range(evidence.num_chains):
        before = b""
        for draw in range(evidence.draws_per_chain):
            row = b"".join(each[chain, draw].tobytes() for each in flat)
            repeated += row != before and row in seen and not (draw and _in_place(flat, chain, draw))
            seen.add(row)
            before = row
    share = repeated / evidence.num_draws
    if share <= (thresholds.STILL_WARN if evidence.is_iid else thresholds.REPEATS_WARN):
        return None
    return Check(
        "repeated_draws",
        "warn" if evidence.is_iid else "fail",
        share,
        f"≤ {thresholds.REPEATS_WARN:.0%} of the draws of chains occur again elsewhere",
        thresholds.ESS_SOURCE,
        f"{share:.0%} of the draws are copies of draws elsewhere, so that they are worth fewer than the effective "
        "sample size says.",
        "Look at how the draws were put together: drawn again with replacement, or a file read twice.",
    )


def _in_place(flat: list[np.ndarray], chain: int, draw: int) -> bool:
    """Whether a draw is the one before it but for the last digits, which a transform may round otherwise in each."""
    pairs = [(each[chain, draw], each[chain, draw - 1]) for each in flat]
    return all(np.allclose(new, old, rtol=4.0 * np.finfo(new.dtype).eps, atol=0.0) for new, old in pairs)


def _rows(evidence: Evidence, group: str, outcome: str) -> list[bytes]:
    """Input and outcome of every point, in float32; none where they do not go together."""
    x, y = evidence.values(group, "x"), evidence.values(outcome, "y")
    if x is None or y is None or len(x) != len(y):
        return []
    pairs = zip(x, y, strict=True)
    return [np.concatenate([one.ravel(), np.ravel(of)]).astype(np.float32).tobytes() for one, of in pairs]


def check_held_out_rows(evidence: Evidence) -> Check | None:
    """Whether held-out rows are training rows: then nothing that is called held-out is."""
    train, test = _rows(evidence, CONSTANT_DATA, OBSERVED_DATA), _rows(evidence, HELD_OUT, HELD_OUT)
    if not train or not test:
        return None
    known = Counter(train)
    share = sum(row in known for row in test) / len(test)
    # of data that repeat themselves as many rows are found in a part as within it
    natural = sum(count > 1 for count in map(known.__getitem__, train)) / len(train)
    if share <= natural + thresholds.LEAK_WARN:
        share, natural = max((share, natural), _nearly(train, test), key=lambda pair: pair[0] - pair[1])
    status: Status = (
        "pass"
        if share <= natural + thresholds.LEAK_WARN
        else "fail"
        if share > natural + thresholds.LEAK_FAIL
        else "warn"
    )
    return Check(
        "held_out_rows",
        status,
        share,
        f"≤ {thresholds.LEAK_WARN:.0%} beyond what the training rows repeat among themselves; > "
        f"{thresholds.LEAK_FAIL:.0%} fails",
        "numerical",
        f"{share:.0%} of the {len(test)} held-out rows are training rows"
        + ("." if share == 0.0 else f" ({natural:.0%} of the training rows occur more than once)."),
        ""
        if status == "pass"
        else "Hold out rows that the fit has not seen: these scores are of the training data.",
    )


def _nearly(train: list[bytes], test: list[bytes]) -> tuple[float, float]:
    """Shares of the held-out and of the training rows that a training row differs from by rounding alone.

    That is by a hundredth of the usual distance between neighbours, every column in units of its sd.
    """
    known, new = (np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1) for rows in (train, test))
    sd = known.std(axis=0)
    known, new = known[:, sd > 0.0] / sd[sd > 0.0], new[:, sd > 0.0] / sd[sd > 0.0]
    few = len(known) < 3 or known.shape[1] < 2
    if few or known.size > _MOST_VALUES or not (np.isfinite(known).all() and np.isfinite(new).all()):
        return 0.0, 0.0
    tree = cKDTree(known)
    own, other = tree.query(known, k=2)[0][:, 1], tree.query(new)[0]
    near = _ROUNDING * np.median(own)
    return float((other < near).mean()), float((own < near).mean())


def _stayed(evidence: Evidence) -> np.ndarray:
    """Whether each draw but the first of its chain equals the one before, (chain, draw − 1).

    In all weights, or in the function at all its probes.
    """
    num_chains, num_draws = evidence.num_chains, evidence.draws_per_chain
    weights = np.ones((num_chains, num_draws - 1), dtype=bool)
    for name in evidence.names(POSTERIOR):
        draws = evidence.stored(POSTERIOR, name)
        if draws is not None:
            weights &= _same(draws)
    f = evidence.stored(FUNCTION, "f")
    return weights if f is None or f.shape[:2] != (num_chains, num_draws) else weights | _same(f)


def _same(draws: np.ndarray) -> np.ndarray:
    flat = flattened(draws, 2)
    return (flat[:, 1:] == flat[:, :-1]).all(axis=2)


def _not_finite(evidence: Evidence, group: str) -> dict[str, int]:
    """Variable of a group → how many of its values are NaN or infinite, where any are."""
    counts = {
        name: int((~np.isfinite(values.values)).sum())
        for name in evidence.names(group)
        if np.issubdtype((values := evidence.tree[group].dataset[name]).dtype, np.floating)
    }
    return {name: count for name, count in counts.items() if count}
