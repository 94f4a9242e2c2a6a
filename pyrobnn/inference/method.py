"""What a method of inference is: a frozen configuration with ``fit``, and the few facts that others ask of it."""

from __future__ import annotations

import abc
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar, final

from torch.utils.data import DataLoader, Dataset

from pyrobnn.core.checks import Refused, as_tensor, check_count, check_type
from pyrobnn.core.option_names import refuse_unknown
from pyrobnn.core.threads import process_state
from pyrobnn.inference.batch_norm import training_norms
from pyrobnn.inference.fitting.checkpoints import Stages, stages_of
from pyrobnn.inference.fitting.collapse import collapsed
from pyrobnn.inference.fitting.initial import start_values
from pyrobnn.inference.fitting.problem import (
    Callback,
    Problem,
    known_to_subfits,
    posterior_with_notes,
    prepare,
)
from pyrobnn.inference.fitting.program import refuse_hidden_noise
from pyrobnn.inference.fitting.raw_errors import explained
from pyrobnn.inference.fitting.watch import MappedCallback
from pyrobnn.inference.training_mode import (
    TrainingMode,
    callback_with_statistics,
    rows_of_training,
    with_statistics,
)
from pyrobnn.model import BNN
from pyrobnn.model.compile import Compiled, recorded
from pyrobnn.model.compile.interrupts import raised_by_handlers
from pyrobnn.model.several_inputs import as_rows
from pyrobnn.posterior.ranges import InputRange, column_names
from pyrobnn.posterior.rows import Rows

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pyrobnn.model.density import Program
    from pyrobnn.posterior import Posterior

Kind = Literal["chains", "independent", "point"]
Claim = Literal["exact", "approximate", "none"]

#: options of ``fit`` that a method may have no use for: where they are given to it all the same, it refuses
OPTIONAL = ("init", "checkpoint")
#: what to do with a fit that misses the posterior, for the remedies of methods
REFINE = "refine it (posterior.refine(), or pyrobnn compare --refine 10)"


@dataclass(frozen=True, eq=False)
class FitRun:
    """What a fit was asked for, checked: the arguments of :meth:`Method.fit`.

    ``given`` are the model, x and y as the user handed them over (a :class:`Problem` has them checked, in its units and
    on its device); ``stages`` are the loops of the fit, which a checkpoint has.
    """

    num_draws: int
    seed: int = 0
    init: Posterior | nn.Module | None = None
    checkpoint: str | Path | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    given: tuple[Any, Any, Any] = field(default=(None, None, None), repr=False)
    stages: Stages = field(default_factory=Stages)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _asked_for(fit: Callable[_P, _R]) -> Callable[_P, _R]:
    """``fit``, which says of an option that it does not have where that is found and how it is called here."""
    options = [name for name in inspect.signature(fit).parameters if name != "self"]
    num_positional = 1 + options.index("num_draws")

    @functools.wraps(fit)
    def checked(*args: _P.args, **given: _P.kwargs) -> _R:
        method: Any = args[0] if args else None
        constructor = f"the method, pb.{type(method).__name__}(…)"
        refuse_unknown("fit", given, {"": options, constructor: _fields(type(method))})
        if len(args) > num_positional and isinstance(method, Method):
            raise TypeError(
                f"fit takes a model, x and y, got {len(args) - 1} arguments: for a program of more, make x a tuple or "
                "a dict; options go by name, fit(model, x, y, num_draws=1000)"
            )
        return fit(*args, **given)

    return checked


def _fields(cls: type) -> list[str]:
    """The options of a method's constructor."""
    return [] if cls is type(None) else list(inspect.signature(cls).parameters)


def _explain_constructor(cls: type[Method]) -> None:
    """Make the constructor of a method say what is wrong with an option of another library, or with a model there."""
    construct = cls.__init__
    names = _fields(cls)
    places = {"": names, "fit, as in fit(model, x, y, …)": _fit_options()}

    @functools.wraps(construct)
    def checked(self: Method, *args: Any, **options: Any) -> None:
        if args and _is_model(args, names[0]):
            raise TypeError(
                f"pb.{cls.__name__}(…) takes options alone, and the model goes into fit: "
                f"pb.{cls.__name__}().fit(model, x, y)"
            )
        refuse_unknown(cls.__name__, options, places)
        construct(self, *args, **options)

    constructor: Any = cls
    constructor.__init__ = checked


def _fit_options() -> list[str]:
    """The options of ``fit`` by their names."""
    return list(inspect.signature(Method.fit).parameters)[1:]


