"""Where a study's fits are watched: a tracker and a live figure for each method, and the figures of its run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xarray import DataTree

from pyrobnn.callbacks import LivePlot, MLflowLogger, TensorBoardLogger, WandbLogger
from pyrobnn.callbacks.trackers import Tracker, needed
from pyrobnn.checks import check_choice
from pyrobnn.data import Dataset

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
#: steps between two drawings of a live figure, at the least, and the largest share of the CPU time that they may take
EVERY = 100
SHARE = 0.1


class Watch:
    """A callback that hands a fit's numbers to a tracker, and its figures once it is done; it draws a live figure."""

    def __init__(self, tracker: Tracker | None, live: LivePlot | None):
        self.tracker, self.live = tracker, live
        self.step = 0
        self._started, self._drawing = time.process_time(), 0.0

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step = step
        if self.tracker is not None:
            self.tracker(step, metrics)
        now = time.process_time()
        # NUTS reports every few leapfrogs: a drawing each time would cost more than the chains
        if self.live is not None and self._drawing <= SHARE * (now - self._started):
            self.live(step, metrics)
            self._drawing += time.process_time() - now

    def end(self) -> None:
        """Write the animation, at the end of a fit, however it ends."""
        if self.live is not None:
            self.live.end()

    def figures(self, tree: DataTree, task: str) -> None:
        """Send those of a page about this run: of its predictions, and of its search or its chains."""
        if self.tracker is None:
            return
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


def check_live(train: Dataset) -> None:
    """Refuse a live figure of data that it cannot draw.

    Raises:
        ValueError: what the data are.
    """
    if train.task != "regression" or train.x.ndim != 2 or train.x.shape[1] != 1:
        raise ValueError(
            f"--live draws a regression on one input; {train.name} is a {train.task} with inputs of shape "
            f"{tuple(train.x.shape[1:])}: leave it out, --tracker shows the numbers of any fit"
        )


@contextlib.contextmanager
def watched(kind: str | None, name: str, out: Path, drawn: Dataset | None = None) -> Iterator[Watch | None]:
    """The tracker of one method, open for its fit, and its live figure; None where neither is asked for.

    Args:
        kind: of the tracker.
        name, out: of the method and of the study's folder.
        drawn: the data of a live figure, which goes to the tracker and, when the fit ends, to ``out/<name>.gif``.
    """
    if kind is None and drawn is None:
        yield None
        return
    tracker = None if kind is None else TRACKERS[kind](name, out)
    live = None
    if drawn is not None:
        to = () if tracker is None else (tracker,)
        live = LivePlot(drawn.x, drawn.y, every=EVERY, gif=out / f"{name}.gif", trackers=to)
    try:
        yield Watch(tracker, live)
    finally:
        if tracker is not None:
            tracker.close()
