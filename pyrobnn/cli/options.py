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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, get_args, get_origin

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_parsing_settings

from pyrobnn import data
from pyrobnn.cli.help_words import HelpInWords
from pyrobnn.cli.terminal import EXIT_STATUS, one_line, say
from pyrobnn.core.checks import check_choice
from pyrobnn.estimators import auto as _auto  # noqa: F401  # makes it known
from pyrobnn.inference.method import METHODS, OPTIONAL, Method
from pyrobnn.inference.vi.kl_schedules import KLSchedule
from pyrobnn.studies.study import RESPONSES

#: arguments of ``fit`` that are not options of a method here: what is fitted, and what the whole run shares
_SHARED = {"model", "x", "y", "seed", "init", "device", "checkpoint", "callbacks", "progress"}
#: a name that can stand in an option, in a file and in the name of a file
_LABEL = re.compile(r"[^\W\d_][\w-]*")
#: what a file does not say: it is of one call; and what the numbers do not rest on
_OF_ONE_CALL = ("help", "config", "methods", "resume")
_NOT_KEPT = ("out", "no_progress", "refine", "workers")
_HELP = {"-h", "--help"}
_RESPONSE: Any = Literal[tuple(RESPONSES)]
#: the options of a study: type, default, help; those of the model are arguments of `make_study`
OPTIONS: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "the run": {
        "config": (str, None, "FILE.yaml: options by name, and methods; the command line wins"),
        "resume": (
            bool,
            False,
            "go on with a run that was stopped: what is finished is not fitted again",
        ),
        "refine": (
            float,
            None,
            "seconds in which each method without chains is then brought to the posterior",
        ),
        "workers": (int, None, "processes in which methods are fitted side by side, without bars"),
        "quick": (bool, False, "fewer steps and draws, 500 rows at most: a minute"),
        "seed": (int, 0, "seed of everything random"),
        "device": (str, None, "where to compute: cpu or cuda [cpu]"),
        "no_compile": (bool, False, "run without a compiler: same numbers, slower"),
        "no_progress": (bool, False, "no progress bars"),
    },
    "the data": {
        "data": (str, None, f"{', '.join(data.names())}, or a table: CSV, TSV, Parquet or Excel"),
        "target": (str, None, "target column of the file: needed with a file"),
        "features": (list[str], None, "columns to predict from [all others]"),
        "drop": (list[str], [], "columns to leave out [none]"),
        "task": (
            Literal["regression", "classification"],
            None,
            "task of the target [read from its values]",
        ),
        "missing": (
            Literal["refuse", "drop", "impute"],
            "refuse",
            "what happens to missing values",
        ),
        "test_fraction": (float, 0.1, "share of the rows held out"),
    },
    # the title is a key: runs._study_of reads it
    "the model": {
        "hidden": (list[int], [50], "widths of hidden layers"),
        "activation": (str, "tanh", "activation of the hidden layers"),
        "prior_scale": (float, 1.0, "scale of the fan-in normal prior"),
        "noise": (str, "inferred", "inferred, learned, heteroskedastic, or a number"),
        "response": (_RESPONSE, "gaussian", "likelihood of the target"),
    },
}
#: options by name, with the values that a file of YAML may give them
FileOptions = dict[str, Any]
#: label (a name of one's own) → name in METHODS, options from a file
NamedMethods = dict[str, tuple[str, FileOptions]]


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
        return yaml.safe_dump(
            self.plain,
            sort_keys=False,
            allow_unicode=True,
        ).rstrip("\n")


