"""Monte Carlo dropout: dropout kept on, one mask for each draw."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused, check_count, check_number, check_optional
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.batch_norm import training_norms
from pyrobnn.inference.fitting.batches import scaled_program
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import Problem, make_posterior, require_net, snapshot
from pyrobnn.inference.fitting.program import refuse_hidden_noise
from pyrobnn.inference.method import FitRun, Kind, register
from pyrobnn.inference.optim.minimize import Result
from pyrobnn.inference.optim.path_ends import late_loss
from pyrobnn.inference.point_methods import Trained
from pyrobnn.inference.training_mode import TrainingMode, rows_of_training, with_statistics
from pyrobnn.model import BNN, NET, Density
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import hooked

Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
#: dropout layers whose units are channels; those of nn.Dropout are single elements
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
#: points on which the masks are compared with the dropout layers they stand for
NUM_PROBES = 8
#: through the data, that a net which was trained before is taken to have made
_PASSES_BEFORE = 10
CAVEAT = (
    "MC dropout: the spread of the draws follows from p, it is not the posterior under this prior"
)


@register(
    "dropout",
    full={"p": 0.05, "num_draws": 1000},
    quick={"num_draws": 500},
)
@dataclass(frozen=True)
class MCDropout(Trained):
    r"""Monte Carlo dropout: train with dropout, then draw masks.

    .. math:: W_s = M \operatorname{diag}(b_s) / (1 - p), \qquad b_{sj} \sim \mathrm{Bernoulli}(1 - p)

    Training drops units afresh for every datum and step and minimises the loss of MAP, whose log prior is the weight
    decay. A draw has one mask for all inputs: it is a coherent function, and the masked weights are its parameters.

    Args:
        p: None uses the net's own dropout layers, each a mask on the weight layer that runs next; a number in (0, 1)
            drops the inputs of every linear layer and the input channels of every convolution instead (where there
            are two or more).
        num_steps: updates of the optimiser; 0 takes the weights of ``init`` as they are.
        lr: its peak learning rate.
        optimizer, optimizer_options: as in :class:`pyrobnn.MAP`.
        batch_size: data per step; None for all.
        compile: ``"auto"`` compiles the update where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws (1, num_draws, …) of masked weights; ``meta["dropout_p"]`` has p by weight
    layer. Training starts at ``init`` or at the model's own net.

    Batch-norm layers in training mode use the statistics of the batch while training, and every draw gets its own, from
    passes through the data. A net in evaluation mode keeps those that it has.

    Refused: a plain Pyro program; no dropout layer and no ``p``; a dropout layer that is not a mask on weights.

    Caveat: this is not the posterior under the model's prior. The spread is set by p and does not shrink as data
    accumulate; it has no density q, so neither Pareto k-hat nor LOO corrections apply.

    Reference: `Dropout as a Bayesian Approximation (Gal & Ghahramani, 2016) <https://arxiv.org/abs/1506.02142>`_.

    Example:
        >>> MCDropout(p=0.1).p
        0.1
    """

    p: float | None = None

    kind: ClassVar[Kind] = "independent"
    deterministic: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    default_draws: ClassVar[int] = 100
    remedy: ClassVar[str] = "Run NUTS and compare."

    def __post_init__(self) -> None:
        check_optional(
            check_number,
            "p",
            self.p,
            above=0,
            below=1,
        )
        check_count(
            "num_steps",
            self.num_steps,
            minimum=0,
        )
        if self.num_steps:
            super().__post_init__()

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> Problem:
        """The problem of a net that can be trained with dropout."""
        model = require_net(self, run.given[0])
        if self.num_steps == 0 and run.init is None:
            raise ValueError("num_steps=0 takes the weights of a trained net: pass it as init=")
        norms = training_norms(model)
        if not norms:
            return super()._prepare(run, device)
        trainer = _without_dropout(model)
        of_trainer = super()._prepare(replace(run, given=(trainer, *run.given[1:])), device)
        refuse_hidden_noise(model, of_trainer.x)
        problem = replace(of_trainer, model=model.to(of_trainer.device))
        problem.note(Finding("batch_statistics", {"layers": norms}))
        return problem

    def _worths(self, problem: Problem, ends: Sequence[Result]) -> Tensor:
        """By the losses under the masks of the last steps."""
        return torch.stack([-problem.num_rows * late_loss(end) for end in ends])

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        net = problem.bnn
        probes = problem.x[:NUM_PROBES]
        masks = layer_masks(net, probes) if self.p is None else inserted_masks(net, probes, self.p)
        density = _training_density(net, masks, problem)
        net_draws = _MaskedDraws.of(problem.density, masks)

        def present(theta: Tensor) -> Posterior:
            with seeded(run.seed, problem.device):
                draws = net_draws.drawn(density.constrain(theta), 50)
            return self._with_statistics(problem, snapshot(problem, self, draws, seed=run.seed))

        account: dict[str, Any] = {"timings": {"compile": 0.0, "fit": 0.0}, "meta": {}}
        with seeded(run.seed, problem.device):
            theta = density.initial(start_values(problem.model, run.init), run.seed)
            if self.num_steps:
                result = self._search(
                    replace(problem, density=density),
                    theta,
                    run,
                    snapshot=present,
                )
                theta = result.params
                account = result.account(self, problem.num_rows, density.dim)
            draws = net_draws.drawn(density.constrain(theta), run.num_draws)
        account["meta"] |= {"dropout_p": _dropout_rates(masks), "warnings": [CAVEAT]}
        posterior = make_posterior(
            problem,
            self,
            draws,
            seed=run.seed,
            **account,
        )
        return self._with_statistics(problem, posterior)

    def _with_statistics(self, problem: Problem, posterior: Posterior) -> Posterior:
        """The posterior with batch-norm statistics of its draws' own, which masks change."""
        rows_seen = rows_of_training(problem, self.num_steps, self.batch_size)
        # a net that was trained before has seen all rows many times
        return with_statistics(problem, posterior, rows_seen or _PASSES_BEFORE * problem.num_rows)


