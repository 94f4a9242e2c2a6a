"""Times that the end of the study cut short: censored rows count as what they are, lower limits."""

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(2)
load = 4 * torch.rand(160, 1, generator=generator)
life = 8 * torch.exp(-0.5 * load) * (-torch.rand(160, 1, generator=generator).log()) ** (1 / 2)
seen = life < 4.0  # after four years the study ended
y = torch.cat([life.clamp_max(4.0), seen.float()], 1)

x = load / 2 - 1
model = pb.BNN(
    pb.networks.mlp(1, (10,), seed=0), pb.priors.FanInNormal(), pb.likelihoods.Weibull(dist.LogNormal(0.0, 0.5))
)
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=500, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, y))
print(verdict)

line = torch.linspace(0, 4, 80)[:, None]
p = posterior.predict(line / 2 - 1)
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.scatter(load[seen], y[:, :1][seen], s=9, color="#a8792a", label="failed")
axes.scatter(load[~seen], y[:, :1][~seen], s=14, marker="^", fc="none", ec="#a8792a", label="still running")
axes.fill_between(line[:, 0], p.quantile(0.05)[:, 0], p.quantile(0.95)[:, 0], color="#1f5f8b", alpha=0.25, lw=0)
axes.plot(line, p.quantile(0.5), color="#1f5f8b", label="median and 90 % interval")
axes.set(xlabel="load", ylabel="years", ylim=(0, 12))
axes.legend(frameon=False)
figure.savefig("problem_survival.png", dpi=220)
