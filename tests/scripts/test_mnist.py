"""Study 5 on images by its own recipe: on a few images in MNIST's layout, and on the stand-in."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

from mnist.claim_tables import REPORTED, table, text  # noqa: E402

spec = importlib.util.spec_from_file_location("mnist_run", SCRIPTS / "mnist" / "run.py")
study = importlib.util.module_from_spec(spec)
sys.modules["mnist_run"] = study
spec.loader.exec_module(study)

SHORT = ["--epochs", "2", "--swag-epochs", "4", "--collect-every", "2", "--num-draws", "3"]


def write_few(folder):
    """Twenty training and ten test images of the stand-in, as torchvision leaves them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    train, test = study.stand_in(0)
    for part, images, num in (("train", train, 20), ("t10k", test, 10)):
        pixels = (255 * images.x[:num, 0]).to(torch.uint8).numpy()
        header = bytes([0, 0, 8, 3]) + struct.pack(">3I", *pixels.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = images.y[:num].to(torch.uint8).numpy()
        header = bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


@pytest.mark.slow
def test_the_recipe_runs_on_a_folder_in_torchvisions_layout(tmp_path, capsys):
    write_few(tmp_path)
    results = tmp_path / "records.jsonl"
    study.main([str(tmp_path), "--results", str(results), *SHORT])
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [row["softmaxes"] for row in rows] == ["one softmax", "two softmaxes"]
    assert {(row["data"], row["num_train"], row["num_test"]) for row in rows} == {("mnist", 20, 10)}
    # four epochs, an iterate every two; more columns than that were asked for
    assert all(row["iterates"] == row["rank"] == 2 < row["recipe"]["rank"] for row in rows)
    printed = capsys.readouterr().out
    assert printed.strip() == table(rows)
    # what the study reports stands beside its own recipe alone
    beside = [line for line in printed.splitlines() if line.endswith(" 95.46 |")]
    assert len(beside) == 1 and "| two softmaxes | SWAG |" in beside[0]


def test_the_loss_with_two_softmaxes_is_the_cross_entropy_of_probabilities():
    f = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 3, 9, 2])
    ours = study.SoftmaxTwice().log_prob(f, y, {})
    expected = -torch.nn.functional.cross_entropy(f.softmax(-1), y, reduction="none")
    torch.testing.assert_close(ours, expected)


def test_the_stand_in_has_the_shape_of_mnist():
    train, test = study.stand_in(0)
    assert train.x.shape == (1198, 1, 28, 28) and test.x.shape == (599, 1, 28, 28)
    assert 0 <= float(train.x.min()) and float(train.x.max()) <= 1
    assert {"start", "SWAG"} == set(REPORTED)


def test_the_page_has_the_table_of_the_records():
    page = (SCRIPTS / "mnist" / "claim.md").read_text(encoding="utf-8")
    assert text() in page
