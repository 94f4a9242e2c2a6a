"""SVI without its KL term: a cold posterior, nearly sure of itself everywhere."""

import pyro.distributions as dist

import pyrobnn as pb

data = pb.data.gap()
model = pb.BNN(
    pb.networks.mlp(1, (20,), seed=0),
    pb.priors.FanInNormal(),
    pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    standardizer=pb.data.Standardizer.fit(data),
)
posterior = pb.SVI(num_steps=2000, kl_weight=0.0, compile=False).fit(model, data.x, data.y, num_draws=200)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="SVI, KL weight 0")
verdict, caught_by = pb.diagnose(tree), "fit"
print(verdict)
pb.plots.predictive_bands(tree).savefig("sick_cold.png", dpi=220)