def read(argv: Sequence[str], command: str) -> Config:
    """The run that a command line asks for, every name and value of it checked.

    Where ``--help`` is asked for, it is printed, and the process ends.

    Args:
        argv: the words behind the command.
        command: ``"compare"`` or ``"fit"``, which runs one method.

    Raises:
        ValueError, TypeError: an unknown name or a value of the wrong kind, in words.
    """
    study_words, method_words = _split(_with_data(argv, command))
    parser = _study_parser(command)
    without_help = [word for word in study_words if word not in _HELP]
    # the line alone first: it says which file and which methods
    from_line = _parsed(parser, {}, without_help)
    if _HELP & set(study_words):
        _print_help(parser, from_line)
        sys.exit(0)
    file_options, file_methods = _content(from_line.config) if from_line.config else ({}, {})
    # then the file, and over it the line
    study = _parsed(parser, file_options, without_help)
    methods = _methods_to_run(command, from_line, file_methods)
    _check_labels(method_words, methods, "--method" if command == "fit" else "--methods")
    if from_line.quick and not file_options.get("quick"):
        methods = _without_quick_options(methods)
    configured, plain_methods = _configurations(methods, method_words, study)
    plain = _plain_study(parser, study) | {"methods": plain_methods}
    return Config(study, configured, plain)


def _with_data(argv: Sequence[str], command: str) -> list[str]:
    """The words, with ``--data`` before the data that ``fit`` takes as its first."""
    names_data = command == "fit" and argv and not argv[0].startswith("-")
    return ["--data", *argv] if names_data else list(argv)


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of the study, and label → those of its method, which begin with ``--LABEL.``."""
    study_words: list[str] = []
    method_words: dict[str, list[str]] = {}
    place = study_words
    for word in words:
        is_number = re.match(r"-[\d.]", word)
        if word.startswith("-") and not is_number:
            label = re.match(rf"--({_LABEL.pattern})\.", word)
            if label is None:
                place = study_words
                option, sign, value = word[2:].partition("=")
                word = word[:2] + option.replace("-", "_") + sign + value
            else:
                place = method_words.setdefault(label[1], [])
        place.append(word)
    return study_words, method_words


def _study_parser(command: str) -> ArgumentParser:
    """The parser of the words that are no method's: of ``compare``, or of ``fit``, which runs one method."""
    if command == "compare":
        parser = _command_parser(command, "", "Run methods on data, judge them, write a report.")
        example = f"(nuts svi-lr=svi --svi-lr.lr 1e-3) [{', '.join(_standard())}]"
        _add_common(parser, "--methods", "+", example, "results")
    else:
        parser = _command_parser(command, "DATA ", "Run one method and save it.")
        _add_common(parser, "--method", 1, "(mine=nuts) [auto]", "model.nc")
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (kind, default, words) in options.items():
            counted: dict[str, Any] = {}
            if kind is bool:
                counted = {"nargs": "?", "const": True, "metavar": "BOOL"}
            elif get_origin(kind) is list:
                counted = {"nargs": "+"}
                kind = get_args(kind)[0]
            group.add_argument(
                f"--{name}",
                type=kind,
                default=default,
                help=words,
                **counted,
            )
    if command == "compare":
        parser.set_defaults({"data": "gap"})
    return parser


def _command_parser(command: str, positional: str, does: str) -> ArgumentParser:
    flag = "--methods" if command == "compare" else "--method"
    return ArgumentParser(
        prog=f"pyrobnn {command}",
        usage=f"pyrobnn {command} {positional}[options] [--METHOD.OPTION VALUE ...]",
        description=(
            f"{does} Any option of a method: --METHOD.OPTION; {flag} svi --help lists those of svi."
        ),
        epilog=EXIT_STATUS,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=HelpInWords,
    )


def _add_common(
    parser: ArgumentParser,
    flag: str,
    count: str | int,
    example: str,
    out: str,
) -> None:
    """The methods to run and where the results go; the example stands in brackets, with the default behind it."""
    known = f"{', '.join(METHODS)}, or NAME=METHOD {example}"
    parser.add_argument(
        flag,
        dest="methods",
        nargs=count,
        type=str,
        help=known,
    )
    parser.add_argument(
        "--out",
        type=str,
        default=out,
        help="output file or folder",
    )


