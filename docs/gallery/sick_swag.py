"""SWAG at a rate of 0.01: the path of SGD is several times as wide as the posterior."""

import pyro.distributions as dist

import pyrobnn as pb

data = pb.data.study("swag")
model = pb.BNN(
    pb.networks.mlp(1, (10,), activation="relu", seed=0),
    pb.priors.FanInNormal(2.0),
    pb.likelihoods.HomoskedasticGaussian(dist.HalfNormal(1.0)),
    standardizer=pb.data.Standardizer.fit(data),
)
start = pb.MAP(num_steps=1000, compile=False).fit(model, data.x, data.y, seed=0)
swag = pb.SWAG(lr=0.01, num_steps=2000, batch_size=50, compile=False)
posterior = swag.fit(model, data.x, data.y, num_draws=300, init=start, seed=0)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="SWAG, rate 0.01")
verdict, caught_by = pb.diagnose(tree), "virial"
print(verdict)
pb.plots.predictive_bands(tree).savefig("sick_swag.png", dpi=220)
