"""Jacobian rows of the network in chosen parameters: from layer products where possible, else by torch.func."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import generator
from pyrobnn.core.threads import Turn
from pyrobnn.model import BNN, NET, Density
from pyrobnn.model.fused import WrittenOut
from pyrobnn.model.gradient import REVERSE_ONLY, at_each
from pyrobnn.posterior.prediction import hooked

#: scalars of the largest intermediate kept at once, 64 MiB of float32
CHUNK_SCALARS = 2**24

#: network output (N, width) → columns (N, width, k) to pull back
Root = Callable[[Tensor], Tensor]

#: torch counts the levels of forward derivatives for the whole process
_FORWARD_DERIVATIVE = Turn()


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer ``name`` with ``index`` (out, in) of its matrix [``weight``, ``bias``] in the flat vector.

    A transposed convolution is two of these, its weight and its bias. ``is_product``: whether the matrix's gradient is
    a sum of outer products; of a scale, a shift and a grouped convolution it is formed row by row.
    """

    name: str
    index: Tensor
    weight: bool
    bias: bool
    is_product: bool = True

    @property
    def site_names(self) -> set[str]:
        """The sites whose coordinates these are."""
        names = [name for name in ("weight", "bias") if getattr(self, name)]
        return {_site_of(self.name, name) for name in names}


@dataclass(frozen=True, eq=False)
class Factors:
    """What one layer contributes for a batch.

    Attributes: ``inputs`` (N, T, in), the bias's ones last, T = positions that share the weight (1 for a plain linear
        layer); ``grads`` (N, k, T, out), k columns pulled back from the output.
    """

    inputs: Tensor
    grads: Tensor

    @property
    def is_outer(self) -> bool:
        """Whether the gradient of each datum is one outer product."""
        return self.inputs.shape[1] == 1

    @property
    def num_columns(self) -> int:
        """How many columns k were pulled back."""
        return self.grads.shape[1]

    @property
    def num_scalars(self) -> int:
        """Numbers that it takes, and those of its rows where they are not one product each."""
        rows = 0 if self.is_outer else self.rows().numel()
        return self.inputs.numel() + 2 * self.grads.numel() + rows

    def rows(self) -> Tensor:
        """Per-datum gradients of the matrix, (N, k, out, in)."""
        if self.is_outer:
            return self.grads.squeeze(2).unsqueeze(-1) * self.inputs.unsqueeze(1)
        return torch.einsum("nkto,nti->nkoi", self.grads, self.inputs)


@dataclass(frozen=True, eq=False)
class FormedRows:
    """What a layer that is no product contributes for a batch: per-datum gradients (N, k, out, in) of its matrix."""

    values: Tensor
    is_outer: ClassVar[bool] = False

    @property
    def num_columns(self) -> int:
        """How many columns k were pulled back."""
        return self.values.shape[1]

    @property
    def num_scalars(self) -> int:
        """Numbers that it takes."""
        return 3 * self.values.numel()

    def rows(self) -> Tensor:
        """The gradients themselves."""
        return self.values


#: layers whose parameters scale and shift what they normalize: of a channel, the second dimension, …
_BY_CHANNEL = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
#: … or of a place in the last dimensions
_BY_PLACE = (nn.LayerNorm, nn.RMSNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d)


def _find_layers(
    net: nn.Module, coordinates: Mapping[str, Tensor]
) -> tuple[list[Layer], list[str]]:
    """The supported layers that hold the sites with ``coordinates`` in the flat vector, and what they don't cover."""
    layers = []
    unsupported = []
    uncovered = dict(coordinates)
    for name, module in net.named_modules():
        places = _places(name, module, coordinates)
        for parameter in places:
            uncovered.pop(_site_of(name, parameter), None)
        # weights of another name, as of torch.nn.utils.spectral_norm, are those that the layer's own is computed of
        is_plain = places.keys() <= {"weight", "bias"}
        if places and is_plain and _is_supported(module):
            layers += _layers_of(name, module, places)
        elif places:
            unsupported.append(f"{name or 'the net itself'} ({type(module).__name__})")
    unsupported += [f"{site} (shared)" for site in uncovered]
    return layers, unsupported


