"""What to change of a model whose intervals do not fit its errors: never what it has already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pyrobnn.diagnostics.evidence import Evidence

#: what a likelihood calls a parameter that makes its tails, and one that the net gives for every input
_TAILS, BY_INPUT = "df", "by input"
_OF_NUMBERS = ("", "gaussian", "student_t", "mixture_density")


@dataclass(frozen=True)
class Advice:
    """What a tree says of its model, and what that leaves to be tried.

    Args:
        noise: parameter of the likelihood → "fixed", "learned", "inferred" or "by input"; None where nobody says.
        likelihood: its kind, empty where nobody says.
        exact: whether the draws are of the posterior itself, so that none is richer.
    """

    noise: Mapping[str, str] | None = None
    likelihood: str = ""
    exact: bool = False

    @classmethod
    def of(cls, evidence: Evidence) -> Advice:
        """Of the model and the method of a tree."""
        noise = evidence.json("noise")
        said = {str(name): str(how) for name, how in noise.items()} if isinstance(noise, dict) else None
        return cls(said, evidence.likelihood, evidence.claim == "exact")

    @property
    def width(self) -> set[str]:
        """How the parameters that make the width of the noise come about."""
        return {how for name, how in (self.noise or {}).items() if name != _TAILS}

    def intervals(self, side: Literal["narrow", "wide"]) -> str:
        """What to do where intervals are too narrow or too wide."""
        found = self._narrow() if side == "narrow" else self._wide()
        return f"Intervals are too {side}: {_either(found)}."

    def tails(self) -> str:
        """What to do where errors have heavier tails than the noise."""
        return f"The errors have heavy tails: {_either(self._heavier() or [*self._varying(), _LACKS])}."

    def by(self, name: str) -> str:
        """What to do where the size of the errors depends on a covariate."""
        if BY_INPUT in self.width:
            return (
                f"The noise that the net gives does not follow how the size of the errors depends on {name}: use a "
                "more flexible network or a wider prior"
            )
        if varying := self._varying():
            return f"The noise depends on {name}: {varying[0]}"
        return f"The size of the errors depends on {name} otherwise than this likelihood says: use another"

    def _narrow(self) -> list[str]:
        richer = [] if self.exact else ["use a richer posterior"]
        return [*self._inferred(), *richer, *self._heavier()] or [*self._varying(), _LACKS]

    def _wide(self) -> list[str]:
        found = [] if BY_INPUT in self.width else self._inferred() or [*self._varying(), *self._heavier()]
        return [*found, "tighten the prior on the noise" if self.noise != {} else "tighten the prior"]

    def _inferred(self) -> list[str]:
        if self.noise is None:
            return ["let the noise be inferred where it is fixed"]
        return ["let the noise be inferred"] if self.width & {"fixed", "learned"} else []

    def _heavier(self) -> list[str]:
        how = (self.noise or {}).get(_TAILS)
        if how is not None:
            return [f"let the degrees of freedom be inferred ({_TAILS})"] if how != "inferred" else []
        if self.likelihood == "poisson":
            return ["use a likelihood of counts that come in clusters (NegativeBinomial)"]
        if self.likelihood == "mixture_density":
            return ["use more components"]
        return ["use a heavy-tailed likelihood (StudentT)"] if self.likelihood in _OF_NUMBERS else []

    def _varying(self) -> list[str]:
        of_numbers = self.likelihood in _OF_NUMBERS and BY_INPUT not in self.width
        return ["use a heteroskedastic likelihood (HeteroskedasticGaussian)"] if of_numbers else []


_LACKS = "look for what the model lacks (inputs, units of the network, rows that depend on one another)"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])}, or {options[-1]}"
