from __future__ import annotations

import functools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from pyrobnn import data
from pyrobnn.data import Dataset, Standardizer
from pyrobnn.data.synthetic import studies

GENERATORS = {
    "gap": (data.gap, 240, (-3, 3), lambda x: np.sin(1.2 * x), lambda x: 0.4 + 0 * x),
    "polynomial": (
        data.polynomial,
        100,
        (-1, 1),
        lambda x: 0.5 * x**2 + 0.25 * x**3,
        lambda x: 0.2 + 0 * x,
    ),
    "sinusoid": (data.sinusoid, 150, (0, 10), np.sin, lambda x: 0.3 + 0 * x),
    "sine": (data.sine, 92, (-0.5, 0.5), lambda x: 10 * np.sin(2 * np.pi * x), lambda x: 2 + 0 * x),
    "sinx3": (
        data.sinx3,
        500,
        (-5, 5),
        lambda x: 3 * np.sin(x),
        lambda x: np.abs(0.7 + 2 * np.sin(0.2 * x)),
    ),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generator_has_the_published_size_range_function_and_noise(name):
    make, num_data, (low, high), function, noise = GENERATORS[name]
    dataset = make()
    x = dataset.x.double().numpy()
    assert dataset.x.shape == dataset.y.shape == (num_data, 1)
    assert dataset.x.dtype == dataset.y.dtype == torch.float32
    assert low <= x.min() < x.max() <= high
    np.testing.assert_allclose(dataset.true_f.numpy(), function(x), atol=1e-5)
    np.testing.assert_allclose(dataset.true_noise.numpy(), noise(x), atol=1e-6)
    grid = torch.linspace(low, high, 7).unsqueeze(-1)
    np.testing.assert_allclose(
        dataset.true_function(grid).numpy(), function(grid.numpy()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        *(entry[0] for entry in GENERATORS.values()),
        data.clusters,
        data.cubic_clusters,
        functools.partial(data.polynomial, noise="heteroskedastic"),
        *(functools.partial(data.study, name) for name in studies()),
    ],
)
def test_a_data_set_goes_to_other_processes_with_its_true_function(make):
    dataset = make()
    copied = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copied.true_function(dataset.x), dataset.true_function(dataset.x))


def _nats(dataset, sigma):
    """Mean negative log-likelihood of the truth with noise ``sigma``."""
    return float(-torch.distributions.Normal(dataset.true_f, sigma).log_prob(dataset.y).mean())


def test_the_points_of_the_studies_are_theirs():
    plain = data.study("uncertainty")
    varying = data.study("uncertainty_heteroskedastic")
    # what the truth itself scores on the points of the study, as published, to its three digits
    assert _nats(plain, 0.5) == pytest.approx(0.303, abs=6e-4)
    assert _nats(plain, 0.2) == pytest.approx(-0.207, abs=6e-4)
    assert _nats(varying, 0.5) == pytest.approx(0.327, abs=6e-4)
    assert _nats(varying, varying.true_noise) == pytest.approx(-0.476, abs=6e-4)
    first = {
        "uncertainty": (-1.0, 0.6353831),
        "uncertainty_heteroskedastic": (-1.0, -0.3280746),
        "laplace": (8.8226929, 0.3465213),
        "four_clusters": (-3.0672460, -0.9936748),
        "four_cubic_clusters": (-3.0672460, -0.0788847),
        "two_clusters": (-0.8524637, 0.7293868),
        "two_cubic_clusters": (-0.8524637, 0.0694867),
        "variational": (-0.5, -2.2516787),
        "swag": (-5.0, 1.1887517),
    }
    for name in data.synthetic.studies():
        dataset = data.load(f"study_{name}", seed=7)
        assert dataset.x.dtype == dataset.y.dtype == torch.float32
        x = float(dataset.x[0, 0])
        y = float(dataset.y[0, 0])
        assert (x, y) == pytest.approx(first[name], abs=2e-6), (name, x, y)
    with pytest.raises(ValueError, match="'name' must be one of 'uncertainty'"):
        data.study("unknown")


@pytest.mark.parametrize(
    "name", [*GENERATORS, "clusters", "cubic_clusters", "polynomial_heteroskedastic"]
)
def test_residuals_over_the_true_noise_are_standard_normal(name):
    if name == "polynomial_heteroskedastic":
        dataset = data.polynomial(20_000, noise="heteroskedastic", seed=3)
    else:
        dataset = getattr(data, name)(20_000, seed=3)
    z = ((dataset.y - dataset.true_f) / dataset.true_noise).double().numpy().ravel()
    keep = dataset.true_noise.numpy().ravel() > 1e-3  # near σ = 0 the float32 rounding of y shows
    assert stats.kstest(z[keep], "norm").pvalue > 1e-6


