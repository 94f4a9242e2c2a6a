"""Any Pyro program ``fn(x, y)`` as an estimator of scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from numpy.typing import ArrayLike
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from pyrobnn.core.checks import check_number, check_type
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.seeding import seeded
from pyrobnn.core.threads import process_state
from pyrobnn.inference import NUTS
from pyrobnn.inference.method import Method, check_method
from pyrobnn.model import Density
from pyrobnn.model.distribution_kinds import elementwise
from pyrobnn.model.dtypes import types_explained
from pyrobnn.model.gradient import at_each
from pyrobnn.model.handlers import Supply, at_many_points, own_store
from pyrobnn.model.log_terms import without_validation
from pyrobnn.posterior.local_rows import sites_of_rows

if TYPE_CHECKING:
    from pyrobnn.diagnostics import Verdict

#: what is predicted of a distribution of n rows, and of uniform noise (n,): (n, …)
Statistic = Callable[[TorchDistribution, Tensor], Tensor]


class _ProgramEstimator(BaseEstimator):
    """What the regressor and the classifier share."""

    @options_explained
    def __init__(
        self,
        program: Callable[..., Any],
        method: Method | None = None,
        *,
        site: str | None = None,
        num_draws: int | None = None,
        random_state: int | np.random.RandomState | None = None,
    ):
        self.program = program
        self.method = method
        self.site = site
        self.num_draws = num_draws
        self.random_state = random_state

    @process_state()
    def _fit(self, x: np.ndarray, y: np.ndarray) -> None:
        self.__dict__.pop("verdict_", None)
        self.method_ = NUTS() if self.method is None else self.method
        check_type("program", self.program, Callable, "a Pyro program fn(x, y)")
        check_method(self.method_)
        self._x = self._tensor(x)
        self._y = self._tensor(y)
        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(2**31 - 1))
        with types_explained(self.program, {"x": self._x, "y": self._y}):
            data = [*Density(self.program, (self._x, self._y)).derived.replicated]
        self._site = self.site or (data[0] if len(data) == 1 else "")
        if self._site not in data:
            raise ValueError(
                f"'site' must name what to predict, one of the observed sites {data}: got {self.site!r}"
            )
        self.posterior_ = self.method_.fit(
            self.program,
            self._x,
            self._y,
            num_draws=self.num_draws,
            seed=int(seed),
        )
        self._of_rows = sites_of_rows(self.posterior_, self._x, self._y)

    @staticmethod
    def _tensor(values: ArrayLike) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.get_default_dtype())

    @cached_property
    def verdict_(self) -> Verdict:
        """The verdict on the fit, by its training data; computed when it is first asked for, and then kept."""
        check_is_fitted(self)
        from pyrobnn.diagnostics import diagnose

        return diagnose(self.posterior_.to_datatree(self._x, self._y))

    @torch.no_grad()
    def _predicted(
        self,
        X: ArrayLike,
        statistic: Statistic,
        least: int = 1,
    ) -> np.ndarray:
        """``statistic`` of the predicted site's distribution and of uniform noise (n,), at every draw: (draw, n, …).

        At ``least`` so many: draws of the posterior are taken more than once, if need be.
        """
        check_is_fitted(self)
        x = self._tensor(
            validate_data(
                self,
                X,
                reset=False,
                dtype=np.float64,
            )
        )

        def statistic_at(values: dict[str, Tensor], noise: Tensor) -> Tensor:
            results: list[Tensor] = []

            def look(fn: TorchDistribution) -> Tensor:
                shape = fn.shape()
                if len(x) != shape[0]:
                    raise ValueError(
                        f"{self._site!r} has shape {(*shape,)}, x {len(x)} rows: take their number from x"
                    )
                results.append(statistic(elementwise(fn), noise))
                return x.new_zeros(shape)

            supply = Supply({**values, self._site: look}, {}, like=x)
            with own_store(), without_validation(), pyro.poutine.block(), supply, at_many_points():
                self.program(x, None)
            return results[0]

        draws = self.posterior_.stacked()
        if not torch.equal(x, self._x):
            # other rows have values of their own, from the law that the program gives any row
            draws = {name: value for name, value in draws.items() if name not in self._of_rows}
        total = len(next(iter(draws.values())))
        rows = torch.arange(total).repeat(math.ceil(least / total))
        with seeded(0):
            blocks = rows.split(max(1, 2**22 // len(x)))  # scalars at once
            noises = torch.rand(len(rows), len(x)).split(len(blocks[0]))
            parts = []
            for block, noise in zip(blocks, noises):
                values = {name: draw[block] for name, draw in draws.items()}
                parts.append(at_each(statistic_at, values, noise))
        return np.asarray(torch.cat(parts))


def _draw(fn: TorchDistribution, noise: Tensor) -> Tensor:
    """A draw for each row, of uniform ``noise`` (n,) where the distribution has quantiles."""
    try:
        return fn.icdf(noise)
    except NotImplementedError:
        return fn.sample().to(noise.dtype)


class PyroRegressor(RegressorMixin, _ProgramEstimator):
    """A Pyro program that predicts numbers, as an estimator of scikit-learn.

    Args:
        program: ``fn(x, y)``: x (n, feature), y (n,), tensors of torch's default floating type; in a prediction y is
            None, and the program samples it. Data are as they come: standardise in a pipeline.
        method: how the posterior is inferred; default ``pb.NUTS()``.
        site: the observed site that is predicted, where the program has several.
        num_draws: of the posterior (per chain); default the method's own number.
        random_state: a whole number makes every fit the same; None takes NumPy's global generator.

    Attributes: ``posterior_``, ``method_``, ``verdict_`` (computed when it is first asked for), ``n_features_in_``.

    Where a latent site has a value for each row, predictions of the rows of the fit are by their values; of other rows
    by values drawn from the law that the program gives any row, given what all rows share.

    Raises:
        TypeError, ValueError: no program, method or observed site, or several and none named. Refused: by the method.

    Example:
        >>> import numpy as np, pyro, pyro.distributions as dist, pyrobnn as pb, torch
        >>> def line(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        ...     with pyro.plate("rows", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x[:, 0], 0.1), obs=y)
        >>> X = np.linspace(-1, 1, 30)[:, None]
        >>> model = pb.PyroRegressor(line, pb.MAP(num_steps=200, compile=False), random_state=0)
        >>> model.fit(X, 2 * X[:, 0]).predict([[0.5]]).round(2)
        array([1.], dtype=float32)
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> PyroRegressor:
        """Infer the posterior from X (n, feature) and y (n,); returns itself."""
        x, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(x, targets)
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The predictive mean (n,), the average of the site's means; with ``return_std`` a tuple with the standard
        deviation of a new observation, noise and ignorance together."""
        moments = self._predicted(X, lambda fn, _: torch.stack([fn.mean, fn.variance], -1))
        mean = moments[..., 0].mean(0)
        if not return_std:
            return mean
        return mean, np.sqrt(moments[..., 1].mean(0) + moments[..., 0].var(0))

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> np.ndarray:
        """The central interval (n, 2) that holds a new observation with probability ``level``, by simulation."""
        tail = (1 - check_number("level", level, above=0, below=1)) / 2
        return np.quantile(
            self._predicted(X, _draw, 4000),
            (tail, 1 - tail),
            axis=0,
        ).T


class PyroClassifier(ClassifierMixin, _ProgramEstimator):
    """A Pyro program that predicts classes: its site is Bernoulli or Categorical, and y counts the classes from zero.

    Arguments and attributes are those of :class:`PyroRegressor`; ``classes_`` beside them.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> PyroClassifier:
        """Infer the posterior from X (n, feature) and labels y (n,); returns itself."""
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(column_or_1d(y), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"'y' has one class, {self.classes_[0]!r}: at least two are needed")
        self._fit(x, labels)
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities (n, class), averaged over the posterior."""

        def class_probabilities(fn: TorchDistribution, _: Tensor) -> Tensor:
            if fn.support is None or not fn.support.is_discrete:
                raise TypeError(
                    f"{self._site!r} is {type(fn).__name__}, which has no classes: use PyroRegressor"
                )
            levels = torch.arange(len(self.classes_), dtype=torch.get_default_dtype())
            log_probs = [fn.log_prob(level.expand(fn.batch_shape)) for level in levels]
            return torch.stack(log_probs, -1).exp()

        probs = self._predicted(X, class_probabilities).mean(0)
        return np.asarray(probs / probs.sum(1, keepdims=True))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row (n,)."""
        best = self.predict_proba(X).argmax(1)  # before a fit there are no classes_
        return np.asarray(self.classes_[best])
