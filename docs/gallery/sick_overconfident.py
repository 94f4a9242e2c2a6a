"""Anyone's predictions: the right mean, 0.6 times the right standard deviation."""

import matplotlib.pyplot as plt
import torch

import pyrobnn as pb

data = pb.data.study("laplace")
predicted = torch.distributions.Normal(data.true_f, 0.6 * data.true_noise)
verdict, caught_by = pb.judge(predicted, data.y, x=data.x), "pit"
print(verdict)
pit = predicted.cdf(data.y).flatten()
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.hist(pit, bins=20, range=(0, 1), color="#1f5f8b")
axes.axhline(len(pit) / 20, color="#a8792a", label="what calibrated predictions give")
axes.set(xlabel="probability integral transform", ylabel="outcomes")
axes.legend(frameon=False)
figure.savefig("sick_overconfident.png", dpi=220)
