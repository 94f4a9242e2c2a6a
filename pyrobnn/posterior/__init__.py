"""The answer of every method: draws, predictions, an ArviZ tree, a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrobnn.lazy import late_names
from pyrobnn.posterior.posterior import Posterior

if TYPE_CHECKING:
    from pyrobnn.posterior import datatree as datatree
    from pyrobnn.posterior import storage as storage
else:  # xarray and ArviZ are for trees and files
    __getattr__, __dir__ = late_names(
        __name__, {"datatree": "pyrobnn.posterior.datatree", "storage": "pyrobnn.posterior.storage"}
    )

__all__ = ["Posterior"]
