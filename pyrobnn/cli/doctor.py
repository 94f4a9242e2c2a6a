"""``pyrobnn doctor``: versions, compiler, device and a short fit, one line each."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version

from pyrobnn.cli.terminal import OneLineParser, one_line, say

PACKAGES = ("pyrobnn", "torch", "pyro-ppl", "numpy", "arviz-stats", "scikit-learn")


def doctor(argv: Sequence[str], command: str) -> int:
    """Print what is installed and whether a fit runs; exit status 0, or 1 where the fit failed."""
    parser = OneLineParser(prog="pyrobnn doctor", description="Versions, compiler, device and a short fit.")
    parser.parse_args(argv)

    import torch

    from pyrobnn import BNN, MAP, data, likelihoods, networks, priors
    from pyrobnn.core.private import lacks_compiler

    say(f"python    {platform.python_version()}, {platform.platform()}")
    say(f"packages  {', '.join(f'{name} {version(name)}' for name in PACKAGES)}")
    none = "none: every fit runs, several times slower (apt install g++, or xcode-select --install)"
    say(f"compiler  {none if lacks_compiler() else 'found'}")
    cuda = f"cuda ({torch.cuda.get_device_name()}), " if torch.cuda.is_available() else ""
    say(f"device    {cuda}cpu ({torch.get_num_threads()} threads)")
    points = data.gap()
    model = BNN(networks.mlp(1, (8,), seed=0), priors.FanInNormal(), likelihoods.HomoskedasticGaussian(0.3))
    began = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            fitted = MAP(num_steps=500).fit(model, points.x, points.y, seed=0)
            error = (fitted.predict(points.x).mean - points.y).square().mean().sqrt()
    except Exception as failure:  # whatever is broken here is what is asked for
        say(f"fit       failed: {type(failure).__name__}: {one_line(failure)}")
        return 1
    say(f"fit       MAP in {time.perf_counter() - began:.1f} s, root mean square error {error:.2f} on 'gap'")
    for text in dict.fromkeys(str(each.message) for each in caught):
        say(f"warning   {text}")
    return 0
