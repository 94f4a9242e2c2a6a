"""What the regressor and the classifier share: data in, a model, a fit, and its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_feature_names,
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn

from pyrobnn.core.checks import Refused, check_choice, check_count, check_number, check_type
from pyrobnn.core.findings import Finding, warn
from pyrobnn.core.seeding import seeded
from pyrobnn.core.threads import process_state
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.data.columns import Columns, check_names
from pyrobnn.data.dataset import Task
from pyrobnn.data.table import constant_features
from pyrobnn.diagnostics import Verdict
from pyrobnn.estimators.auto import FEW_ROWS, MAX_EVIDENCE_ROWS, choose, families, named
from pyrobnn.estimators.empirical_bayes import empirical_bayes, left_out, left_out_labels, subset
from pyrobnn.estimators.wide import Offset, counts, gain, lifted, one_thread, quiet, search
from pyrobnn.inference.fitting.batches import MAX_WHOLE_ROWS
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import METHODS, Method, check_method
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior.prediction import Prediction


class Estimator(BaseEstimator):
    """A Bayesian neural network with the manners of scikit-learn: the base of the regressor and the classifier."""

    task: Task
    method_reason_: str
    #: whether one number is predicted, and y was (n,)
    _flat = False

    def __init__(
        self,
        method: Any = "auto",
        *,
        hidden: Any = None,
        activation: Any = "tanh",
        net: Any = None,
        prior: Any = None,
        likelihood: Any = None,
        noise: Any = "inferred",
        standardize: bool = True,
        missing: Any = "refuse",
        num_draws: int | None = None,
        max_seconds: float | None = None,
        compile: bool = True,
        device: Any = None,
        random_state: Any = None,
        verbose: int = 0,
    ):
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.net = net
        self.prior = prior
        self.likelihood = likelihood
        self.noise = noise
        self.standardize = standardize
        self.missing = missing
        self.num_draws = num_draws
        self.max_seconds = max_seconds
        self.compile = compile
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # -- fit --------------------------------------------------------------------------------------------------------

    @process_state()
    def _fit(self, x: np.ndarray, y: np.ndarray, copies: np.ndarray | None, width: int) -> None:
        """Fit checked rows: x (N, feature), y (N, out) or labels (N,), for ``width`` outputs."""
        self.__dict__.pop("verdict_", None)
        self._weighted = copies is not None
        self._held = cast(Any, ())
        warn(constant_features(x, self._names(x)))
        if copies is not None:
            x = np.repeat(x, copies, 0)
            y = np.repeat(y, copies, 0)
        order = np.lexsort(np.column_stack([x, y]).T)  # data in another order give the same numbers
        self._x = torch.from_numpy(np.ascontiguousarray(x[order]))
        self._y = torch.from_numpy(np.ascontiguousarray(y[order]))
        seed = self._seed()
        model = self._model(width, seed)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, above=0)
        labels = self.task == "classification"
        is_open = self._is_open(model)
        if is_open and labels and not self.max_seconds:
            self._fit_labels(model, seed)
        elif is_open and not labels:
            self._fit_open(model, seed)
        elif self.max_seconds is not None:
            raise ValueError(
                "'max_seconds' is spent by method='auto' of one target where net, hidden, prior, likelihood and noise "
                "are left open: leave it out"
            )
        else:
            self._infer(model, seed)
        if self.verbose:
            print(f"{type(self).__name__}: {self.method_reason_}", flush=True)  # noqa: T201 (what verbose is for)

    def _model(self, width: int, seed: int) -> BNN:
        """The model of the training data, for ``width`` outputs."""
        units = None
        if self.standardize:
            units = Standardizer.fit(Dataset(self._x, self._y, "train", self.task))
        likelihood: Likelihood = self.likelihood
        if likelihood is None:
            likelihood = self._default_likelihood(units, width)
        exposure = likelihood.targets.exposure is not None
        if exposure and self.columns_ is not None:
            raise ValueError(
                "'exposure' names a column of numbers, but 'X' is a table whose columns are encoded: encode it first"
            )
        self._width = likelihood.width(width)
        net = self._net(self._x.shape[1] - exposure, self._width, seed)
        prior = priors.FanInNormal() if self.prior is None else self.prior
        return BNN(net, prior, likelihood, standardizer=units)

    def _is_open(self, model: BNN) -> bool:
        """Whether what is fitted is left to ``method="auto"``."""
        choices = (self.hidden, self.net, self.prior, self.likelihood)
        auto = isinstance(self.method, str) and self.method == "auto" and not self._weighted
        known = self.task == "classification" or (self._width == 1 and self.noise == "inferred")
        return auto and known and model.standardizer is not None and choices == (None,) * 4

    @one_thread()
    def _fit_open(self, model: BNN, seed: int) -> None:
        """The fit where nothing but the data is given: a linear model, unless a net gains on it."""
        num = len(self._x)
        why = ""
        if num > (FEW_ROWS if self.max_seconds is not None else MAX_EVIDENCE_ROWS):
            fitted, why = self._fit_ensemble(model, seed)
            if fitted:
                return
        line = networks.mlp(self._x.shape[1], (), 1, seed=seed).double()
        if self._fit_counts(model, line if why else model.net, seed):
            return
        if num <= FEW_ROWS:
            return self._infer(model, seed)
        if num <= MAX_WHOLE_ROWS:
            gained, why = self._fit_nets(model, seed)
            if gained:
                warn(self.posterior_.meta["warnings"])
                self.method_reason_ += f"; {why}"
                return
        self._infer(BNN(line, model.prior, model.likelihood, standardizer=model.standardizer), seed)
        self.method_reason_ = (
            f"a linear model predicts these rows as well: {why}; {self.method_reason_}"
        )

    def _fit_ensemble(self, model: BNN, seed: int) -> tuple[bool, str]:
        """Whether an ensemble gains on a linear model, by how much in words, and if so its fit."""
        data = (self._x, self._y)
        units = cast(Standardizer, model.standardizer)
        seconds = self.max_seconds
        begun = time.perf_counter()
        rule, why = search(data, units, seconds, seed, self.device)
        if rule is None:
            return False, why
        if seconds is not None:
            seconds -= time.perf_counter() - begun
        run = {"seed": seed, "device": self.device, "progress": bool(self.verbose)}
        fit = rule.fit(data, units, seconds, self.num_draws, self.compile, **run)
        self.posterior_, self.method_, words, self._held = fit
        self.method_reason_ = f"{len(self._x):,} rows: {words}; {why}"
        return True, why

    def _fit_nets(self, model: BNN, seed: int) -> tuple[bool, str]:
        """Whether the better of a net and a net of more features gains on a linear model, and by how much in words."""
        data = (self._x, self._y)
        fits = [self._tried(model, seed), self._tried(lifted(model, *data, seed), seed)]
        scores = [left_out(fit["posterior_"], *data) for fit in fits]
        best = gain(scores[1][0], scores[0][0])[0]  # without a gain the plainer net
        self.__dict__.update(fits[best])
        return gain(*scores[best])

    @one_thread()
    def _fit_labels(self, model: BNN, seed: int) -> None:
        """The fit of classes where nothing but the data is given: a linear model, unless a net gains on it."""
        if len(self._x) <= FEW_ROWS:
            return self._infer(model, seed)
        line = networks.mlp(self._x.shape[1], (), self._width, seed=seed).double()
        models = BNN(line, model.prior, model.likelihood, standardizer=model.standardizer), model
        fits = [self._tried(candidate, seed) for candidate in models]
        rows = subset(self._x, self._y)
        scores = [left_out_labels(fit["posterior_"], *rows) for fit in fits]
        gained, why = gain(scores[1], scores[0])
        self.__dict__.update(fits[gained])
        self.method_reason_ += f"; {why}"
        if not gained:
            self.method_reason_ = (
                f"a linear model predicts these rows as well: {self.method_reason_}"
            )
        warn(self.posterior_.meta["warnings"])

    def _fit_counts(self, model: BNN, net: nn.Module, seed: int) -> bool:
        """Whether the targets are counts rather than normal, and a fit under their likelihood ends at a mode."""
        x = cast(Standardizer, model.standardizer).transform_x(self._x).numpy()
        likelihood, words = counts(x, self._y.numpy())
        if likelihood is None:
            return False
        net = nn.Sequential(*cast(nn.Sequential, net), Offset(self._y))
        with quiet():
            self._infer(BNN(net, model.prior, likelihood, standardizer=model.standardizer), seed)
        meta = self.posterior_.meta
        self.method_reason_ += f"; {words}"
        # within a posterior sd of each weight
        at_mode = bool(meta.get("newton_distance", 0.0) ** 2 < model.num_weights)
        if at_mode:
            warn(meta["warnings"])
        return at_mode

    def _tried(self, model: BNN, seed: int) -> dict[str, Any]:
        """What a fit leaves on this estimator; its warnings follow where it is kept."""
        with quiet():
            self._infer(model, seed)
        return dict(vars(self))

    def _infer(self, model: BNN, seed: int) -> None:
        """The posterior of a model by the method that is given or chosen."""
        self.method_, self.method_reason_, options = self._method(model, model.likelihood.width(1))
        options |= {"seed": seed, "device": self.device, "progress": bool(self.verbose)}
        auto = isinstance(self.method, str) and self.method == "auto"
        fit = empirical_bayes(self.method_, model, self._x, self._y) if auto else None
        if fit is None:
            self.posterior_ = self.method_.fit(model, self._x, self._y, **options)
        else:
            self.posterior_, chosen = fit(self.method_, model, self._x, self._y, options)
            self.method_reason_ += f"; {chosen}"

    def _validated(self, X: Any, y: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, feature), float64, and targets, by ``validate_data``'s options; other columns are encoded."""
        check_choice("missing", self.missing, ("refuse", "impute"))
        self.columns_: Columns | None = None
        self._is_table = isinstance(X, pd.DataFrame) and (
            self.missing == "impute"
            or X.select_dtypes(["number", "bool"], "timedelta").shape[1] < X.shape[1]
        )
        options |= {"dtype": np.float64, "ensure_min_samples": 2}
        if not self._is_table:
            return cast(tuple[np.ndarray, np.ndarray], validate_data(self, X, y, **options))
        check_names("X", list(X.columns.map(str)))
        columns = Columns.fit(X, self.missing, "X")
        x, y = validate_data(self, columns.transform(X, "X")[0], y, **options)
        _check_feature_names(self, X, reset=True)
        self.n_features_in_ = X.shape[1]
        self.columns_ = columns
        return x, y

    def _names(self, x: np.ndarray | Tensor) -> Sequence[str]:
        """Of the inputs x (n, input)."""
        if self.columns_ is not None:
            return self.columns_.inputs
        names = getattr(self, "feature_names_in_", None)
        return [f"x{index}" for index in range(x.shape[1])] if names is None else names

    def _seed(self) -> int:
        """A whole number is the seed itself; a generator, or NumPy's global one for None, draws it."""
        if isinstance(self.random_state, Integral):
            return check_count("random_state", self.random_state, minimum=0)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _copies(self, x: np.ndarray, sample_weight: Any) -> np.ndarray | None:
        """How often each row counts (n,)."""
        if sample_weight is None:
            return None
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if (weights != np.round(weights)).any():
            raise Refused("'sample_weight' must be whole numbers: each row counts that many times")
        return cast(np.ndarray, weights.astype(np.int64))

    def _net(self, num_inputs: int, width: int, seed: int) -> nn.Module:
        if self.net is None:
            hidden = (50,) if self.hidden is None else self.hidden
            net = networks.mlp(num_inputs, hidden, width, activation=self.activation, seed=seed)
            return net.double()  # in what scikit-learn computes in
        if isinstance(self.net, nn.Module):
            return self.net
        check_type(
            "net",
            self.net,
            Callable,
            "an nn.Module or a function (num_inputs, num_outputs) -> nn.Module",
        )
        with seeded(seed):
            return cast(nn.Module, self.net(num_inputs, width))

    def _check_likelihood(self) -> None:
        """Raise where a likelihood was given that is none, or not of this kind of target."""
        likelihood = self.likelihood
        if likelihood is None:
            return
        suits = isinstance(likelihood, Likelihood)
        if suits and self.task == "classification":
            suits = likelihood.targets.kind == "label"
        elif suits:
            suits = not likelihood.targets.classes
        if not suits:
            raise TypeError(
                f"'likelihood' must be one of pyrobnn.likelihoods for {self.task}, got {likelihood!r}"
            )

    def _default_likelihood(self, units: Standardizer | None, width: int) -> Likelihood:
        raise NotImplementedError

    def _method(self, model: BNN, width: int) -> tuple[Method, str, dict[str, Any]]:
        """The method, why it, and the options of its ``fit``."""
        options = {} if self.num_draws is None else {"num_draws": self.num_draws}
        if not isinstance(self.method, str):
            check_method(self.method, instead="'auto', the name of a method or ")
            return self.method, f"{type(self.method).__name__}, as it was given", options
        check_choice("method", self.method, tuple(METHODS))
        facts = families(model)
        num = len(self._x)
        if self.method == "auto":
            # a linear model is found in a few steps, sooner than they are compiled; "trace" needs no compiler
            line = isinstance(model.net, nn.Sequential) and len(model.net) == 1
            compile = not line and (self.compile or "trace")
            chosen, why = choose(num, model.num_weights, width, **facts, compile=compile)
            if line and isinstance(chosen, Laplace):
                chosen = replace(chosen, map=replace(chosen.search, num_steps=200, lr=0.05))
            return chosen, why, options
        method, why, settings = named(self.method, normal=facts["normal"], compile=self.compile)
        return method, why, settings | options

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        if not self._is_table:
            return torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))
        check_type("X", X, pd.DataFrame, "a DataFrame as it was in the fit")
        _check_feature_names(self, X, reset=False)
        return torch.tensor(cast(Columns, self.columns_).transform(X, "X")[0])

    def _predict(self, X: Any, *parts: Callable[[Prediction], Tensor]) -> list[np.ndarray]:
        """Parts of the prediction, each with the rows first; computed block by block."""
        x = self._inputs(X)
        posterior = self.posterior_
        warn(far_rows(self._x.numpy(), x.numpy(), self._names(x)))
        # scalars that a prediction holds at once: 128 MiB of float64
        size = max(1, 2**24 // (posterior.num_chains * posterior.num_draws * self._width))
        blocks: list[list[Tensor]] = [[] for _ in parts]
        for rows in x.split(size):
            prediction = posterior.predict(rows)
            for values, read in zip(blocks, parts):
                values.append(read(prediction).detach().cpu())
        return [torch.cat(values).numpy() for values in blocks]

    def sample_functions(self, X: Any, num_draws: int | None = None) -> np.ndarray:
        """Functions drawn from the posterior at ``X``, each coherent over its points and without noise.

        Args:
            X: inputs (n, feature).
            num_draws: how many of the draws, evenly spaced over all chains; default all.

        Returns:
            (draw, n) or (draw, n, output); of classes their probabilities (draw, n, class).
        """
        check_is_fitted(self)
        total = self.posterior_.num_chains * self.posterior_.num_draws
        count = total if num_draws is None else min(check_count("num_draws", num_draws), total)
        keep = torch.linspace(0, total - 1, count, dtype=torch.float64).round().long()

        def functions(p: Prediction) -> Tensor:
            f = p.likelihood.probs(p.f, p.params) if self.task == "classification" else p.f
            return f.flatten(0, 1)[keep.to(f.device)].movedim(0, 1)

        draws = np.moveaxis(self._predict(X, functions)[0], 0, 1)
        return draws[..., 0] if self._flat else draws

    @cached_property
    def verdict_(self) -> Verdict:
        """The verdict on the fit, by its training data and rows that were held out; computed when first asked for."""
        from pyrobnn.diagnostics import diagnose

        check_is_fitted(self)
        is_test = np.isin(np.arange(len(self._x)), self._held)
        x = self._x[~is_test]
        # of rows that are counted more than once none can be left out
        y = None if self._weighted else self._y[~is_test]
        test = (self._x[is_test], self._y[is_test]) if is_test.any() else None
        tree = self.posterior_.to_datatree(x, y, test=test)
        names = {
            "feature": self._names(self._x),
            "class": [str(label) for label in getattr(self, "classes_", ())],
        }
        for node in tree.subtree:  # so that columns and classes are called by their names
            known = {
                dim: list(labels)
                for dim, labels in names.items()
                if node.sizes.get(dim) == len(labels)
            }
            node.dataset = node.to_dataset(inherit=False).assign_coords(known)
        return diagnose(tree)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if state.get("prior") is not None and "posterior_" in state:
            # a prior of TyXe is made of lambdas; what it came to for this net can be pickled
            state["prior"] = state["posterior_"].bnn.__getstate__()["prior"]
        return state


def far_rows(train: np.ndarray, x: np.ndarray, names: Sequence[str]) -> list[Finding]:
    """Rows that lie beyond the training data by more than half the range of a feature."""
    low = train.min(0)
    high = train.max(0)
    beyond = np.maximum(low - x, x - high) > 0.5 * (high - low)
    if not beyond.any():
        return []
    worst = int(beyond.sum(0).argmax())
    ends = {"feature": str(names[worst]), "low": float(low[worst]), "high": float(high[worst])}
    return [Finding("far_rows", {"rows": int(beyond.any(1).sum()), "total": len(x), **ends})]
