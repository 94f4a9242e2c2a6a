"""Labels with an order: one output of the net and the cut-points between five grades."""

import matplotlib.pyplot as plt
import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(4)
x = 6 * torch.rand(250, 1, generator=generator) - 3
noise = torch.rand(250, 1, generator=generator).logit()
latent = 2 * torch.tanh(x) + 0.5 * x + 0.7 * noise
y = torch.bucketize(latent[:, 0], torch.tensor([-2.0, -0.7, 0.7, 2.0]))

model = pb.BNN(pb.networks.mlp(1, (10,), seed=0), pb.priors.FanInNormal(2.0), pb.likelihoods.Ordinal(5, "inferred"))
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, x, y, num_draws=300, seed=0)
verdict = pb.diagnose(posterior.to_datatree(x, y))
print(verdict)

line = torch.linspace(-3, 3, 100)[:, None]
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
colours = plt.get_cmap("cividis")(torch.linspace(0, 1, 5).numpy())
names = [f"grade {grade}" for grade in range(5)]
axes.stackplot(line[:, 0], posterior.predict(line).probs.T, labels=names, colors=colours)
axes.set(xlabel="x", ylabel="probability", xlim=(-3, 3), ylim=(0, 1))
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
figure.savefig("problem_grades.png", dpi=220)
