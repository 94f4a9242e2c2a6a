"""Reference posteriors of small nets: what a method's answer can be held against, without running anything long.

``names()`` lists them, ``load(name)`` gives one: its model, its data, the moments, quantiles and some draws of its
function at probes, and its log evidence with the error; ``pb.diagnostics.fidelity`` compares.
"""

from pyrobnn.studies.reference import Reference, load, names

__all__ = ["Reference", "load", "names"]
