"""Reads of a kernel before it waits for preceding kernels (`hopper.wait`), in Triton's IR."""

import re
from typing import NamedTuple

WAITS = "griddepcontrol.wait", "tt.grid_dependency_wait"  # of Triton 3.6, and from 3.9 on
READ = re.compile(r"= tt\.(?:load|descriptor_load|\w*gather|atomic_\w+) (%[\w#]+)")
WRITE = re.compile(r"tt\.(?:store|descriptor_store|descriptor_reduce|atomic_\w+) ")
NAME = re.compile(r"%\w+")
POINTER = re.compile(r"(%\w+): !tt\.(?:ptr|tensordesc)<")


class Early(NamedTuple):
    """Work of a kernel before it waits.

    Attributes:
        reads: names of the parameters that point to the data it reads.
        writes: whether it writes anything.
        may_end: whether a program can get past the wait, or to its end, without waiting.
    """

    reads: set[str]
    writes: bool
    may_end: bool


def before_wait(ir: str) -> Early | None:
    """Work of a kernel before it waits; None if it does not wait."""
    head, _, body = ir[ir.index("tt.func public") :].partition("\n")
    pointers = set(POINTER.findall(head))
    lines = body.splitlines()
    end = next((i for i, line in enumerate(lines) if any(word in line for word in WAITS)), None)
    if end is None:
        return None
    sources: dict[str, set[str]] = {}
    around: list[set[str]] = []  # what the operations have come from whose blocks lines are in
    reads: set[str] = set()
    writes = may_end = False
    for line in lines[:end]:
        text = line.split(" loc(")[0]
        results, given = "", text
        if text.lstrip().startswith("%"):
            results, _, given = text.partition(" = ")
        names = set(NAME.findall(given))
        for result in NAME.findall(results):
            sources[result] = names
        for argument, initial in re.findall(r"(%\w+) = (%\w+)", given):  # of loops
            sources[argument] = {initial}
        if text.lstrip().startswith("scf.yield") and around:
            around[-1] |= names
        if text.strip().startswith("}") and around:
            around.pop()
        if text.rstrip().endswith("{"):
            around.append(names)
        reads.update(NAME.findall(" ".join(READ.findall(text))))
        writes |= WRITE.search(text) is not None
        may_end |= "tt.return" in text or " cf." in text
    origins = [_all_sources(name, sources) & pointers for name in reads]
    assert all(origins), "where a pointer comes from is not known"
    read = {name.removeprefix("%") for origin in origins for name in origin}
    return Early(read, writes, may_end or bool(around))


def _all_sources(name: str, sources: dict[str, set[str]]) -> set[str]:
    """Whatever `name` has come from, itself included."""
    found: set[str] = set()
    todo = [name]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += sources.get(name, ())
    return found
