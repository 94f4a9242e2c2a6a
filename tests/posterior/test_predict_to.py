"""Predictions of many rows, streamed: the numbers of ``predict``, and never half a file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.posterior import streaming

X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
Y = torch.stack([X.sum(1), X[:, 0] ** 2], 1)


def fitted(likelihood, y, width):
    net = pb.networks.mlp(2, (4,), width, seed=0)
    model = pb.BNN(net, pb.priors.FanInNormal(), likelihood)
    return pb.SVI(num_steps=20, compile=False).fit(model, X, y, num_draws=6, seed=0)


@pytest.fixture(scope="module")
def numbers():
    return fitted(pb.likelihoods.HomoskedasticGaussian(0.3), Y, 2)


@pytest.fixture(scope="module")
def classes():
    return fitted(pb.likelihoods.Categorical(), (Y[:, 0] > 0).long(), 2)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven rows."""
    monkeypatch.setattr(streaming, "BLOCK_SCALARS", 7 * 6 * 2)


def read(path):
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(path, mode="r")
    return pd.DataFrame({name: group[name][:] for name in group})


def loader(size):
    return DataLoader(TensorDataset(X, Y), batch_size=size)


@pytest.mark.parametrize("suffix", [".parquet", ".zarr"])
@pytest.mark.parametrize("rows", ["tensor", "array", "batches of 3", "batches of 20"])
def test_a_streamed_prediction_is_that_of_predict(numbers, small_blocks, tmp_path, suffix, rows):
    pytest.importorskip({".parquet": "pyarrow", ".zarr": "zarr"}[suffix])
    size = rows.rpartition(" ")[2]
    kinds = {"tensor": X, "array": X.numpy()}
    x = kinds.get(rows) if rows in kinds else loader(int(size))
    path = numbers.predict_to(tmp_path / f"out{suffix}", x, quantiles=(0.1, 0.9))
    table = read(path)
    p = numbers.predict(X)
    low, high = p.quantile(torch.tensor([0.1, 0.9]))
    values = {"mean": p.mean, "sd": p.var.sqrt(), "q0.1": low, "q0.9": high}
    values |= {"aleatoric_sd": p.aleatoric_var.sqrt(), "epistemic_sd": p.epistemic_var.sqrt()}
    assert len(table) == 50 and len(table.columns) == 2 * len(values)
    for name, value in values.items():
        for output in (0, 1):
            np.testing.assert_allclose(table[f"{name}_{output}"], value[:, output], atol=2e-6)


def test_probabilities_and_fewer_draws(classes, small_blocks, tmp_path):
    pytest.importorskip("pyarrow")
    table = read(classes.predict_to(tmp_path / "out.parquet", X, num_draws=3))
    p = classes.predict(X, num_draws=3)
    assert list(table) == ["p_0", "p_1", "aleatoric_entropy", "epistemic_entropy"]
    np.testing.assert_allclose(table[["p_0", "p_1"]], p.probs, atol=1e-6)
    np.testing.assert_allclose(table["epistemic_entropy"], p.epistemic_entropy, atol=1e-6)


@pytest.mark.parametrize("suffix", [".parquet", ".zarr"])
def test_what_fails_on_the_way_leaves_no_file(numbers, small_blocks, tmp_path, suffix):
    pytest.importorskip({".parquet": "pyarrow", ".zarr": "zarr"}[suffix])
    broken = X.clone()
    broken[40] = torch.nan
    with pytest.raises(ValueError, match="'x' contains NaN|'x' holds|not finite|NaN"):
        numbers.predict_to(tmp_path / f"out{suffix}", broken)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "x", "options", "message"),
    [
        ("out.csv", X, {}, "'path' must end in"),
        ("out.parquet", X[:0], {}, "'x' is empty"),
        ("out.parquet", [], {}, "'x' has no batches"),
        ("out.parquet", X[:, :1], {}, "'x' has shape"),
        ("out.parquet", X, {"quantiles": (0.0,)}, "'quantiles'"),
        ("out.parquet", X, {"num_draws": 0}, "'num_draws'"),
        ("file/out.parquet", X, {}, "cannot write to the folder"),
    ],
)
def test_bad_arguments_are_named(numbers, tmp_path, name, x, options, message):
    pytest.importorskip("pyarrow")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        numbers.predict_to(tmp_path / name, x, **options)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_and_a_folder_is_not(numbers, tmp_path):
    pytest.importorskip("pyarrow")
    pytest.importorskip("zarr")
    for rows in (4, 9):
        assert len(read(numbers.predict_to(tmp_path / "out.parquet", X[:rows]))) == rows
    numbers.predict_to(tmp_path / "out.zarr", X[:4])
    with pytest.raises(ValueError, match="exists already"):
        numbers.predict_to(tmp_path / "out.zarr", X)
    assert len(read(tmp_path / "out.zarr")) == 4


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """The rise of the peak over 12 times the rows, in a process of its own."""
    pytest.importorskip("pyarrow")
    import subprocess
    import sys

    code = """
import resource, torch, pyrobnn as pb
net = pb.networks.mlp(20, (32,), seed=0)
model = pb.BNN(net, pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
x = torch.randn(30, 20)
p = pb.SVI(num_steps=20, compile=False).fit(model, x, x[:, :1], num_draws=1000, seed=0)
peaks = []
for rows in (10_000, 120_000):
    p.predict_to("out.parquet", torch.randn(1000, 20).repeat(rows // 1000, 1), quantiles=())
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(*peaks)
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = map(int, run.stdout.split())
    assert many < 1024 and many - few < 100


def test_text_in_zarr_is_as_long_as_it_is(tmp_path):
    pytest.importorskip("zarr")
    path = tmp_path / "out.zarr"
    texts = [["no", "no"], ["maybe", None], [np.nan, "perhaps"]]
    blocks = ({"class": np.array(text, dtype=object)} for text in texts)
    assert streaming.write_blocks(blocks, path) == 6
    assert list(read(path)["class"]) == ["no", "no", "maybe", "", "", "perhaps"]
