"""`python -m tests.machine_code.arrivals FILE`: arrivals on mbarriers in front of which loads from shared memory may be
under way.

An arrival that gives a stage of shared memory back does not wait for loads in front of it: only an instruction that
uses their registers does. Where TMA then writes the stage, the loads may read what it wrote. Lists per kernel of a
library, object file or cubin each arrival (SYNCS.ARRIVE) that some path reaches with loads (LDS, LDSM) whose scoreboard
nothing has waited for. Not every line is an error: the stage may be another one than what was loaded, and a value that
a path does not use is not waited for on that path; nor does it count fence.proxy.async. Needs cuobjdump, nvdisasm and
c++filt; sm_90.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.machine_code.kernels import ToolError, demangle, tool

NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    address: int
    text: str
    scoreboard: int  # that its result sets; NO_SCOREBOARD: none
    waits: int  # a bit for each scoreboard that it waits for

    @property
    def operation(self) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", self.text)

    @property
    def predicated(self) -> bool:
        return self.text.startswith("@")


def kernels(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Per mangled name the instructions in ``cuobjdump -sass``'s text. An instruction's second word, in a line of its
    own, holds what it waits for."""
    for function in re.split(r"\n\s*Function : ", text)[1:]:
        lines = function.split("\n")
        found = []
        for line, following in itertools.pairwise(lines):
            match = re.search(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?)\s*;?\s*/\* 0x[0-9a-f]+ \*/", line)
            control = re.search(r"/\* (0x[0-9a-f]+) \*/", following)
            if match and control:
                bits = int(control[1], 16) >> 41
                found.append(Instruction(int(match[1], 16), match[2], bits >> 5 & 7, bits >> 11 & 63))
        yield lines[0].strip(), found


def successors(instruction: Instruction, joins: frozenset[tuple[str, int]]) -> tuple[list[int], bool]:
    """Addresses that a branch goes to, and whether the next instruction may follow. joins: (register, address) of the
    BSSY before, where BSYNC goes."""
    operation = instruction.operation
    if match := re.match(r"BRA(\S*) (!?U?P\w+, )?.*?0x([0-9a-f]+)", operation):
        divergence = match[1].startswith(".DIV")  # to a loop over lanes, which comes back
        return [] if divergence else [int(match[3], 16)], divergence or instruction.predicated or bool(match[2])
    if match := re.match(r"BSYNC\S* (B\d+)", operation):
        return [address for register, address in joins if register == match[1]], instruction.predicated
    return [], instruction.predicated or not operation.startswith(("EXIT", "RET"))


def early_arrivals(instructions: list[Instruction]) -> Mapping[Instruction, list[Instruction]]:
    """Arrivals, and the loads that may be under way."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    empty: frozenset = frozenset()
    # What may hold in front of an instruction: loads under way, and the joins that BSYNC may go to.
    before: list[tuple[frozenset[int], frozenset[tuple[str, int]]] | None] = [None] * len(instructions)
    found: dict[int, set[int]] = {}
    todo: list[int] = []

    def reach(i: int, loads: frozenset[int], joins: frozenset[tuple[str, int]]) -> None:
        had = before[i] or (empty, empty)
        now = (had[0] | loads, had[1] | joins)
        if before[i] is None or now != had:
            before[i] = now
            todo.append(i)

    if instructions:
        reach(0, empty, empty)
    while todo:
        i = todo.pop()
        at = instructions[i]
        loads, joins = before[i] or (empty, empty)
        loads = frozenset(load for load in loads if not at.waits >> instructions[load].scoreboard & 1)
        if "SYNCS.ARRIVE" in at.operation and loads:
            found.setdefault(i, set()).update(loads)
        if at.operation.startswith("LDS") and at.scoreboard != NO_SCOREBOARD:
            loads |= {i}
        if match := re.match(r"BSSY\S* (B\d+), 0x([0-9a-f]+)", at.operation):
            joins = frozenset(join for join in joins if join[0] != match[1]) | {(match[1], int(match[2], 16))}
        targets, falls_through = successors(at, joins)
        for target in targets:
            if target in index:
                reach(index[target], loads, joins)
        if falls_through and i + 1 < len(instructions):
            reach(i + 1, loads, joins)
    return {instructions[i]: [instructions[load] for load in sorted(loads)] for i, loads in sorted(found.items())}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machine_code.arrivals", description=__doc__)
    parser.add_argument("file", type=Path, help="a library, object file or cubin")
    file = parser.parse_args().file
    try:
        tool("nvdisasm")
        outcome = subprocess.run([tool("cuobjdump"), "-sass", file], capture_output=True, text=True, check=True)
        early = {name: found for name, code in kernels(outcome.stdout) if (found := early_arrivals(code))}
        names = demangle(early)
    except (ToolError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    for mangled, found in early.items():
        print(names[mangled])
        for arrival, loads in found.items():
            print(f"  {arrival.address:05x} {arrival.text}, behind")
            for load in loads:
                print(f"    {load.address:05x} {load.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
