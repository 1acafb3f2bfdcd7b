"""`Modules`: the modules that a list in config.json means.

A module is known by its path in the model. Files spell the beginning of a path in four ways
(`PREFIXES`), and a list need not agree with the tensors beside it, so all four mean the same.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Prefixes of the text model: in checkpoints with other parts, without, and without a head.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
OTHER_PARTS = ("vision_tower", "multi_modal_projector", "visual")  # modules beside that model
SPECIAL = frozenset("*+?^$()[]{}|\\")  # characters that make a name a regular expression
BEGIN = r"\A"  # of regular expressions for the beginning of a path
NAMES_GROUPS = re.compile(r"\\[1-9]|\(\?P|\(\?\(")  # groups with names, and references to groups
MARK = "re:"  # of regular expressions in compressed-tensors


@dataclass(frozen=True)
class Modules:
    """A set of modules.

    Attributes:
        paths: paths of modules, without `PREFIXES`.
        parts: neighbouring components of paths, such as "layers.0", "mlp.gate" and "q_proj", for
            all modules that have them in their paths, in this order; "": all modules.
        patterns: regular expressions for all modules in whose path, in any spelling, one is found.
    """

    paths: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    @classmethod
    def named(cls, key: str, names: Any) -> "Modules":
        """The modules of a list like `modules_to_not_convert`. Its names are paths, parts of
        paths, or regular expressions that match a path from its beginning up to a dot or its end.

        Args:
            key: name of the list in config.json.
            names: its value.

        Raises:
            ValueError: if it is no such list.
        """
        _check_names(key, names)
        return cls(
            parts=frozenset(without_prefix(name) for name in names if not is_pattern(name)),
            patterns=tuple(_pattern(key, name) for name in names if is_pattern(name)),
        )

    @classmethod
    def exactly(cls, key: str, names: Any) -> "Modules":
        """The modules of a list of compressed-tensors: paths, regular expressions after "re:" that
        match the beginning of a path, or "Linear" for all.
        """
        _check_names(key, names)
        return cls(
            paths=frozenset(without_prefix(name) for name in names if not name.startswith(MARK)),
            parts=frozenset([""] if "Linear" in names else []),
            patterns=tuple(_pattern(key, name) for name in names if name.startswith(MARK)),
        )

    @classmethod
    def found_by(cls, key: str, pattern: str) -> "Modules":
        """The modules in whose path a regular expression is found."""
        return cls(patterns=(_checked(key, pattern, pattern),))

    def __contains__(self, path: object) -> bool:
        own = without_prefix(str(path))
        if own in self.paths or (self.parts and any(part in self.parts for part in _parts(own))):
            return True
        paths = [prefix + own for prefix in PREFIXES]
        return any(found(path) for found in self._searches for path in paths)

    @cached_property
    def _searches(self) -> list[Callable[[str], re.Match[str] | None]]:
        """The searches for `patterns`. Those for the beginning of a path are one where they can be:
        a mixture has 31,000 modules, and a list hundreds of patterns.
        """
        first = [p.removeprefix(BEGIN) for p in self.patterns if p.startswith(BEGIN)]
        anywhere = [p for p in self.patterns if not p.startswith(BEGIN)]
        alike = [p for p in first if _can_be_joined(p)]
        searches: list[Callable[[str], re.Match[str] | None]] = []
        searches += [re.compile(p).search for p in anywhere]
        searches += [re.compile(p).match for p in first if p not in alike]
        searches += [re.compile("|".join(alike)).match] if alike else []
        return searches


def _can_be_joined(pattern: str) -> bool:
    """Whether a regular expression means the same as one of several alternatives."""
    return not NAMES_GROUPS.search(pattern) and re.compile(pattern).flags == re.UNICODE


def is_pattern(name: str) -> bool:
    """Whether a name in a list is a regular expression."""
    return name.startswith(MARK) or not SPECIAL.isdisjoint(name)


def flat(names: Any) -> Iterator[Any]:
    """The elements of nested lists."""
    for name in names:
        if isinstance(name, list):
            yield from flat(name)
        else:
            yield name


def _check_names(key: str, names: Any) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: `{key}` must be a list of modules, got {names!r}")


def without_prefix(path: str) -> str:
    """A path in the spelling that all prefixes have in common."""
    path = path.strip(".") + "."
    return path[len(next(filter(path.startswith, PREFIXES))) :].rstrip(".")


def _parts(path: str) -> Iterator[str]:
    """All sequences of neighbouring components of a path."""
    names = path.split(".")
    yield ""
    for begin in range(len(names)):
        for end in range(begin, len(names)):
            yield ".".join(names[begin : end + 1])


def _pattern(key: str, name: str) -> str:
    """The regular expression to search for that a name in a list stands for."""
    if name.startswith(MARK):
        name = name.removeprefix(MARK)
        return _checked(key, name, rf"{BEGIN}(?:{name})")
    return _checked(key, name, rf"{BEGIN}(?:{name})(?:(?<=\.)|(?=\.|\Z))")


def _checked(key: str, name: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"config.json: `{key}` must have names or regular expressions, got {name!r}: {error}"
        ) from None
    return pattern
