"""What the host does while the HMC machine runs: progress, callbacks, and whether the run may end."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from pyrobnn.core.chains import RHAT_LIMIT
from pyrobnn.inference.fitting.problem import Problem, snapshot
from pyrobnn.inference.fitting.shares import Shares
from pyrobnn.inference.fitting.watch import TRACING, Watch
from pyrobnn.inference.hmc.chain_convergence import MIN_ESS, check_convergence, judged_net
from pyrobnn.inference.hmc.run import Draws, Progress
from pyrobnn.inference.hmc.windows import MIN_TRANSITIONS
from pyrobnn.model.compile.forecast import Compile

if TYPE_CHECKING:
    from pyrobnn.inference.method import FitRun
    from pyrobnn.inference.nuts import NUTS
    from pyrobnn.posterior import Posterior

#: seconds between two looks at a run that only a bar or a clock follows, and of the time that it may take the share: a
#: look costs as much as some leapfrogs
_PAUSE = 0.05
_PAUSE_SHARE = 0.01
#: draws per chain up to which a run that waits for convergence goes on
MOST_DRAWS = 10_000


class Hooks:
    """What happens when the host looks at a run: the test for convergence, and the time that it may take."""

    def __init__(
        self,
        problem: Problem,
        run: FitRun,
        num_warmup: int,
        config: NUTS,
        shares: Shares | None = None,
    ) -> None:
        self._problem = problem
        self._shares = shares
        self._num_draws = run.num_draws
        self._report = _Report(run, num_warmup, config.compile)
        self.watch = self._report.watch
        self._snapshot = partial(_snapshot, config=config, seed=run.seed)
        self._stopped = "num_draws"
        self._converging = ""  # how far the chains have converged, in words
        self._ends = time.monotonic() + (config.max_seconds or float("inf"))
        self._halfway = 0.0
        self.enough = None if config.until is None else self._enough
        self.look = self._look if self.watch.active or config.max_seconds else None
        # what callbacks see, and what ranks do together, does not depend on a clock
        self.pause = 0.0
        if not run.callbacks and shares is None:
            self.pause = min(_PAUSE, _PAUSE_SHARE * (config.max_seconds or float("inf")))
        if shares is not None:
            self.look = self._look_together

    def begin_again(self, problem: Problem, why: str) -> None:
        """The run begins anew, in float64."""
        self._problem = problem
        self._report.begin_again(why)

    def end(self, result: Draws) -> str:
        """Why the run ended, as ``meta["stopped"]`` has it; a bar that is not full says it too."""
        stopped = self._stopped if result.stats.shape[1] < self._num_draws else "num_draws"
        self.watch.stopped = "interrupt" if result.interrupted else stopped
        return self.watch.stopped

    def _look(self, progress: Progress) -> bool:
        present = partial(self._snapshot, self._problem, progress)
        if self._report.show(progress, self._converging, present):
            self._stopped = "callback"
            return True
        now = time.monotonic()
        may_begin_draws = progress.phase == "warm-up" and progress.latest >= MIN_TRANSITIONS
        if not self._halfway:  # at the first look: the step is compiled
            self._halfway = 0.5 * (now + self._ends)
        spent = now >= (self._halfway if may_begin_draws else self._ends)
        self._stopped = "max_seconds" if spent else self._stopped
        return spent

    def _look_together(self, progress: Progress) -> bool:
        """The look of rank 0, whose answer all ranks have; their chains must be the same."""
        shares = cast(Shares, self._shares)
        shares.check_state(progress.positions())
        answer: tuple[bool, str] | Exception = (False, self._stopped)
        if shares.ranks.rank == 0:
            try:
                answer = (self._look(progress), self._stopped)
            except Exception as error:  # raised on all ranks
                answer = error
        stop, self._stopped = cast("tuple[bool, str]", shares.ranks.from_first(answer))
        return stop

    def _enough(self, result: Draws) -> bool:
        draws = self._problem.density.constrain(result.z)
        convergence = check_convergence(judged_net(self._problem), draws, result.stats)
        rhat = f"R-hat {convergence.rhat:.3f} of {RHAT_LIMIT}"
        self._converging = f" until converged: {rhat}, ESS {convergence.ess:.0f} of {MIN_ESS:.0f}"
        if convergence.enough:
            self._stopped = "converged"
        return convergence.enough


class _Report:
    """The bar and the callbacks of a run."""

    def __init__(
        self,
        run: FitRun,
        num_warmup: int,
        compiles: Compile,
    ) -> None:
        self._num_draws = run.num_draws
        self._num_warmup = num_warmup
        # transitions that the bar shows; -1: nothing said yet; 0: the phase has been said
        self._reported = -1
        self.watch = Watch(
            run.num_draws + num_warmup,
            "NUTS",
            run.callbacks,
            run.progress,
            finished="num_draws",
            starting=TRACING,
            metrics=("step_size", "tree_depth", "divergences"),
        )

    def begin_again(self, why: str) -> None:
        """The bar says that the run goes on in float64, and counts from zero."""
        self._reported = -1
        self.watch.restart(f"the run goes on in float64: {why}")

    def show(
        self,
        progress: Progress,
        converging: str,
        present: Callable[[], Posterior],
    ) -> bool:
        """Bar and callbacks, wherever another transition is done; True if a callback asks to stop."""
        warming = progress.phase == "warm-up"
        if warming:
            self._extend_warmup(progress)
            done = progress.draws
            phase = f"warm-up {progress.draws} of {progress.wanted}"
        else:
            done = progress.draws + self._num_warmup
            phase = f"sampling{converging}"
        if self._reported < 0:
            self.watch.say(phase)
        if done <= max(self._reported, 0):
            self._reported = max(self._reported, 0)
            return False
        self._reported = done
        metrics = {
            "step_size": progress.step_size,
            "tree_depth": progress.tree_depth,
            "divergences": progress.divergences,
            "draws": progress.draws,
        }
        self.watch.show(done, metrics | {"phase": phase})
        stop = self.watch.ask(
            progress.steps, metrics | {"phase": progress.phase, "snapshot": present}
        )
        if stop and (warming or not progress.draws):
            raise ValueError(
                f"a callback stopped the run at step {progress.steps}, before the first draw was kept"
            )
        return stop

    def _extend_warmup(self, progress: Progress) -> None:
        """Where the warm-up goes on for longer than planned, the bar says so."""
        if progress.wanted > self._num_warmup:
            self._num_warmup = progress.wanted
            why = f"the warm-up goes on to {progress.wanted} transitions: {progress.unfinished}"
            self.watch.extend(self._num_draws + progress.wanted, why)


def _snapshot(
    problem: Problem,
    progress: Progress,
    config: NUTS,
    seed: int,
) -> Posterior:
    """The posterior of the draws that there are, or of where the chains are."""
    return snapshot(
        problem,
        config,
        problem.density.constrain(progress.positions()),
        seed=seed,
    )
