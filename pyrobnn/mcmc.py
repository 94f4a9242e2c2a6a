"""``MCMC``, ``NUTS`` and ``HMC`` with the signatures of ``pyro.infer``: change one import, keep the program."""

from pyrobnn.bridges.pyro_mcmc import HMC, MCMC, NUTS

__all__ = ["HMC", "NUTS", "MCMC"]
