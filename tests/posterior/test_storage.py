"""Posteriors on disk: what comes back is what was written, and damage is told."""

from __future__ import annotations

import errno
import gzip
import pickle
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from models import normal_prior, toy, toy_model

import pyrobnn as pb
from pyrobnn.posterior.storage import check_writable, read, write_atomically


@pytest.fixture(scope="module")
def posterior():
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    return pb.DeepEnsemble(num_members=3, num_steps=20, compile=False).fit(model, *toy())


def test_round_trip(posterior, tmp_path):
    path = posterior.save(tmp_path / "deep" / "ensemble.nc")
    again = pb.Posterior.load(path, posterior.model)
    assert again.draws.keys() == posterior.draws.keys()
    for name, value in posterior.draws.items():
        assert torch.equal(again.draws[name], value)
    assert again.meta == posterior.meta
    torch.testing.assert_close(again.history["loss"], posterior.history["loss"])
    x, _ = toy()
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    assert [p.name for p in path.parent.iterdir()] == ["ensemble.nc"]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (pb.SWAG(num_steps=20, collect_every=1, lr=1e-3, compile=False), "swag"),
        (pb.SVI(num_steps=10, compile=False), "svi"),
    ],
    ids=["SWAG", "SVI"],
)
def test_dear_log_densities_are_in_a_file_where_they_were_asked_for(
    method, name, tmp_path, monkeypatch
):
    """Each draw takes a pass over the data: of a deep net that was hours for a file of minutes of training."""
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(0.3))
    cheap = method.fit(model, *toy(), num_draws=40)
    monkeypatch.setattr("pyrobnn.inference.fitting.problem._NUMBERS_OF_SECONDS", 0)
    dear = method.fit(model, *toy(), num_draws=40)
    few = method.fit(model, *toy(), num_draws=1)

    def stats_in_file(posterior):
        return set(pb.Posterior.load(posterior.save(tmp_path / name), model).sample_stats)

    log_densities = {"log_p", "log_q"}
    assert log_densities <= stats_in_file(cheap)
    assert not log_densities & stats_in_file(dear)
    assert not log_densities & stats_in_file(dear.thin(30))
    assert log_densities <= stats_in_file(few)
    assert not log_densities & pickle.loads(pickle.dumps(dear)).sample_stats.keys()
    torch.testing.assert_close(dear.sample_stats["log_p"], cheap.sample_stats["log_p"])
    assert log_densities <= stats_in_file(dear)


def test_arrays_are_compressed_where_they_become_much_smaller(tmp_path):
    random = torch.randn(1, 4, 2**21, generator=torch.Generator().manual_seed(0)).numpy()
    sparse = np.where(random > 1.0, random, 0.0)
    sizes = {}
    for name, values in {"random": random, "sparse": sparse}.items():
        tree = xr.DataTree.from_dict(
            {"posterior": xr.Dataset({"w": (("chain", "draw", "w_dim"), values)})}
        )
        path = write_atomically(tree, tmp_path / f"{name}.nc")
        sizes[name] = path.stat().st_size
        with xr.open_datatree(path, engine="h5netcdf") as read_back:
            assert np.array_equal(read_back["posterior/w"].values, values)
            assert bool(read_back["posterior/w"].encoding.get("zlib")) == (name == "sparse")
    assert sizes["sparse"] < 0.5 * random.nbytes < sizes["random"]


def test_damaged_and_foreign_files(posterior, tmp_path):
    path = posterior.save(tmp_path / "whole.nc")
    content = path.read_bytes()
    (tmp_path / "half.nc").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.nc").write_text("not this")
    xr.Dataset({"a": ("x", [1.0])}).to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    for name, message in {
        "half.nc": "truncated or not a netCDF",
        "text.nc": "truncated or not a netCDF",
        "other.nc": "not a saved posterior",
    }.items():
        with pytest.raises(ValueError, match=message):
            pb.Posterior.load(tmp_path / name, posterior.model)
    with pytest.raises(FileNotFoundError, match="is a folder"):
        pb.Posterior.load(tmp_path, posterior.model)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        pb.Posterior.load(tmp_path / "none.nc", posterior.model)