def test_one_seed_gives_one_data_set():
    one, same, other = (data.clusters(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.x, same.x) and torch.equal(one.y, same.y)
    assert not torch.equal(one.x, other.x)


def test_the_gap_is_in_the_middle_and_empty():
    left, right = data.gap(2000).widest_gap()
    assert -1.01 < left <= -1.0 and 1.0 <= right < 1.01


def test_the_widest_gap_of_the_default_clusters_is_between_the_last_two():
    left, right = data.clusters().widest_gap()
    assert 1.7 < left <= 1.9 and 4.0 <= right < 4.2


def test_an_unknown_noise_lists_the_choices():
    with pytest.raises(ValueError, match="'homoskedastic', 'heteroskedastic'"):
        data.polynomial(noise="loud")


def test_bundled_sets():
    diabetes = data.diabetes()
    digits = data.digits()
    cancer = data.breast_cancer()
    assert (
        diabetes.x.shape == (442, 10) and diabetes.y.shape == (442, 1) and diabetes.num_outputs == 1
    )
    assert (
        digits.x.shape == (1797, 1, 8, 8)
        and digits.y.dtype == torch.int64
        and digits.num_outputs == 10
    )
    assert float(digits.x.min()) == 0 and float(digits.x.max()) == 1
    assert cancer.x.shape == (569, 30) and cancer.num_outputs == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.tensor([[1.0], [math.nan]])}, ValueError, "'x' holds 1 NaN"),
        ({"y": torch.tensor([[1.0], [math.inf]])}, ValueError, "'y' holds 1 NaN or infinite"),
        ({"x": torch.zeros(0, 1), "y": torch.zeros(0, 1)}, ValueError, "N > 0"),
        ({"x": torch.zeros(2)}, ValueError, r"x.unsqueeze\(-1\)"),
        ({"y": torch.zeros(3, 1)}, ValueError, "x has 2 rows and y has 3"),
        ({"y": torch.zeros(2)}, ValueError, r"y.unsqueeze\(-1\)"),
        ({"y": torch.zeros(2, 1).long()}, TypeError, r"y.float\(\)"),
        ({"task": "ranking"}, ValueError, "'task' must be one of 'regression', 'classification'"),
        ({"task": "classification"}, TypeError, r"y.long\(\)"),
        (
            {"task": "classification", "y": torch.tensor([0, 2]), "class_names": ("a", "b")},
            ValueError,
            "labels span 0 … 2, expected 0 … 1",
        ),
        (
            {"task": "classification", "y": torch.tensor([-1, 2])},
            ValueError,
            "labels span -1 … 2, expected 0 and above$",
        ),
    ],
)
def test_a_data_set_refuses_what_is_not_data(change, error, message):
    good = {"x": torch.zeros(2, 1), "y": torch.zeros(2, 1), "name": "d", "task": "regression"}
    Dataset(**good)
    with pytest.raises(error, match=message):
        Dataset(**{**good, **change})


