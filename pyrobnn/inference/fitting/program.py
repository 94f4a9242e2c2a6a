"""What a net or a plain Pyro program may ask of a method, and what has to be refused before any compute."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import transforms

from pyrobnn.core.checks import Refused, check_finite
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.derivative import FEW
from pyrobnn.model import BATCH_NORM, BNN, Density, derived, guards
from pyrobnn.model.bnn import DROPOUT
from pyrobnn.model.compile.trees import mapped
from pyrobnn.model.density import Program, is_identity
from pyrobnn.model.distribution_kinds import elementwise, is_improper
from pyrobnn.model.gradient import why_not_batched
from pyrobnn.model.net_checks import copied

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.loaders import Data

#: draws of a prior that show how much of it is cut off
_MANY_DRAWS = 1000
#: runs of a program at draws of its prior: so many show whether parameters are impossible, and so many how often
_FEW_RUNS = 20
_MANY_RUNS = 200
#: share of the prior where a parameter is impossible that is worth a word: rounding makes a matrix singular at times
_NOTICEABLE = 0.05
#: seconds of a gradient of a program whose prior is looked at
_CHEAP_SECONDS = 0.1
#: bytes of the draws of deterministic sites that a fit computes
_MAX_DERIVED = 2**30


def check_signature(program: Program) -> None:
    """TypeError unless the program can be called as ``fn(x, y)``: Python would say it from the middle of a trace."""
    signature = inspect.signature(program)
    try:
        signature.bind(None, None)
    except TypeError as error:
        if not signature.parameters:
            raise TypeError(
                "a Pyro program is called as fn(x, y), and this one takes no arguments: fit(lambda x, y: program())"
            ) from None
        raise TypeError(
            f"a Pyro program is called as fn(x, y), and this one cannot be: {error}. One of a single argument is "
            "fitted as fit(lambda x, y: program(x), data); for more than two, make x a tuple or a dict"
        ) from None


def timed_gradient(density: Density, data: Mapping[str, Data]) -> float:
    """Take one gradient of a program, and return the CPU seconds that it took in this thread.

    Raises:
        Refused: the gradient cannot be had, of overwritten values or of values that go through NumPy.
        ValueError: the data hold NaN that the program does not mask.
    """
    torch.func.grad(torch.sum)(torch.zeros(()))  # the first use imports for seconds
    z = density.sample_prior(1, seed=0)[0]
    begin = time.thread_time()
    try:
        gradient, value = torch.func.grad_and_value(density.log_joint)(z)
    except RuntimeError as error:
        if "Cannot access data pointer" in str(error):
            raise Refused(
                "the program hands sampled values to NumPy (or to other code outside of torch), where no gradient can "
                "follow them: compute with torch's functions, or write a torch.autograd.Function with its backward"
            ) from error
        if "setup_context" in str(error):
            raise Refused(
                "the program uses a torch.autograd.Function of the old style, as Pyro's DiscreteHMM does, which "
                "torch.func cannot follow: write it with setup_context, or the forward recursion with logsumexp"
            ) from error
        if "inplace operation" not in str(error):
            raise
        raise Refused(
            "the program overwrites values that its gradient needs, as h[t] = s * h[t - 1] does, which reads one "
            "element of h before it writes the next: collect the values in a list and torch.stack them"
        ) from error
    seconds = time.thread_time() - begin
    if not (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())):
        for name, value in data.items():
            if isinstance(value, Tensor):
                check_finite(name, value)
    return seconds


def check_proper(density: Density) -> None:
    """Refuse a latent value whose prior is masked out and on which nothing else depends: it has no posterior."""
    if not density.masked:
        return
    slope = torch.func.grad(lambda z: density.log_joint(z, jacobian=False))
    flat = torch.stack([slope(z) == 0 for z in density.sample_prior(2, seed=0)]).all(0)
    for site in density.sites:
        if site.name not in density.masked:
            continue
        count = int(flat[site.start : site.stop].sum())
        base = getattr(site.transform, "base_transform", site.transform)
        if count and (
            base == transforms.identity_transform or isinstance(base, transforms.ExpTransform)
        ):
            raise Refused(
                f"{count} of the {site.size} values of {site.name!r} are masked out and nothing else depends on them: "
                "they have no posterior. Sample the missing values alone, as their own site, and observe the others"
            )


def check_batched(density: Density, method: str) -> None:
    """Refuse a program or net whose Python looks at values: it can be run for one point at a time only."""
    run: Callable[[Any], Any] = torch.func.grad_and_value(density.log_joint)
    points: Any
    owner = density.owner
    if owner is None:
        points = density.sample_prior(2, seed=0)
    else:  # the rest of a BNN is ours; two rows tell as much as all
        points = {
            name: torch.stack([value, value]) for name, value in owner.initial_values().items()
        }
        run = functools.partial(lambda x, weights: owner.forward(weights, x), density.args[0][:2])
    try:
        with seeded(0, density.device):
            torch.func.vmap(run, randomness="different")(points)
    except RuntimeError as error:
        try:
            with seeded(0, density.device):
                run(mapped(operator.itemgetter(0), points))
        except RuntimeError:
            return  # the program's own mistake, which is told better where it is run
        raise Refused(
            f"{method} runs the program for many points at once, and {why_not_batched(error)}: write it with "
            "tensors (torch.where for if, 'with pyro.plate(…) as rows' for a loop over rows), or use MAP or NUTS"
        ) from error


def why_impossible(density: Density, points: Tensor) -> str:
    """What to do where a parameter is impossible at one of ``points`` (point, dim); empty where none is."""
    for z in points:
        places = density.impossible(z)
        if places:
            return f"{places[0]}, and is not there: compute it so that it always is, restrict the priors, or use NUTS"
    return ""


def refuse_dependent(density: Density, method: str) -> None:
    """Refuse a site whose support depends on another: the bijection to the reals is not the same everywhere."""
    if density.dependent:
        name = density.dependent[0]
        raise Refused(
            f"the support of {name!r} depends on other sites, and {method} needs the same one everywhere: scale a "
            "fraction (beta = (1 - alpha) * pyro.sample(..., dist.Beta(1.0, 1.0))), or use NUTS"
        )


def refuse_subsampling(density: Density, method: str) -> None:
    """Refuse a plate that subsamples: the density is another one at every step."""
    if density.stochastic is not None:
        raise Refused(
            f"the plate {density.stochastic!r} subsamples, so the density is another one at every step and {method} "
            "is not defined: take out subsample_size, or use SVI, SGLD, SGHMC, MAP or Laplace"
        )


def refuse_local(density: Density) -> None:
    """Refuse a latent site with a value for every row of a plate that draws a subsample: not all are in a batch."""
    for name, plate in density.local.items():
        raise Refused(
            f"the latent site {name!r} has a value for every row of the plate {plate!r}, which draws a subsample: take "
            "out subsample_size, and fit all rows at once, or use SVI"
        )


def refuse_unobserved(
    program: Program,
    density: Density,
    x: Any,
    y: Any,
) -> None:
    """ValueError where inputs are given and no outcomes, so that what would hold them is sampled like a parameter."""
    if x is None or y is not None or density.observes:
        return
    names = list(inspect.signature(program).parameters)[1:2]
    latent = [site.name for site in density.sites if site.kind == "latent"]
    site = next((name for name in names if name in latent), latent[-1])
    raise ValueError(
        f"'y' is not given, so the program observes nothing and would sample {site!r} as if it were a parameter: pass "
        "fit(program, x, y); draws from the prior are pyro.infer.Predictive(program, num_samples=…)(x)"
    )


def cut_priors(density: Density) -> list[Finding]:
    """The sites on the reals whose value is a parameter that must be positive, as a scale is, and what is cut off."""
    with seeded(0, density.device), torch.no_grad():
        nodes = density.run(density.constrain(density.sample_prior(1, seed=0)[0]))
        findings = []
        for site in density.sites:
            if site.kind != "latent" or not is_identity(site.transform):
                continue
            place = guards.bounded_parameter(nodes, nodes[site.name]["value"])
            law = nodes[site.name]["fn"]
            if place is None or is_improper(law):
                continue
            inside = place.constraint.check(law.sample((_MANY_DRAWS,)))
            share = 1.0 - float(inside.double().mean())
            if share > 0.0:
                values = {
                    "site": site.name,
                    "law": guards.kind_of(elementwise(law)).__name__,
                    "share": share,
                    "place": f"{place.parameter!r} of the site {place.site!r} is impossible",
                }
                findings.append(Finding("prior_cut", values))
    return findings


def impossible_under_prior(density: Density, seconds: float) -> list[Finding]:
    """The parameters that the program computes outside of their supports in a share of the draws of its prior.

    Args:
        density: of a plain program.
        seconds: that a gradient of it takes: the prior of a slow program is not looked at.
    """
    if seconds > _CHEAP_SECONDS:
        return []
    with seeded(0, density.device):
        counts = _impossible_places(density, _FEW_RUNS)
        if not counts:
            return []
        counts += _impossible_places(density, _MANY_RUNS - _FEW_RUNS)
    findings = []
    for place, count in counts.items():
        share = count / _MANY_RUNS
        if share >= _NOTICEABLE:
            values = {"place": str(place), "share": share}
            findings.append(Finding("impossible_under_prior", values))
    return findings


def _impossible_places(density: Density, num_runs: int) -> Counter[guards.Impossible]:
    """In how many runs at draws from the prior each parameter is impossible; of a prior without draws in none."""
    counts: Counter[guards.Impossible] = Counter()
    for _ in range(num_runs):
        # a latent site that has no draws is told where the program is run
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            counts.update(density.impossible_at_a_draw())
    return counts


class Derived(NamedTuple):
    """Draws ``values`` of the ``pyro.deterministic`` sites, entries of ``meta``, and what must be said of the draws."""

    values: dict[str, Tensor]
    meta: dict[str, Any]
    notes: list[Finding]


def what_program_says(
    density: Density, draws: Mapping[str, Tensor], fixed: Mapping[str, Tensor]
) -> Derived:
    """The ``pyro.deterministic`` sites of draws (chain, draw, …), the points of the program fixed."""
    fixed_density = density.holding(fixed)
    values, notes = _deterministic_draws(fixed_density, draws)
    for name, value in values.items():
        notes += _gaps(name, value.flatten(0, 1))
    meta = {
        "deterministic_sites": list(values),
        "axes": dict(fixed_density.derived.axes),
        "data_given": [value is not None for value in density.args],
    }
    return Derived(values, meta, notes)


def _deterministic_draws(
    density: Density, draws: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[Finding]]:
    """Draws (chain, draw, …) of the deterministic sites, or else the reason that there are none."""
    num_chains, num_draws = next(iter(draws.values())).shape[:2]
    sizes = density.derived.deterministic
    names = ", ".join(map(repr, sizes))
    size = num_chains * num_draws * sum(sizes.values()) * density.dtype.itemsize
    if size > _MAX_DERIVED:
        return {}, [Finding("deterministic_too_large", {"names": names, "gib": size / 2**30})]
    try:
        return derived.deterministic(density, draws), []
    except (RuntimeError, ValueError, IndexError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return {}, [Finding("deterministic_failed", {"names": names, "reason": reason})]


def _gaps(name: str, value: Tensor) -> list[Finding]:
    """That values (draw, …) of a deterministic site are not finite in some draws."""
    # what is not finite in every draw is so by the data; in some draws, it is by the parameters
    bad = ~torch.isfinite(value).reshape(len(value), -1)
    count = int((bad & ~bad.all(0)).any(1).sum())
    if not count:
        return []
    return [Finding("deterministic_gaps", {"name": name, "count": count, "draws": len(bad)})]


def refuse_random(model: BNN, x: Tensor, *, deterministic: bool) -> None:
    """Refuse a net that draws random numbers in evaluation mode.

    Where ``deterministic``, also one that training mode makes random or another function.
    """
    if _draws(model, model.eval_net, x):
        raise Refused(
            "the net draws random numbers, in evaluation mode too, so it is another function at every call: "
            "take the noise out of it; that of the targets is the likelihood's"
        )
    if deterministic and (_draws(model, model.thread_net, x) or _differs_by_mode(model, x)):
        raise Refused(
            "the net is in training mode, where it draws random numbers or is another function than in evaluation mode "
            "and has no density: call net.eval() before building the BNN"
        )


def refuse_hidden_noise(model: BNN, x: Tensor) -> None:
    """Refuse a net in training mode whose forward draws random numbers itself, beside those of its layers.

    Nobody sees ``functional.dropout`` or stochastic depth among the layers, so it would be left out in silence. ``x``
    lies where the fit computes; the model may still be elsewhere.
    """
    quiet = model.to(x.device).with_nets(_with_quiet_layers)
    if _draws(quiet, quiet.thread_net, x):
        raise Refused(
            "the forward of the net draws random numbers in training mode beside its dropout layers (as by "
            "torch.nn.functional.dropout), which this method cannot follow: make a layer of them (nn.Dropout), or call "
            "net.eval() before building the BNN"
        )


def _with_quiet_layers(net: torch.nn.Module) -> torch.nn.Module:
    """A copy of the net whose batch-norm and dropout layers are in evaluation mode, and the others as they are."""
    quiet = copied(net)
    for module in quiet.modules():
        if isinstance(module, BATCH_NORM + DROPOUT):
            module.eval()
    return quiet


@torch.no_grad()
def _draws(model: BNN, net: torch.nn.Module, x: Tensor) -> bool:
    """Whether a pass of the net moves the random state."""
    devices = [torch.device("cpu"), model.device]
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with seeded(0, *devices):
        torch.func.functional_call(net, buffers, (x[:FEW],))
        after = [float(torch.rand((), device=device)) for device in devices]
    with seeded(0, *devices):
        return after != [float(torch.rand((), device=device)) for device in devices]


@torch.no_grad()
def _differs_by_mode(model: BNN, x: Tensor) -> bool:
    """Whether training mode changes the output, at weights that are not the net's own."""
    with seeded(0, model.device):
        values = {n: v + 0.1 * torch.randn_like(v) for n, v in model.net.named_parameters()}
        values |= {name: buffer.clone() for name, buffer in model.net.named_buffers()}
        f, f_training = (
            torch.func.functional_call(net, values, (x[:FEW],))
            for net in (model.eval_net, model.thread_net)
        )
    return bool((f - f_training).abs().max() > 1e-3 * f.abs().max())


@torch.no_grad()
def rows_together(model: BNN, x: Tensor) -> list[Finding]:
    """A finding where the net's output for a row depends on the other rows of ``x`` (N, …), else an empty list.

    A mean over the batch makes it so, or a branch on one.
    """
    with warnings.catch_warnings(action="ignore"):  # what a batch of one is asked for
        for rows in (x[:FEW], _unlike_rows(x)):
            alone = torch.cat([model.forward({}, row[None]) for row in rows[:2]])
            together = model.forward({}, rows)[:2]
            off = float((alone - together).abs().max())
            largest = float(together.abs().max())
            # a product of another number of rows, or a low precision, may change a hundredth
            if not off <= 0.01 * largest and math.isfinite(largest):
                return [Finding("rows_together", {"change": off if math.isfinite(off) else None})]
    return []


def _unlike_rows(x: Tensor) -> Tensor:
    """The rows of inputs (N, …) with the smallest and the largest sum, before others: a net may branch on a mean."""
    sums = x.reshape(len(x), -1).sum(1)
    ends = torch.stack([sums.argmin(), sums.argmax()])
    return torch.cat([x[ends], x[: FEW - 2]])
