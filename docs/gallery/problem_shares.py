"""Shares between zero and one: intervals of a beta distribution stay between the bounds, and are skewed near them."""

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(5)
torch.manual_seed(5)
x = 8 * torch.rand(150, 1, generator=generator) - 4
mean = torch.sigmoid(1.5 * x)
y = torch.distributions.Beta(12 * mean, 12 * (1 - mean)).sample().clamp(1e-4, 1 - 1e-4)

likelihood = pb.likelihoods.Beta(dist.LogNormal(2.0, 1.0))
model = pb.BNN(pb.networks.mlp(1, (10,), seed=0), pb.priors.FanInNormal(2.0), likelihood)
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=500, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, y))
print(verdict)

line = torch.linspace(-4, 4, 100)[:, None]
p = posterior.predict(line)
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.scatter(x, y, s=8, color="#a8792a", label="data")
axes.fill_between(line[:, 0], p.quantile(0.05)[:, 0], p.quantile(0.95)[:, 0], color="#1f5f8b", alpha=0.25, lw=0)
axes.plot(line, p.mean, color="#1f5f8b", label="mean and 90 % interval")
axes.set(xlabel="x", ylabel="share", ylim=(-0.02, 1.02))
axes.legend(frameon=False)
figure.savefig("problem_shares.png", dpi=220)
