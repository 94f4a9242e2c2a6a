"""Experiments with many fits.

``study`` is a data set and a model; ``compare`` fits it by several methods, and ``saved_runs`` predicts with the fits.
``repair`` climbs a ladder of fits where one is sick. ``sbc`` is calibration by simulation, ``rehearsal`` the same on
data like the user's. ``reference`` has posteriors that are known.
"""
