"""What is to be run, from the command line and from a file: the data, the model and every method's options.

The options of a method are its fields, the help on them its docstring's: jsonargparse reads both. A file holds the
options of the study by name and, under ``methods``, what is run, under names of one's own:

    data: clusters
    noise: heteroskedastic
    methods:
      svi: {guide: full_rank}
      nuts-long: {method: nuts, num_draws: 4000}
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_parsing_settings

from pyrobnn import data
from pyrobnn.cli.terminal import EXIT_STATUS, OneLineParser, close_match, one_line
from pyrobnn.core.checks import check_choice
from pyrobnn.inference.method import METHODS, OPTIONAL, Method
from pyrobnn.inference.vi.kl_schedules import KLSchedule
from pyrobnn.studies.response import RESPONSES

#: arguments of ``fit`` that are no options of a method here: what is fitted, and what the whole run shares
_SHARED = {"model", "x", "y", "seed", "init", "device", "checkpoint", "stream_to", "callbacks", "progress"}
#: a name that can stand in an option, in a file and in the name of a file
_LABEL = re.compile(r"[^\W\d_][\w-]*")
#: what a file does not say: it is of one call; and what the numbers do not rest on
_OF_ONE_CALL = ("help", "config", "print_config", "methods", "resume", "checkpoint")
_NOT_KEPT = ("out", "no_progress")
_PRINT_CONFIG = ("--print_config", "--print-config")
_RESPONSE: Any = Literal[tuple(RESPONSES)]
#: the options of a study: type, default, help; those of the model are arguments of `make_study`
OPTIONS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "the run": {
        "config": (str, None, "FILE.yaml: options by name, and methods; the command line wins"),
        "resume": (bool, False, "go on with a run that was stopped: what is finished is not fitted again"),
        "quick": (bool, False, "fewer steps and draws, 500 rows at most: a minute"),
        "seed": (int, 0, "of everything random"),
        "device": (str, None, "where to compute, cpu or cuda [cpu]"),
        "no_compile": (bool, False, "run without a compiler: same numbers, slower"),
        "no_progress": (bool, False, "no progress bars"),
    },
    "the data": {
        "target": (str, None, "target column of the file"),
        "features": (list[str], None, "columns to predict from [all others]"),
        "drop": (list[str], [], "columns to leave out"),
        "task": (Literal["regression", "classification"], None, "of the target [read from its values]"),
        "missing": (Literal["refuse", "drop", "impute"], "refuse", "what happens to missing values"),
        "test_fraction": (float, 0.1, "share of the rows held out"),
    },
    "the model": {
        "hidden": (list[int], [50], "widths of hidden layers"),
        "activation": (str, "tanh", "of the hidden layers"),
        "prior_scale": (float, 1.0, "scale of the fan-in normal prior"),
        "noise": (str, "inferred", "inferred, learned, heteroskedastic, or a number"),
        "response": (_RESPONSE, "gaussian", "likelihood of the target"),
        "exposure": (str, None, "of counts: the column of each row's exposure"),
        "event": (str, None, "of a censored target: the column of 1 (observed) and 0 (censored)"),
        "bounds": (tuple[float, float], None, "of beta: what y lies between [0 1]"),
    },
}

#: name → method and the options that a file gives it
Methods = dict[str, tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Config:
    """A run as it was asked for.

    Attributes:
        study: the study's options by name.
        methods: name of one's own → configuration, and the arguments of its ``fit``.
        plain: all of it as plain values, as a file says it.
    """

    study: Namespace
    methods: dict[str, tuple[Method, dict[str, Any]]]
    plain: dict[str, Any]

    def of(self, label: str) -> dict[str, Any]:
        """What one method's numbers rest on, in plain values: a run of it gives them again."""
        study = {name: value for name, value in self.plain.items() if name not in _NOT_KEPT}
        return study | {"methods": {label: self.plain["methods"][label]}}

    def __str__(self) -> str:
        """The text of a file that asks for this run."""
        return yaml.safe_dump(self.plain, sort_keys=False, allow_unicode=True).rstrip("\n")


