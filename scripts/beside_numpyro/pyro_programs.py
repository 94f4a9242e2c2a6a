"""The programs as users of Pyro write them: name → program of x and y."""

from __future__ import annotations

from beside_numpyro import pyro_latents, pyro_regressions, pyro_series

PROGRAMS = {
    program.__name__: program
    for program in (
        pyro_regressions.horseshoe,
        pyro_series.hidden_markov,
        pyro_latents.capture_recapture,
        pyro_latents.graded_response,
        pyro_series.poisson_process,
        pyro_regressions.zero_inflated,
        pyro_series.autoregression,
        pyro_regressions.two_regressions,
        pyro_series.stochastic_volatility,
        pyro_series.gaussian_process,
        pyro_latents.dawid_skene,
        pyro_latents.item_response,
        pyro_latents.gaussian_mixture,
        pyro_latents.areal_counts,
        pyro_series.seasonal_series,
        pyro_regressions.overdispersed_counts,
        pyro_regressions.wide_logistic,
        pyro_regressions.censored_survival,
        pyro_regressions.ordinal_regression,
        pyro_latents.eight_schools,
        pyro_regressions.missing_inputs,
        pyro_series.change_point,
    )
}
