"""Discrete latent sites of a program, summed out of its density: Pyro's enumeration and tensor variable elimination.

Each discrete site takes all of its values at once, along an axis of its own (``pyro.poutine.enum``, which lets the
axes of ``pyro.markov`` be used again), and what depends on it is summed over them by message passing from the inner
plates to the outer ones (``pyro.ops.contract``). Sites that share no discrete site are summed apart, so that the rows
of a mixture remain rows.

Reference: Tensor variable elimination for plated factor graphs (Obermeyer et al., 2019).
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.runtime import InferDict, Message
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyrobnn.core.checks import Refused
from pyrobnn.model.log_terms import masked_log_prob
from pyrobnn.model.nodes import (
    SUMMED_DATA,
    Node,
    is_datum,
    is_deterministic,
    is_latent,
    is_subsample,
)
from pyrobnn.model.torch_calls import Call, CallHandler

Program = Callable[..., Any]
#: of a site's log density
Scale = float | Tensor
_READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
#: entries of the largest table, joint states times rows, that are summed at one point
MOST_STATES = 10**7
#: entries of a table that cost no more than the operations on it
_SMALL_TABLE = 4096


def is_discrete(node: Node) -> bool:
    """Whether the site is to be inferred and takes separate values."""
    if not is_latent(node) or not isinstance(node["value"], Tensor):
        return False
    return bool(node["fn"].support.is_discrete)


def num_states(node: Node) -> int:
    """The number of values of a discrete latent site; Refused where they are not finitely many, or not listed."""
    name = node["name"]
    law = node["fn"]
    kind = type(law).__name__
    if not law.has_enumerate_support:
        raise Refused(
            f"the latent site {name!r} is discrete and its {kind} has no finite list of values to sum over: "
            "use a law of finitely many values (Categorical, Bernoulli, Binomial), or sum it out by hand"
        )
    try:
        return len(law.enumerate_support(expand=False))
    except (NotImplementedError, RuntimeError) as error:
        raise Refused(
            f"the latent site {name!r} is discrete and Pyro cannot list the values of its {kind} ({error}): sample "
            "its elements in a pyro.plate, one by one"
        ) from error


def plate_nesting(nodes: Iterable[Node]) -> int:
    """The number of axes that the vectorised plates of a run take, as ``max_plate_nesting`` counts them."""
    frames = [plate for node in nodes for plate in node.get("cond_indep_stack", ())]
    return max((-plate.dim for plate in frames if plate.vectorized), default=0)


def enumerating(program: Program, nesting: int) -> Program:
    """The program, run with all values of its discrete latent sites at once."""

    def mark(site: Message) -> InferDict:
        law: Any = site["fn"]
        return {"enumerate": "parallel"} if law.has_enumerate_support else {}

    marked = pyro.poutine.infer_config(program, config_fn=mark)
    return _Enumerate(first_available_dim=-1 - nesting)(marked)


class _Enumerate(EnumMessenger):
    """Pyro's handler, under which a program may be run at many points at once."""

    def _pyro_post_sample(self, msg: Message) -> None:
        # WORKAROUND(pyro-ppl<=1.9.2): it reads value.data for a shape, which vmap refuses
        with _Detached():
            super()._pyro_post_sample(msg)


class _Detached(CallHandler):
    """Inside, ``value.data`` is ``value.detach()``."""

    functions = frozenset({_READ_DATA})

    def answer(self, call: Call) -> Any:
        return call.args[0].detach()


class TableLimit(CallHandler):
    """Refuses a table of too many entries before it is made: the joint states that some operation would hold."""

    def __init__(self, states: Mapping[str, int]):
        super().__init__()
        self.states = states

    def answer(self, call: Call) -> Any:
        shapes = [value.shape for value in call.args if isinstance(value, Tensor)]
        if len(shapes) > 1:
            try:
                entries = math.prod(torch.broadcast_shapes(*shapes))
            except RuntimeError:  # no operation by elements
                entries = 0
            if entries > MOST_STATES:
                raise Refused(too_many(self.states, entries))
        return call.result()


def too_many(states: Mapping[str, int], entries: int) -> str:
    """The sentence that refuses to sum a table of so many entries over these discrete sites."""
    names = ", ".join(repr(name) for name in list(states)[:4])
    more = ", …" if len(states) > 4 else ""
    return (
        f"the discrete latent sites {names}{more} would be summed over a table of {entries:,} entries (joint states "
        f"times rows; at most {MOST_STATES:,}): let each depend on few others, as by pyro.markov or in a pyro.plate, "
        "or sum them out by hand"
    )