class TestLoad:
    def test_every_name_loads(self):
        for name in data.names():
            assert data.load(name).num_data > 0

    def test_a_seed_reaches_the_synthetic_sets(self):
        assert not torch.equal(data.load("sine", seed=0).x, data.load("sine", seed=1).x)

    def test_a_file_is_loaded_under_its_stem(self, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text("a,y\n1,2\n3,4\n")
        assert data.load(str(path), "y").name == "t"
        with pytest.raises(ValueError, match="--target"):
            data.load(path)

    def test_bad_names(self):
        with pytest.raises(ValueError, match="'diabetis': choose one of diabetes"):
            data.load("diabetis")
        with pytest.raises(ValueError, match="has its own target"):
            data.load("diabetes", "bmi")


class TestSplit:
    def test_parts_are_disjoint_and_complete(self):
        full = data.sinusoid()
        train, test = data.train_test_split(full, 0.2, seed=0)
        assert (train.num_data, test.num_data) == (120, 30)
        both = torch.cat([train.x, test.x]).sort(dim=0).values
        torch.testing.assert_close(both, full.x.sort(dim=0).values, rtol=0, atol=0)
        torch.testing.assert_close(test.true_f, torch.sin(test.x))

    def test_a_seed_repeats_its_split_and_another_makes_another(self):
        parts = [data.train_test_split(data.sinusoid(), 0.2, seed)[1].x for seed in (0, 0, 1)]
        assert torch.equal(parts[0], parts[1]) and not torch.equal(parts[0], parts[2])

    def test_classes_keep_their_shares(self):
        _, test = data.train_test_split(data.digits(), 0.1, seed=0)
        assert torch.bincount(test.y).tolist() == pytest.approx([18] * 10, abs=1)

    @pytest.mark.parametrize(
        ("fraction", "message"), [(0.0, "in"), (1.5, "in"), (0.001, "leaves a part empty")]
    )
    def test_bad_fractions(self, fraction, message):
        with pytest.raises(ValueError, match=message):
            data.train_test_split(data.sinusoid(), fraction, 0)


class TestStandardizer:
    def test_train_part_has_mean_zero_and_sd_one_with_ddof_zero(self):
        dataset = data.diabetes()
        z = Standardizer.fit(dataset).transform(dataset)
        x = dataset.x.double()
        expected = (x - x.mean(0)) / x.std(0, correction=0)
        torch.testing.assert_close(z.x.double(), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(z.y.square().mean(), torch.tensor(1.0))

    @pytest.mark.parametrize("size", [1e200, 1e-200])
    @pytest.mark.parametrize("name", ["x", "y"])
    def test_values_whose_squares_are_no_numbers_are_refused(self, name, size):
        """Of inputs of 1e200 a net learned nothing, without a word; targets of 1e300 were predicted as inf."""
        values = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
        parts = {"x": values, "y": values} | {name: size * values}
        with pytest.raises(
            ValueError, match=f"'{name}' has values so .* .column 1.: give them in other units"
        ):
            Standardizer.fit(Dataset(parts["x"], parts["y"], "d", "regression"))

    def test_a_constant_column_keeps_scale_one(self):
        x = torch.cat([torch.full((7, 1), 0.1), torch.arange(7.0).unsqueeze(-1)], 1)
        standardizer = Standardizer.fit(Dataset(x, x[:, 1:], "d", "regression"))
        assert standardizer.x_scale.tolist() == [1.0, 2.0]
        assert standardizer.transform_x(x)[:, 0].abs().max() < 1e-7

    def test_images_have_one_scale_per_channel(self):
        digits = data.digits()
        units = Standardizer.fit(digits)
        assert units.x_mean.shape == units.x_scale.shape == (1, 1, 1)
        # a pixel that is dark in every digit but a few is lit in a turned one: 480 of its own standard deviations
        assert units.transform_x(digits.x.rot90(1, (2, 3))).abs().max() < 5
        colour = torch.cat([digits.x, 100 * digits.x, torch.ones_like(digits.x)], 1)
        units = Standardizer.fit(Dataset(colour, digits.y, "colour", "classification"))
        torch.testing.assert_close(units.x_scale[1], 100 * units.x_scale[0])
        z = units.transform_x(colour)
        torch.testing.assert_close(z[:, 0], z[:, 1], rtol=1e-4, atol=1e-4)
        assert float(z[:, 2].abs().max()) == 0.0 and units.x_scale[2].item() == 1.0

    def test_of_sequences_nothing_is_guessed(self):
        x = torch.randn(20, 5, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor(
            [1.0, 100.0]
        )
        sequences = Dataset(x, x[:, 0, :1], "s", "regression")
        with pytest.raises(ValueError, match=r"\(20, 5, 2\) and does not say"):
            Standardizer.fit(sequences)

    def test_whole_numbers_are_measured_not_truncated(self):
        x = torch.arange(6).reshape(3, 2)
        units = Standardizer.fit(Dataset(x, x[:, :1].float(), "counts", "regression"))
        torch.testing.assert_close(
            units.transform_x(x).square().mean(0), torch.ones(2, dtype=torch.float64)
        )

    def test_everything_reported_comes_back(self):
        train = data.diabetes()
        standardizer = Standardizer.fit(train)
        z = standardizer.transform(train)
        torch.testing.assert_close(
            z.x * standardizer.x_scale + standardizer.x_mean, train.x, rtol=1e-5, atol=1e-3
        )
        torch.testing.assert_close(standardizer.inverse_mean(z.y), train.y, rtol=1e-5, atol=1e-3)

    def test_labels_stay(self):
        dataset = data.breast_cancer()
        standardizer = Standardizer.fit(dataset)
        assert torch.equal(standardizer.transform(dataset).y, dataset.y)
