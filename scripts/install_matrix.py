"""Install today's wheel into an environment of its own and use it there, outside of the repository; one record a run.

    python scripts/install_matrix.py --python python3.12 --versions newest     # whatever pip takes
    python scripts/install_matrix.py --python python3.13 --versions pinned     # those of constraints.txt
    python scripts/install_matrix.py --python python3.11 --versions oldest     # the lower bounds of setup.cfg

It needs ``pip install build twine``. An environment has gigabytes; ``--keep DIR`` makes it there, and where it exists
takes its libraries as they are: the wheel and the source archive are built, checked and installed anew every time. The
records, ``results/install.jsonl``, are the tables of docs/install.md (``python scripts/readme_tables.py``).
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE

from pyrobnn.studies.uci import append_record
from pyrobnn.studies.uci.provenance import commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results" / "install.jsonl"
TOLD = ("torch", "pyro-ppl", "arviz-base", "numpy", "pandas", "scikit-learn")
#: what the package required until it asked for nothing that it does not import
FORMER = ("arviz_plots>=0.8", "arviz>=1; python_version >= '3.12'")
VERSIONS = (
    "import importlib.metadata as m, json, sys; print(json.dumps([m.version(n) for n in sys.argv[1:]]))"
)
ESTIMATOR = """
import numpy as np
import pyrobnn as pb

rng = np.random.default_rng(0)
X = rng.normal(size=(80, 2))
y = X[:, 0] + 0.1 * rng.normal(size=80)
net = pb.BNNRegressor(pb.Laplace(num_steps=300), random_state=0).fit(X, y)
assert abs(net.predict(X) - y).mean() < 0.5, "it learned nothing"
assert "site-packages" in pb.__file__, pb.__file__
"""


def oldest() -> str:
    """The lower bounds of setup.cfg as pins: the floor that the package promises."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options"]["install_requires"].splitlines()
    return "\n".join(
        line.partition("[")[0].partition(">=")[0] + "==" + line.partition(">=")[2]
        for line in lines
        if ">=" in line
    )


def build(built: Path) -> dict[str, int]:
    """Wheel and source archive of this checkout, checked as a package index checks them; kind → bytes."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)], check=True, stdout=PIPE
    )
    files = {"wheel": next(built.glob("*.whl")), "sdist": next(built.glob("*.tar.gz"))}
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files.values()], check=True)
    return {kind: file.stat().st_size for kind, file in files.items()}


def download(command: list[str], folder: Path) -> dict[str, float]:
    """Package → MB of what a command brings into a folder."""
    subprocess.run(command, check=True)
    return {file.name.partition("-")[0]: file.stat().st_size / 1e6 for file in folder.iterdir()}


def make(python: str, versions: str, folder: Path, wheel: Path) -> None:
    """A new environment with what the wheel requires, and ``made.json``: what that downloads, and how long it took."""
    begun = time.perf_counter()
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-I", "-m", "pip"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pins = Path(scratch) / "pins.txt"
        pins.write_text(oldest() if versions == "oldest" else "", encoding="utf-8")
        pins = ROOT / "constraints.txt" if versions == "pinned" else pins
        quiet = ["--quiet", "--constraint", str(pins)]
        files = Path(scratch) / "files"
        sizes = download([*pip, "wheel", *quiet, "--wheel-dir", str(files), str(wheel)], files)
        local = ["--no-index", "--find-links", str(files)]
        subprocess.run([*pip, "install", *quiet, *local, str(wheel)], check=True)
        former = Path(scratch) / "former"
        before = download([*pip, "wheel", "--quiet", "--wheel-dir", str(former), *FORMER], former)
    cuda = sum(size for name, size in sizes.items() if name.startswith(("nvidia", "cuda", "triton")))
    parts = {"torch": sizes["torch"], "GPU libraries": cuda, "torchvision": sizes["torchvision"]}
    made = {
        "download_mb": round(sum(sizes.values()), 1),
        "download_parts_mb": {name: round(size, 1) for name, size in parts.items()},
        "dropped_mb": round(sum(size for name, size in before.items() if name not in sizes), 1),
        "install_seconds": round(time.perf_counter() - begun),
    }
    (folder / "made.json").write_text(json.dumps(made), encoding="utf-8")


def install(folder: Path, wheel: Path) -> None:
    """The wheel itself, in place of one that an environment may hold; what it requires must be there."""
    pip = [str(folder / "bin" / "python"), "-I", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)


def use(folder: Path) -> dict[str, str]:
    """What a new user does first, by name: ``"ok"``, or the last line of what was said."""
    bin_ = folder / "bin"
    commands = {
        "compare": [
            str(bin_ / "pyrobnn"),
            "compare",
            "--quick",
            "--methods",
            "map",
            "svi",
            "nuts",
            "laplace",
        ],
        "report": [str(bin_ / "pyrobnn"), "report", "results/nuts.nc", "--out", "again.html"],
        "predict": [str(bin_ / "pyrobnn"), "predict", "results/nuts.nc", "new.csv", "--out", "new_y.csv"],
        "estimator": [str(bin_ / "python"), "-c", ESTIMATOR],
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = {}
    with tempfile.TemporaryDirectory() as outside:
        (Path(outside) / "new.csv").write_text("x\n0.1\n0.2\n", encoding="utf-8")
        for name, command in commands.items():
            ran = subprocess.run(command, cwd=outside, env=environment, capture_output=True, text=True)
            done[name] = "ok" if ran.returncode == 0 else (ran.stderr.strip() or "?").splitlines()[-1]
    return done


def megabytes(folder: Path) -> float:
    """What an environment takes on disk."""
    return sum(each.lstat().st_size for each in folder.rglob("*") if not each.is_dir()) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--versions", choices=("newest", "pinned", "oldest"), default="newest")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch) / "environment").absolute()
        sizes = build(Path(scratch) / "built")
        (wheel,) = Path(scratch, "built").glob("*.whl")
        if not folder.exists():
            make(asked.python, asked.versions, folder, wheel)
        install(folder, wheel)
        python = str(folder / "bin" / "python")
        told = subprocess.run([python, "-c", VERSIONS, *TOLD], check=True, capture_output=True, text=True)
        version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True)
        begun = time.perf_counter()
        record = {
            "python": version.stdout.split()[1],
            "asked": asked.versions,
            "commit": commit(),
            "built_bytes": sizes,
            "versions": dict(zip(TOLD, json.loads(told.stdout))),
            "used": use(folder),
            "seconds": round(time.perf_counter() - begun, 1),
            "megabytes": round(megabytes(folder)),
            **json.loads((folder / "made.json").read_text(encoding="utf-8")),
        }
    append_record(asked.out, record)
    print(json.dumps(record, indent=1))
    return 0 if set(record["used"].values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
