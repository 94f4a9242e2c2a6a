"""Monte Carlo dropout: dropout kept on, one mask for each draw."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused, check_count, check_number
from pyrobnn.core.seeding import seeded
from pyrobnn.density.density import Density
from pyrobnn.density.nodes import without_validation
from pyrobnn.inference.fitting.batches import scaled_program
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Problem, make_posterior, prepare, snapshot
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.nets.batch_norm import training_norms
from pyrobnn.inference.nets.dropout_masks import (
    NUM_PROBES,
    Mask,
    drop_inputs,
    inserted_masks,
    layer_masks,
    masked_weights,
)
from pyrobnn.inference.optim.minimize import minimize
from pyrobnn.inference.optim.training import Optimizer, OptimizerFactory, Training
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior

#: temperature of the relaxed masks through which p is learned
RELAXATION = 0.1
#: masks drawn while the net is trained
_SNAPSHOT_DRAWS = 50
CAVEAT = "MC dropout: the spread of the draws follows from p, it is not the posterior under this prior"


@register("dropout", full={"p": 0.05, "num_draws": 1000}, quick={"num_draws": 500})
@dataclass(frozen=True)
class MCDropout(Method):
    r"""Monte Carlo dropout: train with dropout, then draw masks.

    .. math:: W_s = M \operatorname{diag}(b_s) / (1 - p), \qquad b_{sj} \sim \mathrm{Bernoulli}(1 - p)

    Training drops units afresh for every datum and step and minimises the loss of MAP, whose log prior is the weight
    decay. A draw has one mask for all inputs: it is a coherent function, and the masked weights are its parameters.

    Args:
        p: None uses the net's own dropout layers, each a mask on the weight layer that runs next; a number in (0, 1)
            drops the inputs of every linear layer and the input channels of every convolution instead (where there
            are two or more).
        learn_p: learn the p of every mask from there (concrete dropout); the entropy of the masks then enters the loss.
        num_steps: updates of the optimiser; 0 takes the weights of ``init`` as they are.
        lr: its peak learning rate.
        optimizer: as in :class:`pyrobnn.MAP`.
        batch_size: data per step; None for all.
        compile: compile the update; False gives the same numbers slower.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws (1, num_draws, …) of masked weights; ``meta["dropout_p"]`` has p by weight
    layer. Training starts at ``init`` or at the model's own net.

    Refused: a plain Pyro program; no dropout layer and no ``p``; a dropout layer that is no mask on weights.

    Caveat: this is not the posterior under the model's prior. The spread is set by p and does not shrink as data
    accumulate (unless p is learned); it has no density q, so neither Pareto k-hat nor LOO corrections apply.

    References:
        `Dropout as a Bayesian Approximation (Gal & Ghahramani, 2016) <https://arxiv.org/abs/1506.02142>`_.
        `Concrete Dropout (Gal, Hron & Kendall, 2017) <https://arxiv.org/abs/1705.07832>`_.

    Example:
        >>> MCDropout(p=0.1).p
        0.1
    """

    p: float | None = None
    learn_p: bool = False
    num_steps: int = 2000
    lr: float = 0.01
    optimizer: str | Optimizer | OptimizerFactory = "adam"
    batch_size: int | None = None
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "none"
    default_draws: ClassVar[int] = 100

    def __post_init__(self) -> None:
        if self.p is not None:
            check_number("p", self.p, above=0, below=1)
        check_count("num_steps", self.num_steps, minimum=0)
        if self.num_steps:
            Training.of(self, "cosine")  # its checks
        elif self.learn_p:
            raise ValueError("learn_p=True needs training: pass num_steps above 0")

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        """The problem of a net that can be trained with dropout.

        Raises:
            TypeError, Refused: no BNN; batch-norm layers in training mode.
            ValueError: no steps, and no weights to take.
        """
        model, x, y = run.given
        if not isinstance(model, BNN):
            raise (Refused if callable(model) else TypeError)(
                f"MCDropout drops units of a network: 'model' must be a pyrobnn.BNN, got {model!r}: "
                "use SVI, NUTS or Laplace(curvature='hessian')"
            )
        if norms := training_norms(model):
            raise Refused(
                f"the batch-norm layers {', '.join(norms)} are in training mode and depend on the batch: "
                "call .eval() on them before building the BNN"
            )
        if self.num_steps == 0 and run.init is None:
            raise ValueError("num_steps=0 takes the weights of a trained net: pass it as init=")
        options: dict[str, Any] = {
            "points": "free",
            "stream": True,
            "deterministic": False,
            "num_draws": run.num_draws,
        }
        return prepare(model, x, y, device=device, **options), run

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        net, probes = problem.bnn, problem.x[:NUM_PROBES]
        masks = layer_masks(net, probes) if self.p is None else inserted_masks(net, probes, self.p)
        density = _training_density(net, masks, problem, self.learn_p)
        own = {site.name for site in problem.density.sites}

        def rates(values: Mapping[str, Tensor]) -> list[float]:
            return [float(_rate(values[name])) if self.learn_p else m.p for m, name in _logits(masks)]

        def drawn(values: dict[str, Tensor], num_draws: int) -> dict[str, Tensor]:
            """Every site of the model, (1, num_draws, …): weights under their masks, the rest as trained."""
            masked = masked_weights(values, masks, rates(values), num_draws)
            rest = {name: value.expand(num_draws, *value.shape) for name, value in values.items()}
            return {name: value[None] for name, value in (rest | masked).items() if name in own}

        def present(theta: Tensor) -> Posterior:
            with seeded(run.seed, problem.device):
                draws = drawn(density.constrain(theta), _SNAPSHOT_DRAWS)
            return snapshot(problem, self, draws, seed=run.seed)

        def loss(theta: Tensor, *batch: Tensor) -> Tensor:
            log_prior, log_likelihood = density.log_parts(theta, *batch)
            total = log_prior + log_likelihood
            if self.learn_p:
                total = total + _concrete_terms(density.constrain(theta), masks, net)
            return -total / problem.num_rows

        told: dict[str, Any] = {"timings": {"compile": 0.0, "fit": 0.0}, "meta": {}}
        with seeded(run.seed, problem.device):
            theta = density.initial(start_values(problem.model, run.init), run.seed)
            if self.num_steps:
                result = minimize(
                    loss,
                    theta,
                    problem.batches(self.batch_size),
                    Training.of(self, "cosine"),
                    callbacks=run.callbacks,
                    snapshot=present,
                    progress=run.progress,
                    name="MCDropout",
                )
                theta, told = result.params, result.account(self, problem.num_rows, density.dim)
            values = density.constrain(theta)
            draws = drawn(values, run.num_draws)
        keep: dict[str, float] = {}  # several masks may act on one layer
        for mask, rate in zip(masks, rates(values)):
            keep[mask.layer] = keep.get(mask.layer, 1.0) * (1.0 - rate)
        by_layer = {layer: 1.0 - kept for layer, kept in keep.items()}
        told["meta"] |= {"dropout_p": by_layer, "warnings": [CAVEAT]}
        return make_posterior(problem, self, draws, seed=run.seed, **told)


def _concrete_terms(values: Mapping[str, Tensor], masks: Sequence[Mask], model: BNN) -> Tensor:
    r"""Σ over masks of their entropy, and :math:`E_q[\log p(W)] - \log p(M)` of the masked weights."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(values.values())).device)
    keep: dict[str, Tensor] = {}
    for mask, name in _logits(masks):
        p = _rate(values[name])
        total = total + mask.units * (torch.special.entr(p) + torch.special.entr(1 - p)).double()
        keep[mask.site] = keep.get(mask.site, 1.0) * (1 - p)
    for site, kept in keep.items():
        if site not in model.priors:
            continue
        prior, weight = model.priors[site], values[site]
        with without_validation():
            scaled, zero = prior.log_prob(weight / kept), prior.log_prob(torch.zeros_like(weight))
            total = total + kept * scaled + (1 - kept) * zero - prior.log_prob(weight)
    return total


