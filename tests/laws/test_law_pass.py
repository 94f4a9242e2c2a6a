"""The law of a pass: draws pass only where a check looked at the model's own posterior, and could have failed."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from helpers import seeded
from models import normal_prior

import pyrobnn as pb
from pyrobnn import likelihoods as lk
from pyrobnn.core.groups import MOVED
from pyrobnn.diagnostics import Evidence, diagnose
from pyrobnn.diagnostics.judge import other_target
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.inference.vi.elbo_value import importance_stats
from pyrobnn.posterior import Posterior, invariance

X = torch.linspace(-2, 2, 60)[:, None]
NOISE = 0.2


class Features(torch.nn.Module):
    """Linear in its weights, and no stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([x, x.sin(), x**2], -1) * self.weight).sum(-1, keepdim=True)


def targets(classes: bool) -> torch.Tensor:
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(0))
    y = torch.sin(2 * X) + NOISE * noise
    return (y > 0).float() if classes else y


def bnn(net: torch.nn.Module, classes: bool = False, noise: float = NOISE) -> pb.BNN:
    return pb.BNN(
        net, normal_prior(), lk.Bernoulli() if classes else lk.HomoskedasticGaussian(noise)
    )


def nets() -> dict[str, torch.nn.Module]:
    with seeded(0):
        return {
            "tanh": pb.networks.mlp(1, (8,), seed=0),
            "relu": torch.nn.Sequential(
                torch.nn.Linear(1, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1)
            ),
            "deep": pb.networks.mlp(1, (5, 5), seed=0),
        }


def fitted(model: pb.BNN, y: torch.Tensor, **options) -> Posterior:
    laplace = pb.Laplace(num_steps=150, compile=False, **options)
    return laplace.fit(model, X, y, num_draws=400, seed=0)


def shown(posterior: Posterior, y: torch.Tensor) -> str:
    return diagnose(posterior.to_datatree(X, y)).shown_answer("draws")


def assert_displaced_draws_do_not_pass(tree: xr.DataTree) -> None:
    """Beside the chains, as the draws of another mean would lie."""
    moved = tree[MOVED].to_dataset()
    f = moved["approximate"]
    for pull in (2.0, -1.0):
        tree[MOVED] = moved.assign(approximate=f + pull * f.std("approximate_draw"))
        assert diagnose(tree).draws in ("warn", "fail")


