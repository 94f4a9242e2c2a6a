"""A net trained by maximum likelihood on labels of which one in six is wrong: it believes every one of them."""

import torch

import pyrobnn as pb

generator = torch.Generator().manual_seed(0)
x = torch.randn(400, 2, generator=generator)
y = (x.prod(1) > 0).long()
y = torch.where(torch.rand(400, generator=generator) < 1 / 6, 1 - y, y)
model = pb.BNN(pb.networks.mlp(2, (50,), 2, seed=0), pb.priors.FanInNormal(), pb.likelihoods.Categorical())
posterior = pb.MLE(num_steps=2000, compile=False).fit(model, x[:150], y[:150], seed=0)
tree = posterior.to_datatree(x[:150], y[:150], test=(x[150:], y[150:]), label="MLE")
verdict, caught_by = pb.diagnose(tree), "ece"
print(verdict)
pb.plots.reliability(tree).savefig("sick_sure_classifier.png", dpi=220)
