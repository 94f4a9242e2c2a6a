"""The model: net + prior + likelihood = a Pyro program, and its pure reading ``forward(params, x)``."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import pyro
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pyrobnn.core.checks import Refused, as_tensor, check_cast, check_finite, check_type
from pyrobnn.core.option_names import options_explained
from pyrobnn.core.private_pyro import given
from pyrobnn.core.seeding import kept, seeded
from pyrobnn.data import Standardizer
from pyrobnn.model.architectures import Exposed
from pyrobnn.model.fused import WrittenOut
from pyrobnn.model.likelihoods.base import Likelihood
from pyrobnn.model.likelihoods.parameters import point
from pyrobnn.model.net_checks import copied, refuse_unfit, takes_words, tried
from pyrobnn.model.output_shape import check_positions, flatten_rows, with_digits
from pyrobnn.model.several_inputs import SeveralInputs, as_rows
from pyrobnn.model.weight_priors import Prior, Selective, SitePriors, move, site_priors

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

NET = "net."
_SEVERAL = "; of several inputs put pb.networks.SeveralInputs(net, x) into the BNN in place of net"

#: layers that normalise with the statistics of the batch, and layers that draw at random, while they are trained
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.RReLU,
)


class BNN:
    r"""A Bayesian neural network: any ``nn.Module``, a prior on its parameters and a likelihood.

    .. math:: \theta \sim p(\theta), \qquad y_n \sim p(y \mid f_\theta(x_n)), \quad n = 1 \dots N

    The net is deep-copied: the user's own is never touched. Bayesian parameters are the sites ``net.<parameter>``;
    parameters hidden from the prior are point parameters of the same name, optimised by MLE, MAP and SVI and held at
    the net's own values by MCMC, and by every method where they are frozen (``requires_grad=False``).

    Args:
        net: maps inputs (N, …) to outputs (N, width); outputs of more dimensions, (N, channel, height, width) say, are
            flattened: a row is one datum, its positions are columns.
        prior: any ``tyxe.priors.Prior``, see :mod:`pyrobnn.priors`.
        likelihood: one of :mod:`pyrobnn.likelihoods`.
        standardizer: the units of the data, ``pb.data.Standardizer.fit(train)``. ``fit`` and ``predict`` then take
            and return original units; the program itself, its prior and its noise live in standard units.

    Attributes: the arguments, ``net`` a copy; ``priors`` (site → prior); ``widths_by_rule``: the widths of some come
    from a rule for large nets (:class:`~pyrobnn.priors.FanInNormal`) and not from the user; ``eval_net``, a copy of the
    net in evaluation mode, the module that ``forward`` runs: every thread has one of its own, of the same tensors.

    Raises:
        TypeError: an argument of another kind.
        ValueError: the prior's hide/expose names nothing in the net, or leaves no Bayesian parameter.

    Example:
        >>> import pyro.distributions as dist, pyrobnn as pb
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        >>> model = BNN(net, pb.priors.IIDPrior(dist.Normal(0.0, 1.0)), pb.likelihoods.HomoskedasticGaussian(0.1))
        >>> trace = pyro.poutine.trace(model.pyro_model).get_trace(torch.zeros(5, 1))
        >>> trace.nodes["net.0.weight"]["value"].shape
        torch.Size([50, 1])
    """

    #: a density takes the values of point parameters from the model, whatever Pyro's store holds under their names
    holds_points = True
    #: of a model that an earlier version has pickled
    widths_by_rule = False

    @options_explained
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        *,
        standardizer: Standardizer | None = None,
    ):
        check_type("net", net, nn.Module, "a torch.nn.Module")
        check_type("prior", prior, Prior, "a tyxe.priors.Prior, such as pb.priors.FanInNormal()")
        check_type(
            "likelihood", likelihood, Likelihood, "one of pb.likelihoods, such as Categorical()"
        )
        refuse_unfit(net)
        # the prior may refer to the user's own modules (hide_modules), so it is read before copying
        bare_net = net.net if isinstance(net, Exposed) else net
        priors = site_priors(prior, bare_net)
        self.widths_by_rule = isinstance(prior, Selective) and prior.has_rule_for(bare_net)
        self.net = _without_nested_tensors(_separated(copied(net)))
        if likelihood.targets.exposure is not None and not isinstance(net, Exposed):
            self.net = Exposed(self.net, likelihood.targets.exposure)
        self.net.register_forward_hook(flatten_rows)
        self.net.register_forward_hook(with_digits)
        if isinstance(net, SeveralInputs) and standardizer is not None:
            _check_units_of_inputs(standardizer)
        self._pattern_net = copied(self.net).eval()
        if isinstance(self.net, Exposed):
            priors = {f"net.{name}": site for name, site in priors.items()}
        self.prior = prior
        self.likelihood = likelihood.like(
            torch.zeros(
                (),
                dtype=self.dtype,
                device=self.device,
            )
        )
        self.likelihood.own.for_outputs(_last_width(self.net) // likelihood.targets.heads)
        self.standardizer = standardizer
        self.priors = {NET + name: site for name, site in priors.items()}
        self.priors |= self.likelihood.own.priors

    @property
    def eval_net(self) -> nn.Module:
        """The net in evaluation mode, of this thread alone.

        A call with other parameters puts them into the module for as long as it takes, where another thread would find
        them. So each thread runs a copy of a net that nobody runs; the tensors are the same.
        """
        return _of_this_thread(self._pattern_net)

    @property
    def thread_net(self) -> nn.Module:
        """The net in its present modes, of this thread alone, for the same reason: :attr:`net` itself is never run."""
        net = _of_this_thread(self.net)
        for copied_module, module in zip(net.modules(), self.net.modules(), strict=True):
            copied_module.training = module.training
        return net

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        types = (p.dtype for p in self.net.parameters() if p.is_floating_point())
        return next(types, torch.get_default_dtype())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))

    @property
    def num_weights(self) -> int:
        """Number of scalar parameters of the net, Bayesian or not."""
        return sum(p.numel() for p in self.net.parameters())

    @property
    def frozen(self) -> set[str]:
        """Sites of the parameters that have no prior and are not to be trained (``requires_grad=False``)."""
        untrained = {NET + n for n, p in self.net.named_parameters() if not p.requires_grad}
        return untrained - self.priors.keys()

    def to(self, device: torch.device) -> BNN:
        """This model on ``device``; itself if it is there already."""
        if device == self.device:
            return self
        moved = copy.copy(self)
        moved.net = copied(self.net).to(device)
        moved._pattern_net = copied(self._pattern_net).to(device)
        moved.standardizer = None if self.standardizer is None else self.standardizer.to(device)
        weight = torch.zeros((), dtype=self.dtype, device=device)
        moved.likelihood = self.likelihood.like(weight)
        moved.priors = {name: move(name, prior, weight) for name, prior in self.priors.items()}
        moved.priors |= moved.likelihood.own.priors
        return moved

    def with_nets(self, change: Callable[[nn.Module], nn.Module]) -> BNN:
        """This model with what ``change`` makes of its net, in both of its modes."""
        changed = copy.copy(self)
        changed.net = change(self.net)
        changed._pattern_net = change(self._pattern_net)
        return changed

    def persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dictionary of the net has, by name."""
        buffers = dict(self.net.named_buffers(remove_duplicate=False))
        return {name: buffers[name] for name in self.net.state_dict() if name in buffers}

    def with_buffers(self, values: Mapping[str, Tensor]) -> BNN:
        """This model with these values of buffers of its net, by name; the model itself where it has them.

        Raises:
            ValueError: the net has no buffer of that name and shape.
        """
        buffers = dict(self.net.named_buffers(remove_duplicate=False))
        for name, value in values.items():
            shape = tuple(buffers[name].shape) if name in buffers else None
            if shape != tuple(value.shape):
                what = "no such buffer" if shape is None else f"one of shape {shape}"
                raise ValueError(
                    f"the buffer {name!r} has shape {tuple(value.shape)}, and the net has {what}"
                )
        new = {
            name: value.to(buffers[name])
            for name, value in values.items()
            if not torch.equal(value.to(buffers[name]), buffers[name])
        }
        return self.with_nets(lambda net: _with_buffers(net, new)) if new else self

    def pyro_model(
        self,
        x: Tensor,
        y: Tensor | None = None,
        num_data: float | None = None,
    ) -> Tensor:
        """The generative program: weights, then the network, then the data.

        Point parameters are ``pyro.param`` statements; draws (``posterior.stacked()``) or a guide (``posterior.guide``)
        that name them give them their value, as they do for the weights.

        Args:
            x: inputs (N, …), in standard units where the model has a standardizer.
            y: targets, or None to sample them.
            num_data: size of the whole data set when (x, y) is a mini-batch of it.
        Returns:
            The network output (N, width).

        Raises:
            ValueError: weights in a batch, as vectorised handlers of Pyro give them.
        """
        values = self.sample_parameters()
        params = {
            name.removeprefix(NET): value for name, value in values.items() if name.startswith(NET)
        }
        self._check_one_set(params)
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        statistics = {}
        for name in buffers:
            buffer = given(NET + name)
            if buffer is not None:
                statistics[name] = buffer
        # batch-norm statistics of a draw are to be used, not computed anew from this batch
        net = self.eval_net if statistics else self.thread_net
        f = torch.func.functional_call(net, params | buffers | statistics, (x,))
        self.likelihood.observe(f, y, values, num_data)
        return f

    __call__ = pyro_model

    def _check_one_set(self, params: Mapping[str, Tensor]) -> None:
        """Refuse weights with batch dimensions, by name: torch's layers take one set of weights."""
        for name, parameter in self.net.named_parameters():
            shape = params[name].shape
            if shape != parameter.shape:
                raise ValueError(
                    f"{NET}{name} has shape {tuple(shape)}, and the net takes one set of weights, "
                    f"{tuple(parameter.shape)}: leave out parallel=True of Predictive and vectorize_particles=True of "
                    "an ELBO, and loop over a plate around the program"
                )

    def batch_model(
        self,
        factor: float,
        x: Tensor,
        y: Tensor | None = None,
    ) -> Tensor:
        """:meth:`pyro_model` with the likelihood of the batch (x, y) times ``factor``."""
        # the likelihood's plate divides its size by the points it is given
        return self.pyro_model(x, y, num_data=factor * len(x))

    def sample_parameters(self) -> dict[str, Tensor]:
        """The program's first half: every parameter of the net and of the likelihood, by site."""
        values = {}
        for name, initial in self.initial_values().items():
            if name in self.priors:
                values[name] = pyro.sample(name, self.priors[name])
            else:
                values[name] = point(name, initial)
        return values | self.likelihood.own.sample()

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The network as a pure function of one set of parameters.

        Args:
            params: site → tensor, with or without the leading ``net.``; parameters and buffers not given keep the
                net's own values, other sites (the noise) are ignored.
            x: inputs (N, …).
        Returns:
            Output (N, width), in evaluation mode (no dropout, stored batch-norm statistics).
        """
        net = self.eval_net
        known = net.state_dict(keep_vars=True)
        values = {name.removeprefix(NET): value for name, value in params.items()}
        values = {name: value for name, value in values.items() if name in known}
        with WrittenOut():
            return torch.func.functional_call(net, values, (x,))

    @torch.no_grad()
    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the output for a row as the net returns it, for inputs (N, …) as the net takes them.

        Raises:
            ValueError: the net cannot take them, or returns no rows of numbers.
        """
        if x.dim() == 1 and not self._takes_words:
            raise ValueError(
                "'x' has one dimension, but a net takes rows, (N, features): pass x[:, None]"
            )
        rows = x[:2]
        try:
            with kept(self.device):  # a net that draws is refused with words later
                f = tried(self.eval_net, rows)
        except Refused:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise ValueError(self.why_not_taken(x, error)) from error
        if not isinstance(f, Tensor) or f.dim() < 2 or len(f) != len(rows):
            raise ValueError(_without_rows(f, len(rows)))
        if self.likelihood.targets.kind == "label" and _are_probabilities(f):
            raise ValueError(
                "the net ends in a Softmax and returns probabilities, but the likelihood takes logits: leave the "
                "Softmax out, or end the net in nn.LogSoftmax"
            )
        return tuple(f.shape[1:])

    def why_not_taken(self, x: Tensor, error: Exception) -> str:
        """What is said of inputs (N, …) that the net raised the ``error`` of, with the remedy where one is found."""
        one_line = str(error).partition("\n")[0].rstrip(" .") or type(error).__name__
        reason = f"the net cannot take 'x' of shape {tuple(x.shape)}: {one_line}"
        if "index out of range" in one_line:
            return reason + words_looked_up(self.net)
        if torch.equal(x, x.round()) and self.runs(x[:2].long()):
            return (
                f"{reason}. It takes whole numbers, and inputs reach it in the type of its weights, {x.dtype}: begin "
                "its forward with x = x.long()"
            )
        if len(x) > 2 and self.runs(x):
            return (
                f"{reason}. It runs for all {len(x)} rows together and not for two of them, as a graph over the rows "
                "does, so its rows are no separate data: write it as a Pyro program, fn(x, y), with the net as a "
                "pyro.nn.PyroModule"
            )
        return reason

    def runs(self, x: Tensor) -> bool:
        """Whether the net takes inputs (N, …), as they come to it."""
        try:
            with kept(self.device):
                tried(self.eval_net, x)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        return True

    def standard_inputs(self, x: Tensor) -> Tensor:
        """Inputs (N, …) of the data in the units of the program, in the floating type of the data.

        Raises:
            ValueError: an exposure that is not positive.
        """
        standard = x if self.standardizer is None else self.standardizer.transform_x(x)
        if not isinstance(self.net, Exposed):
            return standard
        return self.net.with_exposure(standard, self.net.exposures(x))

    def rows(self, x: Any) -> Tensor:
        """Inputs as a tensor (N, …), several inputs (a tuple or a dictionary) as rows (N, width).

        Raises:
            TypeError, ValueError: no numbers, or inputs that the net is not declared with.
        """
        return as_tensor("x", as_rows(self.net, x))

    def comparable(self, x: Tensor) -> Tensor:
        """Inputs (N, …) where functions are compared, as rows that the net can take.

        With an exposure of one, where the model has exposures; of several inputs whole numbers stay such.
        """
        if isinstance(self.net, SeveralInputs):
            return self.net.layout.possible(x)
        return self.unit_exposure(x)

    def unit_exposure(self, x: Tensor) -> Tensor:
        """Inputs (N, …) whose rows all have exposure one, where the model has exposures: there rates are compared."""
        return self.net.with_exposure(x, 1.0) if isinstance(self.net, Exposed) else x

    @property
    def _takes_words(self) -> bool:
        """Whether the net looks inputs up by whole numbers."""
        return takes_words(self.net)

    def cast_inputs(self, x: Tensor) -> Tensor:
        """Inputs (N, …) in the net's floating type; the indices that an ``nn.Embedding`` looks up stay whole numbers.

        The last step, after :meth:`standard_inputs`: a mean of 1e8 has to go before float32 rounds to multiples of 8.
        """
        return x if self._takes_words and not x.is_floating_point() else x.to(self.dtype)

    @property
    def units(self) -> tuple[Tensor, Tensor] | None:
        """Mean and scale of the targets by which the program measures them; None where it takes them as they are."""
        if self.standardizer is None:
            return None
        mean = self.standardizer.y_mean
        scale = self.standardizer.y_scale
        if mean.dim() > 1:
            mean, scale = _unit_of_images(mean, scale)
        return self.likelihood.targets.units(mean, scale)

    def standard_targets(self, y: Tensor) -> Tensor:
        """Targets (N, …) of the data in the units of the program, (N, out); labels as they are."""
        y = self.likelihood.targets.columns(y)
        if self.units is None:
            return y
        y = y if y.is_floating_point() else y.double()  # whole numbers are measured in units too
        return self.likelihood.targets.in_units(y if y.dim() > 1 else y[:, None], *self.units)

    def initial_values(self) -> dict[str, Tensor]:
        """The net's own parameter values by site: where optimisation starts."""
        return {NET + name: param.detach().clone() for name, param in self.net.named_parameters()}

    def supported(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values by site, drawn from the prior where its support leaves any out (a positive one, say)."""
        supported = dict(values)
        for name, value in values.items():
            prior = self.priors.get(name)
            if prior is not None and not bool(prior.support.check(value).all()):
                supported[name] = prior.sample().to(value)
        return supported

    def reinitialized(self, seed: int) -> BNN:
        """This model with a freshly initialised net (``reset_parameters`` of every module that has it).

        Parameters of modules without ``reset_parameters``, and such as the prior excludes, are drawn from their prior.
        """
        # ``_pattern_net`` stays the old one: its calls are given their parameters
        fresh = copy.copy(self)
        fresh.net = copied(self.net)
        with seeded(seed, self.device), torch.no_grad():
            for module_name, module in fresh.net.named_modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
                    continue
                for name, param in module.named_parameters(module_name, recurse=False):
                    prior = self.priors.get(NET + name)
                    if prior is not None:
                        param.copy_(prior.sample())
            supported = self.supported(fresh.initial_values())
            for name, param in fresh.net.named_parameters():
                param.copy_(supported[NET + name])
        return fresh

    def stochastic_layers(self) -> list[str]:
        """Names of the layers whose output is random or batch-dependent in the net's present mode."""
        return [
            name or type(module).__name__
            for name, module in self.net.named_modules()
            if module.training
            and isinstance(module, BATCH_NORM + DROPOUT)
            and getattr(module, "p", 1) > 0
        ]

    def __copy__(self) -> BNN:
        # not by __getstate__, which replaces the prior by what it came to
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> BNN:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._state(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if any(is_parametrized(module) for module in self.net.modules()):
            raise Refused(
                "torch cannot pickle a net with parametrizations (spectral_norm, weight_norm and others of "
                "torch.nn.utils): keep a posterior by posterior.save(path), and read it by "
                "pyrobnn.Posterior.load(path, model)"
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        # a TyXe prior is made of lambdas; what it came to for this net is all that is asked of it from here on
        sites = {
            name.removeprefix(NET): prior
            for name, prior in self.priors.items()
            if name.startswith(NET)
        }
        return self.__dict__ | {"prior": SitePriors(sites)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = dict(state)
        # up to 0.3.0 the evaluation net itself is in a pickle
        if "eval_net" in values:
            values["_pattern_net"] = values.pop("eval_net")
        self.__dict__.update(values)

    def __repr__(self) -> str:
        net = type(self.net).__name__
        prior = type(self.prior).__name__
        return f"BNN({net}, {prior}, {self.likelihood!r}, {self.num_weights} weights)"


def words_looked_up(net: nn.Module) -> str:
    """Of a net that looks whole numbers up, which ones; empty of any other."""
    tables = [
        f"{name!r} has 0 to {module.num_embeddings - 1}"
        for name, module in net.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    if not tables:
        return ""
    return (
        f". Its embedding {', '.join(tables)}: give numbers that were not there in training one of these, such as one "
        "for all that are unknown"
    )


def _unit_of_images(mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale (1,) of image targets, from (channel, 1, …); ValueError where channels have units of their own."""
    if mean.numel() > 1:
        raise ValueError(
            f"the standardizer has a unit for each of {mean.numel()} channels of 'y': image targets have one unit "
            "here. Give Standardizer a y_mean and a y_scale of shape (1,)"
        )
    return mean.reshape(1), scale.reshape(1)


def _check_units_of_inputs(standardizer: Standardizer) -> None:
    """Refuse units of inputs beside several inputs, of which some may be no numbers with a unit."""
    if bool((standardizer.x_mean != 0).any()) or bool((standardizer.x_scale != 1).any()):
        raise ValueError(
            "'standardizer' would shift whole numbers and masks of SeveralInputs too: bring the inputs to standard "
            "units before, and give Standardizer(torch.zeros(1), torch.ones(1), y_mean, y_scale)"
        )


def _last_width(net: nn.Module) -> int:
    """How many numbers a net returns whose last layer is an ``nn.Linear``; one where that cannot be seen."""
    while isinstance(net, nn.Sequential | Exposed | SeveralInputs) and list(net.children()):
        net = list(net.children())[-1]
    return net.out_features if isinstance(net, nn.Linear) else 1


class _ThreadNets(threading.local):
    """The nets that a thread runs, by the nets that they are copies of."""

    def __init__(self) -> None:
        self.by_pattern: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


_THREAD_NETS = _ThreadNets()


def _of_this_thread(net: nn.Module) -> nn.Module:
    """The copy of ``net``, of the same tensors, that this thread alone runs."""
    nets = _THREAD_NETS.by_pattern
    copied_net = nets.get(net)
    if copied_net is None:
        copied_net = _of_same_tensors(net)
        nets[net] = copied_net
    return copied_net


def _of_same_tensors(net: nn.Module) -> nn.Module:
    """A copy of the modules of ``net`` that holds the same parameters, buffers and other tensors."""
    tensors = [*net.parameters(), *net.buffers()]
    for module in net.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(net, {id(tensor): tensor for tensor in tensors})


def _with_buffers(net: nn.Module, buffers: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the modules of ``net`` with these buffers by name, and otherwise the same tensors."""
    changed = _of_same_tensors(net)
    for name, value in buffers.items():
        module, _, leaf = name.rpartition(".")
        setattr(changed.get_submodule(module), leaf, value)
    return changed


def _without_nested_tensors(net: nn.Module) -> nn.Module:
    """``net`` with encoders that compute what is padded too: without gradients torch leaves it out.

    With nested tensors the outputs at padded positions are zero, or missing, in evaluation mode alone, which would be
    another function than the one that is fitted; they have no derivatives either.
    """
    for module in net.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return net


def _separated(net: nn.Module) -> nn.Module:
    """``net`` with a module of its own at every place where one is used twice, of the same tensors.

    Torch restores one place alone after a call.
    """
    separated = set()
    tensors = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    for name, module in [*net.named_modules(remove_duplicate=False)]:
        if module in separated:
            net.set_submodule(name, copy.deepcopy(module, dict(tensors)))
        separated.add(module)
    return net


class CheckedData(NamedTuple):
    """``inputs`` and ``targets`` as a model computes with them, and the shape of its net's output for a row."""

    inputs: Tensor
    targets: Tensor
    output_shape: tuple[int, ...]


def check_data(
    model: BNN,
    x: object,
    y: ArrayLike | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The inputs and targets of :func:`checked_data`."""
    checked = checked_data(model, x, y, device)
    return checked.inputs, checked.targets


def checked_data(
    model: BNN,
    x: object,
    y: ArrayLike | None,
    device: torch.device,
) -> CheckedData:
    """Inputs and targets as tensors on ``device`` in the shapes and dtypes the model computes with.

    Raises:
        TypeError: not numeric.
        ValueError: empty, NaN or infinite, lengths or widths that do not fit, labels out of range, columns of
            which float32 keeps too little.
    """
    was_tuple = isinstance(x, tuple)
    x = model.rows(x).to(device)  # what is None is refused
    y = model.likelihood.targets.read(y).to(device)
    if x.dim() == 0 or len(x) == 0:
        raise ValueError(f"'x' is empty, shape {tuple(x.shape)}: pass at least one data point")
    if y.dim() == 0 or len(y) != len(x):
        raise ValueError(
            f"'x' has shape {tuple(x.shape)} and 'y' has shape {tuple(y.shape)}: both need the same number of rows"
            + (_SEVERAL if was_tuple else "")
        )
    check_finite("x", x)
    x = model.standard_inputs(x)
    y_shape = y.shape
    y = model.standard_targets(y)
    inputs = model.cast_inputs(x)
    check_cast("x", x, inputs)
    if y.is_floating_point() and not model.likelihood.targets.classes:
        check_cast("y", y, y.to(model.dtype))
    output_shape = model.output_shape(inputs)
    check_positions(model.likelihood, y_shape, output_shape)
    targets = model.likelihood.target(y, math.prod(output_shape), model.dtype)
    return CheckedData(inputs, targets, output_shape)


def _without_rows(f: Any, num_rows: int) -> str:
    """What is said of an output that has no row for each of so many points, with the remedy."""
    if isinstance(f, Mapping | tuple | list):
        return (
            f"the net returns a {type(f).__name__}, but one tensor with a row for each point is expected: return one "
            "tensor; the outputs of several tasks, each with a likelihood of its own, are a Pyro program, fn(x, y), "
            "with a site for each"
        )
    output = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else f"a {type(f).__name__}"
    remedy = "return one tensor, with a row for each point"
    if isinstance(f, Tensor) and f.dim() < 2:
        remedy = "return f.reshape(len(x), -1)"
    elif isinstance(f, Tensor):
        remedy = "put the points first, as in f.transpose(0, 1) or batch_first=True"
    return f"the net returns {output} for {num_rows} points but (points, outputs) is expected: {remedy}"


def output_width(model: BNN, x: Tensor) -> int:
    """Columns of the net's output for inputs ``x``, all positions of a row together; says what does not fit."""
    return math.prod(model.output_shape(x))


def _are_probabilities(f: Tensor) -> bool:
    """Whether every row (outputs,) of several is positive with sum one."""
    if f.shape[1] < 2 or not bool((f >= 0).all()):
        return False
    return torch.allclose(
        f.sum(1),
        torch.ones_like(f[:, 0]),
        atol=1e-4,
    )
