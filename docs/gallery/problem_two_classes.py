"""Two classes: how much a label would reveal about the net; it grows along the boundary, away from the data."""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons

import pyrobnn as pb

points, labels = make_moons(150, noise=0.2, random_state=0)
x, y = torch.as_tensor(points).float(), torch.as_tensor(labels)
model = pb.BNN(pb.networks.mlp(2, (20,), 2, seed=0), pb.priors.FanInNormal(3.0), pb.likelihoods.Categorical())
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=500, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, y))
print(verdict)

a, b = torch.meshgrid(torch.linspace(-3, 4, 90), torch.linspace(-2.5, 3, 70), indexing="xy")
p = posterior.predict(torch.stack([a.flatten(), b.flatten()], 1))
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
shades = axes.contourf(a, b, p.epistemic_entropy.reshape(a.shape), 10, cmap="Blues")
axes.contour(a, b, p.probs[:, 1].reshape(a.shape), [0.5], colors="k", linewidths=0.8)
for label, marker in ((0, "o"), (1, "^")):
    axes.scatter(*x[y == label].T, s=12, marker=marker, color="k", lw=0, label=f"class {label}")
axes.legend(loc="lower left", frameon=False)
figure.colorbar(shades, label="epistemic entropy (nats)")
figure.savefig("problem_two_classes.png", dpi=220)
