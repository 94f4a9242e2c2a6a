"""What a new user's machine may lack: a compiler, colours, Unicode, a folder that can be written to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FITS = """
import torch
import pyrobnn as pb

x = torch.linspace(-1, 1, 8)[:, None]
model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
pb.MAP(num_steps=20, compile=True).fit(model, x, x, seed=0)
nuts = pb.NUTS(num_chains=2, num_warmup=20, max_tree_depth=3, compile=True)
posterior = nuts.fit(model, x, x, num_draws=5, seed=0, progress=True)
assert bool(torch.isfinite(posterior.predict(x).mean).all())
"""

pytestmark = pytest.mark.slow


def run(argv, folder, **environment):
    """Python in a folder of its own, as from a shell that has only these variables."""
    kept = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
    }
    return subprocess.run(
        [sys.executable, *argv], cwd=folder, env=kept | environment, capture_output=True
    )


def test_without_a_compiler_each_fit_runs_and_says_what_would_make_them_fast(tmp_path):
    (tmp_path / "bin").mkdir()
    cache = tmp_path / "cache"
    done = run(
        ["-c", FITS], tmp_path, PATH=str(tmp_path / "bin"), TORCHINDUCTOR_CACHE_DIR=str(cache)
    )
    said = done.stderr.decode()
    assert done.returncode == 0, said[-2000:]
    for name in ("MAP", "the model"):
        told = f"{name} could not be compiled (NoCompiler: there is no C++ compiler: "
        assert (
            sum(
                told in line and "install" in line and "slower" in line
                for line in said.splitlines()
            )
            == 1
        )


def test_a_folder_for_compiled_code_that_cannot_be_made_costs_a_word(tmp_path):
    done = run(["-c", FITS], tmp_path, TORCHINDUCTOR_CACHE_DIR="/dev/null/cache")
    said = done.stderr.decode()
    assert done.returncode == 0, said[-2000:]
    assert said.count("set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to") == 1


PRINTS = """
import torch
import pyrobnn as pb

x = torch.linspace(-1, 1, 20)[:, None]
model = pb.BNN(pb.networks.mlp(1, (2,), seed=0), pb.priors.FanInNormal(), pb.likelihoods.HomoskedasticGaussian(0.3))
posterior = pb.SVI(num_steps=30, compile=False).fit(model, x, x, num_draws=50, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, x))
print(verdict, verdict.summary, verdict.action, posterior, posterior.predict(x), posterior.meta["warnings"])
for check in verdict.checks:
    print(check, check.limit, check.evidence, check.action)
"""


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_a_user_prints_of_a_fit_needs_no_unicode(encoding, tmp_path):
    done = run(["-c", PRINTS], tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert "draws: " in done.stdout.decode(encoding) and b"\\u" not in done.stdout


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "NO_COLOR": "1",
            "TERM": "dumb",
        },
    ],
    ids=["cp1252", "ascii"],
)
def test_a_terminal_without_colours_or_unicode_gets_its_table(environment, tmp_path):
    (tmp_path / "t.csv").write_text(
        "größe,y\n" + "\n".join(f"{i / 9},{i % 7}.5" for i in range(30)), encoding="utf-8"
    )
    argv = [
        "-m",
        "pyrobnn",
        "compare",
        "--data",
        "t.csv",
        "--target",
        "y",
        "--quick",
        "--no-compile",
    ]
    done = run([*argv, "--methods", "map", "laplace", "--out", "out"], tmp_path, **environment)
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    said = (done.stdout + done.stderr).decode(encoding)
    assert done.returncode == 0, said[-2000:]
    assert "laplace" in said and "\x1b" not in said and "Traceback" not in said
    assert "größe" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