@dataclass(frozen=True, eq=False)
class _MaskedDraws:
    """Draws of a net whose weights are masked.

    Attributes:
        masks: the places where units are dropped.
        fixed: values of the parameters without a prior, by site.
        sites: those of the model, which a draw has.
    """

    masks: Sequence[Mask]
    fixed: Mapping[str, Tensor]
    sites: Set[str]

    @classmethod
    def of(cls, density: Density, masks: Sequence[Mask]) -> _MaskedDraws:
        """Of the model with this density; Refused where a masked weight is no site of its own."""
        fixed = density.initial_points
        sites = {site.name for site in density.sites} | fixed.keys()
        shared = [mask.layer for mask in masks if mask.site not in sites]
        if shared:
            raise Refused(
                f"the layer {shared[0]!r} shares its weight and has no mask of its own: use another method"
            )
        return cls(masks, fixed, sites)

    def drawn(self, values: Mapping[str, Tensor], num_draws: int) -> dict[str, Tensor]:
        """Every site of the model, (1, num_draws, …): weights under their masks, the rest as trained."""
        trained = {**self.fixed, **values}
        unmasked = {name: value.expand(num_draws, *value.shape) for name, value in trained.items()}
        masked = unmasked | masked_weights(trained, self.masks, num_draws)
        return {name: value[None] for name, value in masked.items() if name in self.sites}


def _dropout_rates(masks: Sequence[Mask]) -> dict[str, float]:
    """The probability, by layer, that an input is dropped; several masks may act on one layer."""
    keep: dict[str, float] = {}
    for mask in masks:
        keep[mask.layer] = keep.get(mask.layer, 1.0) * (1.0 - mask.p)
    return {layer: 1.0 - probability for layer, probability in keep.items()}


def _without_dropout(model: BNN) -> BNN:
    """The model with the net in evaluation mode but for batch-norm layers in training mode, which use the batch."""
    return TrainingMode(model, training_norms(model), ()).evaluated


