"""What the regressor and the classifier share: data in, a model, a fit, and its verdict."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
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
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import seeded
from pyrobnn.core.threads import one_thread, process_state
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.data.columns import Columns, Missing, check_names
from pyrobnn.data.dataset import Task
from pyrobnn.data.table import constant_features
from pyrobnn.estimators.auto import (
    FEW_ROWS,
    FEWEST_ROWS,
    MAX_EVIDENCE_ROWS,
    choose,
    named,
    prior_facts,
)
from pyrobnn.estimators.chains_of_fit import at_posterior
from pyrobnn.estimators.comparison import gain, quiet
from pyrobnn.estimators.empirical_bayes import empirical_bayes, is_exact
from pyrobnn.estimators.features import Offset
from pyrobnn.estimators.fits import Fit, RunOptions, subset, with_net
from pyrobnn.estimators.left_out import left_out, left_out_labels
from pyrobnn.estimators.levels import Levels
from pyrobnn.estimators.selection import count_likelihood, search_rule
from pyrobnn.estimators.wide import lifted
from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.method import METHODS, Method, check_method
from pyrobnn.model import BNN
from pyrobnn.model import architectures as networks
from pyrobnn.model import weight_priors as priors
from pyrobnn.model.compile.forecast import Compile
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.posterior.prediction import Prediction

if TYPE_CHECKING:
    from pyrobnn.diagnostics import Verdict

#: of a fit that passes through every target
_EXACT = (
    "it passes through every target, so the noise is taken to be a ten-thousandth of their standard "
    "deviation and is not inferred"
)
#: inputs (n, feature)
Table: TypeAlias = ArrayLike | pd.DataFrame
#: a net for so many inputs and outputs
NetMaker: TypeAlias = Callable[[int, int], nn.Module]


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The checked rows of a fit, in one order whatever the order of the user's.

    Attributes: ``x`` (N, feature) and ``y`` (N, output) or labels (N,); ``weighted``, whether rows count more than
        once; ``width`` of the likelihood, the number of outputs of the net; ``held_out``, the positions of rows that
        the posterior has not seen.
    """

    x: Tensor
    y: Tensor
    weighted: bool
    width: int = 0
    held_out: Tensor | tuple[()] = ()


@dataclass(frozen=True, eq=False)
class RowFacts:
    """What predictions need of the rows of a fit, and a pickle has of them.

    Attributes: ``low`` and ``high`` (feature,), the ends of each input; ``width``, the number of outputs of the net;
    ``rows`` themselves, None after an unpickling; ``levels``, the effects of columns of many categories.
    """

    low: np.ndarray
    high: np.ndarray
    width: int
    rows: TrainingRows | None
    levels: Levels | None = None

    @classmethod
    def of(cls, rows: TrainingRows, levels: Levels | None = None) -> RowFacts:
        """Of these rows."""
        x = rows.x.numpy()
        return cls(x.min(0), x.max(0), rows.width, rows, levels)


