"""What each library does with the problem of benchmark_peers.py, in the library's own environment.

    PYTHON peer_fits.py NAME problem.npz answer.npz

The problem: inputs x (N, 1), targets y (N,), a known noise, a 1-H-1 tanh net with the prior N(0, 1) on every weight,
and inputs at which the function is wanted. The answer: its values f (chain, draw, input), or their mean and
variance; CPU seconds of the fit and of the compile, where it can be told apart; gradients (of one
chain, summed over chains).
"""

from __future__ import annotations

import sys
import time

import numpy as np

CHAINS, WARMUP, DRAWS, DEPTH = 4, 300, 300, 10
SGHMC_STEPS, SGHMC_THIN, SGHMC_STEP, FRICTION = 30_000, 100, 1e-3, 5.0
VI_STEPS, VI_DRAWS, MODE_STEPS = 4000, 1000, 4000


def prior_draws(problem, seed=0):
    """Starts of the chains: weights (chain, 3 H + 1), in the order first layer, its bias, second layer, its bias."""
    return (
        np.random.default_rng(seed)
        .standard_normal((CHAINS, 3 * int(problem["hidden"]) + 1))
        .astype("float32")
    )


# -- JAX -------------------------------------------------------------------------------------------------------------


def jax_function(problem):
    """f of a flat weight vector at inputs (n,)."""
    import jax.numpy as jnp

    hidden = int(problem["hidden"])

    def function(weights, x):
        first, bias, second = (weights[i * hidden : (i + 1) * hidden] for i in range(3))
        return jnp.tanh(x[:, None] * first + bias) @ second + weights[-1]

    return function


def jax_values(problem, weights):
    """The function at the wanted inputs, for weights (chain, draw, weight)."""
    import jax

    function = jax_function(problem)
    return np.asarray(jax.vmap(jax.vmap(lambda w: function(w, problem["at"][:, 0])))(weights))


def compile_listener():
    """Seconds that JAX compiles from now on, as a list of one."""
    import jax

    spent = [0.0]

    def listen(event, seconds, **_):
        if event.endswith(("backend_compile_duration", "jaxpr_to_mlir_module_duration")):
            spent[0] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    return spent


def numpyro_nuts(problem):
    """NumPyro's NUTS, vectorized chains."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    function, x, y = jax_function(problem), jnp.asarray(problem["x"][:, 0]), jnp.asarray(problem["y"])

    def program():
        weights = numpyro.sample("w", dist.Normal(0, 1).expand([3 * int(problem["hidden"]) + 1]).to_event(1))
        numpyro.sample("y", dist.Normal(function(weights, x), float(problem["noise"])), obs=y)

    spent = compile_listener()
    sampler = MCMC(
        NUTS(program, max_tree_depth=DEPTH), num_warmup=WARMUP, num_samples=DRAWS, num_chains=CHAINS,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    key, starts = jax.random.PRNGKey(0), {"w": jnp.asarray(prior_draws(problem))}
    started = time.process_time()
    sampler.warmup(key, init_params=starts, extra_fields=("num_steps",), collect_warmup=True)
    steps = int(sampler.get_extra_fields()["num_steps"].sum())
    sampler.run(key, extra_fields=("num_steps",))
    draws = np.asarray(sampler.get_samples(group_by_chain=True)["w"])
    steps += int(sampler.get_extra_fields()["num_steps"].sum())
    seconds = time.process_time() - started
    return {"f": jax_values(problem, draws), "cpu": seconds, "compile": spent[0], "gradients": steps}


def blackjax_nuts(problem):
    """BlackJAX's NUTS after its window adaptation, each chain with its own, all in one vmap."""
    import blackjax
    import jax
    import jax.numpy as jnp

    function, x, y = jax_function(problem), jnp.asarray(problem["x"][:, 0]), jnp.asarray(problem["y"])

    def log_density(weights):
        residuals = (y - function(weights, x)) / float(problem["noise"])
        return -0.5 * (residuals**2).sum() - 0.5 * (weights**2).sum()

    spent = compile_listener()

    def chain(key, start):
        warm, sample = jax.random.split(key)
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density, max_num_doublings=DEPTH)
        (state, parameters), course = adaptation.run(warm, start, WARMUP)
        step = blackjax.nuts(log_density, **{**parameters, "max_num_doublings": DEPTH}).step

        def one(state, key):
            state, info = step(key, state)
            return state, (state.position, info.num_integration_steps)

        _, (draws, steps) = jax.lax.scan(one, state, jax.random.split(sample, DRAWS))
        return draws, steps.sum() + course.info.num_integration_steps.sum()

    started = time.process_time()
    run = jax.jit(jax.vmap(chain))
    draws, steps = jax.block_until_ready(
        run(jax.random.split(jax.random.PRNGKey(0), CHAINS), prior_draws(problem))
    )
    seconds = time.process_time() - started
    return {
        "f": jax_values(problem, draws),
        "cpu": seconds,
        "compile": spent[0],
        "gradients": int(steps.sum()),
    }


