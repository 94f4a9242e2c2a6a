"""What every method returns: draws of the parameters, and all that is asked of them."""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyrobnn.core.checks import (
    Refused,
    as_tensor,
    check_count,
    check_finite,
    check_number,
    check_type,
)
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.seeding import kept
from pyrobnn.core.threads import process_state
from pyrobnn.model import BNN, NET
from pyrobnn.model.density import Program
from pyrobnn.model.gradient import at_each
from pyrobnn.model.several_inputs import SeveralInputs, as_rows, batches_as_rows
from pyrobnn.posterior.approximation import (
    CHANGES,
    Approximation,
    SampleStats,
    is_same_in_all_draws,
    is_stored_once,
)
from pyrobnn.posterior.head import Split, split
from pyrobnn.posterior.prediction import CHUNK_SCALARS, LARGE_LAYER, Prediction, widest_layer
from pyrobnn.posterior.ranges import InputRange, in_order
from pyrobnn.posterior.rows import Rows

if TYPE_CHECKING:
    from xarray import DataTree

    from pyrobnn.diagnostics import Verdict
    from pyrobnn.posterior.local_rows import LocalDraws
    from pyrobnn.posterior.streaming import Inputs


@dataclass(frozen=True, eq=False)
class Posterior:
    """Posterior draws of a model, whatever method made them.

    Threads may predict by one posterior at once. Pyro has one stack of handlers for all threads: what runs a program of
    yours, ``pyro.infer.Predictive`` with the ``guide`` too, belongs in one thread at a time.

    Attributes:
        model: the :class:`pyrobnn.BNN` or the plain Pyro program.
        draws: site → (chain, draw, \\*shape), constrained; point parameters are included, constant over draws, and the
            ``pyro.deterministic`` sites of a plain program.
        sample_stats: statistic → (chain, draw); for NUTS lp, energy, diverging, tree_depth, n_steps,
            acceptance_rate, step_size; for SVI, Laplace and SWAG log_p and log_q, computed when a statistic is first
            asked for (by ``to_datatree`` or ``save``, say): a pass over the data per draw.
        log_evidence: Laplace: log marginal likelihood; SMC: its estimate, with ``meta["log_evidence_error"]``; SVI: the
            ELBO; else None. In nats, of the targets in the units of the program: with a standardizer, subtract
            N log(y_scale) for that of the targets as they came.
        approximation: q of SVI, Laplace and SWAG, else None.
        network: (params, x) → f where it isn't the model's own ``forward`` (linearised Laplace).
        moments: x → exact (mean, variance) of f where the method has them in closed form.
        history: scalar tracked during the fit → (step,).
        meta: method and what it says of its draws (kind, claim, remedy, iid), settings, seed, num_data, timings (s),
            temperature, point_sites and deterministic_sites (constant and computed ones), axes, data_given,
            input_shape, input_range (least and largest inputs), input_names (of a data frame), program_dtypes, float64,
            warnings, versions: JSON-able.
        rows: the data of the fit, by reference, for :meth:`refine`, :meth:`update` and :meth:`remove`: tensors that are
            changed in place after the fit are other data; ``save(path, rows=True)`` writes them along.
    """

    model: BNN | Program
    draws: dict[str, Tensor]
    sample_stats: MutableMapping[str, Tensor] = field(default_factory=dict)
    log_evidence: float | None = None
    approximation: Approximation | None = None
    network: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    history: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    rows: Rows | None = field(default=None, repr=False)

    @property
    def bnn(self) -> BNN:
        """The model, which is a BNN; TypeError of a plain Pyro program."""
        words = "a pyrobnn.BNN (a program predicts by pyro.infer.Predictive(program, posterior.stacked()))"
        return cast(BNN, check_type("model", self.model, BNN, words))

    @property
    def num_chains(self) -> int:
        """Number of chains (1 for independent draws)."""
        return next(iter(self.draws.values())).shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return next(iter(self.draws.values())).shape[1]

    @property
    def guide(self) -> Callable[..., Any] | None:
        """SVI, Laplace, SWAG: a Pyro guide over the model's sites, as ``pyro.infer.Predictive`` takes it; else None.

        A BNN replayed against it has the fitted point parameters, and nothing enters Pyro's param store by it. It lives
        in standard units where it has a standardizer::

            program = pyro.infer.Predictive(model, guide=posterior.guide, num_samples=1000)
            y = model.standardizer.inverse_mean(program(model.standard_inputs(x))["likelihood.data"])

        A plain program reads ``pyro.param`` from the store alone: there the guide states the fitted values by
        ``pyro.param``, and refuses where the store holds others; ``with pyro.get_param_store().scope():`` around both
        keeps the store as it was.

        Caveat: Pyro runs the net itself. ``predict`` of a linearised Laplace posterior takes the net's linear part: the
        draws of the weights agree, the predictions don't.
        """
        return None if self.approximation is None else self.approximation.guide

    def log_q(self, draws: Mapping[str, Tensor] | None = None) -> Tensor:
        """Log density of the approximation at ``draws`` (default: these draws), constrained space; (chain, draw).

        Raises:
            ValueError: the method has no approximation (NUTS, ensembles, MC dropout).
        """
        if self.approximation is None:
            raise ValueError(
                f"{self.meta.get('method', 'this method')} has no approximate density q: "
                "log_q exists where the method has fitted one (posterior.approximation is not None)"
            )
        return self.approximation.log_prob(self.draws if draws is None else draws)

    def stacked(self) -> dict[str, Tensor]:
        """Draws with chains joined, site → (chain·draw, \\*shape), as ``pyro.infer.Predictive`` takes them.

        A BNN takes its point parameters and batch statistics from them too. A plain program reads ``pyro.param`` from
        Pyro's store: hand it those with ``pyro.poutine.substitute(program, data=...)``. Its ``pyro.deterministic``
        sites are not among them: Pyro computes them again, also for other data. Draws that are finer than the program's
        own tensors (``meta["float64"]``) are rounded to the type of those, beside which Pyro runs it; ``draws`` has
        every digit.
        """
        computed = self.meta.get("deterministic_sites", ())
        dtypes = self.meta.get("program_dtypes", {})
        stacked = {}
        for name, value in self.draws.items():
            if name not in computed:
                joined = value.flatten(0, 1)
                stacked[name] = (
                    joined.to(getattr(torch, dtypes[name])) if name in dtypes else joined
                )
        return stacked

    def thin(self, num_draws: int) -> Posterior:
        """This posterior with at most ``num_draws`` evenly spaced draws of each chain."""
        check_count("num_draws", num_draws)
        if num_draws >= self.num_draws:
            return self
        keep = evenly_spaced(self.num_draws, num_draws)

        def thinned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: value[:, :num_draws]
                if is_stored_once(value)
                else value[:, keep.to(value.device)]
                for name, value in values.items()
            }

        is_dear = isinstance(self.sample_stats, SampleStats) and self.sample_stats.is_dear
        stats = SampleStats({}, lambda: thinned(self.sample_stats), is_dear=is_dear)
        return replace(
            self,
            draws=thinned(self.draws),
            sample_stats=stats,
        )

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs in the units and the type of the program, checked; gradients flow through."""
        x = as_rows(self.bnn.net, x)
        checked = as_tensor("x", x)
        x = x if isinstance(x, Tensor) else checked
        if x.dim() == 0 or len(x) == 0:
            raise ValueError(f"'x' is empty, shape {tuple(x.shape)}: pass at least one point")
        check_finite("x", checked)
        # another width would fail deep in the net, or be broadcast by the standardizer
        shape = self.meta.get("input_shape", x.shape[1:])
        table = x.is_floating_point() and len(shape) == 1  # images and words may vary in size
        if x.dim() != len(shape) + 1 or (table and x.shape[1] != shape[0]):
            raise ValueError(
                f"'x' has shape {tuple(x.shape)}, but the model was fitted to {self._inputs_said(shape)}"
            )
        device = next(iter(self.draws.values())).device
        return self.bnn.cast_inputs(self.bnn.standard_inputs(x.to(device)))

    def _inputs_said(self, shape: Sequence[int]) -> str:
        """What it was fitted to, rows of a shape, in the words of its user."""
        net = self.bnn.net
        if not isinstance(net, SeveralInputs):
            return f"({', '.join(['points', *map(str, shape)])})"
        container = "tuple" if net.layout.names is None else "dictionary"
        return f"the inputs {net.layout.described}: pass them as a {container}"

    @options_explained
    def predict(self, x: Tensor, *, num_draws: int | None = None) -> Prediction:
        """The predictive distribution at inputs ``x``, computed in chunks that bound the memory.

        Args:
            x: inputs (point, …) in the units of the data.
            num_draws: use only this many draws of each chain (evenly spaced).

        Raises:
            TypeError: the posterior belongs to a plain Pyro program, which has no network output.
            ValueError: empty or non-finite ``x``.
        """
        posterior = self if num_draws is None else self.thin(num_draws)
        if isinstance(x, DataLoader):
            raise TypeError(
                "'x' must be a tensor or a numeric array, got a DataLoader: predict its batches one after another, or "
                "write them to a file by predict_to(path, loader)"
            )
        x = as_rows(self.bnn.net, self._in_order(x))
        y_mean, y_scale = self.bnn.units or (0.0, 1.0)
        with self._taking(x):
            # images may have another size than those of the fit
            has_positions = "output_shape" in self.meta
            output_shape = self.bnn.output_shape(self.inputs(x[:2])) if has_positions else ()
            linear = self.moments is not None and self.bnn.likelihood.targets.linear_mean
            return Prediction(
                posterior.standard_function(x),
                self.bnn.likelihood,
                posterior.draws,
                moments=cast(Any, self.moments)(self.inputs(x)) if linear else None,
                y_mean=y_mean,
                y_scale=y_scale,
                output_shape=output_shape,
            )

    def _in_order(self, x: Any) -> Any:
        """A data frame with its columns as the fit had them; anything else as it is."""
        return in_order(x, self.meta.get("input_names"))

    @contextmanager
    def _taking(self, x: Tensor) -> Iterator[None]:
        """Inside, an error of torch's because the net cannot take ``x`` is a ValueError that says so."""
        try:
            yield
        except Refused:
            raise
        except (RuntimeError, IndexError) as error:
            inputs = self.inputs(x)
            if self.bnn.runs(inputs):
                raise
            shape = self.meta.get("input_shape", inputs.shape[1:])
            raise ValueError(
                f"{self.bnn.why_not_taken(inputs, error)}. It was fitted to {self._inputs_said(shape)}"
            ) from error

    def predict_to(
        self,
        path: str | Path,
        x: Inputs,
        *,
        num_draws: int | None = None,
        quantiles: Sequence[float] = (0.025, 0.5, 0.975),
    ) -> Path:
        """Predict many rows, block by block, to a Parquet file or a Zarr group; memory does not grow with the rows.

        The columns, in the units of the data: of numbers ``mean``, ``aleatoric_sd``, ``epistemic_sd``, ``sd`` and
        quantiles ``q0.025``, … (with ``_0``, ``_1``, … where there are several outputs); of classes ``p_0``, ``p_1``, …
        (of one truth value ``p``, of labels of positions ``p_position_class``), ``aleatoric_entropy`` and
        ``epistemic_entropy`` in nats.

        Args:
            path: ends in ``.parquet`` (replaced where it exists) or ``.zarr`` (a new folder). Nothing stands there
                before all rows are written.
            x: inputs (point, …) in the units of the data; or a loader, or any iterable, of batches x or (x, y), which
                are gathered to blocks.
            num_draws: use only this many draws of each chain (evenly spaced).
            quantiles: levels in (0, 1); none leaves them out, which is faster.

        Returns:
            The path.

        Raises:
            TypeError: the posterior belongs to a plain Pyro program.
            ValueError: an argument, by name; no rows; rows that are not finite. ImportError: pyarrow or Zarr is not
                installed.
        """
        from pyrobnn.posterior import streaming

        path = Path(path)
        check_type("model", self.model, BNN, "a pyrobnn.BNN: a program has no network output")
        streaming.check_format(path)
        levels = [check_number("quantiles", q, above=0, below=1) for q in quantiles]
        posterior = self if num_draws is None else self.thin(num_draws)
        names = self.meta.get("input_names")
        batches = streaming.input_batches(batches_as_rows(self.bnn.net, x), names)
        first = next(batches, None)
        if first is None:
            raise ValueError("'x' has no batches: pass at least one row")
        width = self.thin(1).standard_function(first[:1]).shape[-1]
        size = streaming.rows_at_once(posterior.num_chains * posterior.num_draws, width)
        blocks = streaming.row_blocks(chain([first], batches), size)
        streaming.write_blocks(
            (streaming.prediction_columns(posterior.predict(rows), levels) for rows in blocks),
            path,
        )
        return path

    def function(self, x: Tensor) -> Tensor:
        """Every draw's mean of y in its units at ``x`` (chain, draw, point, out), or its logits (…, class)."""
        return self.predict(x).f

    @torch.no_grad()
    def standard_function(self, x: Tensor) -> Tensor:
        """Every draw's raw network output at ``x`` (chain, draw, point, width), in the units of the program."""
        model, forward, x = self._varying_network(self.inputs(x))
        params = {n: v for n, v in self.stacked().items() if n.startswith(NET)}
        # values that all draws share take no memory of their own
        varying = [value for value in params.values() if value.stride(0)]
        scalars_per_draw = max(1, sum(value[0].numel() for value in varying))
        total = self.num_chains * self.num_draws
        # a piece is never less than one point and one draw, however wide the layers are
        widest = max(widest_layer(model, x), 1) if total * len(x) > 1 else 1
        points_at_once = max(1, min(len(x), CHUNK_SCALARS // widest))
        scalars_at_once = max(widest * points_at_once, scalars_per_draw)
        draws_at_once = max(1, min(total, CHUNK_SCALARS // scalars_at_once))
        if x.device.type == "cpu" and widest * points_at_once > LARGE_LAYER:
            draws_at_once = 1

        def outputs(piece: Tensor) -> Tensor:
            if total == 1:
                draw = {name: value[0] for name, value in params.items()}
                return forward(draw, piece).unsqueeze(0)
            return at_each(
                lambda draw: forward(draw, piece),
                params,
                at_once=draws_at_once,
            )

        f = torch.cat([outputs(piece) for piece in x.split(points_at_once)], 1)
        return f.reshape(self.num_chains, self.num_draws, *f.shape[1:])

    def _varying_network(self, x: Tensor) -> tuple[BNN, Callable[..., Tensor], Tensor]:
        """The model as far as draws vary, its function (params, inputs) → f, and its inputs for ``x``.

        What no draw moves, a trunk, is computed here, once; the inputs are then its features.
        """
        if self.network is None:
            split_net = self._split_net(x)
            if split_net is None:
                return self.bnn, self.bnn.forward, x
            features = split_net.features(x)
            head = split_net.head
            return head, head.forward, features
        # `Linearized` and `SubsetNetwork` (inference/curvature/linearized.py) have a head and features of their own
        if hasattr(self.network, "head"):
            network = cast(Any, self.network)
            return network.model, network.head, network.features(x)
        return self.bnn, self.network, x

    def _split_net(self, x: Tensor) -> Split | None:
        """Where the draws share the first parameters of the net: the split before those that they do not."""
        params = {name: value for name, value in self.draws.items() if name.startswith(NET)}
        shared = self._shared(params)
        moving = [name for name in params if name not in shared]
        if not shared or not moving:
            return None
        draw = {name: value[0, 0] for name, value in params.items()}
        split_net = split(self.bnn, moving, draw, x)
        return split_net if split_net.path else None

    def _shared(self, params: Mapping[str, Tensor]) -> list[str]:
        """The point parameters among ``params``, if each of them is the same in all draws; else none."""
        points = [name for name in self.meta.get("point_sites", ()) if name in params]
        return points if all(is_same_in_all_draws(params[name]) for name in points) else []

    @options_explained
    def to_datatree(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        probe_x: Tensor | None = None,
        test: tuple[Tensor, Tensor] | None = None,
        grid: Tensor | None = None,
        true_function: Callable[[Tensor], Tensor] | None = None,
        num_prior_draws: int = 200,
        exact_loo: int = 0,
        label: str | None = None,
        seed: int = 0,
    ) -> DataTree:
        """An ArviZ ``xarray.DataTree`` of this posterior, of a BNN or of a plain Pyro program.

        Args:
            x, y: the training data, (N, …) and (N, out) or labels (N,): adds log_likelihood, log_prior, function,
                stein, posterior_predictive, observed_data and constant_data. A plain program that was fitted without
                any, having its own, needs none here.
            probe_x: inputs (probe, feature) where functions are compared; default a spread of train points, points in
                the gaps between them, and points outside.
            test: held-out (x, y): adds predictions and predictions_constant_data.
            grid: inputs (grid_point, 1) for bands; default 200 points over 1-D data and half its range around it.
            true_function: x → the true mean, evaluated on the grid, where the data are synthetic.
            num_prior_draws: draws for the groups prior and prior_predictive; 0 leaves them out.
            exact_loo: rows, at most, whose k-hat is too large and that are therefore removed one by one
                (:meth:`remove`), the worst first: ``diagnostics.loo`` and ``diagnose`` take their exact log density.
            label: name in reports; default the method's.
            seed: of the predictive draws.

        Returns:
            A tree with the group posterior and those groups that the arguments allow; provenance in its attributes. The
            dimensions of a program's sites are its plates (``pyro.plate("school", 8)``), else ``<site>_dim_0``.

        Raises:
            TypeError, ValueError: as :meth:`predict`. Refused: as :meth:`remove`, of ``exact_loo``.
        """
        from pyrobnn.posterior import datatree, program_tree

        groups = {}
        of_net = isinstance(self.model, BNN)
        if of_net:
            x, y = self._read(x, y)
        if of_net and x is not None:
            groups = datatree.network_groups(
                self, x, y, probe_x, grid, true_function, num_prior_draws, seed
            )
        elif not of_net and self._are_of_fit(x, y):
            groups = program_tree.program_groups(self, x, y, num_prior_draws, seed)
        if of_net and test is not None:
            groups |= datatree.held_out_groups(self, *test, seed)
        tree = datatree.whole_tree(self, groups, label)
        if exact_loo:
            judging = importlib.import_module("pyrobnn.diagnostics.leave_one_out")
            same = self._has_seen(Rows.of(self.model, x, y))
            judging.add_exact(tree, exact_loo, same, partial(self._left_out, seed=seed))
        return tree

    def _read(self, x: Tensor | None, y: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The data of a BNN as tensors."""
        x = None if x is None else torch.atleast_1d(self.bnn.rows(self._in_order(x)))
        y = None if y is None else self.bnn.likelihood.targets.read(y)
        return x, y

    def _are_of_fit(self, x: Tensor | None, y: Tensor | None) -> bool:
        """Whether ``x`` and ``y`` are given where the fit was given them, and not where it was not."""
        return [x is not None, y is not None] == self.meta.get("data_given", [True, True])

    def _has_seen(self, rows: Rows | None) -> bool:
        """Whether ``rows`` are those of the fit; also where either is not known."""
        return not (rows and self.rows) or torch.equal(rows.digest, self.rows.digest)

    def diagnose(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        **options: Any,
    ) -> Verdict:
        """``diagnose(to_datatree(x, y, **options))``; by default of the fit's own data; TypeError without any."""
        if y is None and self.rows is not None:
            x = self.rows.checked().x
            y = self.rows.y
        if not self._are_of_fit(x, y):
            raise TypeError(
                "a posterior is judged with the data of its fit: give them, as diagnose(x, y)"
            )
        judging = importlib.import_module("pyrobnn.diagnostics")
        return cast("Verdict", judging.diagnose(self.to_datatree(x, y, **options)))

    def infer_discrete(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        r"""The discrete latent sites of a program, which its fit sums out, given each draw and the data.

        .. math:: k \sim p(k \mid \theta, x, y)^{1/T}

        All discrete sites of a draw are drawn together (forward filtering, backward sampling).

        Args:
            x, y: the data, as the program takes them: those of the fit, or other rows.
            temperature: T; 1 draws from the posterior of the discrete sites, 0 takes their most probable values.
            seed: of the draws.

        Returns:
            Site → (chain, draw, \*shape), int64: the values of the site.

        Raises:
            ValueError: a model without discrete latent sites; a negative temperature.
            Refused: as of the fit, for rows whose sum is too large.

        Reference: *Tensor variable elimination for plated factor graphs* (Obermeyer et al., 2019)
        https://arxiv.org/abs/1902.03210

        Example:
            >>> import pyro, pyro.distributions as dist, pyrobnn as pb
            >>> def program(x, y):
            ...     low = pyro.sample("low", dist.Normal(-2.0, 1.0))
            ...     with pyro.plate("rows", len(y)):
            ...         group = pyro.sample("group", dist.Bernoulli(0.5))
            ...         pyro.sample("y", dist.Normal(low + 4 * group, 0.5), obs=y)
            >>> y = torch.tensor([-2.0, 2.1, -1.9])
            >>> posterior = pb.Laplace(compile=False).fit(program, None, y, num_draws=10)
            >>> posterior.infer_discrete(None, y, temperature=0)["group"][0, 0]
            tensor([0, 1, 0])
        """
        from pyrobnn.posterior.discrete import infer_discrete

        with process_state():
            return infer_discrete(self, x, y, temperature, seed)

    def infer_local(
        self,
        x: Any = None,
        y: Any = None,
        *,
        seed: int = 0,
    ) -> LocalDraws:
        r"""The latent values of rows that the fit has not seen, given each draw of what all rows share.

        .. math:: z_i \sim q(z_i \mid \theta, x_i, y_i) \quad \text{or} \quad z_i \sim p(z_i \mid \theta, x_i)

        A guide that computes them from the data, as one with an encoder does, is asked for them where ``y`` is given.
        Any other guide has parameters for the rows of its fit alone: then they are drawn from the law that the program
        gives any row, its population, as predictions of new rows need them. ``drawn_from`` says which it was. The
        values of the rows of the fit are in ``draws``.

        Args:
            x, y: other rows, as the program takes them; ``y`` may be None.
            seed: of the draws.

        Returns:
            ``values``, site → (chain, draw, \*shape), and ``drawn_from``, ``"guide"`` or ``"program"``.

        Raises:
            ValueError: a model without a latent value for each row of its data.

        Example:
            >>> import pyro, pyro.distributions as dist, pyrobnn as pb
            >>> def program(x, y):
            ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
            ...     with pyro.plate("rows", len(x)):
            ...         level = pyro.sample("level", dist.Normal(mean, 0.1))
            ...         pyro.sample("y", dist.Normal(level, 0.1), obs=y)
            >>> svi = pb.SVI(num_steps=2000, compile=False)
            >>> posterior = svi.fit(program, torch.zeros(5), torch.ones(5) + 4)
            >>> levels, drawn_from = posterior.infer_local(torch.zeros(2))
            >>> levels["level"].shape, round(levels["level"].mean().item()), drawn_from
            (torch.Size([1, 1000, 2]), 5, 'program')
        """
        from pyrobnn.posterior.local_rows import infer_local

        with process_state():
            return infer_local(self, x, y, seed)

    def update(self, x: Tensor | None, y: Tensor, *, seed: int = 0) -> Posterior:
        r"""The posterior given the rows so far and the new rows ``x``, ``y``, without a refit.

        .. math:: \pi_\beta(\theta) \propto p(\theta \mid y_\mathrm{old})\, p(y_\mathrm{new} \mid \theta)^\beta

        At most 1000 of the draws are led from β = 0 to 1, through steps whose weights are worth half of them:
        resampled and moved by HMC in units of their own spread. For the chains of NUTS, SMC, SGHMC and SGLD, of a BNN
        or of a program fn(x, y) whose log likelihood is a sum over rows. Laplace's Gaussian goes to the mode of all
        rows and takes the curvature there; what it holds (a trunk, learned noise, a tuned prior) stays. Standard units
        stay those of the first fit.

        Args:
            x, y: new rows, shaped as those of the fit.
            seed: of resampling and moves.

        Returns:
            Draws (chain, draw, …), a chain an island that never mixed with others. In ``meta``: ``log_evidence_added``,
            log p(y_new | y_old) in nats (in the units of the program) with ``log_evidence_added_error``; ``gradients``
            of one particle each, ``ess`` of the weights at each step (share of the draws), ``ancestors`` (distinct
            draws that the new ones descend from) and ``updates``, all calls so far. SMC's ``log_evidence`` goes on.

        Raises:
            TypeError, ValueError: rows that do not fit.
            Refused: neither chains nor Laplace, no rows kept, rows that depend on each other, or too far a way.

        Caveat: draws stay where the old ones were: rows that open a mode of which no draw knew are not noticed.

        References:
            *A sequential particle filter method for static models* (Chopin, 2002)
            https://doi.org/10.1093/biomet/89.3.539

        Example:
            >>> import pyro, pyro.distributions as dist, pyrobnn as pb
            >>> def program(x, y):
            ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
            >>> posterior = pb.SMC(num_particles=400, compile=False).fit(program, None, torch.ones(3))
            >>> more = posterior.update(None, torch.ones(2))
            >>> abs(float(more.draws["mean"].mean()) - 5 / 6) < 0.1
            True
            >>> more.remove([3, 4]).meta["num_data"]
            3
        """
        with process_state():
            return cast(Posterior, CHANGES["update"](self, self._in_order(x), y, seed))

    def remove(self, rows: int | Sequence[int] | Tensor, *, seed: int = 0) -> Posterior:
        """The posterior without some of its rows, as if it had never seen them; otherwise as :meth:`update`.

        Args:
            rows: their indices (those of updates come after those of the fit), or a mask (N,).
            seed: of resampling and moves.

        Returns:
            As :meth:`update`; ``log_evidence_added`` is log p(y_rest) - log p(y): of a single row minus its exact
            leave-one-out log density. Neither the posterior nor its file holds the rows; they move up.

        Raises:
            TypeError, ValueError: no such rows. Refused: as :meth:`update`, and to remove all.
        """
        with process_state():
            return cast(Posterior, CHANGES["remove"](self, rows, seed))

    def refine(
        self,
        seconds: float = 10.0,
        *,
        x: Tensor | None = None,
        y: Tensor | None = None,
        seed: int = 0,
    ) -> Posterior:
        """This approximation brought to the posterior: its draws are where some hundreds of short chains begin.

        Chains of Hamiltonian Monte Carlo move side by side, in groups that begin at one draw each (of a net a quarter
        of the groups begins elsewhere, at likely draws from the prior), until they have arrived: the groups agree
        (nested R-hat at most 1.05 of sixteen chains a group, for function values, the log density and sites that are
        identified), nothing drifts, and the smallest effective sample size is at least 280. Chains from elsewhere that
        still lie far below the others in log density after half of the time are left out. Of any method but MC dropout;
        point parameters stay where they are.

        Args:
            seconds: the most that it takes, about. A run that arrives before repeats bit for bit with its seed; one
                that is cut by the clock does not.
            x, y: the data, where the posterior does not hold them: after a DataLoader or ``posthoc``, or from a file.
            seed: of starts and moves.

        Returns:
            Draws of kind ``"chains"``, (4, draw, …), the later half of the transitions: short chains stand one after
            the other, those that began at one point together. ``sample_stats`` are lp, energy, acceptance_rate,
            diverging, n_steps and step_size. ``meta["refine"]`` says ``start`` (the method), ``seconds``, ``chains``,
            ``groups``, ``transitions``, ``gradients``, ``nested_rhat`` and its ``limit``, ``drift`` (sd), ``memory``
            (correlation with where a chain was), ``ess`` and whether they ``arrived``; where groups stay in modes of
            their own, ``modes``, weighted by Laplace's estimate of their evidence.

        Raises:
            TypeError, ValueError: naming the argument.
            Refused: MC dropout; no data; layers in training mode.

        Warns:
            UserWarning: the chains have not arrived; the verdict on such draws is never a pass.

        References:
            *Nested R-hat* (Margossian et al., 2024) https://arxiv.org/abs/2110.13017

        Example:
            >>> import pyro, pyro.distributions as dist, pyrobnn as pb
            >>> def program(x, y):
            ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            ...     pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
            >>> rough = pb.MAP(num_steps=200, compile=False).fit(program, None, torch.ones(3))
            >>> refined = rough.refine()
            >>> refined.meta["refine"]["arrived"], abs(float(refined.draws["mean"].std()) - 0.5) < 0.05
            (True, True)
        """
        with process_state():
            return cast(Posterior, CHANGES["refine"](self, seconds, x, y, seed))

    def _left_out(self, row: int, seed: int) -> tuple[float, float | None, DataTree]:
        """The log density of a row given the others, in the units of the data, its error, and the row's tree so."""
        posterior = self.remove(row, seed=seed)
        log_volume = 0.0
        rows = cast(Rows, self.rows).at(torch.tensor([row]))
        if isinstance(self.model, BNN) and self.model.units is not None:
            targets = self.model.likelihood.targets
            log_volume = float(targets.log_volume(rows.y.reshape(1, -1), self.model.units[1]))
        log_density = -posterior.meta["log_evidence_added"] - log_volume
        tree = posterior.to_datatree(
            rows.x,
            rows.y,
            num_prior_draws=0,
            seed=seed,
        )
        return log_density, posterior.meta["log_evidence_added_error"], tree

    def save(self, path: str | Path, *, rows: bool = False) -> Path:
        """Write to a netCDF file (atomically; no pickle).

        Values that all draws share are stored once, and a Gaussian's factors where they are no larger than 32 MB or
        the draws. No row of the data is in the file unless ``rows`` asks for them, which ``meta["rows_in_file"]`` of
        what is loaded then says. Nor has a pickle of the posterior of a net. Of a deep net, whose ``log_p`` and
        ``log_q`` take passes over the data for more than a tenth of the training's time, the file has them where
        ``sample_stats`` were asked for before.
        """
        from pyrobnn.posterior.storage import save

        return save(self, path, rows=rows)

    def export(
        self,
        path: str | Path,
        *,
        num_draws: int | None = None,
        quantiles: Sequence[float] = (0.025, 0.5, 0.975),
        x: Tensor | DataLoader | None = None,
        verdict: Verdict | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write what this posterior predicts to one file that torch alone, or ONNX Runtime, reads; no rows of data.

        The file is a program: inputs (rows, …) in the units of the data → ``mean``, ``sd``, ``aleatoric_sd`` and
        ``epistemic_sd`` (rows, out) and, of normal noise, ``quantiles`` (rows, out, level); of classes ``probs``,
        ``entropy``, ``aleatoric_entropy`` and ``epistemic_entropy`` (in nats); and ``outside`` (rows,), whether any
        input of a row lies beyond those of the training data. They are those of :meth:`predict` with the same draws,
        ``predict(x, num_draws=num_draws)``; of a linearised network those of the draws, without the exact moments.
        ``torch.export.load(path).module()`` is the program of a ``.pt2`` file, its extra file ``pyrobnn.json`` what the
        file says of itself: method, units, ranges, verdict, warnings, and what predictions lose by the draws that were
        left out. Its extra file ``reader.py`` is a reader that starts in milliseconds. An ``.onnx`` file has the same
        under ``pyrobnn`` in its metadata and computes in float32.

        Args:
            path: ends in ``.pt2`` or ``.onnx``.
            num_draws: at most so many evenly spaced draws of each chain; default 100 of all chains together.
            quantiles: levels in (0, 1); none leaves them out.
            x: the training inputs (N, …), or a loader of them: their ranges, where the posterior does not know them
                (of a fit to a loader). Rows of it serve for comparisons and are not written.
            verdict: on this posterior; default ``diagnose()`` where the data of the fit are kept, else none.
            about: JSON-able entries for ``pyrobnn.json``, the names of the features, say.

        Returns:
            The path.

        Raises:
            TypeError: the posterior belongs to a plain Pyro program.
            ValueError: an argument, by name, before any work. ImportError: ONNX is not installed.
            Refused: torch cannot export the net.

        Warns:
            UserWarning: the ranges of the training data are not known, so that ``outside`` is left out.
        """
        from pyrobnn.posterior import export

        path = Path(path)
        check_type("model", self.model, BNN, "a pyrobnn.BNN: a program has no network output")
        export.check_format(path)
        levels = tuple(check_number("quantiles", q, above=0, below=1) for q in quantiles)
        default = max(1, 100 // self.num_chains)
        thinned = self.thin(default if num_draws is None else num_draws)
        entries = export.checked_about(about)
        if x is None:
            inputs = None if self.rows is None else self.rows.x
        else:
            inputs = None if isinstance(x, DataLoader) else self.bnn.rows(x)
        if inputs is not None:
            self.inputs(inputs[:1])
        input_range = self._input_range(x if inputs is None else inputs)
        if verdict is None and self.rows is not None:
            verdict = self.diagnose()
        entries["verdict"] = None if verdict is None else verdict.to_dict()
        contents = export.Contents(
            self,
            thinned,
            levels,
            input_range,
            inputs,
            entries,
        )
        with process_state():
            export.write(contents, path)
        return path

    def _input_range(self, x: Tensor | DataLoader | None) -> InputRange | None:
        """The range of training inputs that are given, else that of the fit; None, with a warning, of neither."""
        if isinstance(x, DataLoader):
            with kept():  # a loader draws its order
                return InputRange.of_batches(as_rows(self.bnn.net, x))
        if x is not None:
            return InputRange.of(x)
        if "input_range" in self.meta:
            return InputRange.from_state(self.meta["input_range"])
        warnings.warn(
            "the ranges of the training data are not known, so the file has no 'outside': pass x, the training inputs "
            "or their loader",
            UserWarning,
            stacklevel=3,
        )
        return None

    @staticmethod
    def load(
        path: str | Path | Sequence[str | Path],
        model: BNN | Program,
        *,
        x: Tensor | None = None,
        y: Tensor | None = None,
    ) -> Posterior:
        """Read what :meth:`save` wrote.

        Args:
            path: the file; or a list of files, such as the ranks of ``fit_on_ranks(…, gather=False)`` have written,
                whose chains, or independent draws, are joined in this order. Of several files the draws of a site are
                read each time that somebody asks for them who does not have them any more, and there is no
                ``approximation``, ``log_evidence`` or ``history``.
            model: what it was fitted with.
            x, y: the rows of the fit, which :meth:`update` and :meth:`remove` need, and the factors of a large
                Gaussian are computed from; checked against a digest in the file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: truncated, foreign, or of another model; other rows than the fit's; files that do not join.
        """
        from pyrobnn.posterior.storage import load, load_joined

        if not isinstance(path, (str, os.PathLike)):
            check_type("path", path, Sequence, "the path of a file, or a list of such")
            return load_joined(
                path,
                model,
                x=x,
                y=y,
            )
        return load(
            path,
            model,
            x=x,
            y=y,
        )

    def __getstate__(self) -> dict[str, Any]:
        # a reference to functions of pyrobnn.inference.update: unpickling imports that module, which fills CHANGES anew
        return self.__dict__ | {"rows": None, "_changes": CHANGES}

    def __copy__(self) -> Posterior:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Posterior:
        """With its rows, which a pickle does not have."""
        copied = replace(self)
        for name, value in copied.__dict__.items():
            object.__setattr__(copied, name, copy.deepcopy(value, memo))
        return copied

    def __repr__(self) -> str:
        size = f"{self.num_chains} chains x {self.num_draws} draws"
        return f"Posterior({self.meta.get('method', '?')}, {size}, {len(self.draws)} sites)"
