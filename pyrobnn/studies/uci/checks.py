"""What a random part of the records, made a second time by later code, says about those that were not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import beta

from pyrobnn.studies.uci.plan import MOST_NATS, MOST_RMSE, differences, largest

#: cells of a method that must be met, all of them, before the others are shown as checked
FEWEST = 5
CONFIDENCE = 0.95

Record = Mapping[str, Any]


def checked_cell(record: Record, again: Record, among: Sequence[str]) -> dict[str, Any]:
    """The record of one cell made again.

    Args:
        record: the cell as recorded.
        again: the same work by the code of today.
        among: the data sets whose records the cell was drawn from.

    Returns:
        Data set, split, method and rule; ``made`` and ``code``, the code of then and of now, with ``made_commit`` and
        ``commit``; ``nats`` and ``rmse``, the differences as in :func:`~pyrobnn.studies.uci.plan.largest`; ``met``.
    """
    nats, rmse = largest(record, again)
    return {
        **{name: record[name] for name in ("dataset", "split", "method", "rule")},
        "among": sorted(among),
        "made": record.get("code"),
        "made_commit": record.get("commit"),
        "code": again["code"],
        "commit": again["commit"],
        "finished_at": again["finished_at"],
        "nats": round(nats, 6),
        "rmse": round(rmse, 6),
        "met": not differences(record, again),
    }


@dataclass(frozen=True)
class Checked:
    """What the cells of a method, drawn at random and made again by one code, say about the rest.

    ``num_cells`` were drawn of those that other code had made, ``num_met`` of them met within the tolerance; ``nats``
    and ``rmse`` are the largest differences; ``commits`` where the checks ran.
    """

    num_cells: int
    num_met: int
    nats: float
    rmse: float
    commits: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Enough cells, and every one of them met."""
        return self.num_cells >= FEWEST and self.num_met == self.num_cells

    @property
    def bound(self) -> float:
        r"""Upper limit, at 95 % confidence, of the share of the method's cells that would not be met.

        With n cells of n met it is :math:`1 - 0.05^{1/n}`.

        Reference: The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial (Clopper & Pearson,
        1934).
        """
        failed = self.num_cells - self.num_met
        return 1.0 if not self.num_met else float(beta.ppf(CONFIDENCE, failed + 1, self.num_met))

    def describe(self, method: str) -> str:
        """For the lines below a table."""
        return (
            f"{method}: {self.num_met} of {self.num_cells} cells met at {', '.join(self.commits)} "
            f"(largest differences {self.nats:.3f} nats, {100 * self.rmse:.1f} % of the RMSE), "
            f"so at most {100 * self.bound:.0f} % of its cells would not be"
        )


def evidence(checks: Sequence[Record], dataset: str, method: str, rule: str, code: str) -> Checked | None:
    """The cells of a method that today's code made again and other code had made; None where there are none.

    Args:
        checks: of :func:`checked_cell`; of a cell that was made again twice by one code, the last counts.
        dataset: cells that were drawn from other data sets alone say nothing about this one.
        method, rule: the method and its rule.
        code: today's, as in :func:`~pyrobnn.studies.uci.fits.code_of`.
    """
    cells = {
        (check["dataset"], check["split"]): check
        for check in checks
        if (check["method"], check["rule"], check["code"]) == (method, rule, code)
        and dataset in check["among"]
        and check["made"] != code
    }
    if not cells:
        return None
    found = list(cells.values())
    return Checked(
        len(found),
        sum(check["met"] for check in found),
        max(abs(check["nats"]) for check in found),
        max(abs(check["rmse"]) for check in found),
        tuple(sorted({check["commit"] or "no commit" for check in found})),
    )


#: what the sign of a checked cell means; the counts follow it
MEANING = (
    f"made by earlier code and checked by today's: at least {FEWEST} cells of the method, drawn at random from those "
    f"of earlier code, were made again, and each lies within {MOST_NATS:g} nats and {100 * MOST_RMSE:g} % of the RMSE. "
    f"That bounds the share of cells that today's code would change ({100 * CONFIDENCE:g} % confidence); of a single "
    "cell that was not drawn it proves nothing"
)
