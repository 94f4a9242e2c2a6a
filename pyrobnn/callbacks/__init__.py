"""What to do while a method runs: show progress, score held-out rows, log to a tracker, draw the predictive, stop.

A callback is any function ``callback(step, metrics) -> bool | None``. ``step`` counts the finished steps from 1,
``metrics`` maps names to what the method reports at this step (``"loss"`` for the gradient methods), and True asks
the method to stop; what it has reached by then is kept. Under ``"snapshot"`` a method puts a function
without arguments that returns the current :class:`~pyrobnn.Posterior`; it costs something only when called.

A callback that has a method ``end()`` is called by it when the run is over, however it ends. One that has served one
fit may serve the next: a step that is not larger than the last starts it anew.
"""

from __future__ import annotations

from pyrobnn.callbacks.live import LivePlot, Validation
from pyrobnn.callbacks.progress import Callback, EarlyStopping, ProgressBar, duration
from pyrobnn.callbacks.trackers import MLflowLogger, TensorBoardLogger, Tracker, WandbLogger

__all__ = [
    "Callback",
    "EarlyStopping",
    "LivePlot",
    "MLflowLogger",
    "ProgressBar",
    "TensorBoardLogger",
    "Tracker",
    "Validation",
    "WandbLogger",
    "duration",
]
