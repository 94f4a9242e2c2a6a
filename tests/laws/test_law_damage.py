"""The law of damage: a posterior's file whose bytes have changed loads the same draws, or is said to be damaged."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
import torch
from test_contract import fit, one_of_each_kind

import pyrobnn as pb
from pyrobnn.core.files import check_seal, seal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fits this short are told so

#: of the bytes of a file, so many are changed one at a time, and some of the last, where the seal stands
CHANGES = 150
LAST = 30
FAST = {"MAP", "SVI", "NUTS", "Laplace"}


def places(size: int) -> list[int]:
    """Places spread over so many bytes, and among the last."""
    return [*range(0, size, size // CHANGES), *range(size - LAST, size, 5)]


def changed(path: Path, place: int) -> Path:
    """A copy of a file with one byte flipped, another bit at every place."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    damaged = path.with_name("damaged.nc")
    damaged.write_bytes(content)
    return damaged


@pytest.mark.parametrize("name", one_of_each_kind(fast=FAST))
def test_a_flipped_bit_is_told_or_changes_nothing(name, tmp_path):
    posterior = fit(name, "inferred")
    path = posterior.save(tmp_path / "whole.nc")
    told = 0
    for place in places(path.stat().st_size):
        damaged = changed(path, place)
        try:
            again = pb.Posterior.load(damaged, posterior.model)
        except ValueError as error:
            assert repr(str(damaged)) in str(error) and "damaged" in str(error)
            told += 1
            continue
        assert again.meta == posterior.meta and again.log_evidence == posterior.log_evidence
        assert all(torch.equal(value, again.draws[site]) for site, value in posterior.draws.items())
    assert told >= CHANGES


def test_files_that_are_joined_are_checked_too(tmp_path):
    posterior = fit("NUTS")
    paths = [posterior.save(tmp_path / f"{number}.nc") for number in range(2)]
    damaged = changed(paths[1], paths[1].stat().st_size // 2)
    with pytest.raises(ValueError, match=r"damaged\.nc' is damaged"):
        pb.Posterior.load([paths[0], damaged], posterior.model)


def test_a_file_to_which_hdf5_has_added_is_read(tmp_path):
    posterior = fit("MAP")
    path = posterior.save(tmp_path / "p.nc")
    with h5py.File(path, "a") as file:
        file.attrs["remark"] = "mine"
    again = pb.Posterior.load(path, posterior.model)
    assert all(torch.equal(value, again.draws[site]) for site, value in posterior.draws.items())


def test_a_cut_file_is_told(tmp_path):
    posterior = fit("MAP")
    path = posterior.save(tmp_path / "p.nc")
    content = path.read_bytes()
    for size in (0, 1, 100, len(content) // 3, len(content) - 2000):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="truncated or not a netCDF"):
            pb.Posterior.load(path, posterior.model)


@pytest.mark.parametrize("size", [0, 5, 2**24, 2**24 + 1])
def test_a_seal_is_of_all_bytes(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    check_seal(path)
    seal(path)
    check_seal(path)
    for place in {0, size // 2, size - 1} & {*range(size)}:
        content = bytearray(path.read_bytes())
        content[place] ^= 16
        other = tmp_path / "other"
        other.write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            check_seal(other)