def read(argv: Sequence[str], command: str) -> Config:
    """The run that a command line asks for, every name and value of it checked.

    Where ``--help`` is asked for, it is printed, and the process ends.

    Args:
        argv: the words behind the command.
        command: ``"compare"`` or ``"fit"``, which runs one method.

    Raises:
        ValueError, TypeError: an unknown name or a value of the wrong kind, in words.
    """
    words = ["--data", *argv] if command == "fit" and argv and not argv[0].startswith("-") else list(argv)
    early = _first_look(command, words)
    written = read_file(early.config) if early.config else {}
    methods = _chosen(early.methods, listed_methods(written.pop("methods", None)), command)
    if not early.config and early.methods is None and {"-h", "--help"} & set(words):
        methods = {}  # all methods' options would be hundreds of lines
    parser = _parser(command, methods, early.quick or written.get("quick") is True)
    if set(map(_key, methods)) & written.keys():
        raise ValueError("the options of a method stand under 'methods'")
    for label, (name, options) in methods.items():
        shorter = METHODS[name].quick if early.quick and written.get("quick") is not True else {}
        written[_key(label)] = {key: value for key, value in options.items() if key not in shorter}
    for word in words:
        # of an option that is no method the parser would make a value with parts
        of = re.match(r"--([\w-]+)\.", word)
        if of and _key(of[1]) not in map(_key, methods):
            raise ValueError(_with_hint(f"unrecognized arguments: {word}", parser))
    try:
        namespace = parser.parse_object(_with_lists(written))
        # jsonargparse has a print_config of its own, of another layout
        found = parser.parse_args([word for word in words if word not in _PRINT_CONFIG], namespace=namespace)
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ValueError(_with_hint(one_line(error), parser)) from error
    found.print_config = early.print_config
    return _instantiated(parser, found, {label: name for label, (name, _) in methods.items()})


