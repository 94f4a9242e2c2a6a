"""All sentences about fits and posteriors: codes and numbers come in, plain English goes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyrobnn.wording.fits import SENTENCES


def sentence(code: str, values: Mapping[str, Any]) -> str:
    """The sentence of a finding.

    Raises:
        KeyError: no sentence is known for the code, or it shows a value that is missing.
    """
    template = SENTENCES[code]
    return template(**values) if callable(template) else template.format(**values)
