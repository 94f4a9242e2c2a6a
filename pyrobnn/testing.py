"""What a test suite asks of predictions, and simulation-based calibration of a method."""

from pyrobnn.diagnostics.assertions import assert_calibrated
from pyrobnn.studies.sbc import replicate, uniformity

__all__ = ["assert_calibrated", "replicate", "uniformity"]
