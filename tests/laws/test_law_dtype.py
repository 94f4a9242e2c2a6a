"""The law of the dtype: float32 and float64 agree where there are more weights than data, and may be mixed.

Programs: their data are of a type that they take, or a sentence says which; and draws of a run that went on in float64
are read by whoever reads a posterior.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections import namedtuple

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import assert_mean_within, seeded
from models import NOISE, diabetes_linear, diabetes_model, normal_prior, toy_net
from test_contract import METHODS, X, Y, num_draws, one_of_each_kind

import pyrobnn as pb
from pyrobnn.inference.fitting.floats import float64_reason
from pyrobnn.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(of the draws|transitions diverged)|the centre is not a mode"
)
DTYPES = (torch.float32, torch.float64)
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


# -- float64 data in a float32 net, and the other way round ------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", one_of_each_kind())
def test_data_of_the_other_dtype(name, dtype):
    model = pb.BNN(toy_net().to(dtype), normal_prior(), HomoskedasticGaussian(dist.HalfNormal(1.0)))
    x = X.to(OTHER[dtype])
    y = Y.to(OTHER[dtype])
    posterior = METHODS[name].fit(model, x, y, seed=3, **num_draws(name))
    assert {value.dtype for value in posterior.draws.values()} == {dtype}
    prediction = posterior.predict(x[:7])
    assert prediction.f.dtype == prediction.mean.dtype == dtype
    assert prediction.log_prob(y[:7]).shape == (7,)


# -- Laplace: curvature that spans more than float32 resolves ----------------------------------------------------

NUM_DATA = 100  # for a net of 141 weights


@functools.cache
def precise_data() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Inputs, targets and a trained net, float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, 5, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    with seeded(0):
        net = pb.networks.mlp(5, (20,)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return x, y, net


def narrow(dtype: torch.dtype, **options) -> tuple[pb.Posterior, torch.Tensor]:
    """Laplace at the trained net, and the inputs."""
    x, y, net = precise_data()
    net = copy.deepcopy(net).to(dtype)
    model = pb.BNN(net, normal_prior(), HomoskedasticGaussian(0.03))
    return pb.Laplace(**options).fit(model, x.to(dtype), y.to(dtype), init=net, num_draws=20), x.to(
        dtype
    )


@pytest.mark.parametrize("tune", [None, "marginal_likelihood", "per layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_curvature_agrees(structure, tune):
    options = {"structure": structure, "tune": tune}
    if tune == "per layer":
        options = {"structure": structure, "tune": "per_layer"}
    (single, x), (double, x64) = (narrow(dtype, **options) for dtype in DTYPES)
    assert abs(single.log_evidence - double.log_evidence) < 0.02
    torch.testing.assert_close(
        single.moments(x)[1].double(), double.moments(x64)[1], rtol=1e-2, atol=1e-6
    )
    if structure == "full" and tune is None:
        # variances of the data's f in units of the noise add up to the effective parameters
        effective = float(single.moments(x)[1].double().sum()) / 0.03**2
        assert 0 < effective < NUM_DATA
        assert effective == pytest.approx(float(double.moments(x64)[1].sum()) / 0.03**2, abs=0.01)


# -- six data, eleven weights: every method's answer ---------------------------------------------------------------

#: long enough to have an answer; fewer than 16 numbers of torch's generator are the same in both dtypes, so that one
#: chain of eleven weights is too, up to rounding
SETTINGS = {
    "MAP": {"polish_steps": 100},
    "SVI": {"num_steps": 600, "lr": 0.03},
    "SVI-low-rank": {"num_steps": 600, "lr": 0.03},
    "DeepEnsemble": {"num_steps": 600, "lr": 0.05},
    "NUTS": {"num_chains": 1, "num_warmup": 20, "max_tree_depth": 4},
    "NUTS-pyro": {"num_warmup": 20, "max_tree_depth": 4},
    "SGLD": {"num_chains": 1, "num_warmup": 50, "thinning": 5},
    "SGHMC": {"num_chains": 1, "num_warmup": 50, "thinning": 5},
    "SMC": {"num_particles": 1200, "max_leapfrogs": 4, "max_moves": 6, "ess": 0.7},
    "MCDropout": {"num_steps": 0},
}
MARKOV = {"NUTS", "NUTS-pyro", "SGLD", "SGHMC"}
#: initialised anew, nets of two dtypes begin with other weights: they start from the model's own
FROM_NET = {"SGLD", "SGHMC", "MCDropout"}
EVIDENCE = [name for name in METHODS if name.startswith(("Laplace", "SVI"))]
EXACT = [
    name for name in METHODS if name in ("MAP", "DeepEnsemble", "SVI", "Laplace", "Laplace-draws")
]


@functools.cache
def few_data(name: str, dtype: torch.dtype) -> tuple[pb.Posterior, torch.Tensor]:
    """Posterior of a linear model on six rows, and its f at another, (chain, draw, 1, 1)."""
    truth = diabetes_linear()
    x = truth["x"].to(dtype)
    y = truth["y"].to(dtype)
    method = dataclasses.replace(METHODS[name], **SETTINGS.get(name, {}))
    draws = {"num_draws": 20 if name in MARKOV else 1000} if num_draws(name) else {}
    start = {}
    if name in FROM_NET:
        with seeded(1):
            start = {"init": torch.nn.Linear(10, 1, dtype=torch.float64).to(dtype)}
    posterior = method.fit(diabetes_model(dtype), x[:6], y[:6], seed=3, **draws, **start)
    return posterior, posterior.predict(x[6:7]).f.double()


def _slow(names, quick) -> list:
    return [
        pytest.param(name, marks=[] if name.startswith(quick) else [pytest.mark.slow])
        for name in names
    ]


@pytest.mark.parametrize("name", _slow(METHODS, ("MAP", "Laplace", "SWAG", "SGLD", "MCDropout")))
def test_predictive_agrees(name):
    (one, single), (two, double) = (few_data(name, dtype) for dtype in DTYPES)
    assert single.shape == double.shape and bool(single.isfinite().all())
    if single.shape[1] < 100:  # a point, members, or a chain worth no more than its own numbers
        tolerance = 1e-2 if name in MARKOV else 1e-3
        torch.testing.assert_close(single, double, rtol=tolerance, atol=tolerance)
        return
    if one.moments is not None:
        probe = diabetes_linear()["x"][6:7]
        pairs = zip(one.moments(probe.float()), two.moments(probe), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)
    if torch.allclose(single, double, rtol=1e-3, atol=1e-3):
        return  # even the draws are the same
    assert_mean_within(single - double, 0.0, min_ess=100, name="mean of f")
    centre = (single.mean((0, 1)) + double.mean((0, 1))) / 2
    squares = (single - centre) ** 2 - (double - centre) ** 2
    assert_mean_within(squares, 0.0, min_ess=100, name="variance of f")


@pytest.mark.slow
def test_training_with_dropout_agrees():
    """torch draws the masks of training anew in every dtype: what agrees is the mean over seeds."""
    method = dataclasses.replace(METHODS["MCDropout"], num_steps=60, lr=0.05)
    truth = diabetes_linear()
    trained = []
    for dtype in DTYPES:
        x = truth["x"][:6].to(dtype)
        y = truth["y"][:6].to(dtype)
        with seeded(1):
            net = torch.nn.Linear(10, 1, dtype=torch.float64).to(dtype)
        fits = [
            method.fit(diabetes_model(dtype), x, y, seed=seed, init=net, num_draws=50)
            for seed in range(40)
        ]
        # a mask has nothing of the bias, and keeps or drops a weight as it was trained
        weights = torch.stack(
            [fit.draws["net.weight"].abs().amax((0, 1)).flatten() for fit in fits]
        )
        trained.append(
            torch.cat([weights, torch.stack([fit.draws["net.bias"][0, 0] for fit in fits])], 1)
        )
    assert_mean_within(
        (trained[0].double() - trained[1])[None], 0.0, min_ess=10, name="trained weights"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_predictive_is_exact(name, dtype):
    """More weights than data, and a posterior in closed form."""
    truth = diabetes_linear()
    design = truth["design"][:6]
    precision = design.T @ design / NOISE**2 + torch.eye(11, dtype=torch.float64)
    mode = torch.linalg.solve(precision, design.T @ truth["y"][:6, 0]) / NOISE**2
    posterior, f = few_data(name, dtype)
    probe = truth["design"][6]
    if f.shape[1] < 100:  # the prior and data make one mode, of every member
        torch.testing.assert_close(f, (probe @ mode).expand_as(f), rtol=1e-3, atol=1e-3)
        return
    assert_mean_within(f, probe @ mode, name="mean of f")
    if name != "SVI":
        assert_mean_within((f - probe @ mode) ** 2, probe @ torch.linalg.solve(precision, probe))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MARKOV | {"SVI", "SVI-low-rank"}))
def test_the_numbers_are_the_same(name):
    """The same random numbers, so the same course: float32 adds its rounding and nothing else."""
    (single, _), (double, _) = (few_data(name, dtype) for dtype in DTYPES)
    if name in MARKOV:
        pairs = [(single.draws[site], double.draws[site]) for site in double.draws]
    else:
        state = double.approximation.state()[1]
        pairs = [(single.approximation.state()[1][key], state[key]) for key in state]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", _slow(EVIDENCE, ("Laplace",)))
def test_evidence_agrees(name):
    single, double = (few_data(name, dtype)[0].log_evidence for dtype in DTYPES)
    assert abs(single - double) < 0.5


# -- programs: data of another type than their sites ---------------------------------------------------------------

#: every method that takes a program
OF_PROGRAMS = {
    "MAP": pb.MAP(num_steps=5, polish_steps=2, compile=False),
    "SVI": pb.SVI(num_steps=5, compile=False),
    "NUTS": pb.NUTS(num_chains=2, num_warmup=5, max_tree_depth=3, compile=False),
    "SGLD": pb.SGLD(num_chains=2, num_warmup=5, step_size=1e-3, compile=False),
    "SGHMC": pb.SGHMC(num_chains=2, num_warmup=5, step_size=1e-3, compile=False),
    "Laplace": pb.Laplace(curvature="hessian", num_steps=20, compile=False),
    "SMC": pb.SMC(
        num_particles=16, num_islands=2, max_leapfrogs=2, max_moves=2, ess=0.5, compile=False
    ),
}
TABLE = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]] * 3)
ANSWERS = torch.tensor([0, 1, 1, 0] * 3)
TYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool]
Pair = namedtuple("Pair", "table scale")


def product(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def promoted(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)


def truth_values(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=w * x[:, 0]), obs=y)


def indexed(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(w[x[:, 0]], 1.0), obs=y)


def of_tree(x, y=None):
    table = x["part"].table if isinstance(x["part"], Pair) else x["part"][0]
    return product(table, y)


def correlated(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    return pyro.sample("y", dist.MultivariateNormal(w + x[:, 0], torch.eye(len(x))), obs=y)


def closed_over(dtype: torch.dtype):
    table = TABLE.to(dtype)
    return lambda x, y=None: product(table, y)


def mixed_sites(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def of_programs(*quick: str) -> list:
    return _slow(OF_PROGRAMS, quick or ("MAP", "SVI", "NUTS", "Laplace"))


def draws_of(name: str, num: int = 4) -> dict[str, int]:
    return {} if name == "MAP" else {"num_draws": num}


@pytest.fixture
def quiet():
    with (
        warnings.catch_warnings(action="ignore"),
        seeded(0),
    ):  # runs this short are told to be too short
        yield


SENTENCES = [
    (
        product,
        TABLE.double(),
        ANSWERS.double(),
        "'x' is float64, but the sites .* float32.*: pass x.float()",
    ),
    (product, TABLE, ANSWERS, "'x' is int64, .* pass x.float()"),
    (product, TABLE.half(), ANSWERS.float(), "'x' is float16, .* pass x.float()"),
    (
        product,
        TABLE.bool(),
        ANSWERS.bool(),
        "'x' is bool and 'y' is bool, .* pass x.float.. and y.float()",
    ),
    (promoted, TABLE.float(), ANSWERS.bool(), "'y' is bool, .* pass y.float()"),
    (promoted, TABLE.half(), ANSWERS.float(), "'x' is float16, .* pass x.float()"),
    (promoted, TABLE.half(), ANSWERS.half(), "'x' is float16 and 'y' is float16"),
    (correlated, TABLE.float(), ANSWERS.bool(), "'y' is bool, .* pass y.float()"),
    (
        indexed,
        TABLE.double(),
        ANSWERS.float(),
        "'x' is float64, and the program takes it as an index: pass x.long()",
    ),
    (
        of_tree,
        {"part": (TABLE.double(),), "other": TABLE},
        ANSWERS.float(),
        r"pass x\['part'\]\[0\].float",
    ),
    (
        of_tree,
        {"part": Pair(TABLE.double(), 1.0)},
        ANSWERS.float(),
        r"x\['part'\].table. is float64",
    ),
    (closed_over(torch.float64), None, ANSWERS.float(), "tensors that the program itself holds"),
    (closed_over(torch.int64), None, ANSWERS.float(), "tensors that the program itself holds"),
]


@pytest.mark.parametrize("case", range(len(SENTENCES)))
@pytest.mark.parametrize("name", of_programs())
def test_data_that_a_program_cannot_take_are_named(name, case, quiet):
    program, x, y, message = SENTENCES[case]
    with pytest.raises(TypeError, match=message):
        OF_PROGRAMS[name].fit(program, x, y, **draws_of(name))


@pytest.mark.parametrize("y", TYPES, ids=str)
@pytest.mark.parametrize("x", TYPES, ids=str)
@pytest.mark.parametrize("name", of_programs("MAP"))
@pytest.mark.parametrize("program", [product, promoted, truth_values, indexed, correlated])
def test_every_type_works_or_is_named(program, name, x, y, quiet):
    """Of whatever type the data are: the draws are those of float data, or a sentence says what to pass."""
    if program is indexed and x is torch.bool:
        pytest.skip("truth values are a mask, not an index")
    method = OF_PROGRAMS[name]
    options = {"seed": 3, **draws_of(name)}
    try:
        posterior = method.fit(program, TABLE.to(x), ANSWERS.to(y), **options)
    except TypeError as error:
        assert ".float()" in str(error) or ".long()" in str(error)
        return
    index = program is indexed
    expected = method.fit(program, TABLE if index else TABLE.float(), ANSWERS.float(), **options)
    for site, value in expected.draws.items():
        assert posterior.draws[site].dtype == torch.float32
        torch.testing.assert_close(posterior.draws[site], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "labels", [ANSWERS, ANSWERS.bool(), ANSWERS.double(), ANSWERS.to(torch.uint8)], ids=str
)
@pytest.mark.parametrize("name", of_programs())
def test_truth_values_of_any_type(name, labels, quiet):
    method = OF_PROGRAMS[name]
    options = {"seed": 3, **draws_of(name)}
    one, two = (
        method.fit(truth_values, TABLE.float(), y, **options) for y in (labels, ANSWERS.float())
    )
    torch.testing.assert_close(one.draws["w"], two.draws["w"], rtol=1e-3, atol=1e-3)
    assert not any(finding["code"] == "unbatched_chains" for finding in one.meta["findings"])


@pytest.mark.parametrize("name", of_programs())
def test_a_program_follows_the_default_type(name, quiet):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        posterior = OF_PROGRAMS[name].fit(
            product, TABLE.double(), ANSWERS.double(), **draws_of(name)
        )
        assert (
            posterior.draws["w"].dtype == torch.float64 and "program_dtypes" not in posterior.meta
        )
        with pytest.raises(
            TypeError, match="'x' is float32, but the sites .* float64.*: pass x.double()"
        ):
            OF_PROGRAMS[name].fit(product, TABLE.float(), ANSWERS.float(), **draws_of(name))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", of_programs())
def test_sites_of_two_types(name, quiet):
    """One vector holds them all, in float64; Pyro is handed each as the program has it."""
    posterior = OF_PROGRAMS[name].fit(
        mixed_sites, TABLE.float(), ANSWERS.float(), **draws_of(name, 50)
    )
    assert {posterior.draws[site].dtype for site in ("w", "scale")} == {torch.float64}
    assert [value.dtype for value in posterior.stacked().values()] == [torch.float32, torch.float64]
    samples = pyro.infer.Predictive(mixed_sites, posterior.stacked())(TABLE.float())
    assert bool(samples["y"].isfinite().all())
    if posterior.guide is not None:
        seen = pyro.infer.Predictive(mixed_sites, guide=posterior.guide, num_samples=3)(
            TABLE.float()
        )
        assert seen["w"].dtype == torch.float32
    posterior.to_datatree(TABLE.float(), ANSWERS.float())


def test_who_else_takes_a_program_names_its_data(quiet):
    table = TABLE.double()
    answers = ANSWERS.float()
    with pytest.raises(TypeError, match="'x' is float64, .* pass x.float()"):
        pb.mcmc.MCMC(pb.mcmc.NUTS(product), 5, 5, disable_progbar=True).run(table, y=answers)
    with pytest.raises(TypeError, match="tensors that the program itself holds"):
        pb.PyroRegressor(closed_over(torch.float64), OF_PROGRAMS["MAP"], random_state=0).fit(
            TABLE.numpy(), ANSWERS.numpy() * 1.0
        )


# -- a run that went on in float64: whoever reads it ----------------------------------------------------------------

SCALE = 0.5
LINE = torch.linspace(-1.0, 1.0, 20)
HEIGHTS = 2.0 * LINE + SCALE * torch.randn(20, generator=torch.Generator().manual_seed(0))


def stiff(x, y=None):
    """Rows of a matrix product, which torch does not promote."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    mean = pyro.deterministic("mean", torch.stack([torch.ones_like(x), x], 1) @ w)
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(mean, SCALE), obs=y)


