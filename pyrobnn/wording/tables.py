"""What is found in tables and rows, by code: templates, or functions of the values where the grammar needs it."""

from __future__ import annotations

from collections.abc import Callable


def _constant(features: list[str]) -> str:
    named = ", ".join(map(repr, features))
    subject = f"the feature {named} is" if len(features) == 1 else f"the features {named} are"
    return f"{subject} constant: nothing can be learned from it"


def _new_categories(column: str, rows: int, new: list[str]) -> str:
    listed = ", ".join(repr(each) if each else "a missing value" for each in new)
    return (
        f"the column {column!r} has categories that the training data have not, in {rows} rows ({listed}): they count "
        "as none of the known ones"
    )


TABLES: dict[str, str | Callable[..., str]] = {
    "constant_features": _constant,
    "few_calibration_rows": "{rows} rows cannot tell an outcome that is missed with probability {alpha:g}: the sets "
    "hold everything; {fewest} rows are the fewest",
    "far_rows": "{rows:,} of {total:,} rows lie far beyond the training data, most of them in {feature!r}, which goes "
    "from {low:.6g} to {high:.6g} there: predictions of such rows are the prior's rather than the data's",
    "equals_target": "the feature {feature!r} equals the target {target!r}: drop it",
    "rows_dropped": "{count} of {rows} rows have a missing value and are left out",
    "column_of_labels": "the column {column!r} is text with {values} different values in {rows} rows ({first!r} …): "
    "taken for a label of its rows and left out",
    "rare_categories": "the column {column!r} has {categories} categories: the {kept} most frequent have an input "
    "each, the other {rest} rows have none",
    "new_categories": _new_categories,
    "new_gaps": "the column {column!r} has missing values, in {rows} rows, and had none in the training data: the "
    "median there, {fill:g}, stands for them",
    "decimal_commas": "numbers have decimal commas and are read so",
    "unnamed_columns": "{count} of {total} columns have no name and are left out: name what is to be used",
}
