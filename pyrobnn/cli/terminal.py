"""What the command line prints, and how it refuses."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from pyrobnn.core.plain_text import register

EXIT_STATUS = (
    "Exit status: 0 done, 1 a method was skipped or failed (--strict: a verdict did), "
    "2 bad input, nothing was run, 130 stopped by Ctrl-C, what was found is kept."
)
USAGE_ERROR = 2
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are raised, to be printed in one line, and that takes no abbreviations."""

    def __init__(self, **options: str) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Signs that a terminal does not have are spelled in ASCII meanwhile, instead of ending the run."""
    wrappers = [
        stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)
    ]
    streams = {stream: stream.errors for stream in wrappers}
    try:
        for stream in streams:
            stream.reconfigure(errors=register())
        yield
    finally:
        for stream, before in streams.items():
            stream.reconfigure(errors=before)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print; a reader that has gone (``| head``, a closed terminal) must not cost the results."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def one_line(error: Exception) -> str:
    r"""What an error says, in one line and without the words of jsonargparse's own machinery.

    >>> one_line(ValueError("Parser key \"study.seed\": Expected a <class 'int'>. Got value: many"))
    "'study.seed': expected int, got many"
    >>> one_line(ValueError("Parser key \"init\": Expected a typing.Literal['a', 'b']. Got value: c"))
    "'init': expected one of ['a', 'b'], got c"
    >>> one_line(ValueError("Does not validate against any. Subtypes: [int, NoneType] Given value: x"))
    'expected int, got x'
    """
    text = " ".join(str(error).split())
    text = re.sub(r'^Parser key "([\w.]+)"(?: element \d+)?: ?', r"'\1': ", text)
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text.replace("typing.Literal", "one of "))
    text = re.sub(
        r"Does not validate .*Subtypes: \[(\w+), NoneType\].*Given value: ",
        r"Expected a \1. Got value: ",
        text,
    )
    return re.sub(r"Expected an? (.*?)\. Got value: (.*)$", r"expected \1, got \2", text)


@contextlib.contextmanager
def warnings_said() -> Iterator[None]:
    """Warnings of what is done inside as lines of their own, on the standard error."""
    with warnings.catch_warnings(
        record=True,
        action="always",
        category=UserWarning,
    ) as caught:
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(text, sys.stderr)


def check_file(out: Path, example: str) -> None:
    """Refuse, by a ValueError, a folder in place of a file, and a file in a folder that cannot be written to."""
    from pyrobnn.posterior.storage import check_writable

    if out.is_dir():
        raise ValueError(
            f"--out {str(out)!r} is a folder: name a file in it, {str(out / example)!r}"
        )
    check_writable(out.parent)
