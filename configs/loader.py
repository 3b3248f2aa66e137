"""Reads config files and the command line into a `TrainConfig`.

A config is a Python file of plain assignments to the keys of `TrainConfig`. It can build on others:
`base = "base/x.py"` or a tuple of such names, relative to the file. Later bases override earlier ones and the file
overrides them all; `--key=value` overrides the file.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from configs.schema import ConfigError, TrainConfig

TYPES = typing.get_type_hints(TrainConfig, include_extras=True)
Values = dict[str, tuple[Any, str]]  # key -> (value, where it was given)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a config file and applies the command line.

    Args:
        path: the config file.
        overrides: arguments as typed, each `--key=value`.

    Raises:
        ConfigError: a file that is missing or does not run, an unknown key, a value of the wrong type or out of
            range, values that exclude each other.
    """
    values = _read_file(Path(path), seen=())
    for argument in overrides:
        key, value = _parse_override(argument)
        values[key] = (value, argument)
    try:
        return TrainConfig(**{key: value for key, (value, _) in values.items()})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        value, place = values[key]
        where = place if place.startswith("--") else f"{place}: {key} = {_short(value)}"
        raise ConfigError(f"{where}: {_complaint(key, error)}") from None


def describe() -> str:
    """All keys with their defaults and meanings, for `train.py --help`."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    return "\n".join(f"  --{key}={defaults[key]}\n      {meaning}" for key, meaning in _meanings().items())


def _read_file(path: Path, seen: tuple[Path, ...]) -> Values:
    """The values that a config file and its bases assign."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: base leads back to the file itself")
    bases, code = _parse(path)
    values: Values = {}
    for name in bases:
        values |= _read_file(path.parent / name, (*seen, path))
    # A file sees the values of its bases, so that it can say `min_lr = learning_rate / 10`.
    inherited = {key: value for key, (value, _) in values.items()}
    namespace = dict(inherited)
    try:
        exec(code, namespace)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if "base" in namespace and not bases:
        raise ConfigError(f"{path}: base: expected a plain assignment of config file names in quotes")
    for key, value in namespace.items():
        if key.startswith("__") or key == "base" or (key in inherited and value is inherited[key]):
            continue
        _check_known(key, f"{path}: {key}")
        values[key] = (value, str(path))
    return values


def _parse(path: Path) -> tuple[tuple[str, ...], CodeType]:
    """A config file's bases and its code. The bases are needed before the code can run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno or 1}: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a Python file: {error}") from None
    bases: tuple[str, ...] = ()
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "base":
            bases = _literal_names(statement.value)
            if not bases:
                raise ConfigError(f"{path}, line {statement.lineno}: base: expected config file names in quotes")
    return bases, compile(tree, str(path), "exec")


def _literal_names(expression: ast.expr) -> tuple[str, ...]:
    """The string, or the strings of the tuple, that an expression spells out; empty when it is anything else."""
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    names = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return tuple(names) if len(names) == len(parts) else ()


def _parse_override(argument: str) -> tuple[str, Any]:
    """`--key=value` to a key and a value of the key's type."""
    key, separator, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not separator:
        raise ConfigError(f"argument {argument!r}: expected --key=value, such as --max_iters=100")
    _check_known(key, argument)
    choices = typing.get_args(TYPES[key])
    if text.lower() == "none" and type(None) in choices:
        return key, None
    value: str | list[str] = text
    if any(typing.get_origin(choice) is tuple for choice in choices):
        inner = text.strip()
        inner = inner[1:-1] if inner.startswith("(") and inner.endswith(")") else inner
        value = [part.strip() for part in inner.split(",")]
    try:
        return key, TypeAdapter(TYPES[key]).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{argument}: {_complaint(key, error)}") from None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:79] + "…"


def _check_known(key: str, where: str) -> None:
    if key not in TYPES:
        near = difflib.get_close_matches(key, TYPES, n=1)
        hint = f"did you mean {near[0]}?" if near else "train.py --help lists the keys"
        raise ConfigError(f"{where}: unknown key; {hint}")


def _complaint(key: str, error: ValidationError) -> str:
    """What a value should have been, said once for each type of a union, with the key's meaning behind it."""
    messages = [re.sub("^(Input|String|Tuple) ", "", problem["msg"]) for problem in error.errors()]
    complaint = " or ".join(dict.fromkeys(messages)).replace("Field required", "should be two numbers, such as .9,.95")
    return f"{complaint} ({key}: {_meanings()[key]})"


def _meanings() -> dict[str, str]:
    """The docstring under each field."""
    fields: dict[str, Any] = vars(TrainConfig)["__pydantic_fields__"]
    return {key: " ".join((field.description or "").split()) for key, field in fields.items()}
