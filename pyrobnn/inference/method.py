"""What a method of inference is: a frozen configuration with ``fit``, and the few facts that others ask of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, get_args, runtime_checkable

from pyrobnn.checks import Refused, check_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pyrobnn.inference.fitting.problem import Callback
    from pyrobnn.inference.fitting.sizes import Need, Sizes
    from pyrobnn.model import BNN
    from pyrobnn.posterior import Posterior

Kind = Literal["chains", "independent", "point"]
Claim = Literal["exact", "approximate", "none"]
#: options of ``fit`` that a method may have no use for: where they are given to it all the same, it refuses
OPTIONAL = ("init", "until_ess", "checkpoint", "stream_to")


@runtime_checkable
class Method(Protocol):
    """A method of inference; those of the package derive from it, a foreign one may.

    The facts (``kind``, ``claim``, ``remedy``) go into ``meta`` of every posterior and into its tree: whoever judges
    draws asks these and never which method made them.

    Attributes:
        kind: ``"chains"``: Markov chains, judged by R-hat; ``"independent"`` draws; ``"point"``: one draw.
        claim: what the draws say they are: ``"exact"``: of the posterior, once the chains have converged, so that
            other methods are measured against them; ``"approximate"``: of a distribution made to be close to it;
            ``"none"``: their spread has another reason than the prior.
        has_density: whether the posterior has an approximation q (``log_q``, ``guide``, Pareto k-hat).
        gathers: whether ``fit`` gathers the batches of a DataLoader in memory.
        uses: those of the options ``init``, ``until_ess``, ``checkpoint`` and ``stream_to`` that ``fit`` has a use for.
        shares_rows: whether ranks can share the rows of its batches: all that it does with them is a mean of gradients.
        default_draws: draws of each chain where ``fit`` is not told.
        remedy: what to do, in a sentence, where the draws are found to be far from the posterior; of an instance whose
            options do that already, without it.

    One that has ``work(sizes: Sizes) -> float``, the number of gradients of one datum that ``fit`` takes, is told of by
    :func:`pyrobnn.studies.forecast.expected_seconds` before it starts.
    """

    kind: ClassVar[Kind]
    claim: ClassVar[Claim]
    has_density: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("init",)
    default_draws: ClassVar[int] = 1000
    remedy: ClassVar[str] = "Run NUTS and compare."

    def fit(
        self,
        model: BNN | Callable[..., Any],
        x: Any = None,
        y: Any = None,
        *,
        num_draws: int | None = None,
        seed: int = 0,
        init: Posterior | nn.Module | None = None,
        device: str | torch.device | None = None,
        until_ess: float | None = None,
        checkpoint: str | Path | None = None,
        stream_to: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> Posterior:
        """The posterior of ``model`` given data; every method takes these arguments, by these names."""
        ...

    def memory(self, model: BNN, sizes: Sizes) -> Need:
        """Bytes that ``fit`` will take, by part."""
        ...


M = TypeVar("M", bound=type)


@dataclass(frozen=True)
class Registered:
    """A method as the command line knows it.

    Attributes: ``cls``; ``standard``, whether ``pyrobnn compare`` runs it where nobody names methods; ``full`` and
    ``quick``, the options with which it makes it in a full run, and those that differ in a quick one (``num_draws`` is
    handed to ``fit``).
    """

    cls: type[Method]
    standard: bool
    full: Mapping[str, Any]
    quick: Mapping[str, Any]


#: every method there is, by its name on the command line, in the order of registration
METHODS: dict[str, Registered] = {}


def register(
    command: str,
    *,
    standard: bool = False,
    full: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any] | None = None,
) -> Callable[[M], M]:
    """Class decorator that makes a method known: to ``pyrobnn compare``, to ``preflight``, to error messages.

    Args:
        command: its name on the command line.
        standard: run it by ``pyrobnn compare`` where nobody names methods.
        full: options of a full run of ``pyrobnn compare`` that are not the class's own defaults.
        quick: options of a quick run, beside or instead of those.

    Raises:
        TypeError: the class lacks a fact, or its ``fit`` takes other arguments than :meth:`Method.fit`.
        ValueError: ``command`` is the name of another method.
    """

    def decorate(cls: M) -> M:
        _check(cls)
        known = METHODS.get(command)
        # the same class again is a module or a notebook's cell that was run once more
        if known is not None and _place(known.cls) != _place(cls):
            raise ValueError(f"{command!r} is the name of {known.cls.__name__}: choose another")
        METHODS[command] = Registered(cls, standard, dict(full or {}), dict(quick or {}))
        return cls

    return decorate


def check_call(method: Method, num_draws: int | None, seed: int, **optional: Any) -> int:
    """The arguments that every ``fit`` shares, checked; returns the number of draws.

    Args:
        method: the configuration.
        num_draws: as ``fit`` got it; None takes the method's own number.
        seed: as ``fit`` got it.
        optional: the options of :data:`OPTIONAL`, each None where it was not given.

    Raises:
        TypeError, ValueError: naming the argument.
        Refused: an option that the method has no use for.
    """
    count = method.default_draws if num_draws is None else num_draws
    check_count("num_draws", count)
    check_count("seed", seed, minimum=0)
    if method.kind == "point" and count != 1:
        raise ValueError(
            f"'num_draws' must be 1 for a point estimate, got {count}: use DeepEnsemble, SVI or NUTS"
        )
    for option, value in optional.items():
        if value is not None:
            check_use(method, option)
    return count


def check_use(method: Method, option: str) -> None:
    """Refuse an option of ``fit`` that the method has no use for.

    Raises:
        Refused: naming the methods that have.
    """
    if option not in method.uses:
        users = [each.cls.__name__ for each in METHODS.values() if option in each.cls.uses]
        whose = ", ".join(users) if len(users) <= 3 else "other methods"
        raise Refused(f"{option!r} is an option of {whose}, not of {type(method).__name__}: leave it out")


def _check(cls: type[Any]) -> None:
    facts = ("kind", "claim", "has_density", "gathers", "uses", "default_draws", "remedy", "memory", "fit")
    if missing := [name for name in facts if not hasattr(cls, name)]:
        raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}: see pyrobnn.inference.method.Method")
    for name, known in (("kind", Kind), ("claim", Claim)):
        if (value := getattr(cls, name)) not in get_args(known):
            raise TypeError(f"{cls.__name__}.{name} must be one of {get_args(known)}, got {value!r}")
    own, asked = _arguments(cls.fit), _arguments(Method.fit)
    if own != asked:
        wrong = sorted({name for name, *_ in set(own) ^ set(asked)}) or ["their order"]
        raise TypeError(
            f"{cls.__name__}.fit does not take the arguments of every fit ({', '.join(wrong)}): give it the signature "
            "of pyrobnn.inference.method.Method.fit"
        )


def _arguments(fit: Callable[..., Any]) -> list[tuple[Any, ...]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(fit).parameters.values()]


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
