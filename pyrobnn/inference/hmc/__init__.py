"""Hamiltonian Monte Carlo: the machine that moves all chains at once, its warm-up, its files and its checks.

Reading order: ``metric`` and ``leapfrog``; ``step_size`` and ``windows``, which adapt; ``machine`` (one step),
``run_state`` (its state), ``stepper`` (the step compiled), ``run`` (the loop of the host); and what the host does
beside it: ``hooks``, ``checkpoint``, ``interruption``. ``starts`` comes before a run; ``chain_convergence``,
``run_findings`` and ``retrace`` after it. ``pyro_engine`` is the reference, ``transition_options`` the options that
both engines read.
"""