class Estimator(BaseEstimator):
    """A Bayesian neural network with the manners of scikit-learn: the base of the regressor and the classifier.

    A pickle holds no row of the training data: it predicts and exports, ``verdict_`` has to be asked for before.
    """

    task: Task
    _row_facts: RowFacts
    method_reason_: str
    #: whether one number is predicted, and y was (n,)
    _flat = False

    @options_explained
    def __init__(
        self,
        method: str | Method = "auto",
        *,
        hidden: Sequence[int] | None = None,
        activation: str | type[nn.Module] = "tanh",
        net: nn.Module | NetMaker | None = None,
        prior: priors.Prior | None = None,
        likelihood: Likelihood | None = None,
        noise: str | float = "inferred",
        standardize: bool = True,
        missing: str = "refuse",
        num_draws: int | None = None,
        max_seconds: float | None = None,
        compile: Compile = "auto",
        device: str | torch.device | None = None,
        random_state: int | np.random.RandomState | None = None,
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
    def _fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        copies: np.ndarray | None,
        width: int,
    ) -> None:
        """Fit checked rows: x (N, feature), y (N, out) or labels (N,), for ``width`` outputs."""
        self.__dict__.pop("verdict_", None)
        warn(constant_features(x, self._names(x)))
        rows = _in_order(x, y, copies)
        seed = self._seed()
        levels = self._effects(rows, seed)
        if levels is not None:
            rows = replace(rows, x=torch.from_numpy(levels.drawn(rows.x.numpy())))
        model = self._model(rows, width, seed)
        rows = replace(rows, width=model.likelihood.width(width))
        fit = self._chosen_fit(model, rows, seed)
        self._row_facts = RowFacts.of(replace(rows, held_out=fit.held_out), levels)
        self.posterior_ = fit.posterior
        self.method_ = fit.method
        self.method_reason_ = fit.reason
        if self.verbose:
            print(f"{type(self).__name__}: {self.method_reason_}", flush=True)  # noqa: T201 (what verbose is for)

    def _effects_on(self, y: np.ndarray) -> dict[str, np.ndarray]:
        """What the levels of a column have an effect on, name → numbers (N,), of targets as they are fitted."""
        raise NotImplementedError

    def _effects(self, rows: TrainingRows, seed: int) -> Levels | None:
        """Those of the categories of columns that are pooled; None where there is none."""
        if self.columns_ is None or not self.columns_.pooled:
            return None
        targets = self._effects_on(rows.y.numpy())
        sizes = {place: len(names) for place, names in self.columns_.pooled.items()}
        return Levels.fit(sizes, rows.x.numpy(), targets, seed)

    def _chosen_fit(self, model: BNN, rows: TrainingRows, seed: int) -> Fit:
        """The fit of a model, or of what is found in its place where all is left open."""
        if self.max_seconds is not None:
            check_number(
                "max_seconds",
                self.max_seconds,
                above=0,
            )
        labels = self.task == "classification"
        is_open = self._is_open(model, rows)
        if is_open and labels and not self.max_seconds:
            return self._fit_labels(model, rows, seed)
        if is_open and not labels:
            return self._fit_open(model, rows, seed)
        if self.max_seconds is not None and labels:
            raise ValueError(
                "'max_seconds' is spent by BNNRegressor, which has members to add; BNNClassifier compares a few fits "
                "and ends by itself: leave it out"
            )
        if self.max_seconds is not None:
            raise ValueError(
                "'max_seconds' is spent by method='auto' of one target where net, hidden, prior, likelihood and noise "
                "are left open: leave it out"
            )
        return self._infer(model, rows, seed)

    def _model(self, rows: TrainingRows, width: int, seed: int) -> BNN:
        """The model of the training rows, for ``width`` outputs."""
        units = None
        if self.standardize:
            units = Standardizer.fit(Dataset(rows.x, rows.y, "train", self.task))
        likelihood = self.likelihood
        if likelihood is None:
            likelihood = self._default_likelihood(units, width)
        exposure = likelihood.targets.exposure is not None
        if exposure and self.columns_ is not None:
            raise ValueError(
                "'exposure' names a column of numbers, but 'X' is a table whose columns are encoded: encode it first"
            )
        net = self._net(rows.x.shape[1] - exposure, likelihood.width(width), seed)
        prior = priors.FanInNormal() if self.prior is None else self.prior
        return BNN(net, prior, likelihood, standardizer=units)

    def _is_open(self, model: BNN, rows: TrainingRows) -> bool:
        """Whether what is fitted is left to ``method="auto"``."""
        choices = (self.hidden, self.net, self.prior, self.likelihood)
        auto = isinstance(self.method, str) and self.method == "auto" and not rows.weighted
        known = self.task == "classification" or (rows.width == 1 and self.noise == "inferred")
        return auto and known and model.standardizer is not None and choices == (None,) * 4

    @one_thread()
    def _fit_open(self, model: BNN, rows: TrainingRows, seed: int) -> Fit:
        """The fit where nothing but the data is given: a linear model, unless a net gains on it."""
        num = len(rows.x)
        why = ""
        ensemble_tried = num > (FEW_ROWS if self.max_seconds is not None else MAX_EVIDENCE_ROWS)
        if ensemble_tried:
            ensemble, why = self._fit_ensemble(model, rows, seed)
            if ensemble is not None:
                return ensemble
        linear_net = networks.mlp(rows.x.shape[1], (), 1, seed=seed).double()
        # after a failed ensemble counts are log-linear
        count_net = linear_net if ensemble_tried else model.net
        of_counts = self._fit_counts(model, count_net, rows, seed)
        if of_counts is not None:
            return of_counts
        if num < FEWEST_ROWS:
            return self._infer(model, rows, seed)
        if num <= MAX_EVIDENCE_ROWS:
            net, gained, why = self._fit_nets(model, rows, seed)
            if gained:
                fit = at_posterior(net.because(why), model, self.num_draws, seed)
                if fit is not None:
                    return fit
                exact = is_exact(net.posterior, rows.x, rows.y)
                if num <= FEW_ROWS and not exact:
                    return self._infer(model, rows, seed)
                warn(net.posterior.meta["warnings"])
                net = net.because(why)
                return net.because(_EXACT) if exact else net
        linear = with_net(model, linear_net)
        fit = self._infer(linear, rows, seed, few_rows=0).instead_of_a_net(f"{why}; ")
        if num > FEW_ROWS:
            return fit
        sampled = at_posterior(fit, model, self.num_draws, seed)
        if sampled is None and is_exact(fit.posterior, rows.x, rows.y):
            return fit.because(_EXACT)
        if sampled is None:
            sampled = self._infer(linear, rows, seed).instead_of_a_net(f"{why}; ")
        return sampled

    def _fit_ensemble(self, model: BNN, rows: TrainingRows, seed: int) -> tuple[Fit | None, str]:
        """The fit of an ensemble, None where it gains nothing on a linear model; and by how much in words."""
        data = (rows.x, rows.y)
        units = cast(Standardizer, model.standardizer)
        seconds = self.max_seconds
        begun = time.perf_counter()
        rule, why = search_rule(data, units, seconds, seed, self.device)
        if rule is None:
            return None, why
        if seconds is not None:
            seconds -= time.perf_counter() - begun
        fit = rule.fit(data, units, seconds, self.num_draws, self.compile, self._run_options(seed))
        reason = f"{len(rows.x):,} rows: {fit.reason}; {why}"
        return replace(fit, reason=reason), why

    def _run_options(self, seed: int) -> RunOptions:
        """The options of every fit."""
        return RunOptions(
            seed=seed,
            device=self.device,
            progress=bool(self.verbose),
        )

    def _fit_nets(self, model: BNN, rows: TrainingRows, seed: int) -> tuple[Fit, bool, str]:
        """The better of a net and a net of more features, whether it gains on a linear model, and by how much."""
        data = (rows.x, rows.y)
        models = [model, lifted(model, rows.x, seed)]
        fits = [
            self._quiet_fit(
                candidate,
                rows,
                seed,
                few_rows=0,
            )
            for candidate in models
        ]
        scores = [left_out(fit.posterior, *data) for fit in fits]
        best = gain(scores[1][0], scores[0][0])[0]  # without a gain the plainer net
        return fits[best], *gain(*scores[best])

    @one_thread()
    def _fit_labels(self, model: BNN, rows: TrainingRows, seed: int) -> Fit:
        """The fit of classes where nothing but the data is given: a linear model, unless a net gains on it."""
        if len(rows.x) <= FEW_ROWS:
            return self._infer(model, rows, seed)
        linear_net = networks.mlp(rows.x.shape[1], (), rows.width, seed=seed).double()
        models = (with_net(model, linear_net), model)
        fits = [self._quiet_fit(candidate, rows, seed) for candidate in models]
        tried = subset(rows.x, rows.y)
        scores = [left_out_labels(fit.posterior, *tried) for fit in fits]
        gained, why = gain(scores[1], scores[0])
        fit = fits[gained].because(why)
        warn(fit.posterior.meta["warnings"])
        return fit if gained else fit.instead_of_a_net()

    def _fit_counts(
        self,
        model: BNN,
        net: nn.Module,
        rows: TrainingRows,
        seed: int,
    ) -> Fit | None:
        """The fit of counts, None where the targets are rather normal or the search ends at no mode."""
        x = cast(Standardizer, model.standardizer).transform_x(rows.x).numpy()
        likelihood, words = count_likelihood(x, rows.y.numpy())
        if likelihood is None:
            return None
        net = nn.Sequential(*cast(nn.Sequential, net), Offset(rows.y))
        of_counts = with_net(model, net, likelihood)
        fit = self._quiet_fit(of_counts, rows, seed)
        meta = fit.posterior.meta
        # within a posterior sd of each weight
        if not meta.get("newton_distance", 0.0) ** 2 < model.num_weights:
            return None
        warn(meta["warnings"])
        return fit.because(words)

    def _quiet_fit(
        self,
        model: BNN,
        rows: TrainingRows,
        seed: int,
        few_rows: int = FEW_ROWS,
    ) -> Fit:
        """A fit that is tried: its warnings follow where it is taken."""
        with quiet():
            return self._infer(model, rows, seed, few_rows)

    def _infer(
        self,
        model: BNN,
        rows: TrainingRows,
        seed: int,
        few_rows: int = FEW_ROWS,
    ) -> Fit:
        """The posterior of a model by the method that is given or chosen: NUTS of at most ``few_rows``."""
        method, reason, num_draws = self._method(model, len(rows.x), few_rows)
        options = self._run_options(seed)
        if num_draws is not None:
            options["num_draws"] = num_draws
        auto = isinstance(self.method, str) and self.method == "auto"
        by_evidence = empirical_bayes(method, model, rows.x, rows.y) if auto else None
        if by_evidence is None:
            return Fit(method.fit(model, rows.x, rows.y, **options), method, reason)
        posterior, words = by_evidence(method, model, rows.x, rows.y, options)
        return Fit(posterior, method, reason).because(words)

    def _validated(self, X: Table, y: ArrayLike, **options: bool) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, feature), float64, and targets, by ``validate_data``'s options; other columns are encoded."""
        check_choice("missing", self.missing, ("refuse", "impute"))
        self.columns_: Columns | None = None
        table: pd.DataFrame | None = X if isinstance(X, pd.DataFrame) else None
        if table is not None:
            check_names("X", list(table.columns.map(str)))
        if table is not None and self.missing == "refuse":
            numbers = table.select_dtypes(["number", "bool"], "timedelta")
            table = table if numbers.shape[1] < table.shape[1] else None
        checks = {
            **options,
            "dtype": np.float64,
            "ensure_min_samples": 2,
        }
        if table is None:
            return cast(tuple[np.ndarray, np.ndarray], validate_data(self, X, y, **checks))
        columns = Columns.fit(
            table,
            cast(Missing, self.missing),
            "X",
            pool=True,
        )
        encoded = columns.transform(table, "X")[0]
        x, targets = validate_data(self, encoded, y, **checks)
        _check_feature_names(self, table, reset=True)
        self.n_features_in_ = table.shape[1]
        self.columns_ = columns
        return x, targets

    def _names(self, x: np.ndarray | Tensor, levels: Levels | None = None) -> Sequence[str]:
        """Of the inputs x (n, input), where ``levels`` have their effects among them."""
        if self.columns_ is not None:
            inputs = self.columns_.inputs
            return inputs if levels is None else levels.names(inputs)
        names = getattr(self, "feature_names_in_", None)
        return [f"x{index}" for index in range(x.shape[1])] if names is None else names

    def _seed(self) -> int:
        """A whole number is the seed itself; a generator, or NumPy's global one for None, draws it."""
        if isinstance(self.random_state, Integral):
            return check_count(
                "random_state",
                self.random_state,
                minimum=0,
            )
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _copies(self, x: np.ndarray, sample_weight: ArrayLike | None) -> np.ndarray | None:
        """How often each row counts (n,)."""
        if sample_weight is None:
            return None
        weights = _check_sample_weight(
            sample_weight,
            x,
            dtype=np.float64,
            ensure_non_negative=True,
        )
        if (weights != np.round(weights)).any():
            raise Refused("'sample_weight' must be whole numbers: each row counts that many times")
        return cast(np.ndarray, weights.astype(np.int64))

    def _net(self, num_inputs: int, width: int, seed: int) -> nn.Module:
        if self.net is None:
            hidden = (50,) if self.hidden is None else self.hidden
            net = networks.mlp(
                num_inputs,
                hidden,
                width,
                activation=self.activation,
                seed=seed,
            )
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
            return self.net(num_inputs, width)

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

    def _method(
        self,
        model: BNN,
        num: int,
        few_rows: int,
    ) -> tuple[Method, str, int | None]:
        """The method for so many rows, why it, and the number of draws, None for the method's own."""
        if not isinstance(self.method, str):
            check_method(self.method, instead="'auto', the name of a method or ")
            return self.method, f"{type(self.method).__name__}, as it was given", self.num_draws
        check_choice("method", self.method, tuple(METHODS))
        facts = prior_facts(model)
        width = model.likelihood.width(1)
        if self.method == "auto":
            is_linear = isinstance(model.net, nn.Sequential) and len(model.net) == 1
            chosen, why = choose(
                num,
                model.num_weights,
                width,
                **facts,
                few_rows=few_rows,
                compile=self.compile,
            )
            if is_linear and isinstance(chosen, Laplace):
                chosen = replace(chosen, map=replace(chosen.search, num_steps=200, lr=0.05))
            return chosen, why, self.num_draws
        method, why, num_draws = named(
            self.method,
            normal=facts["normal"],
            compile=self.compile,
        )
        return method, why, num_draws if self.num_draws is None else self.num_draws

    def _inputs(self, X: Table) -> Tensor:
        check_is_fitted(self)
        if self.columns_ is None:
            return torch.tensor(
                validate_data(
                    self,
                    X,
                    reset=False,
                    dtype=np.float64,
                )
            )
        check_type("X", X, pd.DataFrame, "a DataFrame as it was in the fit")
        _check_feature_names(self, X, reset=False)
        return torch.tensor(self.columns_.transform(X, "X")[0])

    def _predict(self, X: Table, *parts: Callable[[Prediction], Tensor]) -> list[np.ndarray]:
        """Parts of the prediction, each with the rows first; computed block by block."""
        x = self._inputs(X)
        posterior = self.posterior_
        facts = self._row_facts
        levels = facts.levels
        likely = x.numpy() if levels is None else levels.likely(x.numpy())
        warn(far_rows(facts, likely, self._names(x, levels)))
        # scalars that a prediction holds at once: 128 MiB of float64
        size = max(1, 2**24 // (posterior.num_chains * posterior.num_draws * facts.width))
        blocks: list[list[Tensor]] = [[] for _ in parts]
        for rows in x.split(size):
            if levels is None:
                prediction = posterior.predict(rows)
            else:
                prediction = levels.predict(posterior, rows.numpy())
            for values, read in zip(blocks, parts):
                values.append(read(prediction).detach().cpu())
        return [torch.cat(values).numpy() for values in blocks]

    def sample_functions(self, X: Table, num_draws: int | None = None) -> np.ndarray:
        """Functions drawn from the posterior at ``X``, each coherent over its points and without noise.

        Args:
            X: inputs (n, feature).
            num_draws: how many of the draws, evenly spaced over all chains; default all.

        Returns:
            (draw, n) or (draw, n, output); of classes their probabilities (draw, n, class).
        """
        check_is_fitted(self)
        if num_draws is not None:
            check_count("num_draws", num_draws)

        def functions(p: Prediction) -> Tensor:
            f = p.likelihood.probs(p.f, p.params) if self.task == "classification" else p.f
            f = f.flatten(0, 1)
            count = len(f) if num_draws is None else min(num_draws, len(f))
            keep = evenly_spaced(len(f), count, torch.float64)
            return f[keep.to(f.device)].movedim(0, 1)

        draws = np.moveaxis(self._predict(X, functions)[0], 0, 1)
        return draws[..., 0] if self._flat else draws

    def export(
        self,
        path: str | Path,
        *,
        num_draws: int | None = None,
        quantiles: Sequence[float] = (0.025, 0.5, 0.975),
    ) -> Path:
        """Write the predictions of the posterior as one file that torch alone, or ONNX Runtime, reads.

        See :meth:`pyrobnn.Posterior.export`. ``verdict_`` is in the file (after an unpickling, where it had been asked
        for before), and the names of inputs and classes. Its inputs are numbers: of a DataFrame with text or dates
        those that its columns are encoded to (``inputs`` names them), of a column of many categories the effect of the
        row's (``effects`` has mean and sd of each). Outputs are (n, output), also of targets (n,).

        Raises:
            ValueError: an argument, by name. ImportError: ONNX is not installed.
        """
        check_is_fitted(self)
        facts = self._row_facts
        rows = facts.rows
        inputs = self._names(facts.low[None], facts.levels)
        about: dict[str, Any] = {"inputs": [str(name) for name in inputs]}
        if facts.levels is not None and self.columns_ is not None:
            about["effects"] = facts.levels.described(self.columns_.inputs, self.columns_.pooled)
        if hasattr(self, "classes_"):
            about["classes"] = [str(label) for label in self.classes_]
        return self.posterior_.export(
            path,
            num_draws=num_draws,
            quantiles=quantiles,
            x=None if rows is None else rows.x,
            verdict=self.verdict_ if rows is not None else self.__dict__.get("verdict_"),
            about=about,
        )

    @cached_property
    def verdict_(self) -> Verdict:
        """The verdict on the fit, by its training data and rows that were held out; computed when first asked for.

        A pickle has it where it had been asked for before.

        Raises:
            Refused: after an unpickling, the training rows are not there.
        """
        from pyrobnn.diagnostics import diagnose

        check_is_fitted(self)
        rows = self._row_facts.rows
        if rows is None:
            raise Refused(
                "a pickle holds no row of the training data, so this fit cannot be judged any more: ask for verdict_ "
                "before pickling (the pickle then has it), or call posterior_.diagnose(x, y) with the rows of the fit"
            )
        is_test = np.isin(np.arange(len(rows.x)), rows.held_out)
        x = rows.x[~is_test]
        # of rows that are counted more than once none can be left out
        y = None if rows.weighted else rows.y[~is_test]
        test = (rows.x[is_test], rows.y[is_test]) if is_test.any() else None
        tree = self.posterior_.to_datatree(x, y, test=test)
        names = {
            "feature": self._names(rows.x, self._row_facts.levels),
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
        """All but the training rows."""
        state = dict(super().__getstate__())
        if "_row_facts" in state:
            state["_row_facts"] = replace(state["_row_facts"], rows=None)
        if state.get("prior") is not None and "posterior_" in state:
            # a prior of TyXe is made of lambdas; what it came to for this net can be pickled
            state["prior"] = state["posterior_"].bnn.__getstate__()["prior"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The state of a pickle; earlier versions had the training rows in it, or in five attributes."""
        state = dict(state)
        if "_x" in state:
            width = state.pop("_width")
            x = state.pop("_x")
            y = state.pop("_y")
            weighted = state.pop("_weighted")
            held_out = state.pop("_held", ())
            state["_rows"] = TrainingRows(x, y, weighted, width, held_out)
        if "_rows" in state:
            state["_row_facts"] = RowFacts.of(state.pop("_rows"))
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Estimator:
        """With its training rows, which a pickle does not have."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Estimator:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied


def _in_order(x: np.ndarray, y: np.ndarray, copies: np.ndarray | None) -> TrainingRows:
    """Rows in an order of their own, so that data in another order give the same numbers."""
    if copies is not None:
        x = np.repeat(x, copies, 0)
        y = np.repeat(y, copies, 0)
    order = np.lexsort(np.column_stack([x, y]).T)
    inputs = torch.from_numpy(np.ascontiguousarray(x[order]))
    targets = torch.from_numpy(np.ascontiguousarray(y[order]))
    return TrainingRows(inputs, targets, copies is not None)


def far_rows(facts: RowFacts, x: np.ndarray, names: Sequence[str]) -> list[Finding]:
    """Rows that lie beyond the training data by more than half the range of a feature."""
    low = facts.low
    high = facts.high
    beyond = np.maximum(low - x, x - high) > 0.5 * (high - low)
    if not beyond.any():
        return []
    worst = int(beyond.sum(0).argmax())
    ends = {
        "feature": str(names[worst]),
        "low": float(low[worst]),
        "high": float(high[worst]),
    }
    return [
        Finding(
            "far_rows",
            {
                "rows": int(beyond.any(1).sum()),
                "total": len(x),
                **ends,
            },
        )
    ]
