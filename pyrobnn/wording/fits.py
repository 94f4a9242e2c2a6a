"""What fits report, by code: a template of the values, or a function of them where the grammar depends on a number."""

from __future__ import annotations

from collections.abc import Callable

SENTENCES: dict[str, str | Callable[..., str]] = {
    "interrupted": "{method} was interrupted by Ctrl-C after {done} of {total} {unit}: this is not a finished fit",
}
