"""What is measured on a device: many chains of NUTS, and a fit and predictions of every other method."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    import pyrobnn as pb

Result = TypeVar("Result")


def nuts(chains: int, device: str, small: bool) -> dict[str, Any]:
    """Gradients a second of many chains of a 1-50-1 net: by two lengths of run, without compiling."""
    import pyrobnn as pb

    model, x, y = problem((1, 4, 1) if small else (1, 50, 1), 20 if small else 400)
    num_chains, num_warmup, max_tree_depth = (2, 2, 2) if small else (chains, 10, 6)
    method = pb.NUTS(
        num_chains=num_chains,
        num_warmup=num_warmup,
        max_tree_depth=max_tree_depth,
        compile=not small,
    )
    num_draws = 400 if device.startswith("cuda") else 10
    if small:
        num_draws = 2
    short = method.fit(
        model,
        x,
        y,
        num_draws=1,
        seed=0,
        device=device,
    ).meta
    long = method.fit(
        model,
        x,
        y,
        num_draws=num_draws,
        seed=0,
        device=device,
    ).meta
    gradients = long["num_gradients"] - short["num_gradients"]
    seconds = long["timings"]["fit"] - short["timings"]["fit"]
    return {"chains": chains, "per_second": gradients / max(seconds, 1e-9)}


def search(name: str, device: str, small: bool) -> dict[str, Any]:
    """A 784-64-10 net by one of the other methods: seconds, those of compiling, and predictions a second."""
    import pyrobnn as pb

    steps = 12 if small else 2000  # SWAG takes every fourth iterate of the last three quarters
    model, x, y = problem((6, 4, 3) if small else (784, 64, 10), 40 if small else 6000)
    batches: dict[str, Any] = {"compile": False} if small else {"batch_size": 128}
    method = {
        "map": pb.MAP(
            num_steps=steps,
            polish_steps=0,
            **batches,
        ),
        "svi": pb.SVI(num_steps=steps, **batches),
        "laplace": pb.Laplace(
            structure="kron",
            predictive="linearized",
            num_steps=steps,
            compile=not small,
        ),
        "swag": pb.SWAG(num_steps=steps, **batches),
        "sghmc": pb.SGHMC(
            num_chains=2,
            num_warmup=steps,
            init_steps=steps,
            **batches,
        ),
    }[name]
    draws = None
    if name != "map":
        draws = 4 if small else 50
    took, posterior = timed(
        device,
        lambda: method.fit(
            model,
            x,
            y,
            num_draws=draws,
            seed=0,
            device=device,
        ),
    )
    new = x[:10] if small else x
    predicted, probs = timed(device, lambda: posterior.predict(new.to(device)).probs)
    where = {
        "fit_s": took,
        "predict_s": predicted,
        "where": probs.device.type,
    }
    return where | {"compile_s": posterior.meta["timings"].get("compile", 0.0)}


def problem(widths: tuple[int, ...], num_data: int) -> tuple[pb.BNN, torch.Tensor, torch.Tensor]:
    """A net under a fan-in prior and data for it: classes where it has several outputs."""
    import torch

    import pyrobnn as pb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(
        num_data,
        widths[0],
        generator=generator,
    )
    classes = widths[-1] > 1
    likelihood: pb.likelihoods.Likelihood
    if classes:
        y = torch.randint(
            widths[-1],
            (num_data,),
            generator=generator,
        )
        likelihood = pb.likelihoods.Categorical()
    else:
        y = torch.sin(x[:, :1])
        likelihood = pb.likelihoods.HomoskedasticGaussian(0.3)
    net = pb.networks.mlp(
        widths[0],
        widths[1:-1],
        widths[-1],
        seed=0,
    )
    return pb.BNN(net, pb.priors.FanInNormal(), likelihood), x, y


def timed(device: str, work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of a call, once what it launched has ended, and what it returned."""
    import torch

    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - started, result


CASES: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    **{f"nuts-{chains}": functools.partial(nuts, chains) for chains in (4, 64, 1024)},
    **{
        name: functools.partial(search, name) for name in ("map", "svi", "laplace", "swag", "sghmc")
    },
}
