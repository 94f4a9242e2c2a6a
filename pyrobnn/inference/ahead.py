"""The steps of the methods to come, compiled by another process while this one runs.

Half of compiling is a C++ compiler that a Python process waits for. Another process runs every fit up to its first
step: what it has compiled lies in inductor's cache on disk, where this process finds it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyrobnn.compile import OnlyCompiled, only_compiling

_JOBS = "jobs.pickle"


class Ahead:
    """Context in which the fits of several methods find their steps compiled.

    Nothing depends on it: a step that the other process has not compiled is compiled here.

    Args:
        model, x, y: as the fits will get them.
        methods: name → configuration and arguments of ``fit``, in the order in which they will be asked for; those
            that compile nothing are left to their fits.
        seed: as the fits will get it.
    """

    def __init__(
        self, model: Any, x: Any, y: Any, methods: Mapping[str, tuple[Any, dict[str, Any]]], seed: int
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pyrobnn-ahead-")
        self._path = Path(self._folder.name)
        data = {"x": x, "y": y, "seed": seed}
        compiling = {name: each for name, each in methods.items() if getattr(each[0], "compile", False)}
        jobs = (torch.get_num_threads(), model, data, compiling)
        (self._path / _JOBS).write_bytes(pickle.dumps(jobs))
        self._names = set(compiling)
        # modules are looked for where this process does: not in the folder it happens to be started in
        places = os.pathsep.join(place for place in sys.path if place)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pyrobnn.inference.ahead", str(self._path)],
            env={**os.environ, "PYTHONPATH": places},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        # its C++ compiler is left to finish its file: half of one would be in the cache
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def wait(self, name: str) -> None:
        """Until the step of that method is compiled, if the other process is at it; else it is left to this one."""
        if name in self._names and not _take(self._path, name):
            while self._process.poll() is None and not (self._path / f"{name}.done").exists():
                time.sleep(0.02)


def _take(folder: Path, name: str) -> bool:
    """Whether the caller is the first of the two processes to take a method."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(folder: Path) -> None:
    """The other process: every fit up to its first step."""
    threads, model, data, methods = pickle.loads((folder / _JOBS).read_bytes())
    torch.set_num_threads(threads)  # the code that is generated knows it
    for name, (method, arguments) in methods.items():
        if _take(folder, name):
            # whatever is wrong, the fit itself will say it
            with warnings.catch_warnings(action="ignore"), contextlib.suppress(OnlyCompiled, Exception):
                with only_compiling():
                    method.fit(model, **data, **arguments)
            (folder / f"{name}.done").touch()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
