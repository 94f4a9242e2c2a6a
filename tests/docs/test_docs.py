"""The pages of docs/: their code runs, they name every public name and every check, and they build strictly."""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from helpers import seeded

import pyrobnn as pb
from pyrobnn.diagnostics.check_table import TABLE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = ("api", "checks", "claims", "tutorials", "_build", "_ext")
PAPER = DOCS / "paper.md"  # for a journal, not a page of the site
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in WRITTEN
)
PAGES = [page for page in PAGES if page != PAPER]
#: takes longer than a few seconds
SLOW = {
    "active-learning",
    "assay",
    "conformal",
    "deploy",
    "fleet",
    "gpu",
    "loops",
    "methods",
    "million-rows",
    "moving",
    "nuts-in-torch",
    "other-trees",
    "own-net",
    "prior-and-likelihood",
    "pyro-program",
    "questions",
    "references",
    "repair",
    "save-and-resume",
    "several-machines",
    "skpro",
    "trackers",
}
OPTIONAL = {
    "arviz_plots",
    "graphviz",
    "mlflow",
    "numpyro",
    "onnxruntime",
    "pyarrow",
    "pymc",
    "skpro",
    "tensorboard",
    "wandb",
}
MARKED = re.compile(r"^```(\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(not PAGES, reason="the installed package has no pages")


def blocks(text, language):
    return [body for found, body in MARKED.findall(text) if found == language]


def runnable():
    for page in PAGES:
        if blocks(page.read_text(encoding="utf-8"), "python"):
            yield pytest.param(
                page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW else ()
            )


def missing(block):
    """Libraries of others that a block imports or calls and that the package does not require."""
    used = set(re.findall(r"^(?:(?:import|from) )?(\w+)", block, re.MULTILINE))
    # a part of MLflow alone, mlflow-skinny, has no store of runs
    needed = {"mlflow": "alembic"}
    names = OPTIONAL & used
    return [name for name in names if importlib.util.find_spec(needed.get(name, name)) is None]


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module


@pytest.mark.filterwarnings("ignore::UserWarning")  # short fits say that they are short
@pytest.mark.parametrize("page", list(runnable()))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    names: dict = {"__name__": "__page__"}
    state = np.random.get_state()  # NumPyro draws from it
    with seeded(0):  # a page draws initial weights as a user would
        for block in blocks(page.read_text(encoding="utf-8"), "python"):
            if not missing(block):
                exec(compile(block, str(page), "exec"), names)
    np.random.set_state(state)
    plt.close("all")


def test_tyxe_and_pyrobnn_predict_the_same_by_the_blocks_that_stand_side_by_side(monkeypatch):
    """TyXe's own guides ask Pyro for what Pyro 1.9 has no more; with it they run."""
    pytest.importorskip("tyxe")
    import pyro
    import pyro.util

    by_path = lambda module, path: operator.attrgetter(path)(module)  # noqa: E731
    monkeypatch.setattr(pyro.util, "deep_getattr", by_path, raising=False)
    text = (DOCS / "howto/moving.md").read_text(encoding="utf-8")
    of_tyxe = text[text.index("## From TyXe") : text.index("## From Pyro's MCMC")]
    (theirs,) = blocks(of_tyxe, "py")
    (ours,) = blocks(of_tyxe, "python")
    names: dict = {}
    with seeded(0):
        pyro.clear_param_store()
        predicted = {}
        for side, code in (("tyxe", theirs), ("pyrobnn", ours)):
            # TyXe changes the net in place: each side has its own
            exec(blocks(text, "python")[0], names)
            rows = torch.utils.data.TensorDataset(names["x"], names["y"])
            names["loader"] = torch.utils.data.DataLoader(rows, batch_size=len(rows))
            exec(code, names)
            predicted[side] = names["mean"], names["sd"], names["error"], names["log_prob"]
        pyro.clear_param_store()
    mean, sd, error, log_prob = predicted["tyxe"]
    mean_here, sd_here, error_here, log_prob_here = predicted["pyrobnn"]
    assert mean_here.shape == mean.shape and sd_here.shape == sd.shape
    # after 300 steps from one start, by two random streams
    assert float((mean_here - mean).square().mean().sqrt()) < 0.5 * float(sd.mean())
    assert float(sd_here.mean()) == pytest.approx(float(sd.mean()), rel=0.25)
    assert float(error_here) == pytest.approx(float(error), rel=0.35)
    assert float(log_prob_here) == pytest.approx(float(log_prob), rel=0.35)


def test_the_page_of_arviz_has_ten_calls_which_arviz_itself_has_too():
    text = (DOCS / "howto/arviz.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\*\*(?:(\d+)\. and )?(\d+)\.", text, re.MULTILINE)
    assert [int(number) for pair in numbers for number in pair if number] == list(range(1, 11))
    code = "\n".join(blocks(text, "python"))
    calls = re.findall(r"\b(arviz_(?:base|stats|plots))\.(\w+)\(", code)
    assert len({name for module, name in calls if module != "arviz_base"}) == 11  # loo and its plot
    for module, name in calls:
        if importlib.util.find_spec(module):
            assert hasattr(importlib.import_module(module), name), name
        if importlib.util.find_spec("arviz"):  # Python 3.12 and later
            assert hasattr(importlib.import_module("arviz"), name), name


def test_no_line_of_a_page_is_taken_for_a_comment():
    pages = [*PAGES, *ROOT.glob("scripts/*/claim.md"), ROOT / "README.md"]
    assert [
        str(page)
        for page in pages
        if re.search("^%", page.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []


def test_no_rule_for_a_narrow_screen_holds_on_paper():
    for sheet in (DOCS / "_static/pages.css", ROOT / "pyrobnn/report/page.css"):
        assert (
            re.search(r"@media \(max-width: (?!91em)", sheet.read_text(encoding="utf-8")) is None
        ), sheet.name


def test_no_page_is_without_an_example():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = [
            body for kind, body in MARKED.findall(text) if kind in ("python", "py", "sh", "toml")
        ]
        included = (
            "<!-- site: " in text or "{literalinclude}" in text
        )  # of files that tests of their own run
        assert code or included or "{toctree}" in text, (
            f"{page.name} shows nothing that can be done"
        )


def test_pages_are_read_on_a_code_host_too(extension):
    """No page shows there the directive of an inclusion, or a link to what only a build writes."""
    on_site = extension("for_site").on_site
    inserted = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "{include}" not in text, page.name
        without_comments = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        assert not re.search(r"\{(literalinclude|image)\}", without_comments), page.name
        unmarked = extension("for_site").MARKED.sub("", text)
        assert "<!-- site" not in unmarked and "<!-- code host" not in unmarked, page.name
        read_there = text.partition("```{toctree}")[0]
        for link in re.findall(r"\]\(([^)#:]+\.(?:md|ipynb))[#)]", read_there):
            written = (
                page.parent.relative_to(DOCS).as_posix() == "." and link.split("/")[0] in WRITTEN
            )
            assert written or link.startswith("../") or (page.parent / link).exists(), (
                page.name,
                link,
            )
        if re.search(r"<!-- site: \.\./(?:README|CHANGELOG)", text):
            inserted += 1
            shown = on_site(text, page.parent)
            assert len(shown) > len(text) and "<!-- code host" not in shown, page.name
    assert inserted == 3
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?:api|checks|claims|tutorials)/", index)
    site = on_site(index, DOCS)
    assert "pb.BNNRegressor()" in site and "](_static/first_minute.png)" in site
    assert (
        "| `NUTS` |" in site and "](claims/newest.md)" in site and "site, which `make" not in site
    )


def test_commands_and_options_of_a_page_exist():
    """Every option that a page shows is one that some command takes; those of a method by their last word."""
    known = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pyrobnn").rglob("*.py"))
    texts = [page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "README.md")]
    shown = (
        "".join(body for text in texts for body in blocks(text, "sh"))
        .replace("\\\n", " ")
        .splitlines()
    )
    shown += [line for text in texts for line in re.findall(r"`(pyrobnn [a-z]+ [^`]+)`", text)]
    commands = [line for line in shown if line.startswith("pyrobnn ") and "COMMAND" not in line]
    assert len(commands) >= 12
    for line in commands:
        assert line.split()[1] in ("compare", "doctor", "fit", "judge", "predict", "report")
        options = re.findall(r"--([\w.-]+)", line.partition(" #")[0])
        assert [option for option in options if option.rpartition(".")[2] not in known] == [], line
        # its value is optional: a file behind it is taken for one
        assert re.search(r"--strict (?!draws|model|all|--|#)\S", line) is None, line


def test_the_architecture_names_files_that_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `([\w/.]+)`", text, re.MULTILINE)
    assert len(files) == 8 and all((ROOT / "pyrobnn" / file).is_file() for file in files)
    rooms = re.findall(r"^\| `(tests/\w+)` \|", text, re.MULTILINE)
    assert len(rooms) > 8 and all((ROOT / room).is_dir() for room in rooms)
    drawn = " ".join(
        re.findall(r">([^<]+)</text>", (DOCS / "_static/architecture.svg").read_text())
    )
    names = {
        path.stem
        for path in (ROOT / "pyrobnn").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {name for name in names if not name.startswith("__")} - set(
        re.findall(r"\w+", drawn)
    ) == set()


def test_stories_show_cells_of_notebooks_that_exist(extension, tmp_path):
    """Two stories draw on a notebook: what they include is what its cells have, and their markers are in the code."""
    stem = re.compile(
        r"\.\./tutorials/parts/(\S+)\.(code|txt|png)(?: -->)?$(?:\n:\w.*)*", re.MULTILINE
    )
    for notebook in ("09_science", "10_learning"):
        extension("notebook_parts").write(ROOT / "notebooks" / f"{notebook}.ipynb", tmp_path)
    for name, notebook in (("physics", "09_science"), ("experiment", "10_learning")):
        text = (DOCS / "stories" / f"{name}.md").read_text(encoding="utf-8")
        shown = list(stem.finditer(text))
        assert {each[2] for each in shown} == {"code", "txt", "png"}
        for each in shown:
            part = tmp_path / f"{each[1]}.{each[2]}"
            assert each[1].startswith(notebook) and part.stat().st_size > 10
            for marker in re.findall(
                r"^:(?:start-at|end-at|end-before): (.+)$", each[0], re.MULTILINE
            ):
                assert marker in part.read_text(encoding="utf-8")


def test_the_list_of_pages_names_the_test_of_every_page(extension):
    found = {page: (test, when) for page, test, when in extension("tested_pages").rows()}
    lists = {"howto/index", "stories/index", "contributing"}
    names = {page.relative_to(DOCS).with_suffix("").as_posix(): page for page in PAGES}
    assert set(names) - set(found) == lists
    for param in runnable():
        (page,) = param.values
        test, when = found[page.relative_to(DOCS).with_suffix("").as_posix()]
        assert test.endswith(f"::test_the_code_of_a_page_runs[{param.id}]")
        assert when == ("slow" if param.marks else "every run")
    for test, _ in found.values():
        for path in re.findall(r"(?:tests|scripts)/\w+\.py", test):
            name = test.partition("::")[2].partition("[")[0]
            assert (ROOT / path).is_file() and name in (ROOT / path).read_text(encoding="utf-8")


def test_the_paper_cites_what_it_lists_and_its_numbers_are_those_of_records():
    text = PAPER.read_text(encoding="utf-8")
    listed = re.findall(
        r"^@\w+\{(\w+),$", (DOCS / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(set(re.findall(r"@(\w+)", text)))
    assert (
        re.findall(r"^# (Summary|Statement of need|References)$", text, re.MULTILINE)[-1]
        == "References"
    )
    prose = text.partition("\n---\n")[2]
    tables = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
    assert len(tables.findall(prose)) >= 4
    typed = re.sub(r"@\w+", "", tables.sub("", prose).replace("Pyro 1.9", "Pyro"))
    assert re.findall(r"\d[\d.,%]*", typed) == []


def test_the_messages_that_are_explained_are_those_of_the_code():
    texts = []
    for path in (ROOT / "pyrobnn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = getattr(node, "values", [node])
            texts.append(
                "".join(p.value for p in parts if isinstance(getattr(p, "value", None), str))
            )
    said = "\n".join(texts)
    quoted = re.findall(
        r'^"(.+)"$', (DOCS / "questions.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(quoted) > 10 and [words for words in quoted if words not in said] == []


def test_the_reference_has_every_public_name(extension, tmp_path):
    documented = set(extension("api_pages").write(tmp_path))
    expected = {f"pyrobnn.{name}" for name in pb.__all__ if not inspect.ismodule(getattr(pb, name))}
    for module in {value for name in pb.__all__ if inspect.ismodule(value := getattr(pb, name))}:
        listed = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        public = [name for name in listed if not name.startswith("_")]
        expected |= {
            f"{module.__name__}.{n}" for n in public if not inspect.ismodule(getattr(module, n))
        }
    assert len(expected) > 80 and expected - documented == set()
    of_extras = {n for n in documented if n.startswith(("pyrobnn.botorch.", "pyrobnn.mlflow."))}
    assert documented - expected - of_extras == set(), "what is not public has a page"
    index = (tmp_path / "index.rst").read_text(encoding="utf-8")
    assert all(f"<{page.stem}>" in index for page in tmp_path.glob("*.rst") if page.stem != "index")


def test_every_check_has_a_page_made_from_its_row(extension):
    check_pages = extension("check_pages")
    pages = check_pages.pages()
    assert {row.code for row in TABLE} <= set(pages)
    records = (ROOT / "scripts/verdict/records.jsonl").read_text().splitlines()
    assert {name for line in records for name in json.loads(line)["checks"]} - set(pages) == set()
    bfmi = check_pages.markdown(pages["bfmi"])
    assert "https://arxiv.org/abs/1604.00695" in bfmi and "0.3, 0.2 (share)" in bfmi
    units = [row.unit for row in pages.values()]
    assert all(units) and "the same" not in units
    virial = check_pages.markdown(pages["virial"])
    assert re.search(r"\| sd x 0\.5 \| \d+ \| \d+% \|", virial) and "healthy posteriors" in virial


def test_the_pages_tell_what_a_check_misses_and_draw_every_measured_one(extension, tmp_path):
    check_pages = extension("check_pages")
    check_rates = extension("check_rates")
    copies = check_pages.markdown(check_pages.pages()["copied_chains"])
    missed = re.findall(r"^\| (one chain with noise as all) \| \d+ \| 0% \|", copies, re.MULTILINE)
    assert missed, "a fault that it is there to see, and does not, is not told"
    check_rates.draw(tmp_path)
    for ground in ("light", "dark"):
        drawn = (tmp_path / f"rates-{ground}.svg").read_text(encoding="utf-8")
        assert [name for name in check_rates.rates() if f">{name}<" not in drawn] == []


def test_the_examples_of_the_checks_run(extension, capsys):
    page = extension("check_pages").pages()["rhat_function"]
    f = np.random.default_rng(0).normal(size=(4, 200, 3, 1))
    dims = ("chain", "draw", "probe", "output")
    groups = {
        "posterior": xr.Dataset({"w": (dims[:2], f[:, :, 0, 0])}),
        "function": xr.Dataset({"f": (dims, f)}),
    }
    (code,) = blocks(extension("check_pages").markdown(page), "python")
    exec(compile(code, "page", "exec"), {"pb": pb, "tree": xr.DataTree.from_dict(groups)})
    assert capsys.readouterr().out.startswith("pass rhat_function 1.0")


def dead_links(site):
    """Links of a built site to a file or a place in a file that it has not; those to other sites are not followed."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            link = html.unescape(link)
            if re.match(r"[a-z]+:|//", link):
                continue
            file, _, place = link.partition("#")
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not target.exists() or (
                place and target in places and unquote(place) not in places[target]
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_a_dead_link_and_a_dead_place_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"><a href="b.html#there"><a href="#top"><a href="c.html">'
    )
    (tmp_path / "b.html").write_text(
        '<p id="here"><a href="https://pyro.ai"><img src="a.html?v=1">'
    )
    assert sorted(dead_links(tmp_path)) == [
        "a.html: #top",
        "a.html: b.html#there",
        "a.html: c.html",
    ]


@pytest.mark.slow
def test_the_site_builds_and_every_link_in_it_holds(tmp_path):
    pytest.importorskip("myst_nb", reason="needs the extra 'docs'")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path),
    ]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr[-4000:]
    assert dead_links(tmp_path) == []
    index = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(index.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    wanted = {
        "bnnregressor": "howto/skpro",
        "heteroskedast": "checks/coverage_by_region",
        "lstm": "questions",
    }
    for word, page in wanted.items():
        assert index["docnames"].index(page) in index["terms"][word], word
