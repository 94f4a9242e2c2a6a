"""NUTS with hardly any warm-up and short trajectories: four chains that describe four functions."""

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch

import pyrobnn as pb

data = pb.data.gap()
model = pb.BNN(
    pb.networks.mlp(1, (20,), seed=0),
    pb.priors.FanInNormal(),
    pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    standardizer=pb.data.Standardizer.fit(data),
)
nuts = pb.NUTS(num_warmup=10, max_tree_depth=3, compile=False)
posterior = nuts.fit(model, data.x, data.y, num_draws=60, seed=0)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="NUTS, 10 + 60")
verdict, caught_by = pb.diagnose(tree), "rhat_function"
print(verdict)

traces = {
    "log density": posterior.sample_stats["lp"],
    "f at x = −4": posterior.predict(torch.tensor([[-4.0]])).loc[..., 0, 0],
    "noise (standard units)": posterior.draws["likelihood.scale"].squeeze(),
}
figure, panels = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for axes, (name, values) in zip(panels, traces.items(), strict=True):
    axes.plot(values.T, lw=0.8)
    axes.set(title=name, xlabel="draw")
figure.savefig("sick_short_chains.png", dpi=220)