def _parsed(parser: ArgumentParser, written: FileOptions, words: Sequence[str]) -> Namespace:
    """What a file and then the command line say."""
    try:
        return parser.parse_args(list(words), namespace=parser.parse_object(dict(written)))
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ValueError(f"{one_line(error)} (see --help)") from error


def _print_help(parser: ArgumentParser, line: Namespace) -> None:
    """The help of the command, and of the methods that the line names."""
    texts = [parser.format_help()]
    for label, (name, _) in _chosen(line.methods or [], {}).items():
        texts.append(_method_parser(label, name, False).format_help())
    say("\n".join(texts))


def _content(path: str) -> tuple[FileOptions, NamedMethods]:
    """The options and the methods of a YAML file (JSON is YAML too)."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} does not exist")
    try:
        content = get_loader("yaml")(Path(path).read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    methods: Any = content.pop("methods", {}) if isinstance(content, dict) else None
    is_map = isinstance(methods, dict)
    if not is_map or not all(isinstance(options, dict) for options in methods.values()):
        raise ValueError(
            f"{path} must map options to values, such as 'data: diabetes', and 'methods' names to options: "
            "{svi: {}, nuts-long: {method: nuts, num_draws: 4000}}"
        )
    named = {str(label): dict(options) for label, options in methods.items()}
    return content, {
        label: (options.pop("method", label), options) for label, options in named.items()
    }


def _methods_to_run(command: str, line: Namespace, listed: NamedMethods) -> NamedMethods:
    """The methods that the line names, else those that the file lists, else the command's own."""
    words = line.methods or list(listed)
    if command == "fit":
        if len(words) > 1:
            names = ", ".join(listed)
            raise ValueError(f"fit runs one method: choose one of {names} with --method")
        standard = ["auto"]
    else:
        standard = _standard()
    return _chosen(words or standard, listed)


def _standard() -> list[str]:
    """What ``compare`` runs where nobody names methods."""
    return [name for name, known in METHODS.items() if known.standard]


def _chosen(words: Sequence[str], listed: NamedMethods) -> NamedMethods:
    """The methods that ``LABEL``, ``METHOD`` and ``LABEL=METHOD`` name."""
    chosen: NamedMethods = {}
    for word in words:
        label, _, name = word.partition("=")
        if not name and label in listed:
            chosen_method = listed[label]
        else:
            chosen_method = (name or label, {})
        method, _ = chosen_method
        check_choice("methods", method, tuple(METHODS))
        if label in METHODS and label != method or not _LABEL.fullmatch(label):
            raise ValueError(
                f"{label!r} cannot name this {method}: use letters, digits, '-' and '_'"
            )
        if chosen.setdefault(label, chosen_method) != chosen_method:
            raise ValueError(f"two methods are called {label!r}: give each a name of its own")
    return chosen


def _check_labels(
    method_words: Mapping[str, Sequence[str]],
    methods: NamedMethods,
    option: str,
) -> None:
    """ValueError where options are of a method that is not run; it is named by ``option``."""
    for label, words in method_words.items():
        if label in methods:
            continue
        remedy = f"name the method in {option}"
        if label not in METHODS:
            _, _, field = words[0].partition(".")
            written = " or ".join(f"--{name}.{field}" for name in methods)
            remedy = f"an option of a method begins with its name, as in {written}"
        raise ValueError(f"unrecognized arguments: {words[0]}: {remedy}")


def _without_quick_options(methods: NamedMethods) -> NamedMethods:
    """The methods of a file without the options that ``--quick`` sets."""
    remaining: NamedMethods = {}
    for label, (name, options) in methods.items():
        quick = METHODS[name].quick
        remaining[label] = name, {key: options[key] for key in options if key not in quick}
    return remaining


