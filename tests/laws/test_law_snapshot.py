"""Every method shows what it has reached while it runs: a posterior that predicts in the units of the data."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from models import normal_prior, toy_net
from test_contract import METHODS, X, Y, num_draws, one_of_each_kind

import pyrobnn as pb

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode", "ignore:NUTS stopped"
)

#: Pyro's own kernel calls nobody, and refuses callbacks
SILENT = {"NUTS-pyro"}
#: whose snapshots draw, or whose fit draws between two of them
RANDOM = {"SVI", "NUTS", "SGLD", "SWAG", "MCDropout"}
FAR = 1000.0 + 50.0 * Y


def model() -> pb.BNN:
    units = pb.data.Standardizer.fit(pb.data.Dataset(X, FAR, "far", "regression"))
    noise = pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0))
    return pb.BNN(toy_net(), normal_prior(), noise, standardizer=units)


@pytest.mark.parametrize("name", [*SILENT, *one_of_each_kind(sorted(METHODS.keys() - SILENT))])
def test_a_snapshot_predicts_and_changes_nothing(name):
    method = METHODS[name]
    options = {"seed": 3, **num_draws(name)}
    if name in SILENT:
        with pytest.raises(ValueError, match="'callbacks'.*leave them out"):
            method.fit(model(), X, FAR, **options, callbacks=[print])
        return
    seen = []

    def look(step, metrics):
        posterior = metrics["snapshot"]()
        assert isinstance(posterior, pb.Posterior)
        p = posterior.predict(X)
        assert p.mean.shape == FAR.shape and bool(
            torch.isfinite(p.mean).all() and (p.var > 0).all()
        )
        assert bool(((p.mean - 1000.0).abs() < 1000.0).all())  # not in standard units
        seen.append((step, posterior.num_chains))

    watched = method.fit(model(), X, FAR, **options, callbacks=[look])
    if name in RANDOM:
        alone = method.fit(model(), X, FAR, **options)
        torch.testing.assert_close(watched.draws, alone.draws, rtol=0, atol=0)
        assert watched.meta["warnings"] == alone.meta["warnings"]
    steps = [step for step, _ in seen]
    assert steps and steps == sorted(set(steps))


@pytest.mark.parametrize("name", ["Laplace", "SVI", "SWAG"])
def test_a_snapshot_of_a_loader_is_in_the_units_of_the_data_too(name):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, FAR), batch_size=20)
    seen = []
    METHODS[name].fit(
        model(),
        loader,
        callbacks=[lambda step, metrics: seen.append(metrics["snapshot"]().predict(X).mean)],
    )
    assert seen and all(bool(((mean - 1000.0).abs() < 500.0).all()) for mean in seen)
