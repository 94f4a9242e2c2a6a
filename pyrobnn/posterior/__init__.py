"""The answer of every method: draws, predictions, an ArviZ tree, a file.

Read in this order: posterior; prediction; approximation (q, and what other folders register); datatree with
program_tree and arrays; storage, streaming and rows; export with predictive_program, batching and exported_reader;
short_chains, arrival and chain_groups: chains that are run beside draws; invariance with probes and one_step: how draws
are tested.
"""

from __future__ import annotations

from pyrobnn.posterior.posterior import Posterior

__all__ = ["Posterior"]
