"""A posterior in one file: the numbers of ``predict``, read by torch alone and by ONNX Runtime."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.posterior import export
from pyrobnn.posterior.export import ENTRIES
from pyrobnn.posterior.exported_reader import Exported

LEVELS = (0.025, 0.5, 0.975)
FIT = {"num_steps": 30, "compile": False}
G = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=G)
Y = 50 + 10 * (X[:, :1] + X[:, 1:2].sin() + 0.2 * torch.randn(40, 1, generator=G))
LABELS = (Y > 50).long()[:, 0]
COUNTS = torch.randint(0, 5, (40, 1), generator=G).float()
IMAGES = torch.randn(20, 1, 8, 8, generator=G)
SEQUENCES = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
UNITS = pb.data.Standardizer.fit(pb.data.Dataset(X, Y, "table", "regression"))
NOISE = pb.likelihoods.HomoskedasticGaussian


def bnn(net, likelihood, *, units=UNITS):
    return pb.BNN(net, pb.priors.FanInNormal(), likelihood, standardizer=units)


def mlp(out=1, activation="tanh", hidden=(6,)):
    return pb.networks.mlp(3, hidden, out, activation=activation, seed=0)


def normalized():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Linear(1, 4), layer, nn.Flatten(), nn.Linear(12, 1)
    )


class LastStep(nn.Module):
    """A linear function of the last output of an LSTM in two directions."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(1, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.recurrent(x.unsqueeze(-1))[0][:, -1])


def fit(method, model, x=X, y=Y, **options):
    return method.fit(model, x, y, seed=0, **options)


#: name → the posterior
NETS = {
    "map": lambda: fit(pb.MAP(**FIT), bnn(mlp(), NOISE("learned"))),
    "svi, inferred noise": lambda: fit(
        pb.SVI(**FIT),
        bnn(mlp(activation="relu", hidden=(6, 6)), NOISE(dist.HalfNormal(1.0))),
        num_draws=130,
    ),
    "ensemble": lambda: fit(
        pb.DeepEnsemble(num_members=3, **FIT), bnn(mlp(activation="gelu"), NOISE(0.3))
    ),
    "heteroskedastic": lambda: fit(
        pb.SVI(**FIT),
        bnn(mlp(2, "silu"), pb.likelihoods.HeteroskedasticGaussian()),
        num_draws=7,
    ),
    "mixture": lambda: fit(
        pb.SVI(**FIT), bnn(mlp(6, "elu"), pb.likelihoods.MixtureDensity(2)), num_draws=7
    ),
    "student": lambda: fit(
        pb.SVI(**FIT),
        bnn(mlp(activation="softplus").double(), pb.likelihoods.StudentT(4.0)),
        X.double(),
        Y.double(),
        num_draws=7,
    ),
    "counts": lambda: fit(
        pb.SVI(**FIT),
        bnn(
            pb.networks.mlp(2, (6,), seed=0),
            pb.likelihoods.Poisson(exposure=0),
            units=None,
        ),
        X.abs() + 0.1,
        COUNTS,
        num_draws=7,
    ),
    "classes": lambda: fit(
        pb.SVI(**FIT), bnn(mlp(2, "sigmoid"), pb.likelihoods.Categorical()), y=LABELS, num_draws=7
    ),
    "dropout": lambda: fit(
        pb.MCDropout(**FIT),
        bnn(
            nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)),
            pb.likelihoods.Bernoulli(),
        ),
        y=LABELS.float()[:, None],
        num_draws=7,
    ),
    "convolutions": lambda: fit(
        pb.DeepEnsemble(num_members=3, **FIT),
        bnn(pb.networks.small_cnn(3, seed=0), pb.likelihoods.Categorical(), units=None),
        IMAGES,
        LABELS[:20],
    ),
    "batch norm": lambda: pb.SWAG(num_steps=30, compile=False).fit(
        bnn(normalized(), NOISE(0.3)),
        DataLoader(TensorDataset(X, Y), batch_size=20),
        num_draws=7,
        seed=0,
    ),
    "linearised": lambda: fit(
        pb.Laplace(map=pb.MAP(**FIT), compile=False), bnn(mlp(), NOISE("learned")), num_draws=7
    ),
    "last layer": lambda: fit(
        pb.Laplace(subset="last_layer", predictive="draws", compile=False),
        bnn(mlp(), NOISE("learned")),
        num_draws=7,
    ),
    # of its first layers the program has parameters that no draw moves
    "images, last layer": lambda: fit(
        pb.Laplace(subset="last_layer", map=pb.MAP(**FIT), compile=False),
        bnn(pb.networks.small_cnn(3, seed=0), pb.likelihoods.Categorical(), units=None),
        IMAGES,
        LABELS[:20],
        num_draws=7,
    ),
    "attention": lambda: fit(pb.MAP(**FIT), bnn(attention(), NOISE(0.3))),
    # more steps than are put into one turn of a loop
    "recurrent": lambda: fit(
        pb.DeepEnsemble(num_members=2, **FIT),
        bnn(LastStep(), NOISE(0.3), units=None),
        SEQUENCES,
        Y[:20],
    ),
}
#: those whose quantiles are traced too: it takes several seconds
QUANTILES = ("map", "mixture", "heteroskedastic")
ONNX = (
    "map",
    "ensemble",
    "student",
    "counts",
    "classes",
    "convolutions",
    "linearised",
    "images, last layer",
    "recurrent",
)


