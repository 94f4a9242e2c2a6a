"""Noise that depends on the input: a second output of the net is its standard deviation."""

import pyrobnn as pb

data = pb.data.study("swag")
model = pb.BNN(
    pb.networks.mlp(1, (20,), 2, seed=0),
    pb.priors.FanInNormal(2.0),
    pb.likelihoods.HeteroskedasticGaussian(),
    standardizer=pb.data.Standardizer.fit(data),
)
posterior = pb.Laplace(num_steps=1500, compile=False).fit(model, data.x, data.y, num_draws=500)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="Laplace, two outputs")
verdict = pb.diagnose(tree)
print(verdict)
pb.plots.predictive_bands(tree).savefig("problem_noise.png", dpi=220)
