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

from pyrobnn import networks, priors
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
from pyrobnn.inference.method import METHODS, check_method
from pyrobnn.likelihoods import Likelihood
from pyrobnn.model import BNN
from pyrobnn.posterior.prediction import Prediction


class Estimator(BaseEstimator):
    """A Bayesian neural network with the manners of scikit-learn: the base of the regressor and the classifier."""

    task: Task
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
        self._x, self._y = (torch.from_numpy(np.ascontiguousarray(part[order])) for part in (x, y))
        seed = self._seed()
        units = (
            Standardizer.fit(Dataset(self._x, self._y, "train", self.task))
            if self.standardize
            else None
        )
        likelihood: Likelihood = (
            self._default_likelihood(units, width) if self.likelihood is None else self.likelihood
        )
        exposure = likelihood.targets.exposure is not None
        if exposure and self.columns_ is not None:
            raise ValueError(
                "'exposure' names a column of numbers, but 'X' is a table whose columns are encoded: encode it first"
            )
        self._width = likelihood.width(width)
        net = self._net(x.shape[1] - exposure, self._width, seed)
        prior = priors.FanInNormal() if self.prior is None else self.prior
        model = BNN(net, prior, likelihood, standardizer=units)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, above=0)
        labels = self.task == "classification"
        if self._is_open(model) and not (labels and self.max_seconds):
            (self._fit_labels if labels else self._fit_open)(model, seed)
        elif self.max_seconds is not None:
            raise ValueError(
                "'max_seconds' is spent by method='auto' of one target where net, hidden, prior, likelihood and noise "
                "are left open: leave it out"
            )
        else:
            self._infer(model, seed)
        if self.verbose:
            print(f"{type(self).__name__}: {self.method_reason_}", flush=True)  # noqa: T201 (what verbose is for)

    def _is_open(self, model: BNN) -> bool:
        """Whether what is fitted is left to ``method="auto"``."""
        given = (self.hidden, self.net, self.prior, self.likelihood)
        auto = isinstance(self.method, str) and self.method == "auto" and not self._weighted
        known = self.task == "classification" or (self._width == 1 and self.noise == "inferred")
        return auto and known and model.standardizer is not None and given == (None,) * 4

    @one_thread()
    def _fit_open(self, model: BNN, seed: int) -> None:
        """The fit where nothing but the data is given: a linear model, unless a net gains on it."""
        data = (self._x, self._y)
        units = cast(Standardizer, model.standardizer)
        num = len(self._x)
        seconds = self.max_seconds
        begun = time.perf_counter()
        why = ""
        if num > (FEW_ROWS if seconds is not None else MAX_EVIDENCE_ROWS):
            rule, why = search(data, units, seconds, seed, self.device)
            if rule is not None:
                left = None if seconds is None else seconds - (time.perf_counter() - begun)
                run = {"seed": seed, "device": self.device, "progress": bool(self.verbose)}
                fit: Any = rule.fit(data, units, left, self.num_draws, self.compile, **run)
                self.posterior_, self.method_, words, self._held = fit
                self.method_reason_ = f"{num:,} rows: {words}; {why}"
                return
        line = networks.mlp(self._x.shape[1], (), 1, seed=seed).double()
        if self._fit_counts(model, line if why else model.net, seed):
            return
        if num <= FEW_ROWS:
            return self._infer(model, seed)
        if num <= MAX_WHOLE_ROWS:
            found = [self._tried(each, seed) for each in (model, lifted(model, *data, seed))]
            scores = [left_out(each["posterior_"], *data) for each in found]
            best = gain(scores[1][0], scores[0][0])[0]  # without a gain the plainer net
            self.__dict__.update(found[best])
            gained, why = gain(*scores[best])
            if gained:
                warn(self.posterior_.meta["warnings"])
                self.method_reason_ += f"; {why}"
                return
        self._infer(BNN(line, model.prior, model.likelihood, standardizer=units), seed)
        self.method_reason_ = (
            f"a linear model predicts these rows as well: {why}; {self.method_reason_}"
        )

    @one_thread()
    def _fit_labels(self, model: BNN, seed: int) -> None:
        """The fit of classes where nothing but the data is given: a linear model, unless a net gains on it."""
        if len(self._x) <= FEW_ROWS:
            return self._infer(model, seed)
        line = networks.mlp(self._x.shape[1], (), self._width, seed=seed).double()
        models = BNN(line, model.prior, model.likelihood, standardizer=model.standardizer), model
        found = [self._tried(each, seed) for each in models]
        scores = [left_out_labels(each["posterior_"], *subset(self._x, self._y)) for each in found]
        gained, why = gain(scores[1], scores[0])
        self.__dict__.update(found[gained])
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
        found = (
            meta.get("newton_distance", 0.0) ** 2 < model.num_weights
        )  # within a posterior sd of each weight
        if found:
            warn(meta["warnings"])
        return bool(found)

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
        given = (
            getattr(self, "feature_names_in_", None)
            if self.columns_ is None
            else self.columns_.inputs
        )
        return [f"x{index}" for index in range(x.shape[1])] if given is None else given

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
            # in what scikit-learn computes in
            return networks.mlp(
                num_inputs, hidden, width, activation=self.activation, seed=seed
            ).double()
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
        given = self.likelihood
        if given is None:
            return
        classes = self.task == "classification"
        known = isinstance(given, Likelihood)
        if not known or (given.targets.kind != "label" if classes else given.targets.classes):
            raise TypeError(
                f"'likelihood' must be one of pyrobnn.likelihoods for {self.task}, got {given!r}"
            )

    def _default_likelihood(self, units: Standardizer | None, width: int) -> Likelihood:
        raise NotImplementedError

    def _method(self, model: BNN, width: int) -> tuple[Any, str, dict[str, Any]]:
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
            chosen, why = choose(
                num,
                model.num_weights,
                width,
                **facts,
                compile=not line and (self.compile or "trace"),
            )
            if line and isinstance(chosen, Laplace):
                chosen = replace(chosen, map=replace(chosen.search, num_steps=200, lr=0.05))
            return chosen, why, options
        method, why, own = named(self.method, normal=facts["normal"], compile=self.compile)
        return method, why, own | options

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
        found: list[list[Tensor]] = [[] for _ in parts]
        for rows in x.split(size):
            prediction = posterior.predict(rows)
            for values, part in zip(found, parts):
                values.append(part(prediction).detach().cpu())
        return [torch.cat(values).numpy() for values in found]

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

        found = np.moveaxis(self._predict(X, functions)[0], 0, 1)
        return found[..., 0] if self._flat else found

    @cached_property
    def verdict_(self) -> Verdict:
        """The verdict on the fit, by its training data and rows that were held out; computed when first asked for."""
        from pyrobnn.diagnostics import diagnose

        check_is_fitted(self)
        held = np.isin(np.arange(len(self._x)), self._held)
        (x, y), test = ((self._x[rows], self._y[rows]) for rows in (~held, held))
        # of rows that are counted more than once none can be left out
        tree = self.posterior_.to_datatree(
            x, None if self._weighted else y, test=test if held.any() else None
        )
        names = {
            "feature": self._names(self._x),
            "class": [str(each) for each in getattr(self, "classes_", ())],
        }
        for part in tree.subtree:  # so that columns and classes are called by their names
            known = {
                dim: list(each) for dim, each in names.items() if part.sizes.get(dim) == len(each)
            }
            part.dataset = part.to_dataset(inherit=False).assign_coords(known)
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
