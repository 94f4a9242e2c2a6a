"""Data sets: seeded generators with a known truth, loaders of real data, splitting and standardisation."""

from __future__ import annotations

import lazy_loader

# pandas and scikit-learn read tables, and nothing else here
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
