"""Laplace's approximation: a Gaussian at the mode, its precision the curvature there."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, check_choice, check_count, check_optional, check_type
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.curvature.approach import Expansion, approached
from pyrobnn.inference.curvature.forms import Cost
from pyrobnn.inference.curvature.gaussian import (
    FAMILY,
    Block,
    BlockGaussian,
    blocks_of_state,
    flat_of_state,
)
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized, SubsetNetwork, mode_of_linear
from pyrobnn.inference.curvature.mode import (
    MANY,
    POLISH_STEPS,
    Centre,
    ModeSearch,
    check_memory,
    find_centre,
    in_standard_units,
    last_layer_sites,
    subset_sites,
)
from pyrobnn.inference.curvature.nearest import nearest_gaussian
from pyrobnn.inference.curvature.precision import (
    Precision,
    ggn_precision,
    mode_notes,
    record,
    tuned_model,
)
from pyrobnn.inference.curvature.prior import check_elementwise, check_normal, hold_out
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.loaders import survey
from pyrobnn.inference.fitting.problem import Problem, make_posterior, require_room, weights_of
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_dependent
from pyrobnn.inference.method import OPTIONAL, REFINE, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import RESTORERS
from pyrobnn.posterior.head import Split
from pyrobnn.posterior.rows import Rows

#: rows times parameters up to which two hundred passes over the data take seconds
_CHEAP_PASS = 3_000_000


@register(
    "laplace",
    standard=True,
    full={"tune": "marginal_likelihood"},
    quick={"num_draws": 500},
)
@dataclass(frozen=True)
class Laplace(Method):
    r"""Laplace's approximation of the posterior: a Gaussian at the mode in unconstrained space.

    .. math:: q(z) = N(z^*, \Lambda^{-1}), \qquad
        \log Z \approx \log p(y, z^*) + \tfrac{D}{2} \log 2\pi - \tfrac12 \log\det\Lambda

    Where the scale of the noise is free, the search for the mode follows several paths, as :class:`pyrobnn.MAP` does
    (Seitzer et al., 2022), and the mode of the best evidence is the centre.

    Args:
        curvature: None: ``"ggn"`` for a BNN, ``"hessian"`` for a Pyro program. ``"ggn"``: Gauss-Newton, always positive
            semidefinite, for a BNN; inferred noise then has the exact Hessian block of its own coordinates, its
            coupling with the weights (zero in expectation) dropped.
            ``"hessian"``: the exact Hessian, for a BNN or any Pyro program. ``"variational"``: Gauss-Newton averaged
            over the Gaussian itself, which with a canonical link is the one nearest (KL) to the posterior of the
            linearised network. Where classes can be told apart it is less underconfident than the Gaussian at the mode;
            ``log_evidence`` remains Laplace's.
        structure: ``"full"``; ``"kron"``: one Kronecker product per layer (GGN), and exact blocks, of many weights the
            exact diagonal, for layers that have none, such as normalizing and recurrent ones; ``"diag"``. ``"auto"`` is
            full where that takes less than ten seconds of one core and 2 GB, else (of a net) ``"kron"``, or ``"diag"``
            where no layer has Kronecker factors: a warning and ``meta["curvature"]`` say so. A linear last layer is
            formed from its structure, a sum over rows of Kronecker products, and up to some 8,000 weights exactly.
        subset: ``"all"``, ``"last_layer"`` or a tuple of site names (``"net.0.weight"``); the rest is held at the mode.
        tune: scale the declared prior's precision (and learned noise) after the fit: ``"marginal_likelihood"``, one
            factor for all weights; ``"per_layer"``, by the same, one per layer; ``"cross_validation"``; or None, the
            posterior of the model as declared. ``"auto"`` is that too, except that widths which nobody declared, of
            large nets under :class:`~pyrobnn.priors.FanInNormal` without a floor, become narrower where the evidence
            is for it, and never wider: a warning and ``meta["tuned"]`` say so.
            Cross-validation searches for a second mode on four fifths of the data
            and judges by the fifth that this has not seen; it takes the factor closest to one that the best does not
            beat by a standard error, and around a net that you trained (``init``) none above one.
        predictive: ``"linearized"``: f(θ*) + J (θ − θ*) with exact mean and variance, the model whose posterior the
            Gauss-Newton Gaussian is; or ``"draws"`` of the weights through the network itself.
        num_steps: of the :class:`pyrobnn.MAP` that finds the mode when ``fit`` gets no ``init``.
        map: that MAP itself, instead.
        compile: ``"auto"`` compiles the search where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws in one chain, with ``log_evidence`` and, in ``meta``, ``gradient_norm``,
    ``newton_distance`` (how far the mode is, in posterior standard deviations), ``damping`` (what had to be added to
    the diagonal of a precision that was not positive definite) and ``tuned``: the factors, and of cross-validation what
    the held-out data showed. A net trained by the user, or the posterior of a MAP or MLE fit, is the centre as it is
    where it is passed as ``init``; noise that a net does not know is set to its mode given the weights. For a program
    ``init`` is where to start. A DataLoader is gathered in memory.

    Refused: a program with ``curvature="ggn"``, an unknown site, ``"kron"`` where no layer has factors; a full
    precision that does not fit in memory (MemoryError: the message has the bytes and the alternatives).

    Where the search ends short of the mode, as it does in the curved valleys of a net, rounds of L-BFGS in the units of
    the Gaussian itself go on until Newton's step would gain less than .01 nats. They take no more than a quarter of the
    search's gradients, where a full curvature counts as the many that it costs; of mini-batches over more than 5000
    data there are none. Where they run out half a nat or more before the mode, the finding ``not_a_mode`` says how far
    it is; where there are none, from .2 standard deviations per √dimension on.

    At a saddle, and in the bend of a narrow valley, Newton's step looks short too, for Gauss-Newton's matrix knows
    nothing of negative curvature. Of up to 500 parameters (and 5000 data) the exact curvature shows it: the centre goes
    on in units of that, for a quarter of the search's time at most; ``meta["saddle"]`` has the ``lowest_curvature``
    where the search ended (in units of the Gaussian's, negative at a saddle), the nats of ``gain``, and whether that
    led to a mode, ``at_mode``; where it did not, ``not_a_mode`` says so.

    Caveat: one mode, and symmetric around it; ``log_evidence`` is of this one, not of its mirror images. The Hessian of
    a network is rarely positive definite off the exact mode; GGN weight draws through the network itself
    (``predictive="draws"``) underfit badly. Tuning does not move the mode. Beyond 5000 data a search by mini-batches is
    not followed to the very mode: the posterior of the linearised network then has its mean at the mode of the linear
    model, which takes one gradient (Antorán et al., 2022).

    Reference: Laplace Redux (Daxberger et al., 2021); A Practical Bayesian Framework for Backpropagation Networks
    (MacKay, 1992); `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022)
    <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> with torch.random.fork_rng():
        ...     net = torch.nn.Linear(1, 1, bias=False)
        >>> model = pb.BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(1.0))
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> posterior = Laplace(predictive="linearized", num_steps=200, compile=False).fit(model, x, 3 * x)
        >>> mean, var = posterior.moments(torch.ones(1, 1))  # exact: 2 and 1 / (1 + 2)
        >>> round(mean.item(), 3), round(var.item(), 3)
        (2.0, 0.333)
    """

    curvature: Literal["ggn", "hessian", "variational"] | None = None
    structure: Literal["auto", "full", "kron", "diag"] = "auto"
    subset: Literal["all", "last_layer"] | tuple[str, ...] = "all"
    tune: Literal["auto", "marginal_likelihood", "per_layer", "cross_validation"] | None = "auto"
    predictive: Literal["linearized", "draws"] = "linearized"
    num_steps: int = 2000
    map: MAP | None = None
    compile: Compile = "auto"

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = OPTIONAL
    remedy: ClassVar[str] = (
        f"The Gaussian misses the weights: use its linearised predictions, {REFINE}, or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        check_optional(
            check_choice,
            "curvature",
            self.curvature,
            ("ggn", "hessian", "variational"),
        )
        check_choice("structure", self.structure, ("auto", "full", "kron", "diag"))
        check_choice("predictive", self.predictive, ("linearized", "draws"))
        check_count("num_steps", self.num_steps)
        if self.predictive == "linearized":  # it has that already
            remedy = f"The Gaussian misses the weights: {REFINE}, or run NUTS and compare."
            object.__setattr__(self, "remedy", remedy)
        self._check_subset()
        check_type("map", self.map, MAP | None, "a pyrobnn.MAP")
        if self.curvature == "hessian" and self.structure == "kron":
            raise ValueError(
                "the exact Hessian has no Kronecker factors: use curvature='ggn' or structure='full'"
            )
        check_optional(
            check_choice,
            "tune",
            self.tune,
            ("auto", "marginal_likelihood", "per_layer", "cross_validation"),
        )
        if self.is_tuned and self.curvature not in (None, "ggn"):
            raise ValueError(
                "'tune' needs a positive semidefinite curvature at the mode: use curvature='ggn'"
            )
        is_full = self.structure in ("auto", "full")
        if self.curvature == "variational" and not (is_full and self.predictive == "linearized"):
            raise ValueError(
                "curvature='variational' needs structure='full' and predictive='linearized'"
            )

    def _check_subset(self) -> None:
        if isinstance(self.subset, str):
            check_choice("subset", self.subset, ("all", "last_layer"))
            return
        names = self.subset
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"'subset' must be 'all', 'last_layer' or a tuple of site names, got {names!r}"
            )

    @property
    def is_tuned(self) -> bool:
        """Whether the widths of the prior were asked to be found anew."""
        return self.tune not in (None, "auto")

    @property
    def search(self) -> MAP:
        """What finds the mode when ``fit`` gets no ``init``."""
        return self.map or MAP(num_steps=self.num_steps, compile=self.compile)

    @property
    def _num_parallel(self) -> int:
        """None counted where sites are held, whose draws are views of one value: those that vary are counted later."""
        return 1 if self.subset == "all" else 0

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        if self.curvature is None:
            return self._with_curvature(problem.is_bnn)._fit(problem, run)
        names = self._checked_sites(problem)
        varying = sum(site.size for site in problem.density.sites if site.name in names)
        require_room(problem.density, run.num_draws, varying)
        plan = self._plan(problem, run)
        started = time.perf_counter()
        with full_float32(problem.device):
            centre = find_centre(plan.search, problem, names, run)
            expansion = self._expansion(plan, problem, centre, run)
            mode_seconds = time.perf_counter() - started
            precision = self._precision(plan.search, expansion, run)
            gaussian = self._gaussian(expansion.centre, precision, plan.exact)
        with seeded(run.seed, problem.device):
            draws = gaussian.approximation.sample(run.num_draws)
        notes = [*centre.notes, *precision.notes, *gaussian.notes(draws)]
        notes += mode_notes(
            gaussian.precision,
            run.init is not None,
            plan.exact,
            expansion.short,
            0.0 if expansion.saddle is None else expansion.saddle.gain,
        )
        network = self._predictor(gaussian)
        return make_posterior(
            gaussian.precision.centre.whole_problem(problem.x),
            self,
            {name: value.unsqueeze(0) for name, value in draws.items()},
            seed=run.seed,
            timings={"mode": mode_seconds, "fit": time.perf_counter() - started},
            approximation=gaussian.approximation,
            point_values=gaussian.precision.centre.points,
            log_evidence=gaussian.log_evidence,
            meta={
                **record(gaussian.precision),
                "held_sites": sorted(centre.held_names),
                "saddle": None if expansion.saddle is None else expansion.saddle._asdict(),
            },
            notes=notes,
            importance=not plan.in_batches,  # a pass over all data per draw
            network=network,
            moments=getattr(network, "moments", None),
        )

    def _with_curvature(self, is_bnn: bool) -> Laplace:
        """The method with a curvature chosen by the kind of the model; Refused where it has no choice."""
        if is_bnn:
            return replace(self, curvature="ggn")
        options = {
            "tune": self.tune,
            "structure": self.structure,
            "subset": self.subset,
        }
        for name, value in options.items():
            if value in ("kron", "last_layer") or (name == "tune" and self.is_tuned):
                raise Refused(
                    f"{name}={value!r} needs the output of a network, which a Pyro program has not: leave it out"
                )
        return replace(self, curvature="hessian")

    @property
    def _is_linear(self) -> bool:
        """Whether the posterior is that of the network linearised in all of its weights."""
        return (self.curvature, self.predictive, self.subset) == ("ggn", "linearized", "all")

    def _plan(self, problem: Problem, run: FitRun) -> _Plan:
        """How the mode is searched for, and whether the data are too many for passes over all of them."""
        source = run.given
        search = self.search
        num_rows = problem.num_rows
        if isinstance(source[1], DataLoader):
            # what is gathered is searched in steps of the loader's size: the same mode in whatever order it comes
            search = replace(search, batch_size=_batch_size(source[1], num_rows))
            source = (in_standard_units(problem.bnn), problem.x, problem.y)
        in_batches = search.batch_size is not None and num_rows > MANY
        # a linear model has its mode in closed form
        exact = in_batches and self._is_linear and run.init is None
        finish = POLISH_STEPS
        is_dear = num_rows * problem.density.dim > _CHEAP_PASS
        by_mini_batches = search.batch_size is not None and search.batch_size < num_rows
        if exact or (is_dear and by_mini_batches and run.init is None):
            # by passes over all of the data at most as many as the search has made
            finish = min(POLISH_STEPS, _num_passes(search, num_rows))
        return _Plan(
            ModeSearch(search, source, finish),
            in_batches=in_batches,
            exact=exact,
        )

    def _expansion(
        self,
        plan: _Plan,
        problem: Problem,
        centre: Centre,
        run: FitRun,
    ) -> Expansion:
        """The curvature at the mode near the end of the search; of a given net, or of many data, at that end."""
        if self.curvature == "hessian":
            expand = partial(Expansion.by_hessian, self.structure)
        else:
            structure = "full" if self.curvature == "variational" else self.structure
            expand = partial(Expansion.by_ggn, structure)
        expansion = expand(centre)
        if plan.in_batches or (run.init is not None and problem.is_bnn):
            return expansion
        search = plan.search.map
        num_passes = _num_passes(search, problem.num_rows)
        polish_steps = search.polish_steps if search.batch_size is None else 0
        return approached(
            expansion,
            expand,
            num_passes + polish_steps + plan.search.num_steps,
        )

    def _precision(
        self,
        search: ModeSearch,
        expansion: Expansion,
        run: FitRun,
    ) -> Precision:
        """The precision at the centre, of the model as it is declared or as it is tuned."""
        weights = expansion.weights
        if weights is None or self.tune is None:
            return expansion.precision
        centre = expansion.centre
        if self.tune == "auto":
            is_plain = self.curvature == "ggn" and centre.bnn.widths_by_rule
            narrower = weights.narrowed_by_evidence(centre) if is_plain else None
            if narrower is None:
                return expansion.precision
            return ggn_precision(centre, weights, narrower)
        if self.tune == "cross_validation":
            structure = weights.chosen.structure
            tuned = hold_out(search, centre, structure, run.init is not None, run.seed)
        else:
            tuned = weights.tuned_by_evidence(centre, per_layer=self.tune == "per_layer")
        return ggn_precision(centre, weights, tuned)

    def _gaussian(
        self,
        centre: Centre,
        precision: Precision,
        exact: bool,
    ) -> _Gaussian:
        """The Gaussian of this precision around the centre, or around the ``exact`` mode of the linear model."""
        loc = centre.mode
        if exact and precision.jacobian is not None:
            loc = mode_of_linear(precision.jacobian, precision.blocks, centre.gradient)
        log_evidence = None
        if precision.has_evidence:
            gain = 0.5 * float((loc - centre.mode) @ centre.gradient)
            log_evidence = _log_evidence(precision) + gain
        if self.curvature == "variational":
            precision, loc = nearest_gaussian(precision)
        expanded_at = None if loc is centre.mode else centre.mode
        layout = _layout(precision.centre)  # with the noise as it is tuned
        approximation = BlockGaussian(layout, loc, precision.blocks, expanded_at)
        return _Gaussian(precision, approximation, log_evidence)

    def _predictor(self, gaussian: _Gaussian) -> Linearized | SubsetNetwork | None:
        """What predictions are made by; None: the net itself, or a program."""
        jacobian = gaussian.precision.jacobian
        if jacobian is None:
            return None
        net_split = gaussian.precision.centre.net_split
        features = None if net_split is None else net_split.features
        q = gaussian.approximation
        centre = None if q.centre is q.loc else q.centre
        names = [site.name for site in q.sites]
        place = _Place(q.layout, q.loc, centre, q.blocks, names)
        return _network(self.predictive, self.subset, jacobian, place, features)

    def _checked_sites(self, problem: Problem) -> tuple[str, ...]:
        """The sites of the Gaussian, after a look at whether there can be one."""
        self._check_model(problem.density, problem.is_bnn)
        names = self._sites_of_subset(problem)
        if self.curvature != "hessian":
            self._check_priors(problem.bnn, names)
        chosen_by_cost = self.structure == "auto" and self.curvature == "ggn"
        if self.structure in ("auto", "full") and not chosen_by_cost:
            width = 0
            if self.curvature != "hessian":
                width = problem.bnn.forward({}, problem.x[:1]).shape[1]
            check_memory(problem.density, names, problem.num_rows * width)
            if width:
                self._say_cost(problem, names, width)
        return names

    def _sites_of_subset(self, problem: Problem) -> tuple[str, ...]:
        """The names of the latent sites that ``subset`` stands for."""
        latent = tuple(site.name for site in problem.density.sites if site.kind == "latent")
        if self.subset == "all":
            return latent
        if self.subset == "last_layer":
            return last_layer_sites(latent, problem.bnn, problem.x[:1])
        return subset_sites(latent, self.subset)

    def _say_cost(
        self,
        problem: Problem,
        names: Sequence[str],
        width: int,
    ) -> None:
        """Note, before it begins, what a full precision of these sites takes, where that is much."""
        sizes = {site.name: site.size for site in problem.density.sites if site.name in names}
        size = sum(count for name, count in sizes.items() if name.startswith(NET))
        cost = Cost.of_rows(size, problem.num_rows * width, problem.density.dtype.itemsize)
        if self.subset == "last_layer":
            cost = cost.or_less(Cost.of_head(width, -(-size // width), problem.num_rows))
        if not cost.is_small:
            problem.note(Finding("costly_curvature", {"size": size, **cost.values}))

    def _check_model(self, density: Density, is_bnn: bool) -> None:
        """Refuse a model that has no such Gaussian."""
        check_proper(density)
        if not is_bnn and (self.curvature != "hessian" or self.subset == "last_layer"):
            raise Refused(
                "a Pyro program has no network output and no last layer: use Laplace(curvature='hessian')"
            )
        check_batched(density, "Laplace")
        if not is_bnn:
            refuse_dependent(density, "Laplace")

    def _check_priors(self, model: BNN, names: Sequence[str]) -> None:
        """Refuse priors of the sites that Gauss-Newton's matrix, or what is done with it, can't take."""
        weights = {name: model.priors[name] for name in names if name.startswith(NET)}
        check_elementwise(weights)
        if self.is_tuned:
            check_normal(weights)
        if self.curvature == "variational":
            check_normal(weights, "curvature='variational' needs", "use curvature='ggn'")
            if len(weights) < len(names):
                raise Refused(
                    "curvature='variational' takes no inferred noise: fix it, or use curvature='ggn'"
                )


def _num_passes(search: MAP, num_rows: int) -> int:
    """Passes over all of the data to which the steps of a search amount."""
    batch_size = min(search.batch_size or num_rows, num_rows)
    return search.num_steps * batch_size // max(num_rows, 1)


def _batch_size(loader: DataLoader, num_rows: int) -> int:
    """Rows in a batch of the loader; their mean where it has no one size."""
    with torch.random.fork_rng([]):  # iterating a loader advances the global state
        return loader.batch_size or -(-num_rows // survey(loader).num_batches)


@dataclass(frozen=True, eq=False)
class _Plan:
    """How a fit goes about its data.

    Attributes: the ``search`` for the mode; ``in_batches``: whether passes over all of the data are to be few;
        ``exact``: whether it is the mode of the linear model that is wanted, wherever the search ends.
    """

    search: ModeSearch
    in_batches: bool = False
    exact: bool = False


@dataclass(frozen=True, eq=False)
class _Gaussian:
    """The Gaussian as an ``approximation``, the precision that it has, and the log evidence of the model it is of."""

    precision: Precision
    approximation: BlockGaussian
    log_evidence: float | None

    def notes(self, draws: Mapping[str, Tensor]) -> list[Finding]:
        """That the widths of some weights are lost where draws (draw, \\*shape) are the mode plus a step."""
        # a row that is fixed is no weight
        of_sites = [site.transform.inv(draws[site.name]) for site in self.approximation.sites]
        moved = torch.cat([(value != value[:1]).any(0).flatten() for value in of_sites])
        if len(of_sites[0]) == 1 or bool(moved.all()):
            return []
        values = {
            "count": int((~moved).sum()),
            "total": len(moved),
            "dtype": str(of_sites[0].dtype).removeprefix("torch."),
        }
        return [Finding("draws_unresolved", values)]


def _layout(centre: Centre) -> Density:
    """The sites without the data: what the approximation needs to know of the model."""
    if centre.net_split is None:
        return centre.density
    return Density(
        centre.net_split.whole.sample_parameters,
        (),
        points="held",
        values=centre.points,
    )


def _restored(
    posterior: Posterior,
    layout: Density,
    family: str,
    state: Mapping[str, Tensor],
) -> Posterior:
    """The posterior with its approximation, and for ``predictive="linearized"`` its linear network, rebuilt.

    A file without the factors has the linear network, and with the rows of the fit the Gaussian too.
    """
    held = posterior.meta.get("held_sites", ())
    names = [site.name for site in layout.sites if site.name not in held]
    blocks = blocks_of_state(state)
    if blocks:  # of files that do not say what is held
        drawn = set(torch.cat([block.index for block in blocks]).tolist())
        names = [site.name for site in layout.sites if site.start in drawn]
    loc, centre = flat_of_state(layout, state, names, posterior.draws)
    factors = (posterior.meta.get("tuned") or {}).get("prior_precision_factor")
    if factors:
        posterior = replace(posterior, model=tuned_model(posterior.bnn, names, factors))
    if not blocks and posterior.rows is not None:
        blocks = _blocks_anew(posterior, layout, loc if centre is None else centre)
    approximation = BlockGaussian(layout, loc, blocks, centre) if blocks else None
    place = _Place(layout, loc, centre, blocks, names)
    network = _restored_network(posterior, place)
    meta = dict(posterior.meta)
    if blocks:
        meta.pop("factors_left_out", None)
    return replace(
        posterior,
        approximation=approximation,
        network=network,
        moments=getattr(network, "moments", None) if blocks else None,
        meta=meta,
    )


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a saved Gaussian lies: ``loc`` and ``centre`` (dim,), None where that is loc; its ``blocks``, if any, and
    the ``names`` of the sites that vary.
    """

    layout: Density
    loc: Tensor
    centre: Tensor | None
    blocks: Sequence[Block]
    names: Sequence[str]


def _blocks_anew(
    posterior: Posterior,
    layout: Density,
    centre: Tensor,
) -> list[Block]:
    """The blocks of a saved posterior, whose prior is the tuned one, from the rows of its fit."""
    values = layout.constrain(centre) | layout.initial_points
    init = Posterior(posterior.model, {name: value[None, None] for name, value in values.items()})
    rows = cast(Rows, posterior.rows)
    with warnings.catch_warnings(action="ignore"):  # the fit has said it
        fitted = method_of(posterior).fit(
            posterior.model,
            rows.x,
            rows.y,
            init=init,
            num_draws=1,
        )
    return list(cast(BlockGaussian, fitted.approximation).blocks)


def method_of(posterior: Posterior) -> Laplace:
    """The method of a Laplace posterior, its prior tuned already."""
    options = posterior.meta["settings"] | {"tune": None, "map": None}
    # the form that was chosen, whatever another number of rows would cost
    form = posterior.meta.get("curvature") or {}
    options["structure"] = form.get("structure", options["structure"])
    if not isinstance(options["subset"], str):
        options["subset"] = tuple(options["subset"])
    return Laplace(**options)


def _restored_network(posterior: Posterior, place: _Place) -> Linearized | SubsetNetwork | None:
    """What predictions of a saved posterior are made by; None: the net itself, or a program."""
    weights = [name for name in place.names if name.startswith(NET)]
    if not weights:
        return None
    layout = place.layout
    points = layout.initial_points
    centre = place.loc if place.centre is None else place.centre
    params = weights_of(posterior.bnn.initial_values() | points | layout.constrain(centre))
    net_split = Split(posterior.bnn, params, posterior.meta.get("head", ""))
    jacobian = NetworkJacobian(net_split.head, layout, centre, points, weights)
    if not posterior.meta["layer_products"]:
        jacobian.layers = []
    form = posterior.meta.get("curvature") or {}
    jacobian.keep_products(form.get("without_factors", ()))
    settings = posterior.meta["settings"]
    return _network(
        settings["predictive"],
        settings["subset"],
        jacobian,
        place,
        net_split.features,
    )


RESTORERS[FAMILY] = _restored


def _network(
    predictive: str,
    subset: str | Sequence[str],
    jacobian: NetworkJacobian,
    place: _Place,
    features: Callable[[Tensor], Tensor] | None,
) -> Linearized | SubsetNetwork | None:
    """What predictions are made by; None: the net itself."""
    if predictive == "linearized":
        loc = None if place.centre is None else place.loc
        return Linearized(jacobian, place.blocks, loc, features)
    return None if subset == "all" else SubsetNetwork(jacobian, features)


def _log_evidence(precision: Precision) -> float:
    """Laplace's log evidence, of the subset's model: sites held at the mode count as known, without a prior."""
    centre = precision.centre
    whole = -centre.problem.whole_slope(centre.density)(centre.mode)[1]
    log_joint = whole - centre.density.log_prior(centre.mode, centre.held_names)
    size = sum(len(block.index) for block in precision.blocks)
    log_det = sum(float(block.log_det()) for block in precision.blocks)
    return float(log_joint) + 0.5 * size * math.log(2 * math.pi) - 0.5 * log_det
