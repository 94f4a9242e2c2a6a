"""Discrete latent sites summed out of a program's density: as the program that is summed by hand, at many points."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal, AutoNormalMessenger
from pyro.ops.indexing import Vindex
from torch import Tensor

import pyrobnn as pb
from pyrobnn.core.checks import Refused
from pyrobnn.core.seeding import seeded
from pyrobnn.model import Density, derived, enumeration
from pyrobnn.model.gradient import batched_gradient

TOLERANCE = 1e-5


def mixture_data(num: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    signs = torch.where(torch.rand(num, generator=generator) < 0.4, -2.0, 2.0)
    return signs + 0.7 * torch.randn(num, generator=generator)


def mixture(x, y):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(-2.0, 1.0))
    step = pyro.sample("step", dist.HalfNormal(3.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    means = torch.stack([low, low + step])
    with pyro.plate("rows", len(y)):
        group = pyro.sample("group", dist.Bernoulli(share))
        pyro.sample(
            "y",
            dist.Normal(means[group.long()], scale),
            obs=y,
        )


def mixture_by_hand(x, y):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(-2.0, 1.0))
    step = pyro.sample("step", dist.HalfNormal(3.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    shares = dist.Categorical(torch.stack([1 - share, share]))
    with pyro.plate("rows", len(y)):
        components = dist.Normal(torch.stack([low, low + step]), scale)
        pyro.sample(
            "y",
            dist.MixtureSameFamily(shares, components),
            obs=y,
        )


def hmm(x, y):
    with pyro.plate("states", 3):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(3)))
        means = pyro.sample("means", dist.Normal(0.0, 2.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"state_{t}", dist.Categorical(Vindex(moves)[state]))
        pyro.sample(
            f"y_{t}",
            dist.Normal(Vindex(means)[state], 1.0),
            obs=y[t],
        )


def hmm_by_hand(x, y):
    with pyro.plate("states", 3):
        moves = pyro.sample("moves", dist.Dirichlet(torch.ones(3)))
        means = pyro.sample("means", dist.Normal(0.0, 2.0))
    forward = moves[0].log()
    for t, value in enumerate(y):
        if t:
            forward = (forward[:, None] + moves.log()).logsumexp(0)
        forward = forward + dist.Normal(means, 1.0).log_prob(value)
    pyro.factor("y", forward.logsumexp(0))


NUM_ITEMS, NUM_ANNOTATORS = 6, 4


def answers() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(
        0,
        3,
        (NUM_ANNOTATORS, NUM_ITEMS),
        generator=generator,
    )


def dawid_skene(x, y):
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("classes", 3), pyro.plate("of", NUM_ANNOTATORS):
        confusion = pyro.sample("confusion", dist.Dirichlet(torch.ones(3)))
    annotators = pyro.plate("annotators", NUM_ANNOTATORS, dim=-2)
    with pyro.plate("items", NUM_ITEMS, dim=-1):
        truth = pyro.sample("truth", dist.Categorical(shares))
        with annotators:
            who = torch.arange(NUM_ANNOTATORS)[:, None]
            pyro.sample(
                "y",
                dist.Categorical(Vindex(confusion)[who, truth, :]),
                obs=y,
            )


def dawid_skene_by_hand(x, y):
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("classes", 3), pyro.plate("of", NUM_ANNOTATORS):
        confusion = pyro.sample("confusion", dist.Dirichlet(torch.ones(3)))
    items = []
    for item in range(NUM_ITEMS):
        logs = [confusion[who, :, y[who, item]].log() for who in range(NUM_ANNOTATORS)]
        items.append((shares.log() + sum(logs)).logsumexp(0))
    with pyro.plate("items", NUM_ITEMS):
        pyro.factor("y", torch.stack(items))


def counts() -> Tensor:
    return torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0, 5.0])


def zero_inflated(x, y):
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y)):
        is_zero = pyro.sample("is_zero", dist.Bernoulli(gate))
        pyro.sample(
            "y",
            dist.Poisson(torch.where(is_zero == 1, 1e-20, rate)),
            obs=y,
        )


def zero_inflated_by_hand(x, y):
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample(
            "y",
            dist.ZeroInflatedPoisson(rate, gate=gate),
            obs=y,
        )


def weights_of(sticks: Tensor) -> Tensor:
    remaining = (1 - sticks).cumprod(-1)
    one = torch.ones_like(sticks[..., :1])
    return torch.cat([sticks, one], -1) * torch.cat([one, remaining], -1)


def stick_breaking(x, y):
    sticks = pyro.sample("sticks", dist.Beta(1.0, 2.0).expand([3]).to_event(1))
    with pyro.plate("components", 4):
        means = pyro.sample("means", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(y)):
        component = pyro.sample("component", dist.Categorical(weights_of(sticks)))
        pyro.sample(
            "y",
            dist.Normal(means[component], 1.0),
            obs=y,
        )


def stick_breaking_by_hand(x, y):
    sticks = pyro.sample("sticks", dist.Beta(1.0, 2.0).expand([3]).to_event(1))
    with pyro.plate("components", 4):
        means = pyro.sample("means", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(y)):
        shares = dist.Categorical(weights_of(sticks))
        pyro.sample(
            "y",
            dist.MixtureSameFamily(shares, dist.Normal(means, 1.0)),
            obs=y,
        )


def latent_beside(x, y):
    """A continuous value of every row whose law, and whose datum, depend on the row's group."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", len(y)):
        group = pyro.sample("group", dist.Bernoulli(share))
        level = pyro.sample("level", dist.Normal(2 * group, 1.0))
        pyro.sample(
            "y",
            dist.Normal(level, 0.5 + group),
            obs=y,
        )


