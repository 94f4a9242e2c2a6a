"""What users hand over as data: taken as it is meant, or refused in words."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from helpers import seeded
from models import normal_prior

import pyrobnn as pb
from pyrobnn.core.checks import as_tensor
from pyrobnn.inference.fitting.problem import prepare

TABLE = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2)
FRAME = pd.DataFrame(TABLE, columns=["p", "q"])
LABELS = np.array(["a", "b", "c", "a"] * 5)


def model(prior=None, **options) -> pb.BNN:
    with seeded(0):
        net = pb.networks.mlp(2, (4,), 1)
    return pb.BNN(
        net, prior or normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.2), **options
    )


def frozen() -> np.ndarray:
    array = TABLE.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "value",
    [
        FRAME,
        FRAME.astype(object),
        FRAME.astype("Float64"),
        frozen(),
        TABLE[::-1].copy()[::-1],
        TABLE.astype(">f4"),
        TABLE.astype(np.longdouble),
        TABLE.tolist(),
        [*TABLE],
        [*torch.from_numpy(TABLE)],
    ],
)
def test_numbers_in_any_form(value):
    assert torch.equal(as_tensor("x", value).float(), torch.from_numpy(TABLE))


def test_what_cannot_be_written_to_is_copied():
    array = frozen()
    as_tensor("x", array).add_(1)
    assert np.array_equal(array, TABLE)


def test_columns_of_several_types():
    frame = FRAME.assign(q=True, r=3)
    assert as_tensor("x", frame)[0].tolist() == [-1.0, 1.0, 3.0]
    assert as_tensor("y", pd.Series([0, 1], dtype="Int64")).dtype == torch.int64


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        LABELS.astype(object),
        LABELS.tolist(),
        pd.Series(LABELS),
        pd.Series(LABELS, dtype="category"),
        pd.Series(LABELS, dtype="string"),
    ],
)
def test_labels_in_words(labels):
    with pytest.raises(
        TypeError, match="'y' .* holds text such as 'a': make integers .*numpy.unique"
    ):
        prepare(model(), TABLE, labels, points="free")


@pytest.mark.parametrize(
    "x, message",
    [
        (FRAME.assign(q="north"), "in the columns q text such as 'north': .*get_dummies"),
        (FRAME.assign(q=pd.Categorical(["u", "v"] * 10)), "in the columns q text such as 'u'"),
        (FRAME.assign(q=pd.Timestamp(0)), "in the columns q"),
        (TABLE.astype(complex), "holds complex128: make real numbers"),
        (torch.from_numpy(TABLE).to_sparse(), "dense real tensor"),
        ("data.csv", "text such as 'data.csv'"),
        ([[1.0], [1.0, 2.0]], "numeric array: "),
        (
            pb.data.Dataset(TABLE, TABLE[:, :1], "t", "regression"),
            "is a data set: .*data.x, data.y",
        ),
        (torch.utils.data.TensorDataset(torch.zeros(3, 2)), "DataLoader"),
    ],
)
def test_what_is_no_numbers(x, message):
    with pytest.raises(TypeError, match=message):
        prepare(model(), x, TABLE[:, :1], points="free")


def test_missing_values_are_counted():
    frame = FRAME.astype(object)
    frame.iloc[3, 1] = np.nan
    with pytest.raises(ValueError, match="infinite values .first in row 3."):
        prepare(model(), frame, TABLE[:, :1], points="free")


def test_a_data_set_of_arrays_and_frames():
    for x, y in ((TABLE, TABLE[:, :1]), (FRAME, FRAME[["p"]])):
        data = pb.data.Dataset(x, y, "t", "regression")
        assert torch.equal(data.x, torch.from_numpy(TABLE)) and data.y.shape == (20, 1)
        assert len(data.subset([0, 3]).x) == 2


@pytest.mark.parametrize(
    "method", [pb.MAP(num_steps=2, compile=False), pb.Laplace(num_steps=2, compile=False)]
)
@pytest.mark.filterwarnings("ignore:the centre is not a mode")
def test_inputs_of_another_width(method):
    data = pb.data.Dataset(TABLE, TABLE[:, :1], "t", "regression")
    posterior = method.fit(model(standardizer=pb.data.Standardizer.fit(data)), data.x, data.y)
    for wrong in (torch.zeros(3, 5), torch.zeros(3, 1), torch.zeros(2), torch.zeros(3, 2, 1)):
        for ask in (posterior.predict, posterior.function):
            with pytest.raises(ValueError, match=r"'x' has shape .* fitted to \(points, 2\)"):
                ask(wrong)
    assert posterior.predict(FRAME).mean.shape == (20, 1)


@pytest.mark.slow
def test_a_mixture_of_one_family_is_a_prior():
    parts = (
        dist.Categorical(torch.tensor([0.3, 0.7])),
        dist.Normal(torch.zeros(2), torch.tensor([0.1, 1.0])),
    )
    mixed = model(pb.priors.IIDPrior(dist.MixtureSameFamily(*parts)))
    same = model(pb.priors.ScaleMixture(pi=0.3, scale1=0.1, scale2=1.0))
    densities = [prepare(one, TABLE, TABLE[:, :1], points="free").density for one in (mixed, same)]
    z = densities[0].sample_prior(1, seed=0)[0]
    torch.testing.assert_close(*(density.log_joint(z) for density in densities))
    for method in (
        pb.SVI(num_steps=3, compile=False),
        pb.NUTS(num_chains=2, num_warmup=3, compile=False),
    ):
        posterior = method.fit(mixed, TABLE, TABLE[:, :1], num_draws=3)
        assert posterior.draws["net.0.weight"].shape[1:] == (3, 4, 2)


def test_a_prior_on_no_known_support_is_refused():
    class Anywhere(torch.distributions.constraints.Constraint):
        def check(self, value):
            return torch.ones_like(value, dtype=torch.bool)

    class Odd(dist.Normal):
        support = Anywhere()

    with pytest.raises(ValueError, match="no bijection .* site 'net.0.weight'"):
        prepare(model(pb.priors.IIDPrior(Odd(0.0, 1.0))), TABLE, TABLE[:, :1], points="free")