@pytest.fixture(scope="module")
def mode():
    """A point estimate."""
    return NETS["map"]()


def inputs(name):
    own = {
        "convolutions": IMAGES,
        "images, last layer": IMAGES,
        "counts": X.abs() + 0.1,
        "recurrent": SEQUENCES,
    }
    rows = own.get(name, X)[:5]
    return rows.double() if name == "student" else rows


def expected(posterior, x, with_quantiles):
    """By the draws of the file, without exact moments."""
    num_draws = max(1, 100 // posterior.num_chains)
    p = posterior.predict(x, num_draws=num_draws).thin(1000)
    if p.likelihood.targets.classes:
        names = ("probs", "entropy", "aleatoric_entropy", "epistemic_entropy")
        return {name: getattr(p, name) for name in names}
    values = {
        "mean": p.mean,
        "sd": p.var.sqrt(),
        "aleatoric_sd": p.aleatoric_var.sqrt(),
        "epistemic_sd": p.epistemic_var.sqrt(),
    }
    if with_quantiles:
        values["quantiles"] = p.quantile(torch.tensor(LEVELS)).movedim(0, -1)
    return values


def assert_equal(outputs, values):
    unit = float(values["sd"].max()) if "sd" in values else 1.0
    assert set(outputs) - {"outside"} == set(values)
    for name, value in values.items():
        output = torch.as_tensor(outputs[name])
        assert output.shape == value.shape
        assert float((output - value).abs().max()) <= 1e-5 * unit, name


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_file_predicts_as_the_same_draws_do(name, tmp_path):
    with seeded():  # layers draw their first weights
        posterior = NETS[name]()
    x = inputs(name)
    levels = LEVELS if name in QUANTILES else ()
    options = {"x": X} if name == "batch norm" else {}
    file = posterior.export(tmp_path / "model.pt2", quantiles=levels, **options)
    values = expected(posterior, x, bool(levels))
    by_torch = torch.export.load(file).module()
    fast = Exported(file)
    for rows in (1, 5):
        part = {key: value[:rows] for key, value in values.items()}
        assert_equal(by_torch(x[:rows]), part)
        assert_equal(fast(x[:rows]), part)
    assert not fast(x)["outside"].any()
    assert fast(x + 100)["outside"].all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ONNX)
