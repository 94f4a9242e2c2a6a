"""What a network's output says about the data.

The vocabulary is TyXe's (the classes, the ``likelihood.data`` site inside its plate); the arithmetic is pure: every
method takes the network output ``f`` and the likelihood's own parameters as arguments, so that the same lines serve one
draw inside a Pyro program and a batch of posterior draws, and the noise is always *the posterior's* noise.

A new response is a subclass of :class:`Likelihood` and a line in the contract test.
"""

from pyrobnn.model.likelihoods.base import DATA, SCALE, Likelihood, Targets
from pyrobnn.model.likelihoods.catalogue import (
    Bernoulli,
    Categorical,
    CensoredNormal,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weibull,
)
from pyrobnn.model.likelihoods.correlated import CorrelatedGaussian
from pyrobnn.model.likelihoods.dense import DenseCategorical
from pyrobnn.model.likelihoods.modes_and_bounds import Beta, MixtureDensity
from pyrobnn.model.likelihoods.parameters import learned

__all__ = ["DATA", "SCALE", "Likelihood", "Targets", "Bernoulli", "Categorical", "Ordinal"]
__all__ += ["DenseCategorical"]
__all__ += [
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "CorrelatedGaussian",
    "StudentT",
    "MixtureDensity",
    "Beta",
]
__all__ += ["NegativeBinomial", "Poisson", "CensoredNormal", "Weibull", "learned"]
