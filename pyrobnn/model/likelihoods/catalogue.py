"""The likelihoods: noise on numbers, classes and ordered labels, counts, censored values and survival times."""

from __future__ import annotations

from numbers import Integral

import pyro.distributions as dist
import torch
import torch.distributions.constraints as constraints
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrobnn.core.checks import check_choice, check_count, check_finite, check_number, check_type
from pyrobnn.model.likelihoods.base import Likelihood, Pair, Sampled, Targets, reweighted
from pyrobnn.model.likelihoods.parameters import SITE, Learned, Parameter, Params
from pyrobnn.model.likelihoods.special_functions import by_scipy, log_ndtr, log_normal_density

_GAPS = f"{SITE}gaps"


# -- numbers ----------------------------------------------------------------------------------------------------------


class _Gaussian(Likelihood):
    """Normal numbers; what the mean and scale are, says ``loc_scale`` of the class that derives from it."""

    task = "gaussian"

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return dist.Normal(*self.loc_scale(f, params)).to_event(1)

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        loc, scale = self.loc_scale(f.double(), params)
        below = torch.special.ndtr((y - loc) / scale)
        return below, below

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""Columns :math:`\nabla\mu/\sigma` and :math:`\sqrt2\nabla\sigma/\sigma` of any mean and scale."""

        def moments(output: Tensor) -> Tensor:
            loc, scale = self.loc_scale(output[None], params)
            return torch.cat([loc[0], scale[0]])

        slopes = torch.func.vmap(torch.func.jacrev(moments))(f)
        _, scale = self.loc_scale(f, params)
        by_mean, by_scale = slopes.transpose(1, 2).chunk(2, -1)
        return torch.cat([by_mean / scale.unsqueeze(1), 2**0.5 * by_scale / scale.unsqueeze(1)], -1)


class HomoskedasticGaussian(_Gaussian):
    r"""Gaussian noise of one standard deviation everywhere (or one per output): :math:`y \sim N(f(x), \sigma^2)`.

    Args:
        scale: the noise standard deviation in the units of ``y``, of shape () or (out,). A number or tensor is *fixed*;
            ``"learned"`` is a *point parameter*, optimised by MLE, MAP and SVI from one on, or from
            ``pb.likelihoods.learned(init=…)``, and one per output where the net ends in an ``nn.Linear``; a
            distribution on the positive reals is a *prior*, and the noise is *inferred* as the site
            ``likelihood.scale``.

    Raises:
        ValueError: a scale that is not positive, or a prior whose support is not.

    Caveat: a learned scale is a point estimate and hides the uncertainty about the noise; prefer a prior.

    Example:
        >>> import pyro.distributions as dist
        >>> HomoskedasticGaussian(0.3), HomoskedasticGaussian(dist.HalfNormal(1.0))
        (HomoskedasticGaussian(fixed scale), HomoskedasticGaussian(inferred scale))
    """

    targets = Targets(
        normal=True,
        linear_mean=True,
        measured="affine",
    )

    def __init__(self, scale: Parameter):
        super().__init__()
        self.own.declare("scale", scale)

    def loc_scale(self, f: Tensor, params: Params) -> Pair:
        return f, self.own.value("scale", f, params).expand(f.shape)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}(1/\sigma^2)`."""
        if type(self).loc_scale is not HomoskedasticGaussian.loc_scale:
            return super().fisher_root(f, params)
        return torch.diag_embed(1 / self.loc_scale(f, params)[1])


class HeteroskedasticGaussian(_Gaussian):
    r"""Gaussian noise that depends on the input: :math:`y \sim N(\mu(x), \sigma(x)^2)`, both from the network.

    The network returns (N, 2·out): means first, then :math:`\rho` with
    :math:`\sigma = \mathrm{softplus}(\rho) + \sigma_{\min}`.

    Args:
        min_scale: the smallest noise standard deviation, in the units of ``y``; keeps the likelihood bounded.

    Caveat: with few data the scale head can explain signal as noise; compare with a homoskedastic model by LOO.

    Reference: Estimating the mean and variance of the target probability distribution (Nix & Weigend, 1994).

    Example:
        >>> HeteroskedasticGaussian(min_scale=0.01)
        HeteroskedasticGaussian(min_scale=0.01)
    """

    targets = Targets(
        heads=2,
        normal=True,
        linear_mean=True,
        measured="affine",
    )

    def __init__(self, min_scale: float = 1e-3):
        super().__init__()
        self.min_scale = check_number("min_scale", min_scale, above=0)

    def loc_scale(self, f: Tensor, params: Params) -> Pair:
        loc, raw = f.chunk(2, dim=-1)
        return loc, F.softplus(raw) + self.min_scale

    @property
    def scale_is_free(self) -> bool:
        return True

    def with_known_scale(self, f: Tensor, params: Params, level: Tensor) -> Tensor:
        loc, raw = f.chunk(2, dim=-1)
        _, scale = self.loc_scale(f, params)
        return torch.cat([reweighted(loc, scale, level), raw], -1)


