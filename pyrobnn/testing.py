"""What a test suite asks of predictions."""

from pyrobnn.diagnostics.assertions import assert_calibrated

__all__ = ["assert_calibrated"]