class _Ring(LogRing):
    """Sums of products of probabilities by their logs, each discrete site summed out of what depends on it alone.

    Pyro's own takes exponentials of each factor by itself, which loses what is far from that factor's maximum, and its
    logarithm cannot be differentiated at many points at once.

    Attributes: ``eliminated``, the symbol of each discrete site with the product out of which it was summed, in order.
    """

    def __init__(
        self, states: Mapping[str, int], reduce: Callable[[Tensor, str], Tensor] | None = None
    ):
        super().__init__()
        self.states = states
        self.reduce = reduce or _log_sum
        self.eliminated: list[tuple[str, Tensor]] = []

    def sumproduct(self, terms: Sequence[Tensor], dims: Collection[str]) -> Tensor:
        terms = list(terms)
        remaining = set(dims)
        while remaining:
            for dim in self._next(terms, remaining):
                product = _product(_with_dim(dim, terms))
                self.eliminated.append((dim, product))
                terms = [term for term in terms if dim not in _dims(term)]
                terms.append(self.reduce(product, dim))
                remaining.remove(dim)
        return _product(terms)

    def _next(self, terms: Sequence[Tensor], dims: Collection[str]) -> list[str]:
        """The site to be summed out next, of the smallest table, and others with small tables of terms of their own.

        So half of the sites of a long chain are summed out side by side, then half of the rest, and so on.
        """
        sizes = {dim: _entries(_with_dim(dim, terms)) for dim in dims}
        by_size = sorted(dims, key=lambda dim: (sizes[dim], dim))
        smallest = sizes[by_size[0]]
        if smallest > MOST_STATES:
            raise Refused(too_many(self.states, smallest))
        chosen: list[str] = []
        taken: set[int] = set()
        for dim in by_size:
            own = set(map(id, _with_dim(dim, terms)))
            if taken.isdisjoint(own) and sizes[dim] <= max(smallest, _SMALL_TABLE):
                chosen.append(dim)
                taken |= own
        return chosen


def _with_dim(dim: str, terms: Sequence[Tensor]) -> list[Tensor]:
    """The packed tensors that have this axis."""
    return [term for term in terms if dim in _dims(term)]


def _entries(terms: Sequence[Tensor]) -> int:
    """The entries of the product of packed tensors."""
    sizes: dict[str, int] = {}
    for term in terms:
        sizes |= zip(_dims(term), term.shape)
    return math.prod(sizes.values())


def _dims(term: Tensor) -> str:
    """The symbols of a packed tensor's axes."""
    labelled: Any = term
    return labelled._pyro_dims


def _packed(value: Tensor, dims: str) -> Tensor:
    """The tensor with the symbols of its axes."""
    labelled: Any = value
    labelled._pyro_dims = dims
    return labelled


def _product(terms: Sequence[Tensor]) -> Tensor:
    """The sum of packed logs, over the union of their axes."""
    dims = "".join(sorted(set("".join(map(_dims, terms)))))
    aligned = []
    for term in terms:
        present = [dim for dim in dims if dim in _dims(term)]
        permuted = term.permute([_dims(term).index(dim) for dim in present])
        sizes = dict(zip(present, permuted.shape))
        aligned.append(permuted.reshape([sizes.get(dim, 1) for dim in dims]))
    # of one term a view, since the label is an attribute of the tensor
    total = functools.reduce(torch.add, aligned[1:], aligned[0][...])
    return _packed(total, dims)


def _log_sum(term: Tensor, dim: str) -> Tensor:
    """The log of the sum of exponentials over one axis of a packed tensor; minus infinity where all terms are."""
    axis = _dims(term).index(dim)
    largest = term.detach().amax(axis, keepdim=True)
    largest = largest.clamp(min=torch.finfo(term.dtype).min)
    sums = (term - largest).exp().sum(axis)
    possible = sums > 0
    logs = torch.where(possible, sums, torch.ones_like(sums)).log() + largest.squeeze(axis)
    logs = torch.where(possible, logs, -torch.inf)
    return _packed(logs, _dims(term).replace(dim, ""))


def _largest(term: Tensor, dim: str) -> Tensor:
    """The largest entry over one axis of a packed tensor."""
    return _packed(term.amax(_dims(term).index(dim)), _dims(term).replace(dim, ""))


class Factor(dist.Unit):
    """A log density that takes the place of a site's distribution, whatever the site's value."""

    def log_prob(self, value: Tensor) -> Tensor:
        return self.log_factor


