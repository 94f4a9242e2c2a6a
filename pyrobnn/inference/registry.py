"""Which methods there are, and which options of ``fit`` each has a use for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyrobnn.core.checks import Refused

if TYPE_CHECKING:
    from pyrobnn.inference.method import Method

#: options of ``fit`` that a method may have no use for: where they are given to it all the same, it refuses
OPTIONAL = ("init", "until_ess", "checkpoint", "stream_to")


@dataclass(frozen=True)
class Registered:
    """A method as the command line knows it.

    Attributes: ``cls``; ``standard``, whether ``pyrobnn compare`` runs it where nobody names methods; ``full`` and
    ``quick``, the options with which it makes it in a full run, and those that differ in a quick one (``num_draws`` is
    handed to ``fit``).
    """

    cls: type[Method]
    standard: bool
    full: Mapping[str, Any]
    quick: Mapping[str, Any]


#: every method there is, by its name on the command line, in the order of registration
METHODS: dict[str, Registered] = {}


def check_use(method: Method, option: str) -> None:
    """Refuse an option of ``fit`` that the method has no use for.

    Raises:
        Refused: naming the methods that have.
    """
    if option not in method.uses:
        users = [each.cls.__name__ for each in METHODS.values() if option in each.cls.uses]
        whose = ", ".join(users) if len(users) <= 3 else "other methods"
        raise Refused(f"{option!r} is an option of {whose}, not of {type(method).__name__}: leave it out")