def _training_density(model: BNN, masks: Sequence[Mask], problem: Problem) -> Density:
    """The density of the program whose net drops inputs of its weight layers, afresh for every datum."""
    trainer = _without_dropout(model)
    for mask in masks:

        def drop(module: nn.Module, args: tuple[Tensor, ...], mask: Mask = mask) -> tuple[Tensor]:
            x = args[0]
            survivors = (
                torch.rand(
                    len(x),
                    mask.units,
                    dtype=model.dtype,
                    device=x.device,
                )
                >= mask.p
            )
            scaled = (survivors.to(model.dtype) / (1.0 - mask.p)).repeat_interleave(mask.repeats, 1)
            inner = (1,) * (x.dim() - 2)
            # the features of a linear layer come last, channels second
            shape = (
                (len(x), *inner, -1) if isinstance(module, nn.Linear) else (*scaled.shape, *inner)
            )
            return (x * scaled.reshape(shape),)

        trainer.net.get_submodule(mask.layer).register_forward_pre_hook(drop)
    program = scaled_program(trainer, problem.num_rows, problem.epoch)
    return Density(
        program,
        (problem.x, problem.y),
        points="free",
        values=problem.density.initial_points,
    )


@dataclass(frozen=True)
class Mask:
    """One place where units are dropped.

    Attributes: ``layer`` (name of the weight layer whose inputs are dropped), ``source`` (name of the dropout layer;
    empty where it was inserted), ``occasion`` (which call of that layer, from 1), ``units`` (dropped independently),
    ``repeats`` (consecutive input columns that share a unit), ``p`` (probability that a unit is dropped).
    """

    layer: str
    source: str
    occasion: int
    units: int
    repeats: int
    p: float

    @property
    def weight(self) -> str:
        """Name of the masked weight in the net (the net itself may be the layer)."""
        return f"{self.layer}.weight" if self.layer else "weight"

    @property
    def site(self) -> str:
        """Site of the masked weight."""
        return NET + self.weight


def inserted_masks(model: BNN, x: Tensor, p: float) -> list[Mask]:
    """Dropout on the inputs of linear and convolution layers with several; without its only one, f is constant.

    Layers whose inputs do not go by the rows of ``x`` have none, as of a net whose outputs are another's weights.
    """
    net = copy.deepcopy(model.net).eval()
    by_rows = _layers_of_rows(net, x)
    layers = {
        name: module
        for name, module, _ in _calls(net, x)
        if isinstance(module, (nn.Linear, *Conv)) and name in by_rows
    }
    columns = {name: _columns(module) for name, module in layers.items()}
    masks = [Mask(name, "", 0, count, 1, p) for name, count in columns.items() if count > 1]
    if not masks:
        raise Refused(
            "the net has no linear or convolution layer with two or more inputs, so there is nothing to drop"
        )
    return masks


def _layers_of_rows(net: nn.Module, x: Tensor) -> set[str]:
    """The names of the layers that are given more where the net is given more rows, of ``x`` (N, …)."""
    sizes_of_one, sizes = (
        {name: len(value) for name, _, value in _calls(net, rows) if value.dim() > 1}
        for rows in (x[:1], x)
    )
    return {
        name for name, size in sizes.items() if len(x) == 1 or size > sizes_of_one.get(name, size)
    }


def layer_masks(model: BNN, x: Tensor) -> list[Mask]:
    """The net's own dropout layers, in either mode, each as a mask on the weight layer that runs next."""
    net = copy.deepcopy(model.net).eval()
    masks: list[Mask] = []
    waiting: list[tuple[str, Dropout, Tensor, int]] = []
    occasions = Counter[str]()
    for name, module, value in _calls(net, x):
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise Refused(
                f"the layer {name!r} is an alpha dropout, whose units do not become zero: use nn.Dropout"
            )
        if isinstance(module, (nn.Dropout, *CHANNELS)):
            occasions[name] += 1
            if module.p >= 1:
                raise Refused(
                    f"the dropout layer {name!r} has p = 1 and drops every unit: give it a p below one"
                )
            if module.p > 0:
                waiting.append((name, module, value, occasions[name]))
        elif isinstance(module, (nn.Linear, *Conv)):
            masks += [_mask(dropout, name, module) for dropout in waiting]
            waiting = []
    if waiting:
        raise Refused(
            f"no linear or convolution layer follows the dropout layer {waiting[0][0]!r}: outputs cannot be dropped"
        )
    if not masks:
        raise Refused(
            "the net has no dropout layer (nn.Dropout with p > 0): add some, or pass p=0.05 to insert them"
        )
    for mask in masks:
        _verify(net, mask, x)
    return masks


