"""Jacobian rows of the network in chosen parameters: from layer products where possible, else by torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pyrobnn.density import Density
from pyrobnn.gradient import at_each
from pyrobnn.inference.curvature.layers import Capture, Factors, Layer, find_layers
from pyrobnn.model import BNN, NET

Root = Callable[[Tensor], Tensor]

#: scalars of the largest intermediate kept at once, 64 MiB of float32
CHUNK_SCALARS = 2**24


class NetworkJacobian:
    r"""The network around the mode, as a function of a subset of the flat unconstrained vector.

    .. math:: J_n = \partial f(x_n) / \partial z_{\mathrm{index}} \big|_{z^*}

    Args:
        model: the network.
        density: its density with point parameters held; gives the layout of the flat vector.
        mode: the flat vector z* (dim,).
        points: values of the point parameters, site → tensor.
        names: the ``net.`` sites that vary.

    Attributes: ``index`` (p,) coordinates in the flat vector; ``layers``; ``unsupported`` (modules without layer
        product); ``params`` (every parameter of the net at the mode, by site).
    """

    def __init__(
        self, model: BNN, density: Density, mode: Tensor, points: dict[str, Tensor], names: Sequence[str]
    ):
        self.model, self.density, self.mode = model, density, mode
        constrained = density.constrain(mode)
        known = {NET + name for name, _ in model.net.named_parameters()}
        values = model.initial_values() | points | constrained
        self.params = {name: values[name].detach() for name in values if name in known}
        sites = [site for site in density.sites if site.name in set(names)]
        self.sites = sites
        everything = torch.arange(density.dim, device=mode.device)
        self.index = torch.cat([everything[site.start : site.stop] for site in sites])
        plain = [
            torch.equal(constrained[site.name].reshape(-1), mode[site.start : site.stop]) for site in sites
        ]
        coordinates = (
            {site.name: everything[site.start : site.stop].reshape(site.shape) for site in sites}
            if all(plain)
            else {}
        )
        self.layers, self.unsupported = find_layers(model.net, coordinates)
        if not all(plain):
            self.unsupported = [f"{s.name} (constrained)" for s, same in zip(sites, plain) if not same]

    @property
    def size(self) -> int:
        """Number of coordinates p."""
        return len(self.index)

    def prefer_products(self, x: Tensor) -> None:
        """Use layer products if they give the true Jacobian at two points, else none.

        A parameter used outside its own layer's call would be missed by the products: two points tell.
        """
        if self.unsupported:
            self.layers = []
            return
        few = x[:2]
        try:
            _, factors = self.factors(few)
        except (ValueError, RuntimeError) as error:
            self.unsupported, self.layers = [str(error)], []
            return
        product, true = self._joined(factors), self._general(few, self._identity(few))
        scale = true.abs().amax().clamp_min(1e-30)
        if not float((product - true).abs().amax() / scale) < 1e3 * torch.finfo(true.dtype).eps ** 0.75:
            self.unsupported, self.layers = ["a layer whose parameters are also used elsewhere"], []

    def factors(self, x: Tensor, root: Root | None = None) -> tuple[Tensor, list[Factors]]:
        """Outputs (N, width) and every layer's factors, see :class:`pyrobnn.inference.curvature.layers.Capture`."""
        params = {name.removeprefix(NET): value for name, value in self.params.items()}
        return Capture(self.model.eval_net, params, self.layers).factors(x, root=root)

    def rows(self, x: Tensor, root: Root | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (N, width) and rows (N, k, p): the Jacobian, or its product with ``root(f)`` (N, width, k)."""
        if self.layers:
            f, factors = self.factors(x, root)
            return f, self._joined(factors)
        with torch.no_grad():
            f = self.model.forward(self.params, x)
            columns = self._identity(x, f) if root is None else root(f)
        return f, self._general(x, columns)

    def chunks(self, x: Tensor, scalars_per_point: int | None = None) -> Iterator[Tensor]:
        """Pieces of ``x`` whose rows stay within the memory bound."""
        per_point = scalars_per_point or self.size * 2
        yield from x.split(max(1, CHUNK_SCALARS // max(per_point, 1)))

    def positions(self, layer: Layer) -> Tensor:
        """Where the layer's matrix sits among the rows' p columns, (rows, columns)."""
        # index is sorted: sites come in the order of the flat vector
        return torch.searchsorted(self.index, layer.index.contiguous())

    def _joined(self, factors: list[Factors]) -> Tensor:
        n, k = factors[0].grads.shape[:2]
        rows = factors[0].grads.new_empty(n, k, self.size)
        for layer, factor in zip(self.layers, factors):
            rows[:, :, self.positions(layer).reshape(-1)] = factor.rows().reshape(n, k, -1)
        return rows

    def _identity(self, x: Tensor, f: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            f = self.model.forward(self.params, x) if f is None else f
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(x), -1, -1)

    def output(self, z: Tensor, x: Tensor) -> Tensor:
        """Network output (N, width) at subset coordinates ``z`` (p,), differentiable."""
        values, start = dict(self.params), 0
        for site in self.sites:
            piece = z[start : start + site.size].reshape(site.unconstrained_shape)
            values[site.name] = site.transform(piece)
            start += site.size
        return self.model.forward(values, x)

    def _general(self, x: Tensor, columns: Tensor) -> Tensor:
        centre = self.mode[self.index]

        def one(point: Tensor, column: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda z: self.output(z, point.unsqueeze(0)).squeeze(0), centre)[1]
            return torch.func.vmap(lambda v: pull(v)[0])(column.T)

        return at_each(one, x, columns).detach()
