"""Experiments with many fits: comparisons on one data set, calibration by simulation."""
