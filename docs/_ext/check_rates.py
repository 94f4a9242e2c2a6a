"""How often each check is wrong, from the recorded study of verdicts: in words, as a table, and as a figure."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import beta

from pyrobnn.diagnostics.check_table import rates

SCRIPTS = Path(__file__).parents[2] / "scripts"
SPEAKS = ("warn", "fail")
#: background-free figures, one for each of the theme's two grounds: their ink, and the two quantities' colours
INKS = {"light": ("#24292f", "#b5442c", "#1f5f8b"), "dark": ("#d0d6dc", "#f0937d", "#7fb7e0")}


@cache
def records() -> list[dict[str, Any]]:
    """The cases of the study of verdicts: healthy posteriors, and planted faults."""
    text = (SCRIPTS / "verdict" / "records.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def _faults() -> dict[str, Any]:
    """The faults that the study plants."""
    spec = importlib.util.spec_from_file_location("verdict_run", SCRIPTS / "verdict" / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module.SICK


def _is_for(name: str, row: dict[str, Any]) -> bool:
    """Whether a check is there to see the fault of a case."""
    return row["kind"] in _faults() and name in _faults()[row["kind"]].checks


def measured(name: str) -> str:
    """The measured false alarms and power of one check, as Markdown."""
    judged = [row for row in records() if name in row["checks"]]
    healthy = [row for row in judged if row["healthy"]]
    if not judged or all(row["checks"][name][0] == "info" for row in judged):
        cases = (
            f" It was made in {len(judged)} cases of the study, always as information."
            if judged
            else ""
        )
        return f"Not measured: this check decides no case of the [study](../claims/verdict.md).{cases}\n"
    if healthy:
        counts = {
            status: sum(row["checks"][name][0] == status for row in healthy) for status in SPEAKS
        }
        warns, fails = (share(counts[status], len(healthy)) for status in SPEAKS)
        line = f"**False alarms**: of {len(healthy)} healthy posteriors it warns on {warns} and fails {fails}.\n"
    else:  # such a check appears only where it warns or fails
        every = sum(row["healthy"] for row in records())
        line = f"**False alarms**: of {every} healthy posteriors it warns on or fails {share(0, every)}.\n"
    return "\n".join([line, *_power(name)])


def share(count: int, of: int) -> str:
    """A rate; of none, with the largest that would still give none in one study of twenty."""
    return f"{count / of:.1%}" if count else f"none (95 % bound {1 - 0.05 ** (1 / of):.1%})"


def _power(name: str) -> list[str]:
    """Tables of the planted faults that the check is there to see, seen or not, and of others that it sees."""
    sick = [row for row in records() if not row["healthy"]]
    own = []
    others = []
    for kind in dict.fromkeys(row["kind"] for row in sick):
        cases = [row for row in sick if row["kind"] == kind]
        seen = [
            row["checks"][name][1] for row in cases if row["checks"].get(name, ("",))[0] in SPEAKS
        ]
        values = [value for value in seen if value is not None]
        shown = f"{median(values):.3g}" if values else ""
        fault = f"posterior {kind}" if kind.startswith(("of ", "without ")) else kind
        line = f"| {fault} | {len(cases)} | {len(seen) / len(cases):.0%} | {shown} |"
        if any(_is_for(name, row) for row in cases):
            own.append((len(seen) / len(cases), line))
        elif seen:
            others.append((len(seen) / len(cases), line))
    found = rates().get(name, {"sick": 0})
    parts = []
    if found["sick"]:
        seen = found["seen"]
        of = found["sick"]
        parts += [
            f"**Power**: of {of} cases of the faults that are meant for it, it finds {seen / of:.0%}.\n"
        ]
        parts += _table(own)
    else:
        parts.append("**Power**: the study plants no fault of the kind that it looks for.\n")
    return (
        [
            *parts,
            "Faults that are meant for other checks, and that this one finds too:\n",
            *_table(others),
        ]
        if others
        else parts
    )


def _table(rows: list[tuple[float, str]]) -> list[str]:
    head = ["| fault | cases | found | median value where found |", "|---|---|---|---|"]
    return [*head, *(line for _, line in sorted(rows, key=lambda row: -row[0])), ""]


def columns(name: str) -> tuple[str, str]:
    """False alarms and power of one check for the list of all: a share and of how many, or nothing."""
    found = rates().get(name)
    if found is None:
        return "", ""
    alarms = f"{found['false_alarms'] / found['healthy']:.1%} of {found['healthy']}"
    return alarms, f"{found['seen'] / found['sick']:.0%} of {found['sick']}" if found[
        "sick"
    ] else ""


# --- the figure


def draw(folder: Path) -> None:
    """Write ``rates-light.svg`` and ``rates-dark.svg``."""
    for ground in INKS:
        ink, alarm, power = INKS[ground]
        drawn = {
            "text.color": ink,
            "axes.edgecolor": ink,
            "axes.labelcolor": ink,
            "xtick.color": ink,
        }
        fixed = {
            "ytick.color": ink,
            "svg.hashsalt": "pyrobnn",
            "svg.fonttype": "none",
            "font.size": 9,
        }
        with rc_context({**drawn, **fixed}):
            figure = Figure(figsize=(6.0, 6.2), layout="constrained")
            left, right = figure.subplots(1, 2, sharey=True)
            names = sorted(rates(), key=lambda name: (_fraction(name)[1], name))
            _panel(left, names, "false_alarms", "healthy", alarm)
            _panel(right, names, "seen", "sick", power)
            left.set(xlim=(-0.7, 25), xlabel="% of healthy posteriors", title="false alarms")
            right.set(xlim=(0, 103), xlabel="% of the faults it is for", title="power")
            left.set_yticks(range(len(names)), names, family="monospace")
            figure.savefig(
                folder / f"rates-{ground}.svg",
                transparent=True,
                metadata={"Date": None, "Creator": None},
            )


def _fraction(name: str) -> tuple[float, float]:
    found = rates()[name]
    return found["false_alarms"] / found["healthy"], found["seen"] / max(1, found["sick"])


def _panel(axes: Axes, names: list[str], count: str, of: str, colour: str) -> None:
    """One dot a check, and the exact binomial 95 % interval (Clopper & Pearson, 1934)."""
    for row, name in enumerate(names):
        k = rates()[name][count]
        n = rates()[name][of]
        if n == 0:
            continue
        low = 0.0 if k == 0 else float(beta.ppf(0.025, k, n - k + 1))
        high = 1.0 if k == n else float(beta.ppf(0.975, k + 1, n - k))
        axes.plot([100 * low, 100 * high], [row, row], color=colour, alpha=0.45, linewidth=3)
        axes.plot([100 * k / n], [row], "o", color=colour, markersize=4.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#8885", linewidth=0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
