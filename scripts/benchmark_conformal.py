"""How many new outcomes 90 % sets hold, and how wide they are: conformal ones, and the model's own.

    python scripts/benchmark_conformal.py                   # goes on where the results file ends
    python scripts/benchmark_conformal.py --data classes --splits 0-9 --methods nuts laplace
    python scripts/benchmark_conformal.py --table-only

A split is 99 rows to fit, and new ones in ten groups: 49 rows that calibrate, 25 that are tested. Of one input, with
the truth drawn from the model's own prior ("well specified", "classes"), and with a model that has something wrong:
noise of Student's t with 2 degrees of freedom under a Gaussian one of a third of its scale ("noise too small"), and
classes that alternate faster than the net can ("fast classes"). A hidden layer of 5 tanh units.

The fit is made once: the model's own sets, add-one-in sets from the same rows, and split ones, which the rows beside it
calibrate. The searches are short, for what is measured must hold however good the fit is.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "conformal.jsonl"
CLASSES = ("classes", "fast classes")
DATA = ("well specified", "noise too small", *CLASSES)
METHODS = ("nuts", "sghmc", "laplace", "svi", "map", "ensemble", "swag", "mc-dropout")
LEVEL = 0.9
#: ⌊α (n + 1)⌋ is a whole number for both: no set has to hold more than it says
NUM_TRAIN, NUM_CALIBRATION, NUM_TEST, GROUPS = 99, 49, 25, 10
#: splits whose chains run as one
BATCH = 10
WAYS = ("own", "add-one-in", "split")


def key(record):
    """What makes two records the same work."""
    return record["data"], record["split"], record["method"]


def model(name):
    """The net, prior and noise of a data set."""
    import pyro.distributions as dist

    import pyrobnn as pb

    noise = pb.likelihoods.HomoskedasticGaussian(
        0.1 if name == "noise too small" else dist.LogNormal(-1, 0.5)
    )
    if name in CLASSES:
        noise = pb.likelihoods.Categorical()
    net = pb.networks.mlp(1, (5,), 3 if name in CLASSES else 1, seed=0)
    return pb.BNN(net, pb.priors.FanInNormal(), noise)


def rows(name, split):
    """Inputs and outcomes of a split: the rows of the fit, those that calibrate, and those that are tested."""
    import torch

    from pyrobnn.studies.sbc import simulate

    draw = torch.Generator().manual_seed(1000 + split)
    x = 4 * torch.rand(NUM_TRAIN + GROUPS * (NUM_CALIBRATION + NUM_TEST), 1, generator=draw) - 2
    if name == "fast classes":
        phases = 7 * x + torch.arange(3) * 2 * math.pi / 3
        return x, torch.distributions.Categorical(logits=3 * phases.cos()).probs.cumsum(1).lt(
            torch.rand(len(x), 1, generator=draw)
        ).sum(1)
    truth, y = simulate(model(name), x, 7 * split)
    if name == "noise too small":
        normal, square = (torch.randn(len(x), count, generator=draw) for count in (1, 2))
        y = truth.predict(x).mean + 0.3 * normal / square.square().mean(1, keepdim=True).sqrt()
    return x, y


def methods():
    """Method → a configuration, and draws of each chain where it has a choice."""
    import pyrobnn as pb

    search = {"num_steps": 100, "lr": 0.05, "compile": False}
    mode = pb.MAP(**search)
    return {
        "nuts": (pb.NUTS(num_chains=4, num_warmup=80, max_tree_depth=4, compile=False), 50),
        "sghmc": (pb.SGHMC(num_chains=2, num_warmup=50, thinning=2, init_steps=50, compile=False), 50),
        "laplace": (pb.Laplace(map=mode, compile=False), 100),
        "svi": (pb.SVI(num_steps=200, compile=False), 100),
        "map": (mode, None),
        "ensemble": (pb.DeepEnsemble(num_members=5, **search), None),
        "swag": (pb.SWAG(num_steps=80, init_steps=50, compile=False), 50),
        "mc-dropout": (pb.MCDropout(p=0.05, **search), 50),
    }


def fit(name, method, split):
    """The posterior of a split."""
    if method == "nuts":
        return chains(name, split // BATCH)[split % BATCH]
    configured, num_draws = methods()[method]
    options = {} if num_draws is None else {"num_draws": num_draws}
    x, y = (each[:NUM_TRAIN] for each in rows(name, split))
    return configured.fit(model(name), x, y, seed=split, **options)


@functools.cache
def chains(name, block):
    """Posteriors of a block of splits by NUTS."""
    from pyrobnn.studies.nuts_batch import fit_batch

    configured, num_draws = methods()["nuts"]
    parts = [rows(name, split) for split in range(BATCH * block, BATCH * (block + 1))]
    xs, ys = zip(*((x[:NUM_TRAIN], y[:NUM_TRAIN]) for x, y in parts))
    return fit_batch(configured, model(name), xs, ys, num_draws=num_draws, seed=block)


def own_sets(posterior, x, y):
    """Whether the model's own sets hold their outcomes, and their widths or sizes."""
    import torch

    p = posterior.predict(x)
    if not p.likelihood.classes:
        low, high = (each[:, 0] for each in p.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])))
        return (low <= y[:, 0]) & (y[:, 0] <= high), high - low
    probs, order = p.probs.sort(1, descending=True)
    # the fewest classes that have the level together
    size = ((probs.cumsum(1) < LEVEL).sum(1) + 1).clamp_max(probs.shape[1])
    return (order == y[:, None]).float().argmax(1) < size, size


