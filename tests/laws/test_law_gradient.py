"""The law of gradients: where autograd's gradient is not the derivative, every fit says so, and no verdict passes."""

from __future__ import annotations

import dataclasses
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from helpers import seeded
from models import toy_net
from test_contract import METHODS, REPRESENTATIVES, num_draws, one_of_each_kind
from test_law_program import PROGRAMS, X, Y

import pyrobnn as pb
from pyrobnn import mcmc
from pyrobnn.inference.fitting import derivative
from pyrobnn.inference.fitting.problem import prepare
from pyrobnn.model import Density

# fits this short are told other things, too
pytestmark = pytest.mark.filterwarnings("ignore:(?!.*(is not the derivative|not its derivative))")

NOT_FOR_PROGRAMS = ("Laplace", "SWA", "MCDropout")
OF_PROGRAMS = {
    name: method for name, method in METHODS.items() if not name.startswith(NOT_FOR_PROGRAMS)
} | {"Laplace-hessian": pb.Laplace(curvature="hessian", num_steps=50, compile=False)}
INPUTS = torch.linspace(-1.0, 1.0, 30)
OUTCOMES = 1.0 + 2.0 * INPUTS + 0.5 * torch.sin(9.0 * INPUTS)
TABLE = torch.stack([INPUTS, INPUTS**2], 1)  # (30, 2), float32, which a program closes over


def line(mean):
    """A program whose mean is a function of a, b and the inputs."""

    def program(x, y=None):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(mean(a, b, x), 0.5), obs=y)

    return program


