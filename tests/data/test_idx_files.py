"""MNIST's files: torchvision's layout, packed or not, and what is wrong with broken ones."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch

from pyrobnn import data

PARTS = {"train": 12, "t10k": 5}


def idx(values):
    """An IDX file of unsigned bytes."""
    shape = values.shape
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values.tobytes()


def images(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (num, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.arange(num, dtype=torch.uint8) % 10
    return pixels, labels


def write(raw, packed=False):
    raw.mkdir(parents=True)
    for part, num in PARTS.items():
        pixels, labels = images(num, seed=num)
        for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = idx(values.numpy())
            if packed:
                (raw / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (raw / f"{part}-{name}-ubyte").write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("within", ["", "MNIST", "MNIST/raw"])
def test_the_images_are_those_of_the_files(tmp_path, packed, within):
    write(tmp_path / "MNIST" / "raw", packed)
    parts = dict(zip(PARTS, data.mnist(tmp_path / within), strict=True))
    for part, num in PARTS.items():
        pixels, labels = images(num, seed=num)
        assert parts[part].x.shape == (num, 1, 28, 28) and parts[part].x.dtype == torch.float32
        torch.testing.assert_close(parts[part].x[:, 0], pixels / 255)
        assert torch.equal(parts[part].y, labels.long())
        assert parts[part].num_outputs == 10 and parts[part].task == "classification"
    assert parts["train"].name == "mnist"


def test_torchvision_reads_the_same(tmp_path):
    torchvision = pytest.importorskip("torchvision.datasets", exc_type=(ImportError, RuntimeError))
    write(tmp_path / "MNIST" / "raw")
    theirs = torchvision.MNIST(str(tmp_path), train=True, download=False)
    train, _ = data.mnist(str(tmp_path))
    torch.testing.assert_close(train.x[:, 0], theirs.data / 255)
    assert torch.equal(train.y, theirs.targets)


def replace_file(raw, name, change):
    path = raw / name
    path.write_bytes(change(path.read_bytes()))


IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (IMAGES, lambda content: content[:-1], "12 x 28 x 28 and holds 9407 bytes, not 9408"),
        (IMAGES, lambda content: content + b"1", "cut short or was written over"),
        (IMAGES, lambda content: content[:10], "10 bytes, fewer than its header of 16"),
        (IMAGES, lambda content: b"", "begins with nothing"),
        (IMAGES, lambda content: b"<html>", "begins with 3c 68 74 6d"),
        (IMAGES, lambda content: content[:2] + b"\x0d" + content[3:], "no IDX file of unsigned"),
        (LABELS, lambda content: idx(images(11)[1].numpy()), "12 images of 'train' and 11 labels"),
        (LABELS, lambda content: content[:-1] + b"\x0a", "a label of 'train' is 10"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path, name, change, words):
    write(tmp_path / "MNIST" / "raw")
    replace_file(tmp_path / "MNIST" / "raw", name, change)
    with pytest.raises(ValueError, match=words) as caught:
        data.mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("change", [lambda content: content[:-9], lambda content: b"not packed"])
def test_a_broken_package_is_named(tmp_path, change):
    write(tmp_path / "MNIST" / "raw", packed=True)
    replace_file(tmp_path / "MNIST" / "raw", f"{IMAGES}.gz", change)
    with pytest.raises(ValueError, match="no whole .gz file"):
        data.mnist(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="download=True"):
        data.mnist(tmp_path)
    write(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        data.mnist(tmp_path)