def test_onnx_runtime_predicts_as_the_same_draws_do(name, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    with seeded():  # layers draw their first weights
        posterior = NETS[name]()
    x = inputs(name)
    levels = LEVELS if name == "ensemble" else ()
    file = posterior.export(tmp_path / "model.onnx", quantiles=levels)
    session = onnxruntime.InferenceSession(file)
    names = [output.name for output in session.get_outputs()]
    values = expected(posterior, x, bool(levels))
    for rows in (1, 5):
        outputs = dict(zip(names, session.run(None, {"x": x[:rows].numpy()}), strict=True))
        assert_equal(outputs, {key: value[:rows] for key, value in values.items()})
    meta = json.loads(session.get_modelmeta().custom_metadata_map["pyrobnn"])
    assert meta["format"] == "pyrobnn-export" and meta["method"] == posterior.meta["method"]


def member(path, name):
    with zipfile.ZipFile(path) as archive:
        (found,) = [entry for entry in archive.namelist() if entry.endswith(f"extra/{name}")]
        return archive.read(found)


def test_the_file_says_what_it_is_and_holds_no_row(tmp_path):
    posterior = fit(
        pb.SVI(**FIT), bnn(mlp(2), pb.likelihoods.Categorical()), y=LABELS, num_draws=400
    )
    posterior = replace(posterior, rows=None)
    file = posterior.export(
        tmp_path / "model.pt2", num_draws=40, about={"classes": ["low", "high"]}
    )
    meta = json.loads(member(file, "pyrobnn.json"))
    assert meta["thinning"]["draws"] == 40 and meta["thinning"]["of"] == 400
    full = posterior.predict(X[:5]).probs
    thinned = Exported(file)(X[:5])["probs"]
    lost = float((full - thinned).abs().max())
    assert 0 < meta["thinning"]["largest_change_of_a_probability"] < 0.3
    assert lost < 3 * meta["thinning"]["largest_change_of_a_probability"]
    assert meta["input"] == {"shape": ["rows", 3], "dtype": "float32"}
    assert meta["outputs"]["probs"] == ["rows", 2] and meta["classes"] == ["low", "high"]
    assert set(meta) == {*ENTRIES, "classes"}
    for about, fault in (({"input": "a sensor"}, "'input', which"), ({"x": X}, "JSON can say")):
        with pytest.raises(ValueError, match=f"'about'.*{fault}"):
            posterior.export(tmp_path / "other.pt2", about=about)
    assert torch.allclose(torch.tensor(meta["ranges"]["low"]), X.amin(0))
    assert meta["verdict"] is None  # of data that are not there
    assert meta["units"]["x_mean"] == UNITS.x_mean.tolist()
    contents = file.read_bytes()
    assert not any(row.numpy().tobytes() in contents for row in X)
    assert b"test_export.py" not in contents


def test_a_verdict_and_the_draws_of_chains_are_in_the_file(tmp_path):
    posterior = fit(
        pb.NUTS(num_chains=2, num_warmup=10, max_tree_depth=3, compile=False),
        bnn(mlp(hidden=()), NOISE(0.3)),
        num_draws=10,
    )
    verdict = posterior.diagnose()
    file = posterior.export(tmp_path / "model.pt2", quantiles=(), verdict=verdict)
    meta = json.loads(member(file, "pyrobnn.json"))
    assert meta["verdict"]["draws"] == verdict.draws
    assert meta["thinning"]["draws"] == 20
    assert meta["thinning"]["largest_shift_of_the_mean_in_sd"] < 1e-5


@pytest.mark.usefixtures("few_moves")
def test_an_estimator_exports_its_classes(tmp_path):
    model = pb.BNNClassifier("map", hidden=(), compile=False, random_state=0)
    model.fit(X.numpy(), ["hot" if label else "cold" for label in LABELS])
    exported = Exported(model.export(tmp_path / "model.pt2"))
    assert exported.meta["classes"] == ["cold", "hot"]
    assert exported.meta["verdict"]["model"] == model.verdict_.model
    probs = torch.from_numpy(model.predict_proba(X.numpy()[:5]))
    assert torch.allclose(exported(X[:5])["probs"], probs, atol=1e-6)


def test_a_new_process_reads_it_without_the_library(mode, tmp_path):
    file = mode.export(tmp_path / "model.pt2", quantiles=(0.5,))
    (tmp_path / "reader.py").write_bytes(member(file, "reader.py"))
    code = (
        "import sys, torch, reader\n"
        "before = set(sys.modules)\n"
        "p = reader.Exported('model.pt2')(torch.zeros(1, 3))\n"
        "print(float(p['mean']), 'pyrobnn' in sys.modules)\n"
        # what takes seconds to import
        "print('sympy' in set(sys.modules) - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    mean, *others = run.stdout.split()
    assert others == ["False", "False"]
    assert abs(float(mean) - float(mode.predict(torch.zeros(1, 3)).mean)) < 1e-3


def test_a_damaged_file_is_told_or_predicts_the_same(mode, tmp_path):
    file = mode.export(tmp_path / "model.pt2", quantiles=())
    content = file.read_bytes()
    values = Exported(file)(X[:5])
    damaged = tmp_path / "damaged.pt2"
    told = 0
    for place in range(0, len(content), len(content) // 300):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        damaged.write_bytes(changed)
        try:
            outputs = Exported(damaged)(X[:5])
        except ValueError as error:
            assert repr(str(damaged)) in str(error) and "damaged" in str(error)
            told += 1
            continue
        assert all(torch.equal(outputs[name], value) for name, value in values.items())
    assert told > 20
    for size in (0, 10, len(content) // 2, len(content) - 5):
        damaged.write_bytes(content[:size])
        with pytest.raises(ValueError, match="truncated"):
            Exported(damaged)


def test_what_is_not_known_of_the_inputs_is_said(tmp_path):
    loader = DataLoader(TensorDataset(X, Y), batch_size=20)
    posterior = pb.MAP(**FIT).fit(bnn(mlp(), NOISE(0.3)), loader)
    with pytest.warns(UserWarning, match="ranges of the training data are not known"):
        file = posterior.export(tmp_path / "model.pt2", quantiles=())
    assert "outside" not in Exported(file)(X[:2])
    file = posterior.export(tmp_path / "model.pt2", quantiles=(), x=loader)
    assert not Exported(file)(X)["outside"].any()


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("model.bin", {}, ValueError, "'path' must end in"),
        ("model.pt2", {"num_draws": 0}, ValueError, "'num_draws'"),
        ("model.pt2", {"quantiles": (0.5, 1.0)}, ValueError, "'quantiles'"),
        ("model.pt2", {"x": torch.zeros(5, 4)}, ValueError, "'x' has shape"),
        ("model.pt2", {"about": [1]}, TypeError, "'about'"),
        ("file/model.pt2", {}, ValueError, "cannot write to the folder"),
    ],
)
def test_bad_arguments_are_named_before_any_work(path, options, error, message, mode, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=message):
        mode.export(tmp_path / path, **options)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]


def test_a_program_has_no_network_to_export(tmp_path):
    def program(x, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1), obs=y)

    posterior = pb.MAP(**FIT).fit(program, None, torch.ones(3))
    with pytest.raises(TypeError, match="'model' must be a pyrobnn.BNN"):
        posterior.export(tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_program_that_torch_traces_and_cannot_run_is_refused_in_words(
    mode, tmp_path, monkeypatch
):
    class Traced:
        def module(self):
            raise RuntimeError("expected to contain only concrete integers\nfrom line 2398")

    monkeypatch.setattr(export, "_traced", lambda program, x: Traced())
    with pytest.raises(pb.Refused, match="only concrete integers.: keep the model with"):
        mode.export(tmp_path / "model.pt2")
    assert not [*tmp_path.iterdir()]


def test_the_reader_runs_operators_of_torch_alone():
    from pyrobnn.posterior import exported_reader

    # the last three reach any function by the globals of a tensor's methods
    foreign = ("os.system", "builtins.eval", "aten.__class__.x")
    for target in (*foreign, "operator.attrgetter", "operator.methodcaller", "operator.call"):
        with pytest.raises((ValueError, AttributeError)):
            exported_reader._function(target)
    with pytest.raises(ValueError, match="none of torch's"):
        exported_reader._constant("torch", "load")
    assert exported_reader._function("operator.floordiv")(7, 2) == 3
