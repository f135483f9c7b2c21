"""What must hold for an input, whatever it is. Each function runs it through the front ends given and raises
AssertionError where it does not hold. Front ends of one platform must also agree bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tests.common import baseline, cases, compare, parts, reference
from tests.common.frontends import Frontend
from tests.fuzz import composites, hostile, latents, layer
from tests.fuzz.inputs import Add, Attention, Hostile, Merge, Update
from tests.fuzz.programs import program
from xla_gpu.ops.linear import MAX_KERNEL_ROWS

# Calls that were compared, by front end: what a run reports.
calls: Counter[str] = Counter()
# Inputs that were checked, by operator.
inputs: Counter[str] = Counter()


def ulp(dtype: np.dtype, size: float) -> float:
    """The distance between numbers of the type near `size`."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) * size


def largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def rounding(got: np.ndarray, want: np.ndarray, logits: np.ndarray | None = None) -> float:
    """What every computation may be off by: one rounding of the result, and one of the largest logit to float32, by
    which all weights of its row are off; under a soft cap, of the largest before it. It is added to the rule of
    compare.py, whose baseline is the error of plain PyTorch: among few numbers that may happen to be nearly 0."""
    weights = 0.0 if logits is None else logit_rounding(logits)
    return ulp(got.dtype, largest(want)) + weights * largest(want)


def logit_rounding(logits: np.ndarray) -> float:
    return ulp(np.dtype(np.float32), largest(logits))


def attention(x: Attention, frontends: Sequence[Frontend]) -> None:
    operator = "paged_attention_with_lse" if x.with_lse else "paged_attention"
    made = x.built()
    steps = {frontend.name: program(frontend, operator, x.program.options()) for frontend in frontends}
    for case, operands in made:
        inputs[operator] += 1
        arrays = operands.arrays()
        want = reference.paged_attention(**arrays, **case.options())
        base = baseline.paged_attention(operands, **case.options())
        owned = sum(q for q, _ in case.sequences)
        logits = want[1]
        capped = 0.0
        if case.soft_cap:  # a cap takes logits of hundreds to a small lse, not their rounding
            logits = reference.paged_attention(**arrays, **{**case.options(), "soft_cap": None})[1]
            capped = logit_rounding(logits)

        def check(frontend, got, want=want, base=base, owned=owned, logits=logits, capped=capped):
            for name, g, w, y in zip(("out", "lse"), got, want, base, strict=False):
                floor = 1e-5 + (rounding(g, w, logits=logits) if name == "out" else rounding(g, w) + capped)
                compare.assert_close(g, w, y, f"{frontend.name}: {name}", floor=floor)
            compare.assert_bitwise_equal(
                got[0][owned:], np.zeros_like(got[0][owned:]), f"{frontend.name}: padding rows"
            )

        _through(frontends, steps, arrays, check)


def _through(frontends, steps, arrays, check, same_bits: bool = True) -> None:
    first: dict[str, tuple[Frontend, tuple]] = {}
    for frontend in frontends:
        got = steps[frontend.name](arrays)
        calls[frontend.name] += 1
        check(frontend, got)
        if not same_bits:
            continue
        other, theirs = first.setdefault(frontend.platform, (frontend, got))
        for i, (mine, their) in enumerate(zip(got, theirs, strict=True)):
            # torch_xla copies a float16 NaN to the host as another one.
            compare.assert_equal_numbers(mine, their, f"result {i}: {frontend.name} and {other.name}")


def update(x: Update, frontends: Sequence[Frontend]) -> None:
    inputs["reshape_and_cache"] += 1
    arrays = x.arrays()
    want = reference.reshape_and_cache(**arrays)
    untouched = compare.bits(want) == compare.bits(arrays["kv_cache"])

    def check(frontend, got):
        (cache,) = got
        if x.case.cache_dtype is None:
            compare.assert_bitwise_equal(cache, want, frontend.name)
            return
        # The bit pattern of a NaN rounded to float8 is not promised; those in the cache stay.
        compare.assert_same_special(cache.astype(np.float32), want.astype(np.float32), frontend.name)
        keep = untouched | ~np.isnan(want.astype(np.float32))
        written = np.where(keep, compare.bits(cache), 0)
        compare.assert_bitwise_equal(written, np.where(keep, compare.bits(want), 0), frontend.name)

    _through(
        frontends, {frontend.name: program(frontend, "reshape_and_cache") for frontend in frontends}, arrays, check
    )


