"""Tables as people have them: each is read rightly, or refused in words."""

from __future__ import annotations

import datetime
import importlib.util
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from pyrobnn import data
from pyrobnn.data import Standardizer
from pyrobnn.data.cells import numbers
from pyrobnn.data.columns import Column, Columns


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_column_of_numbers_makes_a_regression(tmp_path):
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
        ("a,b\n1,2\n", "y", "no column 'y': its columns are a, b"),
        (
            "a,b,y\n1,,2\n3,4,\n",
            "y",
            r"missing or infinite values in row 1, 2 \(column 'b' \(1\), 'y' \(1\)\)",
        ),
        ("a,y\ninf,2\n1,3\n", "y", r"missing or infinite values in row 1 \(column 'a' \(1\)\)"),
        ("a,y\n", "y", "no rows"),
        (
            "",
            "y",
            "cannot be read as a table of text that begins with the line of names: it is empty",
        ),
        ('a,y\n1,2\n"2,3\n3,4\n', "y", "a quotation mark is not closed"),
        (
            b"PK\x03\x04\x81\x8d",
            "y",
            "not text; save it as CSV, or give it the suffix of its format, such as .xlsx",
        ),
        (
            "size,price\n1,2\n",
            "pirce",
            "has no column 'pirce', did you mean 'price'. its columns are size, price",
        ),
        ("a,Y\n1,2\n", "y", "has no column 'y', did you mean 'Y'"),
        ("y\n1\n", "y", "nothing to predict from"),
        ("a,y\n1,dog\n2,dog\n", "y", "single class"),
        (
            "a,y\n1,2.5\n2,?\n3,4.5\n4,1.5\n",
            "y",
            r"missing or infinite values in row 2 \(column 'y' \(1\)\)",
        ),
        (
            "a,y\n1,2.5\n2,3\n-,4.5\n4,1.5\n",
            "y",
            r"missing or infinite values in row 3 \(column 'a' \(1\)\)",
        ),
        (
            "a,y\n1,2.5\n2,x\n3,4.5\n4,1.5\n",
            "y",
            r"'y' holds numbers but for 1 of 4 cells, first 'x' in row 2",
        ),
        ("a,y,b,y\n1,2,3,2\n4,5,6,5\n", "y", "names the column 'y' more than once"),
        ("a,y ,y\n1,2,2\n4,5,5\n", "y", "names the column 'y' more than once"),
        ("a,y\n1,2,3\n4,5,6\n", "y", "fewer names than its rows have cells; delete what is above"),
        ("a,y\n1,2\n4,5,6\n", "y", "line 3 has 3 cells, too many; fix it, or delete"),
        (
            "# of the lab\na,y\n1,2\n4,5\n",
            "y",
            "fewer names than its rows have cells; delete what is above",
        ),
        ("# of\n# the lab\na,y\n4,5\n", "y", "line 3 has 2 cells, too many"),
        ("1.5,2.5\n3.5,4.5\n", "y", "no column 'y': its columns are 1.5, 2.5"),
        (
            'a,y\n1,"2,5"\n2,"4,1"\n3,9\n',
            "y",
            "'y' holds numbers with commas, such as '2,5': write points",
        ),
        (
            "a;b;y\n1.5;2,5;1\n2;4,5;2\n3;4,1;3\n",
            "y",
            "column 'b' has decimal commas and column 'a' has points",
        ),
        (
            "a;b;y\n1.234,56;1.234;1\n2,5;2.5;2\n",
            "y",
            "column 'a' has decimal commas and column 'b' has points",
        ),
        ("a,y\n1,3\n2,3\n", "y", "2 rows of one value, 3: there is nothing to learn"),
        ("a,y\n1,2\n", "y", "one row: there is nothing to learn"),
        (b"\x1f\x8b\x08\x00", "y", "holds no rows"),
        ('\n[{"a": 1, "y": 2}]', "y", "holds no rows"),
        ("<!DOCTYPE html>\n<table>", "y", "has no column 'y': its columns"),
        (
            "a b y\n1 2 3\n",
            "y",
            "its columns, separated by comma, semicolon, tab or bar, are a b y",
        ),
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
        "a,y\n1,2\n3,4.5\n".encode("utf-16"),
    ],
)
def test_other_ways_to_write_a_table(tmp_path, text):
    dataset = data.from_csv(write(tmp_path, text), "y")
    assert dataset.y.tolist() == [[2], [4.5]] and dataset.feature_names == ("a",)
    assert dataset.x.tolist() in ([[1], [3]], [[0], [1]])


