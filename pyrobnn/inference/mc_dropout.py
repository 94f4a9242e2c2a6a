"""Monte Carlo dropout: dropout kept on, one mask for each draw."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
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
from pyrobnn.inference.fitting.sizes import Need, Sizes
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.nets.batch_norm import training_norms
from pyrobnn.inference.nets.dropout_masks import (
    Mask,
    drop_inputs,
    inserted_masks,
    layer_masks,
    masked_weights,
)
from pyrobnn.inference.optim.minimize import Result, minimize
from pyrobnn.inference.optim.training import OptimizerFactory, Training
from pyrobnn.inference.optim.unfinished import falling
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
        optimizer: ``"adam"`` or a function of the parameter list that returns a torch optimizer.
        lr_schedule: as in :class:`pyrobnn.MAP`.
        batch_size: data per step; None for all.
        clip_norm: rescale gradients to at most this norm.
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
    optimizer: str | OptimizerFactory = "adam"
    lr_schedule: str | Callable[..., Any] | None = "cosine"
    batch_size: int | None = None
    clip_norm: float | None = None
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "none"
    default_draws: ClassVar[int] = 100

    def __post_init__(self) -> None:
        if self.p is not None:
            check_number("p", self.p, above=0, below=1)
        check_count("num_steps", self.num_steps, minimum=0)
        Training.of(self, num_steps=max(self.num_steps, 1))  # its checks
        if self.learn_p and self.num_steps == 0:
            raise ValueError("learn_p=True needs training: pass num_steps above 0")

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> tuple[Problem, FitRun]:
        model, x, y = run.given
        self._check(model, run.init)
        problem = prepare(
            model,
            x,
            y,
            points="free",
            device=device,
            stream=True,
            deterministic=False,
            num_draws=run.num_draws,
        )
        return problem, run

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        seed, num_draws = run.seed, run.num_draws
        start = start_values(problem.model, run.init)
        net, probes = problem.bnn, problem.x[:8]
        masks = layer_masks(net, probes) if self.p is None else inserted_masks(net, probes, self.p)
        density = _training_density(net, masks, problem, self.learn_p)
        with seeded(seed, problem.device):
            theta, result = density.initial(start, seed), None
            if self.num_steps:
                loss = _Loss(density, net, masks, problem.num_rows, self.learn_p)

                def present(theta: Tensor) -> Posterior:
                    values = density.constrain(theta)
                    with seeded(seed, problem.device):
                        draws = _masked_draws(
                            problem, values, masks, self._rates(masks, values), _SNAPSHOT_DRAWS
                        )
                    return snapshot(problem, self, draws, seed=seed)

                result = self._train(loss, theta, problem, run, present)
                theta = result.params
            values = density.constrain(theta)
            rates = self._rates(masks, values)
            draws = _masked_draws(problem, values, masks, rates, num_draws)
        meta: dict[str, Any] = {"dropout_p": _by_layer(masks, rates), "warnings": [CAVEAT]}
        if result is None:
            return make_posterior(
                problem, self, draws, seed=seed, timings={"compile": 0.0, "fit": 0.0}, meta=meta
            )
        return make_posterior(
            problem,
            self,
            draws,
            seed=seed,
            timings=result.timings,
            history={"loss": result.losses},
            meta=meta
            | {"num_steps": result.num_steps, "stopped": result.stopped}
            | falling(result, result.losses, problem.num_rows, density.dim),
            notes=result.notes(self),
            interrupted=result.interrupted,
        )

    def _rates(self, masks: Sequence[Mask], values: Mapping[str, Tensor]) -> list[float]:
        """p of each mask, given or learned."""
        if self.learn_p:
            return [float(_rate(values[name])) for name in _logits(masks)]
        return [mask.p for mask in masks]

    def _train(
        self,
        loss: _Loss,
        theta: Tensor,
        problem: Problem,
        run: FitRun,
        present: Callable[[Tensor], Posterior],
    ) -> Result:
        return minimize(
            loss,
            theta,
            problem.batches(self.batch_size),
            Training.of(self),
            callbacks=run.callbacks,
            snapshot=present,
            progress=run.progress,
            name="MCDropout",
        )

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take: the optimiser's, the masks in every step, and the masked weights."""
        resident, phases = sizes.optimisation()
        drawn = {"draws": 2 * sizes.num_draws * sizes.flat}
        return Need(resident | drawn, {"a step": 2 * phases["a step"]})

    def _check(self, model: Any, init: Any) -> None:
        """Refuse what cannot be trained with dropout."""
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
        if self.num_steps == 0 and init is None:
            raise ValueError("num_steps=0 takes the weights of a trained net: pass it as init=")


