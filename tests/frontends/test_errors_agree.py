"""A wrong argument is refused with the same words by every front end, whatever the framework's own rules accept."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest

from tests.common import bidirectional_cases, cases, experts_cases, frontends
from tests.ops import test_ragged_paged_attention as ragged
from tests.properties.bad import Bad, drop
from tests.properties.test_bad_inputs import ATTENTION, valid
from xla_gpu.ops import COMPOSITES, OPERATORS, ragged_paged_attention

MISSING = object()
VALUES = {
    "text": "text",
    "None": None,
    "a list": [1.0],
    "a bool": True,
    "a fraction": 1.5,
    "NaN": math.nan,
    "negative": -1,
    "past 64 bits": 2**70,
    "complex": 1j,
    "an object": object(),
    "missing": MISSING,
}
# NumPy's, where no array is wanted: PyTorch takes none for an array, JAX takes them.
NUMPY_VALUES = {
    "NumPy's float": np.float32(0.5),
    "NumPy's NaN": np.float64("nan"),
    "NumPy's int": np.int64(3),
    "NumPy's bool": np.bool_(True),
    "an array without axes": np.array(0.5, np.float32),
    "an array": np.zeros((3, 3), np.float32),
}
# Of all_reduce the group is another thing in each framework, and is tested in tests/distributed.
TESTED = [operator for operator in OPERATORS if not operator.name.startswith("all_reduce")]
TESTED += [ragged_paged_attention.OPERATOR, *COMPOSITES]


def sound(operator: str) -> tuple[dict, dict]:
    """Arrays and options."""
    if operator == "ragged_paged_attention":
        return ragged.renamed(cases.build(ATTENTION)), ragged.options(ATTENTION)
    if operator == "bidirectional_attention":
        case = bidirectional_cases.Case("errors", (3, 4))
        return bidirectional_cases.build(case), case.options()
    if operator == "experts_mlp":
        return experts_cases.inputs("int4-zero-point", 5, 4, 2, bias=True), {}
    return valid(Bad(operator, "", "", "", drop("")))


@functools.cache
def usable() -> list[frontends.Frontend]:
    found = [frontends.ALL[name] for name in ("eager", "torch_xla", "jax")]
    return [frontend for frontend in found if not frontend.unavailable()]


def outcome(frontend, operator: str, arrays: dict, options: dict, positional: tuple[str, ...] = ()) -> str:
    """The error of a call, or "" where it has none; positional: the names of the arguments that are given without."""

    def body(ops, **tensors):
        named = tensors | options
        without_names = [named.pop(name) for name in positional]
        return getattr(ops, operator)(*without_names, **named)

    try:
        frontend.run(body, arrays)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("a JAX or NumPy array", "a tensor")
    return ""


@pytest.mark.parametrize("operator", TESTED, ids=lambda operator: operator.name)
def test_the_same_words(operator):
    if len(usable()) < 2:
        pytest.skip("one front end alone in this process")
    arrays, options = sound(operator.name)
    refused = 0
    for argument in operator.arguments:
        others = {name: array for name, array in arrays.items() if name != argument}
        for what, value in (VALUES if argument in operator.operands else VALUES | NUMPY_VALUES).items():
            wrong = {name: option for name, option in {**options, argument: value}.items() if option is not MISSING}
            outcomes = {frontend.name: outcome(frontend, operator.name, others, wrong) for frontend in usable()}
            assert len(set(outcomes.values())) == 1, f"{argument} is {what}: {outcomes}"
            refused += any(outcomes.values())
    assert refused > 8 * len(operator.operands)


@pytest.mark.parametrize(
    "value", [True, np.float32(4.5), np.ones((), np.float32)], ids=lambda value: type(value).__name__
)
def test_the_same_words_without_names(value):
    """The one operator whose numbers may be given so."""
    operator = ragged_paged_attention.OPERATOR
    arrays, options = sound(operator.name)
    wrong = options | {"sliding_window": value}
    positional = operator.arguments[: operator.arguments.index("sliding_window") + 1]
    for frontend in usable():
        text = outcome(frontend, operator.name, arrays, wrong, positional)
        assert text.startswith("TypeError: ragged_paged_attention: sliding_window: expected an int known"), text


@pytest.mark.parametrize("operator", [op for op in TESTED if len(op.operands) > 1], ids=lambda operator: operator.name)
@pytest.mark.frontends("eager", "torch_xla")
def test_operands_of_two_devices_are_named(frontend, operator):
    """Also where an operand is updated in place, for which PyTorch's dispatcher has errors of its own."""
    eager, lazy = frontends.ALL["eager"], frontends.ALL["torch_xla"]
    if reason := eager.unavailable() or lazy.unavailable():
        pytest.skip(reason)
    other = lazy if frontend is eager else eager
    arrays, options = sound(operator.name)
    tensors, elsewhere = frontend.tensors(arrays), other.tensors(arrays)
    first = operator.operands[0]
    names = [operator.name, f"{operator.name}_"] if operator.in_place else [operator.name]
    for argument in arrays:
        wrong = operator.operands[1] if argument == first else argument  # the first one says which device is meant
        given = {**tensors, argument: elsewhere[argument]}
        expected = f"expected a tensor on {given[first].device} (as {first}), got one on {given[wrong].device}"
        for name in names:
            with pytest.raises(ValueError, match=f"^{re.escape(f'{operator.name}: {wrong}: {expected}')}$"):
                getattr(frontend.module(), name)(**given, **options)