def _site_of(module_name: str, parameter: str) -> str:
    """The site of a module's own parameter; the net itself has no name."""
    return f"{NET}{module_name}.{parameter}" if module_name else NET + parameter


def _places(
    module_name: str, module: nn.Module, coordinates: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Where the module's own parameters stand in the flat vector, by their names in the module."""
    places = {}
    for parameter, _ in module.named_parameters(recurse=False):
        site = _site_of(module_name, parameter)
        if site in coordinates:
            places[parameter] = coordinates[site]
    return places


def _layers_of(name: str, module: nn.Module, places: Mapping[str, Tensor]) -> list[Layer]:
    """The layer whose ``weight``, ``bias`` or both have these places in the flat vector; of a transposed one two."""
    has_weight = "weight" in places
    has_bias = "bias" in places
    if type(module) in _TRANSPOSED:
        layers = []
        if has_weight:  # (in, out, kernel): every input is multiplied by out · kernel weights
            matrix = places["weight"].flatten(1).T.contiguous()
            layers.append(Layer(name, matrix, weight=True, bias=False))
        if has_bias:
            column = places["bias"].unsqueeze(1)
            layers.append(
                Layer(
                    name,
                    column,
                    weight=False,
                    bias=True,
                    is_product=False,
                )
            )
        return layers
    parameters = [parameter for parameter in ("weight", "bias") if parameter in places]
    if type(module) in _BY_CHANNEL + _BY_PLACE:
        matrices = [places[parameter].reshape(-1, 1) for parameter in parameters]
        is_product = False
    else:
        matrices = [
            places[parameter].reshape(len(places[parameter]), -1) for parameter in parameters
        ]
        is_product = not isinstance(module, _CONVOLUTIONS) or module.groups == 1
    return [Layer(name, torch.cat(matrices, 1), has_weight, has_bias, is_product)]


def _is_supported(module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.padding_mode == "zeros"
    if isinstance(module, _TRANSPOSED) and type(module) in _TRANSPOSED:
        # with more padding of the output than a stride there are more patches of it than inputs
        is_plain = module.groups == 1 and module.padding_mode == "zeros"
        return is_plain and all(map(operator.lt, module.output_padding, module.stride))
    return type(module) is nn.Linear or type(module) in _BY_CHANNEL + _BY_PLACE


class _Pass(NamedTuple):
    """One pass of a net: its output ``f`` (N, width), and by layer what it was given and what it returned."""

    f: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def _recorded_pass(
    modules: Mapping[str, nn.Module],
    net: nn.Module,
    params: dict[str, Tensor],
    x: Tensor,
) -> _Pass:
    """A pass of the net from which its output can be pulled back to those of the modules.

    Raises:
        Refused: a module is not called exactly once.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    calls = dict.fromkeys(modules, 0)

    def remember(name: str, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        calls[name] += 1
        inputs[name] = args[0].detach()
        outputs[name] = out if out.requires_grad else out.detach().requires_grad_()
        # a later in-place activation must not touch what is remembered
        return outputs[name].clone()

    with hooked(modules, remember), torch.enable_grad(), WrittenOut():
        f = torch.func.functional_call(net, params, (x,))
    for name, count in calls.items():
        if count != 1:
            raise Refused(
                f"the layer {name!r} is called {count} times in one pass: its curvature is not a product"
            )
    return _Pass(f, inputs, outputs)


def _layer_factors(
    net: nn.Module,
    params: dict[str, Tensor],
    layers: Sequence[Layer],
    x: Tensor,
    root: Root | None,
) -> tuple[Tensor, list[Factors | FormedRows]]:
    """Outputs (N, width) of the net, and of every layer the factors of what ``root``, or the identity, pulls back."""
    modules = {layer.name: net.get_submodule(layer.name) for layer in layers}
    f, inputs, outputs = _recorded_pass(modules, net, params, x)
    value = f.detach()
    columns = _identity(value) if root is None else root(value)
    ends = [outputs[layer.name] for layer in layers]
    pulled = [
        torch.autograd.grad(
            f,
            ends,
            columns[:, :, k].contiguous(),
            retain_graph=True,
        )
        for k in range(columns.shape[-1])
    ]
    factors: list[Factors | FormedRows] = []
    for layer, layer_grads in zip(layers, zip(*pulled), strict=True):
        grads = torch.stack(layer_grads, 1)
        module = modules[layer.name]
        contribution = _factors if layer.is_product else _formed_rows
        factors.append(contribution(module, layer, inputs[layer.name], grads))
    return value, factors


def _identity(f: Tensor) -> Tensor:
    """Columns (N, width, width) that pull back the Jacobian itself."""
    return torch.eye(
        f.shape[1],
        dtype=f.dtype,
        device=f.device,
    ).expand(len(f), -1, -1)


def _few_columns(f: Tensor) -> Tensor:
    """Four columns (N, width, 4) that pull back sums of the rows of the Jacobian, the same at every call."""
    columns = torch.randn(
        f.shape[1],
        4,
        generator=generator(0),
    ).to(f)
    return columns.expand(len(f), -1, -1)


def _factors(
    module: nn.Module,
    layer: Layer,
    inputs: Tensor,
    grads: Tensor,
) -> Factors:
    """Bring inputs (N, …) and output gradients (N, k, …) of a layer that is a product to one shape."""
    n, k = grads.shape[:2]
    if isinstance(module, _TRANSPOSED):
        # each input is spread over a patch of the output, whose gradients come back to it
        patches = _patches(module, grads.flatten(0, 1))
        return Factors(inputs.flatten(2).transpose(1, 2), patches.unflatten(0, (n, k)))
    if isinstance(module, _CONVOLUTIONS):
        grads = grads.flatten(3).transpose(2, 3)
    else:
        grads = grads.reshape(n, k, -1, grads.shape[-1])
    multiplied = []
    if layer.weight:
        multiplied.append(_unfolded(module, inputs, n).to(grads.dtype))
    if layer.bias:
        multiplied.append(grads.new_ones(n, grads.shape[2], 1))
    return Factors(torch.cat(multiplied, -1), grads)


def _formed_rows(
    module: nn.Module,
    layer: Layer,
    inputs: Tensor,
    grads: Tensor,
) -> FormedRows:
    """Gradients (N, k, out, in) of a layer's matrix from its inputs (N, …) and output gradients (N, k, …)."""
    if isinstance(module, _BY_PLACE):
        num_places = module.weight.numel()
        grads = grads.reshape(*grads.shape[:2], -1, num_places)
    else:
        grads = grads.reshape(*grads.shape[:3], -1).transpose(2, 3)
    columns = []
    if layer.weight and isinstance(module, _CONVOLUTIONS):
        groups = (module.groups, -1)
        patches = _unfolded(module, inputs, len(inputs)).to(grads.dtype).unflatten(2, groups)
        by_group = torch.einsum("nktgo,ntgi->nkgoi", grads.unflatten(3, groups), patches)
        columns.append(by_group.flatten(2, 3))
    elif layer.weight:
        normalized = _without_scale(module, inputs)
        if isinstance(module, _BY_PLACE):
            normalized = normalized.reshape(len(inputs), 1, -1, grads.shape[-1])
        else:
            normalized = normalized.reshape(*normalized.shape[:2], -1).transpose(1, 2).unsqueeze(1)
        columns.append((grads * normalized).sum(2).unsqueeze(-1))
    if layer.bias:
        columns.append(grads.sum(2).unsqueeze(-1))
    return FormedRows(torch.cat(columns, -1))


def _without_scale(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a layer that normalizes gives before it scales and shifts."""
    own = dict(module.named_parameters(recurse=False))
    values = {"weight": inputs.new_ones(own["weight"].shape)}
    if "bias" in own:
        values["bias"] = inputs.new_zeros(own["weight"].shape)
    return torch.func.functional_call(module, values, (inputs,)).detach()


def _unfolded(module: nn.Module, inputs: Tensor, n: int) -> Tensor:
    """What the weight multiplies, (N, positions, in); of a convolution the patches."""
    if not isinstance(module, _CONVOLUTIONS):
        return inputs.reshape(n, -1, inputs.shape[-1])
    return _patches(module, inputs)


def _patches(module: nn.Module, images: Tensor) -> Tensor:
    """The patches (N, positions, channels · kernel) of a convolution's images (N, channels, …)."""
    # what the class of all four has, torch does not export
    module = cast(nn.Conv2d, module)
    sizes = [module.kernel_size, module.stride, module.dilation]
    padding = (0, 0) if isinstance(module.padding, str) else module.padding
    if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):  # of images of one row
        images = images.unsqueeze(2)
        padding = (0, padding[-1])
        sizes = [(1, *lengths) for lengths in sizes]
    kernel, stride, dilation = sizes
    if module.padding == "same":
        down, right = (d * (size - 1) for d, size in zip(dilation, kernel))
        images = nn.functional.pad(
            images, (right // 2, right - right // 2, down // 2, down - down // 2)
        )
    return nn.functional.unfold(images, kernel, dilation, padding, stride).transpose(1, 2)


def jvp(fn: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """``fn(point)`` and its derivative along ``direction``, see :func:`torch.func.jvp`.

    Where an operation has no forward derivative, it is the derivative of the reverse one, which is linear in what is
    pulled back: three passes in place of one.
    """
    if REVERSE_ONLY.get():
        return _jvp_by_reverse(fn, point, direction)
    with _FORWARD_DERIVATIVE:
        _load_decompositions()
        try:
            value, slope, *_ = torch.func.jvp(fn, (point,), (direction,))
        except NotImplementedError:
            return _jvp_by_reverse(fn, point, direction)
        return value, slope


def _jvp_by_reverse(
    fn: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    value, pull, *_ = torch.func.vjp(fn, point)
    push = torch.func.vjp(lambda out: pull(out)[0], torch.zeros_like(value))[1]
    (slope,) = push(direction)
    return value, slope


@functools.cache
def _load_decompositions() -> None:
    """The first forward derivative in a process compiles torch's decompositions, in silence here."""
    # WORKAROUND(torch<=2.14): by the deprecated torch.jit.script, of which Python warns every user from 2.14 on
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        point = torch.ones(())
        torch.func.jvp(torch.sin, (point,), (point,))


class NetworkJacobian:
    r"""The network around the mode, as a function of a subset of the flat unconstrained vector.

    .. math:: J_n = \partial f(x_n) / \partial z_{\mathrm{index}} \big|_{z^*}

    Args:
        model: the network.
        density: its density with point parameters held; gives the layout of the flat vector.
        mode: the flat vector z* (dim,).
        points: values of the point parameters, site → tensor.
        names: the ``net.`` sites that vary, at ``index`` (p,).

    Attributes: ``layers``, whose products make up the Jacobian, or none; ``products``, the layers whose own part they
        make up, and ``remainder``, the Jacobian in the other sites, if any; ``unsupported`` (modules without layer
        product); ``params`` (of the net at the mode).
    """

    remainder: NetworkJacobian | None = None

    def __init__(
        self,
        model: BNN,
        density: Density,
        mode: Tensor,
        points: dict[str, Tensor],
        names: Sequence[str],
    ):
        self.model = model
        self.density = density
        self.mode = mode
        constrained = density.constrain(mode)
        self.params = _net_values(model, model.initial_values() | points | constrained)
        sites = [site for site in density.sites if site.name in set(names)]
        self.sites = sites
        everything = torch.arange(density.dim, device=mode.device)
        self.index = torch.cat([everything[site.start : site.stop] for site in sites])
        places = {}
        constrained_names = []
        for site in sites:
            if torch.equal(constrained[site.name].reshape(-1), mode[site.start : site.stop]):
                places[site.name] = everything[site.start : site.stop].reshape(site.shape)
            else:
                constrained_names.append(f"{site.name} (constrained)")
        self.products, without_products = _find_layers(model.net, places)
        self.unsupported = constrained_names or without_products
        self.layers: list[Layer] = [] if constrained_names else list(self.products)
        self._points = points

    @property
    def size(self) -> int:
        """Number of coordinates p."""
        return len(self.index)

    def prefer_products(self, x: Tensor) -> None:
        """Use layer products if they give the true Jacobian at two points, else none.

        A parameter used outside its own layer's call would be missed by the products: two points tell. ``products`` are
        the layers whose own part is right.
        """
        points = x[:2]
        right, failure = self._right_products(points)
        if failure:
            self.unsupported = [failure]
        if self.unsupported:
            self.layers = []
        self._use_products(right)

    def keep_products(self, site_names: Collection[str]) -> None:
        """Take as products those of the layers that hold none of these sites, as an earlier look has told."""
        self._use_products(
            [layer for layer in self.products if layer.site_names.isdisjoint(site_names)]
        )

    def _use_products(self, layers: Sequence[Layer]) -> None:
        """Take these layers as ``products``, and the sites that none of them has as the remainder."""
        self.products = list(layers)
        covered = {name for layer in layers for name in layer.site_names}
        names = [site.name for site in self.sites if site.name not in covered]
        self.remainder = None
        if names and layers:
            self.remainder = NetworkJacobian(
                self.model,
                self.density,
                self.mode,
                self._points,
                names,
            )
            self.remainder.layers = []
            self.remainder.products = []

    def _right_products(self, points: Tensor) -> tuple[list[Layer], str]:
        """The layers whose products are their part of the Jacobian, and why they are not all, if they are not."""
        if not self.products:
            return [], ""
        with torch.no_grad():
            width = self.model.forward(self.params, points).shape[1]
        # of very many outputs a few sums, whose rows fit in memory
        root = _identity if 2 * width * self.size <= 8 * CHUNK_SCALARS else _few_columns
        try:
            factors = self.factors(points, root)[1]
            failure = ""
        except (ValueError, RuntimeError) as error:
            failure = str(error)
        with torch.no_grad():
            columns = root(self.model.forward(self.params, points))
        true = self._rows_by_vjp(points, columns)
        if not failure:
            right = [
                layer
                for layer, factor in zip(self.products, factors)
                if self._is_part(layer, factor, true)
            ]
            if len(right) < len(self.products):
                failure = "a layer whose parameters are also used elsewhere"
            return right, failure
        right = []
        everything = self.products
        for layer in everything:
            self.products = [layer]
            try:
                (factor,) = self.factors(points, root)[1]
            except (ValueError, RuntimeError):
                continue
            if self._is_part(layer, factor, true):
                right.append(layer)
        self.products = everything
        return right, failure

    def _is_part(
        self,
        layer: Layer,
        factor: Factors | FormedRows,
        true: Tensor,
    ) -> bool:
        """Whether a layer's rows are its columns of the true ones (N, k, p)."""
        columns = true[:, :, self.positions(layer).reshape(-1)]
        rows = factor.rows().flatten(2)
        if rows.shape != columns.shape:
            return False
        scale = true.abs().amax().clamp_min(1e-30)
        error = float((rows - columns).abs().amax() / scale)
        return error < 1e3 * torch.finfo(true.dtype).eps ** 0.75

    def factors(
        self, x: Tensor, root: Root | None = None
    ) -> tuple[Tensor, list[Factors | FormedRows]]:
        """Outputs (N, width) and the factors of ``products``, of the Jacobian or of its product with ``root(f)``."""
        params = {name.removeprefix(NET): value for name, value in self.params.items()}
        return _layer_factors(self.model.eval_net, params, self.products, x, root)

    def linear_head(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Output (N, width) and the layer's inputs (N, in) where one layer varies, linear, and its output is f.

        None of any other net: where something follows the layer, or it is given more than one vector for a row.
        """
        if len(self.layers) != 1:
            return None
        layer = self.layers[0]
        module = self.model.eval_net.get_submodule(layer.name)
        if not isinstance(module, nn.Linear) or not layer.weight:
            return None
        params = {name.removeprefix(NET): value for name, value in self.params.items()}
        outputs = []
        inputs = []
        for piece in x.split(max(1, CHUNK_SCALARS // max(x[:1].numel() + layer.index.shape[1], 1))):
            recorded = _recorded_pass({layer.name: module}, self.model.eval_net, params, piece)
            layer_inputs = recorded.inputs[layer.name]
            is_output = torch.equal(recorded.f, recorded.outputs[layer.name])
            if layer_inputs.dim() != 2 or not is_output:
                return None
            outputs.append(recorded.f.detach())
            inputs.append(layer_inputs)
        # the values may agree and the gradients not: what reaches the layer must be what was pulled back
        f, (contribution,) = self.factors(x[:2], _few_columns)
        factors = cast(Factors, contribution)
        if not torch.equal(factors.grads.squeeze(2).mT, _few_columns(f)):
            return None
        all_inputs = torch.cat(inputs)
        if layer.bias:
            all_inputs = nn.functional.pad(all_inputs, (0, 1), value=1.0)
        return torch.cat(outputs), all_inputs

    def factor_scalars(self, x: Tensor) -> int:
        """Numbers that the factors of one point take: a convolution's diagonal forms its rows."""
        return sum(factor.num_scalars for factor in self.factors(x[:1])[1])

    def pass_scalars(self, x: Tensor) -> int:
        """Numbers that the rows of one point take by torch.func, what the modules of the net return included."""
        params = {name.removeprefix(NET): value for name, value in self.params.items()}
        net = self.model.eval_net
        scalars = 0

        def count(_name: str, _args: tuple[Tensor, ...], out: Tensor | tuple) -> None:
            nonlocal scalars
            outputs = out if isinstance(out, tuple) else (out,)
            scalars += sum(value.numel() for value in outputs if isinstance(value, Tensor))

        leaves = {
            name: module for name, module in net.named_modules() if not list(module.children())
        }
        with hooked(leaves, count), torch.no_grad(), WrittenOut():
            f = torch.func.functional_call(net, params, (x[:1],))
        width = f.shape[-1]
        return (2 + width) * scalars + 4 * width * self.size

    def rows(self, x: Tensor, root: Root | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (N, width) and rows (N, k, p): the Jacobian, or its product with ``root(f)`` (N, width, k)."""
        if self.layers:
            f, factors = self.factors(x, root)
            return f, self.joined(factors)
        with torch.no_grad():
            f = self.model.forward(self.params, x)
            columns = _identity(f) if root is None else root(f)
        return f, self._rows_by_vjp(x, columns)

    def chunks(self, x: Tensor, scalars_per_point: int | None = None) -> Iterator[Tensor]:
        """Pieces of ``x`` whose rows stay within the memory bound."""
        yield from x.split(max(1, CHUNK_SCALARS // max(scalars_per_point or self.size * 2, 1)))

    def positions(self, layer: Layer) -> Tensor:
        """Where the layer's matrix stands among the coordinates (p,), (out, in)."""
        # index is sorted: sites come in the order of the flat vector
        return torch.searchsorted(self.index, layer.index.contiguous())

    def joined(self, factors: list[Factors | FormedRows]) -> Tensor:
        """The rows (N, k, p) that the layers' factors are."""
        pieces = [factor.rows().flatten(2) for factor in factors]
        rows = pieces[0].new_empty(*pieces[0].shape[:2], self.size)
        for layer, piece in zip(self.layers, pieces):
            rows[:, :, self.positions(layer).reshape(-1)] = piece
        return rows

    def output(self, z: Tensor, x: Tensor) -> Tensor:
        """Network output (N, width) at subset coordinates ``z`` (p,), differentiable."""
        pieces = zip(self.sites, z.split([site.size for site in self.sites]))
        moved = {
            site.name: site.transform(piece.reshape(site.unconstrained_shape))
            for site, piece in pieces
        }
        return self.model.forward(self.params | moved, x)

    def _rows_by_vjp(self, x: Tensor, columns: Tensor) -> Tensor:
        """Rows (N, k, p) of any net, by torch.func, point by point: the ``columns`` (N, width, k) pulled back."""
        centre = self.mode[self.index]

        def pulled_back(point: Tensor, column: Tensor) -> Tensor:
            def output(z: Tensor) -> Tensor:
                return self.output(z, point.unsqueeze(0)).squeeze(0)

            pull = torch.func.vjp(output, centre)[1]
            return torch.func.vmap(lambda v: pull(v)[0])(column.T)

        return at_each(pulled_back, x, columns).detach()


def _net_values(model: BNN, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the values that are parameters of the net, by site."""
    known = {NET + name for name, _ in model.net.named_parameters()}
    return {name: values[name].detach() for name in values if name in known}
