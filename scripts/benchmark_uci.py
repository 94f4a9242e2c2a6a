"""The UCI regression benchmark: every method on the 20 standard splits, beside the published numbers.

    python scripts/benchmark_uci.py --data-root DIR --data yacht --jobs 2
    python scripts/benchmark_uci.py --data-root DIR --scheduler tcp://host:8786
    python scripts/benchmark_uci.py --data-root DIR --budget 1h       # what fits into it, and what it leaves out
    python scripts/benchmark_uci.py --data-root DIR --check 5%        # a random part again: exit code 1 if it differs
    python scripts/benchmark_uci.py --data-root DIR --data yacht wine --check 5% --budget 5m
    python scripts/benchmark_uci.py --data-root DIR --stale           # what other code made, again
    python scripts/benchmark_uci.py --data-root DIR --gradients    # what NUTS would take where it was not run
    python scripts/benchmark_uci.py --table-only

A data set is one of the usual names, or any folder in the same layout. Each finished fit is one line of the results
file: stop the sweep at any moment, by any means, and the same command goes on where it was. Hyper-parameters follow one
rule per method (pyrobnn.studies.uci.RULES), from the train part alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "uci.jsonl"
#: the method whose cost is told where it was not run; leapfrogs over all chains that are timed: as many as make so
#: many rows in all, but SHORT at least; the R-hat of converged chains
CHAINS, ROWS, SHORT, GOOD_RHAT = "nuts", 20_000_000, 400, 1.05
#: what a line of the results file must tell to be counted
NEEDS = ("dataset", "split", "method", "rule", "scores", "cpu_seconds")


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, then print the tables and the targets."""
    options = parse(argv)
    # one thread a fit: the nets are small, and parallelism is across fits
    os.environ["OMP_NUM_THREADS"] = "1"
    from pyrobnn.studies import uci
    from pyrobnn.studies.uci import fits

    methods = options.methods or [fits.FLOOR, *uci.RULES]
    names = options.datasets or list(fits.DATASETS)
    tasks = []
    if not options.table_only:
        try:
            tasks = uci.tasks(names, methods, options.splits, root=options.data_root)
        except ValueError as error:
            return refuse(error)
    if options.check:
        wanted = {(task["dataset"], task["split"], task["method"]) for task in tasks}
        every = [
            record
            for record in uci.read_records(options.results, NEEDS)
            if (record["dataset"], record["split"], record["method"]) in wanted
        ]
        recorded = current(every, fits.rule_id, methods)
        if older := [record["method"] for record in every if record not in recorded]:
            names = ", ".join(sorted(set(older)))
            print(f"{len(older)} records of earlier settings are stale, and not checked: {names}")
        recorded = list(
            {fits.key(record): record for record in recorded}.values()
        )  # the last of repeated work
        return check(recorded, options, functools.partial(fits.run_task, root=options.data_root))
    if options.gradients:
        time_gradients(options)
    failures = 0
    if not (options.table_only or options.gradients):
        for name in names:
            tell_doubts(name, options.data_root)
        key = fits.key
        if options.stale:
            tasks = [{**task, "code": fits.code_of(task["method"])} for task in tasks]
            key = with_code
        sweep = uci.Sweep(options.results, key, jobs=options.jobs, scheduler=options.scheduler)
        failures = run(sweep, functools.partial(fits.run_task, root=options.data_root), tasks, options.budget)
    records = current(uci.read_records(options.results, NEEDS), fits.rule_id, [fits.FLOOR, *uci.RULES])
    published = uci.read_published(HERE / "published_uci.json")
    show(records, [fits.FLOOR, *uci.RULES], published)
    gradients = uci.read_records(beside(options.results, "gradients"))
    print("\n" + chains_table(records, gradients))
    print("\n" + rest_table(uci.read_records(options.results, NEEDS), gradients))
    return 1 if failures else 0


def tell_doubts(name: str, root) -> None:
    """What of a set is legal and probably not meant, as ``pyrobnn compare`` says of a table; of its first split."""
    from pyrobnn.data import uci as uci_set
    from pyrobnn.data.table import doubts
    from pyrobnn.studies.uci import fits

    train, _ = uci_set(fits.DATASETS.get(name, name), 0, root)
    for text in doubts(train):
        print(f"{name}: {text}", flush=True)


