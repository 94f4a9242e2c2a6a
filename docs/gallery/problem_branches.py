"""Several answers to one input: a mixture of three normals, where a single normal would put its mean between them."""

import matplotlib.pyplot as plt
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(6)
y = torch.rand(400, 1, generator=generator)
x = y + 0.3 * torch.sin(2 * torch.pi * y) + 0.05 * torch.randn(400, 1, generator=generator)
x, y = 4 * x - 2, 4 * y - 2

model = pb.BNN(pb.networks.mlp(1, (20,), 9, seed=0), pb.priors.FanInNormal(3.0), pb.likelihoods.MixtureDensity(3))
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=300, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, y))
print(verdict)

line, levels = torch.linspace(-2.2, 2.2, 120), torch.linspace(-2.3, 2.3, 90)
p = posterior.predict(line[:, None])
density = torch.stack([p.log_prob(level.expand(120, 1)).exp() for level in levels])
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.pcolormesh(line.numpy(), levels.numpy(), density.numpy(), cmap="Blues", vmax=2.0, shading="nearest")
axes.scatter(x, y, s=4, color="#a8792a", label="data")
axes.plot(line, p.mean, color="k", lw=1, ls="--", label="mean")
axes.set(xlabel="x", ylabel="y", xlim=(-2.2, 2.2), ylim=(-2.3, 2.3))
axes.legend(loc="upper left")
figure.savefig("problem_branches.png", dpi=220)
