"""Loads of any shape, drawn by a seed: what the classes of loads.py leave out.

`python -m benchmarks.attention sweep --members 150 --seed 1 --peer FA3` measures them, and ends with the loads in the
order of the ratio, and with the ratios by group: what the sequences are, heads, head_dim, pages and the rest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from benchmarks import loads
from tests.common.cases import AttentionCase

K = 1024
LONGEST = 64 * K  # keys of a sequence
# A call takes so many microseconds at least, at most; and so many bytes of cache, over the GPU's memory.
MOST_MICROSECONDS, MOST_CACHE_BYTES = 700.0, 8e9
HEADS = ((32, 8), (64, 8), (28, 4), (40, 8), (16, 16), (8, 1), (16, 2), (48, 8), (32, 4), (32, 32), (128, 8), (14, 2))

Run = list[tuple[int, int]]  # sequences alike: (new tokens, context including them)


class Shapes(loads.Draw):
    """Numbers that are as often between 10 and 20 as between 1000 and 2000, and lengths of sequences."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "sweep")

    def scaled(self, least: int, most: int) -> int:
        return round(math.exp(self.random.uniform(math.log(least), math.log(most))))

    def many(self, count: int, least: int, most: int, kind: str) -> list[int]:
        """Equal, or evenly spread up to twice their mean, or most of them short and a few long."""
        mean = self.scaled(least, most)
        if kind == "equal":
            return [mean] * count
        if kind == "uniform":
            return [self.number(least, max(least, min(most, 2 * mean))) for _ in range(count)]
        unit = max(least, mean // 4)
        return [int(min(most, unit * rank)) for rank in self.random.zipf(1.5, count)]

    def contexts(self, rows: list[int]) -> Run:
        """So many new tokens behind keys of any number."""
        behind = self.many(len(rows), 128, LONGEST, self.of("equal", "uniform", "zipf"))
        return [(new, min(new + keys, LONGEST)) for new, keys in zip(rows, behind, strict=True)]


def _decode(draw: Shapes) -> list[Run]:
    return [draw.contexts([1] * draw.scaled(1, 256))]


def _several_tokens(draw: Shapes) -> list[Run]:
    return [draw.contexts([draw.number(2, 8)] * draw.scaled(1, 128))]


def _unequal_several_tokens(draw: Shapes) -> list[Run]:
    most = draw.number(2, 8)
    return [draw.contexts([draw.number(1, most) for _ in range(draw.scaled(2, 128))])]


def _short_chunks(draw: Shapes) -> list[Run]:
    return [draw.contexts(draw.many(draw.scaled(1, 64), 9, 64, draw.of("equal", "uniform")))]


def _chunks(draw: Shapes) -> list[Run]:
    return [draw.contexts(draw.many(draw.scaled(1, 16), 65, 2 * K, draw.of("equal", "uniform")))]


def _prompts(draw: Shapes) -> list[Run]:
    rows = draw.many(draw.scaled(1, 256), 8, 2 * K, draw.of("equal", "uniform", "zipf"))
    return [[(new, new) for new in rows]]


def _chunks_and_decode(draw: Shapes) -> list[Run]:
    chunks = draw.contexts(draw.many(draw.scaled(1, 4), 9, 2 * K, draw.of("equal", "uniform")))
    return [chunks, draw.contexts([1] * draw.scaled(1, 128))]


def _chunks_and_several_tokens(draw: Shapes) -> list[Run]:
    chunks = draw.contexts(draw.many(draw.scaled(1, 4), 9, 2 * K, draw.of("equal", "uniform")))
    return [chunks, draw.contexts([draw.number(2, 8)] * draw.scaled(1, 64))]


KINDS = {
    "decode": _decode,
    "several tokens": _several_tokens,
    "unequal several tokens": _unequal_several_tokens,
    "9 to 64 tokens": _short_chunks,
    "chunks": _chunks,
    "prompts": _prompts,
    "chunks beside decode": _chunks_and_decode,
    "chunks beside several tokens": _chunks_and_several_tokens,
}


def _name(run: list[tuple[int, int]]) -> str:
    def span(values: list[int]) -> str:
        return str(values[0]) if min(values) == max(values) else f"{min(values)}..{max(values)}"

    rows, keys = span([rows for rows, _ in run]), span([keys for _, keys in run])
    whole = all(rows == keys for rows, keys in run)
    return f"{len(run)}x{rows}" + ("" if whole else f" of {keys}")


def _member(draw: Shapes) -> AttentionCase:
    kind = draw.of(*KINDS)
    runs = KINDS[kind](draw)
    heads, kv_heads = draw.of(*HEADS)
    changes = {"page_size": draw.of(16, 16, 16, 16, 16, 32, 32, 64, 128, 256, 8, 1)}
    head_dim = draw.of(128, 128, 128, 128, 128, 128, 64, 64, 256)
    if draw.of(*range(8)) == 0:
        changes["sliding_window"] = draw.of(128, 512, 1 * K, 4 * K)
    if draw.of(*range(12)) == 0:
        changes["soft_cap"] = draw.of(30.0, 50.0)
    if draw.of(*range(16)) == 0:
        changes |= {"cache_dtype": "float8_e4m3fn", "scales": "one"}
    case = draw.case([each for run in runs for each in run], heads // kv_heads, kv_heads, head_dim, **changes)
    shown = [f"{heads}/{kv_heads}, {head_dim}", f"page {case.page_size}"]
    shown += [f"{name} {changes[name]}" for name in ("sliding_window", "soft_cap", "cache_dtype") if name in changes]
    return dataclasses.replace(case, name=f"{kind}: {' + '.join(map(_name, runs))}, {', '.join(shown)}")


def members(count: int, seed: int) -> list[AttentionCase]:
    """`count` loads that take no longer than MOST_MICROSECONDS at their limit; the first ones whatever `count` is."""
    draw, cases = Shapes(seed), []
    while len(cases) < count:
        case = _member(draw)
        pages = sum(-(-context // case.page_size) for _, context in case.sequences)
        cache_bytes = pages * case.page_size * case.num_kv_heads * case.head_dim * 4
        if loads.limit(case) <= MOST_MICROSECONDS and cache_bytes <= MOST_CACHE_BYTES:
            cases.append(case)
    return cases


# ---- What came out


def _range_of(value: int, ends: tuple[int, ...]) -> str:
    at = next((i for i, end in enumerate(ends) if value <= end), len(ends))
    least = ends[at - 1] + 1 if at else 1
    if at == len(ends):
        return f"{least} and more"
    return str(least) if least == ends[at] else f"{least} to {ends[at]}"


def groups_of(case: AttentionCase) -> dict[str, str]:
    """Property: its value, by which ratios are listed."""
    group = case.num_heads // case.num_kv_heads
    rows = sum(rows for rows, _ in case.sequences) / len(case.sequences) * group
    bytes_limit = loads.bytes_moved(case) / loads.BYTES_PER_SECOND
    bound = "memory" if bytes_limit * 1e6 >= loads.limit(case) else "tensor cores"
    return {
        "load": case.name.split(":")[0],
        "sequences": _range_of(len(case.sequences), (1, 4, 16, 32, 64)),
        "rows of a KV head, mean": _range_of(math.ceil(rows), (16, 64, 128, 512, 2048)),
        "query heads of a KV head": str(group),
        "KV heads": str(case.num_kv_heads),
        "head_dim": str(case.head_dim),
        "page": str(case.page_size),
        "limit": f"{bound}, {_range_of(math.ceil(loads.limit(case)), (10, 30, 100))} us",
        "window": "yes" if case.sliding_window else "no",
        "soft cap": "yes" if case.soft_cap else "no",
    }


def summary(rows: list[dict]) -> str:
    """Of rows with a ratio: by group how many there are, the least, median and largest ratio, and how many reach 1."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["ratio"]:
            for pair in (("all", ""), *row["groups"].items()):
                found.setdefault(pair, []).append(row["ratio"])
    lines = [f"{'group':44}{'members':>8}{'least':>7}{'median':>8}{'most':>7}{'from 1':>8}"]
    order = {name: place for place, (name, _) in reversed(list(enumerate(found)))}

    def key(pair: tuple[str, str]) -> tuple:
        digits = pair[1].split(" ")[0]
        return order[pair[0]], int(digits) if digits.isdigit() else 0, pair[1]

    for pair in sorted(found, key=key):
        ratios = found[pair]
        text = f"{min(ratios):7.2f}{statistics.median(ratios):8.2f}{max(ratios):7.2f}"
        lines.append(f"{' '.join(pair):44}{len(ratios):8}{text}{sum(ratio >= 1 for ratio in ratios):8}")
    return "\n".join(lines)
