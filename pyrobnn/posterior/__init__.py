"""The answer of every method: draws, predictions, an ArviZ tree, a file."""

from __future__ import annotations

from pyrobnn.posterior.posterior import Posterior

__all__ = ["Posterior"]
