"""Reference posteriors: complete, of the models and data that they name, and a judge of what is put beside them."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.signal import lfilter

import pyrobnn as pb
from pyrobnn.core.chains import ess
from pyrobnn.model import Density, check_data
from pyrobnn.posterior.datatree import log_densities, probes
from pyrobnn.studies.reference import problems

NAMES = pb.references.names()
SMALLEST = "gap_1"


def far(tree, reference):
    return pb.diagnostics.fidelity(tree, reference.to_datatree()).per_point


def quantities(posterior, data, probe_x):
    """(chain, draw, quantity): the function at the probes, inferred noise, log-likelihood and log prior."""
    prediction = posterior.predict(probe_x)
    likelihood = posterior.bnn.likelihood
    columns = [prediction.f.flatten(2)]
    varies = likelihood.targets.heads > 1
    if prediction.task == "gaussian" and (likelihood.own.priors or varies):
        columns.append(prediction.scale[..., 0] if varies else prediction.scale[:, :, :1, 0])
    log_prior, log_likelihood = log_densities(posterior, data.x, data.y)
    columns += [log_likelihood.double().sum(-1)[..., None], log_prior[..., None]]
    return np.concatenate([each.cpu().double().numpy() for each in columns], 2)


def mean_and_error(draws):
    """Of every quantity (chain, draw, quantity)."""
    flat = draws.reshape(-1, draws.shape[2])
    return flat.mean(0), flat.std(0, ddof=1) / np.sqrt(ess(np.moveaxis(draws, 2, 0), "mean"))


def z_of_means(posterior, reference):
    """Differences of the means of all quantities in the standard error of both."""
    mean, error = mean_and_error(quantities(posterior, reference.data, reference.probe_x))
    return (mean - reference.summary["mean"].values) / np.hypot(
        error, reference.summary["mean_error"].values
    )


def log_density_of(model, data):
    """Log joint density at one fixed place in unconstrained space, nats: that of the same model and data alone."""
    density = Density(model, check_data(model, data.x, data.y, model.device))
    place = 0.5 * torch.cos(torch.arange(density.dim, dtype=density.dtype))
    return float(density.log_joint(place))


@pytest.fixture(scope="module")
def smallest():
    return pb.references.load(SMALLEST)


def test_the_stored_files_are_those_of_the_problems_and_small():
    assert SMALLEST in NAMES and set(NAMES) == set(problems())  # three were defined and had no file
    stored = list(files("pyrobnn.studies").joinpath("stored").iterdir())
    assert {entry.name for entry in stored} == {f"{name}.npz" for name in NAMES}
    assert sum(len(entry.read_bytes()) for entry in stored) < 1e6


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_is_complete_and_of_its_model_and_data(name):
    found = pb.references.load(name)
    x, kinds = probes(found.data.x)
    assert torch.allclose(x, found.probe_x) and tuple(kinds) == found.probe_kinds
    count = found.summary.sizes["quantity"]
    assert found.draws.shape == (4, 100, count) and found.summary["quantiles"].shape == (100, count)
    assert np.isfinite(found.draws).all() and found.record["torch"]
    assert float(found.summary["rhat"].max()) <= 1.01
    function = found.summary["kind"].values != "density"
    assert float(found.summary["ess_bulk"].values[function].min()) >= 1e4
    assert 0.0 < found.log_evidence_error < 1.0
    # both samplers: no difference that their errors do not explain
    z = found.record["smc_minus_nuts"]
    assert max(z["mean_z_rms"], z["sd_z_rms"]) < 2.0 and max(z["mean_z_max"], z["sd_z_max"]) < 5.0
    # the numbers are of this model and these data
    assert log_density_of(found.model(), found.data) == pytest.approx(
        found.record["log_density"], rel=1e-5
    )
    mean, error = mean_and_error(found.draws)
    assert (
        float(
            np.abs(
                (mean - found.summary["mean"]) / np.hypot(error, found.summary["mean_error"])
            ).max()
        )
        < 5.0
    )


def test_what_is_wrong_is_told_by_how_much(smallest):
    own = smallest.to_datatree()
    f = own["function"]["f"]
    wide = own.copy(deep=True)
    moved = own.copy(deep=True)
    wide["function"]["f"] = f.mean(("chain", "draw")) + 2.0 * (f - f.mean(("chain", "draw")))
    assert far(wide, smallest)["sd_ratio"].values == pytest.approx(2.0, rel=1e-6)
    moved["function"]["f"] = f + f.std(("chain", "draw"))
    assert far(moved, smallest)["wasserstein"].values == pytest.approx(1.0, rel=1e-6)
    assert not far(own.copy(), smallest)["wasserstein"].values.any()


def test_a_verdict_is_held_against_a_reference(smallest):
    own = smallest.to_datatree()
    narrow = own.copy(deep=True)
    f = own["function"]["f"]
    narrow["function"]["f"] = f.mean(("chain", "draw")) + 0.3 * (f - f.mean(("chain", "draw")))
    checks = {check.name: check.status for check in pb.diagnose(narrow, reference=own).checks}
    assert checks["reference"] == "fail"
    same = {check.name: check.status for check in pb.diagnose(own.copy(), reference=own).checks}
    assert same["reference"] == "pass"


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'gap_2': choose one of gap_1"):
        pb.references.load("gap_2")


@pytest.mark.filterwarnings("ignore::UserWarning")  # short fits say that they are short
def test_a_point_estimate_has_a_distance_too(smallest):
    data = smallest.data
    found = (
        pb.MAP(num_steps=20, compile=False)
        .fit(smallest.model(), data.x, data.y)
        .to_datatree(data.x, data.y)
    )
    assert np.all(far(found, smallest)["sd_ratio"].values == 0.0)
    assert float(far(found, smallest)["wasserstein"].min()) > 0.3


def test_a_norm_that_wanders_costs_the_function_no_draws():
    rng = np.random.default_rng(0)
    f = rng.normal(size=(4, 500, 3, 1))
    step = rng.normal(size=(4, 500, 1))
    norm = lfilter(
        [1.0], [1.0, -0.97], step, axis=1
    )  # as of layers that share a scale between them
    dims = ("chain", "draw", "probe", "output")
    function = {"f": (dims, f), "layer_norm": ((*dims[:2], "layer"), norm)}
    groups = {
        "posterior": xr.Dataset({"w": (dims[:2], f[:, :, 0, 0])}),
        "function": xr.Dataset(function),
    }
    found = {check.name: check for check in pb.diagnose(xr.DataTree.from_dict(groups)).checks}
    assert (
        found["ess_function"].status == "pass"
        and "norm" not in found["ess_function"].numbers["where"]
    )
    assert found["rhat_function"].status == "fail" and "norm" in found["rhat_function"].evidence


@pytest.mark.slow
def test_nuts_finds_the_smallest_reference_again(smallest):
    data = smallest.data
    nuts = pb.NUTS(num_warmup=500).fit(smallest.model(), data.x, data.y, num_draws=1000, seed=11)
    assert np.abs(z_of_means(nuts, smallest)).max() < 4.0
