"""Checks that every regular expression of the product takes time in proportion to the text (`make check`).

Python's engine tries every way to match. Their number is bounded by the length of the text exactly if the pattern, as
an automaton, has no two states between which one word leads in two ways again and again (infinite ambiguity; Weber and
Seidl, "On the degree of ambiguity of finite automata", 1991). A search begins anywhere, which is one more state that
every character leads back to. Counted repetition is taken for three times at most: it bounds itself."""

import ast
import builtins
import importlib
import re
import re._parser as sre  # type: ignore[import-not-found]  # there is no public one
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[2]
PACKAGES = ("accounts", "audit", "controlplane", "engine_agent", "fleet", "kernel", "models_registry", "traffic")
FUNCTIONS = ("compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
ANCHORED = frozenset({"match", "fullmatch"})
DJANGO = ("RegexField", "RegexValidator")
MOST_COPIES = 3
"""Of what is counted: enough to see what is ambiguous within it and around it."""
ALPHABET = [chr(code) for code in range(128)] + ["é", "€"]
EVERYTHING = (1 << len(ALPHABET)) - 1
START = 0
Characters: TypeAlias = int
"""A set of characters, a bit for each of `ALPHABET`."""


@dataclass
class Automaton:
    """Position automaton (Glushkov). `doubled` are steps that two loops make. `possessive` are characters that are
    consumed together (`[a-z]++`): no other loop steps from one of them to the next."""

    characters: list[Characters] = field(default_factory=lambda: [EVERYTHING])
    follow: dict[int, set[int]] = field(default_factory=lambda: {START: set()})
    doubled: set[tuple[int, int]] = field(default_factory=set)
    possessive: set[int] = field(default_factory=set)

    def add(self, characters: Characters) -> int:
        self.characters.append(characters)
        self.follow[len(self.characters) - 1] = set()
        return len(self.characters) - 1

    def connect(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        for source, target in product(set(sources), set(targets)):
            if source == target and source in self.possessive:
                continue
            if target in self.follow[source]:
                self.doubled.add((source, target))
            self.follow[source].add(target)


@dataclass(frozen=True)
class Part:
    """Where a part of a pattern begins and ends, and whether it may be empty."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    nullable: bool = True


def why_not_linear(pattern: str | bytes, *, searched: bool = True) -> str | None:
    """Why some texts would take more than time in proportion to their length; None: none does."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    tree = sre.parse(text)
    automaton = Automaton()
    whole = _build(list(tree), automaton, tree.state.flags)
    loops_of_start = searched and not text.lstrip("(?aiLmsux)").startswith(("^", r"\A"))
    automaton.follow[START] |= whole.first | ({START} if loops_of_start else set())
    at_end = any(str(item[1]) in {"AT_END", "AT_END_STRING"} for item in list(tree)[-1:] if str(item[0]) == "AT")
    ends = frozenset() if at_end else whole.last
    reach = {state: _reachable(automaton, state) for state in automaton.follow}
    for source, target in automaton.doubled:
        if source in reach[target]:
            return "a repetition within a repetition matches the same text in many ways"
    cyclic = [state for state in automaton.follow if state in reach[state]]
    for one, other in product(cyclic, cyclic):
        if (
            one != other
            and other in reach[one]
            and other not in ends
            and _leads_both_ways(automaton, reach, one, other)
        ):
            where = "it may begin anywhere within what it repeats" if one == START else "two repetitions overlap"
            return f"{where}: {_characters_text(automaton.characters[other])}"
    return None


def _leads_both_ways(automaton: Automaton, reach: dict[int, set[int]], one: int, other: int) -> bool:
    """Whether one word leads from `one` back to itself, from `one` to `other`, and from `other` back to itself."""
    waiting, seen = [(one, one, other)], set[tuple[int, int, int]]()
    while waiting:
        a, b, c = waiting.pop()
        for step in product(automaton.follow[a], automaton.follow[b], automaton.follow[c]):
            shared = EVERYTHING
            for state in step:
                shared &= automaton.characters[state]
            if not shared or step in seen or one not in reach[step[0]] | {step[0]}:
                continue
            if step == (one, other, other):
                return True
            seen.add(step)
            waiting.append(step)
    return False


def _reachable(automaton: Automaton, state: int) -> set[int]:
    seen: set[int] = set()
    waiting = [state]
    while waiting:
        for following in automaton.follow[waiting.pop()] - seen:
            seen.add(following)
            waiting.append(following)
    return seen


def _build(items: list[Any], automaton: Automaton, flags: int) -> Part:
    whole = Part()
    for item in items:
        part = _operation_part(str(item[0]), item[1], automaton, flags)
        automaton.connect(whole.last, part.first)
        whole = Part(
            whole.first | (part.first if whole.nullable else frozenset()),
            part.last | (whole.last if part.nullable else frozenset()),
            whole.nullable and part.nullable,
        )
    return whole


def _operation_part(name: str, value: Any, automaton: Automaton, flags: int) -> Part:
    match name:
        case "AT" | "ASSERT" | "ASSERT_NOT":
            return Part()
        case "SUBPATTERN":
            return _build(list(value[3]), automaton, (flags | value[1]) & ~value[2])
        case "ATOMIC_GROUP":
            return _build(list(value), automaton, flags)
        case "BRANCH":
            parts = [_build(list(branch), automaton, flags) for branch in value[1]]
            first, last = (frozenset().union(*(getattr(part, end) for part in parts)) for end in ("first", "last"))
            return Part(first, last, any(part.nullable for part in parts))
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            part = _repeated(value, automaton, flags)
            if name == "POSSESSIVE_REPEAT" and part.first == part.last and len(part.first) == 1:
                automaton.possessive |= part.first
            return part
        case _:
            place = automaton.add(_characters(name, value, flags))
            return Part(frozenset({place}), frozenset({place}), nullable=False)


def _repeated(value: Any, automaton: Automaton, flags: int) -> Part:
    least, most, inner = value
    if most is sre.MAXREPEAT:
        before = _build(list(inner) * min(least - 1, MOST_COPIES), automaton, flags) if least > 1 else Part()
        part = _build(list(inner), automaton, flags)
        automaton.connect(part.last, part.first)
        part = Part(part.first, part.last, part.nullable or least == 0)
        automaton.connect(before.last, part.first)
        first = before.first | (part.first if before.nullable else frozenset())
        return Part(
            first, part.last | (before.last if part.nullable else frozenset()), part.nullable and before.nullable
        )
    copies = [_build(list(inner), automaton, flags) for _ in range(min(most, MOST_COPIES))]
    whole = Part()
    for number, part in enumerate(copies):
        nullable = part.nullable or number >= least
        automaton.connect(whole.last, part.first)
        whole = Part(
            whole.first | (part.first if whole.nullable else frozenset()),
            part.last | (whole.last if nullable else frozenset()),
            whole.nullable and nullable,
        )
    return whole


def _characters(name: str, value: Any, flags: int) -> Characters:
    """By asking Python itself: each character of the alphabet is matched against this one item."""
    single = sre.SubPattern(sre.State(), [(getattr(sre, name), value)])
    single.state.flags = flags & ~re.VERBOSE
    compiled = _compiled(single)
    return sum(1 << place for place, character in enumerate(ALPHABET) if compiled.match(character))


def _compiled(tree: Any) -> "re.Pattern[str]":
    compiler: Any = importlib.import_module("re._compiler")
    compiled: re.Pattern[str] = compiler.compile(tree)
    return compiled


def _characters_text(characters: Characters) -> str:
    shown = "".join(character for place, character in enumerate(ALPHABET) if characters >> place & 1)
    return repr(shown if len(shown) <= 20 else f"{shown[40:52]}…")


@dataclass(frozen=True)
class Use:
    """One pattern in the code. `searched`: some use looks for it within a text."""

    place: str
    pattern: str | bytes
    searched: bool


def uses() -> Iterator[Use]:
    """Every pattern of the product that is named in its code."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "import re\n" in (text := path.read_text()) or any(name in text for name in DJANGO):
                yield from _uses_in(ast.parse(text), path)


def _uses_in(tree: ast.Module, path: Path) -> Iterator[Use]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        function = called.removeprefix("re.")
        if not call.args or not (called in {f"re.{name}" for name in FUNCTIONS} or called.split(".")[-1] in DJANGO):
            continue
        place = f"{path.relative_to(ROOT)}:{call.lineno}"
        pattern = _value(call.args[0], path)
        searched = function not in ANCHORED
        if function == "compile" and (names := [node for node in ast.walk(tree) if _assigns(node, call)]):
            name = ast.unparse(names[0].targets[0])  # type: ignore[attr-defined]
            attributes = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name
            }
            searched = not attributes or bool(attributes - ANCHORED)
        yield Use(place, pattern, searched)


def _assigns(node: ast.AST, call: ast.Call) -> bool:
    return isinstance(node, ast.Assign) and node.value is call


def _value(node: ast.expr, path: Path) -> str | bytes:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    known = {name: getattr(module, name, f"<{name}>") for name in names if not hasattr(builtins, name)}
    value = eval(compile(ast.Expression(node), str(path), "eval"), {"re": re, **known})  # noqa: S307 - our own source
    pattern: str | bytes = value.pattern if isinstance(value, re.Pattern) else value
    return pattern


def main() -> int:
    """Print every pattern that is not linear."""
    import django

    django.setup()
    checked = list(uses())
    faults = [f"{use.place}: {why}" for use in checked if (why := why_not_linear(use.pattern, searched=use.searched))]
    sys.stdout.write("\n".join([*faults, f"{len(checked)} patterns, {len(faults)} of them not linear"]) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    import os

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    sys.exit(main())