@pytest.mark.parametrize("sign", [".", "'", " ", "\u202f"])
def test_points_between_thousands(tmp_path, sign):
    rows = (
        "a;d;y",
        "1.234,56;02.01.2024;1",
        "-2,5;03.01.2024;2,5",
        "1.234.567;15.01.2024;3",
        "12;16.01.2024;4",
    )
    path = write(
        tmp_path,
        "\n".join(rows).replace("1.234", f"1{sign}234").replace("234.567", f"234{sign}567"),
    )
    with pytest.warns(UserWarning, match="read as decimal points"):
        dataset = data.from_csv(path, "y")
    assert dataset.x[:, 0].tolist() == [1234.56, -2.5, 1234567, 12]
    assert dataset.x[0, 1] == 19724 and dataset.y.tolist() == [[1], [2.5], [3], [4]]


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
        with pytest.warns(UserWarning, match="1 of 3 columns have no name"):
            assert data.from_csv(path, "y").feature_names == ("a",)
    frame.to_csv(path)
    pd.read_csv(path).to_csv(path)  # an index of an index
    with pytest.warns(UserWarning, match="dropped"):
        assert data.from_csv(path, "y").feature_names == ("a",)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("same", "'same' is constant: nothing can be learned"),
        ("copy", "'copy' equals the target 'y': drop it"),
    ],
)
def test_what_is_probably_a_mistake_is_said(tmp_path, column, message):
    rng = np.random.default_rng(0)
    y = rng.normal(size=40)
    columns = {"same": np.full(40, 0.1), "copy": y}
    path = tmp_path / "t.csv"
    pd.DataFrame({"a": rng.normal(size=40), "y": y, column: columns[column]}).to_csv(
        path, index=False
    )
    with pytest.warns(UserWarning, match=message):
        dataset = data.from_csv(path, "y")
    assert dataset.x.shape == (40, 2)


def test_few_whole_numbers_are_asked_about():
    frame = pd.DataFrame({"a": np.random.default_rng(0).normal(size=40), "few": np.arange(40) % 3})
    with pytest.raises(
        ValueError, match="'few' has 3 values, all whole numbers, .* say task='regression' or"
    ):
        data.from_frame(frame, "few")
    assert data.from_frame(frame, "few", task="regression").task == "regression"
    assert data.from_frame(frame, "few", task="classification").num_outputs == 3


def test_a_target_that_does_not_fit_the_task(tmp_path):
    path = write(tmp_path, "a,y,kind\n1,0.5,dog\n2,1.5,cat\n")
    frame = pd.read_csv(path)
    frame.drop(columns="kind").to_csv(path, index=False)
    with pytest.raises(ValueError, match="fractions, which cannot be class labels"):
        data.from_csv(path, "y", task="classification")
    frame.drop(columns="y").to_csv(path, index=False)
    with pytest.raises(ValueError, match="target 'kind' is not numeric"):
        data.from_csv(path, "kind", task="regression")


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="does not exist: check the path"):
        data.from_csv(tmp_path / "none.csv", "y")


@pytest.mark.parametrize("sign", [",", "'", "’", "\u202f"])
@pytest.mark.parametrize("large", [1, 11, 20])
def test_commas_part_thousands_however_few_they_are(tmp_path, large, sign):
    cells = [f"{i + 1}{sign}061.8" if i < large else f"{100 + i}.25" for i in range(20)]
    expected = [float(cell.replace(sign, "")) for cell in cells]
    frame = pd.DataFrame({"a": np.arange(20.0) ** 2, "y": cells})
    assert data.from_frame(frame, "y").y[:, 0].tolist() == expected
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    assert data.from_csv(tmp_path / "t.csv.gz", "y").y[:, 0].tolist() == expected


def test_text_of_windows(tmp_path):
    dataset = data.from_csv(write(tmp_path, "a,y\n1,caf\xe9\n2,bar\n".encode("latin-1")), "y")
    assert dataset.class_names == ("bar", "caf\xe9")