class StudentT(Likelihood):
    r"""Noise of Student's t: :math:`y \sim t_\nu(f(x), \sigma)`, under which single outliers are no surprise.

    Args:
        df: degrees of freedom ν, fixed, ``"learned"`` or with a prior as ``scale`` is, of shape () or (out,);
            ``"inferred"`` takes the prior Gamma(2, 0.1) of Juárez & Steel. Its site is ``likelihood.df``.
        scale: σ in the units of ``y``, as of :class:`HomoskedasticGaussian`; the noise's standard deviation is
            :math:`\sigma \sqrt{\nu / (\nu - 2)}`.

    Raises:
        ValueError: an argument that is not positive, or a prior whose support is not.

    Caveat: noise of ν ≤ 2 has no variance. Where draws of ν come near 2 or below, ``aleatoric_var`` and ``var`` are
    huge or infinite, as they should: read ``quantile``.

    Reference: Model-based clustering of non-Gaussian panel data based on skew-t distributions (Juárez & Steel, 2010).

    Example:
        >>> import pyro.distributions as dist
        >>> StudentT(df=4.0, scale=dist.HalfNormal(1.0))
        StudentT(fixed df, inferred scale)
    """

    task = "student_t"
    targets = Targets(linear_mean=True, measured="affine")

    def __init__(self, df: Parameter = 4.0, scale: Parameter = "learned"):
        super().__init__()
        self.own.declare(
            "df", dist.Gamma(2.0, 0.1) if isinstance(df, str) and df == "inferred" else df
        )
        self.own.declare("scale", scale)

    def _df_scale(self, f: Tensor, params: Params) -> Pair:
        df, scale = (self.own.value(name, f, params).expand(f.shape) for name in ("df", "scale"))
        return df, scale

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        df, scale = self._df_scale(f, params)
        return dist.StudentT(df, f, scale).to_event(1)

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        """The location, which is the mean where ν > 1, and the variance, infinite where ν ≤ 2."""
        df, scale = self._df_scale(f, params)
        return f, torch.where(df > 2, scale.square() * df / (df - 2).clamp_min(1e-30), torch.inf)

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        df, scale = self._df_scale(f.double(), params)
        below = by_scipy("stdtr", df, (y - f) / scale)
        return below, below

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}\left(\frac{\nu + 1}{(\nu + 3) \sigma^2}\right)`."""
        df, scale = self._df_scale(f, params)
        return torch.diag_embed(((df + 1) / (df + 3)).sqrt() / scale)


# -- classes ----------------------------------------------------------------------------------------------------------


class _Labels(Likelihood):
    """Integer labels (N,), which have the order of their numbers."""

    targets = Targets("label")
    num_classes: int | None = None  # as many as the network returns

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        name = type(self).__name__
        count = width if self.num_classes is None else self.num_classes
        if y.dim() != 1:
            fix = "use y.squeeze(-1)" if y.shape[-1] == 1 else "use y.argmax(-1)"
            raise ValueError(
                f"'y' has shape {tuple(y.shape)} but {name} expects ({len(y)},): {fix}"
            )
        if y.is_floating_point():
            raise TypeError(
                f"'y' has dtype {y.dtype} but {name} expects integer labels: use y.long()"
            )
        if count < 2 or width != self.width(count):
            raise ValueError(
                f"the net returns {width} values per point but {name} expects {self.width(max(count, 2))} for {count} "
                "labels: give the net as many outputs; for two labels, Bernoulli() takes one"
            )
        low = int(y.min())
        high = int(y.max())
        if low < 0 or high >= count:
            raise ValueError(
                f"'y' holds labels from {low} to {high} but {name} expects 0 … {count - 1} here: relabel y, or make "
                f"it {max(high + 1, 2)} classes"
            )
        return y.long()

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """P(Y < y) and P(Y ≤ y) in the order of the labels, (\\*batch, N, 1)."""
        probs = self.probs(f.double(), params)
        place = y.long().unsqueeze(-1)
        batch = torch.broadcast_shapes(probs.shape[:-1], y.shape)
        probs = probs.expand(*batch, probs.shape[-1])
        place = place.expand(*batch, 1)
        upper = probs.cumsum(-1).gather(-1, place)
        return (upper - probs.gather(-1, place)).clamp_min(0.0), upper.clamp_max(1.0)


class Categorical(_Labels):
    r"""Class labels: :math:`y \sim \mathrm{Categorical}(\mathrm{softmax}(f(x)))`; the network returns logits (N, K).

    Labels are integers 0 … K − 1 of shape (N,).

    Example:
        >>> Categorical()
        Categorical()
    """

    task = "categorical"

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return dist.Categorical(logits=f)

    def probs(self, f: Tensor, params: Params | None = None) -> Tensor:
        return f.softmax(-1)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}(p) - p p^\top` with root :math:`\mathrm{diag}(\sqrt p) - p \sqrt p^\top`."""
        p = f.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)


class Bernoulli(Likelihood):
    r"""Binary labels: :math:`y \sim \mathrm{Bernoulli}(\mathrm{sigmoid}(f(x)))`; one logit per output, (N, out).

    Labels are 0 or 1 of shape (N, out), or (N,) for one output.

    Example:
        >>> Bernoulli()
        Bernoulli()
    """

    task = "bernoulli"
    targets = Targets("binary")
    valid = (constraints.boolean, "0 and 1 only")

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return dist.Bernoulli(logits=f).to_event(1)

    def probs(self, f: Tensor, params: Params | None = None) -> Tensor:
        return f.sigmoid()

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        zero = (-f.double()).sigmoid()
        return zero * y, torch.where(y == 1, 1.0, zero)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}(p (1 - p))`."""
        p = f.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())


