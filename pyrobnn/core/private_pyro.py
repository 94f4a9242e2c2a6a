"""Names of Pyro that it does not promise to keep, looked up when they are used.

Torch's are in :mod:`pyrobnn.core.private` and :mod:`pyrobnn.core.private_torch`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, nn

from pyrobnn.core import private

if TYPE_CHECKING:
    from pyro.infer.autoguide import AutoContinuous
    from pyro.infer.mcmc import HMC

#: in ``node["infer"]`` of a ``pyro.deterministic``
DETERMINISTIC = "_deterministic"


# -- handlers and sites ------------------------------------------------------------------------------------------------


_NO_VALUE = torch.empty(0)


def _no_value() -> Tensor:
    return _NO_VALUE


def given(name: str) -> Tensor | None:
    """The value that draws or a guide's trace hold of ``name``, or None.

    ``pyro.infer.Predictive`` gives a program the sites of a guide's trace by conditioning, an ELBO by replaying. Both
    answer ``sample`` statements alone, so that a ``pyro.param`` never hears of these values. Here a ``sample``
    statement asks for one. All other handlers are blocked meanwhile: a trace, say, would record the statement.

    Raises:
        Gone: this Pyro does not let its handlers be asked, and some may hold a value.
    """
    if not am_i_wrapped():
        return None
    block_handlers = private.find("pyro.poutine.messenger.block_messengers")
    if block_handlers is None:
        _check_supplied(name)
        return None
    with block_handlers(lambda handler: True) as handlers, contextlib.ExitStack() as answering:
        # those that may know the value answer again, in their order, outermost first
        for handler in handlers:
            if isinstance(handler, (ConditionMessenger, ReplayMessenger, BlockMessenger)):
                answering.enter_context(handler)
        value = pyro.sample(name, _no_value)  # type: ignore[arg-type]  # any function of no arguments will do
    return None if value is _NO_VALUE else value


def _check_supplied(name: str) -> None:
    """Gone unless this library runs the program itself, with all its values: other handlers may hold ``name``."""
    # answered by Supply._pyro_supplied (model/handlers.py)
    if not effectful(lambda: False, type="supplied")():
        raise private.Gone(
            f"pyro-ppl {pyro.__version__} has no pyro.poutine.messenger.block_messengers, by which {name!r} would be "
            "read from draws or a guide: use posterior.predict instead of pyro.infer.Predictive, or pyro-ppl 1.9"
        )


def draws_rows(fn: torch.distributions.Distribution | None) -> bool:
    """Whether the distribution of a site is the choice of rows of a ``pyro.plate``."""
    return type(fn).__name__ == "_Subsample"


def mask_of(fn: dist.MaskedDistribution) -> Tensor | bool:
    """The mask of a masked distribution."""
    return fn._mask


def flat_site(guide: AutoContinuous) -> tuple[str, tuple[str, ...]]:
    """The name of a guide's auxiliary site, a flat vector, and of the sites of which it is made, in their order."""
    return f"_{guide._pyro_name}_latent", tuple(guide._unconstrained_shapes)


def is_param_statement(message: Mapping[str, Any]) -> bool:
    """Whether a message or node is of ``pyro.param``, and not of a ``PyroModule`` that reads a parameter of its own."""
    return getattr(message["fn"], "__self__", None) is pyro.get_param_store()


def keep_params_local(module: nn.Module) -> None:
    """Let a module run under ``module_local_params`` though it was made without."""
    for submodule in module.modules():
        context = getattr(submodule, "_pyro_context", None)
        if context is not None and not hasattr(context, "param_state"):
            context.param_state = {"params": {}, "constraints": {}}


def copy_of_guide(
    guide: AutoGuide, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AutoGuide:
    """A copy of an AutoGuide, its parts and its parameters; the guide itself stays as it is.

    It is a guide of what ``change`` makes of its model. What a run of the model has left in it is shared.
    """
    parts = [module for module in guide.modules() if isinstance(module, AutoGuide)]
    shared = {id(guide_part.prototype_trace): guide_part.prototype_trace for guide_part in parts}
    # WORKAROUND(pyro-ppl<=1.9.2): AutoGuide.__getstate__ takes the model away from the guide that is copied
    models = [(guide_part, guide_part._model, guide_part.master) for guide_part in parts]
    try:
        copied = copy.deepcopy(guide, shared)
    finally:
        for guide_part, model, master in models:
            guide_part._model = model
            guide_part.master = master
    copied_parts = [module for module in copied.modules() if isinstance(module, AutoGuide)]
    for guide_part, (_, model, _) in zip(copied_parts, models, strict=True):
        guide_part._model = (change(model[0]),)
    keep_params_local(copied)
    return copied


def subsample_as(guide: AutoGuide, counts: Mapping[str, int]) -> None:
    """Let the plates of an AutoGuide that was made for all rows draw as many of them as the model's plates do."""
    for module in guide.modules():
        frames = (
            getattr(module, "_prototype_frames", None) if isinstance(module, AutoGuide) else None
        )
        for name in counts.keys() & (frames or {}).keys():
            frames[name] = frames[name]._replace(size=counts[name])


# -- kernels of MCMC ---------------------------------------------------------------------------------------------------


def hear_kinetic_energy(kernel: HMC, hear: Callable[[Tensor], None]) -> None:
    """From now on ``hear`` is called with each kinetic energy that the kernel computes."""
    # WORKAROUND(pyro-ppl<=1.9.2): it has no hook for energies
    compute = kernel._kinetic_energy

    def heard(momenta: dict) -> Tensor:
        energy = compute(momenta)
        hear(energy)
        return energy

    kernel._kinetic_energy = heard  # type: ignore[method-assign]


def potential_energy(kernel: HMC) -> float:
    """The potential energy of the kernel's latest state."""
    return float(kernel._fetch_from_cache()[1])


def mean_acceptance(kernel: HMC) -> float:
    """The mean acceptance rate of the transitions after the warm-up, or of those of the warm-up so far."""
    return kernel._mean_accept_prob


def divergent_draws(kernel: HMC) -> Iterable[int]:
    """The numbers of the draws at which the kernel diverged."""
    return kernel._divergences
