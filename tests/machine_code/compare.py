"""Pairs the kernels of two builds and says what differs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

from tests.machine_code.kernels import Kernel

FIGURES = ("instructions", "registers", "spills", "stack", "shared", "parameters")
_ALIKE = 0.7  # of two kernels' instructions: those of a renamed and changed kernel, and of no other


@dataclasses.dataclass
class Comparison:
    """The kernels of two builds, paired."""

    same: list[tuple[Kernel, Kernel]] = dataclasses.field(default_factory=list)
    changed: list[tuple[Kernel, Kernel]] = dataclasses.field(default_factory=list)
    gone: list[Kernel] = dataclasses.field(default_factory=list)
    new: list[Kernel] = dataclasses.field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.changed or self.gone or self.new)


def compare(before: Iterable[Kernel], after: Iterable[Kernel]) -> Comparison:
    """Pairs kernels by name, then by code (a rename), then by likeness of code (a rename and a change)."""
    result = Comparison()
    old, new = list(before), list(after)
    # A template's kernel is in the objects of all files that launch it: several have one name.
    for key in (_all, _name_and_code, _name_and_source, _name, _code):
        pairs = _pair(old, new, key)
        for pair in pairs:
            (result.same if pair[0].code == pair[1].code else result.changed).append(pair)
    result.changed += _pair_alike(old, new)
    result.gone, result.new = old, new
    return result


def _all(kernel: Kernel) -> Hashable:
    return kernel.architecture, kernel.name, kernel.code, kernel.source


def _name_and_code(kernel: Kernel) -> Hashable:
    return kernel.architecture, kernel.name, kernel.code


def _name_and_source(kernel: Kernel) -> Hashable:
    return kernel.architecture, kernel.name, kernel.source


def _name(kernel: Kernel) -> Hashable:
    return kernel.architecture, kernel.name


def _code(kernel: Kernel) -> Hashable:
    return kernel.architecture, kernel.code


def _pair(old: list[Kernel], new: list[Kernel], key: Callable[[Kernel], Hashable]) -> list[tuple[Kernel, Kernel]]:
    """Takes those with the same key out of both lists."""
    waiting: dict[Hashable, collections.deque[Kernel]] = {}
    for kernel in new:
        waiting.setdefault(key(kernel), collections.deque()).append(kernel)
    pairs = []
    for kernel in list(old):
        if partners := waiting.get(key(kernel)):
            partner = partners.popleft()
            _remove(old, kernel)
            _remove(new, partner)
            pairs.append((kernel, partner))
    return pairs


def _pair_alike(old: list[Kernel], new: list[Kernel]) -> list[tuple[Kernel, Kernel]]:
    """Takes pairs out of both lists, the most alike first."""
    scores = sorted(
        (
            (likeness(a, b), i, j)
            for i, a in enumerate(old)
            for j, b in enumerate(new)
            if a.architecture == b.architecture
        ),
        key=lambda entry: (-entry[0], *entry[1:]),
    )
    partners: dict[int, int] = {}
    for score, i, j in scores:
        if score >= _ALIKE and i not in partners and j not in partners.values():
            partners[i] = j
    pairs = [(old[i], new[j]) for i, j in sorted(partners.items())]
    for a, b in pairs:
        _remove(old, a)
        _remove(new, b)
    return pairs


def _remove(kernels: list[Kernel], kernel: Kernel) -> None:
    del kernels[next(i for i, other in enumerate(kernels) if other is kernel)]


def likeness(a: Kernel, b: Kernel) -> float:
    """Of the instructions of both, the part that are of opcodes that both have: 1 for equal code."""
    shared = (collections.Counter(a.opcodes) & collections.Counter(b.opcodes)).total()
    return 2 * shared / max(1, a.instructions + b.instructions)


# ---- Report ----------------------------------------------------------------------------------------------------------
def report(result: Comparison) -> str:
    """The report for people: each kernel that is not the same, and its figures before and after."""
    renamed = sum(a.name != b.name for a, b in result.same)
    lines = [f"{len(result.same)} kernels are the same ({renamed} of them renamed)"]
    lines += _section("changed", result.changed)
    lines += _section("gone", [(kernel, None) for kernel in result.gone])
    lines += _section("new", [(None, kernel) for kernel in result.new])
    return "\n".join(lines)


def _section(title: str, pairs: Sequence[tuple[Kernel | None, Kernel | None]]) -> list[str]:
    if not pairs:
        return []
    lines = ["", f"{len(pairs)} {'kernel' if len(pairs) == 1 else 'kernels'} {title}"]
    for before, after in pairs:
        one = after or before
        assert one is not None
        lines.append(f"  {one.name}  [{one.architecture}, {one.source}]")
        if before is not None and after is not None and before.name != after.name:
            lines.append(f"    was {before.name}")
        lines.append("    " + ", ".join(_figure(name, before, after) for name in FIGURES))
    return lines


def _figure(name: str, before: Kernel | None, after: Kernel | None) -> str:
    values = [str(getattr(kernel, name)) for kernel in (before, after) if kernel is not None]
    return f"{name} {' -> '.join(dict.fromkeys(values))}"
