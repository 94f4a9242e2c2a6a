"""The loop of stochastic-gradient chains: warm-up with its choice of a step size, sampling, callbacks."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyrobnn.inference.fitting.problem import Callback, Problem
from pyrobnn.inference.fitting.snapshot import snapshot
from pyrobnn.inference.fitting.watch import COMPILING, Watch
from pyrobnn.inference.langevin.chain_step import (
    CHECK_EVERY,
    ChainStep,
    Run,
    batch_log_joint,
    chain_batches,
    check_chains,
    metric_at,
)
from pyrobnn.inference.langevin.plan import Plan
from pyrobnn.inference.langevin.step import State, StepSize, chooser_for
from pyrobnn.posterior import Posterior


def run_chains(
    config: Any,
    problem: Problem,
    z: Tensor,
    plan: Plan,
    callbacks: Sequence[Callback],
    progress: bool,
    seed: int = 0,
) -> Run:
    """Run the chains of ``config`` from ``z`` (chain, dim) through the steps of ``plan``.

    Raises:
        FloatingPointError: a chain that is no longer finite, or lost what its start had at every step size tried.
        KeyboardInterrupt: Ctrl-C before the first draw.
        ValueError: a callback stopped it before the first draw.
    """
    # at rest in their places, with momenta of the right temperature
    v = math.sqrt(config.temperature) * torch.randn_like(z)
    state, run = State(0, z, v, torch.zeros_like(z[0])), Run(z)
    watch = Watch(
        len(plan.controls), type(config).__name__, callbacks, progress,
        starting=COMPILING if config.compile else "", finished="num_draws", worth_keeping=run.usable,
    )  # fmt: skip
    started = time.perf_counter()
    with watch:
        _walk(config, problem, state, plan, watch, run, seed)
    run.stopped = watch.stopped
    run.finish(time.perf_counter() - started)
    return run


def _walk(config: Any, problem: Problem, state: State, plan: Plan, watch: Watch, run: Run, seed: int) -> None:
    """Take the steps of the plan and keep what it says."""
    batches = chain_batches(problem, config.num_chains, config.batch_size)
    control = plan.controls[0].to(state.z).clone()  # written at every step
    step = ChainStep(config, problem, control)
    chooser = chooser_for(config, problem) if config.step_size is None else None
    keep, num_steps = set(plan.keep.tolist()), len(plan.controls)
    report_every = max(1, num_steps // 100)
    while state.step < num_steps:
        run.step = k = state.step
        if chooser is not None and k in chooser.looks:
            if not bool(torch.isfinite(state.z).all()) and (back := chooser.restart()) is not None:
                state = back
                run.forget()
                continue
            log_joint = functools.partial(batch_log_joint, problem)
            chooser.look(state, metric_at(config, state), batches, log_joint)
        control.copy_(plan.controls[k])
        if chooser is not None:
            control[0] *= chooser.value
        run.step_size = float(plan.controls[0, 0]) * (1.0 if chooser is None else chooser.value)
        z, v, second, lp = step(next(batches), state.z, state.v, state.second)
        run.compile_seconds = step.seconds
        state = State(k + 1, z, v, second)
        last = state.step == num_steps
        if k % CHECK_EVERY == 0 or last:
            if (back := _checked(problem, chooser, state, lp, control)) is not None:
                state = back
                run.forget()
                continue
        if k in keep:
            run.keep(z, lp, control[0], v.square() / config.temperature)
        if k % report_every == 0 or last:
            run.losses.append(-lp.mean() / problem.num_rows)
            present = functools.partial(_snapshot, config, problem, run, state.z, seed)
            metrics = {"loss": float(run.losses[-1]), "snapshot": present}
            if watch.tell(k + 1, metrics) and not last:
                watch.stopped = "callback"
                return


def _snapshot(config: Any, problem: Problem, run: Run, z: Tensor, seed: int) -> Posterior:
    """The draws that were kept; before the first, where the chains are, z (chain, dim)."""
    draws = problem.density.constrain(torch.stack(run.kept or [z], 1))
    return snapshot(problem, config, draws, seed=seed, meta={"temperature": config.temperature})


def _checked(
    problem: Problem, chooser: StepSize | None, state: State, lp: Tensor, control: Tensor
) -> State | None:
    """The state to go back to, of chains that diverged; None where they may go on.

    Raises:
        FloatingPointError: a chain that is no longer finite, or diverged after every restart.
    """
    diverged = chooser if chooser is not None and chooser.diverged(state.z, lp) else None
    if diverged is not None and (back := diverged.restart()) is not None:
        return back
    done = state.step - 1
    check_chains(problem.density, state.z, lp, done, float(control[0]) * problem.num_rows)
    if diverged is not None:
        raise FloatingPointError(diverged.divergence_message(done, lp, problem.num_rows))
    return None
