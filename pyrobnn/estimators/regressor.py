"""Regression for scikit-learn: numbers with their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyro.distributions as dist
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils import Tags

from pyrobnn.core.checks import check_number
from pyrobnn.data import Standardizer
from pyrobnn.data.dataset import Task
from pyrobnn.estimators.estimator import Estimator, Table
from pyrobnn.model.likelihoods.base import SCALE, Likelihood
from pyrobnn.model.likelihoods.catalogue import HeteroskedasticGaussian, HomoskedasticGaussian


class BNNRegressor(RegressorMixin, Estimator):
    r"""A Bayesian neural network that predicts numbers, as an estimator of scikit-learn.

    .. math:: y \sim N(f_\theta(x), \sigma^2), \qquad \theta \sim p(\theta)

    Args:
        method: how the posterior is inferred: ``"auto"`` chooses by the size of data and net and says why
            (``method_reason_``), and where ``hidden``, ``net``, ``prior``, ``likelihood`` and ``noise`` are open it
            chooses these too, see below; a name (``"nuts"``, ``"svi"``, ``"laplace"``, …) is the method as ``pyrobnn
            compare`` runs it; a method (``pb.Laplace(...)``) is taken as it is.
        hidden: widths of the hidden layers, and ``activation`` between them; such a net computes in float64. None is
            (50,), or open.
        net: an ``nn.Module``, or a function (num_inputs, num_outputs) → module, instead of the two.
        prior: of the weights, in standard units; default ``pb.priors.FanInNormal()``. Of normal priors ``"auto"`` and
            ``"laplace"`` tune the width, by the marginal likelihood, and say so in ``method_reason_``; others stay as
            they are declared, and so do all for a method that is given.
        likelihood: one of ``pb.likelihoods`` for numbers (``StudentT``, ``Poisson``, ``Weibull``, …), in standard
            units, instead of ``noise``; an exposure is a column of X.
        noise: its standard deviation: ``"inferred"`` (per output, under a HalfNormal(1) prior in standard units),
            ``"learned"``, ``"heteroskedastic"`` (a function of the input), or a number in the units of y. Where
            rows are few for the weights, ``"auto"`` finds it, as a ``StudentT``'s scale, by the evidence, and where it
            is a function by chains (``SGHMC``).
        standardize: bring inputs and targets to mean 0 and standard deviation 1, and predictions back.
        missing: ``"refuse"`` missing values of a DataFrame, or ``"impute"``: a number gets its column's median, and an
            input says that it was missing; a gap among categories is a category of its own. (Of arrays: SimpleImputer.)
        num_draws: of the posterior (per chain); default the method's own number.
        max_seconds: roughly what ``"auto"`` may spend where all is open (less on large tables); steps vary by machine.
        compile: of a method that is chosen or named: ``"auto"`` compiles where it is forecast to cost less.
        device: where to compute, ``"cpu"`` or ``"cuda"``.
        random_state: a whole number makes every fit the same; None takes NumPy's global generator.
        verbose: 1 prints the choice of the method and shows a progress bar.

    Attributes: ``posterior_`` (:class:`pyrobnn.Posterior`), ``method_`` and ``method_reason_``, ``verdict_`` (computed
    when it is first asked for), ``n_outputs_``, ``n_features_in_``, and ``feature_names_in_`` of a DataFrame.

    With more than 500 rows and all of these open, short fits are tried on four fifths of them: features transformed to
    remove skew, with or without sines, small or larger noise, and for counts and skewed positive targets other
    likelihoods. If the best predicts the rest better than a Bayesian linear regression by two standard errors, an
    ensemble of such nets is trained. Up to 2,000 rows, chains (:class:`pyrobnn.SGHMC`) start from its members and learn
    noise that depends on the input; with more rows the members learn it, its scale is calibrated on at most 500 rows
    held out of training, by which ``verdict_`` judges the model, and ``num_draws`` is not used. Where no ensemble gains
    the method is Laplace's approximation of a linear model.

    Up to 500 rows it is Laplace's approximation of a net of the features, or of their powers and sines where that
    predicts left-out rows better, or of a linear model where neither gains; counts have a negative binomial. Of a net,
    and of up to 50 rows, short chains from its draws then go to the posterior itself, the noise inferred: draws are
    theirs where they arrive in a fixed amount of work (:meth:`pyrobnn.Posterior.refine`). With fewer than 10 rows, and
    up to 50 where they don't arrive, the method is NUTS.

    Caveats: neither the chains from an ensemble, too short to mix, nor its members sample the posterior, as
    ``verdict_`` warns. Rows are sorted before the fit: what their order says (time) is not seen.

    A DataFrame with text, categories or dates is encoded as by :func:`pyrobnn.data.from_frame` (``columns_``), but a
    column of 20 categories or more is one input: the effect of the row's category on each target, as a random effect
    that is pooled over the categories. The net learns from one draw of the effects and predicts over their posterior;
    the effect of a new category has the variance between categories, and prediction warns of it, naming column and
    rows. Caveat: the law of the effects is fitted once, before the net; ``posterior_`` is given their draw.

    Raises:
        TypeError, ValueError: naming the argument, before anything is computed.

    Example:
        >>> import numpy as np, pyrobnn as pb
        >>> X = np.linspace(-1, 1, 30)[:, None]
        >>> model = pb.BNNRegressor("map", hidden=(), compile=False, random_state=0).fit(X, 2 * X[:, 0])
        >>> model.predict([[0.5]]).round(2)
        array([1.])
    """

    task: Task = "regression"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self,
        X: Table,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> BNNRegressor:
        """Infer the posterior.

        Args:
            X: inputs (n, feature), an array or a DataFrame.
            y: targets (n,) or (n, output); of a censored response (n, 2), the value and whether it was observed, or a
                structured array.
            sample_weight: (n,), whole numbers: as how many rows each row counts.

        Returns:
            Itself.

        Raises:
            TypeError, ValueError: naming the argument.

        Warns:
            UserWarning: what is to be known of the fit; also in ``posterior_.meta["warnings"]``.
        """
        self._check_likelihood()
        x, y = self._validated(
            X,
            self._read(y),
            multi_output=True,
            y_numeric=True,
        )
        y = _numbers(y)
        flat = y.ndim == 1
        y = y.reshape(len(y), -1)
        self.n_outputs_ = self._values(y).shape[1]
        self._flat = flat or self.n_outputs_ < y.shape[1]
        self._fit(x, y, self._copies(x, sample_weight), self.n_outputs_)
        return self

    def _read(self, y: ArrayLike) -> ArrayLike:
        """Structured arrays of censored values as two columns; anything else as it is."""
        structured = getattr(getattr(y, "dtype", None), "names", None)
        if not structured or self.likelihood is None:
            return y
        return self.likelihood.targets.read(y).numpy()

    def _values(self, y: np.ndarray) -> np.ndarray:
        """The columns of y that are predicted."""
        if self.likelihood is None:
            return y
        return self.likelihood.targets.values(torch.tensor(y)).numpy()

    def _effects_on(self, y: np.ndarray) -> dict[str, np.ndarray]:
        return {f"{output}": column for output, column in enumerate(self._values(y).T)}

    def predict(
        self, X: Table, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The predictive mean.

        Args:
            X: inputs (n, feature).
            return_std: also return the standard deviation of a new observation, noise and ignorance together.

        Returns:
            Mean (n,) or (n, output); with ``return_std`` a tuple of it and the standard deviation.
        """
        if not return_std:
            return self._shaped(self._predict(X, lambda p: p.mean)[0])
        mean, scale = self._predict(X, lambda p: p.mean, lambda p: p.var.sqrt())
        return self._shaped(mean), self._shaped(scale)

    def predict_quantiles(
        self, X: Table, quantiles: float | Sequence[float] = (0.05, 0.5, 0.95)
    ) -> np.ndarray:
        """Quantiles of a new observation, (n, quantile) or (n, output, quantile).

        Raises:
            ValueError: a level outside (0, 1).
        """
        levels = [
            check_number(
                "quantiles",
                level,
                above=0,
                below=1,
            )
            for level in np.atleast_1d(quantiles)
        ]
        q = torch.tensor(levels, dtype=torch.float64)
        return self._shaped(self._predict(X, lambda p: p.quantile(q).movedim(0, -1))[0])

    def predict_interval(self, X: Table, level: float = 0.9) -> np.ndarray:
        """The central interval that holds a new observation with probability ``level``, if the model is right.

        Args:
            X: inputs (n, feature).
            level: in (0, 1).

        Returns:
            (n, 2) or (n, output, 2): its lower and its upper end.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        check_number("level", level, above=0, below=1)
        return self.predict_quantiles(X, ((1 - level) / 2, (1 + level) / 2))

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self._flat else values

    def _default_likelihood(self, units: Standardizer | None, width: int) -> Likelihood:
        if self.noise == "heteroskedastic":
            return HeteroskedasticGaussian()
        if self.noise in ("inferred", "learned"):
            unit = torch.ones(() if width == 1 else width, dtype=torch.float64)
            if self.noise == "inferred":
                return HomoskedasticGaussian(dist.HalfNormal(unit))
            likelihood = HomoskedasticGaussian("learned")
            likelihood.own.points[SCALE] = (unit, dist.constraints.positive)  # one per output
            return likelihood
        if isinstance(self.noise, str):
            kinds = "'inferred', 'learned', 'heteroskedastic' or a number in the units of y"
            raise ValueError(f"'noise' must be {kinds}, got {self.noise!r}")
        scale = torch.tensor(check_number("noise", self.noise, above=0), dtype=torch.float64)
        if units is not None:
            scale = scale / (units.y_scale if width > 1 else units.y_scale[0])
        return HomoskedasticGaussian(scale)


def _numbers(y: ArrayLike) -> np.ndarray:
    """Targets as floats.

    Raises:
        ValueError: 'y' holds words.
    """
    try:
        return np.asarray(y, dtype=np.float64)
    except ValueError as error:
        raise ValueError(
            f"'y' must hold numbers, and {error}: words are classes, which BNNClassifier predicts"
        ) from error
