"""Where only the end of a net varies, its trunk is computed once: equal to the whole net, to rounding."""

from __future__ import annotations

import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyrobnn as pb
from pyrobnn.posterior import head

pytestmark = pytest.mark.filterwarnings(
    "ignore:the centre is not a mode|the Hessian is not positive"
)

X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = (X.mean((1, 2, 3)) > 0).long()
Y = X.mean((2, 3)) + 0.1


class Tailed(nn.Module):
    """A convolution and a last layer in a forward of its own; with ``skip``, the input comes back at the end."""

    def __init__(self, out: int, skip: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.last = nn.Linear(32, out)
        self.skip = skip

    def forward(self, x):
        f = self.last(torch.relu(self.conv(x)).flatten(1))
        return f + x.mean((1, 2, 3))[:, None] if self.skip else f


class Tied(nn.Module):
    """The last layer's weight also scales what it is given."""

    def __init__(self, out: int):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh())
        self.end = nn.Sequential(nn.Linear(4, out))

    def forward(self, x):
        return self.end(self.trunk(x) * self.end[0].weight.mean())


def stacked(out: int) -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, out))
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), inner)


LAST_TWO = ("net.4.0.weight", "net.4.0.bias", "net.4.2.bias")
CASES = {
    "stacked": (stacked, "last_layer", "4.2"),
    "names": (stacked, LAST_TWO, "4.0"),
    "all": (stacked, "all", ""),
    "own forward": (Tailed, "last_layer", "last"),
    "skip": (lambda out: Tailed(out, skip=True), "last_layer", ""),
    "tied": (Tied, "last_layer", ""),
}


def fitted(net, y, likelihood, prior=None, **options) -> pb.Posterior:
    model = pb.BNN(net, prior or pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), likelihood)
    return pb.Laplace(compile=False, **options).fit(model, X, y, init=net, num_draws=5)


def build(kind: str, out: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return CASES[kind][0](out).double()


def compare(whole: pb.Posterior, split: pb.Posterior) -> None:
    assert whole.log_evidence == pytest.approx(split.log_evidence, rel=1e-9)
    torch.testing.assert_close(split.draws, whole.draws)
    torch.testing.assert_close(dict(split.sample_stats), dict(whole.sample_stats))
    ours = split.predict(X[:7])
    theirs = whole.predict(X[:7])
    torch.testing.assert_close(ours.f, theirs.f)
    if split.moments is not None:
        torch.testing.assert_close(split.moments(X[:7]), whole.moments(X[:7]))


OPTIONS = [
    {},
    {"predictive": "draws"},
    {"structure": "kron", "tune": "marginal_likelihood"},
    {"curvature": "hessian"},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(
            kind, options, marks=[] if kind == "stacked" or not options else [pytest.mark.slow]
        )
        for kind in CASES
        for options in OPTIONS
    ],
    ids=str,
)
def test_the_head_is_the_whole_net(kind, options, monkeypatch, tmp_path):
    _, subset, path = CASES[kind]
    if options.get("structure") == "kron" and kind == "tied":
        pytest.skip("a layer that is used twice has no factors")
    for likelihood, y in (
        (pb.likelihoods.Categorical(), LABELS),
        (pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)), Y),
    ):
        net = build(kind, 2 if likelihood.targets.classes else 1)
        with monkeypatch.context() as patched:
            patched.setattr(head, "_paths", lambda *args: [])
            whole = fitted(net, y, likelihood, subset=subset, **options)
        split = fitted(net, y, likelihood, subset=subset, **options)
        assert whole.meta["head"] == "" and split.meta["head"] == path
        compare(whole, split)
        loaded = pb.Posterior.load(split.save(tmp_path / "p.nc"), split.model)
        torch.testing.assert_close(loaded.predict(X[:7]).f, whole.predict(X[:7]).f)


def test_hidden_weights_before_the_first_site_are_a_trunk(monkeypatch):
    net = build("stacked", 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, hide_modules=[net[0]])
    with monkeypatch.context() as patched:
        patched.setattr(head, "_paths", lambda *args: [])
        whole = fitted(net, Y, pb.likelihoods.HomoskedasticGaussian("learned"), prior)
    split = fitted(net, Y, pb.likelihoods.HomoskedasticGaussian("learned"), prior)
    assert split.meta["head"] == "4.0"
    compare(whole, split)


