"""The package as it is installed: dependencies, pins, files, and an import that changes nothing."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(lines):
    return [Requirement(line) for line in lines.splitlines() if line and not line.startswith("#")]


def pins(python):
    active = {}
    for pin in requirements((ROOT / "constraints.txt").read_text()):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert canonicalize_name(pin.name) not in active, (
                f"{pin.name} is pinned twice for {python}"
            )
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            active[canonicalize_name(pin.name)] = Version(specifier.version)
    return active


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_pin_that_satisfies_it(python):
    parser = setup_cfg()
    active = pins(python)
    extras = parser["options.extras_require"]
    needed = requirements(parser["options"]["install_requires"])
    needed += [requirement for extra in extras for requirement in requirements(extras[extra])]
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate(
            {"python_version": python}
        ):
            continue
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        assert requirement.specifier.contains(active[canonicalize_name(requirement.name)]), (
            requirement
        )


@pytest.mark.parametrize("python", PYTHONS)
def test_torch_is_pinned_with_the_torchvision_that_needs_it(python):
    active = pins(python)
    assert (active["torch"], active["torchvision"]) == (Version("2.13.0"), Version("0.28.0"))


def imported():
    """The libraries, beside Python's own, that some file of the package imports."""
    found = set()
    for path in (ROOT / "pyrobnn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"pyrobnn"}


def test_what_is_imported_is_required_and_what_is_required_is_imported():
    parser = setup_cfg()
    required = {
        canonicalize_name(each.name) for each in requirements(parser["options"]["install_requires"])
    }
    optional = {
        "distributed": "cluster",
        "botorch": "botorch",
        "pyarrow": "tables",
        "zarr": "zarr",
        "mlflow": "mlflow",
        "arviz_plots": "arviz",
    }  # of an extra; the import says how to get it
    assert all(name in parser["options.extras_require"][extra] for name, extra in optional.items())
    # asked for where they are: in a notebook, on Windows, in a checkout
    present = {"IPython", "psutil"}
    by_name = {
        "h5netcdf",
        "h5py",
        "arviz",
    }  # xarray loads its engine by name; ArviZ is for the user
    owners = {"PIL": "pillow", "pyro": "pyro-ppl", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    names = {
        canonicalize_name(owners.get(name, name)) for name in imported() - set(optional) - present
    }
    assert names - required == set(), "imported and not required"
    assert required - names - by_name == set(), "required and not imported"


def test_setuptools_can_read_every_section_of_the_configuration():
    """It replaces what follows a per cent sign, in pytest's section too, where no test meets it."""
    parser = setup_cfg()
    assert all(dict(parser.items(section)) for section in parser.sections())


def test_the_package_carries_its_types():
    assert (
        ROOT / "pyrobnn/py.typed"
    ).is_file()  # without it, type checkers take everything for Any


def test_every_pattern_of_package_data_has_a_file():
    for pattern in setup_cfg()["options.package_data"]["pyrobnn"].split():
        assert list((ROOT / "pyrobnn").glob(pattern)), f"no file is called {pattern}"


def test_every_extra_the_makefile_installs_exists():
    makefile = (ROOT / "Makefile").read_text()
    asked = {
        name
        for group in re.findall(r"\.installed-([a-z,]+)", makefile)
        for name in group.split(",")
    }
    assert asked and asked <= set(setup_cfg()["options.extras_require"])


def test_every_file_of_the_package_is_installed():
    patterns = setup_cfg()["options.package_data"]["pyrobnn"].split()
    for path in (ROOT / "pyrobnn").rglob("*"):
        name = path.relative_to(ROOT / "pyrobnn").as_posix()
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{path.parent.name} has no __init__.py"
        else:
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), (
                f"{name} would not be installed"
            )


def leaves_the_encoding_open(call):
    """Whether a call reads or writes text in the system's own encoding: on Windows that of a code page."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = [*call.args, *(each.value for each in call.keywords if each.arg == "mode")]
    modes = [str(each.value) for each in given if isinstance(each, ast.Constant)]
    modes = [mode for mode in modes if re.fullmatch("[rwaxbt+]{1,3}", mode)]
    if name == "open" and isinstance(call.func, ast.Attribute) and not modes:
        return False  # of another library
    encoding = {"open": 3, "read_text": 0, "write_text": 1}.get(name, -1)
    named = len(call.args) > encoding or any(each.arg == "encoding" for each in call.keywords)
    return not named and not any("b" in mode for mode in modes)


@pytest.mark.parametrize("folder", ["pyrobnn", "scripts", "docs"])
def test_every_text_file_is_opened_in_an_encoding_that_is_named(folder):
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and leaves_the_encoding_open(node)
    ]
    assert bare == []


#: what Windows has not: modules, and functions of os
POSIX = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
POSIX |= {
    f"os.{name}"
    for name in ("fork", "getuid", "killpg", "mkfifo", "pread", "pwrite", "setsid", "uname")
}


def test_nothing_of_one_system_alone_is_needed_to_import_or_to_run():
    """An import of it may stand inside of a function alone, in a ``try`` that says what is done without it."""
    found = []
    for path in sorted((ROOT / "pyrobnn").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tried = {
            id(each)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for each in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                wrong = names & POSIX and (id(node) not in tried or node in tree.body)
            else:
                wrong = isinstance(node, ast.Attribute) and ast.unparse(node) in POSIX
            found += [f"{path.name}:{node.lineno}"] if wrong else []
    assert found == []


def tracked_at_the_top():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line.split("/")[0] for line in listing.stdout.splitlines()}


def test_the_source_archive_is_the_checkout():
    """Its tests run from it: they read helpers, scripts, notebooks, the documentation and the makefile."""
    by_setuptools = {
        "pyrobnn",
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    }
    named = set()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        verb, *names = line.split() or [""]
        if verb in ("graft", "include"):
            named |= set(names)
    assert named == tracked_at_the_top() - by_setuptools


def test_the_top_level_holds_what_it_may():
    top = tracked_at_the_top()
    allowed = {
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
        "pyrobnn",
        "scripts",
        "tests",
        "notebooks",
    }
    allowed |= {
        "README.md",
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "docs",
        "MANIFEST.in",
    }
    allowed |= {"binder"}  # where Binder looks
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_citation_and_changes_name_the_version():
    version = re.search(r'__version__ = "(.+)"', (ROOT / "pyrobnn/__init__.py").read_text()).group(
        1
    )
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_hooks_and_the_public_checks_are_those_of_make_lint():
    (pin,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{pin}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    public = (ROOT / ".github/workflows/ci.yml").read_text()
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE).group(1)
    for command in re.findall(r"\$\(BIN\)/(.+)", lint):
        assert f"- run: {command}\n" in public
    assert all(f'"{python}"' in public for python in PYTHONS)


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("compare", ".venv/bin/pyrobnn compare --option"),
        ("test", ".venv/bin/python -m pytest -n auto --dist worksteal --option"),
        ("lint", ".venv/bin/python -m ruff format --check ."),
        ("lint", ".venv/bin/python -m mypy"),
        ("notebooks", ".venv/bin/python scripts/run_notebooks.py --option"),
        ("benchmark", ".venv/bin/python scripts/speed/run.py --option"),
        (
            "docs",
            ".venv/bin/python -m sphinx -W --keep-going -n -b html docs docs/_build/html --option",
        ),
        ("gpu", ".venv/bin/python scripts/gpu/run.py --option"),
        ("mnist", ".venv/bin/python scripts/mnist/run.py --option"),
    ],
)
def test_every_verb_of_the_makefile_passes_its_options_on(verb, command):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # without the variables of a make that runs these tests
    environment = {
        name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"
    }
    shown = subprocess.run(
        ["make", "--dry-run", verb, "ARGS=--option"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert shown.returncode == 0, shown.stderr
    assert command in shown.stdout.splitlines()


def test_make_help_says_in_a_line_what_each_target_does():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # a make inside a make names its directory
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: help (.+)$", makefile, re.MULTILINE).group(1).split()
    lines = dict(re.findall(r"^  (\w+) +(.{20,100})$", shown, re.MULTILINE))
    assert list(lines) == targets and shown.count("\n") == len(targets) + 1


def test_import_changes_nothing_and_warns_of_nothing():
    program = (
        "import matplotlib, torch._inductor.config\n"
        "from global_state import GlobalState\n"
        "state = GlobalState()\n"
        "import pyrobnn\n"
        "leaks = state.leaks()\n"
        "assert not leaks, leaks\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
