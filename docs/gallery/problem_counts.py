"""Counts over unequal times: the exposure is a column of x, and the net learns the rate of a day."""

import matplotlib.pyplot as plt
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(1)
temperature = 30 * torch.rand(150, 1, generator=generator)
days = torch.randint(1, 15, (150, 1), generator=generator).float()
rate = 0.2 + 3 * torch.exp(-((temperature - 20) ** 2) / 40)
calls = torch.poisson(days * rate, generator=generator)

x = torch.cat([temperature / 10 - 1.5, days], 1)
model = pb.BNN(pb.networks.mlp(1, (20,), seed=0), pb.priors.FanInNormal(2.0), pb.likelihoods.Poisson(exposure=-1))
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, calls, num_draws=500, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, calls))
print(verdict)

line = torch.linspace(0, 30, 120)[:, None]
a_day = posterior.predict(torch.cat([line / 10 - 1.5, torch.ones_like(line)], 1)).f.flatten(0, 1)[..., 0]
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.scatter(temperature, calls / days, s=2 * days, color="#a8792a", label="calls a day; size: days")
axes.fill_between(line[:, 0], *a_day.quantile(torch.tensor([0.05, 0.95]), 0), color="#1f5f8b", alpha=0.3, lw=0)
axes.plot(line, a_day.mean(0), color="#1f5f8b", label="rate and its 90 % interval")
axes.set(xlabel="temperature (°C)", ylabel="calls a day")
axes.legend(frameon=False)
figure.savefig("problem_counts.png", dpi=220)
