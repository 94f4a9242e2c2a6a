"""A fitted posterior as a model of MLflow; needs ``pip install 'pyrobnn[mlflow]'``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pandas as pd
import torch
from mlflow.models import infer_signature
from mlflow.pyfunc import PythonModel, PythonModelContext
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import as_tensor
from pyrobnn.posterior.exported_reader import Exported

if TYPE_CHECKING:
    from pyrobnn.diagnostics import Verdict
    from pyrobnn.posterior import Posterior

#: the name of the exported posterior among the model's artifacts
ARTIFACT = "posterior"


class ServedPosterior(PythonModel):
    """What MLflow loads and serves: inputs (n, …) → a table of what is predicted, one row each.

    The columns are the outputs of :meth:`pyrobnn.Posterior.export`, with ``_0``, ``_1``, … where there are several
    values a row: ``mean``, ``sd``, ``aleatoric_sd``, ``epistemic_sd``, ``q0.025``, …, or ``probs_0``, …; ``outside``.
    """

    exported: Exported

    def load_context(self, context: PythonModelContext) -> None:
        """Read the posterior from the model's folder."""
        self.exported = Exported(context.artifacts[ARTIFACT])

    # MLflow reads the types of arguments as a schema, and has none for arrays
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """The table of ``model_input``, an array or a DataFrame."""
        outputs = self.exported(torch.from_numpy(np.array(model_input)))
        return pd.DataFrame(_columns(outputs, self.exported.meta["quantile_levels"]))


def _columns(outputs: Mapping[str, Tensor], levels: Sequence[float]) -> dict[str, np.ndarray]:
    """Predictions as columns (row,): ``mean``, of several outputs ``mean_0`` …; quantiles by level, ``q0.025``."""
    columns: dict[str, np.ndarray] = {}
    for name, values in outputs.items():
        if name == "quantiles":
            for place, level in enumerate(levels):
                columns |= _columns({f"q{level:g}": values[..., place]}, ())
        elif values.dim() == 1 or values.shape[1] == 1:
            columns[name] = values.reshape(-1).numpy()
        else:
            for output in range(values.shape[1]):
                columns[f"{name}_{output}"] = values[:, output].numpy()
    return columns


def log_model(
    posterior: Posterior,
    name: str = "model",
    *,
    x: Tensor | DataLoader | None = None,
    verdict: Verdict | None = None,
    example: Tensor | np.ndarray | None = None,
    num_draws: int | None = None,
    quantiles: Sequence[float] = (0.025, 0.5, 0.975),
    **options: Any,
) -> Any:
    """Log what a posterior predicts as a model of the active MLflow run: signature, example, verdict.

    The model holds the file of :meth:`pyrobnn.Posterior.export`, so no row of data; an ``example`` is written as it is.
    ``mlflow.pyfunc.load_model(uri).predict(x)`` and ``mlflow models serve`` answer with a table, see
    :class:`ServedPosterior`. The verdict is in the metadata of the model and in the tags ``pyrobnn.draws`` and
    ``pyrobnn.model`` of the run, where one is active.

    Args:
        posterior: of a :class:`pyrobnn.BNN`.
        name: of the model.
        x, verdict, num_draws, quantiles: as of :meth:`pyrobnn.Posterior.export`.
        example: one or more rows of inputs (n, …) to keep with the model and take the signature from; default a row of
            zeros.
        **options: of ``mlflow.pyfunc.log_model``, ``registered_model_name``, say; ``pip_requirements`` are this library
            and torch.

    Returns:
        MLflow's ``ModelInfo``.

    Raises:
        TypeError, ValueError, Refused: as :meth:`pyrobnn.Posterior.export`.
    """
    with TemporaryDirectory() as folder:
        file = posterior.export(
            Path(folder, f"{ARTIFACT}.pt2"),
            num_draws=num_draws,
            quantiles=quantiles,
            x=x,
            verdict=verdict,
        )
        exported = Exported(file)
        rows = _example(exported, example)
        outputs = _columns(exported(torch.from_numpy(rows)), exported.meta["quantile_levels"])
        judgement = exported.meta["verdict"]
        facts = {
            key: exported.meta[key] for key in ("method", "likelihood", "num_data", "thinning")
        }
        answers = {} if judgement is None else {key: judgement[key] for key in ("draws", "model")}
        versions = {package: metadata.version(package) for package in ("pyrobnn", "torch")}
        requirements = [*map("==".join, versions.items()), "mlflow-skinny"]
        with warnings.catch_warnings():
            # it advises types that arrays do not have
            warnings.filterwarnings("ignore", message=".*[Tt]ype hint", category=UserWarning)
            info = mlflow.pyfunc.log_model(
                name=name,
                python_model=ServedPosterior(),
                artifacts={ARTIFACT: str(file)},
                signature=infer_signature(rows, pd.DataFrame(outputs)),
                input_example=rows,
                metadata={"pyrobnn": facts, "verdict": answers},
                **{"pip_requirements": requirements, **options},
            )
        if mlflow.active_run() is not None:
            mlflow.set_tags({f"pyrobnn.{key}": value for key, value in answers.items()})
        return info


def _example(exported: Exported, example: Tensor | np.ndarray | None) -> np.ndarray:
    """Rows of inputs in the type that the file takes."""
    described = exported.meta["input"]
    dtype = getattr(torch, described["dtype"])
    if example is None:
        return torch.zeros(1, *described["shape"][1:], dtype=dtype).numpy()
    return as_tensor("example", example).to(dtype).numpy()
