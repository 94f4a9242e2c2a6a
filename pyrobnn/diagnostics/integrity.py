"""Whether the draws themselves are whole: there at all, finite, moving, and of a run that was let finish."""

from __future__ import annotations

import numpy as np
import xarray as xr

from pyrobnn.diagnostics import reading, thresholds
from pyrobnn.diagnostics.verdict import Check

_DRAWS = ("posterior", "function")
#: what the other checks, scores and figures are made of; of a sampler's statistics only these are read
_READ = (
    "log_likelihood",
    "log_prior",
    "posterior_predictive",
    "observed_data",
    "predictions",
    "predictions_constant_data",
    "grid",
)
_STATS = ("lp", "energy", "log_p", "log_q", "diverging", "tree_depth", "acceptance_rate")
_LISTED = 3


def hopeless(tree: xr.DataTree) -> Check | None:
    """A failing check if there are no draws, or draws that are NaN or infinite: nothing else can then be computed."""
    if reading.num_draws(tree) == 0:
        return Check(
            "num_draws", "fail", 0.0, "≥ 1 draw", "numerical", "There are no draws.", "Fit again, for longer."
        )
    bad = {
        (group, name): count
        for group in _DRAWS
        for name, count in _not_finite(tree, group).items()
        if set(reading.SAMPLE_DIMS) <= set(tree[group][name].dims)
    }
    if not bad:
        return None
    total = sum(tree[group][name].size for group, name in bad)
    return Check(
        "finite",
        "fail",
        sum(bad.values()) / total,
        "0 values that are NaN or infinite",
        "numerical",
        f"{sum(bad.values())} of {total} draws are NaN or infinite.",
        "Standardise x and y, lower the learning rate or step size, and fit again.",
    )


def integrity_checks(tree: xr.DataTree) -> list[Check]:
    """Only what is wrong: values not finite, draws that never move, chains that are copies, a run that was stopped."""
    found = (_others_finite(tree), _moving(tree), _copied(tree), interrupted(tree))
    return [check for check in found if check is not None]


def interrupted(tree: xr.DataTree) -> Check | None:
    """A warning if the fit was stopped from the keyboard, in which case the draws are what it had by then."""
    if reading.number(tree, "interrupted", 0.0) == 0.0:
        return None
    return Check(
        "interrupted",
        "warn",
        None,
        "a fit that ran to its end",
        "",
        f"The fit was interrupted; what it had by then: {reading.num_draws(tree)} "
        f"{'draw' if reading.num_draws(tree) == 1 else 'draws'}.",
        "Run it again to the end before relying on it.",
    )


def fit_warnings(tree: xr.DataTree) -> list[Check]:
    """A warning if the fit itself had something to say: what it told its user then, whoever reads its tree is told."""
    notes = reading.json_attr(tree, "warnings")
    notes = [str(note) for note in notes] if isinstance(notes, list) else []
    if not notes:
        return []
    more = "" if len(notes) == 1 else f" (and {len(notes) - 1} more, in the tree's attribute 'warnings')"
    return [
        Check(
            "fit_warnings",
            "warn",
            float(len(notes)),
            "a fit without warnings",
            "",
            f"The fit warned: {notes[0].rstrip('.')}{more}.",
            "Do what the warning says, and fit again.",
        )
    ]


def _others_finite(tree: xr.DataTree) -> Check | None:
    bad = {f"{group}/{name}": n for group in _READ for name, n in _not_finite(tree, group).items()}
    bad |= {f"sample_stats/{k}": n for k, n in _not_finite(tree, "sample_stats").items() if k in _STATS}
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


def _moving(tree: xr.DataTree) -> Check | None:
    """Whether each chain moves, and whether independent draws differ."""
    draws = reading.num_draws(tree) // reading.num_chains(tree)
    if draws < 2 or reading.is_point(tree):
        return None
    still = _stayed(tree)
    frozen = [int(chain) for chain in np.flatnonzero(still.all(axis=1))]
    share = float(still.mean())
    if not frozen and share <= thresholds.STILL_WARN:
        return None
    independent = reading.is_iid(tree)
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


def _copied(tree: xr.DataTree) -> Check | None:
    """Whether chains repeat one another draw by draw: R-hat calls that agreement, and the ESS counts every copy."""
    draws = [reading.stored_draws(tree, "posterior", str(name)) for name in tree["posterior"].data_vars]
    flat = [reading.flattened(each, 2).reshape(len(each), -1) for each in draws if each is not None]
    if not flat or len(flat[0]) < 2 or reading.is_point(tree):
        return None
    groups: dict[bytes, list[int]] = {}
    for chain in range(len(flat[0])):
        groups.setdefault(b"".join(each[chain].tobytes() for each in flat), []).append(chain)
    copies = [group for group in groups.values() if len(group) > 1]
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


def _stayed(tree: xr.DataTree) -> np.ndarray:
    """Whether each draw but the first of its chain equals the one before, (chain, draw − 1).

    In all weights, or in the function at all its probes.
    """
    sizes = tree["posterior"].sizes
    weights = np.ones((sizes["chain"], sizes["draw"] - 1), dtype=bool)
    for name in tree["posterior"].data_vars:
        draws = reading.stored_draws(tree, "posterior", str(name))
        if draws is not None:
            weights &= _same(draws)
    f = reading.stored_draws(tree, "function", "f")
    return weights if f is None or f.shape[:2] != (sizes["chain"], sizes["draw"]) else weights | _same(f)


def _same(draws: np.ndarray) -> np.ndarray:
    flat = reading.flattened(draws, 2)
    return (flat[:, 1:] == flat[:, :-1]).all(axis=2)


def _not_finite(tree: xr.DataTree, group: str) -> dict[str, int]:
    """Variable of a group → how many of its values are NaN or infinite, where any are."""
    if group not in tree.children:
        return {}
    counts = {
        str(name): int((~np.isfinite(values.values)).sum())
        for name, values in tree[group].data_vars.items()
        if np.issubdtype(values.dtype, np.floating)
    }
    return {name: count for name, count in counts.items() if count}
