"""Which rows to ask for next: scores of candidates as plain functions of a prediction, one by one or in batches."""

from pyrobnn.posterior.acquisition import (
    bald,
    batch,
    epig,
    expected_improvement,
    function,
    thompson,
    values,
)

__all__ = ["function", "values", "thompson", "expected_improvement", "bald", "epig", "batch"]
