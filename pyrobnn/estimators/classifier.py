"""Classification for scikit-learn: probabilities that know what the data don't tell."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from pyrobnn.core.checks import check_number
from pyrobnn.data import Standardizer
from pyrobnn.data.dataset import Task
from pyrobnn.estimators.estimator import Estimator, Table
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.catalogue import Categorical


class BNNClassifier(ClassifierMixin, Estimator):
    r"""A Bayesian neural network that predicts classes, as an estimator of scikit-learn.

    .. math:: y \sim \mathrm{Categorical}(\mathrm{softmax} f_\theta(x)), \qquad \theta \sim p(\theta)

    The arguments are those of :class:`pyrobnn.BNNRegressor` (``noise`` has no use). ``net`` gives one logit per class;
    ``likelihood`` may be ``pb.likelihoods.Ordinal``, where sorted labels are in their order: one number, then.

    Where ``method="auto"`` takes Laplace's approximation it finds the width of the prior, a factor that all layers
    share, by the evidence and by rows left out one at a time (of 20,000 where there are more), and the mode anew for
    each width: where the inputs say nothing of the class it predicts the frequencies of the classes, and
    ``method_reason_`` says so. With more than 50 rows and ``hidden``, ``net``, ``prior`` and ``likelihood`` open it is
    a linear model, unless a net of 50 tanh units makes left-out rows likelier by two standard errors.

    A linear model of at most 1,000 weights has the Gaussian nearest to its posterior
    (``Laplace(curvature="variational")``): where classes can be told apart, that at the mode is underconfident.

    Caveat: a net keeps the Gaussian at the mode, and remains underconfident where classes can be told apart.

    Attributes: ``classes_``, the labels in the order of ``predict_proba``; the others as of the regressor.

    Raises:
        TypeError, ValueError: naming the argument, before anything is computed.

    Example:
        >>> import numpy as np, pyrobnn as pb
        >>> X = np.linspace(-1, 1, 30)[:, None]
        >>> y = np.where(X[:, 0] > 0, "hot", "cold")
        >>> model = pb.BNNClassifier("map", hidden=(), compile=False, random_state=0).fit(X, y)
        >>> model.predict([[-0.5], [0.5]])
        array(['cold', 'hot'], dtype='<U4')
    """

    task: Task = "classification"

    def fit(self, X: Table, y: ArrayLike, sample_weight: ArrayLike | None = None) -> BNNClassifier:
        """Infer the posterior.

        Args:
            X: inputs (n, feature), an array or a DataFrame.
            y: labels (n,), of any type that can be sorted.
            sample_weight: (n,), as of :meth:`pyrobnn.BNNRegressor.fit`; classes whose rows all have weight zero are
                not known.

        Returns:
            Itself.

        Raises:
            TypeError, ValueError: naming the argument; labels of a single class.

        Warns:
            UserWarning: what is to be known of the fit; also in ``posterior_.meta["warnings"]``.
        """
        self._check_likelihood()
        if self.noise != "inferred":
            raise ValueError(
                f"'noise' is for numbers, and classes have none: leave it out, got {self.noise!r}"
            )
        if y is not None and pd.isna(np.asarray(y, dtype=object)).any():
            raise ValueError("'y' contains NaN or another missing value: leave out these rows")
        x, targets = self._validated(X, y)
        check_classification_targets(targets)
        targets = column_or_1d(targets, warn=True)
        copies = self._copies(x, sample_weight)
        if copies is not None:
            x = x[copies > 0]
            targets = targets[copies > 0]
            copies = copies[copies > 0]
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"'y' holds a single class, {str(self.classes_[0])!r}: two are needed")
        self._fit(x, labels.astype(np.int64), copies, len(self.classes_))
        return self

    def predict_proba(self, X: Table) -> np.ndarray:
        """Probabilities of the classes, (n, class) in the order of ``classes_``, averaged over the posterior."""
        return self._predict(X, lambda p: p.probs)[0]

    def predict(self, X: Table) -> np.ndarray:
        """The most probable class of each row, (n,)."""
        best = self.predict_proba(X).argmax(1)  # before a fit there are no classes_
        return np.asarray(self.classes_[best])

    def predict_set(self, X: Table, level: float = 0.9) -> np.ndarray:
        """Whether each class belongs to the smallest set that holds a new label with probability ``level``.

        Args:
            X: inputs (n, feature).
            level: in (0, 1).

        Returns:
            (n, class), truth values, in the order of ``classes_``.
        """
        check_number("level", level, above=0, below=1)
        probs = self.predict_proba(X)
        order = np.argsort(-probs, axis=1, kind="stable")
        falling = np.take_along_axis(probs, order, 1)
        needed = falling.cumsum(1) - falling < level
        member = np.zeros(probs.shape, dtype=bool)
        np.put_along_axis(member, order, needed, 1)
        return member

    def _effects_on(self, y: np.ndarray) -> dict[str, np.ndarray]:
        of_classes = {
            str(name): (y == label).astype(np.float64) for label, name in enumerate(self.classes_)
        }
        if len(of_classes) == 2:
            del of_classes[str(self.classes_[0])]
        return of_classes

    def _default_likelihood(self, units: Standardizer | None, width: int) -> Likelihood:
        return Categorical()
