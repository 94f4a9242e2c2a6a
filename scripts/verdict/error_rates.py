"""How often each check is wrong, by the study's records: false alarms, and the share of its faults that it sees."""

from __future__ import annotations

from verdict.faults import SICK, Fault


def rates(rows: list[dict]) -> dict[str, dict[str, int]]:
    """Of each check: on what share of healthy posteriors it warns or fails, and of the faults that it is for."""
    well = [row for row in rows if row["healthy"]]
    names: set[str] = set()
    for row in rows:
        names |= row["checks"].keys()
    rates_of_checks = {}
    for name in sorted(names):
        # some checks say nothing where nothing is wrong: they were made of every healthy case
        silent = all(_spoke(row, name, absent="warn") for row in well)
        healthy = _alarms(well, name, silent)
        planted = [row for row in rows if name in SICK.get(row["kind"], Fault()).checks]
        # one that was not made, as leave-one-out whose weights are useless, has let nothing pass
        sick = _alarms(planted, name, silent)
        if any(healthy) or sick:
            rates_of_checks[name] = {
                "healthy": len(healthy),
                "false_alarms": sum(healthy),
                "sick": len(sick),
                "seen": sum(sick),
            }
    return rates_of_checks


def _alarms(rows: list[dict], name: str, silent: bool) -> list[bool]:
    """Whether a check warned or failed, for each row that has it; all rows where a check is silent on a pass."""
    return [_spoke(row, name) for row in rows if silent or name in row["checks"]]


def _spoke(row: dict, name: str, absent: str = "pass") -> bool:
    """Whether a check warned or failed; one that the row lacks has the status ``absent``."""
    return row["checks"].get(name, [absent])[0] in ("warn", "fail")
