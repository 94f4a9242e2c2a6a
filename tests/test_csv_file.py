"""CSV files as people have them: each is read rightly, or refused in words."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from pyrobnn import data
from pyrobnn.data import Standardizer


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_regression(tmp_path):
    dataset = data.from_csv(write(tmp_path, "a, b, price\n1, 2, 3.5\n4, 5, 6\n"), "price")
    assert dataset.task == "regression" and dataset.feature_names == ("a", "b")
    assert dataset.x.tolist() == [[1, 2], [4, 5]] and dataset.y.tolist() == [[3.5], [6]]


def test_text_targets_become_classes_in_sorted_order(tmp_path):
    dataset = data.from_csv(write(tmp_path, "a,kind\n1,dog\n2,cat\n3,dog\n"), "kind")
    assert dataset.task == "classification" and dataset.class_names == ("cat", "dog")
    assert dataset.y.tolist() == [1, 0, 1]


def test_numbers_become_classes_on_request(tmp_path):
    path = write(tmp_path, "a,kind\n1,7\n2,3\n3,7\n")
    dataset = data.from_csv(path, "kind", task="classification")
    assert dataset.y.tolist() == [1, 0, 1] and dataset.class_names == ("3", "7")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("a,city,y\n1,Rome,2\n", "y", "column 'city' is not numeric: drop it, or encode"),
        ("a,b\n1,2\n", "y", "no column 'y': its columns are a, b"),
        ("a,b,y\n1,,2\n3,4,\n", "y", r"missing values in column 'b' \(1\), 'y' \(1\)"),
        ("a,y\ninf,2\n", "y", "NaN or infinite"),
        ("a,y\n", "y", "no rows"),
        ("", "y", "not a CSV file with a header"),
        ("y\n1\n", "y", "nothing to predict from"),
        ("a,y\n1,dog\n2,dog\n", "y", "single class"),
        (
            "a,y\n1,2.5\n2,?\n3,4.5\n4,1.5\n",
            "y",
            r"'y' holds numbers but for 1 of 4 cells, first '\?' in row 2",
        ),
        (
            "a,y\n1,2.5\n2,3\n-,4.5\n4,1.5\n",
            "y",
            "'a' holds numbers but for 1 of 4 cells, first '-' in row 3",
        ),
        ("a,y,b,y\n1,2,3,2\n4,5,6,5\n", "y", "names the column 'y' more than once"),
        ("a,y ,y\n1,2,2\n4,5,5\n", "y", "names the column 'y' more than once"),
        ("a,y\n1,2,3\n4,5,6\n", "y", r"rows have more cells than the header has names \(2\)"),
        ("a,y\n1,2\n4,5,6\n", "y", "not a CSV file with a header"),
        ("a,,y\n1,2,3\n4,2,6\n", "y", "column 2 of 3 has no name"),
        (",a,y\n1,2,3\n1,2,6\n", "y", "column 1 of 3 has no name"),
        ("a,y,\n1,2,\n4,5,\n", "y", "column 3 of 3 has no name"),
        ("1.5,2.5\n3.5,4.5\n", "2.5", "first line of table.csv holds numbers only"),
        ('a;y\n"1,5";2,5\n3,5;4,5\n', "y", "'a' holds numbers with commas, such as '1,5'"),
        ("a;y\n1;2,5\n2;4,5\n3;4\n", "y", "'y' holds numbers with commas, such as '2,5'"),
        (
            'a,y\n1,"1,234"\n2,9\n3,8\n',
            "y",
            "'y' holds numbers but for 1 of 3 cells, first '1,234' in row 1",
        ),
        ("a,y\n1,3\n2,3\n", "y", "2 rows of one value, 3: there is nothing to learn"),
        ("a,y\n1,2\n", "y", "one row: there is nothing to learn"),
        (
            "a,y\n" + "".join(f"{i},{i}%\n" for i in range(9)),
            "y",
            "text with 9 different values in 9 rows",
        ),
        (
            "a,y\n9007199254740993,1\n9007199254740992,2\n",
            "y",
            "2 distinct whole numbers of which float64 keeps 1",
        ),
        ("a,y\n1,caf\xe9\n".encode("latin-1"), "y", "not a CSV file with a header line, in UTF-8"),
    ],
)
def test_a_bad_file_is_explained(tmp_path, text, target, message):
    with pytest.raises(ValueError, match=message):
        data.from_csv(write(tmp_path, text), target)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffa,y\n1,2\n3,4.5\n",
        "a;y\n1;2\n3;4.5\n",
        "a\ty\r\n1\t2\r\n3\t4.5\r\n",
        '\n"a" , "y"\n1 , "2 "\n\n3,4.5\n',
        "a,y\nFalse,2\nTrue,4.5\n",
    ],
)
def test_other_ways_to_write_a_table(tmp_path, text):
    dataset = data.from_csv(write(tmp_path, text), "y")
    assert dataset.y.tolist() == [[2], [4.5]] and dataset.feature_names == ("a",)
    assert dataset.x.tolist() in ([[1], [3]], [[0], [1]])


def test_names_and_labels_with_line_breaks_and_spaces(tmp_path):
    path = write(tmp_path, '"a\nb",kind\n1,"big\ndog"\n2, cat \n3,"cat"\n4,"big\ndog"\n')
    dataset = data.from_csv(path, "kind")
    assert dataset.feature_names == ("a\nb",) and dataset.class_names == ("big\ndog", "cat")


def test_an_offset_keeps_every_value(tmp_path):
    noise = np.random.default_rng(0).normal(size=80)
    path = tmp_path / "far.csv"
    pd.DataFrame({"a": 1e8 + noise, "y": noise - 1e8}).to_csv(path, index=False)
    dataset = data.from_csv(path, "y")
    assert len(dataset.x.unique()) == len(dataset.y.unique()) == 80
    z = Standardizer.fit(dataset).transform(dataset)
    expected = torch.tensor((noise - noise.mean()) / noise.std())
    for values in (z.x, z.y):
        torch.testing.assert_close(values[:, 0], expected, rtol=0, atol=1e-7)


def test_the_index_that_pandas_writes_is_left_out(tmp_path):
    path = tmp_path / "t.csv"
    frame = pd.DataFrame({"a": [3.0, 1, 2], "y": [1, 2, 4]}, index=[7, 0, 3])
    for written in (frame, frame.reset_index(names="")):
        written.to_csv(path, index=written is frame)
        with pytest.warns(UserWarning, match=r"no name and no value twice \(7 … 3\).*left out"):
            assert data.from_csv(path, "y").feature_names == ("a",)
    frame.to_csv(path)
    pd.read_csv(path).to_csv(path)  # an index of an index
    with pytest.warns(UserWarning, match="left out"):
        assert data.from_csv(path, "y").feature_names == ("a",)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("id", "'id' numbers the rows .1 … 40.: drop it if"),
        ("shuffled", "'shuffled' numbers the rows .1 … 40.: drop it if"),
        ("same", "'same' is constant and tells nothing"),
        ("copy", "'copy' equals the target 'y': drop it"),
        ("few", "'few' has 3 values, all whole numbers, and is taken for a regression: pass"),
    ],
)
def test_what_is_probably_a_mistake_is_said(tmp_path, column, message):
    rng = np.random.default_rng(0)
    y = rng.normal(size=40)
    columns = {
        "id": np.arange(40) + 1,
        "shuffled": rng.permutation(40) + 1,
        "same": np.full(40, 0.1),
        "copy": y,
        "few": np.arange(40) % 3,
    }
    target = "few" if column == "few" else "y"
    path = tmp_path / "t.csv"
    pd.DataFrame({"a": rng.normal(size=40), "y": y, column: columns[column]}).to_csv(path, index=False)
    with pytest.warns(UserWarning, match=message):
        dataset = data.from_csv(path, target)
    assert dataset.x.shape == (40, 2)
    if column == "few":
        assert data.from_csv(path, target, task="regression").task == "regression"
        assert data.from_csv(path, target, task="classification").num_outputs == 3


def test_a_target_that_does_not_fit_the_task(tmp_path):
    path = write(tmp_path, "a,y,kind\n1,0.5,dog\n2,1.5,cat\n")
    frame = pd.read_csv(path)
    frame.drop(columns="kind").to_csv(path, index=False)
    with pytest.raises(ValueError, match="fractions, which are no class labels"):
        data.from_csv(path, "y", task="classification")
    frame.drop(columns="y").to_csv(path, index=False)
    with pytest.raises(ValueError, match="target 'kind' is not numeric"):
        data.from_csv(path, "kind", task="regression")


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        data.from_csv(tmp_path / "none.csv", "y")


def test_numbers_with_a_unit_are_no_classes(tmp_path):
    # 12 values in 36 rows were 12 classes
    rows = [f"{i * i},{i % 12 - 3}.5%" for i in range(36)]
    path = write(tmp_path, "\n".join(["a,share", *rows]))
    with pytest.raises(
        ValueError, match="'share' holds numbers with '%' behind them, such as .* plain numbers"
    ):
        data.from_csv(path, "share")
    assert len(data.from_csv(path, "share", task="classification").class_names) == 12


@pytest.mark.parametrize(
    "days", [("2024-01-02", "2024-02-03"), ("1.2.2024", "13.2.2024"), ("01/02/24 10:00", "3/2/24 9:30")]
)
def test_dates_are_no_classes(tmp_path, days):
    path = write(tmp_path, "\n".join(["a,when", *(f"{i * i},{days[i % 2]}" for i in range(30))]))
    with pytest.raises(ValueError, match="target 'when' holds dates, such as"):
        data.from_csv(path, "when")