WAYS = {
    "full": {},
    "kron": {"structure": "kron"},
    "diag": {"structure": "diag"},
    "tuned": {"tune": "marginal_likelihood"},
    "variational": {"curvature": "variational"},
    "hessian": {"curvature": "hessian"},
    "last layer": {"subset": "last_layer"},
    "last layer by draws": {"subset": "last_layer", "predictive": "draws"},
    "one site": {"subset": ("net.0.weight",)},
}
#: each idea once: all weights, blocks of them, the last layer alone; the others run with the slow tests
FAST = {("full", "tanh"), ("kron", "deep"), ("last layer by draws", "tanh")}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "classes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["numbers", "classes"]
)
@pytest.mark.parametrize(
    ("way", "net"),
    [
        pytest.param(
            way,
            net,
            marks=[] if (way, net) in FAST else pytest.mark.slow,
        )
        for way in WAYS
        for net in ("tanh", "relu", "deep")
    ],
)
def test_what_is_right_by_construction_of_another_model_is_no_pass(way, net, classes):
    """A linearised net's posterior, and that of some weights given the others, are not the net's.

    Such draws pass where chains of the net itself lie beside them, which could have failed them.
    """
    if net == "deep" and way == "one site":
        pytest.skip("its sites have other names")
    y = targets(classes)
    posterior = fitted(bnn(nets()[net], classes), y, **WAYS[way])
    tree = posterior.to_datatree(X, y)
    assert other_target(Evidence(tree)) is not None
    if diagnose(tree).draws == "pass":
        assert_displaced_draws_do_not_pass(tree)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "predictive", ["linearized", pytest.param("draws", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "structure",
    [
        "full",
        pytest.param("kron", marks=pytest.mark.slow),
        pytest.param("diag", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("noise", [NOISE / 4, 4 * NOISE], ids=["narrow", "wide"])
@pytest.mark.parametrize("net", ["tanh", pytest.param("relu", marks=pytest.mark.slow)])
def test_the_posterior_of_another_noise_never_passes(net, noise, structure, predictive):
    """Exact for the net linearised under a noise a quarter, or four times, of the one that the model has."""
    y = targets(False)
    model = bnn(nets()[net])
    planted = fitted(bnn(nets()[net], noise=noise), y, structure=structure, predictive=predictive)
    problem = prepare(model, X, y, points="held")
    stats = importance_stats(problem, problem.density, planted.approximation, planted.draws)
    assert shown(replace(planted, model=model, sample_stats=stats), y) != "pass"


@pytest.mark.parametrize("net", ["line", "features"])
@pytest.mark.parametrize(
    ("structure", "classes"), [("full", False), ("full", True), ("diag", False)]
)
def test_where_the_linearised_net_is_the_net_a_pass_stands_and_can_fail(net, structure, classes):
    y = targets(classes)
    with seeded(0):
        model = bnn({"line": torch.nn.Linear(1, 1), "features": Features()}[net], classes)
    posterior = fitted(model, y, structure=structure)
    tree = posterior.to_datatree(X, y)
    assert not Evidence(tree).is_linearized
    verdict = diagnose(tree)
    assert verdict.checked("draws")
    if structure == "full" and not classes:
        assert verdict.draws == "pass"
    assert_displaced_draws_do_not_pass(tree)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "method",
    [
        pb.Laplace(predictive="draws", num_steps=150, compile=False),
        pytest.param(
            pb.Laplace(predictive="draws", structure="diag", num_steps=150, compile=False),
            marks=pytest.mark.slow,
        ),
        pytest.param(pb.SVI(num_steps=600, compile=False), marks=pytest.mark.slow),
        pytest.param(pb.SWAG(compile=False), marks=pytest.mark.slow),
    ],
    ids=["laplace", "diagonal laplace", "svi", "swag"],
)
def test_identities_in_single_weights_vouch_for_no_net(method, monkeypatch):
    """Where moves are too dear nothing that could have failed has looked at the function of the net."""
    monkeypatch.setattr(invariance, "_MAX_WORK", 1.0)
    y = targets(False)
    verdict = diagnose(method.fit(bnn(nets()["tanh"]), X, y, seed=0).to_datatree(X, y))
    assert {"virial", "score"} <= {check.name for check in verdict.checks}
    assert verdict.draws != "pass"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_program_of_which_some_sites_are_held_is_judged_so_too():
    def program(x, y=None):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(a + b * x, 0.5), obs=y)

    x = X[:, 0]
    for subset, right in (("all", True), (("a",), False)):
        laplace = pb.Laplace(curvature="hessian", subset=subset, num_steps=150, compile=False)
        verdict = diagnose(
            laplace.fit(program, x, 0.5 * x, num_draws=400, seed=0).to_datatree(x, 0.5 * x)
        )
        assert (verdict.draws == "pass") == right


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_was_compared_is_said_with_what_to_do_and_a_reference_answers(monkeypatch):
    monkeypatch.setattr(invariance, "_FEWEST_LEAPFROGS", float("inf"))  # no chain of the net
    y = targets(False)
    posterior = fitted(bnn(nets()["tanh"]), y)
    tree = posterior.to_datatree(X, y)
    verdict = diagnose(tree)
    assert verdict.lines.startswith("draws: not checked") and "linearised net" in verdict.summary
    assert "NUTS" in verdict.action and not verdict.checked("draws")
    # chains that stand in for those of NUTS: the same function, so that the comparison passes
    four = posterior.draws | {
        name: value.reshape(4, -1, *value.shape[2:]) for name, value in posterior.draws.items()
    }
    chains = replace(
        posterior,
        draws=four,
        sample_stats={},
        approximation=None,
        meta=posterior.meta | {"iid": False},
    )
    reference = chains.to_datatree(X, y)
    assert diagnose(tree, reference=reference).draws == "pass"


def test_a_net_whose_last_layer_alone_has_a_prior_is_judged_as_it_was_declared():
    """`posthoc` declares nothing else to be uncertain: what it says is of this model."""
    y = targets(False)
    with seeded(0):
        net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    posterior = pb.posthoc(net, X, y, likelihood=lk.HomoskedasticGaussian(0.7))
    assert Evidence(posterior.to_datatree(X, y)).held_sites == []
