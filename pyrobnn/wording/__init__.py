"""All sentences about fits and posteriors, and the text that an output can show: its encoding may lack a sign."""

from __future__ import annotations

import codecs
import sys
import unicodedata

PLAIN = {"≥": ">=", "≤": "<=", "≈": "=", "±": "+/-", "×": "x", "·": "*", "√": "sqrt ", "∞": "inf"}
PLAIN |= {"−": "-", "–": "-", "—": "-", "→": "->", "…": "...", "\N{FRACTION SLASH}": "/"}
ERRORS = "pyrobnn.plain"


def plain(text: str) -> str:
    """The text with mathematical signs spelled in ASCII; letters, which are names of a user's own, stay."""
    return "".join(PLAIN.get(sign, sign) for sign in text)


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
    """ö as o, τ as tau, ² as 2; of what has no such spelling the escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    words = []
    for sign in error.object[error.start : error.end]:
        name = unicodedata.name(sign, "")
        if name.startswith("GREEK") and " LETTER " in name and "WITH" not in name:
            word = name.rpartition(" ")[2].lower()
            words.append(word.capitalize() if " CAPITAL " in name else word)
            continue
        parts = plain(unicodedata.normalize("NFKD", plain(sign)))
        word = "".join(part for part in parts if not unicodedata.combining(part))
        words.append(word if word.isascii() else sign.encode("ascii", "backslashreplace").decode())
    return "".join(words), error.end