def coarse(density: pb.Density):
    """The judge of a run, to which float32 is always too coarse."""
    return (lambda z, steps: "as a test has it") if density.dtype == torch.float32 else None


def test_rounding_is_measured_in_few_runs_of_the_program():
    """A run of a long loop takes seconds."""
    runs = []

    def log_joint(z):
        runs.append(z.dtype)
        return (1e7 + z).square().sum()

    with seeded(0):
        z = torch.randn(100, 3)
    assert "rounded by" in float64_reason(log_joint, log_joint, z, torch.ones(3))
    assert {*runs} == {torch.float32, torch.float64} and len(runs) <= 8
    assert float64_reason(torch.sum, torch.sum, z, torch.ones(3)) == ""


@functools.cache
def restarted() -> pb.Posterior:
    """A posterior of float32 data whose chains were told that float32 cannot hold them."""
    sampler = pb.NUTS(num_chains=2, num_warmup=60, compile=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyrobnn.inference.nuts.inspector", coarse)
        with pytest.warns(UserWarning, match="the run went on in float64.*as a test has it"):
            return sampler.fit(stiff, LINE, HEIGHTS, num_draws=100, seed=0)


def from_file(posterior: pb.Posterior, tmp_path) -> pb.Posterior:
    return pb.Posterior.load(posterior.save(tmp_path / "run.nc"), stiff, x=LINE, y=HEIGHTS)


#: name ↦ (posterior, x, y) ↦ what a reader makes of it
READERS = {
    "to_datatree": lambda posterior, x, y: posterior.to_datatree(x, y),
    "exact_loo": lambda posterior, x, y: posterior.to_datatree(x, y, exact_loo=1),
    "diagnose": lambda posterior, x, y: posterior.diagnose(x, y),
    "diagnose its own rows": lambda posterior, x, y: posterior.diagnose(),
    "loo": lambda posterior, x, y: pb.diagnostics.loo(posterior.to_datatree(x, y)),
    "audit": lambda posterior, x, y: pb.audit(posterior.to_datatree(x, y)),
    "thin": lambda posterior, x, y: posterior.thin(30).to_datatree(x, y),
    "Predictive": lambda posterior, x, y: pyro.infer.Predictive(stiff, posterior.stacked())(LINE),
    "Predictive of rows": lambda posterior, x, y: pyro.infer.Predictive(
        stiff, posterior.thin(5).stacked()
    )(LINE[:3]),
    "update": lambda posterior, x, y: posterior.update(x[:3], y[:3]).diagnose(),
    "remove": lambda posterior, x, y: posterior.remove([1, 2]).to_datatree(x[3:], y[3:]),
    "NUTS from there": lambda posterior, x, y: OF_PROGRAMS["NUTS"].fit(
        stiff, LINE, HEIGHTS, num_draws=10, init=posterior
    ),
    "SVI from there": lambda posterior, x, y: OF_PROGRAMS["SVI"].fit(
        stiff, LINE, HEIGHTS, num_draws=10, init=posterior
    ),
}


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (False, torch.float64),
        pytest.param(True, torch.float32, marks=pytest.mark.slow),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        pytest.param(True, torch.float64, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_run_in_float64(reader, saved, dtype, tmp_path, quiet):
    posterior = from_file(restarted(), tmp_path) if saved else restarted()
    assert posterior.draws["w"].dtype == torch.float64
    READERS[reader](posterior, LINE.to(dtype), HEIGHTS.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_run_in_float64_is_read_in_float64(dtype, tmp_path, quiet):
    posterior = from_file(restarted(), tmp_path)
    assert posterior.meta["float64"] and posterior.draws["mean"].dtype == torch.float64
    tree = posterior.to_datatree(LINE.to(dtype), HEIGHTS.to(dtype))
    draws = posterior.draws["w"]
    mean = draws[..., :1] + draws[..., 1:] * LINE.double()
    exact = dist.Normal(mean, SCALE).log_prob(HEIGHTS.double())
    np.testing.assert_allclose(tree["log_likelihood"]["y"], exact, rtol=1e-13)
    np.testing.assert_allclose(tree["posterior"]["mean"], mean, rtol=1e-13)
    torch.testing.assert_close(
        posterior.stacked()["w"], draws.flatten(0, 1).float(), rtol=0, atol=0
    )
    assert (
        posterior.update(LINE[:3].to(dtype), HEIGHTS[:3].to(dtype)).draws["w"].dtype
        == torch.float64
    )


def test_pyros_signatures_after_a_run_in_float64(monkeypatch, quiet):
    monkeypatch.setattr("pyrobnn.inference.nuts.inspector", coarse)
    mcmc = pb.mcmc.MCMC(pb.mcmc.NUTS(stiff), 30, 30, num_chains=2, disable_progbar=True)
    mcmc.method = dataclasses.replace(mcmc.method, compile=False)
    mcmc.run(LINE, HEIGHTS)
    assert mcmc.posterior.draws["w"].dtype == torch.float64
    assert pyro.infer.Predictive(stiff, mcmc.get_samples())(LINE)["y"].shape == (60, 20)
    mcmc.diagnostics()
    model = pb.PyroRegressor(
        lambda x, y=None: stiff(x[:, 0], y), OF_PROGRAMS["NUTS"], num_draws=30, random_state=0
    )
    model.fit(LINE[:, None].numpy(), HEIGHTS.numpy())
    assert model.posterior_.draws["w"].dtype == torch.float64
    assert model.predict([[0.5]]).shape == (1,) and model.verdict_.status
