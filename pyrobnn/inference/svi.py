"""Stochastic variational inference: a guide fitted by gradient ascent on the evidence lower bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count, check_number, check_optional
from pyrobnn.core.seeding import seeded
from pyrobnn.inference.fitting.batches import check_batch_size
from pyrobnn.inference.fitting.problem import Problem
from pyrobnn.inference.fitting.program import check_batched, check_proper, refuse_dependent
from pyrobnn.inference.method import OPTIONAL, REFINE, Claim, FitRun, Kind, Method, register
from pyrobnn.inference.optim.training import Optimizer, OptimizerFactory, Training
from pyrobnn.inference.vi.guide_fit import fit_guide, fit_guides
from pyrobnn.inference.vi.kl_schedules import KLSchedule
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.posterior import Posterior

GUIDES = ("mean_field", "low_rank", "full_rank", "flow")
ESTIMATORS = ("auto", "weights", "local_reparameterization", "flipout")


@dataclass(frozen=True)
class Guide:
    """A family of guides with its options: ``pb.SVI(guide=Guide("low_rank", rank=3))``.

    Args:
        family: as ``guide`` of :class:`pyrobnn.SVI`.
        rank: columns of the low-rank factor.
        max_scale: cap on the standard deviations (mean-field only).
        init_loc: where the means of our own guides of a net begin: at the ``"mode"`` that the search of
            :class:`pyrobnn.MAP` finds, at the ``"net"``'s own weights, or at a draw from the ``"prior"``; Pyro's guides
            begin at the net's weights or at a draw, programs at the medians of the prior. ``fit(init=)`` overrides it.
        mean_field_start: ``"low_rank"``, ``"full_rank"`` and ``"flow"`` begin where mean-field ends after this share
            of ``num_steps``, taken before their own: at 1 the fit has twice the steps. At 0, and of Pyro's guides, not.
    """

    family: str | Callable[..., Any] = "mean_field"
    rank: int = 10
    max_scale: float | None = None
    init_loc: Literal["mode", "net", "prior"] = "mode"
    mean_field_start: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.family):
            check_choice("guide", self.family, GUIDES)
        check_count("rank", self.rank)
        check_choice("init_loc", self.init_loc, ("mode", "net", "prior"))
        check_number(
            "mean_field_start",
            self.mean_field_start,
            minimum=0,
            maximum=1,
        )
        if self.max_scale is not None and self.family != "mean_field":
            raise ValueError(
                f"'max_scale' needs independent normal weights: use 'mean_field', got {self.family!r}"
            )


@register(
    "svi",
    standard=True,
    quick={"num_steps": 2000, "num_draws": 500},
)
@dataclass(frozen=True)
class SVI(Method):
    r"""Variational inference: the member q of a guide family that maximises the ELBO.

    .. math:: \mathrm{ELBO}(q) = E_{q}[\log p(y \mid \theta)] - w \, KL(q(\theta) \,\|\, p(\theta))

    The whole update (draw, ELBO, gradient, Adam) is one compiled graph. Point parameters (hidden weights, learned
    noise) are optimised alongside. Mini-batches are scaled to the whole data set.

    The guide of a net begins at the mode that the search of :class:`pyrobnn.MAP` finds, in a fifth as many steps and
    with all of its paths: of several local optima of the ELBO the highest may be one that takes the function for noise
    (Seitzer et al., 2022). ``meta["start"]`` says where it began, ``"mode"``, ``"net"``, ``"prior"``, ``"init"`` or, of
    a program, ``"median"``; ``meta["noise_held"]`` and ``meta["path_gain"]`` are those of the search. The search looks
    for no start where ``fit`` is given ``init``, with Pyro's guides, a forward KL, and ``Guide(init_loc="net")``; where
    it has left all numbers behind or follows a noise that vanishes, the guide begins at the net's own weights.

    From another start, where the scale of the noise is free, a second and shorter course holds the noise small for the
    first half of its steps, and the course of the higher ELBO is kept. ``meta["noise_held"]`` is then the scale at
    which its noise was held, as a share of the targets' standard deviation (0: the plain course), and
    ``meta["path_gain"]`` the nats of ELBO that it gains over the plain one.

    Args:
        guide: ``"mean_field"``, ``"low_rank"``, ``"full_rank"`` (normals in unconstrained space), ``"flow"`` (affine
            couplings), any Pyro AutoGuide class or function of the program that returns one, an AutoGuide of the
            model, or a guide program ``guide(x, y)`` of your own: a function with ``pyro.param``, or a ``PyroModule``;
            it samples the sites of the model, of which the data are in standard units where the model has a
            standardizer. Or a :class:`pyrobnn.Guide` of one of these, with its options. The richer three begin where
            mean-field ends, after as many steps again; modules are copied, and begin where they are.
        num_steps: gradient steps.
        lr: peak learning rate of Adam.
        optimizer: ``"adam"``, a ``torch.optim`` class or another factory ``[tensor] -> torch.optim.Optimizer``, or a
            :class:`pyrobnn.Optimizer` with its schedule and averaging. By default the rate of mean-field is constant
            and the last half of its iterates is averaged, which removes gradient noise; the others have
            ``"hold_cosine"`` and no average.
        batch_size: mini-batch size; None takes all data in every step. Of a plain program it needs a plate of the rows
            of x and y, ``pyro.plate("rows", len(x))``; or the program draws them itself, by ``subsample_size=``, or a
            DataLoader sets the size. Latent sites may have a value for each row, with ``"mean_field"``, ``AutoNormal``,
            or a guide program whose parameters go by rows, or are those of an encoder.
        num_particles: draws per step.
        estimator: where the noise of mean-field is drawn: ``"weights"``; ``"local_reparameterization"``, the outputs of
            linear and convolution layers instead (lower gradient variance, and often the better optimum);
            ``"flipout"``, random signs per datum. ``"auto"`` is local reparameterization where that leaves the ELBO as
            it is: each linear layer sees one vector of each datum, once; else (convolutions, sequences, shared weights,
            plain programs) the weights. ``meta["estimator"]`` says which it was.
        kl: ``"closed_form"`` wherever there is one, ``"monte_carlo"`` throughout (with the path gradient of Roeder et
            al., 2017), or ``"auto"``: closed form for independent weights, Monte Carlo for correlated guides, where its
            gradient noise vanishes as q approaches the posterior, and by mini-batches where latent sites have a value
            for each row: a row is seen too rarely to average that noise away.
        kl_weight: a number or a schedule of ``pyrobnn.inference.kl_schedules``. It scales the KL only;
            a final weight other than one is a tempered posterior and is recorded as ``meta["temperature"]``.
        init_scale: initial standard deviations in unconstrained space.
        compile: ``"auto"`` compiles the step where the forecast in ``meta["tier"]`` says that it costs less, as of
            short fits it does not; True and False are obeyed.
        optimizer_options: keyword arguments of that class or factory, such as ``{"lr": 0.1}``.
        kl_direction: ``"reverse"`` is :math:`KL(q \| p)`, of the bound above. ``"forward"`` puts
            :math:`KL(p \| q)` in its place, of independent normals: in closed form from normal priors, elsewhere by
            draws from the prior, made once. It pulls every weight towards the mean and the spread of its prior, without
            regard to the data, and bounds nothing: ``log_evidence`` is None, and the noise has no second course.

    Raises:
        TypeError, ValueError: naming the option.

    Returns, by ``fit``: independent draws in one chain, ``log_evidence`` the ELBO (weight one, whole data;
    ``meta["elbo_error"]``: its standard error together with what it still gained over the last fifth of the steps),
    ``log_q``, ``guide`` and ``history``; ``meta["kl_direction"]``. Callbacks get loss, elbo, kl, log_likelihood,
    kl_weight, lr and grad_norm.

    A net in training mode is trained so, as by :class:`pyrobnn.MAP`; its batch-norm layers take a pass over the
    training inputs for the statistics of each draw (of many draws and rows over an even selection, 5,000 rows for 1,000
    draws).

    Caveat: KL(q‖p) makes q sit inside one mode. Where weights correlate mean-field gives each too small a variance of
    its own; of the function the uncertainty is too large at the data, and too small between clusters and outside.
    k-hat of ``log_q`` is over all weights, and does not say how far the function is off: ``diagnose`` does.
    A richer guide has more to learn: where it ends below the mean-field fit at which it began, that is returned.

    Reference: `Weight Uncertainty in Neural Networks (Blundell et al., 2015) <https://arxiv.org/abs/1505.05424>`_;
    `Automatic Differentiation Variational Inference (Kucukelbir et al., 2017) <https://arxiv.org/abs/1603.00788>`_;
    `On the Pitfalls of Heteroscedastic Uncertainty Estimation (Seitzer et al., 2022)
    <https://arxiv.org/abs/2203.09168>`_, of the paths.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb, torch
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = pb.BNN(torch.nn.Linear(1, 1), pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        ...                pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> posterior = SVI(num_steps=300, lr=0.05, compile=False).fit(model, x, 2 * x, num_draws=100)
        >>> posterior.draws["net.weight"].shape, round(posterior.predict(x[-1:]).mean.item())
        (torch.Size([1, 100, 1, 1]), 2)
    """

    guide: str | Guide | Callable[..., Any] = "mean_field"
    num_steps: int = 10_000
    lr: float = 0.01
    optimizer: str | Optimizer | OptimizerFactory = "adam"
    batch_size: int | None = None
    num_particles: int = 1
    estimator: Literal["auto", "weights", "local_reparameterization", "flipout"] = "auto"
    kl: Literal["auto", "closed_form", "monte_carlo"] = "auto"
    kl_weight: float | KLSchedule = 1.0
    init_scale: float = 0.05
    compile: Compile = "auto"
    optimizer_options: dict[str, Any] | None = None
    kl_direction: Literal["reverse", "forward"] = "reverse"

    kind: ClassVar[Kind] = "independent"
    claim: ClassVar[Claim] = "approximate"
    has_density: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    local_rows: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = OPTIONAL
    shares_rows: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        f"The approximation misses the posterior: {REFINE}, use a richer guide (low_rank, full_rank), or run NUTS and "
        "compare."
    )

    def __post_init__(self) -> None:
        self.training  # noqa: B018  # its checks
        family = self.options.family
        max_scale = self.options.max_scale
        if family != "mean_field":  # no guide is advised itself, or a poorer one
            richer = ", use a richer guide (full_rank)" if family == "low_rank" else ""
            remedy = f"The approximation misses the posterior: {REFINE}{richer}, or run NUTS and compare."
            object.__setattr__(self, "remedy", remedy)
        check_count("num_particles", self.num_particles)
        check_choice("kl", self.kl, ("auto", "closed_form", "monte_carlo"))
        check_choice("kl_direction", self.kl_direction, ("reverse", "forward"))
        if self.kl_direction == "forward" and family in GUIDES[1:]:
            raise ValueError(
                f"kl_direction='forward' needs independent normals: use guide='mean_field', got {family!r}"
            )
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_number(
            "init_scale",
            self.init_scale,
            above=0,
        )
        if not isinstance(self.kl_weight, KLSchedule):
            check_number(
                "kl_weight",
                self.kl_weight,
                minimum=0,
            )
        check_optional(
            check_number,
            "max_scale",
            max_scale,
            above=self.init_scale,
        )
        if self.estimator in ESTIMATORS[2:] and family != "mean_field":
            raise ValueError(
                f"{self.estimator!r} needs independent normals: use guide='mean_field', got {family!r}"
            )

    @property
    def options(self) -> Guide:
        """The guide with its options."""
        return self.guide if isinstance(self.guide, Guide) else Guide(self.guide)

    @property
    def training(self) -> Training:
        """How the guide is fitted."""
        # correlated guides follow a gradient whose noise vanishes; the noise of mean-field has to be averaged
        training = Training.of(self, None if self.options.family == "mean_field" else "hold_cosine")
        average = training.optimizer.average
        if average is None:
            average = 0.5 if training.optimizer.schedule is None else 0.0
        return replace(training, optimizer=replace(training.optimizer, average=average))

    def fit_each(self, problem: Problem, ys: Tensor, run: FitRun) -> list[Posterior]:
        """Posteriors given each of several targets (set, N, …) in the place of the problem's, fitted together.

        Along the plain course alone: a second one would have to be compared by an ELBO of every set.
        """
        with seeded(run.seed, problem.device):
            return fit_guides(self, problem, ys, run)

    def _fit(self, problem: Problem, run: FitRun) -> Posterior:
        if problem.is_bnn:
            check_batch_size(problem, self.batch_size)
        elif self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_proper(problem.density)
        check_batched(problem.density, "SVI")
        if not problem.is_bnn:
            refuse_dependent(problem.density, "SVI")
        with seeded(run.seed, problem.device):
            return fit_guide(self, problem, run)
