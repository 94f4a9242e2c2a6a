"""How many new outcomes 90 % sets hold, and how wide they are: conformal ones, and the model's own.

    python scripts/benchmark_conformal.py                   # goes on where the results file ends
    python scripts/benchmark_conformal.py --data classes --splits 0-9 --methods nuts laplace
    python scripts/benchmark_conformal.py --table-only

A split is 99 rows to fit, and new ones in ten groups: 49 rows that calibrate, 25 that are tested. Of one input, with
the truth drawn from the model's own prior ("well specified", "classes"), and with a model that has something wrong:
noise of Student's t with 2 degrees of freedom under a Gaussian one of a third of its scale ("noise too small"), and
classes that alternate faster than the net can ("fast classes"). A hidden layer of 5 tanh units.

``--data yacht`` and the other UCI sets: their standard splits. A quarter of the train part calibrates, what remains is
fitted, and the test part is tested, once. "yacht, noise too small" holds the noise at a third of what MAP learns on
the first split.

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
UCI = ("yacht", "boston", "energy", "concrete", "wine")
TOO_SMALL = "noise too small"
#: what a share of 90 % may be off by, in points
MOST_OFF = 1.5
METHODS = ("nuts", "sghmc", "laplace", "svi", "map", "ensemble", "swag", "mc-dropout")
LEVEL = 0.9
#: ⌊α (n + 1)⌋ is a whole number for both: no set has to hold more than it says
NUM_TRAIN, NUM_CALIBRATION, NUM_TEST, GROUPS = 99, 49, 25, 10
#: splits whose chains run as one
BATCH, UCI_BATCH = 10, 4
WAYS = ("own", "add-one-in", "split")


def key(record):
    """What makes two records the same work."""
    return record["data"], record["split"], record["method"]


def model(name):
    """The net, prior and noise of a data set whose truth is simulated."""
    import pyro.distributions as dist

    import pyrobnn as pb

    noise = pb.likelihoods.HomoskedasticGaussian(0.1 if name == TOO_SMALL else dist.LogNormal(-1, 0.5))
    if name in CLASSES:
        noise = pb.likelihoods.Categorical()
    net = pb.networks.mlp(1, (5,), 3 if name in CLASSES else 1, seed=0)
    return pb.BNN(net, pb.priors.FanInNormal(), noise)


def rows(name, split):
    """Inputs and outcomes of a simulated split: the rows of the fit, then ten groups."""
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
    if name == TOO_SMALL:
        normal, square = (torch.randn(len(x), count, generator=draw) for count in (1, 2))
        y = truth.predict(x).mean + 0.3 * normal / square.square().mean(1, keepdim=True).sqrt()
    return x, y


def parts(name, split):
    """The rows of the fit, those tested, and of each group of these its own rows that calibrate."""
    set_name = name.partition(",")[0]
    if set_name not in UCI:
        x, y = rows(name, split)
        cut = NUM_TRAIN + GROUPS * NUM_CALIBRATION
        held = [(each[NUM_TRAIN:cut].split(NUM_CALIBRATION)) for each in (x, y)]
        return (x[:NUM_TRAIN], y[:NUM_TRAIN]), (x[cut:], y[cut:]), list(zip(*held))
    from pyrobnn.data import Standardizer, train_test_split, uci
    from pyrobnn.studies.uci.fits import DATASETS

    train, test = uci(DATASETS[set_name], split)
    # the most rows of a quarter of which a tenth, and one, is a whole number
    count = train.num_data // 4 // 10 * 10 - 1
    train, calibration = train_test_split(train, test_fraction=count / train.num_data, seed=split)
    units = Standardizer.fit(train)
    train, test, calibration = (units.transform(each) for each in (train, test, calibration))
    return (train.x, train.y), (test.x, test.y), [(calibration.x, calibration.y)]


@functools.cache
def uci_model(name):
    """The net, prior and noise of a UCI set, in the units of the rows of a fit."""
    import pyro.distributions as dist

    import pyrobnn as pb

    set_name, _, wrong = name.partition(", ")
    x, y = parts(set_name, 0)[0]
    noise = dist.LogNormal(-1, 1)
    if wrong:
        learned = methods()["map"][0].fit(uci_model(set_name), x, y, seed=0)
        noise = float(learned.draws["likelihood.scale"].mean()) / 3
    net = pb.networks.mlp(x.shape[1], (5,), 1, seed=0)
    return pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(noise))


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


def fit(name, method, split, train):
    """The posterior of a split."""
    batch = BATCH if name in DATA else UCI_BATCH
    if method == "nuts":
        return chains(name, split // batch, batch)[split % batch]
    configured, num_draws = methods()[method]
    options = {} if num_draws is None else {"num_draws": num_draws}
    program = model(name) if name in DATA else uci_model(name)
    return configured.fit(program, *train, seed=split, **options)


@functools.cache
def chains(name, block, batch):
    """Posteriors of a block of splits by NUTS."""
    from pyrobnn.studies.nuts_batch import fit_batch

    configured, num_draws = methods()["nuts"]
    xs, ys = zip(*(parts(name, split)[0] for split in range(batch * block, batch * (block + 1))))
    program = model(name) if name in DATA else uci_model(name)
    return fit_batch(configured, program, xs, ys, num_draws=num_draws, seed=block)


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
    train, test, calibration = parts(name, split)
    return fits.measured(
        task,
        lambda: judged(fit(name, task["method"], split, train), train, test, calibration),
        {"seed": split, "num_train": len(train[0]), "num_test": len(test[0])},
    )


def judged(posterior, train, test, calibration):
    """The scores of one posterior."""
    import torch

    import pyrobnn as pb

    classes = posterior.bnn.likelihood.classes
    make = pb.conformal_set if classes else pb.conformal_interval
    found = {"own": own_sets(posterior, *test)}
    facts = {"trusted": None}
    if posterior.meta["claim"] != "none":
        sets = make(posterior, test[0], train=train, alpha=1 - LEVEL)
        found["add-one-in"] = sets.contains(test[1]), sets.size if classes else sets.width
        khat = float(sets.khat.max())
        facts = {
            "trusted": sets.trusted,
            "khat_max": khat if math.isfinite(khat) else None,
            "notes": list(sets.notes),
        }
    held, wide = [], []
    size = len(test[0]) // len(calibration)
    for group, x, y in zip(calibration, *(each.split(size) for each in test), strict=True):
        sets = make(posterior, x, calibration=group, alpha=1 - LEVEL)
        held.append(sets.contains(y))
        wide.append(sets.size if classes else sets.width)
    found["split"] = torch.cat(held), torch.cat(wide)
    unit = 1.0 if classes else float(torch.cat([train[1], test[1]]).std())
    scores = {}
    for way, (inside, width) in found.items():
        width = width.double() / unit
        scores[f"{way} coverage"] = float(inside.double().mean())
        middle = float(width.median())
        # JSON has no infinity: where nothing bounds half of the sets there is no width
        scores |= {f"{way} width": middle} if math.isfinite(middle) else {}
    return {"scores": scores, **facts}


def cells(records, way):
    """Coverage in % ± its standard error over splits, and the median width."""
    shares = [100 * r["scores"][f"{way} coverage"] for r in records if f"{way} coverage" in r["scores"]]
    if not shares:
        return ["", ""]
    error = f" ± {stdev(shares) / len(shares) ** 0.5:.1f}" if len(shares) > 1 else ""
    return [
        f"{fmean(shares):.1f}{error}",
        f"{fmean(r['scores'].get(f'{way} width', math.inf) for r in records):.2f}",
    ]


def line(found):
    """What the three kinds of sets of some records hold, and how often add-one-in is trusted."""
    own, added, split = (cells(found, way) for way in WAYS)
    trusted = [r["trusted"] for r in found if r["trusted"] is not None]
    share = f"{fmean(trusted):.0%}" if trusted else ""
    return " | ".join([*own, *added, share, *split])


def table(records):
    """Of each simulated data set and method: what the three kinds of sets hold."""
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
            if found:
                lines.append(f"| {data} | {method} | {len(found)} | {line(found)} |")
    return "\n".join(lines)


def verdict(records):
    """Whether the split sets of some records hold 90 ± 1.5 % of the rows tested, or these are too few to tell."""
    # a split of a set is one observation: its rows share a fit and the rows that calibrate
    shares = [100 * r["scores"]["split coverage"] for r in records]
    off = abs(fmean(shares) - 100 * LEVEL)
    error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else math.inf
    if off <= MOST_OFF:
        return "within"
    return "off" if off > MOST_OFF + 2 * error else "within two errors"


def uci_table(records):
    """Over the standard splits: a line for each noise and method, the sets beside each other."""
    lines = [
        "| noise | method | fits | its own: holds | width | add-one-in: holds | width | trusted "
        f"| split: holds | width | {LEVEL:.0%} ± {MOST_OFF} | " + " | ".join(UCI) + " |",
        "|" + "---|" * (11 + len(UCI)),
    ]
    groups = {}
    for record in records:
        name, _, wrong = record["data"].partition(", ")
        if name in UCI:
            groups.setdefault((wrong, record["method"]), {})[name, record["split"]] = record
    for noise in ("", TOO_SMALL):
        for method in METHODS:
            found = groups.get((noise, method), {})
            if not found:
                continue
            each = []
            for name in UCI:
                of_set = [
                    record["scores"]["split coverage"] for (data, _), record in found.items() if data == name
                ]
                each.append(f"{100 * fmean(of_set):.0f} ({len(of_set)})" if of_set else "not run")
            records = list(found.values())
            cell = " | ".join([line(records), verdict(records), *each])
            lines.append(f"| {noise or 'learned'} | {method} | {len(records)} | {cell} |")
    return "\n".join(lines)


def main(argv=None):
    """Run what is pending, then print the table."""
    import sweeps

    data = [*DATA, *UCI, *(f"{name}, {TOO_SMALL}" for name in UCI)]
    options = sweeps.parser(__doc__, RESULTS, data, METHODS, num_splits=2 * BATCH).parse_args(argv)
    tasks = [
        {"data": data, "split": split, "method": method}
        for split in options.splits
        for data in options.data
        for method in options.methods
    ]
    failures = sweeps.sweep(options, run_task, key, tasks)
    from pyrobnn.studies.uci import read_records

    records = read_records(options.results, ("data", "split", "method", "scores"))
    print(table(records), uci_table(records), sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
