"""Draws as arrays of xarray, their dimensions named as ArviZ names them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
import xarray as xr
from arviz_base import dict_to_dataset
from torch import Tensor

from pyrobnn.core import groups as group
from pyrobnn.posterior.approximation import PosteriorLike

_Posterior = TypeVar("_Posterior", bound=PosteriorLike)

#: (draws × points) above which draws are thinned in the groups that hold one value for each pair
MAX_PAIRS = 50_000_000
#: site → the names of the axes of its values, None where an axis has none
Dims = Mapping[str, Sequence[str | None]]


def few_draws(posterior: _Posterior, num_points: int) -> _Posterior:
    """Few enough draws to hold one value for each and every point."""
    return posterior.thin(max(1, MAX_PAIRS // max(num_points * posterior.num_chains, 1)))


def sample_dataset(**values: tuple[Tensor, *tuple[str, ...]]) -> xr.Dataset:
    """Draws (chain, draw, …), each with the names of its other dimensions."""
    variables = {}
    for name, (value, *dims) in values.items():
        variables[name] = ((*group.SAMPLE_DIMS, *dims), to_numpy(value))
    return xr.Dataset(variables)


def site_dataset(
    values: Mapping[str, Tensor], dims: Dims, sample_dims: Sequence[str] = group.SAMPLE_DIMS
) -> xr.Dataset:
    """A dataset of (\\*sample_dims, \\*shape), its other dimensions named by ``dims``, else ``<site>_dim_0``."""
    known: dict[Hashable, Sequence[Hashable]]
    known = {group.variable(n): [*sample_dims, *dims[n]] for n in values if n in dims}
    arrays = {group.variable(name): to_numpy(value) for name, value in values.items()}
    # an interrupted run may have more chains than draws
    dataset = dict_to_dataset(
        arrays,
        dims=known,
        sample_dims=[*sample_dims],
        check_conventions=False,
    )
    for site in values:
        dataset[group.variable(site)].attrs["site"] = site
    return dataset


def to_numpy(value: Tensor) -> np.ndarray:
    """The values as an array in main memory, without a gradient; bfloat16, which NumPy lacks, as float32."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
