"""Where a study's fits are watched: a tracker for each method, and the figures of its run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xarray import DataTree

from pyrobnn.callbacks import MLflowLogger, TensorBoardLogger, WandbLogger
from pyrobnn.callbacks.trackers import Tracker, needed
from pyrobnn.checks import check_choice

#: name on the command line → the tracker of one method in the folder of a study
TRACKERS: dict[str, Callable[[str, Path], Tracker]] = {
    "tensorboard": lambda name, out: TensorBoardLogger(out / "runs" / name),
    "mlflow": lambda name, out: MLflowLogger(
        f"sqlite:///{(out / 'mlflow.db').resolve().as_posix()}", run_name=name
    ),
    "wandb": lambda name, out: WandbLogger(directory=out / "wandb-runs" / name),
}
#: what looks at the records, by tracker
LOOK = {
    "tensorboard": "tensorboard --logdir {out}/runs",
    "mlflow": "mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db",
    "wandb": "wandb sync {out}/wandb-runs/*/wandb/offline-run-*",
}


class Watch:
    """A callback that hands a fit's numbers to a tracker, and its figures once it is done."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker
        self.step = 0

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step = step
        self.tracker(step, metrics)

    def figures(self, tree: DataTree, task: str) -> None:
        """Send those of a page about this run: of its predictions, and of its search or its chains."""
        from pyrobnn import plots

        names = ["reliability", "entropy_split"]
        if task == "regression":
            names = ["predicted_vs_observed", "residuals", "calibration"]
        names += ["trace", "rank"] if tree["posterior"].sizes["chain"] > 1 else ["loss"]
        for name in names:
            self.tracker.log_figure(name, getattr(plots, name)(tree), self.step)


def check_tracker(kind: str | None) -> None:
    """Refuse an unknown tracker, and one whose library is not installed.

    Raises:
        ValueError: the known ones.
        ImportError: how to install it.
    """
    if kind is None:
        return
    check_choice("tracker", kind, tuple(TRACKERS))
    library = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow.tracking", "wandb": "wandb"}[kind]
    requirement = {"tensorboard": "'pyrobnn[tracking]'", "mlflow": "mlflow", "wandb": "'pyrobnn[wandb]'"}[
        kind
    ]
    needed(library, f"--tracker {kind}", kind, requirement)


@contextlib.contextmanager
def watched(kind: str | None, name: str, out: Path) -> Iterator[Watch | None]:
    """The tracker of one method, open for its fit; None where none is asked for."""
    if kind is None:
        yield None
        return
    tracker = TRACKERS[kind](name, out)
    try:
        yield Watch(tracker)
    finally:
        tracker.close()