def _masked_draws(
    problem: Problem, values: dict[str, Tensor], masks: Sequence[Mask], rates: Sequence[float], num_draws: int
) -> dict[str, Tensor]:
    """Every site of the model, (1, num_draws, …): weights under their masks, the rest as trained."""
    own = {site.name for site in problem.density.sites}
    draws = {name: value.expand(1, num_draws, *value.shape) for name, value in values.items() if name in own}
    masked = masked_weights(values, masks, rates, num_draws)
    return draws | {name: value[None] for name, value in masked.items()}


class _Loss:
    """Minus the log joint per datum, with dropout; with learned p the evidence lower bound of concrete dropout."""

    def __init__(self, density: Density, model: BNN, masks: Sequence[Mask], num_data: int, learn_p: bool):
        self.density, self.model, self.masks = density, model, masks
        self.num_data, self.learn_p = num_data, learn_p

    def __call__(self, theta: Tensor, *batch: Tensor) -> Tensor:
        log_prior, log_likelihood = self.density.log_parts(theta, *batch)
        total = log_prior + log_likelihood
        if self.learn_p:
            total = total + self._correction(self.density.constrain(theta))
        return -total / self.num_data

    def _correction(self, values: dict[str, Tensor]) -> Tensor:
        r"""Σ over masks of their entropy, and :math:`E_q[\log p(W)] - \log p(M)` of the masked weights."""
        total = torch.zeros((), dtype=torch.float64, device=self.density.device)
        keep: dict[str, Tensor] = {}
        for mask, name in zip(self.masks, _logits(self.masks)):
            p = _rate(values[name])
            total = total + mask.units * (torch.special.entr(p) + torch.special.entr(1 - p)).double()
            keep[mask.site] = keep.get(mask.site, 1.0) * (1 - p)
        for site, kept in keep.items():
            if site not in self.model.priors:
                continue
            prior, weight = self.model.priors[site], values[site]
            with without_validation():
                scaled, zero = prior.log_prob(weight / kept), prior.log_prob(torch.zeros_like(weight))
                total = total + kept * scaled + (1 - kept) * zero - prior.log_prob(weight)
        return total


def _training_density(model: BNN, masks: Sequence[Mask], problem: Problem, learn_p: bool) -> Density:
    """The density of the program whose net drops units; the logits of learned p are point parameters of it."""
    trainer = copy.copy(model)
    trainer.net = copy.deepcopy(model.net).eval()
    for mask, name in zip(masks, _logits(masks)):
        if learn_p:
            layer = trainer.net.get_submodule(mask.layer)
            logit = torch.full((), math.log(mask.p / (1 - mask.p)), dtype=model.dtype, device=problem.device)
            layer.register_parameter(name.rpartition(".")[2], nn.Parameter(logit))
    names = [name.rpartition(".")[2] for name in _logits(masks)]

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


def _logits(masks: Sequence[Mask]) -> list[str]:
    """Site of the logit of every mask's p."""
    return [f"{mask.site.removesuffix('weight')}dropout_logit_{number}" for number, mask in enumerate(masks)]


def _by_layer(masks: Sequence[Mask], rates: Sequence[float]) -> dict[str, float]:
    """Probability that an input of the layer is dropped, by layer name (several masks may act on one)."""
    keep: dict[str, float] = {}
    for mask, rate in zip(masks, rates):
        keep[mask.layer] = keep.get(mask.layer, 1.0) * (1.0 - rate)
    return {layer: 1.0 - kept for layer, kept in keep.items()}


def _rate(logit: Tensor) -> Tensor:
    """p from its logit, kept off 0 and 1."""
    return torch.sigmoid(logit).clamp(1e-4, 1 - 1e-4)
