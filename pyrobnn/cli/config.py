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
from pydoc import locate
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from pyrobnn.checks import check_choice
from pyrobnn.cli.file import read_config
from pyrobnn.cli.say import OneLineParser, close_match, one_line
from pyrobnn.cli.study_options import NOT_IN_FILES, NOT_KEPT, PRINT_CONFIG, add_study_options
from pyrobnn.inference.method import METHODS, OPTIONAL, Method
from pyrobnn.kl_schedules import KLSchedule

#: arguments of ``fit`` that are no options of a method here: what is fitted, and what the whole run shares
_SHARED = {"model", "x", "y", "seed", "init", "device", "checkpoint", "stream_to", "callbacks", "progress"}
#: a name that can stand in an option, in a file and in the name of a file
_LABEL = re.compile(r"[^\W\d_][\w-]*")


@dataclass(frozen=True)
class Config:
    """A run as it was asked for.

    Attributes:
        study: the study's options by name.
        methods: name of one's own → configuration, and the arguments of its ``fit``.
        plain: all of it as plain values, as a file says it.
        notes: what the reader of the file should know.
    """

    study: Namespace
    methods: dict[str, tuple[Method, dict[str, Any]]]
    plain: dict[str, Any]
    notes: tuple[str, ...]

    def of(self, label: str) -> dict[str, Any]:
        """What one method's numbers rest on, in plain values: a run of it gives them again."""
        study = {name: value for name, value in self.plain.items() if name not in NOT_KEPT}
        return study | {"methods": {label: self.plain["methods"][label]}}


def read(argv: Sequence[str], command: str) -> Config:
    """The run that a command line asks for, every name and value of it checked.

    Where ``--help`` or ``--print_config`` is asked for, it is printed, and the process ends.

    Args:
        argv: the words behind the command.
        command: ``"compare"`` or ``"fit"``, which runs one method.

    Raises:
        ValueError, TypeError: an unknown name or a value of the wrong kind, in words.
    """
    words = ["--data", *argv] if command == "fit" and argv and not argv[0].startswith("-") else list(argv)
    early, _ = _early(command).parse_known_args(words)
    given, listed = read_config(early.config) if early.config else ({}, {})
    source = f"{early.config}: " if early.config else ""
    chosen = early.methods if command == "compare" else [early.method] if early.method else None
    if not early.config and chosen is None and {"-h", "--help"} & set(words):
        # all methods' options would be hundreds of lines
        _parser(command, {}, early.quick).parse_args(["--help"])
    methods = _chosen(chosen, listed, command)
    quick = early.quick or given.get("quick") is True
    parser = _parser(command, {label: name for label, (name, _) in methods.items()}, quick)
    flat, notes = _flat(
        parser, given, methods, source, shorten=early.quick and given.get("quick") is not True
    )
    try:
        namespace = parser.parse_object(flat)
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ValueError(f"{source}{one_line(error)}") from error
    try:
        # jsonargparse has a print_config of its own, of another layout
        found = parser.parse_args([word for word in words if word not in PRINT_CONFIG], namespace=namespace)
    except argparse.ArgumentError as error:
        raise ValueError(_unknown(one_line(error), parser, methods, command)) from error
    found.print_config = early.print_config
    return _config(parser, found, {label: name for label, (name, _) in methods.items()}, notes)


def help_of(command: str) -> str:
    """What ``--help`` shows of a command where no method is named."""
    return str(_parser(command, {}, quick=False).format_help())


def _early(command: str) -> OneLineParser:
    """What has to be known before the options are: which methods there are to have some, and the file."""
    early = OneLineParser(prog=f"pyrobnn {command}", add_help=False)
    early.add_argument("--config")
    early.add_argument("--quick", action="store_true")
    early.add_argument(*PRINT_CONFIG, action="store_true")
    if command == "compare":
        early.add_argument("--methods", nargs="+")
    else:
        early.add_argument("--method")
    return early


