"""Names that other libraries have for an option: the table, and the check of a call that names ours by theirs."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: names of one thing in Pyro, NumPyro, PyMC, Stan, scikit-learn, laplace-torch and here, a line for each thing
SYNONYMS = (
    "num_draws num_samples draws n_samples nsamples n_draws ndraws samples iter_sampling",
    "num_warmup warmup_steps warmup n_warmup iter_warmup tune n_tune burn_in burnin num_burn",
    "num_chains chains n_chains nchains",
    "target_accept target_accept_prob target_acceptance adapt_delta",
    "max_tree_depth max_treedepth tree_depth",
    "mass_matrix full_mass dense_mass metric",
    "step_size stepsize",
    "trajectory trajectory_length num_leapfrog",
    "thinning thin",
    "seed random_seed random_state rng_key rng key",
    "progress progressbar progress_bar disable_progbar verbose",
    "compile jit jit_compile",
    "init initial_params init_params initvals inits init_strategy init_values start",
    "num_steps num_iterations num_iters iterations n_iter niter max_iter n_steps steps epochs num_epochs n_epochs",
    "lr learning_rate learning_rate_init",
    "optimizer optim",
    "guide autoguide",
    "kl_weight beta",
    "batch_size batchsize minibatch_size subsample_size",
    "num_particles particles n_particles",
    "num_members n_members ensemble_size n_estimators n_models",
    "structure hessian_structure",
    "subset subset_of_weights",
    "likelihood observation_model",
    "prior priors",
    "support constraints",
    "hidden hidden_layer_sizes hidden_units",
    "x X inputs data features args",
    "y Y obs targets observed labels",
    "model program",
    "callbacks callback hook_fn",
    "checkpoint checkpoint_path",
    "log_density potential_fn logp log_prob",
    "q quantiles",
)

#: least similarity of a misspelt option to the one that is meant
_SIMILAR = 0.8


def options_explained(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which says of an option that it does not have how that is called here.

    Raises:
        TypeError: an option under the name of another library, or misspelt: with the name that it has here.
    """
    names = _options(function)

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        refuse_unknown(_owner(function, *args, **options), options, {"": names})
        return function(*args, **options)

    return checked


def _owner(function: Callable[P, R], /, *args: P.args, **_: P.kwargs) -> str:
    """Whose option it would be: a class where the function is its constructor, else the function."""
    if function.__name__ == "__init__" and args:
        return type(args[0]).__name__
    return function.__name__


def _options(function: Callable[P, R]) -> tuple[str, ...]:
    """The names of the arguments of a function, or of the constructor of a class, without ``self``."""
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def refuse_unknown(
    owner: str,
    options: Iterable[str],
    places: Mapping[str, Sequence[str]],
) -> None:
    """TypeError of the first of the options that the call does not have; arguments as of :func:`unknown_option`."""
    for option in options:
        if option not in places[""]:
            raise TypeError(unknown_option(owner, option, places))


def unknown_option(owner: str, option: str, places: Mapping[str, Sequence[str]]) -> str:
    """What to write instead of an option, in a sentence.

    Args:
        owner: what was called.
        option: the name that it does not know.
        places: the options that there are, where ("" is the call itself, then other calls in words).
    """
    words = f"{owner} has no option {option!r}"
    for name, place in _same_thing(option, places):
        if name == option:
            return f"{words}: it is one of {place}"
        where = f", an option of {place}" if place else ""
        return f"{words}: it is {name!r}{where}"
    known = list(itertools.chain.from_iterable(places.values()))
    similar = difflib.get_close_matches(
        option,
        known,
        n=1,
        cutoff=_SIMILAR,
    )
    if similar:
        return f"{words}: did you mean {similar[0]!r}?"
    return f"{words}; it has {', '.join(places[''])}"


def _same_thing(option: str, places: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The names that the option has in each of the places, the same name elsewhere first."""
    synonyms = [option]
    for line in SYNONYMS:
        if option in line.split():
            synonyms += line.split()
    for place, names in places.items():
        for name in synonyms:
            if name in names:
                yield name, place
