"""The law of a net's rows: what it cannot take is said in words, wherever it stands, and noise is not left out."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from helpers import seeded
from models import normal_prior
from test_law_dense import METHODS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrobnn as pb
from pyrobnn.core.checks import Refused

# runs this short are told to be too short
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROWS = 12


def bnn(net: nn.Module) -> pb.BNN:
    return pb.BNN(net, normal_prior(), pb.likelihoods.HomoskedasticGaussian(0.5))


def targets() -> torch.Tensor:
    return torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))


def numbers() -> torch.Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))


def fitted(name: str, net: nn.Module, x) -> pb.Posterior:
    method, options = METHODS[name]
    return method.fit(bnn(net), x, targets(), seed=0, **options)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.vectors(x.long()).mean(1))


@pytest.mark.parametrize("name", METHODS)
def test_a_word_that_is_not_in_the_table_is_told_in_the_last_row(name):
    words = torch.arange(4 * ROWS).reshape(ROWS, 4) % 7
    words[-1, -1] = 7
    with seeded(0), pytest.raises(ValueError, match="'vectors' has 0 to 6"):
        fitted(name, Words(), words)


def test_predictions_say_what_the_net_cannot_take():
    words = torch.arange(4 * ROWS).reshape(ROWS, 4) % 7
    with seeded(0):
        reader = Words()
        convolution = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(ValueError, match="'vectors' has 0 to 6"):
        fitted("MAP", reader, words).predict(words + 1)
    images = torch.randn(ROWS, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    posterior = fitted("MAP", convolution, images)
    with pytest.raises(
        ValueError, match=r"cannot take 'x' .* It was fitted to \(points, 3, 4, 4\)"
    ):
        posterior.predict(images.movedim(1, 3))
    with pytest.raises(TypeError, match="predict_to"):
        posterior.predict(DataLoader(TensorDataset(images), 4))


class DropsByItself(nn.Module):
    """Drops units in its forward, where nobody sees a layer."""

    def __init__(self, norm: bool):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.norm(self.body(x)).relu()
        return self.head(nn.functional.dropout(hidden, 0.3, training=self.training))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_noise_of_the_forward_is_not_left_out_in_silence(name, norm):
    with seeded(0):
        net = DropsByItself(norm)
    with pytest.raises(Refused, match=r"training mode.* (call|net)\.?.*eval\(\)"):
        fitted(name, net, numbers())
    fitted(name, net.eval(), numbers())


def test_columns_are_taken_by_their_names(tmp_path):
    table = pd.DataFrame(numbers().numpy(), columns=["width", "height", "depth"])
    with seeded(0):
        net = nn.Linear(3, 1)
    posterior = fitted("SVI", net, table)
    expected = posterior.predict(numbers()).f
    turned = table[["depth", "width", "height"]]
    assert torch.equal(posterior.predict(turned).f, expected)
    y = targets()
    trees = [posterior.to_datatree(rows, y) for rows in (table, turned)]
    densities = [tree["log_likelihood"].to_dataset() for tree in trees]
    assert densities[0].equals(densities[1])
    pytest.importorskip("pyarrow")
    for number, rows in enumerate((turned, [turned[:5], turned[5:]])):
        path = posterior.predict_to(tmp_path / f"{number}.parquet", rows)
        mean = torch.tensor(pd.read_parquet(path)["mean"].to_numpy())
        torch.testing.assert_close(mean, posterior.predict(numbers()).mean[:, 0])
    with pytest.raises(ValueError, match="'x' lacks 'depth' and has 'length'"):
        posterior.predict(table.rename(columns={"depth": "length"}))


def test_a_file_of_predictions_has_the_order_of_its_rows(tmp_path):
    pytest.importorskip("pyarrow")
    with seeded(0):
        posterior = fitted("MAP", nn.Linear(3, 1), numbers())
    shuffled = DataLoader(TensorDataset(numbers()), 4, shuffle=True)
    with pytest.raises(ValueError, match="a loader that shuffles"):
        posterior.predict_to(tmp_path / "rows.parquet", shuffled)
    with pytest.raises(ValueError, match="in its first batch"):
        posterior.predict_to(tmp_path / "rows.parquet", [numbers(), numbers()[:, :2]])
    with pytest.raises(TypeError, match="are dictionaries"):
        posterior.predict_to(tmp_path / "rows.parquet", [{"x": numbers()}])
    assert not [*tmp_path.iterdir()]