class Ordinal(_Labels):
    r"""Ordered labels by cumulative logits: :math:`P(y \le k \mid x) = \mathrm{sigmoid}(c_{k + 1} - f(x))`.

    The net returns one number, and the larger it is the higher the label. Its bias gives the place of the cut-points,
    whose mean is therefore zero; they are ordered because the gaps between them are positive. Of two labels this is
    :class:`Bernoulli`.

    Args:
        num_classes: K; labels are integers 0 … K − 1 of shape (N,).
        cutpoints: ``"learned"``: the K − 2 gaps are a point parameter, from one on or from
            ``pb.likelihoods.learned(init=…)``, of shape () or (K − 2,); ``"inferred"``: the site ``likelihood.gaps``
            under the prior LogNormal(0, 1); or a tensor of K − 1 increasing numbers, fixed cut-points.

    Reference: Regression models for ordinal data (McCullagh, 1980).

    Example:
        >>> Ordinal(4, cutpoints="inferred")
        Ordinal(inferred gaps, num_classes=4)
    """

    task = "ordinal"

    def __init__(self, num_classes: int, cutpoints: str | Tensor | Learned = "learned"):
        super().__init__()
        self.num_classes: int = check_count(
            "num_classes",
            num_classes,
            minimum=2,
        )
        num_gaps = num_classes - 2
        if isinstance(cutpoints, Tensor):
            if cutpoints.shape != (num_classes - 1,) or not bool((cutpoints.diff() > 0).all()):
                wanted = f"{num_classes - 1} increasing numbers for {num_classes} classes"
                raise ValueError(f"'cutpoints' must be {wanted}, got {cutpoints}")
            self.own.fixed["cutpoints"] = cutpoints.detach().double().clone()
            return
        gaps = torch.ones(num_gaps)
        if isinstance(cutpoints, Learned):
            if cutpoints.init.shape not in ((), (num_gaps,)):
                raise ValueError(
                    f"'init' of the gaps between {num_classes - 1} cut-points must have shape () or ({num_gaps},), got "
                    f"{tuple(cutpoints.init.shape)}"
                )
            gaps = cutpoints.init.expand(num_gaps).clone()
            cutpoints = "learned"
        kind = check_choice("cutpoints", cutpoints, ("learned", "inferred"))
        if num_gaps and kind == "inferred":
            self.own.priors = {_GAPS: dist.LogNormal(0.0, 1.0).expand((num_gaps,)).to_event(1)}
        elif num_gaps:
            self.own.points = {_GAPS: (gaps, constraints.positive)}

    def width(self, num: int) -> int:
        return 1

    def cutpoints(self, f: Tensor, params: Params) -> Tensor:
        """The K − 1 cut-points, to be broadcast against (\\*batch, N, 1)."""
        if "cutpoints" in self.own.fixed:
            return self.own.fixed["cutpoints"].to(f)
        if self.num_classes == 2:
            return f.new_zeros(1)
        cuts = F.pad(params[_GAPS], (1, 0)).cumsum(-1)
        return (cuts - cuts.mean(-1, keepdim=True)).unsqueeze(-2)

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        r"""By log probabilities (\*batch, N, class), with σ(a) − σ(b) = σ(a) σ(−b) (1 − e^{b − a})."""
        cuts = self.cutpoints(f, params)
        below = F.logsigmoid(cuts - f)
        above = F.logsigmoid(f - cuts)
        inner = below[..., 1:] + above[..., :-1] + (-torch.expm1(-cuts.diff(dim=-1))).log()
        return dist.Categorical(logits=torch.cat([below[..., :1], inner, above[..., -1:]], -1))

    def probs(self, f: Tensor, params: Params | None = None) -> Tensor:
        return self.distribution(f, params or {}).probs

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \sum_k p_k s_k^2` with the scores :math:`s_k = \sigma(c_k - f) - \sigma(f - c_{k + 1})`."""
        cuts = self.cutpoints(f, params)
        score = F.pad((cuts - f).sigmoid(), (1, 0)) - F.pad((f - cuts).sigmoid(), (0, 1))
        return (self.probs(f, params) * score.square()).sum(-1, keepdim=True).sqrt().unsqueeze(-1)


# -- counts -----------------------------------------------------------------------------------------------------------

#: log of the largest expected count: draws of larger ones are beyond whole numbers
_MAX_LOG_COUNT = 27.0


class _Counts(Likelihood):
    """Counts, with exposures; their distribution function is ``_below`` of the class that derives from it."""

    valid = (constraints.nonnegative_integer, "counts 0, 1, 2, …")

    def __init__(self, exposure: int | None = None):
        super().__init__()
        words = "the number of a column of x (with torch.cat([x, exposures[:, None]], 1) of the last, exposure=-1)"
        check_type("exposure", 0 if exposure is None else exposure, Integral, words)
        self.targets = Targets("count", exposure=exposure)

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        lower = self._below(f.double(), (y - 1).clamp_min(0), params)
        upper = self._below(f.double(), y, params)
        return torch.where(y > 0, lower, 0.0), torch.where(y >= 0, upper, 0.0)

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """P(Y ≤ y) of counts y."""
        raise NotImplementedError


class Poisson(_Counts):
    r"""Counts of independent events: :math:`y \sim \mathrm{Poisson}(e(x)\, \exp f(x))`; the net returns log rates.

    Args:
        exposure: the column of ``x`` (a number; −1 is the last) that holds the exposure e of each row: the time, area
            or number of trials in which its events were counted. The net does not see this column; log e is added to
            its output, so that it learns the rate of one unit. None: one everywhere.

    Targets are whole numbers of shape (N, out), or (N,) for one output. Predictions are of counts; ``f`` and ``mean``
    are expected counts at the row's exposure.

    Caveat: its variance is its mean; where events come in clusters, use :class:`NegativeBinomial`.

    Example:
        >>> Poisson(exposure=-1)
        Poisson(exposure=-1)
    """

    task = "poisson"

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return dist.Poisson(f.clamp_max(_MAX_LOG_COUNT).exp()).to_event(1)

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        return by_scipy("pdtr", y.clamp_min(0), f.exp())

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}(e^f)`."""
        return torch.diag_embed((f / 2).exp())


class NegativeBinomial(_Counts):
    r"""Counts of clustered events: mean :math:`\mu = e(x) \exp f(x)` and variance :math:`\mu + \mu^2 / r`.

    Args:
        concentration: r, the smaller the more clustered, of shape () or (out,). A number is fixed; ``"learned"`` is a
            point parameter; a distribution on positive numbers is a prior (site ``likelihood.concentration``).
        exposure: as of :class:`Poisson`.

    Example:
        >>> import pyro.distributions as dist
        >>> NegativeBinomial(dist.LogNormal(1.0, 1.0))
        NegativeBinomial(inferred concentration)
    """

    task = "negative_binomial"

    def __init__(self, concentration: Parameter = "learned", exposure: int | None = None):
        super().__init__(exposure)
        self.own.declare("concentration", concentration)

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        r = self.own.value("concentration", f, params).expand(f.shape)
        return dist.NegativeBinomial(r, logits=f.clamp_max(_MAX_LOG_COUNT) - r.log()).to_event(1)

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        r = self.own.value("concentration", f, params).double()
        return by_scipy("betainc", r, (y + 1).clamp_min(1), (r.log() - f).sigmoid())

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r""":math:`H = \mathrm{diag}\left(\frac{\mu r}{\mu + r}\right)`."""
        r = self.own.value("concentration", f, params).expand(f.shape)
        return torch.diag_embed((r * (f - r.log()).sigmoid()).sqrt())


# -- censored values and survival times ------------------------------------------------------------------------------


class _Censored(Likelihood):
    """One output; y is (N, 2): the value, and 1 where it was observed or 0 where it is the limit of censoring."""

    def target(self, y: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        name = type(self).__name__
        if y.dim() != 2 or y.shape[1] != 2:
            raise ValueError(
                f"'y' has shape {tuple(y.shape)} but {name} expects (N, 2): the value, and 1 where it was observed or "
                "0 where it was censored there; torch.stack([time, event], 1)"
            )
        check_finite("y", y)
        event = y[:, 1]
        invalid = event[(event != 0) & (event != 1)]
        if len(invalid):
            raise ValueError(
                f"the second column of 'y' must be 1 (observed) or 0 (censored), got {invalid[0]:g}"
            )
        return torch.cat([super().target(y[:, :1], width, dtype), event[:, None].to(dtype)], 1)

    def distribution(self, f: Tensor, params: Params) -> TorchDistributionMixin:
        return Sampled(self, f, params, 2)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        density, beyond = self._logs(f, y[..., :1], params)
        return torch.where(y[..., 1] == 1, density[..., 0], beyond[..., 0])

    def cdf(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """P(Y ≤ y) twice where y was observed (or has no second column); else from there to the end where Y lies."""
        below = self._below(f.double(), y[..., :1], params)
        if y.shape[-1] == 1:
            return below, below
        known = y[..., 1:] == 1
        if self.targets.censoring == "right":
            return below, torch.where(known, below, 1.0)
        return torch.where(known, below, 0.0), below

    def draw(self, f: Tensor, params: Params) -> Tensor:
        """A value for each row, (\\*batch, N, 2), as one that was observed."""
        raise NotImplementedError

    def _logs(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """Log density at y, and log probability of the side where a censored Y lies."""
        raise NotImplementedError

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """P(Y ≤ y)."""
        raise NotImplementedError


class CensoredNormal(_Censored):
    r"""Gaussian noise of which what lies beyond a limit is not seen: the tobit model, :math:`y \sim N(f(x), \sigma^2)`.

    Targets are (N, 2): the value, and 1 where it was observed or 0 where all that is known is that it lies beyond. A
    structured array or DataFrame of a number and a truth value is taken too, as of scikit-survival and lifelines.

    Args:
        scale: σ, as of :class:`HomoskedasticGaussian`.
        censoring: ``"right"``: unseen values lie above what is given; ``"left"``: below.

    Predictions are of the value itself, seen or not. A standardizer takes limits for values; it sets units, no more.

    Reference: Estimation of relationships for limited dependent variables (Tobin, 1958).

    Example:
        >>> CensoredNormal(0.5, censoring="left")
        CensoredNormal(fixed scale, censoring=left)
    """

    task = "censored_normal"

    def __init__(self, scale: Parameter, censoring: str = "right"):
        super().__init__()
        side = check_choice("censoring", censoring, ("right", "left"))
        self.targets = Targets(
            linear_mean=True,
            censoring=side,
            measured="affine",
        )
        self.own.declare("scale", scale)

    def _standard(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        """(y − f) / σ, and σ."""
        scale = self.own.value("scale", f, params)
        return (y - f) / scale, scale

    def _logs(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        z, scale = self._standard(f, y, params)
        return log_normal_density(z) - scale.log(), log_ndtr(self._outwards(z))

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        return torch.special.ndtr(self._standard(f, y, params)[0])

    def _outwards(self, z: Tensor) -> Tensor:
        return -z if self.targets.censoring == "right" else z

    def draw(self, f: Tensor, params: Params) -> Tensor:
        return self.targets.observed(f + self.own.value("scale", f, params) * torch.randn_like(f))

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        return f, self.own.value("scale", f, params).square().expand(f.shape)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""Of a value that is seen, :math:`H = 1/\sigma^2`."""
        return (1 / self.own.value("scale", f, params)).expand(f.shape).unsqueeze(-1)

    def curvature_root(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        r"""Of a censored row the observed information :math:`h (h - z) / \sigma^2`, with the hazard h at its limit."""
        z, scale = self._standard(f, y[:, :1], params)
        z = -self._outwards(z)
        hazard = (log_normal_density(z) - log_ndtr(-z)).exp()
        share = (hazard * (hazard - z)).clamp(0.0, 1.0)
        return (torch.where(y[:, 1:] == 1, 1.0, share).sqrt() / scale).unsqueeze(-1)


class Weibull(_Censored):
    r"""Times until an event, right-censored where it had not happened: :math:`P(T > t) = e^{-(t / \lambda(x))^k}`.

    The net returns :math:`\log \lambda`: an input multiplies time (accelerated failure) and, k being one, the hazard.

    Targets are (N, 2): the time, and 1 where the event was observed or 0 where the row was censored then; or a
    structured array or DataFrame, as of :class:`CensoredNormal`.

    Args:
        shape: k; above one the hazard grows with time. A number is fixed; ``"learned"`` is a point parameter; a
            distribution on positive numbers is a prior, and k is inferred as the site ``likelihood.shape``.

    Predictions are of the time itself; ``mean`` and ``var`` are those of uncensored times. A standardizer divides times
    by their scale and takes no mean from them.

    Example:
        >>> import pyro.distributions as dist
        >>> Weibull(dist.LogNormal(0.0, 0.5))
        Weibull(inferred shape, censoring=right)
    """

    task = "weibull"
    targets = Targets(censoring="right", measured="scale")
    valid = (constraints.positive, "times, which must be positive,")

    def __init__(self, shape: Parameter = "learned"):
        super().__init__()
        self.own.declare("shape", shape)

    def _logs(self, f: Tensor, y: Tensor, params: Params) -> Pair:
        shape = self.own.value("shape", f, params)
        u = shape * (y.log() - f)
        return shape.log() + u - y.log() - u.exp(), -u.exp()

    def _below(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        shape = self.own.value("shape", f, params)
        return -torch.expm1(-(shape * (y.clamp_min(0).log() - f)).exp())

    def draw(self, f: Tensor, params: Params) -> Tensor:
        event = torch.empty_like(f).exponential_()
        return self.targets.observed((f + event.log() / self.own.value("shape", f, params)).exp())

    def mean_variance(self, f: Tensor, params: Params) -> Pair:
        shape = self.own.value("shape", f, params)
        moment_1 = torch.lgamma(1 + 1 / shape).exp()
        moment_2 = torch.lgamma(1 + 2 / shape).exp()
        return f.exp() * moment_1, (2 * f).exp() * (moment_2 - moment_1.square())

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""Of a time that is seen, :math:`H = k^2`."""
        return self.own.value("shape", f, params).expand(f.shape).unsqueeze(-1)

    def curvature_root(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        r"""The observed information :math:`k^2 (t / \lambda)^k`, of events and censored rows alike.

        Its mean is the expected one whatever cut the rows short; :math:`k^2` of events alone would be too large, for
        they are the rows of short times.
        """
        shape = self.own.value("shape", f, params)
        return (shape * (shape * (y[:, :1].log() - f) / 2).exp()).unsqueeze(-1)
