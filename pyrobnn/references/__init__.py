"""Reference posteriors of small nets: what a method's answer can be held against, without running anything long.

``names()`` lists them, ``load(name)`` gives one: its model, its data, the moments, quantiles and some draws of its
function at probes, its log evidence with the error, and ``compare(posterior)``.
"""

from pyrobnn.references.reference import Comparison, Reference, load, names

__all__ = ["Comparison", "Reference", "load", "names"]
