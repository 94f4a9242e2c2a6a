"""One noise for data whose noise varies: intervals too wide in the middle, too narrow on the right."""

import pyrobnn as pb

data = pb.data.study("swag")
model = pb.BNN(
    pb.networks.mlp(1, (20,), seed=0),
    pb.priors.FanInNormal(2.0),
    pb.likelihoods.HomoskedasticGaussian("learned"),
    standardizer=pb.data.Standardizer.fit(data),
)
posterior = pb.Laplace(num_steps=1000, compile=False).fit(model, data.x, data.y, num_draws=1000)
tree = posterior.to_datatree(data.x, data.y, true_function=data.true_function, label="Laplace, one noise")
verdict, caught_by = pb.diagnose(tree), "coverage_by_region"
print(verdict)
pb.plots.predictive_bands(tree).savefig("sick_one_noise.png", dpi=220)
