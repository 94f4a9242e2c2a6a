"""The tables of claim.md from the records: reference posteriors, tasks of sbibm, targets of inference-gym."""

from __future__ import annotations

from pathlib import Path

from posteriordb.gym_rows import GYM
from posteriordb.sbibm_programs import SBIBM
from posteriordb.sbibm_rows import METHODS
from records import Records, read_records

HERE = Path(__file__).parent


def text() -> str:
    """A row per reference posterior; sbibm's tasks by method; targets of inference-gym."""
    return "\n\n".join(
        [
            table(read_records(HERE / "records.jsonl")),
            sbibm_table(read_records(HERE / "sbibm.jsonl")),
            gym_table(read_records(HERE / "gym.jsonl")),
        ]
    )


def table(records: Records) -> str:
    """How many runs of each posterior are right, and the worst of them by each number."""
    lines = [
        "| posterior | runs | right | warned of | wrong, and silent | largest error, in Monte-Carlo errors | of what "
        "| largest R-hat | least ESS | divergences | 1000 gradients, all chains |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    runs = {(r["name"], r["dtype"], r["seed"]): r for r in records}  # the last of each
    for name in sorted({run["name"] for run in runs.values()}):
        cells = _cells_of([run for run in runs.values() if run["name"] == name])
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    outcomes = [run["outcome"] for run in runs.values()]
    false_alarms = sum(run["outcome"] == "right" and bool(run["warnings"]) for run in runs.values())
    right, warned, refused, wrong = map(outcomes.count, ("right", "warned", "refused", "WRONG"))
    summary = (
        f"Of {len(outcomes)} runs {right} are right ({false_alarms} of them warned all the same), "
        f"{warned} are not and were warned of, {refused} were refused, "
        f"and {wrong} are wrong without a warning."
    )
    return "\n".join([*lines, "", summary])


def _cells_of(runs: Records) -> list[str | int]:
    """The counts of outcomes of a posterior's runs, and the worst numbers of those that were not refused."""
    outcomes = [run["outcome"] for run in runs]
    cells = [len(runs), *map(outcomes.count, ("right", "warned", "WRONG"))]
    finished = [run for run in runs if run["outcome"] != "refused"]
    if finished:
        worst = max(finished, key=lambda run: run["errors"])
        gradients = sorted(run["gradients"] / 1e3 for run in finished)
        cells += [
            f"{worst['errors']:.1f}",
            worst["where"],
            f"{max(run['rhat'] for run in finished):.3f}",
            f"{min(run['ess'] for run in finished):.0f}",
            sum(run["divergences"] for run in finished),
            f"{gradients[0]:.0f} to {gradients[-1]:.0f}",
        ]
    return cells


def sbibm_table(records: Records) -> str:
    """Runs that are right, warned of and silent, by task and method."""
    runs = {(r["task"], r["observation"], r["method"]): r["outcome"] for r in records}
    lines = [
        f"| task (right / warned / silent) | {' | '.join(METHODS)} |",
        "|---" * (1 + len(METHODS)) + "|",
    ]
    for task in SBIBM:
        if not any(run_task == task for run_task, _, _ in runs):
            continue
        cells = []
        for method in METHODS:
            outcomes = [o for (t, _, m), o in runs.items() if (t, m) == (task, method)]
            counts = map(outcomes.count, ("right", "told", "WRONG"))
            cells.append(" / ".join(map(str, counts)))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    wrong = list(runs.values()).count("WRONG")
    return "\n".join([*lines, "", f"Of {len(runs)} runs {wrong} are wrong without a warning."])


def gym_table(records: Records) -> str:
    """A row per target, a number per seed."""
    head = (
        "target",
        "gradients until .01",
        "published",
        "error after",
        "gradients",
        "of all chains",
        "divergences",
        "warned of",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, (published, *_) in GYM.items():
        runs = [record for record in records if record["task"] == task]
        if not runs:
            continue
        cells = [_of_seeds(runs, "gradients"), str(published)]
        for key in ("error", "all gradients", "pooled", "divergences", "warned"):
            cells.append(_of_seeds(runs, key))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_seeds(runs: Records, key: str) -> str:
    """One number of each run, with commas."""
    return ", ".join(str(run[key]) for run in runs)
