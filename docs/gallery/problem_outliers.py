"""Outliers: noise of Student's t follows the other points, Gaussian noise follows the outliers."""

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(3)
x = torch.linspace(-3, 3, 80)[:, None]
outlier = torch.rand(80, 1, generator=generator) < 0.1
y = x.sin() + 0.1 * torch.randn(80, 1, generator=generator) + 4 * outlier
likelihoods = {
    "Gaussian": pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    "Student's t": pb.likelihoods.StudentT("inferred", dist.HalfNormal(1.0)),
}
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.scatter(x, y, s=8, color="#a8792a", label="data")
for (name, likelihood), colour in zip(likelihoods.items(), ("#777777", "#1f5f8b"), strict=True):
    model = pb.BNN(pb.networks.mlp(1, (20,), seed=0), pb.priors.FanInNormal(2.0), likelihood)
    posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=300, seed=0)
    axes.plot(x, posterior.predict(x).quantile(0.5), color=colour, label=name)
    verdict = pb.diagnose(posterior.to_datatree(x, y))  # of Student's t, the last
print(verdict)
axes.plot(x, x.sin(), color="k", lw=0.8, ls="--", label="truth")
axes.set(xlabel="x", ylabel="y")
axes.legend(frameon=False, ncols=2, loc="upper left")
figure.savefig("problem_outliers.png", dpi=220)