def _configurations(
    methods: NamedMethods, method_words: Mapping[str, Sequence[str]], study: Namespace
) -> tuple[dict[str, tuple[Method, dict[str, Any]]], dict[str, dict[str, Any]]]:
    """By label: each method with the arguments of its ``fit``; and the same in plain values."""
    configured = {}
    plain = {}
    for label, (name, options) in methods.items():
        words = method_words.get(label, [])
        method, arguments, values = _configured(label, name, options, words, study)
        configured[label] = method, arguments
        plain[label] = {"method": name} | values
    return configured, plain


def _configured(
    label: str,
    name: str,
    options: FileOptions,
    words: Sequence[str],
    study: Namespace,
) -> tuple[Method, dict[str, Any], dict[str, Any]]:
    """A method, whose own checks run now, the arguments of its ``fit``, and all of it in plain values."""
    parser = _method_parser(label, name, study.quick)
    key = label.replace("-", "_")
    parsed = _parsed(parser, {key: dict(options)}, words)
    if study.no_compile and "compile" in parsed[key]:
        parsed[key].compile = False
    plain = _plain_values(parser, parsed)[key]
    values = vars(parser.instantiate(parsed)[key])
    cls = METHODS[name].cls
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        settings = {option: _resolved(values[option]) for option in values if option in fields}
        method = cls(**settings)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{label}: {error}") from error
    arguments = {
        option: value
        for option, value in values.items()
        if option not in fields and value is not None
    }
    return method, arguments, plain


def _method_parser(label: str, name: str, quick: bool) -> ArgumentParser:
    """The parser of one method's options, under its label, with the defaults of the run."""
    set_parsing_settings(subclasses_enabled=[KLSchedule])
    method = METHODS[name]
    parser = ArgumentParser(
        prog="pyrobnn",
        usage=argparse.SUPPRESS,
        add_help=False,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=HelpInWords,
    )
    parser.add_class_arguments(
        method.cls,
        label,
        instantiate=False,
    )
    unused = set(OPTIONAL) - set(method.cls.uses)
    parser.add_method_arguments(
        method.cls,
        "fit",
        label,
        as_group=False,
        skip=_SHARED | unused,
    )
    _say_what_the_others_say(parser, method.cls)
    defaults = {**method.full, **(method.quick if quick else {})}
    key = label.replace("-", "_")  # where jsonargparse keeps the values
    parser.set_defaults({f"{key}.{option}": value for option, value in defaults.items()})
    return parser


def _say_what_the_others_say(parser: ArgumentParser, cls: type[Method]) -> None:
    """An option that the docstring of a method leaves to another of the same base has that one's words."""
    words: dict[str, str | None] = {}
    for method in METHODS.values():
        if method.cls.__base__ is cls.__base__:
            described = docstring_parser.parse(method.cls.__doc__ or "").params
            words = {param.arg_name: param.description for param in described} | words
    for action in parser._actions:
        if action.help is None:
            action.help = words.get(action.dest.rpartition(".")[2])


def _resolved(value: Any) -> Any:
    """The class or function whose path a text is, such as ``pyro.infer.autoguide.AutoIAFNormal``."""
    if isinstance(value, partial) and value.args and isinstance(value.args[-1], type):
        # an optimizer's factory without jsonargparse's wrappers, whose names would stand in the report
        return partial(value.args[-1], **value.keywords)
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        return value
    target = locate(value)
    if target is None:
        raise ValueError(
            f"{value!r} cannot be imported: give the path of a class or function, PACKAGE.NAME"
        )
    return target


def _plain_study(parser: ArgumentParser, study: Namespace) -> dict[str, Any]:
    """The options of the study that a file keeps, as plain values."""
    values = _plain_values(parser, study)
    return {name: value for name, value in values.items() if name not in _OF_ONE_CALL}


def _plain_values(parser: ArgumentParser, parsed: Namespace) -> dict[str, Any]:
    """What was parsed as plain values, by name."""
    written = parser.dump(
        parsed,
        format="json",
        skip_unset=False,
    )
    return json.loads(written)
