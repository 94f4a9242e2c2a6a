"""SVI stopped after 300 of the 10,000 steps of its default: the curve is not even found."""

import pyro.distributions as dist

import pyrobnn as pb

data = pb.data.gap()
model = pb.BNN(
    pb.networks.mlp(1, (20,), seed=0),
    pb.priors.FanInNormal(),
    pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    standardizer=pb.data.Standardizer.fit(data),
)
posterior = pb.SVI(num_steps=300, compile=False).fit(model, data.x, data.y, num_draws=200)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="SVI, 300 steps")
verdict, caught_by = pb.diagnose(tree), "function_moves"
print(verdict)
pb.plots.predictive_bands(tree).savefig("sick_stopped_early.png", dpi=220)