class Halved(torch.autograd.Function):
    """The square of a value, with half of its slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return value**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0]


def without_grad(a, b, x):
    with torch.no_grad():
        slope = b * x
    return a + slope


def in_inference_mode(a, b, x):
    with torch.inference_mode():
        slope = b * x
    return a + slope


CUTS = {
    "detach": (lambda a, b, x: a + (b * x).detach(), ["b"]),
    "data": (lambda a, b, x: a + (b * x).data, ["b"]),
    "no_grad": (without_grad, ["b"]),
    "inference_mode": (in_inference_mode, ["b"]),
    "a list": (lambda a, b, x: TABLE @ torch.tensor([a, b]), ["a", "b"]),
    "item": (lambda a, b, x: a + b.item() * x, ["b"]),
    "float": (lambda a, b, x: a + float(b) * x, ["b"]),
    "in part": (lambda a, b, x: a + (0.9 * b + 0.1 * b.detach()) * x, ["b"]),
    "in a product with float32": (lambda a, b, x: a + TABLE @ torch.stack([b, b.detach()]), ["b"]),
    "a wrong backward": (lambda a, b, x: a + Halved.apply(b) * x, ["b"]),
}
RIGHT = {
    "a line": lambda a, b, x: a + b * x,
    "a product with float32": lambda a, b, x: a + TABLE @ torch.stack([b, a]),
    "kinks": lambda a, b, x: (x - a).relu() + (x - b).abs() + torch.maximum(a, b),
    "jumps": lambda a, b, x: a + b * (x > b) + (10 * a).round() + torch.where(a > b, 1.0, -1.0),
    "float32 inside": lambda a, b, x: a + (1e4 + (b.float() * x.float()).sin()) - 1e4,
    "noise": lambda a, b, x: a + b * (x + 0.1 * torch.randn(len(x))),
    "saturated": lambda a, b, x: (100.0 * a).sigmoid() + (1000.0 * b * x).tanh(),
    "a data tensor that is detached": lambda a, b, x: a + b * x.detach(),
}
CUT = line(CUTS["detach"][0])


def problem(program, x=INPUTS, y=OUTCOMES):
    with warnings.catch_warnings(record=True), seeded():
        warnings.simplefilter("always")
        return prepare(program, x, y, points="free")


def names_of(found):
    """The sites of each finding about a gradient."""
    return [note.values["names"] for note in found.notes if note.code == "wrong_gradient"]


@pytest.mark.parametrize(
    "name", one_of_each_kind(OF_PROGRAMS, REPRESENTATIVES | {"Laplace-hessian"})
)
def test_every_method_warns_of_a_cut_graph_and_its_draws_do_not_pass(name, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = OF_PROGRAMS[name].fit(CUT, INPUTS, OUTCOMES, seed=0, **num_draws(name))
    said = [
        str(warning.message)
        for warning in caught
        if "is not the derivative" in str(warning.message)
    ]
    assert (
        len(said) == 1
        and "the gradient for 'b' " in said[0]
        and said[0] in posterior.meta["warnings"]
    )
    assert [
        each["names"] for each in posterior.meta["findings"] if each["code"] == "wrong_gradient"
    ] == [["b"]]
    posterior.to_datatree(INPUTS, OUTCOMES).to_netcdf(tmp_path / "tree.nc")
    with xr.open_datatree(tmp_path / "tree.nc") as tree:
        verdict = pb.diagnose(tree)
    assert verdict.draws in ("warn", "fail")
    assert any(check.name == "fit" and check.status in ("warn", "fail") for check in verdict.checks)


@pytest.mark.parametrize("way", CUTS)
def test_every_way_to_cut_a_graph_is_found_and_the_sites_are_named(way):
    mean, names = CUTS[way]
    assert names_of(problem(line(mean))) == [names]


@pytest.mark.parametrize("way", RIGHT)
def test_a_right_gradient_is_not_warned_of(way):
    assert not names_of(problem(line(RIGHT[way])))


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_of_the_law_of_programs_is_warned_of(name):
    assert not names_of(problem(PROGRAMS[name][0], X, Y))


@pytest.mark.parametrize("name", ["SGHMC", "SGLD"])
def test_what_torch_cannot_read_at_many_points_at_once_is_warned_of_too(name):
    """Outside a gradient ``vmap`` refuses ``.data``: the density of the draws is taken point by point."""
    program = line(CUTS["data"][0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = OF_PROGRAMS[name].fit(program, INPUTS, OUTCOMES, seed=0, **num_draws(name))
    assert any("the gradient for 'b' is not" in str(warning.message) for warning in caught)
    values = posterior.sample_stats["lp"]
    assert values.shape == posterior.draws["b"].shape and bool(values.isfinite().all())


def test_values_that_go_through_numpy_are_refused():
    program = line(lambda a, b, x: a + torch.as_tensor(b.detach().numpy() * x.numpy()))
    with pytest.raises(pb.Refused, match="NumPy.*compute with torch"):
        pb.MAP().fit(program, INPUTS, OUTCOMES)


def test_a_cut_value_of_a_vague_prior_among_many_others_is_found():
    """Each site on its own: of the slope along all of them a small part is cut."""

    def program(x, y):
        values = [pyro.sample(f"w{i}", dist.Normal(0.0, 1000.0)) for i in range(40)]
        values[7] = values[7].detach()
        mean = sum(value * torch.cos(i * x) for i, value in enumerate(values))
        scale = pyro.sample("scale", dist.HalfCauchy(5.0))
        pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=y)

    assert names_of(problem(program)) == [["w7"]]


def test_a_point_parameter_that_is_cut_is_named():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x, scale.detach()), obs=y)

    assert names_of(problem(program)) == [["scale"]]


def test_a_subsampled_program_is_checked_with_all_rows():
    def program(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x), subsample_size=5) as rows:
            pyro.sample("y", dist.Normal((slope * x).data[rows], 0.5), obs=y[rows])

    assert names_of(problem(program)) == [["slope"]]


@pytest.mark.parametrize(
    "method", [pb.MAP(num_steps=20, polish_steps=5, compile=False), OF_PROGRAMS["NUTS"]]
)
def test_a_log_density_that_is_cut_is_warned_of(method):
    def log_density(values):
        z = values["z"]
        return -(z.detach() - 3.0).square().sum() - values["w"].square().sum() / 2

    init = {"z": torch.zeros(2), "w": torch.zeros(3)}
    draws = {} if method.kind == "point" else {"num_draws": 6}
    with pytest.warns(UserWarning, match="for 'z' is not the derivative"):
        posterior = pb.sample(log_density, init, method=method, **draws)
    assert "wrong_gradient" in {each["code"] for each in posterior.meta["findings"]}


@pytest.mark.parametrize(
    "kernel",
    [lambda model: mcmc.NUTS(model, max_tree_depth=3), lambda model: mcmc.HMC(model, num_steps=3)],
)
def test_pyros_samplers_warn_of_a_cut_graph(kernel):
    sampler = mcmc.MCMC(kernel(CUT), num_samples=10, warmup_steps=10, disable_progbar=True)
    sampler.method = dataclasses.replace(sampler.method, compile=False)
    with pytest.warns(UserWarning, match="for 'b' is not the derivative"):
        sampler.run(INPUTS, OUTCOMES)
    assert pb.diagnose(sampler.posterior.to_datatree()).draws in ("warn", "fail")


def test_a_net_that_cuts_its_graph_does_not_pass():
    class Frozen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, _, self.last = toy_net()

        def forward(self, x):
            return self.last(self.first(x).tanh().detach())

    model = pb.BNN(Frozen(), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
    x = INPUTS[:, None]
    y = OUTCOMES[:, None]
    with pytest.warns(UserWarning, match="not its derivative"):
        posterior = pb.Laplace(num_steps=300, compile=False).fit(model, x, y, seed=0)
    verdict = pb.diagnose(posterior.to_datatree(x, y))
    checks = [check for check in verdict.checks if check.code == "fit_warned"]
    assert verdict.draws in ("warn", "fail")
    assert checks and "not its derivative" in checks[0].evidence


def test_a_program_that_is_slow_is_not_checked():
    """One gradient of it takes longer than the whole check may."""
    density = Density(CUT, (INPUTS, OUTCOMES))
    runs = []
    density.program = lambda x, y: (runs.append(1), CUT(x, y))[1]
    assert derivative.wrong_derivative(density, 10.0) == [] and not runs
    assert len(derivative.wrong_derivative(density, 0.001)) == 1
    assert len(runs) < 60


def test_of_a_wrong_program_further_sites_are_named_while_there_is_time(monkeypatch):
    program = line(CUTS["a list"][0])
    assert names_of(problem(program)) == [["a", "b"]]
    monkeypatch.setattr(derivative, "_SECONDS", 0.0)
    assert names_of(problem(program)) == [["a"]]
