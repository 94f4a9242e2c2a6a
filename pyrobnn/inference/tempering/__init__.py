"""Parts of SMC: the path from the prior to the posterior, and the moves of its particles."""
