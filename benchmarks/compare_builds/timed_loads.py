"""Loads of the other benchmarks: the driver names them, each build's process prepares them."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

from benchmarks import (
    decoder_layer,
    gpu_inputs,
    grouped_linear,
    implementations,
    linear,
    loads,
    sampling,
    sweep,
    timing,
)
from benchmarks import memory_bound as memory_operators

import xla_gpu.torch as xg

FEW_ROWS = (1, 8, 32, 64)
OURS = "xla_gpu"


@dataclasses.dataclass(frozen=True)
class Load:
    operator: str
    name: str
    what: Any  # of which the functions below make calls


@dataclasses.dataclass
class Prepared:
    calls: dict[str, list[Callable[[], object]]]  # of the same work on other arrays, by implementation
    bytes: float  # of one call
    minimum_calls: int = 20


def _sets(make: Callable[[int], tuple[Callable[[], object], float]]) -> Prepared:
    """Calls of arrays that are made by a seed, as many as it takes to read memory each time."""
    first, amount = make(0)
    return Prepared({OURS: [first, *(make(seed)[0] for seed in range(1, timing.sets_needed(amount)))]}, amount)


# ---- paged_attention, beside FlashAttention-3 where FA3_LIBRARY names it


def _attention_loads(members: int, seed: int) -> dict[str, Any]:
    found = {f"decode: {case.name}": case for case in (*loads.DECODE, *loads.DECODE_VARIANTS)}
    for name in loads.CLASSES:
        found |= {case.name: case for case in loads.members(name, members, seed)}
    found |= {f"prefill: {case.name}": case for case in loads.PREFILL}
    return found | {f"sweep: {case.name}": case for case in sweep.members(4 * members, seed)}


def _attention(case: Any, device: str) -> Prepared:
    gpu_inputs.DEVICE = device
    amount = loads.bytes_moved(case)
    sets = [gpu_inputs.build(case, seed) for seed in range(timing.sets_needed(amount))]
    found = Prepared({}, amount, loads.calls_to_time(case))
    peers = [implementations.FlashAttention3()] if os.environ.get("FA3_LIBRARY") and device == "cuda" else []
    for each in (implementations.XlaGpu(), *peers):
        try:
            found.calls[each.name] = [each.prepare(inputs) for inputs in sets]
        except implementations.Unsuited:
            continue
    return found


# ---- Products


def _linear_loads(members: int, seed: int) -> dict[str, Any]:
    return {
        f"{weight_format} {shape} {rows} rows": (weight_format, rows, *linear.SHAPES[shape])
        for weight_format in linear.FORMATS
        for shape in linear.SHAPES
        for rows in FEW_ROWS
    }


def _linear(what: Any, device: str) -> Prepared:
    arrays = linear.TorchArrays()

    def make(seed: int) -> tuple[Callable[[], object], float]:
        x, weight, amount = linear.make(arrays, *what, 2 * seed)
        return lambda: xg.linear(**x, **weight), amount

    return _sets(make)


def _grouped_loads(members: int, seed: int) -> dict[str, Any]:
    return {
        f"{model} {weight_format} {name} {rows} rows": (weight_format, experts, top_k, n, k, rows)
        for model, (experts, top_k, products) in grouped_linear.MODELS.items()
        for weight_format in grouped_linear.FORMATS
        for name, (n, k) in products.items()
        for rows in grouped_linear.ROWS
        if weight_format != "int4" or k % 128 == 0
    }


def _grouped(what: Any, device: str) -> Prepared:
    weight_format, experts, top_k, n, k, rows = what
    weight, bytes_of_one = grouped_linear.make_weight(weight_format, experts, n, k)
    x = linear.TorchArrays().normal((rows * top_k, k), 1.0, 0)
    batches = grouped_linear.choices(rows, experts, top_k)
    used = sum(int((sizes > 0).sum()) for sizes in batches) / len(batches)
    calls = [lambda sizes=sizes: xg.grouped_linear(x, group_sizes=sizes, **weight) for sizes in batches]
    return Prepared({OURS: calls}, used * bytes_of_one + 2 * rows * top_k * (n + k))


# ---- Parts of layers


def _layer_loads(operator: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda members, seed: {
        f"{weight_format} {rows} rows": (operator, weight_format, rows)
        for weight_format in decoder_layer.FORMATS
        for rows in FEW_ROWS
    }


def _layer(what: Any, device: str) -> Prepared:
    operator, *sizes = what

    def make(seed: int) -> tuple[Callable[[], object], float]:
        composite, _, amount = decoder_layer.OPERATORS[operator](*sizes, seed)
        return composite, amount

    return _sets(make)


def _memory_loads(operator: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda members, seed: {
        name.removeprefix(operator).strip(): name for name in memory_operators.LOADS if name.startswith(operator)
    }


def _memory(name: str, device: str) -> Prepared:
    def make(seed: int) -> tuple[Callable[[], object], float]:
        ours, _, amount = memory_operators.LOADS[name](device)
        return ours, amount

    return _sets(make)


def _sampling_loads(members: int, seed: int) -> dict[str, Any]:
    return {f"{rule} {rows} rows": (rule, rows) for rule in sampling.RULES for rows in (1, 64)}


def _sampling(what: Any, device: str) -> Prepared:
    rule, rows = what
    columns = sampling.columns(rows, sampling.RULES[rule])

    def make(seed: int) -> tuple[Callable[[], object], float]:
        logits = linear.TorchArrays().normal((rows, sampling.VOCAB), 3.0, seed)
        return lambda: xg.sample(logits, **columns), logits.nbytes

    return _sets(make)


# ---- All of them


@dataclasses.dataclass(frozen=True)
class Source:
    loads: Callable[[int, int], dict[str, Any]]
    prepare: Callable[[Any, str], Prepared]
    on_cpu: bool = False


SOURCES = {
    "paged_attention": Source(_attention_loads, _attention, on_cpu=True),
    "linear": Source(_linear_loads, _linear),
    "grouped_linear": Source(_grouped_loads, _grouped),
    **{name: Source(_layer_loads(name), _layer) for name in decoder_layer.OPERATORS},
    **{
        name: Source(_memory_loads(name), _memory, on_cpu=True)
        for name in (
            *("rms_norm", "silu_and_mul", "rotary_and_cache"),
            *("reshape_and_cache", "concat_and_cache_mla", "merge_attention_states", "simple_add"),
        )
    },
    "sample": Source(_sampling_loads, _sampling),
}


def of(operators: list[str], members: int, seed: int, device: str) -> list[Load]:
    """Of each operator that has any on the device, in turns: time that is over takes the last ones of all."""
    of_each = [
        [Load(operator, name, what) for name, what in SOURCES[operator].loads(members, seed).items()]
        for operator in operators
        if operator in SOURCES and (device == "cuda" or SOURCES[operator].on_cpu)
    ]
    return [load for turn in itertools.zip_longest(*of_each) for load in turn if load]


def prepare(load: Load, device: str) -> Prepared:
    return SOURCES[load.operator].prepare(load.what, device)
