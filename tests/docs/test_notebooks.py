"""The committed notebooks were executed, in order, without error; and one of them still runs, shortened."""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pyrobnn

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: an absolute path of some user's machine, in code, output or traceback
MACHINE_PATH = re.compile(
    r"(?<![\w.:/])/(home|root|work|tmp|Users|usr|opt|var|mnt|private)/|\b[A-Z]:\\\\"
)

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="the installed package has no notebooks")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


@pytest.fixture
def runner():
    pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")
    pytest.importorskip("ipykernel", reason="needs the extra 'notebooks'")
    spec = importlib.util.spec_from_file_location(
        "run_notebooks", ROOT / "scripts" / "run_notebooks.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_a_notebook_is_valid_by_its_format(notebook):
    pytest.importorskip("nbformat", reason="needs the extra 'notebooks'").validate(notebook)


def test_was_executed_in_order_without_error(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert "error" not in kinds


def test_what_is_imported_exists(notebook):
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(re.sub(r"(?m)^%.*$", "", "".join(cell["source"])))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "pyrobnn":
                found = importlib.import_module(node.module)
                missing = [each.name for each in node.names if not hasattr(found, each.name)]
                assert missing == [], node.module


def public_names():
    """What users may import: the names of the package, and of those that are modules what is in their ``__all__``."""
    stub = ast.parse((ROOT / "pyrobnn" / "__init__.pyi").read_text(encoding="utf-8"))
    names = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                value = getattr(pyrobnn, alias.name)
                is_module = isinstance(value, types.ModuleType)
                names[alias.name] = set(getattr(value, "__all__", ())) if is_module else None
    return names


def not_public(code, names):
    """What code imports or reads of the package that no user may rely on, and private attributes of anything."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.startswith("pyrobnn.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyrobnn"):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            paths = []
            path = ast.unparse(node)
            if re.fullmatch(r"pb(\.\w+){1,2}", path):
                paths = [path.replace("pb", "pyrobnn", 1)]
            if node.attr == "own" or re.match(r"_[^_]", node.attr):
                yield path
        else:
            continue
        for path in paths:
            _, name, *inner = path.split(".")
            of_a_value = (
                inner and names.get(name, ()) is None and not isinstance(node, ast.ImportFrom)
            )
            known = name in names and (not inner or of_a_value or inner[0] in (names[name] or ()))
            if not known or len(inner) > 1:
                yield path


def test_uses_public_names_alone(notebook):
    names = public_names()
    found = []
    for cell in code_cells(notebook):
        code = re.sub(r"(?m)^%.*$", "", "".join(cell["source"]))
        found += not_public(code, names)
    assert found == []


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("from pyrobnn.plots.canvas import panels", ["pyrobnn.plots.canvas.panels"]),
        ("from pyrobnn.plots import panels, gather", ["pyrobnn.plots.gather"]),
        ("from pyrobnn import Nothing", ["pyrobnn.Nothing"]),
        ("import pyrobnn.core.seeding", ["pyrobnn.core.seeding"]),
        ("pb.inference.vi", ["pyrobnn.inference.vi"]),
        ("pb.core.seeding.seeded(0)", ["pyrobnn.core", "pyrobnn.core.seeding"]),
        ("likelihood.own.points", ["likelihood.own"]),
        ("fit.elbo._priors(z)", ["fit.elbo._priors"]),
        (
            "import pyrobnn as pb; pb.data.Standardizer.fit(x); pb.Posterior.load(p); x.__class__",
            [],
        ),
        ("from pyrobnn.inference import kl_schedules; kl_schedules.Linear()", []),
    ],
)
def test_a_planted_private_name_is_found(code, private):
    assert sorted(set(not_public(code, public_names()))) == private


def test_says_nothing_on_stderr(notebook):
    told = [
        "".join(output["text"])
        for cell in code_cells(notebook)
        for output in cell["outputs"]
        if output.get("name") == "stderr"
    ]
    assert told == []


def test_no_table_has_an_empty_column(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    tables = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    for table in tables:
        rows = [
            re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)
            for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)
        ]
        columns = zip(*(row for row in rows if row), strict=True)
        assert all(any(cell.strip() for cell in column) for column in columns)


def test_has_figures_of_twice_the_pixels_at_which_they_are_shown_and_names_no_machine_path(
    notebook,
):
    images = 0
    for cell in notebook["cells"]:
        texts = ["".join(cell["source"])]
        for output in cell.get("outputs", []):
            data = dict(output.get("data", {}))
            if png := data.pop("image/png", None):
                pixels = Image.open(io.BytesIO(base64.b64decode(png))).size
                shown = output["metadata"]["image/png"]
                assert (
                    np.abs(np.array(pixels) - [2 * shown["width"], 2 * shown["height"]]).max() <= 1
                )
                images += 1
            texts.append(json.dumps([data, output.get("text"), output.get("traceback")]))
        for text in texts:
            assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)
    assert images


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_small_and_knows_the_smoke_switch(path):
    assert path.stat().st_size < 1_000_000
    assert "PYROBNN_SMOKE" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks/gallery").glob("*.png")), ids=lambda path: path.stem
)
def test_a_picture_of_the_methods_page_is_the_notebook_s(path):
    """The first figure of the cell tagged ``gallery``, as ``scripts/run_notebooks.py`` writes it."""
    cells = json.loads((ROOT / f"notebooks/{path.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    tagged = [cell["outputs"] for cell in cells if "gallery" in cell["metadata"].get("tags", [])]
    shown = [
        each["data"]["image/png"]
        for outputs in tagged
        for each in outputs
        if "image/png" in each.get("data", {})
    ]
    assert base64.b64decode(shown[0]) == path.read_bytes()


def test_a_palette_keeps_a_picture_and_its_size_on_a_page(runner, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    rng = np.random.default_rng(0)
    stored = io.BytesIO()
    figure, ax = plt.subplots()
    ax.scatter(*rng.normal(size=(2, 300)), c=rng.normal(size=300), alpha=0.4)
    figure.savefig(stored, dpi=220)
    plt.close(figure)
    packed = runner.in_palette(stored.getvalue())
    assert runner.in_palette(packed) == packed
    before = Image.open(stored)
    after = Image.open(io.BytesIO(packed))
    assert after.size == before.size and after.info["dpi"] == before.info["dpi"]
    assert len(packed) < len(stored.getvalue()) / 2
    assert (
        np.abs(
            np.subtract(*(np.asarray(each.convert("RGB"), float) for each in (before, after)))
        ).mean()
        < 1.0
    )
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    (tmp_path / "a.png").write_bytes(packed)
    before.resize((60, 40)).save(tmp_path / "b.png", dpi=(110, 110))
    retina = importlib.import_module("retina")
    assert [retina.width(tmp_path / name) for name in ("a.png", "b.png", "c.png")] == [
        before.width // 2,
        None,
        None,
    ]
    nodes = pytest.importorskip("docutils.nodes")
    page = nodes.paragraph("", "", *(nodes.image(uri=name) for name in ("a.png", "b.png")))
    retina.halve(types.SimpleNamespace(srcdir=tmp_path), page, "page")
    assert [image["classes"] for image in page] == [["wide"], []]  # a phone lets it scroll


def test_unknown_name_is_told(runner):
    with pytest.raises(ValueError, match="no notebook starts with 'nope'"):
        runner.chosen(["nope"])


@pytest.mark.slow
def test_failing_cell_is_named(runner, tmp_path, capsys, monkeypatch):
    import nbformat

    cells = [nbformat.v4.new_code_cell("1"), nbformat.v4.new_code_cell("# the culprit\n1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "09_broken.ipynb")
    before = (tmp_path / "09_broken.ipynb").read_bytes()
    monkeypatch.setattr(runner.chosen, "__defaults__", (tmp_path,))
    assert runner.main([]) == 1
    told = capsys.readouterr().err
    assert "09_broken.ipynb, cell 1 (# the culprit)" in told and "ZeroDivisionError" in told
    assert (tmp_path / "09_broken.ipynb").read_bytes() == before


@pytest.mark.slow
def test_smoke_run_writes_nothing(runner, capsys):
    before = NOTEBOOKS[0].read_bytes()
    assert runner.main(["--smoke", NOTEBOOKS[0].stem]) == 0, capsys.readouterr().err
    assert NOTEBOOKS[0].read_bytes() == before
