"""sample: chooses a token from each row of logits, by temperature, min-p, top-k and top-p."""

from __future__ import annotations

import numpy as np

from .._core.checks import FLOATS, Checks
from .._core.operator import ArraySpec, Operator, Signature
from .._core.partitioning import Partitioning

_DOCSTRING = """
Each row has its own options, which are applied in this order, the order of vLLM's sampler: logits are divided by the
temperature; min_p keeps the tokens whose probability is at least min_p times the largest one; top_k keeps the k most
likely of these; top_p keeps the most likely ones of what is left then, as few as have together at least top_p of its
probability. Tokens of equal logits are kept or dropped together. One of the tokens that are left is drawn with its
probability.

Randomness comes from a counter-based generator: token i of a row gets word i % 4 of Philox4x32-10 (Salmon et al.,
2011) with the key seed and the counter (i // 4, step, 0, 0), and the largest logit / temperature + Gumbel number wins,
which is ``-log(-log(1 - (word + 0.5) / 2**32))``. So a row's token depends on its own logits and numbers alone: not on
the other rows, not on the GPU, and it is the same on the host and on CUDA. Give a sequence one seed, and each of its
tokens another step.

Args:
  logits: T[rows, vocab]. T is float32, float16 or bfloat16. Logits of -inf are never chosen. vocab is less than 2**24:
    sums of probabilities are integers of 64 bits.
  temperature: float32[rows], >= 0. 0: the largest logit, of equal ones the first; the other options have no effect.
  top_k: int32[rows]. 0 or less: off.
  top_p: float32[rows], from 0 to 1. 1: off. 0: only the most likely.
  min_p: float32[rows], from 0 to 1. 0: off.
  seed: int64[rows] or int32[rows].
  step: int32[rows].

Returns:
  ``(token, logprob)``: int32[rows], and float32[rows], the natural logarithm of the token's probability in the softmax
  of the logits as they are, before temperature and choice. A row with a NaN, or whose logits are all -inf, has token
  -1 and logprob NaN.

Raises:
  TypeError: an argument is no array, or has another dtype.
  ValueError: an argument has another shape.

Note: Options outside of their ranges
  On a CPU the call fails, with an error that names the row. On CUDA such a row has token -1 and logprob NaN; with
  ``XLA_GPU_CHECK_INPUTS=1`` in the environment when the call is traced, the call fails as on a CPU.
"""

_check = Checks("sample")


def _signature(
    logits: ArraySpec,
    *,
    temperature: ArraySpec,
    top_k: ArraySpec,
    top_p: ArraySpec,
    min_p: ArraySpec,
    seed: ArraySpec,
    step: ArraySpec,
    check_inputs: bool = False,
) -> Signature:
    _check.dtype("logits", logits, FLOATS)
    rows, vocab = _check.rank("logits", logits, "rows, vocab")
    if not 1 <= vocab < 2**24:
        raise _check.value_error("logits", "a vocabulary of 1 to 2**24 - 1 tokens, [rows, vocab]", logits)
    for name, array, dtypes in (
        ("temperature", temperature, ("float32",)),
        ("top_k", top_k, ("int32",)),
        ("top_p", top_p, ("float32",)),
        ("min_p", min_p, ("float32",)),
        ("seed", seed, ("int32", "int64")),
        ("step", step, ("int32",)),
    ):
        _check.dtype(name, array, dtypes)
        _check.shape(name, array, (rows,), "rows")
    partitioning = Partitioning(
        operands={
            "logits": ("rows", None),
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "step"), ("rows",)),
        },
        results=(("rows",), ("rows",)),
        sizes={"rows": rows},
    )
    results = (ArraySpec((rows,), "int32"), ArraySpec((rows,), "float32"))
    return Signature(results, {"check_inputs": np.bool_(check_inputs)}, partitioning=partitioning)


OPERATOR = Operator(
    "sample",
    "(Tensor logits, *, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor step) "
    "-> (Tensor, Tensor)",
    _signature,
    _DOCSTRING,
)
