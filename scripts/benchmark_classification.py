"""Class probabilities on clean, corrupted and unseen inputs: every method on the same net under the same prior.

    python scripts/benchmark_classification.py                      # goes on where the results file ends
    python scripts/benchmark_classification.py --data digits --methods nuts svi --splits 0
    python scripts/benchmark_classification.py --budget 30m         # what fits into it, and what it leaves out
    python scripts/benchmark_classification.py --table-only

The sets ship with scikit-learn: no download. Wine, iris and breast cancer have a hidden layer of 10 tanh units on a
quarter held out; the digits one of 30 ReLU units, or a small convolutional net, on 1,000 training rows. The held-out
digits are scored as they are, with noise of a standard deviation in units of the brightest pixel, rotated by an angle,
and moved by pixels; "unseen" is fitted to the digits 0 … 7 and asked to tell 8 and 9 from them. The prior's scale is
doubled or halved for as long as the evidence (Laplace's, Kronecker-factored) of the training rows rises, and is one for
all methods: what differs between two rows of a table is the method.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "classification.jsonl"
DATA = ("iris", "wine", "breast_cancer", "digits", "digits-cnn", "unseen")
METHODS = ("map", "ensemble", "laplace", "laplace-last", "svi", "swag", "mc-dropout", "sghmc", "nuts")
#: corruption → its severities
SHIFTS = {"noise": (0.25, 0.5), "rotation": (20, 40), "moved": (1, 2)}
NUM_TRAIN = 1000
#: s of N(0, s²/fan-in) from which the search for the evidence's choice starts
FIRST_SCALE = 2.0
SCORES = {"log_density": "log density", "accuracy": "accuracy", "ece": "ECE", "brier": "Brier"}


def configurations() -> dict[str, tuple[Any, int | None]]:
    """Method → its configuration, and its draws (of each chain) where it has a choice."""
    import pyrobnn as pb

    search = {"num_steps": 600, "compile": False}
    mode = pb.MAP(**search)
    return {
        "map": (mode, None),
        "ensemble": (pb.DeepEnsemble(**search), None),
        "laplace": (pb.Laplace(map=mode, importance=False, compile=False), 200),
        "laplace-last": (pb.Laplace(map=mode, subset="last_layer", importance=False, compile=False), 200),
        "svi": (pb.SVI(num_steps=3000, local_reparameterization=True, compile=False), 200),
        "swag": (pb.SWAG(init_steps=600, num_steps=1000, compile=False), 100),
        "mc-dropout": (pb.MCDropout(p=0.05, num_steps=1500, compile=False), 200),
        "sghmc": (pb.SGHMC(num_chains=4, num_warmup=1000, compile=False), 50),
        "nuts": (pb.NUTS(num_chains=4, num_warmup=200, max_tree_depth=7), 100),
    }


def rule(method: str) -> str:
    """Eight letters that change with a method's settings, the model, or the data."""
    from pyrobnn.inference.fitting.problem import settings

    configured, num_draws = configurations()[method]
    text = [
        settings(configured),
        num_draws,
        FIRST_SCALE,
        NUM_TRAIN,
        {k: list(v) for k, v in SHIFTS.items()},
    ]
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:8]


