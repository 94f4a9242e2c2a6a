"""The help of the command line in words: types as one says them, defaults as values, no marks of docstrings."""

from __future__ import annotations

import re
from argparse import Action

from jsonargparse import DefaultHelpFormatter

#: type, as jsonargparse writes it → what may stand there
_TYPES = {
    "str": [],
    "null": [],
    "int": ["whole number"],
    "float": ["number"],
    "bool": ["true", "false"],
    "Compile": ["true", "false", "auto"],
    "Callable": ["path of a function"],
    "OptimizerFactory": ["path of a torch.optim class"],
    "dict[str, Any]": ["{NAME: VALUE}"],
    "tuple[str, ...]": ["names"],
}
#: a sign of a formula → the same on a terminal
_SIGNS = {
    r"\|": "|",
    r"\log": "log",
    r"\theta": "theta",
    r"\Sigma": "Sigma",
    r"\varepsilon": "epsilon",
    r"_{diag}": "_diag",
}
#: default, as jsonargparse writes it → the value
_DEFAULTS = {
    "null": "None",
    "True": "true",
    "False": "false",
}
#: what jsonargparse writes behind the text of an option
_ADDED = re.compile(
    r"(?P<text>.*?)\s*\((?:type: (?P<type>.*?))(?:, default: (?P<default>.*?))?"
    r"(?:, known subclasses: (?P<classes>.*))?\)",
    re.DOTALL,
)


class HelpInWords(DefaultHelpFormatter):
    """jsonargparse's help with the type and the default of an option in words behind its text."""

    def _expand_help(self, action: Action) -> str:
        return in_words(super()._expand_help(action))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else _unmarked(heading))


def in_words(text: str) -> str:
    """The text of an option, with what jsonargparse adds to it, in words.

    What the text itself ends on in brackets is the default in words, for one that is no value.

    >>> in_words("gradient steps. (type: int, default: 10000)")
    'gradient steps (whole number; default: 10000)'
    >>> in_words("where to compute [cpu] (type: str, default: null)")
    'where to compute (default: cpu)'
    >>> in_words("``None`` finds one. (type: float | null, default: null)")
    'None finds one (number; default: None)'
    """
    added = _ADDED.fullmatch(text)
    if added is None:
        return _unmarked(text)
    words = _unmarked(added["text"]).rstrip(".")
    default = _DEFAULTS.get(added["default"], added["default"])
    if default is not None and re.fullmatch(
        r"\[.*\]", default
    ):  # as the words of a list are written
        default = default[1:-1].replace(", ", " ")
    in_brackets = re.fullmatch(r"(.*?)\s\[([^\[\]]+)\]", words, re.DOTALL)
    if in_brackets is not None:
        words, default = in_brackets.groups()
    notes = [_type_in_words(added["type"])]
    if default is not None and (added["default"] != "null" or default != "None" or "None" in words):
        notes.append(f"default: {default}")
    if added["classes"]:
        names = [path.strip().rpartition(".")[2] for path in added["classes"].split(",")]
        notes.append(f"classes: {', '.join(names)}")
    behind = "; ".join(note for note in notes if note)
    return f"{words} ({behind})".strip() if behind else words


def _type_in_words(written: str) -> str:
    """A type as one says it; "" where the option's own line shows what it may be.

    >>> _type_in_words("Optional[Unvalidated<float | null>]"), _type_in_words("Literal['a', 'b']")
    ('number', '')
    >>> _type_in_words("Union[bool, Literal['auto']]")
    'true, false or auto'
    """
    bare = re.sub(r"Unvalidated<(.*?)>", r"\1", written)
    bare = re.sub(r"(?:Optional|Union)\[(.*)\]", r"\1", re.sub(r"Callable\[.*\]", "Callable", bare))
    said: list[str] = []
    chosen: list[str] = []
    for member in re.split(r" \| |, (?![^\[]*\])", bare):
        literal = re.fullmatch(r"Literal\[(.*)\]", member)
        if literal is not None:
            chosen += re.findall(r"'([^']*)'", literal[1])
        else:
            said += _TYPES.get(member, [member])
    alternatives = list(dict.fromkeys(said + chosen)) if said else []
    return " or ".join(filter(None, [", ".join(alternatives[:-1]), *alternatives[-1:]]))


def _unmarked(text: str) -> str:
    """A docstring's text without its marks for a page."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", text)
    text = re.sub(r":math:`([^`]*)`", lambda formula: _plain_formula(formula[1]), text)
    return re.sub(r"\*(\w[^*]*)\*", r"\1", text).replace("``", "").replace("`", "")


def _plain_formula(formula: str) -> str:
    for sign, plain in _SIGNS.items():
        formula = formula.replace(sign, plain)
    return formula
