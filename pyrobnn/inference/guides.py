"""Pyro's own guides as variational families, and SWAG as one of them: ``pb.SVI(guide=...)`` takes any AutoGuide."""

from __future__ import annotations

from pyrobnn.inference.nets.swag_moments import AutoSWAG
from pyrobnn.inference.vi.pyro_guides import GuideApproximation, GuideFactory, GuideFamily

__all__ = ["AutoSWAG", "GuideApproximation", "GuideFactory", "GuideFamily"]