def with_code(record) -> tuple:
    """What makes two records the same work of the same code; a KeyError where a record does not say its code."""
    from pyrobnn.studies.uci import fits

    return (*fits.key(record), record["code"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", help="directory of the UCI sets (default: the variable PYROBNN_DATA)")
    parser.add_argument(
        "--data",
        "--datasets",
        dest="datasets",
        nargs="+",
        metavar="SET",
        help="names or folders (default: the nine usual ones)",
    )
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument(
        "--splits", type=splits, default=None, help="such as 0-4 or 0,7 (default: all that a set has)"
    )
    parser.add_argument("--results", default=RESULTS, help="the results file")
    parser.add_argument("--jobs", type=int, default=1, help="processes on this machine")
    parser.add_argument("--scheduler", help="address of a Dask scheduler whose workers run the fits")
    parser.add_argument(
        "--budget", type=duration, default=math.inf, help="such as 90m or 1h: run what fits into it"
    )
    parser.add_argument("--check", type=share, help="such as 5%%: make a random part of the records again")
    parser.add_argument("--stale", action="store_true", help="also what was made by other code than today's")
    parser.add_argument("--seed", type=int, default=0, help="of the part that --check draws")
    parser.add_argument(
        "--gradients", action="store_true", help="time a gradient of NUTS where it was not run"
    )
    parser.add_argument("--table-only", action="store_true", help="print what there is, fit nothing")
    return parser.parse_args(argv)


def refuse(error: Exception) -> int:
    """What is wrong with the options, in one line; the exit code of that, as argparse has it."""
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return 2


def splits(text: str) -> list[int]:
    """``"0-2,7"`` → [0, 1, 2, 7]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
            raise argparse.ArgumentTypeError(f"splits are numbers such as 0-4 or 0,7, got {text!r}")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def duration(text: str) -> float:
    """Of the option ``--budget``."""
    from pyrobnn.studies.uci import plan

    return _of_an_option(plan.duration, text)


def share(text: str) -> float:
    """Of the option ``--check``."""
    from pyrobnn.studies.uci import plan

    return _of_an_option(plan.share, text)


def _of_an_option(read, text: str) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check(records, options, function) -> int:
    """Make a random part of the records again; 1 if one lies beyond the tolerance, 2 if there is none."""
    from pyrobnn.studies.uci import append_record, checks, fits, plan

    if not records:
        print(f"no record of today's rules in {options.results}: nothing to check")
        return 2
    drawn = plan.sample(records, options.check, options.seed)
    planned = plan.plan(drawn, records, options.budget)
    drawn = planned.tasks
    print(f"{len(drawn)} of {len(records)} records again; {planned.describe(1, 'records')}", flush=True)
    if not drawn:
        print("nothing is checked")
        return 2
    failed = 0
    # cells of a method on a set that is too dear for the budget were not drawn from: nothing is said of them
    ran, left = ({(one["dataset"], one["method"]) for one in part} for part in (drawn, planned.left_out))
    for number, record in enumerate(drawn, 1):
        name = f"[{number}/{len(drawn)}] {record['dataset']} split {record['split']} {record['method']}"
        task = {key: record[key] for key in ("dataset", "split", "method", "rule")}
        again = function(task)
        wrong = plan.differences(record, again)
        failed += bool(wrong)
        among = {one["dataset"] for one in records if (one["dataset"], record["method"]) not in left - ran}
        append_record(beside(options.results, "checks"), checks.checked_cell(record, again, sorted(among)))
        code = (
            ""
            if record.get("code") == fits.code_of(record["method"])
            else ", recorded by other code than today's"
        )
        exact = "the same number" if again["scores"] == record["scores"] else "within the tolerance"
        print(f"{name}: {'; '.join(wrong) or exact}{code}", flush=True)
    print(f"{len(drawn) - failed} of {len(drawn)} records were met")
    return 1 if failed else 0


def beside(results, what: str) -> Path:
    """The file, beside the results, of what was made again (``checks``) or of timed gradients."""
    return Path(results).with_name(f"{Path(results).stem}_{what}.jsonl")


def time_gradients(options) -> None:
    """Time a gradient of the chains of NUTS' rule on the first split of every set that it was not run on."""
    from benchmark_nuts import Ours

    from pyrobnn.data import uci as load
    from pyrobnn.data import uci_num_hidden
    from pyrobnn.studies import uci
    from pyrobnn.studies.uci import fits

    rule = uci.RULES[CHAINS]
    method = rule.method
    args = {
        "num_chains": method.num_chains,
        "num_warmup": 50,
        "num_draws": 1,
        "clock": "cpu",
        "device": "cpu",
    }

    class OnSet(Ours):
        def program(self, case):
            return candidate.model(case, 0), case.x, case.y

    records, file = uci.read_records(options.results, NEEDS), beside(options.results, "gradients")
    known = [*(record for record in records if record["method"] == CHAINS), *uci.read_records(file)]
    for name in options.datasets or fits.DATASETS:
        if name in {record["dataset"] for record in known}:
            continue
        folder = fits.DATASETS.get(name, name)
        train, _ = load(folder, 0, options.data_root)
        num_hidden = uci_num_hidden(folder, options.data_root)
        candidate = next(dataclasses.replace(rule, num_hidden=num_hidden).candidates())

        def work(train=train):
            ours = OnSet(train, {**args, "max_tree_depth": method.max_tree_depth})
            ours.machine(SHORT)  # the first touches its memory
            return {"scores": {}, "gradient_us": 1e6 * ours.machine(max(SHORT, ROWS // train.num_data))}

        task = {"dataset": name, "method": CHAINS}
        uci.append_record(
            file, fits.measured(task, work, {"num_train": train.num_data, "num_hidden": num_hidden})
        )


def chains_table(records, gradients, marks=None) -> str:
    """What NUTS took on a set, and whether it converged; where it was not run, what it would take at most.

    ``marks`` are as for :func:`pyrobnn.studies.uci.tables.markdown`.
    """
    from pyrobnn.studies.uci import RULES

    rule, rows = RULES[CHAINS], []
    method, most = rule.method, _most_gradients()
    ran = [record for record in records if record["method"] == CHAINS]
    for name in sorted({record["dataset"] for record in records}):
        if own := [record for record in ran if record["dataset"] == name]:
            spent = sum(record["cpu_seconds"] for record in own) / len(own)
            rhat = [
                [record["diagnosis"].get(f"rhat_f_{part}", math.inf) for part in ("max", "median")]
                for record in own
            ]
            well = f"{sum(worst <= GOOD_RHAT for worst, _ in rhat)} of {len(own)}"
            middle = sorted(half for _, half in rhat)
            cells = f"{spent:,.0f}" + (marks or {}).get((name, CHAINS), ""), "", well
            rows.append((name, own[0]["num_train"], *cells, f"{middle[0]:.2f} … {middle[-1]:.2f}"))
        elif timed := [record for record in gradients if record["dataset"] == name]:
            last = timed[-1]
            cost = f"{most * last['gradient_us'] / 1e6:,.0f} at most"
            rows.append((name, last["num_train"], f"not run: {cost}", f"{last['gradient_us']:,.0f}", "", ""))
        else:
            rows.append((name, "", "not run, and no gradient timed", "", "", ""))
    head = (
        "data",
        "training rows",
        "CPU s a split",
        "µs a gradient of one chain",
        f"splits with every R-hat of f ≤ {GOOD_RHAT}",
        "median R-hat of f, by split",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(
        [
            *lines,
            "",
            f"At most: {method.num_chains} chains of {method.num_warmup} + {rule.num_draws} transitions, each cut at "
            f"depth {method.max_tree_depth}, are {most:,} gradients. That is what the rule would spend, its choice of "
            "the prior by SVI apart, and no promise that the chains converge.",
        ]
    )


def rest_table(records, gradients) -> str:
    """The splits that today's rules have not run, by method and set, and what one would take.

    A set has as many splits as any method has records of; what no record times is guessed as for a budget.
    """
    from pyrobnn.studies.uci import RULES, fits, plan

    today = current(records, fits.rule_id, [fits.FLOOR, *RULES])
    costs, most, total = (plan.Cost(today), plan.Cost(records)), _most_gradients(), 0.0
    per_gradient = {record["dataset"]: record["gradient_us"] / 1e6 for record in gradients}
    names = sorted({record["dataset"] for record in records})
    full = {name: {record["split"] for record in records if record["dataset"] == name} for name in names}
    done = {(r["dataset"], r["split"], r["method"]) for r in today}
    lines = [f"| splits to run × CPU s of one | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for method in (fits.FLOOR, *RULES):
        cells = []
        for name in names:
            count = sum((name, split, method) not in done for split in full[name])
            guesses = [cost({"dataset": name, "method": method}) for cost in costs]
            seconds, known = next((guess for guess in guesses if guess[1]), guesses[1])
            if not known and method == CHAINS and name in per_gradient:
                seconds = most * per_gradient[name]
            total += count * seconds
            cells.append(f"{count} × {seconds:,.0f}{'' if known else '?'}" if count else "")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    guess = f"of {CHAINS} the most that its gradients would take, else its dearest record, and more on a larger set"
    return "\n".join([*lines, "", f"In all {total / 3600:,.1f} CPU hours. ? never timed: {guess}."])


def _most_gradients() -> int:
    """Of a fit of NUTS' rule, every tree cut at its depth."""
    from pyrobnn.studies.uci import RULES

    method, num_draws = RULES[CHAINS].method, RULES[CHAINS].num_draws
    return method.num_chains * (method.num_warmup + num_draws) * (2**method.max_tree_depth - 1)


def run(sweep, function, tasks, budget, shipped=None, told=None) -> int:
    """Run what is pending and say how it goes; the number of fits that failed.

    Costs that no record tells, of the file in work or of the ``shipped`` one (by default this script's), are guessed;
    what a budget left out is planned again with what was measured. ``told`` is what to say of a record, by default its
    scores.
    """
    from pyrobnn.studies.uci import plan, read_records

    shipped = shipped or RESULTS
    needs = ("method", "cpu_seconds")
    waiting, failures, started = sweep.pending(tasks), 0, time.perf_counter()
    head = f"{len(tasks) - len(waiting)} of {len(tasks)} fits are in {sweep.path}"
    others = read_records(shipped, needs) if Path(sweep.path) != shipped else []
    try:
        while True:
            known = [*others, *read_records(sweep.path, needs)]
            planned = plan.plan(waiting, known, budget - (time.perf_counter() - started), sweep.jobs)
            print(f"{head}; {len(planned.tasks)} to run", planned.describe(sweep.jobs), sep="\n", flush=True)
            failures += _run_planned(sweep, function, planned.tasks, told or _scores_of)
            waiting, head = planned.left_out, f"{time.perf_counter() - started:.0f} s are spent"
            if not (waiting and planned.tasks):
                break
    except KeyboardInterrupt:
        print("\ninterrupted: what is finished is kept; the same command goes on from here")
        sys.exit(130)
    print(f"finished in {time.perf_counter() - started:.0f} s, {failures} failed")
    return failures


def _run_planned(sweep, function, tasks, told) -> int:
    from pyrobnn.studies.uci.plan import set_of

    failures = 0
    for number, (task, outcome) in enumerate(sweep.run(function, tasks), 1):
        failures += isinstance(outcome, Exception)
        said = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, Exception) else told(outcome)
        print(
            f"[{number}/{len(tasks)}] {set_of(task)} split {task['split']} {task['method']}: {said}",
            flush=True,
        )
    return failures


def _scores_of(record) -> str:
    found = record["scores"]
    return (
        f"log density {found['log_density']:.3f}, RMSE {found['rmse']:.3f}, coverage {found['coverage']:.2f}, "
        f"{record['seconds']:.1f} s (CPU {record['cpu_seconds']:.1f} s) {record.get('chosen', {}).get('label', '')}"
    )


def current(records, rule_id, methods) -> list[dict]:
    """Records made under today's rules."""
    ids = {method: rule_id(method) for method in methods}
    return [record for record in records if ids.get(record.get("method")) == record.get("rule")]


def show(records, methods, published) -> None:
    """The tables, then what should hold and whether it does."""
    from pyrobnn.studies.uci import compare_with_published
    from pyrobnn.studies.uci.tables import METRICS, markdown

    names = sorted({record["dataset"] for record in records})
    if not records:
        print("no results yet")
        return
    for metric in METRICS:
        print("\n" + markdown(records, metric, methods, names, published))
    print("\nhomoskedastic noise and the standard splits unless said; ± is the standard error unless said\n")
    for target in compare_with_published(records, published):
        word = {True: "met", False: "NOT MET", None: "too few"}[target.met]
        print(f"{word:8} {target.dataset}: {target.claim} ({target.evidence})")
    print()
    for column in published["columns"]:
        print(f"{column['label']}: {column['citation']} {column['url']}")


if __name__ == "__main__":
    sys.exit(main())
