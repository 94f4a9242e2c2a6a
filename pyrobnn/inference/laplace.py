"""Laplace's approximation: a Gaussian at the mode, its precision the curvature there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import Refused, check_choice, check_count, check_optional, check_type
from pyrobnn.core.findings import Finding
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.curvature.gaussian import FAMILY, Block, BlockGaussian
from pyrobnn.inference.curvature.jacobian import NetworkJacobian
from pyrobnn.inference.curvature.linearized import Linearized, SubsetNetwork, mode_of_linear
from pyrobnn.inference.curvature.mode import (
    MANY,
    POLISH_STEPS,
    Centre,
    check_memory,
    find_centre,
    in_standard_units,
    subset_sites,
)
from pyrobnn.inference.curvature.precision import (
    Precision,
    ggn_precision,
    hessian_precision,
    nearest_gaussian,
    record,
    report_frozen,
    tuned_model,
)
from pyrobnn.inference.curvature.prior import check_elementwise, check_normal
from pyrobnn.inference.fitting.batches import in_parts, survey
from pyrobnn.inference.fitting.floats import full_float32
from pyrobnn.inference.fitting.problem import Problem, make_posterior
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_dependent
from pyrobnn.inference.method import Claim, FitRun, Kind, Method, register
from pyrobnn.inference.point_methods import MAP
from pyrobnn.model import NET, Density
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.approximation import RESTORERS
from pyrobnn.posterior.head import Split


@register(
    "laplace",
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
        curvature: ``"ggn"``: Gauss-Newton, always positive semidefinite, for a BNN; inferred noise then has the exact
            Hessian block of its own coordinates, its coupling with the weights (zero in expectation) dropped.
            ``"hessian"``: the exact Hessian, for a BNN or any Pyro program. ``"variational"``: Gauss-Newton averaged
            over the Gaussian itself, which with a canonical link is the one nearest (KL) to the posterior of the
            linearised network. Where classes can be told apart it is less underconfident than the Gaussian at the mode;
            ``log_evidence`` remains Laplace's.
        structure: ``"full"``; ``"kron"``: one Kronecker product per layer (GGN); ``"diag"``.
        subset: ``"all"``, ``"last_layer"`` or a tuple of site names (``"net.0.weight"``); the rest is held at the mode.
        tune: scale the declared prior's precision (and learned noise) after the fit: ``"marginal_likelihood"``, one
            factor for all weights; ``"per_layer"``, by the same, one per layer; ``"cross_validation"``; or None, the
            posterior of the model as declared. Cross-validation searches for a second mode on four fifths of the data
            and judges by the fifth that this has not seen; it takes the factor closest to one that the best does not
            beat by a standard error, and around a net that you trained (``init``) none above one.
        predictive: ``"linearized"``: f(θ*) + J (θ − θ*) with exact mean and variance, the model whose posterior the
            Gauss-Newton Gaussian is; or ``"draws"`` of the weights through the network itself.
        num_steps: of the :class:`pyrobnn.MAP` that finds the mode when ``fit`` gets no ``init``.
        map: that MAP itself, instead.
        compile: compile the search for the mode; False gives the same numbers slower.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws in one chain, with ``log_evidence`` and, in ``meta``, ``gradient_norm``,
    ``newton_distance`` (how far the mode is, in posterior standard deviations), ``damping`` (what had to be added to
    the diagonal of a precision that was not positive definite) and ``tuned``: the factors, and of cross-validation what
    the held-out data showed. A net trained by the user, or the posterior of a MAP or MLE fit, is the centre as it is
    where it is passed as ``init``; noise that a net does not know is set to its mode given the weights. For a program
    ``init`` is where to start. A DataLoader is gathered in memory.

    Refused: a program with ``curvature="ggn"``, an unknown site, a layer without Kronecker factors; a full precision
    that does not fit in memory (MemoryError: the message has the bytes and the alternatives).

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

    curvature: Literal["ggn", "hessian", "variational"] = "ggn"
    structure: Literal["full", "kron", "diag"] = "full"
    subset: Literal["all", "last_layer"] | tuple[str, ...] = "all"
    tune: Literal["marginal_likelihood", "per_layer", "cross_validation"] | None = None
    predictive: Literal["linearized", "draws"] = "linearized"
    num_steps: int = 2000
    map: MAP | None = None
    compile: bool = True

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "The Gaussian misses the weights: use its linearised predictions, or run NUTS and compare."
    )

    def __post_init__(self) -> None:
        check_choice("curvature", self.curvature, ("ggn", "hessian", "variational"))
        check_choice("structure", self.structure, ("full", "kron", "diag"))
        check_choice("predictive", self.predictive, ("linearized", "draws"))
        check_count("num_steps", self.num_steps)
        if self.predictive == "linearized":  # it has that already
            remedy = "The Gaussian misses the weights: run NUTS and compare."
            object.__setattr__(self, "remedy", remedy)
        if isinstance(self.subset, str):
            check_choice("subset", self.subset, ("all", "last_layer"))
        elif not isinstance(self.subset, tuple) or not all(
            isinstance(name, str) for name in self.subset
        ):
            raise TypeError(
                f"'subset' must be 'all', 'last_layer' or a tuple of site names, got {self.subset!r}"
            )
        check_type("map", self.map, MAP | None, "a pyrobnn.MAP")
        if self.curvature == "hessian" and self.structure == "kron":
            raise ValueError(
                "the exact Hessian has no Kronecker factors: use curvature='ggn' or structure='full'"
            )
        check_optional(
            check_choice,
            "tune",
            self.tune,
            ("marginal_likelihood", "per_layer", "cross_validation"),
        )
        if self.tune is not None and self.curvature != "ggn":
            raise ValueError(
                "'tune' needs a positive semidefinite curvature at the mode: use curvature='ggn'"
            )
        if self.curvature == "variational" and (self.structure, self.predictive) != (
            "full",
            "linearized",
        ):
            raise ValueError(
                "curvature='variational' needs structure='full' and predictive='linearized'"
            )

    @property
    def search(self) -> MAP:
        """What finds the mode when ``fit`` gets no ``init``."""
        return self.map or MAP(num_steps=self.num_steps, compile=self.compile)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        names = self._checked_sites(problem)
        latent = {site.name for site in problem.density.sites if site.kind == "latent"}
        held_sites = sorted(latent - set(names))
        search, source = self._search(problem, *run.given)
        in_batches = search.batch_size is not None and problem.num_rows > MANY
        # by passes over all of the data only as many as the search has made: a linear model has its mode in closed form
        exact = self._is_linear and in_batches and run.init is None
        passes = POLISH_STEPS
        if exact:
            num_seen = search.num_steps * cast(int, search.batch_size)
            passes = min(passes, num_seen // problem.num_rows)
        started = time.perf_counter()
        with full_float32(problem.device):
            centre = find_centre(search, problem, source, names, run, passes)
            mode_time = time.perf_counter()
            remarks = list(centre.notes)
            precision = self._precision(search, centre, run, remarks)
            loc = centre.mode
            if exact and precision.jacobian is not None:
                loc = mode_of_linear(precision.jacobian, precision.blocks, centre.gradient)
            log_evidence = None
            if precision.has_evidence:
                gain = 0.5 * float((loc - centre.mode) @ centre.gradient)
                log_evidence = _log_evidence(precision) + gain
            if self.curvature == "variational":
                precision, loc = nearest_gaussian(precision)
        approximation = _approximation(problem, centre, precision.blocks, loc)
        with seeded(run.seed, problem.device):
            draws = {
                name: value.unsqueeze(0)
                for name, value in approximation.sample(run.num_draws).items()
            }
        report_frozen({site.name: draws[site.name] for site in approximation.sites}, remarks)
        network = self._predictor(centre, precision, loc)
        fitted = precision.centre.problem
        if centre.split is not None:
            fitted = fitted.at_inputs(centre.split, problem.x)
        meta = record(precision, remarks, run.init is not None, exact)
        return make_posterior(
            fitted,
            self,
            draws,
            seed=run.seed,
            timings={"mode": mode_time - started, "fit": time.perf_counter() - started},
            approximation=approximation,
            point_values=precision.centre.points,
            log_evidence=log_evidence,
            meta=meta | {"held_sites": held_sites},
            notes=remarks,
            importance=not in_batches,  # a pass over all data per draw
            network=network,
            moments=getattr(network, "moments", None),
        )

    @property
    def _is_linear(self) -> bool:
        """Whether the posterior is that of the network linearised in all of its weights."""
        return (self.curvature, self.predictive, self.subset) == ("ggn", "linearized", "all")

    def _precision(
        self,
        search: MAP,
        centre: Centre,
        run: FitRun,
        remarks: list[Finding | str],
    ) -> Precision:
        """The precision at the centre; adds to the remarks."""
        if self.curvature == "hessian":
            return hessian_precision(centre, self.structure, remarks)
        return ggn_precision(self, search, centre, run.init is not None, run.seed, remarks)

    def _predictor(
        self,
        centre: Centre,
        precision: Precision,
        loc: Tensor,
    ) -> Linearized | SubsetNetwork | None:
        """What predictions are made by; None: the net itself, or a program."""
        if precision.jacobian is None:
            return None
        features = None if centre.split is None else centre.split.features
        moved = None if loc is centre.mode else loc
        return _network(vars(self), precision.jacobian, precision.blocks, moved, features)

    def _checked_sites(self, problem: Problem) -> tuple[str, ...]:
        """The sites of the Gaussian, after a look at whether there can be one."""
        check_proper(problem.density)
        if not problem.is_bnn and (self.curvature != "hessian" or self.subset == "last_layer"):
            raise Refused(
                "a Pyro program has no network output and no last layer: use Laplace(curvature='hessian')"
            )
        check_batched(problem.density, "Laplace")
        if not problem.is_bnn:
            refuse_dependent(problem.density, "Laplace")
        names = subset_sites(problem, self.subset)
        if self.curvature != "hessian":
            weights = {name: problem.bnn.priors[name] for name in names if name.startswith(NET)}
            check_elementwise(weights)
            if self.tune is not None:
                check_normal(weights)
            if self.curvature == "variational":
                check_normal(weights, "curvature='variational' needs", "use curvature='ggn'")
                if len(weights) < len(names):
                    raise Refused(
                        "curvature='variational' takes no inferred noise: fix it, or use curvature='ggn'"
                    )
        check_memory(self, problem, names)
        return names

    def _search(
        self,
        problem: Problem,
        model: Any,
        x: Any,
        y: Any,
    ) -> tuple[MAP, tuple[Any, Any, Any]]:
        """The search for the mode, and the model and data that it is made of."""
        if not isinstance(x, DataLoader):
            return self.search, (model, x, y)
        # what is gathered is searched in steps of the loader's size: the same mode in whatever order it comes
        with torch.random.fork_rng([]):  # iterating a loader advances the global state
            size = x.batch_size or -(-problem.num_rows // survey(x).num_batches)
        return replace(self.search, batch_size=size), (
            in_standard_units(problem.bnn),
            problem.x,
            problem.y,
        )


def _approximation(
    problem: Problem,
    centre: Centre,
    blocks: Sequence[Block],
    loc: Tensor,
) -> BlockGaussian:
    """The Gaussian around ``loc`` (dim,), whose curvature was taken at the centre."""
    layout = centre.density
    if problem.is_bnn:
        # the sites without data: what the approximation needs to know of the model
        layout = Density(
            problem.bnn.sample_parameters,
            (),
            points="held",
            values=centre.points,
        )
    return BlockGaussian(layout, loc, blocks, None if loc is centre.mode else centre.mode)


def _restored(
    posterior: Posterior,
    layout: Density,
    family: str,
    state: Mapping[str, Tensor],
) -> Posterior:
    """The posterior with its approximation, and for ``predictive="linearized"`` its linear network, rebuilt."""
    points = layout.initial_points
    approximation = BlockGaussian.from_state(layout, state)
    factors = (posterior.meta.get("tuned") or {}).get("prior_precision_factor")
    if factors:
        names = [site.name for site in approximation.sites]
        posterior = replace(posterior, model=tuned_model(posterior.bnn, names, factors))
    weights = [site.name for site in approximation.sites if site.name.startswith(NET)]
    if not weights:
        return replace(posterior, approximation=approximation)
    values = posterior.bnn.initial_values() | points | layout.constrain(approximation.centre)
    params = {name: value for name, value in values.items() if name.startswith(NET)}
    parts = Split(posterior.bnn, params, posterior.meta.get("head", ""))
    jacobian = NetworkJacobian(parts.head, layout, approximation.centre, points, weights)
    if not posterior.meta["layer_products"]:
        jacobian.layers = []
    loc = None if approximation.centre is approximation.loc else approximation.loc
    network = _network(
        posterior.meta["settings"], jacobian, approximation.blocks, loc, parts.features
    )
    return replace(
        posterior,
        approximation=approximation,
        network=network,
        moments=getattr(network, "moments", None),
    )


RESTORERS[FAMILY] = _restored


def _network(
    settings: Mapping[str, Any],
    jacobian: NetworkJacobian,
    blocks: Sequence[Block],
    loc: Tensor | None,
    features: Callable[[Tensor], Tensor] | None,
) -> Linearized | SubsetNetwork | None:
    """What predictions are made by; None: the net itself."""
    if settings["predictive"] == "linearized":
        return Linearized(jacobian, blocks, loc, features)
    return None if settings["subset"] == "all" else SubsetNetwork(jacobian, features)


def _log_evidence(precision: Precision) -> float:
    """Of the subset's model: sites held at the mode count as known, so their prior is omitted."""
    centre = precision.centre
    held_names = [site.name for site in centre.density.sites if site.name not in set(centre.names)]
    problem = centre.problem
    density = centre.density
    if problem.is_bnn:
        whole = -in_parts(density, problem.x, problem.y)(centre.mode)[1]
    else:
        whole = density.log_joint(centre.mode)
    log_joint = whole - density.log_prior(centre.mode, held_names)
    size = sum(len(block.index) for block in precision.blocks)
    log_det = sum(float(block.log_det()) for block in precision.blocks)
    return float(log_joint) + 0.5 * size * math.log(2 * math.pi) - 0.5 * log_det