def bde(problem):
    """sklearn-contrib-bde: microcanonical Langevin from an ensemble; hard tanh, the noise a second output."""
    import jax
    from bde import BdeRegressor

    spent = compile_listener()
    model = BdeRegressor(
        n_members=CHAINS, hidden_layers=[int(problem["hidden"])], activation="hard_tanh", epochs=500, n_samples=DRAWS,
        warmup_steps=WARMUP * 4, n_thinning=10, lr=1e-2, patience=50, seed=0,
    )  # fmt: skip
    started = time.process_time()
    model.fit(problem["x"], problem["y"])
    seconds = time.process_time() - started
    raw = np.asarray(model.predict(problem["at"], raw=True))
    noise = np.asarray(jax.nn.softplus(raw[..., 1])) + 1e-6
    return {"f": raw[..., 0], "noise": noise, "cpu": seconds, "compile": spent[0]}


# -- torch -----------------------------------------------------------------------------------------------------------


def torch_net(problem, seed=0):
    """The net, from a generator of its own, and the data as tensors."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    hidden = int(problem["hidden"])
    net = torch.nn.Sequential(torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
    return net, torch.from_numpy(problem["x"]), torch.from_numpy(problem["y"])[:, None]


def laplace_torch(problem):
    """laplace-torch: full Gauss-Newton at the mode that Adam finds, linearised prediction."""
    import torch
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    net, x, y = torch_net(problem)
    noise = float(problem["noise"])
    started = time.process_time()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MODE_STEPS)
    for _ in range(MODE_STEPS):
        optimizer.zero_grad()
        energy = 0.5 * ((net(x) - y) / noise).square().sum()
        (energy + sum(0.5 * p.square().sum() for p in net.parameters())).backward()
        optimizer.step()
        decay.step()
    fitted = Laplace(
        net,
        "regression",
        subset_of_weights="all",
        hessian_structure="full",
        sigma_noise=noise,
        prior_precision=1.0,
    )
    fitted.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    mean, var = fitted._glm_predictive_distribution(torch.from_numpy(problem["at"]))
    seconds = time.process_time() - started
    return {"mean": mean.detach().numpy()[:, 0], "var": var.detach().numpy().reshape(-1), "cpu": seconds}


def tyxe_mean_field(problem):
    """TyXe: mean-field, Adam; its guides call a function that Pyro 1.9.2 has removed, put back here."""
    from operator import attrgetter

    import pyro
    import pyro.distributions as dist
    import pyro.util
    import torch

    pyro.util.deep_getattr = lambda value, name: attrgetter(name)(value)
    import tyxe

    net, x, y = torch_net(problem)
    pyro.set_rng_seed(0)
    model = tyxe.VariationalBNN(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=float(problem["noise"])),
        lambda program: tyxe.guides.AutoNormal(program, init_scale=1e-2),
    )
    started = time.process_time()
    optimizer = pyro.optim.ClippedAdam({"lr": 1e-2, "lrd": 0.01 ** (1 / VI_STEPS)})
    model.fit([(x, y)], optimizer, VI_STEPS)
    seconds = time.process_time() - started
    with torch.no_grad():
        draws = model.predict(torch.from_numpy(problem["at"]), num_predictions=VI_DRAWS, aggregate=False)
    return {"f": draws.numpy().reshape(1, VI_DRAWS, -1), "cpu": seconds, "gradients": VI_STEPS}


def posteriors_sghmc(problem):
    """posteriors: its stable integrator of SGHMC (BAOA; its `sghmc`, an Euler step, diverges here), on all data."""
    import posteriors
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y, noise = (
        torch.from_numpy(problem["x"][:, 0]),
        torch.from_numpy(problem["y"]),
        float(problem["noise"]),
    )
    hidden = int(problem["hidden"])

    def function(weights, inputs):
        first, bias, second = (
            weights[:, :hidden],
            weights[:, hidden : 2 * hidden],
            weights[:, 2 * hidden : -1],
        )
        inner = torch.tanh(inputs[None, :, None] * first[:, None] + bias[:, None])
        return (inner * second[:, None]).sum(-1) + weights[:, -1:]

    def log_posterior(weights, batch):
        residuals = (batch[1] - function(weights, batch[0])) / noise
        # the sum over chains: each one's gradient is its own
        return -0.5 * residuals.square().sum() - 0.5 * weights.square().sum(), torch.tensor([])

    weights = torch.from_numpy(prior_draws(problem))
    transform = posteriors.sgmcmc.baoa.build(log_posterior, lr=SGHMC_STEP, alpha=FRICTION)
    state, kept = transform.init(weights), []
    started = time.process_time()
    for step in range(SGHMC_STEPS):
        state, _ = transform.update(state, (x, y))
        if step >= SGHMC_STEPS // 3 and step % SGHMC_THIN == 0:
            kept.append(function(state.params, torch.from_numpy(problem["at"][:, 0])).numpy())
    seconds = time.process_time() - started
    return {"f": np.stack(kept, 1), "cpu": seconds, "gradients": CHAINS * SGHMC_STEPS}


# -- ours ------------------------------------------------------------------------------------------------------------


def ours(method, **options):
    """A worker of one of our methods: the same net, prior and noise."""

    def work(problem):
        import pyro.distributions as dist
        import torch

        import pyrobnn as pb

        net, x, y = torch_net(problem)
        model = pb.BNN(
            net,
            pb.priors.IIDPrior(dist.Normal(0.0, 1.0)),
            pb.likelihoods.HomoskedasticGaussian(float(problem["noise"])),
        )
        draws = options.get("draws", DRAWS)
        configured = getattr(pb, method)(**{k: v for k, v in options.items() if k != "draws"})
        started = time.process_time()
        posterior = configured.fit(model, x, y, num_draws=draws, seed=0)
        found = {
            "cpu": time.process_time() - started,
            "compile": posterior.meta["timings"].get("compile", 0.0),
        }
        if "num_gradients" in posterior.meta:
            found["gradients"] = posterior.meta["num_gradients"]
        at = torch.from_numpy(problem["at"])
        if method == "Laplace":
            mean, cov = posterior.network.output_moments(at)
            return found | {"mean": mean.numpy().reshape(-1), "var": cov.numpy().reshape(-1)}
        return found | {"f": posterior.predict(at).f[..., 0].detach().numpy()}

    return work


#: name in the table → the package that is installed (None for this checkout), what it is called, what does the work
FITS = {
    "pyrobnn NUTS": (None, ours("NUTS", num_chains=CHAINS, num_warmup=WARMUP, max_tree_depth=DEPTH)),
    "NumPyro NUTS": ("numpyro", numpyro_nuts),
    "BlackJAX NUTS": ("blackjax", blackjax_nuts),
    "pyrobnn SGHMC": (None, ours("SGHMC", num_chains=CHAINS)),
    "posteriors SGHMC": ("posteriors", posteriors_sghmc),
    "sklearn-contrib-bde": ("sklearn-contrib-bde", bde),
    "pyrobnn SVI, mean field": (
        None,
        ours("SVI", num_steps=VI_STEPS, lr=1e-2, init_scale=1e-2, draws=VI_DRAWS),
    ),
    "TyXe, mean field": ("tyxe", tyxe_mean_field),
    "pyrobnn Laplace": (None, ours("Laplace", importance=False, draws=1)),
    "laplace-torch": ("laplace-torch", laplace_torch),
}


if __name__ == "__main__":
    name, problem, answer = sys.argv[1:]
    # the libraries time their own compilation: in this process every clock counts CPU time, as on an idle machine
    time.time = time.perf_counter = time.process_time
    np.savez(answer, **FITS[name][1](dict(np.load(problem))))
