"""Guides that a user has written as Pyro programs, as modules of flat parameters; and whether a guide fits a model."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyro
import pyro.distributions as dist
from pyro.infer.autoguide import AutoMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import transform_to

from pyrobnn.core.checks import Refused
from pyrobnn.core.private_pyro import is_param_statement, keep_params_local
from pyrobnn.model.density import Density, Site
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.handlers import (
    Supply,
    followed_modules,
    own_store,
    readable_by_plates,
    refuse_unfollowed,
)
from pyrobnn.model.log_terms import without_validation
from pyrobnn.model.nodes import Message, Node, is_latent, is_observed

if TYPE_CHECKING:
    from pyrobnn.inference.fitting.loaders import Data

#: a Pyro program that samples a model's latent sites
_Guide: TypeAlias = Callable[..., Any]


class WrittenGuide(nn.Module):
    """A guide ``guide(x, y)`` of ``pyro.sample`` statements, as a module that holds all of its parameters.

    They are those of its ``pyro.param`` and ``pyro.module`` statements, unconstrained, and of the module itself where
    it is one. They begin at the values that the guide states; Pyro's parameter store and the nets stay as they are.

    Args:
        program: a function, or a module such as a ``PyroModule``, which is copied.
        density: the model; the guide is called with its data.

    Raises:
        Refused: a guide that shares a parameter's name with the model, or that registers a net by another name of
            ``pyro.module``.
    """

    def __init__(self, program: _Guide, density: Density):
        super().__init__()
        self.title = getattr(program, "__name__", type(program).__name__)
        self._program: _Guide | None = None
        if isinstance(program, nn.Module):
            # an attribute, so that its parameters are registered here
            self.module = copy.deepcopy(program)
            keep_params_local(self.module)
        else:
            self._program = program
        self._statements: dict[str, tuple[str, Any]] = {}
        for name, node in self._first_run(density).items():
            if node["type"] == "param" and is_param_statement(node):
                self._declare(name, node, density)

    def _first_run(self, density: Density) -> Mapping[str, Node]:
        """The nodes of a run whose parameters have the values that the guide states."""
        local = pyro.settings.context(module_local_params=True)
        with own_store() as stored, local, without_validation(), pyro.poutine.block():
            values = _InitialValues({}, {}, stored=stored)
            with rows_of(density), followed_modules(()) as followed, values:
                trace = pyro.poutine.trace(self.run).get_trace(*density.args)
        nodes: Mapping[str, Node] = trace.nodes
        statements = [name for name in trace.param_nodes if is_param_statement(nodes[name])]
        refuse_unfollowed(statements, followed, "guide")
        return nodes

    def _declare(
        self,
        name: str,
        node: Node,
        density: Density,
    ) -> None:
        """Hold the parameter of a ``pyro.param`` statement."""
        if name in density.initial_points:
            raise Refused(
                f"the parameter {name!r} is in the guide and in the model: give that of the guide another name"
            )
        transform = transform_to(node["kwargs"].get("constraint", dist.constraints.real))
        start = transform.inv(node["value"].detach())
        # a name of the statement may hold what that of a parameter may not
        key = f"statement_{len(self._statements)}"
        self.register_parameter(key, nn.Parameter(start.clone()))
        self._statements[name] = key, transform

    @property
    def names(self) -> dict[str, str]:
        """The names of the guide's statements by those of the parameters."""
        return {key: name for name, (key, _) in self._statements.items()}

    def run(self, *args: Data) -> Any:
        """Call the guide as it was written."""
        program = self.module if self._program is None else self._program
        if isinstance(program, AutoMessenger):
            # it runs the model, whose data are no part of the guide
            with pyro.poutine.block(hide_fn=is_observed):
                return program(*args)
        return program(*args)

    def forward(self, *args: Data) -> Any:
        """Run the guide at the present parameters."""
        values = {
            name: transform(getattr(self, key))
            for name, (key, transform) in self._statements.items()
        }
        with followed_modules(values), _PresentValues(values):
            return self.run(*args)


class _InitialValues(Supply):
    """Gives ``pyro.param`` statements the values that they state; what a module reads of itself it has."""

    def _pyro_param(self, msg: Message) -> None:
        if is_param_statement(msg):
            super()._pyro_param(msg)


