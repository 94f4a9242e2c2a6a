"""Trackers: what a fit reports, and its figures, written to TensorBoard, MLflow or Weights & Biases.

None of them needs a server or an account: each writes to the disk.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

from pyrobnn.callbacks.progress import scalars

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
        """Write what is buffered and end the run; a ``with`` block does so by itself."""
        ...


class _Closing:
    """A ``with`` block that closes."""

    def close(self) -> None:
        """Write what is buffered and end the run; a ``with`` block does so by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TensorBoardLogger(_Closing):
    """Writes every scalar metric, and figures, to TensorBoard's event files: ``tensorboard --logdir LOG_DIR``.

    Args:
        log_dir: directory of this run; made when missing.

    Raises:
        ImportError: TensorBoard is not installed (the extra ``tracking``).
    """

    def __init__(self, log_dir: str | Path) -> None:
        library = needed("torch.utils.tensorboard", "TensorBoardLogger", "TensorBoard", "'pyrobnn[tracking]'")
        self.log_dir = Path(log_dir)
        self._writer = library.SummaryWriter(str(log_dir))

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Add the figure as an image, under a slider of steps."""
        self._writer.add_figure(name, figure, step, close=False)

    def close(self) -> None:  # noqa: D102
        self._writer.close()


class MLflowLogger(_Closing):
    """Writes every scalar metric, and figures as artifacts, to a run of MLflow: ``mlflow ui --backend-store-uri URI``.

    Args:
        uri: where runs are kept: a data base, the address of a tracking server (``"http://…"``), or a directory, which
            MLflow 3 takes only with ``MLFLOW_ALLOW_FILE_STORE=true`` in the environment.
        experiment: name under which runs are gathered; made when missing.
        run_name: of this run.
        client: an ``MlflowClient`` of one's own instead.

    Raises:
        ImportError: MLflow is not installed; no extra of this package, since it asks for an older protobuf than
            TensorBoard's.
    """

    def __init__(
        self,
        uri: str | Path = "sqlite:///mlflow.db",
        *,
        experiment: str = "pyrobnn",
        run_name: str | None = None,
        client: Any = None,
    ) -> None:
        artifacts = {}
        if client is None:
            library = needed("mlflow.tracking", "MLflowLogger", "MLflow", "mlflow")
            if str(uri).startswith(
                "sqlite:///"
            ):  # figures beside the data base, not in the working directory
                folder = Path(str(uri).removeprefix("sqlite:///")).resolve().parent / "mlruns"
                artifacts = {"artifact_location": folder.as_uri()}
            client = library.MlflowClient(str(uri) if ":" in str(uri) else Path(uri).resolve().as_uri())
        self._client = client
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment, **artifacts)
        state = random.getstate()  # MLflow draws a name from the global generator
        self.run_id: str = client.create_run(number, run_name=run_name).info.run_id
        random.setstate(state)

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Keep the figure as an artifact, ``NAME/STEP.png``."""
        self._client.log_figure(self.run_id, figure, f"{name}/{step:07d}.png")

    def close(self) -> None:  # noqa: D102
        self._client.set_terminated(self.run_id)


class WandbLogger(_Closing):
    """Writes every scalar metric, and figures as images, to a run of Weights & Biases.

    Offline nothing leaves the machine: ``wandb sync DIRECTORY/wandb/offline-run-…`` sends it later.

    Args:
        project: name under which runs are gathered.
        directory: where the run is kept.
        mode: ``"offline"``; ``"online"`` sends to the account of ``wandb login``.
        run: a run of one's own (``wandb.init(...)``) instead.

    Raises:
        ImportError: wandb is not installed (the extra ``wandb``).
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

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.log(scalars(metrics), step=step)

    def log_figure(self, name: str, figure: Figure, step: int) -> None:
        """Add the figure as an image of the step."""
        self.run.log({name: self._library.Image(rendered(figure))}, step=step)

    def close(self) -> None:  # noqa: D102
        self.run.finish()


def rendered(figure: Figure) -> Image:
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
