"""Words for terminals, pipes and files whose encoding lacks a sign: a code page of Windows, or ASCII."""

from __future__ import annotations

import codecs
import sys
import unicodedata

PLAIN = {
    "≥": ">=",
    "≤": "<=",
    "≈": "=",
    "±": "+/-",
    "×": "x",
    "·": "*",
    "−": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "…": "...",
    "√": "sqrt ",
    "∞": "inf",
}
_TABLE = str.maketrans(PLAIN)
ERRORS = "pyrobnn.plain"


def plain(text: str) -> str:
    """The text with mathematical signs spelled in ASCII; letters, which are names of a user's own, stay."""
    return text.translate(_TABLE)


def typeset(text: str) -> str:
    """For a page: comparisons and errors of a :func:`plain` text as signs again."""
    for sign in "≥≤±":
        text = text.replace(PLAIN[sign], sign)
    return text


def shown(text: str) -> str:
    """The text as the standard output can show it, for a ``__str__``: what its encoding lacks is spelled in ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, register()).decode(encoding)


def register() -> str:
    """Name of an error handler of encodings that spells a sign or letter in ASCII."""
    codecs.register_error(ERRORS, _spelled)
    return ERRORS


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_spell, error.object[error.start : error.end])), error.end


def _spell(sign: str) -> str:
    """ö as o, τ as tau, ² as 2; of what has no such spelling the escape."""
    if sign in PLAIN:
        return PLAIN[sign]
    script, _, name = unicodedata.name(sign, "").partition(" ")
    if script == "GREEK" and " LETTER " in name and "WITH" not in name:
        greek = name.rpartition(" ")[2].lower()
        return greek.capitalize() if name.startswith("CAPITAL") else greek
    parts = [each for each in unicodedata.normalize("NFKD", sign) if not unicodedata.combining(each)]
    letters = "".join(parts).replace("\N{FRACTION SLASH}", "/")
    if unicodedata.combining(sign):
        return ""
    return letters if letters.isascii() else sign.encode("ascii", "backslashreplace").decode()