def latent_beside_by_hand(x, y):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", len(y)):
        level = pyro.sample("level", dist.ImproperUniform(dist.constraints.real, (len(y),), ()))
        logs = []
        for group, log_share in enumerate([(1 - share).log(), share.log()]):
            prior = dist.Normal(2.0 * group, 1.0).log_prob(level)
            logs.append(log_share + prior + dist.Normal(level, 0.5 + group).log_prob(y))
        pyro.factor("y", torch.stack(logs).logsumexp(0))


def binomial_count(x, y):
    """How many of four are counted, of which each row sees a share with noise."""
    chance = pyro.sample("chance", dist.Beta(1.0, 1.0))
    count = pyro.sample("count", dist.Binomial(4, chance))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(count, 1.0), obs=y)


def binomial_count_by_hand(x, y):
    chance = pyro.sample("chance", dist.Beta(1.0, 1.0))
    values = torch.arange(5.0)
    logs = dist.Binomial(4, chance).log_prob(values)
    logs = logs + dist.Normal(values[:, None], 1.0).log_prob(y).sum(-1)
    pyro.factor("y", logs.logsumexp(0))


CASES = {
    "mixture": (mixture, mixture_by_hand, mixture_data()),
    "hidden Markov": (hmm, hmm_by_hand, mixture_data(7)),
    "Dawid-Skene": (dawid_skene, dawid_skene_by_hand, answers()),
    "zero inflation": (zero_inflated, zero_inflated_by_hand, counts()),
    "stick breaking": (stick_breaking, stick_breaking_by_hand, mixture_data(12)),
    "latent beside": (latent_beside, latent_beside_by_hand, mixture_data(5)),
    "binomial": (binomial_count, binomial_count_by_hand, mixture_data(6)),
}