def _training_density(model: BNN, masks: Sequence[Mask], problem: Problem, learn_p: bool) -> Density:
    """The density of the program whose net drops units; the logits of learned p are point parameters of it."""
    trainer = copy.copy(model)
    trainer.net = copy.deepcopy(model.net).eval()
    names = [name.rpartition(".")[2] for _, name in _logits(masks)]
    for mask, name in zip(masks, names):
        if learn_p:
            logit = torch.full((), math.log(mask.p / (1 - mask.p)), dtype=model.dtype, device=problem.device)
            trainer.net.get_submodule(mask.layer).register_parameter(name, nn.Parameter(logit))

    def keep(layer: nn.Module, number: int, x: Tensor, units: int) -> Tensor:
        u = torch.rand(len(x), units, dtype=model.dtype, device=x.device)
        if not learn_p:
            p = masks[number].p
            return (u >= p).to(model.dtype) / (1.0 - p)
        logit = getattr(layer, names[number])
        u = u.clamp(1e-6, 1 - 1e-6)
        dropped = torch.sigmoid((logit + u.log() - torch.log1p(-u)) / RELAXATION)
        return (1.0 - dropped) / (1.0 - _rate(logit))

    drop_inputs(trainer.net, masks, keep)
    program = scaled_program(trainer, problem.num_rows, problem.epoch)
    return Density(program, (problem.x, problem.y), points="free")


def _logits(masks: Sequence[Mask]) -> list[tuple[Mask, str]]:
    """Every mask with the site of the logit of its p."""
    return [(m, f"{m.site.removesuffix('weight')}dropout_logit_{number}") for number, m in enumerate(masks)]


def _rate(logit: Tensor) -> Tensor:
    """p from its logit, kept off 0 and 1."""
    return torch.sigmoid(logit).clamp(1e-4, 1 - 1e-4)
