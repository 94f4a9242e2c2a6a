"""scikit-learn estimators."""

from __future__ import annotations

import lazy_loader

# the command line's "auto" lies here too, and needs no scikit-learn
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
