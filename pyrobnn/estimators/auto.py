"""``method="auto"``: a method that suits the size of the data and of the net, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch.distributions import Normal

from pyrobnn.estimators.fits import RunOptions
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import METHODS, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.point_methods import MAP
from pyrobnn.inference.sgmcmc import SGHMC
from pyrobnn.inference.svi import SVI
from pyrobnn.model import BNN, NET
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.fixed_row import prior_of_element
from pyrobnn.model.likelihoods.catalogue import HeteroskedasticGaussian
from pyrobnn.posterior import Posterior

#: rows up to which NUTS takes seconds (a Gaussian's 90 % intervals held 78 % of new values at 12)
FEW_ROWS = 50
#: rows below which nothing is left out to compare models by
FEWEST_ROWS = 10
#: rows up to which NUTS takes minutes
MAX_NUTS_ROWS = 1000
#: weights up to which a full precision matrix takes seconds
MAX_FULL_WEIGHTS = 3000
#: rows beyond which an ensemble's chains are tried before the evidence
MAX_EVIDENCE_ROWS = 500


def choose(
    num_data: int,
    num_weights: int,
    width: int,
    *,
    normal: bool = True,
    joint: bool = False,
    varying: bool = False,
    few_rows: int = FEW_ROWS,
    compile: Compile = "auto",
) -> tuple[Method, str]:
    """A configured method for that many rows, weights of the net and outputs, and why it, in a sentence.

    Args:
        normal: whether the weights have normal priors, whose width can be tuned.
        joint: whether the elements of a weight depend on each other under its prior, which no diagonal holds.
        varying: whether the noise is a function of the input.
        few_rows: up to which NUTS takes the place of an approximation.
        compile: the method's option.
    """
    size = f"{num_data:,} rows, {num_weights:,} weights"
    batch_size = None if num_data <= MAX_WHOLE_ROWS else 1000
    overfits_noise = varying and num_data < 10 * num_weights
    method: Method
    if joint or num_data <= few_rows or (overfits_noise and not normal):
        if joint:
            size += ", a prior under which weights are correlated"
        if num_data <= MAX_NUTS_ROWS:
            method = NUTS(compile=compile)
            why = "NUTS, which samples that posterior itself"
        else:
            method = SVI(
                estimator="local_reparameterization",
                batch_size=batch_size,
                num_steps=10_000,
                compile=compile,
            )
            why = (
                "mean-field SVI, whose uncertainty is too large at the data and too small elsewhere"
            )
    elif overfits_noise:
        method = SGHMC(batch_size=batch_size, compile=compile)
        why = "chains from several modes (SGHMC), since at a single mode such a noise fits the residuals"
    else:
        # the Gram matrix of the rows stands for that of the weights where it is the smaller
        full = min(num_weights, num_data * width) <= MAX_FULL_WEIGHTS
        method = _laplace(full, normal, batch_size, compile)
        why = _laplace_reason(full, normal, num_data)
    return method, f"{size}: {why}"


def _laplace(
    full: bool,
    normal: bool,
    batch_size: int | None,
    compile: Compile,
) -> Laplace:
    if batch_size is None:
        search = MAP(compile=compile)
    else:
        search = MAP(
            num_steps=3000,
            batch_size=batch_size,
            compile=compile,
        )
    return Laplace(
        structure="full" if full else "kron",
        tune="marginal_likelihood" if normal else None,
        map=search,
    )


def _laplace_reason(full: bool, normal: bool, num_data: int) -> str:
    words = [f"Laplace's approximation, linearised, {_width_words(normal)}"]
    if not full:
        words.append(
            "one Kronecker product per layer, since the full precision matrix would be too large"
        )
    if num_data > MAX_WHOLE_ROWS:
        words.append("its mode found with mini-batches of 1,000 rows")
    if num_data <= MAX_NUTS_ROWS:
        words.append("method='nuts' samples the posterior itself, in minutes")
    return "; ".join(words)


@register("auto", quick={"quick": True, "num_draws": 150})
@dataclass(frozen=True)
class Auto(Method):
    """The method that suits the size of the data and the net, by :func:`choose`, as an estimator's ``"auto"`` takes it.

    Args:
        compile: the chosen method's option.
        quick: with its steps of a quick run.

    Returns, by ``fit``: the posterior of the chosen method; ``meta["chosen"]`` says which, and why.

    Example:
        >>> Auto(compile=False)
        Auto(compile=False, quick=False)
    """

    compile: Compile = "auto"
    quick: bool = False

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    uses: ClassVar[tuple[str, ...]] = ()

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        from pyrobnn.estimators.empirical_bayes import empirical_bayes

        model, x, y = run.given
        width = model.forward(model.initial_values(), problem.x[:2]).shape[-1]
        method, why = choose(
            problem.num_rows,
            model.num_weights,
            width,
            **prior_facts(model),
            compile=self.compile,
        )
        if self.quick:
            method = _quick(method)
        options = RunOptions(
            num_draws=run.num_draws,
            seed=run.seed,
            device=problem.device,
            progress=run.progress,
        )
        fit = empirical_bayes(method, model, x, y)
        if fit is None:
            posterior = method.fit(
                model,
                x,
                y,
                callbacks=run.callbacks,
                **options,
            )
        else:
            posterior, chosen = fit(method, model, x, y, options)
            why += f"; {chosen}"
        return replace(posterior, meta=posterior.meta | {"chosen": why})


def _quick(method: Method) -> Method:
    """The method with its settings of a quick run."""
    quick = next(known.quick for known in METHODS.values() if known.cls is type(method))
    settings = {key: quick[key] for key in quick.keys() - {"num_draws", "compile"}}
    return cast(Method, replace(cast(Any, method), **settings))


def named(name: str, *, normal: bool, compile: Compile) -> tuple[Method, str, int | None]:
    """The method of that name with its settings of a full run, why it, and how many draws, None for its own number."""
    known = METHODS[name]
    settings = dict(known.full)
    words = f"{known.cls.__name__}, as it was asked for by name"
    num_draws = settings.pop("num_draws", None)
    if "tune" in settings:
        words += f", {_width_words(normal)}"
        if not normal:
            del settings["tune"]
    if compile != "auto":
        settings["compile"] = compile
    return known.cls(**settings), words, num_draws


def _width_words(normal: bool) -> str:
    how = "tuned" if normal else "as declared: it is not normal"
    return f"its prior's width {how}"


def prior_facts(model: BNN) -> dict[str, bool]:
    """What :func:`choose` asks of the priors of the net's weights, and of the noise."""
    priors = [
        prior_of_element(prior) for name, prior in model.priors.items() if name.startswith(NET)
    ]
    return {
        "normal": all(isinstance(prior, Normal) for prior in priors),
        "joint": any(prior.event_shape for prior in priors),
        "varying": isinstance(model.likelihood, HeteroskedasticGaussian),
    }
