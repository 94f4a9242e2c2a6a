"""Execute the notebooks of ``notebooks/`` from top to bottom and store the result, figures included.

    python scripts/run_notebooks.py                      all of them, in place
    python scripts/run_notebooks.py 01 04 --timeout 300  those whose names start so
    python scripts/run_notebooks.py --smoke              short runs of copies; nothing is written

A notebook reads the environment variable ``PYROBNN_SMOKE``: with ``1`` it takes few steps and few draws. The notebooks
run one after the other, each in a kernel of the Python that runs this script; short runs share one, which is cleared
between them. The first failure of each is reported with its cell, and the exit status is 1 if there was any. Figures
have twice the resolution at which they are shown. Those of cells tagged ``gallery`` are the pictures of
``docs/methods.md``.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
sys.path.insert(0, str(FOLDER.parent / "docs/_ext"))

from retina import in_palette  # noqa: E402

SMOKE = "PYROBNN_SMOKE"
GALLERY = "gallery"


class ThisPython(AsyncKernelManager):
    """Starts the kernel with the running interpreter, whatever kernels happen to be registered on the machine."""

    #: the kernel's options
    options = ["--InlineBackend.figure_format=retina"]

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            "--log-level=40",
            *self.options,
        ]
        return KernelSpec(
            argv=argv,
            display_name="Python 3",
            language="python",
        )


#: few moves of the chains beside an approximation, draws for the ELBO and rounds of a search at its end
SHORTER = (
    "import pyrobnn.inference.point_methods as search, pyrobnn.inference.vi.elbo_value as elbo, "
    "pyrobnn.posterior.invariance as moves; "
    "moves._BUDGET = 0.1; elbo._MAX_ELBO_DRAWS = 256; "
    "search._VALLEY_ROUNDS = search._ROUNDS_TO_REST = 2; del search, elbo, moves"
)


#: what leaves nothing of a notebook to the next one in its kernel
_CLEARED = """%reset -f
import matplotlib.pyplot, pyro
matplotlib.pyplot.close("all")
matplotlib.rcdefaults()
pyro.clear_param_store()
%reset -f"""


class ForSmoke(ThisPython):
    """The same for short runs, with small figures."""

    options = ["--InlineBackend.figure_format=png", f"--IPKernelApp.exec_lines={SHORTER}"]


def chosen(names: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """The notebooks whose file names start with one of the names; all of them when none is given."""
    notebooks = sorted(folder.glob("*.ipynb"))
    stems = [Path(name).name.removesuffix(".ipynb") for name in names]
    for stem in stems:
        if not any(path.stem.startswith(stem) for path in notebooks):
            raise ValueError(
                f"no notebook starts with {stem!r}: {', '.join(path.stem for path in notebooks)}"
            )
    return [path for path in notebooks if not stems or path.stem.startswith(tuple(stems))]


class Kernel:
    """Runs notebooks of one folder: each in a kernel of its own, or in short runs one after the other in the same.

    Args:
        smoke: whether the runs are short.
        timeout: seconds that a single cell may take.
    """

    def __init__(self, smoke: bool, timeout: int) -> None:
        self.smoke = smoke
        self.timeout = timeout
        self._client: NotebookClient | None = None

    def run(self, notebook: NotebookNode, path: Path) -> None:
        """Execute the notebook in the folder of ``path``; RuntimeError names a cell that fails or takes too long."""
        client = self._client
        if client is None:
            client = self._client = self._new_client(path.parent)
        else:
            clearing = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_CLEARED)])
            self._execute(client, clearing)
        reached = [0]
        client.on_cell_start = lambda cell, cell_index: reached.__setitem__(0, cell_index)
        try:
            self._execute(client, notebook)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            self.close()
            first_line = notebook.cells[reached[0]].source.strip().partition("\n")[0]
            raise RuntimeError(f"{path.name}, cell {reached[0]} ({first_line}): {error}") from error
        if not self.smoke:
            self.close()

    def close(self) -> None:
        """End the kernel; the next notebook has a new one."""
        if self._client is not None:
            with contextlib.suppress(DeadKernelError):
                self._execute(self._client, nbformat.v4.new_notebook(), cleanup_kc=True)
        self._client = None

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _execute(
        self,
        client: NotebookClient,
        notebook: NotebookNode,
        *,
        cleanup_kc: bool = False,
    ) -> None:
        # the inline back end is asked for by name: another one in the user's environment would leave no figures
        backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        environment = os.environ | backend | {SMOKE: str(int(self.smoke))}
        client.nb = notebook
        client.execute(env=environment, cleanup_kc=cleanup_kc)

    def _new_client(self, folder: Path) -> NotebookClient:
        return NotebookClient(
            nbformat.v4.new_notebook(),
            timeout=self.timeout,
            kernel_manager_class=ForSmoke if self.smoke else ThisPython,
            resources={"metadata": {"path": str(folder)}},
            shutdown_kernel="immediate",
            # time stamps would change the file at every run
            record_timing=False,
        )


def execute(path: Path, kernel: Kernel) -> NotebookNode:
    """A copy of the notebook, run in its folder; RuntimeError names a cell that fails or takes too long."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    kernel.run(notebook, path)
    if not kernel.smoke:
        for picture in pictures(notebook):
            png = in_palette(base64.b64decode(picture["image/png"]))
            picture["image/png"] = base64.b64encode(png).decode()
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    return notebook


def pictures(notebook: NotebookNode, tag: str | None = None) -> list[NotebookNode]:
    """The outputs with a PNG (in base64), of all cells or of those with the tag."""
    cells = [cell for cell in notebook.cells if tag is None or tag in cell.metadata.get("tags", [])]
    with_png = []
    for cell in cells:
        outputs = [output.get("data", {}) for output in cell.get("outputs", [])]
        with_png += [data for data in outputs if "image/png" in data]
    return with_png


def write_gallery(path: Path, notebook: NotebookNode) -> None:
    """Write the first figure of the cell tagged ``gallery`` to ``gallery/<name>.png`` beside the notebook."""
    for picture in pictures(notebook, GALLERY)[:1]:
        (path.parent / GALLERY).mkdir(exist_ok=True)
        (path.parent / GALLERY / f"{path.stem}.png").write_bytes(
            base64.b64decode(picture["image/png"])
        )


def main(argv: Sequence[str]) -> int:
    """Execute, print the time of each, write unless it is a smoke run; 1 if one failed."""
    parser = argparse.ArgumentParser(description="execute the notebooks")
    parser.add_argument(
        "names",
        nargs="*",
        help="beginnings of file names, 01 for instance; default: all",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="short runs of copies; nothing is written",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=600,
        help="seconds a single cell may take",
    )
    options = parser.parse_args(argv)
    try:
        paths = chosen(options.names)
    except ValueError as error:
        parser.error(str(error))
    failed = []
    with Kernel(options.smoke, options.timeout) as kernel:
        for path in paths:
            started = time.perf_counter()
            try:
                notebook = execute(path, kernel)
            except RuntimeError as error:
                failed.append(path.name)
                print(
                    f"FAILED {error}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            if not options.smoke:
                nbformat.write(notebook, path)
                write_gallery(path, notebook)
            print(f"{path.name}: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        print(
            f"{len(failed)} of {len(paths)} notebooks failed: {', '.join(failed)}", file=sys.stderr
        )
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