def test_the_trunk_runs_as_often_as_it_must(monkeypatch):
    net = build("stacked", 2)
    seen = []
    posterior = fitted(net, LABELS, pb.likelihoods.Categorical(), subset="last_layer")
    again = pickle.loads(pickle.dumps(posterior))
    again.bnn.eval_net[0].register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    torch.testing.assert_close(again.predict(X).probs, posterior.predict(X).probs)
    seen.clear()
    monkeypatch.setattr("pyrobnn.posterior.posterior.CHUNK_SCALARS", 100)
    again.predict(X)
    assert sum(seen) <= 2 * len(X) + 2, (
        seen
    )  # for the draws and for the moments; one row to look at the widths


FITS = {
    "nuts": (
        pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False),
        {"num_draws": 4},
    ),
    "sghmc": (
        pb.SGHMC(num_chains=2, num_warmup=20, batch_size=8, init_steps=5, compile=False),
        {"num_draws": 4},
    ),
    "svi": (pb.SVI(num_steps=20, compile=False), {"num_draws": 4}),
    "map": (pb.MAP(num_steps=20, compile=False), {}),
    "swag": (pb.SWAG(num_steps=40, lr=0.001, collect_every=4, compile=False), {"num_draws": 4}),
    "smc": (pb.SMC(num_particles=8, compile=False), {}),
}


@pytest.mark.usefixtures("few_moves")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("nuts", "svi", "swag") else pytest.mark.slow)
        for name in FITS
    ],
)
def test_what_a_prior_hides_before_its_first_site_is_computed_once_by_every_method(
    name, monkeypatch, tmp_path
):
    method, options = FITS[name]
    net = build("own forward", 1)
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=[nn.Conv2d])
    model = pb.BNN(net, prior, pb.likelihoods.HomoskedasticGaussian(0.5))
    shots: list[pb.Posterior] = []
    options = options | {
        "seed": 1,
        "callbacks": [lambda step, metrics: shots.append(metrics["snapshot"]())],
    }
    with monkeypatch.context() as patched:
        patched.setattr(head, "_paths", lambda *args: [])
        whole = method.fit(model, X, Y, **options)
        expected = whole.predict(X[:7]).f
    split = method.fit(model, X, Y, **options)
    torch.testing.assert_close(split.draws, whole.draws)
    torch.testing.assert_close(split.predict(X[:7]).f, expected)
    torch.testing.assert_close(
        split.to_datatree(X, Y, num_prior_draws=0)["log_likelihood"]
        .to_dataset()
        .sum()
        .to_array()
        .values,
        whole.to_datatree(X, Y, num_prior_draws=0)["log_likelihood"]
        .to_dataset()
        .sum()
        .to_array()
        .values,
    )
    loaded = pb.Posterior.load(split.save(tmp_path / "p.nc"), model)
    torch.testing.assert_close(loaded.predict(X[:7]).f, expected)
    assert all(shot.predict(X[:7]).f.shape[2] == 7 for shot in shots[-2:])
    assert (split.meta.get("head") == "last") == (method.points == "held")
    seen: list[int] = []
    with split.bnn.eval_net.conv.register_forward_hook(
        lambda module, inputs, out: seen.append(len(out))
    ):
        split.predict(X)
    assert sum(seen) <= len(X) + 8  # and a few to look at the net


class Counted(nn.Module):
    """A layer without parameters that counts its calls."""

    calls = 0

    def forward(self, x):
        Counted.calls += len(x) == len(X)  # few rows are looked at before a fit
        return x.flatten(1).sin()


@pytest.mark.parametrize(
    "method",
    [
        pb.MAP(num_steps=30, polish_steps=5, compile=False),
        pb.DeepEnsemble(num_members=2, num_steps=30, compile=False),
        pb.SGHMC(num_chains=2, num_warmup=10, thinning=1, init_steps=10, compile=False),
    ],
    ids=lambda method: type(method).__name__,
)
def test_layers_before_the_first_parameter_are_computed_once(method, monkeypatch, tmp_path):
    prior = pb.priors.IIDPrior(dist.Normal(0.0, 1.0))
    noise = pb.likelihoods.HomoskedasticGaussian(0.1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Counted(), nn.Linear(36, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = pb.BNN(net, prior, noise)
    options = {"num_draws": method.default_draws if method.kind != "chains" else 4}
    Counted.calls = 0
    once = method.fit(model, X, Y, **options)
    assert Counted.calls < 20
    with monkeypatch.context() as patch:
        patch.setattr("pyrobnn.inference.fitting.problem.free_bytes", lambda _: 0)
        often = method.fit(model, X, Y, **options)
    assert "head" in once.meta and "head" not in often.meta
    torch.testing.assert_close(once.draws, often.draws)
    loaded = pb.Posterior.load(once.save(tmp_path / "once.nc"), model)
    for posterior in (once, loaded):
        torch.testing.assert_close(posterior.predict(X).f, often.predict(X).f)
