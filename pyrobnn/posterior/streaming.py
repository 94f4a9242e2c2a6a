"""Predictions of many rows, block by block, to a file that is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pyrobnn.core.checks import as_tensor
from pyrobnn.core.files import written_whole
from pyrobnn.core.seeding import kept
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.posterior.ranges import in_order

#: scalars of a block's function draws, 16 MiB of float32; a prediction computes several such tensors, some in float64
BLOCK_SCALARS = 2**22
#: rows of a piece of a Zarr array
CHUNK_ROWS = 2**16
#: the ending of a file → the library that writes it, and the extra that has it
FORMATS = {".parquet": ("pyarrow", "tables"), ".zarr": ("zarr", "zarr")}

#: rows, or batches x or (x, y) of them
Inputs = Tensor | np.ndarray | Iterable[Tensor | Sequence[Tensor]]
#: columns by name, of as many rows each
Columns = Mapping[str, np.ndarray]


def check_format(path: Path) -> None:
    """ValueError of an ending that says no format; ImportError where what writes it is not installed."""
    if path.suffix not in FORMATS:
        raise ValueError(f"'path' must end in {' or '.join(FORMATS)}, got {str(path)!r}")
    library, extra = FORMATS[path.suffix]
    if find_spec(library) is None:
        raise ImportError(
            f"{library} must be installed to write {path.suffix}: pip install 'pyrobnn[{extra}]'"
        )


def rows_at_once(num_draws: int, width: int) -> int:
    """Rows of a block, of so many draws of so many outputs."""
    return max(1, BLOCK_SCALARS // max(num_draws * width, 1))


def input_batches(x: Inputs, names: Sequence[str] | None = None) -> Iterator[Tensor]:
    """Inputs (N, …) as one batch; or the inputs of the batches of a loader, x or (x, y) each.

    The columns of data frames are put into the order of the ``names``.

    Raises:
        ValueError: a loader that shuffles: nobody could tell which row of the file is whose.
    """
    if isinstance(x, Tensor | np.ndarray) or hasattr(x, "to_numpy") or not isinstance(x, Iterable):
        yield as_tensor("x", in_order(x, names))
        return
    if isinstance(x, DataLoader) and _shuffles(x):
        raise ValueError(
            "'x' is a loader that shuffles, so that nobody could tell which row of the file is whose: give it "
            "shuffle=False"
        )
    with kept():  # a loader draws its order before the first batch
        batches = iter(x)
        opening = list(islice(batches, 1))
    shape: Sequence[int] | None = None
    for batch in chain(opening, batches):
        if isinstance(batch, Mapping):
            raise TypeError(
                f"the batches of 'x' are dictionaries ({', '.join(map(str, batch))}), and the net has one input: give "
                "an iterable of the inputs alone, as in (batch['x'] for batch in loader)"
            )
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        rows = as_tensor("x", in_order(inputs, names))
        shape = rows.shape[1:] if shape is None else shape
        if rows.shape[1:] != shape:
            raise ValueError(
                f"the rows of 'x' have shape {tuple(shape)} in its first batch and {tuple(rows.shape[1:])} in another: "
                "predict them one after another, each to a file of its own"
            )
        yield rows


def _shuffles(loader: DataLoader) -> bool:
    """Whether a loader gives its rows in an order of chance."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(
        isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        for sampler in samplers
    )