def _is_model(args: Sequence[Any], option: str) -> bool:
    """Whether the arguments of a constructor begin with a model, in the place of the ``option``."""
    models = [callable(value) and not isinstance(value, type) for value in args[:2]]
    # a guide may be a function, and is the only argument then
    return models[0] and (option != "guide" or all(models))


_FIT = "a method is run by fit(model, x, y), which returns the posterior"
#: what Pyro and others call running a method, and what it is here
_VERBS = dict.fromkeys(("run", "sample", "step", "train", "optimize", "warmup"), _FIT) | {
    "get_samples": "the draws are those of the posterior that fit(model, x, y) returns, posterior.draws",
    "predict": "the posterior that fit(model, x, y) returns predicts, posterior.predict(x)",
}


class Method(abc.ABC):
    """A method of inference: a frozen dataclass of options that says how to ``_fit`` a problem.

    The facts (``kind``, ``claim``, ``remedy``) go into ``meta`` of every posterior and into its tree: whoever judges
    draws asks these and never which method made them.

    Attributes:
        kind: ``"chains"``: Markov chains, judged by R-hat; ``"independent"`` draws; ``"point"``: one draw.
        claim: what the draws say they are: ``"exact"``: of the posterior, once the chains have converged, so that
            other methods are measured against them; ``"approximate"``: of a distribution made to be close to it;
            ``"none"``: their spread has another reason than the prior.
        has_density: whether the posterior has an approximation q (``log_q``, ``guide``, Pareto k-hat).
        points: whether parameters without a prior are optimised along (``"free"``) or ``"held"`` where they start.
        gathers: whether ``fit`` gathers the batches of a DataLoader in memory; otherwise it streams them.
        deterministic: whether the net must be one function: layers in training mode are then refused.
        trains: whether layers in training mode are trained so, batch-norm layers with the statistics of each batch and
            dropout as noise, and held to one function afterwards.
        local_rows: whether a latent site may have a value for each row of a plate that draws a subsample.
        shares_rows: whether the ranks of :func:`pyrobnn.distributed.fit_on_ranks` can share the rows of one fit.
        uses: those of the options ``init`` and ``checkpoint`` that ``fit`` has a use for.
        default_draws: draws of each chain where ``fit`` is not told.
        remedy: what to do, in a sentence, where the draws are found to be far from the posterior; of an instance whose
            options do that already, without it.
    """

    kind: ClassVar[Kind]
    claim: ClassVar[Claim]
    has_density: ClassVar[bool] = False
    points: ClassVar[Literal["free", "held"]] = "free"
    gathers: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    local_rows: ClassVar[bool] = False
    shares_rows: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("init",)
    default_draws: ClassVar[int] = 1000
    remedy: ClassVar[str] = f"The fit misses the posterior: {REFINE}, or run NUTS and compare."

    @final
    @_asked_for
    def fit(
        self,
        model: BNN | Program,
        x: Any = None,
        y: Any = None,
        *,
        num_draws: int | None = None,
        seed: int = 0,
        init: Posterior | nn.Module | None = None,
        device: str | torch.device | None = None,
        checkpoint: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> Posterior:
        """The posterior of ``model`` given data. What is special about a method stands with its class.

        Fits in several threads of a process run one after another, predictions beside them.

        Args:
            model: a :class:`pyrobnn.BNN`, or a plain Pyro program ``fn(x, y)`` where the method can take one. Its
                ``pyro.param`` begin at the values it states; those without one are read from Pyro's parameter store,
                which stays as it is.
            x, y: the data; or ``x`` a DataLoader of (x, y) batches, streamed or gathered, and ``y`` left out.
            num_draws: draws of each chain; default the method's own number. A point estimate has 1, an ensemble one
                draw a member.
            seed: of all randomness: starts, batches, noise and draws.
            init: where to start: an earlier posterior or a trained net; default the model's own net.
            device: where to compute; default where ``x`` is.
            checkpoint: a file to write once a minute, and on Ctrl-C, SIGTERM or an error in a callback; where it exists
                the fit goes on from there, to the same posterior to the bit. Of Laplace, its search for the mode.
            callbacks: each called as ``callback(step, metrics)`` while the fit runs; ``metrics["snapshot"]()`` is the
                present posterior; True stops.
            progress: show a progress bar.

        Returns:
            Posterior with draws (num_chains, num_draws, …) by site; what else it has stands with the method's class.

        Raises:
            TypeError, ValueError: bad data or arguments, naming the argument.
            Refused: what the method cannot do, before any compute: the message names the remedy.
            FloatingPointError: the fit diverged, naming the step.
            KeyboardInterrupt: Ctrl-C before there is anything to return; later it returns what there is, marked.
        """
        if not isinstance(self, Method):
            raise TypeError(
                "fit was called on the class: make a method of it first, as in pb.MAP().fit(model, x, y)"
            )
        count = check_call(
            self,
            num_draws,
            seed,
            init=init,
            checkpoint=checkpoint,
        )
        for callback in check_type(
            "callbacks", callbacks, Sequence, "a list of functions (step, metrics)"
        ):
            check_type("callbacks", callback, Callable, "a list of functions (step, metrics)")
        if isinstance(model, BNN):
            x = as_rows(model.net, x)
        run = FitRun(count, seed, init, checkpoint, tuple(callbacks), progress, (model, x, y))
        with process_state(), raised_by_handlers(), explained(model):
            problem = self._prepare(run, device)
            run = replace(run, stages=stages_of(self, problem, run))
            with recorded() as functions, known_to_subfits(problem.density):
                posterior = self._fit_head(problem, run)
            if len(problem.output_shape) > 1:
                positions = {"output_shape": list(problem.output_shape)}
                posterior = replace(posterior, meta=posterior.meta | positions)
            posterior = posterior_with_notes(posterior, collapsed(posterior, x, y))
        meta = posterior.meta | _tier(functions) | _input_range(model, x)
        return replace(
            posterior,
            rows=Rows.of(model, x, y),
            meta=meta,
        )

    def _fit_head(self, problem: Problem, run: FitRun) -> Posterior:
        """By the net's head where what comes before its first parameter with a prior stays: that is computed once."""
        trunk = None if self.has_density else problem.held_trunk(self.points)
        if trunk is None:
            return self._fit_in_mode(problem, run)
        head_meta = {"head": trunk.path, "input_shape": list(problem.x.shape[1:])}

        def whole(posterior: Posterior) -> Posterior:
            return replace(
                posterior,
                model=problem.model,
                meta=posterior.meta | head_meta,
            )

        def mapped(metrics: Mapping[str, Any]) -> dict[str, Any]:
            return {**metrics, "snapshot": lambda: whole(metrics["snapshot"]())}

        callbacks = tuple(MappedCallback(callback, mapped) for callback in run.callbacks)
        head = problem.at_head(trunk, self.points)
        return whole(self._fit(head, replace(run, callbacks=callbacks)))

    def _fit_in_mode(self, problem: Problem, run: FitRun) -> Posterior:
        """The posterior, of a net trained with the statistics of batches with running statistics for every draw."""
        if not (self.trains and problem.is_bnn and training_norms(problem.bnn)):
            return self._fit(problem, run)
        num_gradients = self._num_gradients(run.num_draws)
        rows_seen = rows_of_training(problem, num_gradients, getattr(self, "batch_size", None))
        callbacks = tuple(
            callback_with_statistics(problem, callback, rows_seen) for callback in run.callbacks
        )
        posterior = self._fit(problem, replace(run, callbacks=callbacks))
        return with_statistics(problem, posterior, rows_seen)

    def _prepare(self, run: FitRun, device: str | torch.device | None) -> Problem:
        """The checked problem.

        A method that refuses some models, or holds them in another way, does so here and goes on with this.
        """
        # where parameters that are not optimised stand in ``init``
        holds_points = run.init is not None and (
            self.points == "held" or getattr(run.given[0], "frozen", None)
        )
        values = start_values(run.given[0], run.init) if holds_points else None
        options: dict[str, Any] = {"stream": not self.gathers, "deterministic": self.deterministic}
        options["local_rows"] = self.local_rows
        options["num_draws"] = run.num_draws * self._num_parallel
        model, *data = run.given
        mode = TrainingMode.of(model) if self.trains else None
        if mode is not None:
            model = mode.evaluated
            options["deterministic"] = False
            options["noisy"] = mode.noisy
        problem = prepare(
            model,
            *data,
            points=self.points,
            device=device,
            values=values,
            **options,
        )
        # where dropout layers are noise of the training, so is what the forward draws beside them
        if not self.deterministic or (mode is not None and not mode.dropouts):
            refuse_hidden_noise(run.given[0], problem.x)
        return problem if mode is None else mode.of_problem(problem)

    def _num_gradients(self, num_draws: int) -> int:
        """Gradients of a batch that a training for so many draws of each chain takes."""
        return int(getattr(self, "num_steps", 0))

    @property
    def _num_parallel(self) -> int:
        """Chains that make ``num_draws`` draws each in memory."""
        return 1

    def __getattr__(self, name: str) -> Any:
        """An AttributeError that says how a method is run, where it is asked for a verb of Pyro's."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _VERBS:
            message += f": {_VERBS[name]}"
        raise AttributeError(message, name=name, obj=self)

    @abc.abstractmethod
    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        """The posterior of a checked problem, made by :func:`pyrobnn.inference.fitting.problem.make_posterior`.

        The course of a fit: :meth:`fit` checks the call; ``_prepare`` the model and the data; ``_fit_head`` computes a
        trunk that is held once, and goes on with the head; ``_fit_in_mode`` sees to the statistics of batch-norm layers
        in training mode; and this is the method itself.
        """


def _tier(functions: Sequence[Compiled]) -> dict[str, dict[str, Any]]:
    """What ``meta["tier"]`` has: how the function that was to be called most often was run, and what was forecast."""
    if not functions:
        return {}
    main = max(functions, key=lambda function: function.calls)
    return {"tier": {"tier": main.tier} | ({} if main.forecast is None else main.forecast.meta())}


def _input_range(model: BNN | Program, x: Any) -> dict[str, Any]:
    """The entries of ``meta`` that have the least and the largest inputs of a net, and the names of the columns of a
    data frame; none of a loader's.
    """
    if not isinstance(model, BNN) or isinstance(x, (DataLoader, Dataset)):
        return {}
    names = column_names(x)
    known = {"input_names": names} if names else {}
    return known | {"input_range": InputRange.of(as_tensor("x", x)).state()}


@dataclass(frozen=True)
class Registered:
    """A method as the command line knows it, with the arguments of :func:`register`."""

    cls: type[Method]
    standard: bool
    full: Mapping[str, Any]
    quick: Mapping[str, Any]


#: every method there is, by its name on the command line, in the order of registration
METHODS: dict[str, Registered] = {}

_M = TypeVar("_M", bound=type)


def register(
    command: str,
    *,
    standard: bool = False,
    full: Mapping | None = None,
    quick: Mapping | None = None,
) -> Callable[[_M], _M]:
    """Class decorator that makes a method known: to ``pyrobnn compare``, to error messages.

    Args:
        command: its name on the command line.
        standard: run it by ``pyrobnn compare`` where nobody names methods.
        full: options of a full run of ``pyrobnn compare`` that are not the class's own defaults.
        quick: options of a quick run, beside or instead of those.

    Raises:
        TypeError: the class is not a :class:`Method`, or lacks a fact.
        ValueError: ``command`` is the name of another method.
    """

    def decorate(cls: _M) -> _M:
        lacking = [name for name in ("kind", "claim") if not hasattr(cls, name)]
        if lacking:
            raise TypeError(
                f"{cls.__name__} lacks {lacking}: derive it from pyrobnn.inference.method.Method"
            )
        known = METHODS[command].cls if command in METHODS else cls
        # the same class again is a module or a notebook's cell that was run once more
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{command!r} is the name of {known.__name__}: choose another")
        _explain_constructor(cls)
        METHODS[command] = Registered(cls, standard, dict(full or {}), dict(quick or {}))
        return cls

    return decorate


def check_method(method: Method, *, instead: str = "") -> Method:
    """The method, where whoever takes one was given one; ``instead`` says what else may stand there."""
    check_type("method", method, Method, f"{instead}a method such as pyrobnn.Laplace()")
    return method


def check_call(
    method: Method,
    num_draws: int | None,
    seed: int,
    *,
    init: Posterior | nn.Module | None = None,
    checkpoint: str | Path | None = None,
) -> int:
    """The number of draws, and the other arguments that every ``fit`` shares checked.

    Raises:
        TypeError, ValueError: naming the argument.
        Refused: an option that the method has no use for.
    """
    count = method.default_draws if num_draws is None else num_draws
    check_count("num_draws", count)
    check_count("seed", seed, minimum=0)
    check_type("checkpoint", checkpoint, str | os.PathLike | None, "a path")
    if method.kind == "point" and count != 1:
        raise ValueError(
            f"'num_draws' must be 1 for a point estimate, got {count}: use DeepEnsemble, SVI or NUTS"
        )
    for option, value in {"init": init, "checkpoint": checkpoint}.items():
        if value is not None and option not in method.uses:
            users = [
                registered.cls.__name__
                for registered in METHODS.values()
                if option in registered.cls.uses
            ]
            whose = ", ".join(users) if len(users) <= 3 else "other methods"
            raise Refused(
                f"{option!r} is an option of {whose}, not of {type(method).__name__}: leave it out"
            )
    return count
