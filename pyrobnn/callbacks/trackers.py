"""Trackers: what a fit reports, and its figures, written to TensorBoard, MLflow or Weights & Biases.

None of them needs a server or an account: each writes to the disk.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

from pyrobnn.callbacks.protocol import scalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


@runtime_checkable
class Tracker(Protocol):
    """A callback that also takes figures; what a live plot draws goes to the trackers it is given."""

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """Record the scalar metrics of a step."""
        ...

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Record a figure that was drawn at a step."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class _Logger:
    """What the trackers share: numbers from metrics, and a ``with`` block that closes."""

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._log(scalars(metrics), step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Write what is buffered and end the run; a ``with`` block does so by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardLogger(_Logger):
    """Writes every scalar metric, and figures, to TensorBoard's event files.

    Look at them with ``tensorboard --logdir LOG_DIR``. Needs the extra ``tracking``.

    Args:
        log_dir: directory of this run; made when missing.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        writer = needed("torch.utils.tensorboard", "TensorBoardLogger", "TensorBoard", "'pyrobnn[tracking]'")
        self.log_dir = Path(log_dir)
        self._writer = writer.SummaryWriter(str(log_dir))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Add the figure as an image, under a slider of steps."""
        self._writer.add_figure(name, figure, step, close=False)

    def close(self) -> None:
        """Write what is buffered and close the file; a ``with`` block does so by itself."""
        self._writer.close()


class MLflowLogger(_Logger):
    """Writes every scalar metric, and figures as artifacts, to a run of MLflow.

    Look at them with ``mlflow ui --backend-store-uri URI``. Needs ``pip install mlflow``, no extra of this package:
    MLflow asks for an older protobuf than TensorBoard's.

    Args:
        uri: where runs are kept: a data base, the address of a tracking server (``"http://…"``), or a directory, which
            MLflow 3 takes only with ``MLFLOW_ALLOW_FILE_STORE=true`` in the environment.
        experiment: name under which runs are gathered; made when missing.
        run_name: of this run.
        client: an ``MlflowClient`` of one's own instead.

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(
        self,
        uri: str | Path = "sqlite:///mlflow.db",
        *,
        experiment: str = "pyrobnn",
        run_name: str | None = None,
        client: Any = None,
    ) -> None:
        place = {} if client is not None else _beside(uri)
        if client is None:
            library = needed("mlflow.tracking", "MLflowLogger", "MLflow", "mlflow")
            local = ":" not in str(uri)
            client = library.MlflowClient(Path(uri).resolve().as_uri() if local else str(uri))
        self._client = client
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment, **place)
        state = random.getstate()  # MLflow draws a name from the global generator
        self.run_id: str = client.create_run(number, run_name=run_name).info.run_id
        random.setstate(state)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Keep the figure as an artifact, ``NAME/STEP.png``."""
        self._client.log_figure(self.run_id, figure, f"{name}/{step:07d}.png")

    def close(self) -> None:
        """Mark the run as finished; a ``with`` block does so by itself."""
        self._client.set_terminated(self.run_id)


def _beside(uri: str | Path) -> dict[str, str]:
    """Where figures go: beside a data base of this machine, not to the folder that the process happens to be in."""
    path = str(uri).removeprefix("sqlite:///")
    return (
        {} if path == str(uri) else {"artifact_location": (Path(path).resolve().parent / "mlruns").as_uri()}
    )


class WandbLogger(_Logger):
    """Writes every scalar metric, and figures as images, to a run of Weights & Biases.

    Offline nothing leaves the machine: ``wandb sync DIRECTORY/wandb/offline-run-…`` sends it later. Needs the extra
    ``wandb``.

    Args:
        project: name under which runs are gathered.
        directory: where the run is kept.
        mode: ``"offline"``; ``"online"`` sends to the account of ``wandb login``.
        run: a run of one's own (``wandb.init(...)``) instead.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self,
        project: str = "pyrobnn",
        *,
        directory: str | Path = ".",
        mode: str = "offline",
        run: Any = None,
    ) -> None:
        self._library = needed("wandb", "WandbLogger", "wandb", "'pyrobnn[wandb]'")
        if run is None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            run = self._library.init(project=project, dir=str(directory), mode=mode)
        self.run = run

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Add the figure as an image of the step."""
        self.run.log({name: self._library.Image(picture(figure))}, step=step)

    def close(self) -> None:
        """Finish the run; a ``with`` block does so by itself."""
        self.run.finish()


def picture(figure: Figure) -> Image:
    """A figure as an image, from a canvas of its own: the user's stays as it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image as images

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return images.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def needed(module: str, who: str, library: str, requirement: str) -> Any:
    """A library that is no requirement of the package, imported.

    Raises:
        ImportError: how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{who} needs {library}: install it with  pip install {requirement}") from error
