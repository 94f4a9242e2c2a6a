"""What the host does while the HMC machine runs: progress, callbacks, and the test for enough draws."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyrobnn.callbacks import duration
from pyrobnn.core.chains import RHAT_LIMIT, ess
from pyrobnn.density.gradient import at_each
from pyrobnn.inference.fitting.floats import in_program_dtype
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.hmc.checkpoint import DrawFile
from pyrobnn.inference.hmc.converged import MIN_ESS, check_convergence
from pyrobnn.inference.hmc.run import Draws, Progress

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.nuts import NUTS
    from pyrobnn.posterior import Posterior

_NUM_PROBES = 16


class Hooks:
    """What happens when the host looks at a run: progress, callbacks, and the test for enough draws."""

    def __init__(
        self, problem: Problem, file: DrawFile | None, run: FitRun, num_warmup: int, config: NUTS
    ) -> None:
        self._problem, self._file, self._run, self._config = problem, file, run, config
        self.watch = Watch(
            run.num_draws + num_warmup,
            "NUTS",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=COMPILING if config.compile else "looking for a step size",
            metrics=("step_size", "tree_depth", "divergences"),
        )
        self._reported, self._num_warmup = -1, num_warmup
        self._began: tuple[float, int] | None = None  # when the leapfrogs began, and after how many
        self._stopped, self._started = "num_draws", time.monotonic()
        self._prepared: float | None = None  # when the step was compiled, in seconds since the start
        limit = config.max_seconds
        self.compile_until = None if limit is None else self._started + 0.5 * limit
        # how often it was tested whether the draws are enough, and the last answer
        self._checks, self._found = 0, ""
        waits = run.until_ess is not None or config.until is not None
        self.enough: Callable[[Draws], bool] | None = self._enough if waits else None
        self.look = self._look if self.watch.active or config.max_seconds else None

    def end(self, result: Draws) -> str:
        """Why the run ended, as ``meta["stopped"]`` has it; a bar that is not full says it too."""
        stopped = self._stopped if result.stats.shape[1] < self._run.num_draws else "num_draws"
        self.watch.stopped = "interrupt" if result.interrupted else stopped
        return self.watch.stopped

    def _look(self, look: Progress) -> bool:
        if self._report(look):
            return True
        limit = self._config.max_seconds
        if limit is None:
            return False
        spent = time.monotonic() - self._started
        self._prepared = spent if self._prepared is None else self._prepared
        if look.phase == "warm-up":  # the draws have the other half of what the compile left
            limit = 0.5 * (limit + self._prepared)
        if spent < limit:
            return False
        self._stopped = "max_seconds"
        return True

    def _report(self, look: Progress) -> bool:
        """Bar and callbacks, wherever another transition is done; True if a callback asks to stop."""
        warming = look.phase == "warm-up"
        if warming and look.wanted > self._num_warmup:
            self._num_warmup = look.wanted
            why = f"the warm-up goes on to {look.wanted} transitions: {look.unfinished}"
            self.watch.extend(self._run.num_draws + look.wanted, why)
        done = look.draws if warming else look.draws + self._num_warmup
        if self._began is None or look.steps < self._began[1]:
            self._began = time.monotonic(), look.steps
            self._describe_start(look, done)
            return False
        if done == 0:
            self._describe_start(look, done)
        if done <= self._reported:
            return False
        self._reported = done
        metrics = {name: getattr(look, name) for name in ("step_size", "tree_depth", "divergences", "draws")}
        if done:
            self.watch.show(done, metrics | {"phase": self._phase(look)})
        present = partial(self._snapshot, look)
        stop = self.watch.ask(look.steps, metrics | {"phase": look.phase, "snapshot": present})
        if stop and (warming or not look.draws):
            raise ValueError(
                f"a callback stopped the run at step {look.steps}, before the first draw was kept"
            )
        self._stopped = "callback" if stop else self._stopped
        return stop

    def _snapshot(self, look: Progress) -> Posterior:
        """The draws so far; in the warm-up, and while they go to a file, those that are in memory."""
        draws = in_program_dtype(self._problem.density, look.positions())
        return snapshot(self._problem, self._config, draws, seed=self._run.seed)

    def _phase(self, look: Progress) -> str:
        if look.phase == "warm-up":
            return f"warm-up {look.draws} of {look.wanted}"
        if self.enough is None:
            return "sampling"
        if not self._checks:
            return "sampling until enough, or the end"
        return f"sampling until enough, look {self._checks}: {self._found}"

    def _describe_start(self, look: Progress, done: int) -> None:
        """The phase before the first transition; from the first leapfrogs on how long the run takes at least."""
        if self._began is None:
            return
        began, before = self._began
        least = ""
        if (steps := look.steps - before) > 0:
            # the chains have made less than one transition each, on average
            seconds = (time.monotonic() - began) * (self._run.num_draws + self._num_warmup - done)
            least = (
                f", {steps} leapfrogs without a transition: at least {duration(seconds)} left at this rate"
            )
        self.watch.say(self._phase(look) + least)

    def _enough(self, result: Draws) -> bool:
        draws = by_site(self._problem, self._file, result)
        self._checks += 1
        if self._config.until is not None:
            far = check_convergence(self._problem, draws, result.stats)
            least = self._run.until_ess or MIN_ESS
            enough, why, worth = far.enough(least), "converged", far.ess
            self._found = f"R-hat {far.rhat:.3f} of {RHAT_LIMIT}, "
        else:
            worth, least = slowest_ess(self._problem, draws), self._run.until_ess or math.inf
            enough, why, self._found = worth >= least, "until_ess", ""
        self._found += f"ESS {worth:.0f} of {least:.0f}"
        self._stopped = why if enough else self._stopped
        return enough


def slowest_ess(problem: Problem, draws: Mapping[str, Tensor]) -> float:
    """Bulk ESS of the slowest function value at 16 inputs (for a plain program: of the slowest site value)."""
    if problem.is_bnn:
        rows = torch.linspace(0, len(problem.x) - 1, min(_NUM_PROBES, len(problem.x))).long()
        x = problem.x[rows.to(problem.x.device)]
        function = partial(at_each, lambda params: problem.bnn.forward(params, x))
        num_chains, num_draws = next(iter(draws.values())).shape[:2]
        blocks = [  # a block at a time: the draws may be on disk
            function({name: value[chain, start : start + 256].to(x.device) for name, value in draws.items()})
            for chain in range(num_chains)
            for start in range(0, num_draws, 256)
        ]
        values = torch.cat(blocks).reshape(num_chains, num_draws, -1)
    else:
        values = torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)
    return float(ess(values.detach().movedim(2, 0).double().cpu().numpy()).min())


def by_site(problem: Problem, file: DrawFile | None, result: Draws) -> dict[str, Tensor]:
    """Constrained draws, site → (chain, draw, …)."""
    if file is not None:
        return file.draws(result.stats.shape[1])
    return in_program_dtype(problem.density, result.positions)