def _chosen(
    words: Sequence[str] | None, listed: Mapping[str, tuple[str, dict[str, Any]]], command: str
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Label → method and the file's options, of ``LABEL``, ``METHOD`` and ``LABEL=METHOD``; else the file's, or all."""
    if words is None:
        if command == "fit" and len(listed) > 1:
            raise ValueError(f"fit runs one method: choose one of {', '.join(listed)} with --method")
        standard = [name for name, known in METHODS.items() if known.standard]
        words = list(listed) or (["nuts"] if command == "fit" else standard)
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for word in words:
        label, _, name = word.partition("=")
        if not name and label in listed:
            each = listed[label]
        else:
            check_label(label, name or label)
            each = (name or label, {})
        if found.setdefault(label, each) != each:
            raise ValueError(f"two methods are called {label!r}: give each a name of its own")
    keys = [key(label) for label in found]
    if twice := next((label for label in found if keys.count(key(label)) > 1), None):
        raise ValueError(f"{twice!r} differs from another name by '-' and '_' alone: rename one of them")
    return found


def check_label(label: str, name: str) -> None:
    """Refuse a method that does not exist, and a name that is none.

    Raises:
        ValueError: what is known.
    """
    check_choice("methods", name, tuple(METHODS))
    if label in METHODS and label != name:
        raise ValueError(f"{label!r} is the name of a method: choose another for this {name}")
    if not _LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is no name for a method: use letters, digits, '-' and '_'")


def key(label: str) -> str:
    """Where jsonargparse keeps the values of a label: it makes underscores of dashes."""
    return label.replace("-", "_")


def _parser(command: str, methods: Mapping[str, str], quick: bool) -> ArgumentParser:
    """The parser of the study's options and of those of each method that is run, with the defaults of the run."""
    set_parsing_settings(subclasses_enabled=[KLSchedule])
    parser = ArgumentParser(prog=f"pyrobnn {command}", exit_on_error=False, allow_abbrev=False)
    add_study_options(parser, command)
    reserved = {action.dest for action in parser._actions}
    for label, name in methods.items():
        if key(label) in reserved:
            raise ValueError(f"{label!r} is an option of the command: choose another name for this {name}")
        known = METHODS[name]
        parser.add_class_arguments(known.cls, label, instantiate=False)
        unused = set(OPTIONAL) - set(known.cls.uses)
        parser.add_method_arguments(known.cls, "fit", label, as_group=False, skip=_SHARED | unused)
        options = {**known.full, **known.quick} if quick else known.full
        parser.set_defaults({f"{key(label)}.{option}": value for option, value in options.items()})
    return parser


def _flat(
    parser: ArgumentParser,
    given: Mapping[str, Any],
    methods: Mapping[str, tuple[str, dict[str, Any]]],
    source: str,
    shorten: bool,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The file's values as the parser keeps them, and what was put aside because the command line says ``--quick``.

    Raises:
        ValueError: an option that there is not, with the closest.
    """
    options = [name for name in parser.get_defaults().keys() if "." not in name and name not in NOT_IN_FILES]
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name not in options or name in map(key, methods):
            hint = (
                ": options of a method stand under 'methods'"
                if name in METHODS
                else close_match(name, options)
            )
            raise ValueError(f"{source}there is no option {name!r}{hint}")
        if isinstance(parser.get_defaults()[name], bool) and not isinstance(value, bool):
            raise ValueError(f"{source}{name!r} must be true or false, got {value!r}")
        listed = isinstance(parser.get_defaults()[name], list) or name == "features"
        flat[name] = [value] if listed and value is not None and not isinstance(value, list) else value
    notes = []
    for label, (name, values) in methods.items():
        known = list(vars(parser.get_defaults()[key(label)]))
        for option in values:
            if option not in known:
                raise ValueError(f"{source}{_no_option(label, name, option, known)}")
        shorter = METHODS[name].quick if shorten else {}
        if both := [option for option in values if option in shorter]:
            notes.append(
                f"--quick: {label} takes less than {source.removesuffix(': ')} says of {', '.join(both)}"
            )
        flat[key(label)] = {option: value for option, value in values.items() if option not in shorter}
    return flat, tuple(notes)


def _no_option(label: str, name: str, option: str, known: Sequence[str]) -> str:
    """That a method has no such option, the closest that it has, or else whose option it is."""
    hint = close_match(option, known)
    if not hint:
        whose = [n for n, each in METHODS.items() if option in {f.name for f in dataclasses.fields(each.cls)}]  # type: ignore[arg-type]
        hint = f": it is an option of {', '.join(whose)}" if whose else f": it has {', '.join(known)}"
    return f"{label!r} has no option {option!r}{hint}"


def _unknown(
    text: str, parser: ArgumentParser, methods: Mapping[str, tuple[str, dict[str, Any]]], command: str
) -> str:
    """What is wrong with words that the parser does not know."""
    found = re.match(r"unrecognized arguments: (\S+)", text)
    if not found:
        return text
    word = found.group(1).partition("=")[0]
    name = word.removeprefix("--")
    label, dot, option = name.partition(".")
    if dot and label in methods:
        known = list(vars(parser.get_defaults()[key(label)]))
        return _no_option(label, methods[label][0], option, known)
    if dot:
        option_of = "--methods" if command == "compare" else "--method"
        return f"{word!r} is of no method that is run ({', '.join(methods)}): name {label!r} in {option_of}"
    options = [each for each in parser._option_string_actions if "." not in each]
    return f"there is no option {word!r}{close_match(word, options) or f' (see pyrobnn {command} --help)'}"


def _config(
    parser: ArgumentParser, found: Namespace, methods: Mapping[str, str], notes: tuple[str, ...]
) -> Config:
    """Configurations made of the values, whose own checks run now, before anything is read or computed."""
    for label in methods:
        if found.no_compile and "compile" in found[key(label)]:
            found[key(label)].compile = False
    plain = json.loads(parser.dump(found, format="json", skip_unset=False))
    made = parser.instantiate(found)
    configurations = {}
    for label, name in methods.items():
        values = vars(made[key(label)])
        fields = {each.name for each in dataclasses.fields(METHODS[name].cls)}  # type: ignore[arg-type]
        try:
            options = {option: _resolved(value) for option, value in values.items() if option in fields}
            method = METHODS[name].cls(**options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{label}: {error}") from error
        arguments = {
            option: value for option, value in values.items() if option not in fields and value is not None
        }
        configurations[label] = (method, arguments)
    kept = {
        name: value
        for name, value in plain.items()
        if name not in NOT_IN_FILES and name not in map(key, methods)
    }
    kept["methods"] = {label: {"method": name} | plain[key(label)] for label, name in methods.items()}
    return Config(found, configurations, kept, notes)


def _resolved(value: Any) -> Any:
    """The class or function whose path a text is, such as ``pyro.infer.autoguide.AutoIAFNormal``.

    Raises:
        ValueError: a path that leads nowhere.
    """
    if isinstance(value, partial) and value.args and isinstance(value.args[-1], type):
        # an optimizer's factory without jsonargparse's wrappers, whose names would stand in the report
        return partial(value.args[-1], **value.keywords)
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
        return value
    found = locate(value)
    if found is None:
        raise ValueError(f"{value!r} cannot be imported: give the path of a class or function, PACKAGE.NAME")
    return found
