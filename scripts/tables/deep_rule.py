"""The rule of the first table: features without skew and their waves, a deep ensemble, and chains from its members."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pyrobnn.posterior import Posterior


class Rule(NamedTuple):
    """What is fitted: the features, the net, its prior, the training of the members, the chains that start at them."""

    waves: int = 8
    hidden: tuple[int, ...] = (32, 32, 32, 32)
    activation: str = "silu"
    prior_scale: float = 1.1
    noise: float = 0.1
    members: int = 6
    steps: int = 3000
    batch: int = 128
    lr: float = 0.01
    friction: float = 0.0003
    share: float = 0.5
    warmup: int = 5000
    thinning: int = 75
    draws: int = 200

    def fit(self, x: Tensor, y: Tensor, seed: int) -> Posterior:
        """The posterior of features x (N, feature) and standardised y (N, 1), float32."""
        import pyro.distributions as dist
        from torch import nn

        import pyrobnn as pb
        from pyrobnn.estimators.features import Heads, Layer
        from pyrobnn.model.architectures import ACTIVATIONS

        class Chains(pb.SGHMC):
            share = self.share

        prior = pb.priors.IIDPrior(dist.Normal(0.0, self.prior_scale))
        widths = [x.shape[1], *self.hidden]
        act = ACTIVATIONS[self.activation]
        layers: list[nn.Module] = []
        for num_inputs, num_outputs in zip(widths, self.hidden):
            layers += [Layer(num_inputs, num_outputs), act()]
        layers.append(Layer(widths[-1], 2))
        mean = nn.Sequential(*layers, Heads(self.noise, True))
        mean_and_noise = nn.Sequential(*layers, Heads(self.noise, False))
        members = pb.DeepEnsemble(
            num_members=self.members,
            num_steps=self.steps,
            lr=self.lr,
            batch_size=self.batch,
        )
        known = pb.BNN(mean, prior, pb.likelihoods.HomoskedasticGaussian(self.noise))
        starts = members.fit(known, x, y, seed=seed)
        # the momentum lasts for thousands of steps: the chains have a long way from where the members were trained
        steps: dict[str, Any] = {
            "num_warmup": self.warmup,
            "thinning": self.thinning,
            "friction": self.friction,
        }
        chains = Chains(
            num_chains=self.members,
            preconditioner="rmsprop",
            **steps,
        )
        model = pb.BNN(mean_and_noise, prior, pb.likelihoods.HeteroskedasticGaussian())
        return chains.fit(
            model,
            x,
            y,
            num_draws=self.draws,
            init=starts,
            seed=seed,
        )


def lift(x: np.ndarray, x_test: np.ndarray, waves: int) -> tuple[np.ndarray, np.ndarray]:
    """Features without skew, and ``waves`` sines and cosines of each, (n, feature · (1 + 2 waves)).

    Random Fourier features (Tancik et al., 2020) of frequency N(0, 1), and before them Box and Cox's power where a
    feature is positive, Yeo and Johnson's elsewhere. All are shrunk together: the function is as large under the prior.
    """
    import numpy as np
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PowerTransformer, StandardScaler

    least = x.min(0)
    positive = x.min(0) > 0
    power = make_column_transformer(
        (PowerTransformer("box-cox"), np.flatnonzero(positive)),
        (make_pipeline(StandardScaler(), PowerTransformer()), np.flatnonzero(~positive)),
    ).fit(x)
    frequency = np.random.default_rng(0).normal(size=(x.shape[1], waves))

    def raised(rows: np.ndarray) -> np.ndarray:
        # a new row outside of the logarithm's domain counts as the least that was seen
        plain = power.transform(np.where(positive & (rows <= 0), least, rows))
        angle = (plain[:, :, None] * frequency).reshape(len(plain), -1)
        return np.concatenate([plain, np.sin(angle), np.cos(angle)], 1)

    lifted = raised(x), raised(x_test)
    shrink = math.sqrt(x.shape[1] / lifted[0].var(0).sum())
    return shrink * lifted[0], shrink * lifted[1]