def masked_weights(
    values: Mapping[str, Tensor], masks: Sequence[Mask], num_draws: int
) -> dict[str, Tensor]:
    """Draws of the masked weights, site → (num_draws, out, in, …); one mask each, shared by all inputs."""
    drawn: dict[str, Tensor] = {}
    for mask in masks:
        weight = drawn.get(mask.site, values[mask.site].expand(num_draws, *values[mask.site].shape))
        survivors = (
            torch.rand(
                num_draws,
                mask.units,
                dtype=weight.dtype,
                device=weight.device,
            )
            >= mask.p
        )
        drawn[mask.site] = weight * _as_columns(survivors / (1.0 - mask.p), mask, weight[0])
    return drawn


def _calls(net: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """The leaf modules in the order in which they run, with what they were given."""
    calls: list[tuple[str, nn.Module, Tensor]] = []
    leaves = {name: module for name, module in net.named_modules() if not list(module.children())}
    with (
        hooked(leaves, lambda name, args, _: calls.append((name, leaves[name], args[0]))),
        torch.no_grad(),
    ):
        net(x[:NUM_PROBES])
    return calls


def _mask(call: tuple[str, Dropout, Tensor, int], layer: str, module: Weighted) -> Mask:
    source, dropout, value, occasion = call
    columns = _columns(module)
    channels = isinstance(dropout, CHANNELS)
    units = value.shape[1] if channels else value[0].numel()
    if (channels and columns % units) or (not channels and columns != units):
        advice = (
            "move it next to a linear layer, or drop inputs of all weight layers instead: p=0.1"
        )
        if isinstance(module, Conv):
            advice = "use nn.Dropout2d, which drops channels"
        raise Refused(
            f"the dropout layer {source!r} drops {units} units of each datum, but the next weight layer {layer!r} has "
            f"{columns} input columns, so no mask of its weights does the same: {advice}"
        )
    return Mask(layer, source, occasion, units, columns // units, float(dropout.p))


def _columns(module: Weighted) -> int:
    """The inputs of a linear layer, or the input channels of a convolution."""
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _as_columns(scaled: Tensor, mask: Mask, weight: Tensor) -> Tensor:
    """(draw, units) → (draw, 1, in, 1, …), to multiply weights (out, in, …).

    Of a convolution in groups, whose outputs see the channels of their group alone, (draw, out, in / groups, 1, …).
    """
    columns = scaled.repeat_interleave(mask.repeats, 1)
    num_groups = columns.shape[1] // weight.shape[1]
    of_groups = columns.reshape(len(columns), num_groups, -1)
    if num_groups > 1:
        of_groups = of_groups.repeat_interleave(len(weight) // num_groups, 1)
    return of_groups.reshape(*of_groups.shape, *(1,) * (weight.dim() - 2)).to(weight.dtype)


@torch.no_grad()
def _verify(net: nn.Module, mask: Mask, x: Tensor) -> None:
    """Dropping units where the dropout layer is = masking the weights of the layer after it.

    It holds where what lies between (ReLU, pooling, flattening) commutes with the scaling of a unit.
    """
    weight = net.get_parameter(mask.weight)
    calls = itertools.count(1)
    scaled = 2.0 * (torch.arange(mask.units, device=x.device) % 2).to(weight)

    def drop(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if next(calls) != mask.occasion:
            return out
        places = out[0].numel() // mask.units  # of a channel
        return out * scaled.repeat_interleave(places).reshape(out.shape[1:])

    with net.get_submodule(mask.source).register_forward_hook(drop):
        expected = net(x)
    masked = {mask.weight: weight * _as_columns(scaled[None], mask, weight)[0]}
    if not torch.allclose(
        torch.func.functional_call(net, masked, (x,)),
        expected,
        rtol=1e-3,
        atol=1e-5,
    ):
        raise Refused(
            f"the dropout layer {mask.source!r} is not a mask on the inputs of the next weight layer {mask.layer!r} "
            "(an activation such as tanh, or a shortcut, lies between): put the dropout right before the weight layer"
        )