@pytest.mark.parametrize("case", CASES)
def test_density_is_that_of_the_program_summed_by_hand(case):
    program, by_hand, y = CASES[case]
    density = Density(program, (None, y))
    reference = Density(by_hand, (None, y))
    assert density.states
    z = torch.randn(
        4,
        density.dim,
        generator=torch.Generator().manual_seed(0),
    )
    gradient, why = batched_gradient(density.log_joint, z)
    assert why == ""
    slopes, values = gradient(z)
    expected_slopes, expected = batched_gradient(reference.log_joint, z)[0](z)
    torch.testing.assert_close(
        values,
        expected,
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
    torch.testing.assert_close(
        slopes,
        expected_slopes,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("case", ["mixture", "Dawid-Skene", "zero inflation"])
def test_each_row_has_its_log_likelihood(case):
    program, by_hand, y = CASES[case]
    density = Density(program, (None, y))
    reference = Density(by_hand, (None, y))
    z = torch.randn(density.dim, generator=torch.Generator().manual_seed(0))
    terms = density.data_terms(z)["y"]
    assert terms.numel() == y.shape[-1]
    torch.testing.assert_close(terms.float(), reference.data_terms(z)["y"].float())
    total = density.log_base(z) + terms.sum() + density.log_jacobian(z)
    torch.testing.assert_close(
        total,
        density.log_joint(z),
        rtol=1e-5,
        atol=1e-4,
    )


def test_prior_of_a_latent_site_beside_a_discrete_one_is_summed_without_the_data():
    y = mixture_data(5)
    density = Density(latent_beside, (None, y))
    z = torch.randn(density.dim, generator=torch.Generator().manual_seed(0))
    values = density.constrain(z)
    share = values["share"]
    levels = values["level"]
    two = torch.stack(
        [dist.Normal(0.0, 1.0).log_prob(levels), dist.Normal(2.0, 1.0).log_prob(levels)]
    )
    shares = torch.stack([1 - share, share]).log()[:, None]
    expected = dist.Beta(2.0, 2.0).log_prob(share) + (two + shares).logsumexp(0).sum()
    torch.testing.assert_close(density.log_parts(z)[0].float(), expected)
    assert density.data_terms(z)["y"].shape == (5,)


def test_a_series_summed_as_one_is_one_datum():
    y = mixture_data(7)
    density = Density(hmm, (None, y))
    z = torch.randn(density.dim, generator=torch.Generator().manual_seed(0))
    terms = density.data_terms(z)
    assert {name: term.numel() for name, term in terms.items()} == {"y_0": 1}
    torch.testing.assert_close(terms["y_0"].double(), density.log_parts(z)[1])


def test_a_mini_batch_is_scaled_outside_of_the_sum():
    y = mixture_data()

    def subsampled(x, y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        with pyro.plate("rows", 400, subsample_size=len(y)):
            group = pyro.sample("group", dist.Bernoulli(share))
            pyro.sample(
                "y",
                dist.Normal(4 * group - 2, 1.0),
                obs=y,
            )

    density = Density(subsampled, (None, torch.cat([y] * 10)))
    z = torch.tensor([0.3])
    with seeded(0):  # the plate draws its rows
        log_prior, log_likelihood = density.subsampled().log_parts(z, None, y)
    full_prior, full = density.log_parts(z)
    torch.testing.assert_close(log_prior, full_prior)
    torch.testing.assert_close(log_likelihood, full)


def test_replicates_draw_the_discrete_sites():
    y = mixture_data()
    density = Density(mixture, (None, y))
    draws = {
        "share": torch.full((1, 500), 0.25),
        "low": torch.full((1, 500), -2.0),
        "step": torch.full((1, 500), 4.0),
        "scale": torch.full((1, 500), 0.1),
    }
    replicates = derived.replicates(density, draws, seed=0)["y"]
    assert replicates.shape == (1, 500, 40)
    share = float((replicates > 0).double().mean())
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / replicates.numel())


def test_a_deterministic_value_of_a_discrete_site_is_no_draw():
    def program(x, y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        pyro.deterministic("odds", share / (1 - share))
        with pyro.plate("rows", len(y)):
            group = pyro.sample("group", dist.Bernoulli(share))
            mean = pyro.deterministic("mean", 4 * group - 2)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    density = Density(program, (None, mixture_data()))
    assert [*density.derived.deterministic] == ["odds"]


def test_refuses_a_law_of_infinitely_many_values():
    def program(x, y):
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        count = pyro.sample("count", dist.Poisson(rate))
        pyro.sample("y", dist.Normal(count, 1.0), obs=y)

    with pytest.raises(Refused, match="'count' is discrete and its Poisson has no finite list"):
        Density(program, (None, torch.tensor(1.0)))


def test_refuses_what_python_decides_by_a_discrete_value():
    def program(x, y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        mean = 1.0 if pyro.sample("group", dist.Bernoulli(share)) else -1.0
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.raises(Refused, match="let no Python depend on their values"):
        Density(program, (None, torch.tensor(1.0)))


def test_refuses_a_sum_over_too_many_states_and_says_how_many():
    def program(x, y):
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        total = sum(pyro.sample(f"item_{i}", dist.Bernoulli(share)) for i in range(30))
        pyro.sample("y", dist.Normal(total, 1.0), obs=y)

    with pytest.raises(Refused, match=r"over a table of [\d,]{10,} entries") as refusal:
        Density(program, (None, torch.tensor(1.0)))
    number = int(str(refusal.value).split("table of ")[1].split(" ")[0].replace(",", ""))
    assert number > enumeration.MOST_STATES


def test_a_chain_of_many_states_is_summed_where_markov_says_so():
    y = mixture_data(40)
    density = Density(hmm, (None, y))
    assert len(density.states) == 40
    assert bool(torch.isfinite(density.log_joint(torch.zeros(density.dim))))


def test_a_program_of_discrete_sites_alone_is_refused():
    def program(x, y):
        group = pyro.sample("group", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(group, 1.0), obs=y)

    with pytest.raises(ValueError, match="discrete latent sites alone: pyro.infer.infer_discrete"):
        Density(program, (None, torch.tensor(1.0)))


# -- fits --------------------------------------------------------------------------------------------------------------

METHODS = {
    "NUTS": pb.NUTS(
        num_chains=2,
        num_warmup=100,
        compile=False,
    ),
    "SVI": pb.SVI(num_steps=2000, compile=False),
    "MAP": pb.MAP(num_steps=300, compile=False),
    "Laplace": pb.Laplace(num_steps=300, compile=False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "MAP" else pytest.mark.slow) for name in METHODS],
)
def test_fits_are_those_of_the_program_summed_by_hand(name):
    y = mixture_data()
    num_draws = 1 if name == "MAP" else 300
    fits = [
        METHODS[name].fit(
            program,
            None,
            y,
            num_draws=num_draws,
            seed=0,
        )
        for program in (mixture, mixture_by_hand)
    ]
    for site in fits[1].draws:
        mean, expected = (fit.draws[site].double().mean() for fit in fits)
        spread = fits[1].draws[site].double().std(correction=0)
        assert abs(mean - expected) < max(0.35 * spread, 1e-3 * (1 + abs(expected)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("guide", [AutoNormal, AutoNormalMessenger])
def test_pyros_guides_are_of_the_continuous_sites(guide):
    y = mixture_data()
    fit = pb.SVI(guide=guide, num_steps=50, compile=False).fit(
        mixture,
        None,
        y,
        num_draws=20,
    )
    assert set(fit.draws) == {"share", "low", "step", "scale"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fit_is_compiled_and_batched():
    y = mixture_data()
    compiled, eager = (
        pb.NUTS(
            num_chains=2,
            num_warmup=20,
            compile=choice,
        ).fit(
            mixture,
            None,
            y,
            num_draws=20,
            seed=0,
        )
        for choice in (True, False)
    )
    difference = compiled.sample_stats["lp"][:, 0] - eager.sample_stats["lp"][:, 0]
    assert bool(torch.isfinite(difference).all())
    assert not any("one after the other" in words for words in compiled.meta["warnings"])


# -- discrete sites after a fit ----------------------------------------------------------------------------------------


def posterior_at(
    program,
    y: Tensor,
    values: dict[str, Tensor],
    num: int,
) -> pb.Posterior:
    """A posterior all of whose draws are these values."""
    draws = {name: value.expand(1, num, *value.shape) for name, value in values.items()}
    return pb.Posterior(program, draws)


def test_discrete_sites_are_drawn_from_their_law_given_the_data():
    y = torch.tensor([-2.0, -0.1, 0.3, 2.0])
    values = {
        "share": torch.tensor(0.3),
        "low": torch.tensor(-1.0),
        "step": torch.tensor(2.0),
        "scale": torch.tensor(1.0),
    }
    posterior = posterior_at(mixture, y, values, 4000)
    group = posterior.infer_discrete(None, y)["group"]
    assert group.shape == (1, 4000, 4) and group.dtype == torch.int64
    odds = (
        0.3 / 0.7 * (dist.Normal(1.0, 1.0).log_prob(y) - dist.Normal(-1.0, 1.0).log_prob(y)).exp()
    )
    expected = odds / (1 + odds)
    error = (expected * (1 - expected) / 4000).sqrt()
    assert bool(((group[0].double().mean(0) - expected).abs() < 4 * error).all())
    cold = posterior.infer_discrete(None, y, temperature=0)["group"]
    assert torch.equal(cold, (expected > 0.5).long().expand(1, 4000, 4))
    again = posterior.infer_discrete(None, y)["group"]
    assert torch.equal(group, again)
    assert not torch.equal(group, posterior.infer_discrete(None, y, seed=1)["group"])


def test_paths_of_a_hidden_markov_model_are_drawn_together():
    y = torch.tensor([-0.5, 0.2, 0.4])
    moves = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]])
    means = torch.tensor([-1.0, 0.0, 1.0])
    posterior = posterior_at(hmm, y, {"moves": moves, "means": means}, 4000)
    drawn = posterior.infer_discrete(None, y)
    paths = 9 * drawn["state_0"] + 3 * drawn["state_1"] + drawn["state_2"]
    frequencies = torch.bincount(paths.reshape(-1), minlength=27) / paths.numel()
    logs = dist.Normal(means, 1.0).log_prob(y[:, None])
    joint = (
        (moves[0].log() + logs[0])[:, None, None]
        + (moves.log() + logs[1])[:, :, None]
        + (moves.log() + logs[2])[None]
    ).reshape(-1)
    expected = joint.softmax(0)
    error = (expected * (1 - expected) / paths.numel()).sqrt()
    assert bool(((frequencies - expected).abs() < 4.5 * error).all())
    best = posterior.infer_discrete(None, y, temperature=0)
    path = 9 * best["state_0"] + 3 * best["state_1"] + best["state_2"]
    assert bool((path == joint.argmax()).all())


def test_sites_above_a_plate_are_drawn_before_those_inside():
    """Dawid and Skene's items, whose class is shared by the annotators of a plate inside."""
    y = answers()
    confusion = (2 * torch.eye(3) + 0.2).log_softmax(-1).exp().expand(NUM_ANNOTATORS, 3, 3)
    shares = torch.tensor([0.5, 0.3, 0.2])
    posterior = posterior_at(dawid_skene, y, {"shares": shares, "confusion": confusion}, 3000)
    truth = posterior.infer_discrete(None, y)["truth"]
    assert truth.shape == (1, 3000, NUM_ITEMS)
    who = torch.arange(NUM_ANNOTATORS)[:, None]
    logs = shares.log() + confusion[who, :, y].log().sum(0)
    expected = logs.softmax(-1)
    frequencies = torch.nn.functional.one_hot(truth[0], 3).double().mean(0)
    error = (expected * (1 - expected) / 3000).sqrt()
    assert bool(((frequencies - expected).abs() < 4.5 * error + 1e-3).all())


def test_a_tree_has_the_rows_summed_and_replicates_drawn():
    y = mixture_data()
    num = 100
    values = {
        "share": 0.5
        + 0.05
        * torch.randn(
            2,
            num,
            generator=torch.Generator().manual_seed(0),
        ),
        "low": torch.full((2, num), -2.0),
        "step": torch.full((2, num), 4.0),
        "scale": torch.full((2, num), 0.7),
    }
    posterior = pb.Posterior(
        mixture,
        values,
        meta={"data_given": [False, True]},
    )
    tree = posterior.to_datatree(None, y)
    assert tree["log_likelihood"]["y"].dims == ("chain", "draw", "rows")
    assert tree["posterior_predictive"]["y"].shape == (2, num, len(y))
    expected = Density(mixture_by_hand, (None, y))
    z = expected.unconstrain({name: value[1, 3] for name, value in values.items()})
    row_terms = torch.as_tensor(tree["log_likelihood"]["y"].values[1, 3])
    torch.testing.assert_close(
        row_terms,
        expected.data_terms(z)["y"],
        rtol=1e-4,
        atol=1e-4,
    )


def test_infer_discrete_says_where_there_is_nothing_to_draw():
    y = mixture_data(5)
    values = {
        "share": torch.tensor(0.3),
        "low": torch.tensor(-1.0),
        "step": torch.tensor(2.0),
        "scale": torch.tensor(1.0),
    }
    with pytest.raises(ValueError, match="no discrete latent sites"):
        posterior_at(mixture_by_hand, y, values, 2).infer_discrete(None, y)
    with pytest.raises(ValueError, match="'temperature' must be >= 0"):
        posterior_at(mixture, y, values, 2).infer_discrete(
            None,
            y,
            temperature=-1.0,
        )


def test_half_of_a_long_chain_is_summed_out_side_by_side():
    terms = []
    generator = torch.Generator().manual_seed(0)
    for first, second in itertools.pairwise("abcdefgh"):
        term = torch.randn(3, 3, dtype=torch.float64, generator=generator)
        term._pyro_dims = first + second
        terms.append(term)
    ring = enumeration._Ring({"state": 3})
    assert len(ring._next(terms, set("abcdefgh"))) == 4
    total = ring.sumproduct(terms, set("abcdefgh"))
    product = terms[0].exp()
    for term in terms[1:]:
        product = product @ term.exp()
    torch.testing.assert_close(total, product.sum().log())


def test_a_large_table_is_summed_out_by_itself():
    terms = []
    for first, second in itertools.pairwise("abcd"):
        term = torch.zeros(30, 30)
        term._pyro_dims = first + second
        terms.append(term)
    # in the middle of a chain a site has 27,000 entries, at either end 900
    assert enumeration._Ring({"state": 30})._next(terms, set("abcd")) == ["a", "d"]