def test_columns_without_a_name_are_left_out_with_a_word(tmp_path):
    path = write(tmp_path, "a,y,,\n1,2,,\n4,5,,\n")
    with pytest.warns(UserWarning, match="2 of 4 columns have no name"):
        assert data.from_csv(path, "y").feature_names == ("a",)


@pytest.mark.parametrize(
    "days",
    [("2024-01-02", "2024-02-03"), ("1.2.2024", "13.2.2024"), ("01/02/24 10:00", "3/2/24 9:30")],
)
def test_dates_are_no_classes(tmp_path, days):
    path = write(tmp_path, "\n".join(["a,when", *(f"{i * i},{days[i % 2]}" for i in range(30))]))
    with pytest.raises(ValueError, match="'when' holds dates in 30 rows"):
        data.from_csv(path, "when")


def people():
    """A table as people have it: gaps, categories, truth values, dates, and a label of the rows."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": [f"P-{number}" for number in range(60)],
            "age": generator.uniform(20, 70, 60).round(1),
            "city": generator.choice(["Rome", "Oslo", "Bonn"], 60),
            "member": generator.random(60) < 0.5,
            "since": pd.date_range("2020-01-01", periods=60, freq="20D").strftime("%Y-%m-%d"),
            "price": generator.normal(100, 9, 60),
        }
    )
    frame.loc[[3, 7], "age"] = np.nan
    frame.loc[[7, 9], "city"] = None
    return frame


LABEL = pytest.mark.filterwarnings("ignore:.*taken for a row label")


@LABEL
def test_what_a_mixed_table_becomes():
    frame = people()
    with pytest.raises(
        ValueError,
        match=r"in row 4, 8, 10 \(column 'age' \(2\), 'city' \(2\)\): use missing='drop' or",
    ):
        data.from_frame(frame, "price")
    with pytest.warns(UserWarning, match="3 of 60 rows have a missing value"):
        dropped = data.from_frame(frame, "price", missing="drop")
    waves = ("since (days)", "since (sine of the year)", "since (cosine of the year)")
    assert dropped.feature_names == ("age", "city=Bonn", "city=Oslo", "city=Rome", "member", *waves)
    kept = frame.drop(index=[3, 7, 9])
    np.testing.assert_array_equal(dropped.x[:, 0], kept["age"])
    np.testing.assert_array_equal(dropped.x[:, 3], kept["city"] == "Rome")
    np.testing.assert_array_equal(dropped.x[:, 4], kept["member"])
    days = (pd.to_datetime(kept["since"]) - pd.Timestamp("1970-01-01")).dt.days
    np.testing.assert_array_equal(dropped.x[:, 5], days)
    np.testing.assert_allclose(dropped.x[:, 6], np.sin(2 * np.pi * days / 365.2425))
    filled = data.from_frame(frame, "price", missing="impute")
    assert filled.num_data == 60 and filled.feature_names[:3] == (
        "age",
        "age is missing",
        "city=missing",
    )
    assert filled.x[3, :2].tolist() == [frame["age"].median(), 1.0] and filled.x[0, 1] == 0.0
    np.testing.assert_array_equal(filled.x[:, 2], frame["city"].isna())
    few = data.from_frame(frame, "price", features=["age", "member"], drop=["age"])
    assert few.feature_names == ("member",)


@LABEL
def test_new_tables_become_the_same_inputs_and_what_is_new_in_them_is_said():
    columns = data.from_frame(people(), "price", missing="impute").columns
    again = type(columns).of(json.loads(json.dumps(columns.settings())))
    assert again == columns
    new = people().drop(columns=["price", "id"]).iloc[::-1, ::-1]
    x, keep = again.transform(new, "new")
    np.testing.assert_array_equal(x, data.from_frame(people(), "price", missing="impute").x.flip(0))
    assert keep.all()
    with pytest.warns(
        UserWarning,
        match="'city' has categories that .* .rows: 1; 'Pisa'.: they are encoded as none",
    ):
        x, _ = again.transform(new.assign(city=["Pisa", *new["city"][1:]]), "new")
    assert x[0, 2:6].tolist() == [0, 0, 0, 0]
    with pytest.warns(UserWarning, match=".rows: 60. and had none"):
        again.transform(new.assign(member=None), "new")
    with pytest.raises(ValueError, match="'age' holds text such as 'old'"):
        again.transform(new.assign(age="old"), "new")
    with pytest.raises(ValueError, match="dates, but 'soon' in row 1 is not"):
        again.transform(new.assign(since="soon"), "new")
    with pytest.raises(ValueError, match="no column 'age', 'since'"):
        again.transform(new[["city", "member"]], "new")


@LABEL
def test_a_file_of_every_kind_gives_the_same_data(tmp_path):
    frame = people()
    expected = data.from_frame(frame, "price", missing="impute")
    frame.to_csv(tmp_path / "comma.csv", index=False)
    frame.to_csv(tmp_path / "tab.tsv", index=False, sep="\t")
    frame.to_csv(tmp_path / "german.csv", index=False, sep=";", decimal=",")
    files = ["comma.csv", "tab.tsv", "german.csv"]
    if importlib.util.find_spec("pyarrow"):
        frame.to_parquet(tmp_path / "t.parquet")
        files.append("t.parquet")
    if importlib.util.find_spec("openpyxl"):
        frame.to_excel(tmp_path / "t.xlsx", index=False)
        files.append("t.xlsx")
    for name in files:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = data.load(tmp_path / name, "price", missing="impute")
        assert found.feature_names == expected.feature_names, name
        torch.testing.assert_close(found.x, expected.x)
        torch.testing.assert_close(found.y, expected.y)
        said = [str(each.message) for each in caught]
        assert ("german.csv: decimal commas are read as decimal points" in said) == (
            name == "german.csv"
        )


@pytest.mark.parametrize(
    ("cells", "inputs"),
    [
        (["02.02.2024", "13.02.2024", "14.02.2024"], [19755, 19766, 19767]),
        (["02/02/2024", "02/13/2024", "02/14/2024"], [19755, 19766, 19767]),
        (["2024-02-01 12:00", "2024-02-13", None], [19754.5, 19766, None]),
        (
            ["2024-02-01", "13.02.2024", "2.2.2024"],
            [19754, 19766, 19755],
        ),  # the first is not 2 January
        (["2024/02/01", "02/13/2024", "2/2/2024"], [19754, 19766, 19755]),
        (["18:00", None, "6:00:00"], [[0.75, -1, 0], None, [0.25, 1, 0]]),
        ([datetime.time(18), None, datetime.time(6)], [[0.75, -1, 0], None, [0.25, 1, 0]]),
        (["yes", "no", "yes"], [[0, 1], [1, 0], [0, 1]]),
        ([True, None, False], [1, None, 0]),
        (pd.to_timedelta([1, 2, 36], unit="h"), [1 / 24, 2 / 24, 1.5]),
        (pd.Categorical([3, 1, 3]), [[0, 1], [1, 0], [0, 1]]),
        (pd.array([1, None, 3], dtype="Int64"), [1, None, 3]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*rows have a missing value")
def test_columns_of_many_kinds(cells, inputs):
    frame = pd.DataFrame({"a": cells, "y": [0.5, 2.5, 1.5]})
    found = data.from_frame(frame, "y", missing="drop")
    expected = torch.tensor([value for value in inputs if value is not None], dtype=torch.float64)
    torch.testing.assert_close(found.x.squeeze(-1), expected)


def rows(**columns):
    return pd.DataFrame({"a": np.arange(12.0) ** 2, "y": np.arange(12.0), **columns})


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (rows(gap=[None] * 12), {"missing": "impute"}, "column 'gap' holds no value: drop it"),
        (
            rows(when=["01/02/2024", "02/03/2024"] * 6),
            {},
            "day and month cannot be told apart: write year-month-day",
        ),
        (
            rows(when=["2024-01-31", "02/03/2024"] * 6),
            {},
            "such as '02/03/2024', where day and month cannot be told apart",
        ),
        (
            rows(when=["24-02-05", "24-02-13"] * 6),
            {},
            "day and year cannot be told apart: write year-month-day",
        ),
        (
            rows(when=["28/02/2024", "02/28/2024"] * 6),
            {},
            "with the day first, but '02/28/2024' in row 2 is not",
        ),
        (
            rows(when=["2024-01-02", "2024-13-45"] * 6),
            {},
            "holds dates, but '2024-13-45' in row 2 is not",
        ),
        (rows(t=["8:30", "24:10"] * 6), {}, "holds times of day, but '24:10' in row 2 is not"),
        (rows(gap=[None] * 12), {}, "column 'gap' holds no value: drop it"),
        (
            rows(b=["1", "2", "x"] * 4).set_axis([0] * 12),
            {},
            "for 4 of 12 cells, first 'x' in row 3",
        ),
        (
            rows(b=["1", "2", "x"] * 4),
            {},
            "holds numbers but for 4 of 12 cells, first 'x' in row 3",
        ),
        (
            rows(b=[np.inf] * 12),
            {},
            r"missing or infinite values in row 1, 2, .* \(column 'b' \(12\)\)",
        ),
        (rows(), {"features": ["b"]}, r"no column 'b' \(features\): its columns are a, y"),
        (rows(), {"drop": ["a"]}, "no column besides the target"),
        (rows(), {"features": ["y"]}, "'y' is the target and cannot be among 'features'"),
        (rows(), {"missing": "guess"}, "'missing' must be one of 'refuse', 'drop', 'impute'"),
        (rows().rename(columns={"a": "y"}), {}, "names the column 'y' more than once"),
        (rows().assign(y="yes"), {}, "target 'y' holds a single class, 'yes'"),
        (
            rows(b=[1.0, None] * 6, c=[None, 1.0] * 6),
            {"missing": "drop"},
            "missing value in every row",
        ),
        (
            rows().drop(columns="a").assign(label=[f"p{i}" for i in range(12)]),
            {},
            "no column to predict from",
        ),
    ],
)
@LABEL
def test_a_malformed_table_is_explained_in_a_line(frame, options, message):
    with pytest.raises(ValueError, match=message) as refusal:
        data.from_frame(frame, "y", **options)
    assert "\n" not in str(refusal.value)


def test_truth_values_with_gaps_are_classes():
    with pytest.warns(UserWarning, match="1 of 3 rows have a missing value"):
        dataset = data.from_frame(
            pd.DataFrame({"a": [1.0, 4, 9], "y": [True, None, False]}), "y", missing="drop"
        )
    assert dataset.task == "classification" and dataset.class_names == ("False", "True")


def test_rare_categories_share_no_input():
    names = [f"c{i}" for i in range(60)] * 3 + ["c0"] * 20
    frame = pd.DataFrame({"kind": names, "y": np.arange(200.0)})
    with pytest.warns(
        UserWarning, match="60 categories: the 50 most frequent .* the other 30 rows"
    ):
        assert data.from_frame(frame, "y").x.shape == (200, 50)


def test_a_file_that_is_not_what_its_name_says(tmp_path):
    for name in ("t.parquet", "t.xlsx"):
        (tmp_path / name).write_text("a,y\n1,2\n")
        with pytest.raises((ValueError, ImportError), match="cannot be read as|pip install"):
            data.load(tmp_path / name, "y")


def test_a_date_of_a_new_table_is_read_in_the_order_of_the_training_table():
    days = [f"{day}/02/2024" for day in range(1, 29)]
    columns = Columns.fit(pd.DataFrame({"when": days}), "refuse", "X")
    with pytest.raises(ValueError, match="'02/28/2024' in row 2 is not"):
        columns.transform(pd.DataFrame({"when": ["03/02/2024", "02/28/2024"]}), "X")
    iso = Columns.fit(
        pd.DataFrame({"when": [f"2024-02-{day:02}" for day in range(1, 29)]}), "refuse", "X"
    )
    same = columns.transform(pd.DataFrame({"when": days}), "X")[0]
    np.testing.assert_array_equal(iso.transform(pd.DataFrame({"when": days}), "X")[0], same)
    with pytest.raises(ValueError, match="day and month cannot be told apart"):
        iso.transform(pd.DataFrame({"when": ["02/03/2024"]}), "X")


def test_a_date_without_separators_begins_with_the_year_among_dates_that_begin_with_the_day():
    columns = Columns.fit(
        pd.DataFrame({"when": [f"{day}/02/2024" for day in range(1, 29)]}), "refuse", "X"
    )
    x = columns.transform(pd.DataFrame({"when": ["20240105", "05/01/2024", "2024-01-05"]}), "X")[0]
    np.testing.assert_array_equal(
        x, x[[0, 0, 0]]
    )  # pandas with dayfirst read the first as one of May


def test_infinite_values_are_gaps_wherever_they_stand():
    frame = rows(b=[np.inf, *range(11)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none had no gap in the training data
        assert data.from_frame(frame, "y", missing="impute").feature_names == (
            "a",
            "b",
            "b is missing",
        )
    frame["y"] = [1.5, -np.inf, *range(10)]
    with pytest.raises(ValueError, match=r"\(column 'b' \(1\), 'y' \(1\)\)"):
        data.from_frame(frame, "y")
    with pytest.warns(UserWarning, match="2 of 12 rows have a missing value"):
        assert data.from_frame(frame, "y", missing="drop").num_data == 10


def test_a_number_is_read_whatever_it_is_written_with():
    cells = {"signs": ["−5", "5"], "money": ["-$5", "$ 5"], "time": ["1:30 PM", "1:30 am"]}
    columns = Columns.fit(pd.DataFrame(cells), "refuse", "X")
    x, _ = columns.transform(pd.DataFrame(cells, index=[0, 0]), "X")
    np.testing.assert_allclose(x[:, :3], [[-5, -5, 13.5 / 24], [5, 5, 1.5 / 24]])
    codes = Columns.fit(pd.DataFrame({1: pd.Categorical([1, 2, 3])}), "refuse", "X")
    np.testing.assert_array_equal(
        codes.transform(pd.DataFrame({1: [1.0, 2.0, 3.0]}), "X")[0], np.eye(3)
    )
    with pytest.raises(ValueError, match="X has no rows of data"):
        codes.transform(pd.DataFrame({1: [1.0]})[:0], "X")


def test_a_file_keeps_its_names_and_columns(tmp_path):
    path = write(tmp_path, '"size, m2";"weight, kg";"cost, EUR";y\n1;2;3;4\n2;1;3.5;5\n')
    assert data.from_csv(path, "y").feature_names == ("size, m2", "weight, kg", "cost, EUR")
    path.write_text("a,y\n1,2\n3,4\n", encoding="utf-16-le")
    with pytest.raises(ValueError, match="it is not text"):
        data.from_csv(path, "y")
    pytest.importorskip("pyarrow")
    pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 3.0], "y": [2.0, 1.0]}).set_index("a").to_parquet(
        tmp_path / "t.parquet"
    )
    assert data.load(tmp_path / "t.parquet", "y").feature_names == ("a", "b")


def test_categories_that_differ_in_case_or_blanks_alone_are_one():
    with pytest.warns(
        UserWarning,
        match="differ only in upper and lower case, such as 'Yes'",
    ):
        target = data.from_frame(rows().assign(y=["Yes", "yes ", "no", "yes"] * 3), "y")
    assert target.class_names == ("no", "yes") and target.y.tolist() == [1, 1, 0, 1] * 3
    cells = ["Yes", "yes ", " YES", "yes", "no", None] * 3
    columns = Columns.fit(pd.DataFrame({"a": cells, "n": range(18)}), "impute", "X")
    assert columns.inputs == ("a=missing", "a=no", "a=yes", "n")
    new = columns.transform(pd.DataFrame({"a": ["yES", "NO ", None], "n": [0, 1, 2]}), "X")[0]
    np.testing.assert_array_equal(new[:, :3], [[0, 0, 1], [0, 1, 0], [1, 0, 0]])
    # of more categories than have an input each, a gap may be none of them: then an input says so
    many = [f"c{index % 60}" for index in range(180)] + [None]
    with pytest.warns(UserWarning, match="61 categories"):
        assert Columns.fit(pd.DataFrame({"a": many}), "impute", "X").inputs[-1] == "a is missing"
    # a file that an earlier version saved knows both spellings
    both = Column("a", "category", ("Yes", "yes"))
    assert list(both.read("X", pd.Series(["Yes", "yes"]))) == ["Yes", "yes"]


def test_numbers_with_one_unit_are_numbers():
    """Per cent and currencies, at one side of all cells; of two units none is read."""
    frame = pd.DataFrame(
        {"a": ["1.5%", "-2 %", None], "b": ["$1,200.50", "$ 3", "$4"], "c": ["3 €", "4€", "5 €"]}
    )
    found = [numbers("table", frame[name]).tolist() for name in frame]
    assert found[0][:2] == [1.5, -2.0] and found[1:] == [[1200.5, 3.0, 4.0], [3.0, 4.0, 5.0]]
    assert numbers("table", pd.Series(["5 %", "5 €", "$5"])) is None
