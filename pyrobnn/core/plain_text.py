"""Text that an output can show: its encoding may lack a sign."""

from __future__ import annotations

import codecs
import sys

#: mathematical sign → its spelling in ASCII
PLAIN = {
    "≥": ">=",
    "≤": "<=",
    "≈": "=",
    "±": "+/-",
    "×": "x",
    "·": "*",
    "√": "sqrt ",
    "∞": "inf",
    "−": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "…": "...",
    "\N{FRACTION SLASH}": "/",
}
#: name under which `register` makes the error handler known
ERRORS = "pyrobnn.plain"


def plain(text: str) -> str:
    """The text with mathematical signs spelled in ASCII; letters, which are names of a user's own, stay."""
    return "".join(PLAIN.get(sign, sign) for sign in text)


def shown(text: str) -> str:
    """The text as the standard output can show it, for a ``__str__``: what its encoding lacks is spelled in ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, register()).decode(encoding)


def register() -> str:
    """Name of an error handler of encodings that spells a sign or letter in ASCII."""
    codecs.register_error(ERRORS, _spelled)
    return ERRORS


def _spelled(error: UnicodeError) -> tuple[str, int]:
    """Signs as `plain` has them, of other letters the escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = plain(error.object[error.start : error.end])
    return text.encode("ascii", "backslashreplace").decode(), error.end