def run_task(task):
    """Coverage and width of each kind of set, in standard deviations of the outcomes, or classes."""
    import torch

    from pyrobnn.studies.uci import fits

    torch.set_num_threads(1)
    name, split = task["data"], task["split"]
    return fits.measured(
        task,
        lambda: judged(fit(name, task["method"], split), *rows(name, split)),
        {"seed": split, "num_train": NUM_TRAIN},
    )


def judged(posterior, x, y):
    """The scores of one posterior."""
    import torch

    import pyrobnn as pb

    train, new = (x[:NUM_TRAIN], y[:NUM_TRAIN]), NUM_TRAIN + GROUPS * NUM_CALIBRATION
    test = x[new:], y[new:]
    classes = posterior.bnn.likelihood.classes
    make = pb.conformal_set if classes else pb.conformal_interval
    found = {"own": own_sets(posterior, *test)}
    facts = {"trusted": None}
    if posterior.meta["claim"] != "none":
        sets = make(posterior, test[0], train=train, alpha=1 - LEVEL)
        found["add-one-in"] = sets.contains(test[1]), sets.size if classes else sets.width
        facts = {"trusted": sets.trusted, "khat_max": float(sets.khat.max()), "notes": list(sets.notes)}
    held, wide = [], []
    for group in range(GROUPS):
        rest = slice(NUM_TRAIN + group * NUM_CALIBRATION, NUM_TRAIN + (group + 1) * NUM_CALIBRATION)
        part = slice(group * NUM_TEST, (group + 1) * NUM_TEST)
        sets = make(posterior, test[0][part], calibration=(x[rest], y[rest]), alpha=1 - LEVEL)
        held.append(sets.contains(test[1][part]))
        wide.append(sets.size if classes else sets.width)
    found["split"] = torch.cat(held), torch.cat(wide)
    unit = 1.0 if classes else float(y.std())
    scores = {}
    for way, (inside, width) in found.items():
        width = width.double() / unit
        scores[f"{way} coverage"] = float(inside.double().mean())
        scores[f"{way} width"] = float(width[width.isfinite()].median())
    return {"scores": scores, **facts}


def cells(records, way):
    """Coverage in % ± its standard error over splits, and the median width."""
    shares = [100 * r["scores"][f"{way} coverage"] for r in records if f"{way} coverage" in r["scores"]]
    if not shares:
        return ["", ""]
    error = f" ± {stdev(shares) / len(shares) ** 0.5:.1f}" if len(shares) > 1 else ""
    return [f"{fmean(shares):.1f}{error}", f"{fmean(r['scores'][f'{way} width'] for r in records):.2f}"]


def table(records):
    """Of each data set and method: what the three kinds of sets hold, and how often add-one-in is trusted."""
    lines = [
        "| data | method | splits | its own: holds | width | add-one-in: holds | width | trusted "
        "| split: holds | width |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {}
    for record in records:
        groups.setdefault((record["data"], record["method"]), {})[record["split"]] = record
    for data in DATA:
        for method in METHODS:
            found = list(groups.get((data, method), {}).values())
            if not found:
                continue
            own, added, split = (cells(found, way) for way in WAYS)
            trusted = [r["trusted"] for r in found if r["trusted"] is not None]
            share = f"{fmean(trusted):.0%}" if trusted else ""
            each = " | ".join([*own, *added, share, *split])
            lines.append(f"| {data} | {method} | {len(found)} | {each} |")
    return "\n".join(lines)


def main(argv=None):
    """Run what is pending, then print the table."""
    import sweeps

    options = sweeps.parser(__doc__, RESULTS, DATA, METHODS, num_splits=2 * BATCH).parse_args(argv)
    tasks = [
        {"data": data, "split": split, "method": method}
        for split in options.splits
        for data in options.data
        for method in options.methods
    ]
    failures = sweeps.sweep(options, run_task, key, tasks)
    from pyrobnn.studies.uci import read_records

    print(table(read_records(options.results)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