def merge(x: Merge, frontends: Sequence[Frontend]) -> None:
    inputs["merge_attention_states"] += 1
    arrays = x.arrays()
    want = reference.merge_attention_states(**arrays)
    # The baseline's product of weight 0 and a NaN that has no part would be NaN.
    base = baseline.merge_attention_states(**{k: compare.without_nan(v) for k, v in arrays.items()})
    base = (base[0], np.where(np.isnan(base[1]), -np.inf, base[1]))

    def check(frontend, got):
        for name, g, w, y in zip(("out", "lse"), got, want, base, strict=True):
            compare.assert_close(g, w, y, f"{frontend.name}: {name}", floor=1e-5 + rounding(g, w))

    _through(
        frontends, {frontend.name: program(frontend, "merge_attention_states") for frontend in frontends}, arrays, check
    )


def add(x: Add, frontends: Sequence[Frontend]) -> None:
    inputs["simple_add"] += 1
    arrays = x.arrays()
    dtype = cases.DTYPES[x.dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        want = (arrays["a"].astype(np.float64) + arrays["b"].astype(np.float64)).astype(np.float32).astype(dtype)

    def check(frontend, got):
        (out,) = got
        compare.assert_equal_numbers(out, want, frontend.name)

    # Bit patterns of NaN are not promised here, so front ends are not compared with each other.
    for frontend in frontends:
        got = program(frontend, "simple_add")(arrays)
        calls[frontend.name] += 1
        check(frontend, got)


def of_layer(x, frontends: Sequence[Frontend]) -> None:
    """rms_norm, silu_and_mul, rotary_embedding, sample, the blocks: each input says what must hold."""
    inputs[x.operator] += 1
    arrays = x.arrays()
    steps = {frontend.name: program(frontend, x.operator, x.options()) for frontend in frontends}
    of_products = isinstance(x, layer.Linear | layer.GatedMlp | layer.AttentionBlock)
    # More rows are multiplied by each framework's own product. In float32 they are not.
    own_products = of_products and arrays["x"].shape[0] > MAX_KERNEL_ROWS and arrays["x"].dtype != np.float32

    def check(frontend, got):
        x.check(frontend.name, arrays, got)

    _through(frontends, steps, arrays, check, same_bits=not own_products)


def of_batches(x: composites.Bidirectional | latents.Latents, frontends: Sequence[Frontend]) -> None:
    """bidirectional_attention and mla_attention, of several batches in one program."""
    steps = {frontend.name: program(frontend, x.operator, x.options()) for frontend in frontends}
    for arrays in x.built():
        inputs[x.operator] += 1
        _through(frontends, steps, arrays, lambda frontend, got, a=arrays: x.check(frontend.name, a, got))


def of_parts(x: layer.AllReduce, frontends: Sequence[Frontend]) -> None:
    """all_reduce and all_reduce_add_rms_norm of gathered parts. torchax has JAX's functions, over meshes."""
    inputs[x.operator] += 1
    arrays = x.arrays()
    frontends = [frontend for frontend in frontends if frontend.framework != "torchax"]
    steps = {f.name: functools.partial(_of_parts, f, x.operator, x.options()) for f in frontends}
    _through(frontends, steps, arrays, lambda frontend, got: x.check(frontend.name, arrays, got))


def _of_parts(frontend: Frontend, operator: str, options: dict, arrays: dict) -> tuple[np.ndarray, ...]:
    return parts.call(frontend, operator, arrays, **options)


def wrong_metadata(x: Hostile, frontends: Sequence[Frontend]) -> None:
    inputs["wrong metadata"] += 1
    for frontend in frontends:
        hostile.check(x, frontend)
        calls[frontend.name] += 1


def wrong_values(x: composites.Wrong | latents.HostileLatents, frontends: Sequence[Frontend]) -> None:
    inputs[f"wrong values of {x.operator}"] += 1
    for frontend in frontends:
        composites.check_wrong(x, frontend)
        calls[frontend.name] += 1


CHECKS = {
    Attention: attention,
    Update: update,
    Merge: merge,
    Add: add,
    Hostile: wrong_metadata,
    composites.Bidirectional: of_batches,
    latents.Latents: of_batches,
    latents.HostileLatents: wrong_values,
    latents.LatentUpdate: of_layer,  # concat_and_cache_mla
    composites.HostileBidirectional: wrong_values,
    composites.ExpertsMlp: of_layer,
    composites.HostileExperts: wrong_values,
    layer.AllReduce: of_parts,
    layer.Linear: of_layer,
    layer.GroupedLinear: of_layer,
    layer.GatedMlp: of_layer,
    layer.AttentionBlock: of_layer,
    layer.RmsNorm: of_layer,
    layer.Gated: of_layer,
    layer.Sample: of_layer,
    layer.RotaryEmbedding: of_layer,
    layer.RotaryAndCache: of_layer,
}


def check(x, frontends: Sequence[Frontend]) -> None:
    CHECKS[type(x)](x, frontends)