def test_a_flipped_bit_of_the_draws_is_told(posterior, tmp_path):
    path = posterior.save(tmp_path / "p.nc")
    content = bytearray(path.read_bytes())
    name, value = max(posterior.draws.items(), key=lambda item: item[1].numel())
    at = content.find(value.numpy().tobytes()[:64])
    assert at > 0, name
    content[at + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        pb.Posterior.load(path, posterior.model)
    # of a file without a seal, as of an earlier version, by the checksum of the array
    path.write_bytes(content[: content.rindex(b"\npyrobnn crc32")])
    with pytest.raises(ValueError, match="truncated or not a netCDF"):
        pb.Posterior.load(path, posterior.model)


def test_a_file_of_version_0_2_0_is_read(tmp_path):
    """Its draws, statistics, guide and predictions; its settings are those of its time."""
    path = tmp_path / "svi.nc"
    path.write_bytes(gzip.decompress((Path(__file__).parent / "svi_0.2.0.nc.gz").read_bytes()))
    net = pb.networks.mlp(1, (2,), 1, seed=0)
    model = pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian("learned"))
    old = pb.Posterior.load(path, model)
    assert old.meta["versions"]["pyrobnn"] == "0.2.0" and old.meta["settings"]["rank"] == 1
    assert old.draws["net.0.weight"].shape == (1, 3, 2, 1)
    assert float(old.draws["net.0.bias"].sum()) == pytest.approx(-4.7158315777778625)
    assert float(old.draws["likelihood.scale"][0, 0]) == pytest.approx(2.294565796852112 / 3)
    assert old.log_evidence == pytest.approx(-25.44403270929074)
    assert old.log_q()[0].tolist() == pytest.approx([7.1445, 11.2506, 8.0163], abs=1e-4)
    torch.testing.assert_close(old.sample_stats["log_q"], old.log_q())
    mean = old.predict(torch.linspace(-1, 1, 8)[:3, None]).mean
    assert mean[:, 0].tolist() == pytest.approx([-0.0501, -0.0330, -0.0106], abs=1e-4)
    again = pb.Posterior.load(old.save(tmp_path / "new.nc"), model)
    assert all(torch.equal(again.draws[name], value) for name, value in old.draws.items())


@pytest.mark.slow
def test_a_fresh_process_that_imports_the_posterior_alone_has_the_approximation(tmp_path):
    x, y = toy()
    short = {"num_steps": 20, "compile": False}
    methods = (pb.Laplace(**short), pb.SWAG(**short), pb.SVI(guide="flow", **short))
    setup = (
        "import torch, pyro.distributions as dist\nfrom pyrobnn import Posterior\n"
        "from pyrobnn.model import BNN\nfrom pyrobnn import likelihoods, networks, priors\n"
        "net = networks.mlp(1, (2,), 1, seed=0)\n"
        "model = BNN(net, priors.FanInNormal(), likelihoods.HomoskedasticGaussian(0.3))\n"
    )
    scope: dict = {}
    exec(setup, scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posteriors = [method.fit(scope["model"], x, y, num_draws=3) for method in methods]
    paths = [str(each.save(tmp_path / f"{place}.nc")) for place, each in enumerate(posteriors)]
    code = f"{setup}for path in {paths!r}: print(float(Posterior.load(path, model).log_q().sum()))"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = [float(each.log_q().sum()) for each in posteriors]
    assert [*map(float, done.stdout.split())] == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("few_moves")
def test_a_tree_with_labels_comes_back(posterior, tmp_path):
    tree = posterior.to_datatree(*toy())
    names = [f"größe {i}" for i in range(len(toy()[0]))]
    tree = xr.DataTree.from_dict(
        {
            path: each.assign_coords(obs=names) if "obs" in each.dims else each
            for path, each in tree.to_dict().items()
        }
    )
    labels = {
        name for node in tree.subtree for name, v in node.coords.items() if v.dtype.kind in "OU"
    }
    assert labels
    again = read(write_atomically(tree, tmp_path / "labels.nc"))  # warnings are errors here
    for node in tree.subtree:
        xr.testing.assert_equal(again[node.path].to_dataset(), node.to_dataset())


def test_another_model_is_refused(posterior, tmp_path):
    path = posterior.save(tmp_path / "p.nc")
    with pytest.raises(ValueError, match="another model"):
        pb.Posterior.load(
            path, toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)), out=2)
        )


