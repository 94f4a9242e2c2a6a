"""A known law with unknown constants: a plain Pyro program, whose draws are the constants themselves."""

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrobnn as pb

doses = np.repeat(np.geomspace(0.1, 100, 8), 4)
rng = np.random.default_rng(0)
effects = 10 + 80 / (1 + (5.0 / doses) ** 1.3) + rng.normal(0, 5, len(doses))


def response(x, y=None):
    base = pyro.sample("base", dist.Normal(0.0, 20.0))
    height = pyro.sample("height", dist.HalfNormal(100.0))
    half = pyro.sample("half", dist.Normal(1.0, 2.0))  # the logarithm of the dose of half the effect
    slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.HalfNormal(20.0))
    with pyro.plate("data", len(x)):
        mean = base + height * torch.sigmoid(slope * (x[:, 0] - half))
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


nuts = pb.NUTS(num_warmup=150, max_tree_depth=6, compile=False)
model = pb.PyroRegressor(response, nuts, num_draws=150, random_state=0).fit(np.log(doses)[:, None], effects)
print(verdict := model.verdict_)
half = model.posterior_.draws["half"].exp()
line = np.geomspace(0.05, 200, 80)
low, high = model.predict_interval(np.log(line)[:, None]).T
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.fill_between(line, low, high, color="#1f5f8b", alpha=0.25, lw=0)
axes.plot(line, model.predict(np.log(line)[:, None]), color="#1f5f8b", label="mean and 90 % interval")
axes.scatter(doses, effects, s=9, color="#a8792a", label="data")
axes.axvspan(*np.quantile(half, [0.05, 0.95]), color="k", alpha=0.12, lw=0, label="dose of half the effect")
axes.set(xlabel="dose", ylabel="effect", xscale="log")
axes.legend(frameon=False)
figure.savefig("problem_dose.png", dpi=220)
