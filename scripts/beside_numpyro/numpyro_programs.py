"""The same models in NumPyro: name → program of x and y."""

from __future__ import annotations

from beside_numpyro import numpyro_latents, numpyro_regressions, numpyro_series

PROGRAMS = {
    program.__name__: program
    for program in (
        numpyro_regressions.horseshoe,
        numpyro_series.hidden_markov,
        numpyro_latents.capture_recapture,
        numpyro_latents.graded_response,
        numpyro_series.poisson_process,
        numpyro_regressions.zero_inflated,
        numpyro_series.autoregression,
        numpyro_regressions.two_regressions,
        numpyro_series.stochastic_volatility,
        numpyro_series.gaussian_process,
        numpyro_latents.dawid_skene,
        numpyro_latents.item_response,
        numpyro_latents.gaussian_mixture,
        numpyro_latents.areal_counts,
        numpyro_series.seasonal_series,
        numpyro_regressions.overdispersed_counts,
        numpyro_regressions.wide_logistic,
        numpyro_regressions.censored_survival,
        numpyro_regressions.ordinal_regression,
        numpyro_latents.eight_schools,
        numpyro_regressions.missing_inputs,
        numpyro_series.change_point,
    )
}