def test_a_failed_write_leaves_the_old_file(posterior, tmp_path, monkeypatch):
    path = posterior.save(tmp_path / "p.nc")
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(xr.DataTree, "to_netcdf", full)
    with pytest.raises(OSError, match="no space"):
        posterior.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_limit_on_the_size_of_files_is_an_error_and_leaves_the_old_file(tmp_path, capfd):
    """And neither pages of traces nor the end of the process, which HDF5 makes of it."""
    tree = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"a": (("draw",), torch.arange(50_000.0).numpy())})}
    )
    path = write_atomically(tree, tmp_path / "p.nc")
    before = path.read_bytes()
    (soft, hard) = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        with pytest.raises(OSError, match="File too large"):
            write_atomically(tree, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert capfd.readouterr().err == ""


def test_a_folder_on_a_full_disk_is_refused_beforehand(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match="No space left on device.: choose another"):
        check_writable(tmp_path / "new")


@pytest.mark.usefixtures("few_moves")
def test_trees_hold_all_groups_and_are_readable_again(posterior, tmp_path):
    x, y = toy()
    tree = posterior.to_datatree(x, y, test=(x[:5], y[:5]), true_function=torch.sin)
    assert set(tree.children) == {
        "posterior",
        "moved",
        "history",
        "log_likelihood",
        "log_prior",
        "observed_data",
        "constant_data",
        "posterior_predictive",
        "replicates",
        "function",
        "prior",
        "prior_predictive",
        "grid",
        "predictions",
        "predictions_constant_data",
    }
    assert tree["function"]["f"].dims == ("chain", "draw", "probe", "output")
    assert set(tree["function"]["probe_kind"].values) == {"train", "between", "outside"}
    p = posterior.predict(x)
    torch.testing.assert_close(
        torch.tensor(tree["log_likelihood"]["y"].values), p.log_prob_draws(y)
    )
    mixture = posterior.predict(x[:5]).log_prob(y[:5])
    torch.testing.assert_close(torch.tensor(tree["predictions"]["log_prob"].values), mixture)
    assert tree["grid"]["mean"].shape == (200, 1)
    path = tmp_path / "tree.nc"
    tree.to_netcdf(path, engine="h5netcdf")
    assert read(path).attrs["method"] == "DeepEnsemble"


@pytest.mark.usefixtures("few_moves")
def test_log_prior_of_the_tree_is_the_programs():
    model = toy_model(pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)))
    x, y = toy()
    posterior = pb.DeepEnsemble(num_members=2, num_steps=5, compile=False).fit(model, x, y)
    tree = posterior.to_datatree(x, y)
    density = pb.Density(model.pyro_model, (x, y))
    for draw, z in enumerate(density.unconstrain(posterior.draws)[0]):
        prior, likelihood = density.log_parts(z)
        assert tree["log_prior"]["log_prior"].values[0, draw] == pytest.approx(
            prior.item(), rel=1e-5
        )
        assert tree["function"]["log_likelihood"].values[0, draw] == pytest.approx(
            likelihood.item(), rel=1e-5
        )


@pytest.mark.parametrize("name", ["a/m", "draw", "chain", "b/c/d"])
def test_sites_of_any_name_are_in_the_tree_and_in_the_file(name, tmp_path):
    """Pyro's scopes put slashes into names, which a netCDF file cannot have; a dimension's name had been dropped."""

    def program(x, y):
        value = pyro.sample(name, dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", 4):
            pyro.sample(f"{name}/y", dist.Normal(value.sum(), 1.0), obs=y)

    posterior = pb.MAP(num_steps=3, compile=False).fit(program, None, torch.ones(4))
    again = pb.Posterior.load(posterior.save(tmp_path / "p.nc"), program)
    assert torch.equal(again.draws[name], posterior.draws[name])
    tree = posterior.to_datatree(None, torch.ones(4))
    (variable,) = tree["posterior"].data_vars.values()
    assert variable.attrs["site"] == name
    (observed,) = tree["log_likelihood"].data_vars.values()
    assert observed.attrs["site"] == f"{name}/y"