def read_file(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file (JSON is YAML too).

    Raises:
        OSError: no such file.
        ValueError: not YAML, or no map of options to values.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        content = get_loader("yaml")(Path(path).read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must map options to values, such as 'data: diabetes', and 'methods' to what is run"
        )
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def listed_methods(written: Any) -> Methods:
    """Name → method and options, of a list of words as on the command line, or of a map."""
    if isinstance(written, str):
        written = written.split()
    if isinstance(written, list):
        pairs = [str(word).partition("=") for word in written]
        written = {label: name or label for label, _, name in pairs}
        if len(written) < len(pairs):
            raise ValueError("two methods have one name: give each a name of its own")
    if not isinstance(written or {}, dict):
        raise ValueError(
            "'methods' must be names, [svi, nuts], or a map, {nuts-long: {method: nuts, num_draws: 4000}}"
        )
    found = {}
    for label, options in (written or {}).items():
        options = {"method": options or label} if options is None or isinstance(options, str) else options
        if not isinstance(options, dict):
            raise ValueError(
                f"{label!r} must map options to values, such as {{num_draws: 500}}, got {options!r}"
            )
        options = {str(name).replace("-", "_"): value for name, value in options.items()}
        found[str(label)] = (str(options.pop("method", label)), options)
    return found


def _first_look(command: str, words: Sequence[str]) -> argparse.Namespace:
    """What has to be known before the options are: which methods there are to have some, and the file."""
    early = OneLineParser(prog=f"pyrobnn {command}", add_help=False)
    early.add_argument("--config")
    early.add_argument("--quick", action="store_true")
    early.add_argument(*_PRINT_CONFIG, action="store_true")
    many = command == "compare"
    early.add_argument("--methods" if many else "--method", dest="methods", nargs="+" if many else 1)
    return early.parse_known_args(words)[0]


def _chosen(words: Sequence[str] | None, listed: Methods, command: str) -> Methods:
    """The methods that ``LABEL``, ``METHOD`` and ``LABEL=METHOD`` name; else those of the file, or all."""
    if words is None:
        if command == "fit" and len(listed) > 1:
            raise ValueError(f"fit runs one method: choose one of {', '.join(listed)} with --method")
        standard = [name for name, known in METHODS.items() if known.standard]
        words = list(listed) or (["nuts"] if command == "fit" else standard)
    found: Methods = {}
    for word in words:
        label, _, name = word.partition("=")
        each = listed[label] if not name and label in listed else (name or label, {})
        check_choice("methods", each[0], tuple(METHODS))
        if label in METHODS and label != each[0] or not _LABEL.fullmatch(label):
            raise ValueError(f"{label!r} is no name for this {each[0]}: use letters, digits, '-' and '_'")
        if found.setdefault(label, each) != each:
            raise ValueError(f"two methods are called {label!r}: give each a name of its own")
    if len(set(map(_key, found))) < len(found):
        raise ValueError(f"{', '.join(found)} must differ in more than '-' and '_'")
    return found


def _key(label: str) -> str:
    """Where jsonargparse keeps the values of a label: it makes underscores of dashes."""
    return label.replace("-", "_")


def _parser(command: str, methods: Methods, quick: bool) -> ArgumentParser:
    """The parser of the study's options and of those of each method that is run, with the defaults of the run."""
    set_parsing_settings(subclasses_enabled=[KLSchedule])
    parser = ArgumentParser(prog=f"pyrobnn {command}", exit_on_error=False, allow_abbrev=False)
    several = command == "compare"
    flag, example, does = (
        (
            "--methods",
            "nuts svi-lr=svi --svi-lr.lr 1e-3",
            "Run methods on a data set, judge them, write a report.",
        )
        if several
        else ("--method", "nuts", "Run one method and save it.")
    )
    where = f"pyrobnn {command} {flag} svi --help lists those of svi"
    parser.description = f"{does} Any option of a method: --METHOD.OPTION; {where}."
    parser.epilog = EXIT_STATUS
    parser.usage = f"pyrobnn {command} {'' if several else 'DATA '}[options] [--METHOD.OPTION VALUE ...]"
    known = f"{', '.join(METHODS)}, or NAME=METHOD ({example})"
    parser.add_argument(flag, dest="methods", nargs="+" if several else 1, type=str, help=known)
    out = "results" if several else "model.nc"
    parser.add_argument("--out", type=str, default=out, help="where to write")
    if not several:
        parser.add_argument("--checkpoint", type=str, help="of NUTS: the file to go on from [OUT.checkpoint]")
    words = "print a --config file of this run and stop"
    parser.add_argument(*_PRINT_CONFIG, action="store_true", help=words)
    tables = f"{', '.join(data.names())}, or a table: CSV, TSV, Parquet or Excel"
    parser.add_argument("--data", type=str, default="gap" if several else None, help=tables)
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (kind, default, words) in options.items():
            flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            if kind is bool:
                group.add_argument(*flags, action="store_true", help=words)
                continue
            count = {list: "+", tuple: 2}.get(get_origin(kind))
            counted: dict[str, Any] = {} if count is None else {"nargs": count}
            kind = kind if count is None else get_args(kind)[0]
            group.add_argument(*flags, type=kind, default=default, help=words, **counted)
    reserved = {action.dest for action in parser._actions}
    for label, (name, _) in methods.items():
        if _key(label) in reserved:
            raise ValueError(f"{label!r} is an option of the command: choose another name for this {name}")
        method = METHODS[name]
        parser.add_class_arguments(method.cls, label, instantiate=False)
        unused = set(OPTIONAL) - set(method.cls.uses)
        parser.add_method_arguments(method.cls, "fit", label, as_group=False, skip=_SHARED | unused)
        defaults = {**method.full, **method.quick} if quick else method.full
        parser.set_defaults({f"{_key(label)}.{option}": value for option, value in defaults.items()})
    return parser


def _with_lists(written: Mapping[str, Any]) -> dict[str, Any]:
    """A single value where an option takes several is a list of one; a truth value must be one."""
    kinds = {name: option[0] for group in OPTIONS.values() for name, option in group.items()}
    found = dict(written)
    for name, value in written.items():
        if kinds.get(name) is bool and not isinstance(value, bool):
            raise ValueError(f"{name!r} must be true or false, got {value!r}")
        if get_origin(kinds.get(name)) is list and not isinstance(value, list | None):
            found[name] = [value]
    return found


def _with_hint(text: str, parser: ArgumentParser) -> str:
    """The parser's words about an option that there is not, with the closest that there is."""
    found = re.search(r"unrecognized arguments: --([\w.-]+)|[Oo]ption '([\w.-]+)'", text)
    if not found:
        return text
    word = found[1] or found[2]
    known = [flag.removeprefix("--") for flag in parser._option_string_actions]
    prefix = re.search(r"Group '([\w.-]+)'", text)
    hint = close_match(f"{prefix[1]}.{word}" if prefix else word, known)
    return text + (hint or ": name the method in --methods, or see --help")


def _instantiated(parser: ArgumentParser, found: Namespace, methods: Mapping[str, str]) -> Config:
    """Configurations made of the values, whose own checks run now, before anything is read or computed."""
    for label in methods:
        if found.no_compile and "compile" in found[_key(label)]:
            found[_key(label)].compile = False
    plain = json.loads(parser.dump(found, format="json", skip_unset=False))
    made = parser.instantiate(found)
    configurations = {}
    for label, name in methods.items():
        values = vars(made[_key(label)])
        fields = {each.name for each in dataclasses.fields(METHODS[name].cls)}  # type: ignore[arg-type]
        try:
            options = {option: _resolved(value) for option, value in values.items() if option in fields}
            method = METHODS[name].cls(**options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{label}: {error}") from error
        rest = {name: value for name, value in values.items() if name not in fields and value is not None}
        configurations[label] = (method, rest)
    dropped = (*_OF_ONE_CALL, *map(_key, methods))
    kept = {name: value for name, value in plain.items() if name not in dropped}
    kept["methods"] = {label: {"method": name} | plain[_key(label)] for label, name in methods.items()}
    return Config(found, configurations, kept)


def _resolved(value: Any) -> Any:
    """The class or function whose path a text is, such as ``pyro.infer.autoguide.AutoIAFNormal``."""
    if isinstance(value, partial) and value.args and isinstance(value.args[-1], type):
        # an optimizer's factory without jsonargparse's wrappers, whose names would stand in the report
        return partial(value.args[-1], **value.keywords)
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        return value
    found = locate(value)
    if found is None:
        raise ValueError(f"{value!r} cannot be imported: give the path of a class or function, PACKAGE.NAME")
    return found
