"""Bayesian neural networks on Pyro: declare once, infer by any method, and know whether to trust the answer."""

from __future__ import annotations

import lazy_loader

__version__ = "0.3.0"

# torch and Pyro take two seconds to import, ArviZ, matplotlib and scikit-learn two more: the command line's help needs
# none of them, a fit the first two. The names and where they are defined: __init__.pyi
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
