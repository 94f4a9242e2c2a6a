"""One declared rule per method: what is fixed, what is inferred, and what is chosen on the train part, and how."""

from __future__ import annotations

import dataclasses
from typing import Any

from uci.rule_search import OfLinear, Rule

from pyrobnn import MAP, NUTS, SGHMC, SVI, SWAG, DeepEnsemble, Laplace, MCDropout

# a batch of this size is all the data, handed to the compiled step as an argument: one compilation then serves
# every split of a data set
_WHOLE = 10**6
_SEARCH = MAP(num_steps=1000, batch_size=_WHOLE)
# members are not polished: the noise is that of a search which is not either
_UNPOLISHED = MAP(
    num_steps=1000,
    batch_size=_WHOLE,
    polish_steps=0,
)
_NOISES = tuple(OfLinear(share) for share in (0.03, 0.06, 0.12, 0.25, 0.35, 0.5, 0.7, 1.0))
_VALIDATED: dict[str, Any] = {
    "prior_scales": (1.0,),
    "noises": _NOISES,
    "choose": "validation",
    "validate_with": _SEARCH,
}
# faster rates and wider starts end in optima that call the signal noise: their ELBO is hundreds of nats lower
_SVI = SVI(
    num_steps=10_000,
    lr=0.003,
    init_scale=0.01,
    estimator="weights",
)
_LRT = dataclasses.replace(_SVI, estimator="local_reparameterization")
# a draw from the prior can be so steep that the larger steps of SGHMC are unstable. NUTS does not start
# at modes: where they interpolate the data, with next to no noise, it stays (yacht)
_MODES = DeepEnsemble(
    num_members=4,
    num_steps=1000,
    batch_size=_WHOLE,
)
_INFERRED: dict[str, Any] = {"prior_scales": (1.0, 2.0), "noises": ("inferred",)}
#: the rule of every method, by its name in the tables
RULES: dict[str, Rule] = {
    "map": Rule(_SEARCH, **_VALIDATED),
    "ensemble": Rule(
        DeepEnsemble(num_steps=1000, batch_size=_WHOLE),
        **_VALIDATED | {"validate_with": _UNPOLISHED},
    ),
    "svi-rt": Rule(
        _SVI,
        **_INFERRED,
        choose="evidence",
        num_draws=400,
    ),
    "svi-lrt": Rule(
        _LRT,
        **_INFERRED,
        choose="evidence",
        num_draws=400,
    ),
    "laplace": Rule(
        Laplace(
            map=_SEARCH,
            tune="marginal_likelihood",
            predictive="linearized",
        ),
        prior_scales=(1.0,),
        noises=_NOISES,
        choose="evidence",
        num_draws=400,
    ),
    # an iterate an epoch would be few of many rows. It starts at the mode of the search that chose its noise: at
    # another search's the noise is not what the net leaves
    "swag": Rule(
        SWAG(num_steps=2000, collect_every=20),
        **_VALIDATED,
        num_draws=100,
        init=_SEARCH,
    ),
    "mc-dropout": Rule(
        MCDropout(
            p=0.01,
            num_steps=1500,
            batch_size=_WHOLE,
        ),
        prior_scales=(1.0,),
        noises=("learned",),
        choose="validation",
        variants=tuple({"p": p} for p in (0.005, 0.02, 0.05)),
        num_draws=400,
    ),
    "sghmc": Rule(
        SGHMC(
            num_chains=4,
            num_warmup=3000,
            thinning=20,
            friction=0.02,
        ),
        prior_scales=(1.0,),
        noises=("inferred",),
        choose="validation",
        variants=({"step_size": 3e-5}, {"step_size": 3e-4}, {"step_size": 3e-3}),
        num_draws=100,
        init=_MODES,
    ),
    "nuts": Rule(
        NUTS(
            num_chains=4,
            num_warmup=300,
            max_tree_depth=9,
        ),
        **_INFERRED,
        choose="evidence",
        validate_with=_LRT,
        num_draws=100,
    ),
}
