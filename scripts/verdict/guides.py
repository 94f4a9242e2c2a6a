"""Is a normal guide too wide because its search ends early, or because the bound is higher there?

    python scripts/verdict/guides.py --folder FOLDER    # NUTS runs are kept in the folder, as by real.py

Three fits of mean-field to each problem: at the defaults; begun at a draw of NUTS with narrow scales; and with the
noise known to be the mean that NUTS has of it. Without the cost of learning the noise, the bound of the last is about
what a guide with the noise of NUTS can have at most. One JSON line a fit: its ELBO, its noise, and how far its function
is from that of NUTS. What the file has is not run again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import pyrobnn as pb
from pyrobnn.core.chains import rhat
from pyrobnn.studies.study import make_study

sys.path.insert(0, str(Path(__file__).parents[1]))

from records import append_record, read_records  # noqa: E402
from verdict.claim_tables import guides_table  # noqa: E402
from verdict.real import CONVERGED, distance  # noqa: E402
from verdict.real_problems import PROBLEMS, Problem  # noqa: E402

RESULTS = Path(__file__).with_name("guides.jsonl")
SCALE = "likelihood.scale"
#: of the start at a draw of NUTS: a tenth of what the guide has by default
NARROW = 0.005


class GapProblem(Problem):
    """The training rows and the net of ``pyrobnn compare`` where nothing else is asked for, in standard units."""

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        train = make_study(pb.data.gap()).train
        units = pb.data.Standardizer.fit(train)
        return units.transform_x(train.x), (train.y - units.y_mean) / units.y_scale


COMPARE = GapProblem(lambda x: x[:, 0], 216, 1, 0.4, 50)
STUDIED = {"compare": COMPARE} | {
    name: PROBLEMS[name] for name in ("sine_20", "product_30", "gap_50", "bump_80")
}


def exact_fit(name: str, problem: Problem, folder: Path) -> dict[str, torch.Tensor] | None:
    """Draws of NUTS by site, and its function as ``"f"`` (chain, draw, probe); None where it has not converged."""
    path = folder / f"{name}_guides.pt"
    if not path.exists():
        x, y = problem.data()
        method = pb.NUTS(num_chains=4, until="converged", max_seconds=300)
        posterior = method.fit(problem.model(), x, y, seed=1)
        folder.mkdir(parents=True, exist_ok=True)
        f = posterior.function(problem.probes())[..., 0]
        torch.save(dict(posterior.draws) | {"f": f}, path)
    draws: dict[str, torch.Tensor] = torch.load(path)
    largest = rhat(draws["f"].permute(2, 0, 1).double().numpy()).max()
    return draws if largest <= CONVERGED else None


def fits(problem: Problem, draws: dict[str, torch.Tensor], name: str) -> pb.Posterior:
    """The fit of mean-field that ``name`` says."""
    x, y = problem.data()
    model = problem.model()
    if name == "default":
        return pb.SVI().fit(model, x, y, seed=0)
    if name == "from_nuts":
        net = problem.model().net
        values = {site[4:]: draws[site][0, -1] for site in draws if site.startswith("net.")}
        net.load_state_dict(values)
        return pb.SVI(init_scale=NARROW).fit(model, x, y, seed=0, init=net)
    known = pb.likelihoods.HomoskedasticGaussian(float(draws[SCALE].mean()))
    return pb.SVI().fit(pb.BNN(model.net, pb.priors.FanInNormal(1.0), known), x, y, seed=0)


def record_of(problem_name: str, fit_name: str, draws: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The record of one fit."""
    problem = STUDIED[problem_name]
    begun = time.process_time()
    posterior = fits(problem, draws, fit_name)
    seconds = time.process_time() - begun
    f = posterior.function(problem.probes())[..., 0].double().flatten(0, 1)
    true_noise = float(draws[SCALE].mean())
    noise = float(posterior.draws[SCALE].mean()) if SCALE in posterior.draws else true_noise
    return {
        "problem": problem_name,
        "fit": fit_name,
        "elbo": round(float(posterior.log_evidence), 2),
        "elbo_error": round(float(posterior.meta["elbo_error"]), 2),
        "noise": round(noise, 3),
        "true_noise": round(true_noise, 3),
        "fit_seconds": round(seconds, 1),
    } | distance(f, draws["f"].double().flatten(0, 1))


def main() -> None:
    """Run what the records lack, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "pyrobnn_truth")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    done = {(row["problem"], row["fit"]) for row in read_records(options.results)}
    for name, problem in STUDIED.items():
        draws = exact_fit(name, problem, options.folder)
        for fit_name in ("default", "from_nuts", "known_noise"):
            if draws is not None and (name, fit_name) not in done:
                append_record(options.results, record_of(name, fit_name, draws))
    print(guides_table(read_records(options.results)))


if __name__ == "__main__":
    main()
