"""The README's example runs as it stands, and its promises about files hold."""

from __future__ import annotations

import re
from pathlib import Path

import pyrobnn as pb

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.split()[0] in ("pass", "warn", "fail")


def test_every_method_of_the_table_exists_and_every_method_is_in_it():
    table = README.split("## Methods")[1].split("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    methods = {name for name in pb.__all__ if hasattr(getattr(pb, name), "fit")}
    assert named == methods