class _PresentValues(Messenger):
    """Answers the ``pyro.param`` statements of a guide by the present values of its parameters."""

    def __init__(self, values: Mapping[str, Tensor]):
        super().__init__()
        self.values = values

    def _pyro_param(self, msg: Message) -> None:
        if not is_param_statement(msg):
            return
        name = msg["name"]
        if name not in self.values:
            raise Refused(
                f"the parameter {name!r} is in some runs of the guide only: state all of its parameters always"
            )
        msg["value"] = readable_by_plates(self.values[name], msg)
        msg["done"] = True


def rows_of(density: Density) -> contextlib.AbstractContextManager[None]:
    """The context in which a guide's plates take the rows of the model's: those that its local sites belong to."""
    if density.local or density.rows is not None:
        return density.plates()
    return contextlib.nullcontext()


def takes_data(guide: _Guide) -> bool:
    """Whether a function needs two arguments, as a guide ``guide(x, y)`` does and what makes a guide of a model not."""
    maker = guide.func if isinstance(guide, functools.partial) else guide
    if isinstance(maker, type):
        return False
    positional = [
        parameter
        for parameter in inspect.signature(guide).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [parameter for parameter in positional if parameter.default is parameter.empty]
    return len(needed) > 1


def has_sites(guide: _Guide, density: Density) -> bool:
    """Whether a function that may be a guide, or may make one, samples anything when it is called with the data.

    Raises:
        Refused: it is a guide, of parameters that cannot be followed.
    """
    try:
        inspect.signature(guide).bind(*density.args)
        nodes = WrittenGuide(guide, density)._first_run(density)
    except Refused:
        raise  # it is a guide, and what it may not do is said
    except Exception:  # noqa: BLE001  # whatever a function does that is called with what it was not made for
        return False
    return any(map(is_latent, nodes.values()))


def check_sites(nodes: Mapping[str, Node], sites: Sequence[Site]) -> None:
    """Refuse a guide whose sites are not those of the model, by name.

    Raises:
        Refused: sites that are missing, or that the model has not.
    """
    known = [site.name for site in sites]
    missing = [name for name in known if name not in nodes or not is_latent(nodes[name])]
    additional = [
        name for name, node in nodes.items() if name not in known and _is_model_site(node)
    ]
    difference = _difference(missing, additional)
    if difference:
        raise Refused(f"the guide {difference}: its sites must be {_quoted(known)}")


def _difference(missing: Sequence[str], additional: Sequence[str]) -> str:
    """How the sites of a guide differ from the model's, in words; empty where they do not."""
    words = []
    if missing:
        words.append(f"lacks {_quoted(missing)}, which the model samples")
    if additional:
        words.append(f"samples {_quoted(additional)}, which the model does not")
    return " and ".join(words)


def _is_model_site(node: Node) -> bool:
    """Whether a guide samples the node for a latent site of the model, not as one that is auxiliary."""
    return is_latent(node) and not node["infer"].get("is_auxiliary")


def check_written(nodes: Mapping[str, Node], sites: Sequence[Site]) -> None:
    """Refuse a hand-written guide that has no density over the sites, or no gradient through them.

    Raises:
        Refused: auxiliary sites, a point, another shape, a distribution that is not reparameterised.
    """
    auxiliary = [name for name, node in nodes.items() if node.get("infer", {}).get("is_auxiliary")]
    if auxiliary:
        raise Refused(
            f"the guide samples {_quoted(auxiliary)} beside the model's sites, so that its density of the draws is "
            "unknown: sample the sites themselves"
        )
    for site in sites:
        node = nodes[site.name]
        shape = tuple(node["value"].shape)
        if shape != tuple(site.shape):
            raise Refused(
                f"the guide samples {site.name!r} of shape {shape}, the model of shape {tuple(site.shape)}"
            )
        fn = node["fn"]
        if isinstance(elementwise(fn), dist.Delta):
            raise Refused(
                f"the guide has {site.name!r} at a point, which has no density: use MAP for points, or give it a scale"
            )
        if not fn.has_rsample:
            raise Refused(
                f"the guide samples {site.name!r} from {type(elementwise(fn)).__name__}, through which there is no "
                "gradient (has_rsample is False): use another distribution"
            )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
