"""What a study file declares, and its checks.

A study is a Python file of plain assignments, as a config is. Names in capitals are its own; a name of `Study` is what
its docstring says; any other is a key of `TrainConfig` and holds for all runs.
"""

from __future__ import annotations

import fnmatch
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from configs import ConfigError
from configs.schema import CHECKS, Count, CountOrZero, Positive, Text

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+]*(-[A-Za-z0-9_.+]+)*$"  # part of a folder's name
Name = Annotated[str, Field(pattern=NAME, max_length=60)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rates = Annotated[tuple[Positive, ...], Field(min_length=1)]
Settings = dict[str, Any]
GIVEN = ("seed", "learning_rate", "out_dir", "resume", "device")  # keys that the study itself sets


def rounded(rate: float) -> float:
    """A learning rate with the four digits that the name of its run has."""
    return float(f"{rate:.3e}")


@dataclass(frozen=True, kw_only=True, config=CHECKS)
class Arm:
    """One of the settings that are compared. In the file a dict; what is no key of this class is one of TrainConfig."""

    config: Text
    """the config file that it builds on, relative to the study file"""
    learning_rates: Rates | None = None
    """the grid to tune over; a single one is not tuned"""
    around: Name | None = None
    """instead of learning_rates: the arm whose best learning rate the factors are of"""
    factors: Rates = (1.0,)
    """with around: learning rates as multiples of that best one"""
    against: Name | None = None
    """the arm that it is set against; none: the baseline"""
    scaled: dict[str, Positive] = Field(default_factory=dict)
    """keys that are so many times the learning rate; they come on top of the study's"""
    settings: Settings = Field(default_factory=dict)
    """keys of TrainConfig"""

    @field_validator("learning_rates")
    @classmethod
    def _distinct(cls, rates: Rates | None) -> Rates | None:
        for rate in rates or ():
            if rate != rounded(rate):
                raise ValueError(f"{rate!r} has more than four digits")
        if rates and len(set(rates)) < len(rates):
            raise ValueError("a learning rate is there twice")
        return rates and tuple(sorted(rates))

    def __post_init__(self) -> None:
        if (self.learning_rates is None) == (self.around is None):
            raise ConfigError("expected either learning_rates or around")


@dataclass(frozen=True, kw_only=True, config=CHECKS)
class Size:
    """A further size of the model. In the file a dict; what is no key of this class is one of TrainConfig."""

    arms: tuple[Text, ...] = ("*",)
    """which arms are run at this size: names, or patterns as in a shell"""
    factors: Rates | None = None
    """learning rates as multiples of the arm's best at the first size; none: the arm's own grid"""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    """none: those of the study"""
    settings: Settings = Field(default_factory=dict)
    """keys of TrainConfig"""


@dataclass(frozen=True, kw_only=True, config=CHECKS)
class Study:
    """A whole study. The docstrings are what a study file can say."""

    name: Name
    """the study file's name without .py; its runs go to runs/studies/NAME"""
    path: Path
    """of the study file"""
    title: Text | None = None
    """of the plots; none: its name"""
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    """by name"""
    baseline: Name
    """the arm that others are set against"""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """each arm's best learning rate is run with all of them; the same for all arms, so that differences are paired"""
    tuning_seed: Seed | None = None
    """the seed with which learning rates are tried; none: the first of seeds"""
    sizes: dict[Name, Size] = Field(default_factory=dict)
    """sizes beside the first one, by name"""
    scaled: dict[str, Positive] = Field(default_factory=dict)
    """keys that are so many times the learning rate, as in {"min_lr": 0.1}"""
    extend: CountOrZero = 3
    """where the best learning rate is at an edge of the grid, this many more are tried there, one after the other, at
    the distance of the outermost two"""
    sensitivity_seeds: CountOrZero = 1
    """half and double of the best learning rate are run with so many of the seeds; 0: not for this"""
    threads: Count = 1
    """of each run on a CPU; another number changes the last bits of losses"""
    settings: Settings = Field(default_factory=dict)
    """keys of TrainConfig for all runs"""

    def __post_init__(self) -> None:
        self._check_arm("baseline", self.baseline)
        for name, arm in self.arms.items():
            if arm.against is not None:
                self._check_arm(f"arms[{name!r}]: against", arm.against)
            if arm.around is not None:
                self._check_arm(f"arms[{name!r}]: around", arm.around)
                if self.arms[arm.around].around is not None:
                    raise ConfigError(f"arms[{name!r}]: around = {arm.around!r}: that arm has no learning_rates")
        for name, size in self.sizes.items():
            if name in self.arms:
                raise ConfigError(f"sizes[{name!r}]: an arm has this name too")
            for pattern in size.arms:
                if not fnmatch.filter(self.arms, pattern):
                    raise ConfigError(f"sizes[{name!r}]: arms = {pattern!r}: no arm is called so; {self._known}")
            present = self.arms_of(name) if size.factors is None else []
            for arm in present:
                if (other := self.arms[arm].around) is not None and other not in present:
                    raise ConfigError(f"sizes[{name!r}]: {arm} is around {other}, which is not run at this size")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds = {self.seeds}: one is there twice")

    @property
    def _known(self) -> str:
        return f"arms are {', '.join(self.arms)}"

    def _check_arm(self, where: str, name: str) -> None:
        if name not in self.arms:
            raise ConfigError(f"{where} = {name!r}: no arm is called so; {self._known}")

    def seeds_of(self, size: str | None) -> tuple[int, ...]:
        """The seeds at a size; None is the first size."""
        return (self.sizes[size].seeds if size is not None else None) or self.seeds

    def arms_of(self, size: str | None) -> list[str]:
        """The arms that are run at a size, in the file's order."""
        patterns = self.sizes[size].arms if size is not None else ("*",)
        return [arm for arm in self.arms if any(fnmatch.fnmatchcase(arm, pattern) for pattern in patterns)]

    def rival(self, arm: str) -> str:
        """The arm that this one is set against."""
        return self.arms[arm].against or self.baseline


def load_study(path: Path) -> Study:
    """Reads a study file.

    Raises:
        ConfigError: it is missing, does not run, or declares what cannot be.
    """
    namespace: dict[str, Any] = {}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this study file: {error.strerror}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    declared = {key: value for key, value in namespace.items() if not key.startswith("_") and not key.isupper()}
    for key, kind in (("arms", Arm), ("sizes", Size)):
        if isinstance(declared.get(key), dict):
            declared[key] = {
                name: _build(given, kind, f"{path}: {key}[{name!r}]") if isinstance(given, dict) else given
                for name, given in declared[key].items()
            }
    study: Study = _build(declared, Study, str(path), name=path.stem, path=path.resolve())
    return study


def _build(given: dict[Any, Any], kind: type, where: str, **own: Any) -> Any:
    """The declared object, or one line about what is wrong."""
    values = _split(given, kind, where) | own
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_complaint(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _split(given: dict[Any, Any], kind: type, where: str) -> dict[str, Any]:
    """What a dict of the file says, with the keys of TrainConfig apart. Whether these exist a cell tells."""
    own = {field.name for field in fields(kind)} - {"settings", "name", "path"}
    values = {key: value for key, value in given.items() if key in own}
    settings = {str(key): value for key, value in given.items() if key not in own}
    for key in settings:
        if key in GIVEN:
            raise ConfigError(f"{where}: {key} = {settings[key]!r}: the study sets this key itself")
    return values | {"settings": settings}


def _complaint(error: ValidationError) -> str:
    """The first problem: where, the value, what it should be."""
    problem = error.errors()[0]
    place = [part for part in problem["loc"] if not isinstance(part, str) or not part.startswith("function-")]
    where = str(place[0]) + "".join(f"[{part!r}]" for part in place[1:])
    shown = " ".join(repr(problem["input"]).split())
    value = "" if problem["type"] == "missing" else f" = {shown if len(shown) <= 80 else shown[:79] + '…'}"
    return f"{where}{value}: {problem['msg'].removeprefix('Input ').removeprefix('Value error, ')}"
