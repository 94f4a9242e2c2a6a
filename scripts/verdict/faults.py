"""The study's kinds of cases: healthy posteriors, and planted faults with the checks that are there to see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from scipy import stats
from verdict.exact_cases import HELD_OUT, Case
from verdict.wrong_copies import (
    blocks,
    copied,
    delayed,
    drawn_again,
    few_with_noise,
    jittered,
    opposite,
    shuffled_with_noise,
)
from verdict.wrong_data import (
    a_fifth_is_train,
    changed,
    collinear,
    dependent,
    doubled,
    grouped,
    paired,
    renoised,
    swallowed,
    test_is_nearly_train,
    test_is_train,
    without_an_input,
)
from verdict.wrong_distribution import (
    at_the_mode,
    cut_on_one_side,
    marginals,
    moved,
    of_the_prior,
    other_data,
    other_inputs,
    shaped,
    spread,
    swinging,
    without_tails,
)
from verdict.wrong_mixing import (
    by_density,
    dealt,
    one_far_draw,
    one_slow_weight,
    stuck,
    wider_later,
)
from verdict.wrong_tree import (
    PREDICTED,
    of_other_rows,
    remade,
    throughout,
    times,
    widened,
    without_noise,
)


@dataclass(frozen=True)
class Fault:
    """How the draws, the data or the tree of a case are spoiled, and the checks that are there to see it."""

    draws: Callable[[Case], np.ndarray] = Case.draws
    data: Callable[[Case], None] | None = None
    iid: bool = False
    tree: Callable[[Case, xr.DataTree], None] | None = None
    checks: tuple[str, ...] = ()


HEALTHY = {
    "independent chains": Fault(),
    "correlated chains": Fault(lambda case: case.draws(correlation=0.2)),
    "a fitted normal": Fault(iid=True),
    "a column twice": Fault(data=doubled),
    "two outputs": Fault(data=paired(0.0)),
}
VIRIAL = ("virial",)
SCORE = ("score",)
RHAT = ("rhat_function",)
SHAPE = ("density_moves",)
CALIBRATION = ("pit", "loo_pit")
LIKELIHOOD = ("log_likelihood",)
SICK = {
    "sd x 0.5": Fault(spread(0.5), checks=VIRIAL),
    "sd x 2": Fault(spread(2.0), checks=VIRIAL),
    "mean off by 1 sd": Fault(moved(1.0), checks=SCORE),
    "mean off by 3 sd": Fault(moved(3.0), checks=SCORE),
    "one weight off by 3 sd": Fault(moved(3.0, weights=slice(1)), checks=SCORE),
    "data counted twice": Fault(lambda case: case.draws(count=2.0), checks=VIRIAL),
    "data counted ten times": Fault(lambda case: case.draws(count=10.0), checks=VIRIAL),
    "noise taken for half of it": Fault(lambda case: case.draws(count=4.0), checks=VIRIAL),
    "tempered to 0.5": Fault(spread(np.sqrt(0.5)), checks=VIRIAL),
    "targets permuted": Fault(
        lambda case: replace(case, y=case.rng.permutation(case.y)).draws(), checks=SCORE
    ),
    "no bias": Fault(
        lambda case: case.draws() * (np.arange(len(case.sd)) < len(case.sd) - 1),
        checks=("virial", "score"),
    ),
    "a chain of other data": Fault(other_data, checks=RHAT),
    "a chain that never moved": Fault(stuck, checks=("moving", "rhat_function")),
    "a chain in another mode": Fault(moved(4.0, slice(1)), checks=("rhat_function",)),
    "half of the chains 1 sd away": Fault(moved(1.0, slice(2)), checks=RHAT),
    "chains that are copies": Fault(copied, checks=("copied_chains",)),
    "chains that are nearly copies": Fault(
        lambda case: copied(case) + 1e-6 * case.rng.normal(size=(*case.shape, len(case.sd))),
        checks=("copied_chains",),
    ),
    "draws from 150 distinct ones": Fault(
        lambda case: case.draws().reshape(-1, len(case.sd))[
            case.rng.integers(0, 150, size=case.shape)
        ],
        checks=("repeated_draws",),
    ),
    "every draw twice": Fault(
        lambda case: np.repeat(
            case.draws()[:, : case.shape[1] // 2],
            2,
            axis=1,
        ),
        checks=("moving",),
    ),
    "all chains at one point": Fault(
        lambda case: (
            case.exact()[0] + 1e-3 * case.sd * case.rng.normal(size=(*case.shape, len(case.sd)))
        ),
        checks=VIRIAL,
    ),
    "chains that mirror each other": Fault(opposite, checks=("copied_chains",)),
    "chains that follow one another": Fault(delayed, checks=("repeated_draws",)),
    "half of the draws from the prior": Fault(of_the_prior(0.5), checks=VIRIAL),
    "the posterior of other data": Fault(
        lambda case: replace(
            case,
            y=case.x @ case.rng.normal(size=case.x.shape[1])
            + case.noise * case.rng.normal(size=len(case.y)),
        ).draws(),
        checks=SCORE,
    ),
    "the posterior of half the data": Fault(
        lambda case: replace(
            case,
            x=case.x[: len(case.x) // 2],
            y=case.y[: len(case.x) // 2],
        ).draws(),
        checks=VIRIAL,
    ),
    "draws drawn again": Fault(drawn_again, checks=("moving",)),
    "chains with a trend": Fault(
        lambda case: case.draws() + np.linspace(-2, 2, case.shape[1])[:, None] * case.sd,
        checks=RHAT,
    ),
    "warm-up kept": Fault(moved(10.0, slice(None), slice(40)), checks=("ess_function",)),
    "slow chains": Fault(lambda case: case.draws(correlation=0.99), checks=("ess_function",)),
    "mean field on collinear inputs": Fault(
        marginals,
        collinear,
        iid=True,
        checks=("importance",),
    ),
    "a normal of half the sd": Fault(
        spread(0.5),
        iid=True,
        checks=("importance", "virial"),
    ),
    "test rows are training rows": Fault(data=test_is_train, checks=("held_out_rows",)),
    "test rows are training rows, rounded": Fault(
        data=test_is_nearly_train, checks=("held_out_rows",)
    ),
    "log-likelihood of other rows": Fault(
        tree=remade("log_likelihood", lambda c, y: y[..., c.rng.permutation(y.shape[-1])]),
        checks=LIKELIHOOD,
    ),
    "log-likelihood of the other sign": Fault(tree=times(-1.0), checks=LIKELIHOOD),
    "a sine in the noise": Fault(data=swallowed(lambda x: np.sin(3 * x)), checks=("pattern",)),
    "a square in the noise": Fault(data=swallowed(np.square), checks=("pattern",)),
    "noise twice the model's": Fault(
        data=renoised(lambda c, x: 2.2 * c.rng.normal(size=len(x))), checks=CALIBRATION
    ),
    "noise that grows with an input": Fault(
        data=renoised(lambda c, x: np.exp(0.8 * x - 0.64) * c.rng.normal(size=len(x))),
        checks=("coverage_by_region",),
    ),
    "noise with heavy tails": Fault(
        data=renoised(lambda c, x: 2.0 * c.rng.standard_t(1.5, size=len(x))), checks=CALIBRATION
    ),
    "draws rounded to one sd": Fault(lambda case: np.round(case.draws() / case.sd) * case.sd),
    "log-likelihood times three": Fault(tree=times(3.0), checks=LIKELIHOOD),
    "log-likelihood times three throughout": Fault(tree=throughout(3.0), checks=LIKELIHOOD),
    "log-likelihood halved throughout": Fault(tree=throughout(0.5), checks=LIKELIHOOD),
    "chains sorted": Fault(lambda case: np.sort(case.draws(), axis=1), checks=RHAT),
    "weights shuffled apart": Fault(
        lambda case: case.rng.permuted(case.draws().reshape(-1, len(case.sd)), axis=0).reshape(
            *case.shape, -1
        ),
        collinear,
        checks=("virial", "score"),
    ),
    "one chain with little noise as all": Fault(jittered(0.1), checks=("copied_chains",)),
    "one chain with noise as all": Fault(jittered(0.5), checks=("copied_chains", "virial")),
    "slow chains dealt into one another": Fault(dealt, checks=("ess_function", "score", "virial")),
    "two places shuffled": Fault(
        lambda case: case.draws() + 4.0 * case.sd * (case.rng.random(case.shape) < 0.5)[..., None],
        checks=VIRIAL,
    ),
    "without its tails": Fault(without_tails, checks=VIRIAL),
    "of targets in other units": Fault(
        lambda case: replace(case, y=1.5 * case.y).draws(), checks=SCORE
    ),
    "of inputs that were moved": Fault(
        lambda case: replace(case, x=case.x + 0.5).draws(), checks=SCORE
    ),
    "a fifth of the test rows are training rows": Fault(
        data=a_fifth_is_train, checks=("held_out_rows",)
    ),
    "test targets that have moved": Fault(
        data=changed("y_test", lambda c: c.y_test + 1.5 * c.noise), checks=("pit",)
    ),
    "predictions without noise": Fault(tree=without_noise, checks=("pit",)),
    "a weight of one chain 1 sd away": Fault(
        moved(
            1.0,
            slice(1),
            weights=slice(1),
            correlation=0.2,
        ),
        checks=RHAT,
    ),
    "every ten draws twice": Fault(blocks, checks=("repeated_draws",)),
    "half of the draws at the mode": Fault(at_the_mode(0.0), checks=("repeated_draws", "virial")),
    "half of the draws near the mode": Fault(at_the_mode(0.01), checks=VIRIAL),
    "tempered to 2": Fault(spread(np.sqrt(2.0)), checks=VIRIAL),
    "noise taken for twice of it": Fault(lambda case: case.draws(count=0.25), checks=VIRIAL),
    "of a prior a tenth as wide": Fault(lambda case: case.draws(prior=0.1), checks=SCORE),
    "a tenth of the draws of the other sign": Fault(
        lambda case: (
            case.draws(correlation=0.2)
            * np.where(case.rng.random(case.shape) < 0.1, -1.0, 1.0)[..., None]
        ),
        checks=VIRIAL,
    ),
    "a tenth of the draws from the prior": Fault(of_the_prior(0.1), checks=VIRIAL),
    "cut off at 1.5 sd": Fault(
        shaped(
            lambda rng, shape: stats.truncnorm.rvs(
                -1.5,
                1.5,
                size=shape,
                random_state=rng,
            )
        ),
        checks=VIRIAL,
    ),
    "every weight in two places": Fault(
        shaped(
            lambda rng, shape: (
                0.95 * rng.choice([-1.0, 1.0], size=shape)
                + np.sqrt(1 - 0.95**2) * rng.normal(size=shape)
            )
        ),
        checks=SHAPE,
    ),
    "every weight between bounds": Fault(
        shaped(lambda rng, shape: rng.uniform(-np.sqrt(3.0), np.sqrt(3.0), shape)), checks=SHAPE
    ),
    "every weight with heavy tails": Fault(
        shaped(lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3.0)), checks=SHAPE
    ),
    "every weight skewed": Fault(
        shaped(lambda rng, shape: rng.exponential(size=shape) - 1.0), checks=SHAPE
    ),
    "waves": Fault(shaped(swinging), checks=SHAPE),
    "fifty draws with noise": Fault(few_with_noise),
    "draws in the order of their density": Fault(by_density, checks=RHAT),
    "weights of other inputs": Fault(other_inputs, checks=SCORE),
    "one chain 1.5 times as wide": Fault(spread(1.5, slice(1), 0.2), checks=RHAT),
    "a fifth of the rows twice": Fault(
        lambda case: replace(
            case,
            x=np.r_[case.x, case.x[: len(case.x) // 5]],
            y=np.r_[case.y, case.y[: len(case.y) // 5]],
        ).draws(),
        checks=("virial", "score"),
    ),
    "of targets times 1.1": Fault(lambda case: replace(case, y=1.1 * case.y).draws(), checks=SCORE),
    "test targets moved by half of their sd": Fault(
        data=changed("y_test", lambda c: c.y_test + 0.5 * c.y.std()), checks=("pit",)
    ),
    "test inputs permuted": Fault(
        data=changed("x_test", lambda c: c.rng.permutation(c.x_test)), checks=("pit",)
    ),
    "test inputs in other columns": Fault(
        data=changed(
            "x_test", lambda c: c.x_test[:, ::-1].copy() if c.x_test.shape[1] > 1 else -c.x_test
        ),
        checks=("pit",),
    ),
    "test targets with noise": Fault(
        data=changed("y_test", lambda c: c.y_test + 1.5 * c.noise * c.rng.normal(size=HELD_OUT)),
        checks=("pit",),
    ),
    "a model of twice the noise": Fault(
        data=changed("noise", lambda c: 2.0 * c.noise), checks=CALIBRATION
    ),
    "a model of half the noise": Fault(
        data=changed("noise", lambda c: 0.5 * c.noise), checks=CALIBRATION
    ),
    "predictions in other units": Fault(
        tree=remade("predictions", lambda _, y: 1.5 * y + 0.5, PREDICTED), checks=("pit",)
    ),
    "predictions with twice the spread": Fault(
        tree=remade("predictions", widened, ("y", "y_sample")), checks=("pit",)
    ),
    "replicates without spread": Fault(
        tree=remade(
            "posterior_predictive", lambda _, y: np.broadcast_to(y.mean((0, 1)), y.shape).copy()
        ),
        checks=("loo_pit",),
    ),
    "log-likelihood without its constant": Fault(
        tree=times(1.0, 0.5 * np.log(2.0 * np.pi)), checks=LIKELIHOOD
    ),
    "observed targets permuted": Fault(
        tree=remade("observed_data", lambda c, y: c.rng.permutation(y)), checks=LIKELIHOOD
    ),
    "errors that carry over to the next row": Fault(
        data=renoised(dependent), checks=("row_order",)
    ),
    "errors that drift": Fault(
        data=renoised(
            lambda c, x: (
                (c.rng.normal(size=len(x)) + np.linspace(-1.5, 1.5, len(x))) / np.sqrt(1.75)
            )
        ),
        checks=("row_order",),
    ),
    "errors of groups of rows": Fault(data=renoised(grouped), checks=("row_order",)),
    "an input that the net is not given": Fault(data=without_an_input, checks=CALIBRATION),
    "cut off on one side of a weight": Fault(cut_on_one_side, checks=SCORE),
    "one draw far away": Fault(one_far_draw, checks=("function_moves",)),
    "a weight that moves slowly": Fault(one_slow_weight, checks=(*RHAT, "ess_function")),
    "wider in the second half": Fault(wider_later, checks=(*RHAT, "virial")),
    "one chain shuffled and with noise as all": Fault(shuffled_with_noise),
    "predictions of other rows": Fault(tree=of_other_rows, checks=("pit",)),
    "errors of two outputs that correlate": Fault(data=paired(0.6), checks=("across_outputs",)),
    "errors of two outputs of opposite sign": Fault(data=paired(-0.6), checks=("across_outputs",)),
}