def row_blocks(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The rows of all batches in blocks of ``size`` rows; the last has what is left."""
    waiting: list[Tensor] = []
    count = 0
    for batch in batches:
        for piece in batch.split(size):
            waiting.append(piece)
            count += len(piece)
            if count >= size:
                rows = torch.cat(waiting)
                yield rows[:size]
                waiting = [rows[size:]]
                count -= size
    if count:
        yield torch.cat(waiting)


def prediction_columns(
    prediction: Prediction, levels: Sequence[float], classes: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """What is predicted, one row each, in the units of the data.

    Of numbers ``mean``, ``aleatoric_sd``, ``epistemic_sd``, ``sd`` and quantiles ``q…``, with ``_0``, ``_1``, … where
    there are several outputs. Of classes ``class``, the most probable one, where they have names, ``p_…`` of each (of a
    truth value ``p``, that of 1), and ``aleatoric_entropy`` and ``epistemic_entropy`` in nats.
    """
    if prediction.likelihood.targets.classes:
        return _class_columns(prediction, classes)
    values = {
        "mean": prediction.mean,
        "aleatoric_sd": prediction.aleatoric_var.sqrt(),
        "epistemic_sd": prediction.epistemic_var.sqrt(),
        "sd": prediction.var.sqrt(),
    }
    if levels:
        quantiles = prediction.quantile(torch.tensor(levels, dtype=torch.float64))
        values |= {f"q{level:g}": value for level, value in zip(levels, quantiles)}
    columns = {}
    for name, value in values.items():
        suffixes = [""] if value.shape[1] == 1 else [f"_{index}" for index in range(value.shape[1])]
        for suffix, column in zip(suffixes, value.cpu().numpy().T):
            columns[f"{name}{suffix}"] = column
    return columns


def _class_columns(prediction: Prediction, classes: Sequence[str] | None) -> dict[str, np.ndarray]:
    probs = prediction.probs.cpu().numpy()
    columns = {}
    if probs.ndim == 3:
        return _position_columns(prediction, probs)
    if classes is not None:
        columns["class"] = np.array(classes, dtype=object)[probs.argmax(1)]
    names = range(probs.shape[1]) if classes is None else classes
    single = probs.shape[1] == 1
    columns |= {"p" if single else f"p_{name}": probs[:, i] for i, name in enumerate(names)}
    for kind in ("aleatoric_entropy", "epistemic_entropy"):
        columns[kind] = getattr(prediction, kind).cpu().numpy()
    return columns


def _position_columns(prediction: Prediction, probs: np.ndarray) -> dict[str, np.ndarray]:
    """The probabilities (N, position, class) as ``p_position_class``, and entropies as ``…_entropy_position``."""
    columns = {
        f"p_{position}_{label}": probs[:, position, label]
        for position in range(probs.shape[1])
        for label in range(probs.shape[2])
    }
    for kind in ("aleatoric_entropy", "epistemic_entropy"):
        for position, values in enumerate(getattr(prediction, kind).cpu().numpy().T):
            columns[f"{kind}_{position}"] = values
    return columns


def write_blocks(blocks: Iterable[Columns], path: Path) -> int:
    """Write blocks of the same columns one after another; nothing stands at ``path`` before all are there.

    As CSV where its ending names no other format. Gaps, None or NaN, are null in Parquet and empty in CSV; in Zarr
    a gap of text is empty.

    Returns:
        The number of rows.

    Raises:
        ValueError: nothing can be written there, or there is no block.
    """
    writer = _WRITERS.get(path.suffix, _write_csv)
    with written_whole(path, folder=path.suffix == ".zarr") as beside:
        count = writer(iter(blocks), beside)
        if not count:
            raise ValueError("'x' has no rows: pass at least one")
    return count


def _write_parquet(blocks: Iterator[Columns], path: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    count = 0
    with ExitStack() as stack:
        writer = None
        for block in blocks:
            columns = {n: pyarrow.array(column, from_pandas=True) for n, column in block.items()}
            table = pyarrow.table(columns)
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table.cast(writer.schema))
            count += len(table)
    return count


def _write_zarr(blocks: Iterator[Columns], path: Path) -> int:
    """An array (row,) of each column, in a group; text of any length, empty where it is a gap."""
    import pandas as pd
    import zarr

    group = zarr.open_group(path, mode="w")
    arrays: dict[str, zarr.Array[Any]] = {}
    count = 0
    for block in blocks:
        for name, column in block.items():
            is_text = column.dtype == object
            if is_text:
                column = np.where(pd.isna(column), "", column)
            if name not in arrays:
                arrays[name] = group.create_array(
                    name,
                    shape=(0,),
                    chunks=(CHUNK_ROWS,),
                    dtype=str if is_text else column.dtype,
                    dimension_names=("row",),
                )
            arrays[name].append(column)
        count += len(column)
    return count


def _write_csv(blocks: Iterator[Columns], path: Path) -> int:
    import pandas as pd

    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for block in blocks:
            table = pd.DataFrame(dict(block))
            table.to_csv(file, index=False, header=not count)
            count += len(table)
    return count


_WRITERS = {".parquet": _write_parquet, ".zarr": _write_zarr}