class _Term:
    """The log probability of one site, along the axes of plates and of discrete sites."""

    def __init__(
        self,
        node: Node,
        trace: Trace,
        states: Mapping[str, int],
    ):
        self.node = node
        self.name: str = node["name"]
        self.is_enumerated = self.name in states
        # a law that is masked out still sums to one
        unmasked = {**node, "mask": None} if self.is_enumerated else node
        log_prob = masked_log_prob(unmasked).double()
        self.log_prob = packed.pack(log_prob, node["infer"]["_dim_to_symbol"])
        self.plates = frozenset(
            trace.plate_to_symbol[plate.name]
            for plate in node["cond_indep_stack"]
            if plate.vectorized
        )
        self.discrete = frozenset(_dims(self.log_prob)) - set(trace.plate_to_symbol.values())


def summed(trace: Trace, states: Mapping[str, int]) -> dict[str, Node]:
    """The nodes of an enumerating run with its discrete sites summed out.

    Sites that share a discrete site, directly or through others, become one: a factor under the name of the first of
    them that holds data, with one term for each index of the plates that all of their discrete sites are in. Where a
    continuous latent site is among them, its prior is their sum without the data, and the factor is the ratio of the
    sums with and without.

    Args:
        trace: of a run under :func:`enumerating`.
        states: the discrete sites and the numbers of their values.
    """
    terms = _terms(trace, states)
    absorbed = {term.name for term in terms} | set(states)
    nodes: dict[str, Node] = {
        name: node for name, node in trace.nodes.items() if name not in absorbed
    }
    for component in _components(terms):
        nodes.update(_nodes_of(component, trace, states))
    return nodes


def drawn(trace: Trace, states: Mapping[str, int], temperature: float) -> dict[str, Tensor]:
    """The discrete sites given the data and all other sites, drawn together; whole numbers, site → (\\*shape).

    Sites are drawn in the opposite order of that in which they are summed out: each given those that were summed out
    after it, which are all that the product out of which it was summed still depends on.

    Args:
        trace: of a run under :func:`enumerating`.
        states: the discrete sites and the numbers of their values.
        temperature: of the joint law, whose logs are divided by it; 0: its most probable values.
    """
    terms = _terms(trace, states)
    ring = _Ring(states, None if temperature else _largest)
    logs = {term: _tempered(term.log_prob, temperature) for term in terms}
    contract_tensor_tree(
        _tree(logs),
        _discrete(terms),
        ring=ring,
    )
    indices: dict[str, Tensor] = {}
    for symbol, product in reversed(ring.eliminated):
        logits = product
        for other in set(_dims(product)) & set(indices):
            logits = packed.gather(logits, indices[other], other)
        # the largest of logits with Gumbel noise is a draw
        noise = torch.rand_like(logits).log().neg().log().neg() if temperature else 0.0
        axis = _dims(logits).index(symbol)
        choice = (logits + noise).argmax(axis)
        indices[symbol] = _packed(choice, _dims(logits).replace(symbol, ""))
    return {
        name: _values(trace.nodes[name], indices, trace.symbol_to_dim)
        for name in states
        if name in trace.nodes
    }


def _tempered(log_prob: Tensor, temperature: float) -> Tensor:
    """A packed log probability at this temperature; at 0, where only the largest counts, as it is."""
    # a view of it, since the label is an attribute of the tensor
    logs = log_prob / temperature if temperature else log_prob[...]
    return _packed(logs, _dims(log_prob))


def _values(node: Node, indices: Mapping[str, Tensor], symbol_to_dim: Mapping[str, int]) -> Tensor:
    """The values of a discrete site at these places of its list of values."""
    law = node["fn"]
    support = law.enumerate_support(expand=False)
    support = support.reshape(len(support), *law.event_shape)
    index = packed.unpack(indices[node["infer"]["_enumerate_symbol"]], symbol_to_dim)
    sizes = {plate.dim: plate.size for plate in node["cond_indep_stack"] if plate.vectorized}
    shape = [sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)]
    return support.long()[index.expand(shape)]


def _terms(trace: Trace, states: Mapping[str, int]) -> list[_Term]:
    """The log probabilities of those sites of a run that depend on a discrete one."""
    trace.symbolize_dims()
    terms = []
    for node in trace.nodes.values():
        if node["type"] == "sample" and not is_subsample(node) and not is_deterministic(node):
            term = _Term(node, trace, states)
            if term.discrete:
                terms.append(term)
    return terms


def _components(terms: Sequence[_Term]) -> list[list[_Term]]:
    """The terms, those that share discrete sites together."""
    components: list[tuple[frozenset[str], list[_Term]]] = []
    for term in terms:
        symbols = term.discrete
        members = [term]
        apart = []
        for other_symbols, others in components:
            if other_symbols & symbols:
                symbols = symbols | other_symbols
                members = others + members
            else:
                apart.append((other_symbols, others))
        components = [*apart, (symbols, members)]
    return [members for _, members in components]


