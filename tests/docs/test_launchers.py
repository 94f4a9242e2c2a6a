"""The launchers of docs/howto/launchers.md: each program runs on two processes of gloo, to the same posterior."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyrobnn as pb

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/launchers.md").read_text("utf-8")
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
#: launcher ↦ the section on it
LAUNCHERS = {section.split("\n")[0]: section for section in SECTIONS}
#: launcher ↦ the package that it needs
PACKAGES = {"Accelerate": "accelerate", "Lightning Fabric": "lightning_fabric", "Ray Train": "ray"}
#: launcher ↦ variables of its two processes, where it is stood in for
STAND_INS = {
    "Slurm": [
        {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}
        for rank in (0, 1)
    ],
}
#: which nothing stands in for
NOT_RUN = {"MPI"}


def code(section: str) -> str:
    (block,) = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return block


def command(block: str) -> list[str]:
    """The command in a program's first line, by this Python."""
    words = block.split("\n")[0].removeprefix("# ").split()
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    return [sys.executable, *words[words.index("python") + 1 :]]


def posterior_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The draws that the program of a launcher has saved."""
    (folder / "fit.py").write_text(code(INTRODUCTION))
    block = code(LAUNCHERS[name])
    (folder / "run.py").write_text(block)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    for variables in STAND_INS.get(name, [{}]):
        process = subprocess.Popen(
            command(block),
            cwd=folder,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    for process in processes:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said[-3000:]
    (saved,) = folder.rglob("posterior.nc")
    model = pb.BNN(
        pb.networks.mlp(1, (16,), seed=0),
        pb.priors.FanInNormal(),
        pb.likelihoods.HomoskedasticGaussian(0.1),
    )
    posterior = pb.Posterior.load(saved, model)
    assert (posterior.meta["shared"], posterior.meta["num_ranks"]) == ("rows", 2)
    return posterior.draws


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory) -> dict[str, torch.Tensor]:
    return posterior_of("torchrun", tmp_path_factory.mktemp("torchrun"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name not in NOT_RUN])
def test_a_launcher_runs_the_same_fit(name, by_torchrun, tmp_path):
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    draws = posterior_of(name, tmp_path)
    for site, value in by_torchrun.items():
        assert torch.equal(draws[site], value)


def test_the_page_says_what_is_not_run():
    said = {name for name, section in LAUNCHERS.items() if "*Not run*" in section}
    assert said == NOT_RUN | set(STAND_INS)
    for name, section in LAUNCHERS.items():
        compile(code(section), name, "exec")
