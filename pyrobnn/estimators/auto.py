"""``method="auto"``: a method that suits the size of the data and of the net, and why, in words."""

from __future__ import annotations

from typing import Any

from pyrobnn.inference.laplace import Laplace
from pyrobnn.inference.map import MAP
from pyrobnn.inference.nuts import NUTS
from pyrobnn.inference.svi import SVI

#: weights up to which a full precision matrix is factorised in seconds
MOST_FULL = 3000
#: rows up to which every step of an optimiser sees all of them, and a pass over them for each draw costs little; at
#: 10,000 mini-batches found a better mode in a fifth of the time
MOST_WHOLE = 2000
#: rows up to which chains are done in minutes
MOST_SAMPLED = 1000
BATCH, STEPS, SVI_STEPS = 1000, 3000, 10_000


def choose(
    num_data: int, num_weights: int, width: int, *, weighted: bool = False, compile: bool = True
) -> tuple[Any, str]:
    """A configured method, and why it.

    Args:
        num_data: rows N.
        num_weights: scalar parameters of the net.
        width: of the net's output.
        weighted: whether rows have weights that are no whole numbers.
        compile: the method's option.

    Returns:
        The method, and a sentence.
    """
    size = f"{num_data:,} rows, {num_weights:,} weights"
    whole = num_data <= MOST_WHOLE
    if weighted:
        size += ", each row with a weight of its own"
        if num_data <= MOST_SAMPLED:
            return NUTS(compile=compile), f"{size}: NUTS, which samples the weighted posterior itself"
        svi = SVI(
            local_reparameterization=True,
            batch_size=None if whole else BATCH,
            num_steps=SVI_STEPS,
            compile=compile,
        )
        return svi, f"{size}: mean-field SVI, whose variances are too small where weights correlate"
    # the Gram matrix of the rows stands for that of the weights where it is the smaller
    full = min(num_weights, num_data * width) <= MOST_FULL
    search = MAP(compile=compile) if whole else MAP(num_steps=STEPS, batch_size=BATCH, compile=compile)
    method = Laplace(
        structure="full" if full else "kron", tune="marginal_likelihood", map=search, importance=whole
    )
    words = ["Laplace's approximation, linearised, its prior's width tuned by the marginal likelihood"]
    if not full:
        words.append("its precision one Kronecker product per layer, for a full one would be too large")
    if not whole:
        words.append(
            f"its mode found with mini-batches of {BATCH:,} rows and few passes over all, and k-hat left out"
        )
    if num_data <= MOST_SAMPLED:
        words.append("method='nuts' samples the posterior itself, in minutes")
    return method, f"{size}: {'; '.join(words)}"