class _Sum(NamedTuple):
    """The log of a sum over discrete sites, along the axes of the plates that remain, and these plates."""

    logs: Tensor
    plates: tuple[Any, ...]

    def divided_by(self, other: _Sum) -> _Sum:
        """The ratio of two sums: row by row where both have the same rows, else that of their products."""
        if self.logs.shape == other.logs.shape:
            return _Sum(self.logs - other.logs, self.plates)
        return _Sum(self.logs.sum() - other.logs.sum(), ())


def _nodes_of(
    component: Sequence[_Term], trace: Trace, states: Mapping[str, int]
) -> dict[str, Node]:
    """The nodes that take the place of sites with common discrete sites."""
    observed = [term for term in component if term.node["is_observed"]]
    sampled = [term for term in component if not term.node["is_observed"]]
    latent = [term for term in sampled if not term.is_enumerated]
    scale = _common_scale(component)
    nodes: dict[str, Node] = {}
    if latent:
        prior = _contracted(sampled, trace, states)
        nodes |= _nodes_of_prior(latent, prior, scale)
    if observed:
        likelihood = _contracted(component, trace, states)
        if latent:
            likelihood = likelihood.divided_by(prior)
        node = _node_of_data(observed, likelihood, scale)
        nodes[node["name"]] = node
    return nodes


def _nodes_of_prior(latent: Sequence[_Term], prior: _Sum, scale: Scale) -> dict[str, Node]:
    """The nodes of continuous sites that have a prior together, which counts once."""
    zeros = torch.zeros_like(prior.logs)
    nodes: dict[str, Node] = {term.name: _as_factor(term.node, zeros, scale) for term in latent}
    nodes[latent[0].name] = _as_factor(latent[0].node, prior.logs, scale)
    return nodes


def _node_of_data(observed: Sequence[_Term], likelihood: _Sum, scale: Scale) -> dict[str, Any]:
    """The node of observed sites that have a density together, by the name of the first that holds data."""
    data = [term for term in observed if is_datum(term.node)]
    site = (data or observed)[0]
    node = _as_factor(site.node, likelihood.logs, scale)
    node["infer"] = {SUMMED_DATA: bool(data)}
    node["cond_indep_stack"] = likelihood.plates if data else ()
    return node


def _as_factor(node: Node, log_prob: Tensor, scale: Scale) -> dict[str, Any]:
    """The node of a site whose log density is this."""
    law = Factor(log_prob, validate_args=False)
    return {**node, "fn": law, "scale": scale, "mask": None}


def _common_scale(component: Sequence[_Term]) -> Scale:
    """The scale that all sites of a sum have; Refused where they have several."""
    scales = [term.node["scale"] for term in component]
    for term, scale in zip(component, scales, strict=True):
        if scale is scales[0]:
            continue
        if isinstance(scale, Tensor) or isinstance(scales[0], Tensor) or scale != scales[0]:
            raise Refused(
                f"the sites {component[0].name!r} and {term.name!r} are summed over together and have different scales "
                "(poutine.scale, or a plate that draws a subsample inside of a discrete site): give both the same"
            )
    return scales[0]


def _contracted(terms: Sequence[_Term], trace: Trace, states: Mapping[str, int]) -> _Sum:
    """The sum over all discrete sites of the product of these terms."""
    contracted = contract_tensor_tree(
        _tree({term: term.log_prob for term in terms}),
        _discrete(terms),
        ring=_Ring(states),
    )
    logs = [log for logs in contracted.values() for log in logs]
    if len(logs) > 1:
        return _Sum(torch.stack([log.sum() for log in logs]).sum(), ())
    (symbols,) = contracted
    plates = {
        plate.name: plate
        for term in terms
        for plate in term.node["cond_indep_stack"]
        if plate.vectorized and trace.plate_to_symbol[plate.name] in symbols
    }
    return _Sum(packed.unpack(logs[0], trace.symbol_to_dim), tuple(plates.values()))


def _tree(logs: Mapping[_Term, Tensor]) -> OrderedDict[frozenset[str], list[Tensor]]:
    """The packed logs of terms by the plates that these are in."""
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for term, log in logs.items():
        tree.setdefault(term.plates, []).append(log)
    return tree


def _discrete(terms: Iterable[_Term]) -> set[str]:
    """The symbols of the discrete sites that terms depend on."""
    return set().union(*(term.discrete for term in terms))