def code_of(method: str) -> str:
    """Eight letters that change with any line that a method's scores depend on."""
    import sweeps

    import pyrobnn as pb
    from pyrobnn.studies.uci import fits

    parts = (
        "data.bundled",
        "model",
        "likelihoods.categorical",
        "networks",
        "priors",
        "posterior.predict",
        "metrics",
    )
    fitted = {type(each).__module__ for each in (configurations()[method][0], pb.Laplace(), pb.MAP())}
    package = fits.code(*sorted({f"pyrobnn.{part}" for part in parts} | fitted))
    return sweeps.with_own(package, load, corrupted, model, prior_scale, scores, told_apart, run_task)


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two records the same work."""
    return record["data"], record["split"], record["method"], record["rule"]


def load(name: str, split: int):
    """The train part and the test parts by name: ``clean``, and what the digits are made of."""
    from sklearn import datasets

    import pyrobnn as pb
    from pyrobnn.data import Dataset, train_test_split

    if name in ("iris", "wine", "breast_cancer"):
        bunch = getattr(datasets, f"load_{name}")()
        full = Dataset(bunch.data.astype("float32"), bunch.target.astype("int64"), name, "classification")
        train, test = train_test_split(full, 0.25, seed=split)
        return train, {"clean": test}
    digits = pb.data.digits()
    train, test = train_test_split(digits, 1 - NUM_TRAIN / digits.num_data, seed=split)
    if name == "unseen":
        import torch

        seen = torch.arange(8)
        known = [torch.isin(part.y, seen) for part in (train, test)]
        kept = train.subset(known[0].nonzero()[:, 0])
        return kept, {
            "clean": test.subset(known[1].nonzero()[:, 0]),
            "other": test.subset((~known[1]).nonzero()[:, 0]),
        }
    parts = {
        f"{kind} {severity:g}": corrupted(test, kind, severity, seed=split)
        for kind, severities in SHIFTS.items()
        for severity in severities
    }
    return train, {"clean": test, **parts}


def corrupted(images, kind: str, severity: float, *, seed: int):
    """The images (N, 1, side, side) with noise, rotated about their centre, or moved to the right and down."""
    import dataclasses
    import math

    import torch
    from torch.nn.functional import affine_grid, grid_sample

    x = images.x
    if kind == "noise":
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1000 + seed))
        return dataclasses.replace(images, x=x + severity * noise)
    angle = math.radians(severity) if kind == "rotation" else 0.0
    step = 0.0 if kind == "rotation" else -2.0 * severity / x.shape[-1]  # the grid spans [−1, 1]
    turn = [[math.cos(angle), -math.sin(angle), step], [math.sin(angle), math.cos(angle), step]]
    grid = affine_grid(torch.tensor(turn).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return dataclasses.replace(images, x=grid_sample(x, grid, align_corners=False))


def model(name: str, train, seed: int, prior_scale: float):
    """The net of a set under N(0, s²/fan-in), with softmax; tables in standard units."""
    import torch

    import pyrobnn as pb

    classes = 8 if name == "unseen" else int(train.y.max()) + 1
    prior, softmax = pb.priors.FanInNormal(prior_scale), pb.likelihoods.Categorical()
    if name == "digits-cnn":
        return pb.BNN(pb.networks.small_cnn(classes, seed=seed), prior, softmax)
    if train.x.dim() == 4:
        net = pb.networks.mlp(64, (30,), classes, activation="relu", seed=seed)
        return pb.BNN(torch.nn.Sequential(torch.nn.Flatten(), net), prior, softmax)
    net = pb.networks.mlp(train.x.shape[1], (10,), classes, activation="tanh", seed=seed)
    return pb.BNN(net, prior, softmax, standardizer=pb.data.Standardizer.fit(train))


@functools.cache  # the methods of a split run one after another
def prior_scale(name: str, split: int) -> float:
    """The scale, a power of two, whose neighbours both have no higher evidence on the training rows."""
    import pyrobnn as pb

    train, _ = load(name, split)
    judge = pb.Laplace(
        structure="kron", map=pb.MAP(num_steps=400, compile=False), importance=False, compile=False
    )

    @functools.cache
    def evidence(scale: float) -> float:
        net = model(name, train, split, scale)
        return judge.fit(net, train.x, train.y, seed=split, num_draws=1).log_evidence

    best = FIRST_SCALE
    for factor in (2.0, 0.5):
        while evidence(best * factor) > evidence(best):
            best *= factor
    return best


def scores(prediction, y) -> dict[str, float]:
    """Of the class probabilities: mean log density (nats), accuracy, calibration error, Brier score."""
    import pyrobnn as pb

    probs = prediction.probs
    return {
        "log_density": float(prediction.log_prob(y).double().mean()),
        "accuracy": pb.metrics.accuracy(probs, y),
        "ece": pb.metrics.ece(probs, y),
        "brier": pb.metrics.brier(probs, y),
    }


def told_apart(seen, other) -> dict[str, float]:
    """AUROC of unseen classes by one minus the largest probability, and by the mutual information of several draws."""
    import torch

    import pyrobnn as pb

    unseen = torch.cat([torch.zeros(len(seen.probs)), torch.ones(len(other.probs))]).bool()
    largest = torch.cat([-seen.probs.amax(1), -other.probs.amax(1)])
    found = {"auroc largest probability": pb.metrics.auroc(largest, unseen)}
    if seen.f.shape[0] * seen.f.shape[1] > 1:
        information = torch.cat([seen.epistemic_entropy, other.epistemic_entropy])
        found["auroc mutual information"] = pb.metrics.auroc(information, unseen)
    return found


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Fit and score one method on one split of one set."""
    import torch

    from pyrobnn.studies.uci import fits

    torch.set_num_threads(1)
    train, tests = load(task["data"], task["split"])
    seed = task["split"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of short searches that only choose
        scale = prior_scale(task["data"], seed)

    def work() -> dict[str, Any]:
        method, num_draws = configurations()[task["method"]]
        options = {} if num_draws is None else {"num_draws": num_draws}
        posterior = method.fit(
            model(task["data"], train, seed, scale), train.x, train.y, seed=seed, **options
        )
        predictions = {part: posterior.predict(test.x) for part, test in tests.items()}
        judged = fits.diagnosis(posterior, predictions["clean"].f)
        found = {
            f"{part} {name}": value
            for part, test in tests.items()
            if part != "other"
            for name, value in scores(predictions[part], test.y).items()
        }
        if "other" in predictions:
            found |= told_apart(predictions["clean"], predictions["other"])
        return {"scores": found, "diagnosis": judged, "chosen": {"prior_scale": scale}}

    facts = {"seed": seed, "num_train": train.num_data, "num_test": tests["clean"].num_data}
    facts["code"] = code_of(task["method"])
    return fits.measured(task, work, facts)


def current(records: list[dict]) -> list[dict]:
    """Records of today's settings."""
    rules = {method: rule(method) for method in METHODS}
    return [record for record in records if rules.get(record["method"]) == record["rule"]]


def gathered(records: list[dict], data: str, score: str) -> dict[str, list[float]]:
    """Method → the score of every split that has it, in the order of METHODS."""
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for record in current(records):
        if record["data"] == data and score in record["scores"]:
            found[record["method"]].append(record["scores"][score])
    return {method: values for method, values in found.items() if values}


def cell(values: list[float] | None, overlap: float = 0.0) -> str:
    """A mean over splits, with its standard error where there are enough for one."""
    from pyrobnn.studies.uci import tables

    if not values:
        return ""
    found = tables.cell(values, overlap)
    return f"{found.mean:.3f}" + (f" ± {found.error:.3f}" if len(values) >= tables.FEWEST else "")


def overlap(records: list[dict], data: str) -> float:
    """Test rows over training rows."""
    return next((r["num_test"] / r["num_train"] for r in records if r["data"] == data), 0.0)


def table(records: list[dict]) -> str:
    """Every method on clean test rows."""
    import sweeps

    lines = [
        "| data | method | splits | " + " | ".join(SCORES.values()) + " | R-hat of f | CPU s |",
        "|---|---|---|" + "---|" * (len(SCORES) + 2),
    ]
    for data in DATA[:-1]:
        columns = [gathered(records, data, f"clean {score}") for score in SCORES]
        for method in columns[0]:
            rows = [r for r in current(records) if (r["data"], r["method"]) == (data, method)]
            cells = [cell(column[method], overlap(records, data)) for column in columns]
            rhats = [r["diagnosis"]["rhat_f_max"] for r in rows if r["diagnosis"]]
            cells.append(f"{max(rhats):.2f}" if rhats else "")
            cells.append(f"{sum(r['cpu_seconds'] for r in rows) / len(rows):.0f}")
            mark = sweeps.mark(rows, code_of(method))
            lines.append(f"| {data} | {method}{mark} | {len(rows)} | {' | '.join(cells)} |")
    have = {(record["data"], record["method"]) for record in current(records)}
    return "\n".join([*lines, *sweeps.told(lines), *sweeps.not_run(DATA, METHODS, have)])


def shift_table(records: list[dict]) -> str:
    """Log density and calibration error of corrupted digits, and unseen digits told apart."""
    import sweeps

    parts = [f"{kind} {severity:g}" for kind, severities in SHIFTS.items() for severity in severities]
    unseen = ("auroc largest probability", "auroc mutual information")
    heads = ["clean", *parts]
    lines = [
        "| net | method | "
        + " | ".join(heads)
        + " | ECE at the worst | AUROC by probability | by information |",
        "|---|---|" + "---|" * (len(heads) + 3),
    ]
    for data in ("digits", "digits-cnn"):
        densities = {part: gathered(records, data, f"{part} log_density") for part in heads}
        for method, clean in densities["clean"].items():
            cells = [cell(densities[part][method]).split(" ±")[0] for part in heads]
            worst = max(sum(gathered(records, data, f"{part} ece")[method]) / len(clean) for part in heads)
            cells.append(f"{worst:.3f}")
            for score in unseen:
                found = gathered(records, "unseen", score).get(method) if data == "digits" else None
                cells.append(cell(found).split(" ±")[0])
            rows = [r for r in current(records) if (r["data"], r["method"]) == (data, method)]
            mark = sweeps.mark(rows, code_of(method))
            lines.append(f"| {data} | {method}{mark} | {' | '.join(cells)} |")
    return "\n".join([*lines, *sweeps.told(lines)])


def main(argv: list[str] | None = None) -> int:
    """Run what is pending, then print the tables."""
    import sweeps

    options = sweeps.parser(__doc__, RESULTS, DATA, METHODS, num_splits=2).parse_args(argv)
    tasks = [
        {"data": data, "split": split, "method": method, "rule": rule(method)}
        for split in options.splits
        for data in options.data
        for method in options.methods
    ]
    failures = sweeps.sweep(options, run_task, key, tasks)
    from pyrobnn.studies.uci import read_records

    records = read_records(options.results, ("data", "split", "method", "scores", "rule", "code"))
    print(table(records), shift_table(records), sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
