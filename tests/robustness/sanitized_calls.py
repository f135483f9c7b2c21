"""The calls that sanitize.py makes under compute-sanitizer: every operator through xla_gpu_call, on memory of the CUDA
driver's, each buffer an allocation of exactly its size, results and scratch never written before the call."""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np

from tests.common import bidirectional_cases, cache_cases, cases, grouped_cases, layer_cases, mla_cases, reference
from tests.robustness.decode_cases import decode_grid
from tests.user_kernels import sources
from xla_gpu._core.operator import ArraySpec, check_inputs_requested
from xla_gpu._runtime import call_frame, scratch, targets
from xla_gpu._user_kernels import launch, nvrtc
from xla_gpu._user_kernels.cuda_kernel import cuda_kernel
from xla_gpu.errors import CompatibilityError
from xla_gpu.ops import (
    OPERATORS,
    concat_and_cache_mla,
    merge_attention_states,
    mla_attention,
    paged_attention,
    reshape_and_cache,
    simple_add,
)


# ---- Memory ----------------------------------------------------------------------------------------------------------
class Cuda:
    """The driver's memory, in the context that the library's CUDA runtime uses too."""

    platform, ordinal = "CUDA", 0

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), self.ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        if size:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        if address:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            array = np.ascontiguousarray(array)
            source = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))

    def read(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            target = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def wait(self) -> None:
        self._call("cuCtxSynchronize")


class Host:
    """The same on the host, to try this file without a GPU."""

    platform, ordinal = "cpu", -1

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        block = np.empty(size + 64, np.uint8)
        address = (block.ctypes.data + 63) // 64 * 64
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        self._blocks.pop(address, None)

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def wait(self) -> None:
        pass


# ---- One call --------------------------------------------------------------------------------------------------------
def call(memory, operator, arrays: dict[str, np.ndarray], plant: str | None = None, **options) -> list[np.ndarray]:
    """The operator's results. `plant` leaves out what a tool must notice: operands' values, or half of the result."""
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in arrays.items()}
    bound = operator.bind(**specs, **options, check_inputs=check_inputs_requested())
    return run(memory, bound, [arrays[name] for name in operator.operands if name in arrays], plant)


def run(memory, bound, given: list[np.ndarray], plant: str | None = None) -> list[np.ndarray]:
    """The results of a custom call of these operands."""
    operands = [memory.allocate(array.nbytes) for array in given]
    aliased = {result: operand for operand, result in bound.aliases}
    specs_out = scratch.all_results(bound)
    outs = [np.empty(spec.shape, cases.DTYPES.get(spec.dtype, spec.dtype)) for spec in specs_out]
    results = [
        operands[aliased[i]] if i in aliased else memory.allocate(out.nbytes // (2 if plant == "memcheck" else 1))
        for i, out in enumerate(outs)
    ]
    try:
        for address, array in zip(operands, given, strict=True):
            if plant != "initcheck":
                memory.write(address, array)
        frame = call_frame.Frame(bound, targets.lookup(bound.target, memory.platform), specs_out)
        frame.run(operands, results, None, memory.ordinal)
        memory.wait()
        for address, out in zip(results[: len(bound.results)], outs, strict=False):  # without the scratch memory
            memory.read(address, out)
    finally:
        for address in {*operands, *results}:
            memory.free(address)
    return outs[: len(bound.results)]


def compare(name: str, got: np.ndarray, want: np.ndarray) -> None:
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    same = (np.isfinite(got) == finite).all()
    scale = max(1.0, np.abs(want[finite]).max(initial=0.0))
    if not same or np.abs(got[finite] - want[finite]).max(initial=0.0) > 0.05 * scale:
        raise SystemExit(f"{name}: the result is wrong, whatever the tool says")


# ---- All calls -------------------------------------------------------------------------------------------------------
def attention(memory, case, with_lse: bool = True) -> None:
    arrays = cases.build(case).arrays()
    want = reference.paged_attention(**arrays, **case.options())
    operator = paged_attention.OPERATOR_WITH_LSE if with_lse else paged_attention.OPERATOR
    for name, got, wanted in zip(("out", "lse"), call(memory, operator, arrays, **case.options()), want, strict=False):
        compare(f"{case.name}: {name}", got, wanted)


def cache_update(memory, case) -> None:
    arrays = cache_cases.build_cache(case)
    (cache,) = call(memory, reshape_and_cache.OPERATOR, arrays)
    compare(case.name, cache, reference.reshape_and_cache(**arrays))


def addition(memory, dtype: str, size: int) -> None:
    a = np.arange(size).astype(cases.DTYPES[dtype])
    (out,) = call(memory, simple_add.OPERATOR, {"a": a, "b": a[::-1].copy()})
    compare(f"simple_add {dtype}[{size}]", out, a.astype(np.float64) + a[::-1].astype(np.float64))


def merging(memory, dtype: str, rows: int, heads: int, head_dim: int) -> None:
    rng = cases.rng_for(f"sanitize-{dtype}-{rows}-{heads}-{head_dim}")
    out = [rng.standard_normal((rows, heads, head_dim)).astype(cases.DTYPES[dtype]) for _ in range(2)]
    lse = [rng.standard_normal((rows, heads)).astype(np.float32) for _ in range(2)]
    lse[0][::3], lse[1][1::2] = -np.inf, -np.inf
    arrays = {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]}
    got = call(memory, merge_attention_states.OPERATOR, arrays)
    for g, want in zip(got, reference.merge_attention_states(**arrays), strict=True):
        compare(f"merge_attention_states {dtype}[{rows}, {heads}, {head_dim}]", g, want)


def of_layer(memory, name: str, arrays: dict, options: dict) -> None:
    """rms_norm, silu_and_mul, rotary_embedding, sample, linear, grouped_linear, gated_mlp, attention_block,
    bidirectional_attention, mla_attention, concat_and_cache_mla."""
    (operator,) = (op for op in OPERATORS if op.name == name)
    if name == "grouped_linear":
        want = (grouped_cases.expected(arrays),)
    elif name == "bidirectional_attention":
        want = (bidirectional_cases.expected(arrays, **options),)
    elif name.startswith("mla_attention"):
        want = mla_cases.expected(arrays, **options)[: 2 if name.endswith("_with_lse") else 1]
    elif name == "concat_and_cache_mla":
        want = (mla_cases.stored(**arrays),)
    else:
        want = getattr(reference, name)(**arrays, **options)
    for i, (g, w) in enumerate(zip(call(memory, operator, arrays, **options), want, strict=True)):
        if name != "attention_block" or w.dtype.itemsize > 1:  # what is rounded to float8 behind a product may differ
            compare(f"{name} {i}", g, w)


def users_kernel(memory, source: str, name: str, arguments, results, want, aliases=(), **geometry) -> None:
    """A launch of a kernel that NVRTC compiles; its loading, parameters and scratch memory are ours."""
    kernel = cuda_kernel(source, name)
    free = [i for i in range(len(results)) if i not in dict(aliases).values()]
    encoded = launch.encode(name, kernel.parameters, arguments, free, lambda x: isinstance(x, np.ndarray))
    specs = tuple(ArraySpec(array.shape, array.dtype.name) for array in encoded.arrays)
    shape = launch.geometry(name, **geometry)
    numbers = (tuple(encoded.encoded), launch.double_bytes(encoded.floats))
    bound = launch.bind(kernel.key, specs, tuple(shape.encoded()), *numbers, results, aliases, False)
    for i, (got, wanted) in enumerate(zip(run(memory, bound, encoded.arrays)[: len(results)], want, strict=True)):
        compare(f"{name} {i}", got, wanted)


def users_kernels(memory) -> None:
    """Values, in place, dynamic shared memory, a cluster, and a cooperative launch with scratch memory."""
    try:
        nvrtc.load()
    except CompatibilityError as error:
        print(f"users' kernels are left out: {error}")
        return
    x, floats = np.arange(1000, dtype=np.float32), ArraySpec((1000,), "float32")
    usual = dict(grid=8, block=128)
    users_kernel(memory, sources.SCALE, "scale", (x, 2.0, 1000), (floats,), [2 * x], **usual)
    users_kernel(memory, sources.INCREMENT, "increment", (x, 1000), (floats,), [x + 1], ((0, 0),), **usual)
    row, shared = ArraySpec((256,), "float32"), 100 << 10
    users_kernel(
        *(memory, sources.SHARED, "reverse", (x[:256], shared // 4), (row,), [x[255::-1]]),
        **dict(grid=1, block=256, shared=shared),
    )
    ranks = np.array([[i % 4, 4] for i in range(16)])
    users_kernel(
        *(memory, sources.CLUSTER, "ranks", (x[:1],), (ArraySpec((16, 2), "int32"),), [ranks]),
        **dict(grid=16, block=32, cluster=4),
    )
    arrived, sums = ArraySpec((1,), "int32"), ArraySpec((64,), "float32")
    arguments = (x[:64], np.zeros(1, np.int32), launch.Scratch(64 * 4), launch.Result(1))
    want = [np.array([64]), np.full(64, x[:64].sum())]
    users_kernel(
        *(memory, sources.COOPERATIVE, "total", arguments, (arrived, sums), want, ((1, 0),)),
        **dict(grid=64, block=1, cooperative=True),
    )


WRONG = {
    "block_tables": (-1, 2**31 - 1, -(2**31), "num_pages"),
    "context_lens": (-1, 2**31 - 1, -(2**31), 10**6),
    "query_start_loc": (-1, 2**31 - 1, 10**6),
    "num_seqs": (-1, 2**31 - 1, 10**6),
}


def hostile_metadata(memory, operator, arrays: dict, options: dict, wrong: tuple, checked: bool) -> None:
    """Only the tool judges: rows may be NaN, as properties/test_bad_values.py checks. `checked`: the handler looks."""
    argument, place, value = wrong
    arrays[argument].reshape(-1)[place] = value
    os.environ["XLA_GPU_CHECK_INPUTS"] = "01"[checked]
    try:
        call(memory, operator, arrays, **options)
    except ValueError:
        if memory.platform == "CUDA" and not checked:  # there, a handler does not look
            raise
    else:
        if checked:
            raise SystemExit(f"{operator.name}: {argument} of {value} is no error with XLA_GPU_CHECK_INPUTS=1")
    finally:
        del os.environ["XLA_GPU_CHECK_INPUTS"]


def hostile_attention(memory, case, argument: str, value, checked: bool = False) -> None:
    latents = isinstance(case, mla_cases.Case)
    arrays = mla_cases.build(case) if latents else cases.build(case).arrays()
    operator = mla_attention.OPERATOR if latents else paged_attention.OPERATOR
    pages = arrays["kv_cache"].shape[0 if latents else case.layout == "split"]
    place = len(case.sequences) // 2 if argument in ("context_lens", "query_start_loc") else 0  # an entry that is used
    wrong = argument, place, pages if value == "num_pages" else value
    hostile_metadata(memory, operator, arrays, case.options(), wrong, checked)


def hostile_bidirectional(memory, dtype: str, argument: str, index: int, value: int) -> None:
    """As hostile_attention; where the handler does not look, all rows are NaN."""
    arrays, options = layer_cases.bidirectional("hostile", (70, 5, 130), dtype=dtype, head_dim=64)
    arrays[argument][index] = value
    (operator,) = (op for op in OPERATORS if op.name == "bidirectional_attention")
    for checked in (False, True):
        os.environ["XLA_GPU_CHECK_INPUTS"] = "01"[checked]
        try:
            (out,) = call(memory, operator, arrays, **options)
        except ValueError:
            if memory.platform == "CUDA" and not checked:  # there, a handler does not look
                raise
        else:
            if checked or not np.isnan(out.astype(np.float32)).all():
                raise SystemExit(f"bidirectional_attention: {argument}[{index}] of {value} has no effect")
        finally:
            del os.environ["XLA_GPU_CHECK_INPUTS"]


def hostile_slots(memory, case) -> None:
    latents = isinstance(case, mla_cases.LatentCase)
    arrays = mla_cases.build_latents(case) if latents else cache_cases.build_cache(case)
    slots = arrays["slot_mapping"]
    if slots.size < 3:
        return
    largest = np.iinfo(slots.dtype).max
    slots[:3] = case.num_pages * case.page_size, largest, largest - 7
    try:
        call(memory, concat_and_cache_mla.OPERATOR if latents else reshape_and_cache.OPERATOR, arrays)
    except ValueError:
        if memory.platform == "CUDA":
            raise


def all_calls(memory) -> list:
    """Functions without arguments, the most telling first.

    experts_mlp has no handler. It calls those of grouped_linear, silu_and_mul and gelu_and_mul, which are called here;
    its other operations are the frameworks' own.
    """
    calls = []

    def add(function, *arguments):
        calls.append(lambda: function(memory, *arguments))

    decodes, grid = decode_grid(), cases.grid()
    for dtype in cases.FLOATS:
        for size in (1, 1000, 4099):
            add(addition, dtype, size)
        for rows, heads, head_dim in ((5, 3, 8), (7, 4, 80), (64, 8, 128), (3, 2, 256)):
            add(merging, dtype, rows, heads, head_dim)
    if memory.platform == "CUDA":
        add(users_kernels)
    for name, (arrays, options) in layer_cases.grid():
        add(of_layer, name, arrays, options)
    for case in cases.COMMON:
        add(attention, case)
    for i, case in enumerate(decodes[:40]):
        add(attention, case, i % 3 > 0)
    for case in cache_cases.CACHE_CASES:
        add(cache_update, case)
    # A batch of mixed rows, a window, float8, decoding alone: one sequence, and several; short prompts, for which CUDA
    # has a kernel of its own.
    alone = cases.AttentionCase("alone", ((1, 900),), head_dim=128, dtype="bfloat16")
    several = alone.but(sequences=((1, 300), (4, 900), (1, 17)), cache_dtype="float8_e4m3fn", scales="one")
    lengths = (*((tokens, tokens) for tokens in range(9, 110, 6)), (60, 0), (1, 40))
    prompts = alone.but(sequences=lengths, num_heads=8, num_kv_heads=2, page_size=16)
    add(attention, prompts)
    latents = mla_cases.Case("latents", ((1, 40), (9, 70), (1, 9)), num_heads=16, head_dim=576, value_dim=512)
    of_latents = [latents.but(dtype=dtype) for dtype in cases.FLOATS]
    for case in (cases.COMMON[1], cases.COMMON[2], cases.COMMON[9], alone, several, prompts, *of_latents):
        for argument, values in WRONG.items():
            for value in values:
                add(hostile_attention, case, argument, value)
            add(hostile_attention, case, argument, values[0], True)
    for dtype in cases.FLOATS:
        for argument, index, value in (
            *(("query_start_loc", i, value) for i in (0, 1, 3) for value in (-1, 10**6, 2**31 - 1, -(2**31))),
            *(("num_seqs", 0, value) for value in (-1, 6, 2**31 - 1)),
        ):
            add(hostile_bidirectional, dtype, argument, index, value)
    for case in (*cache_cases.CACHE_CASES, *mla_cases.LATENT_CASES):
        add(hostile_slots, case)
    # Neighbours in the grid are alike: every seventh first, so that whatever the time allows is a spread.
    spread = [case for start in range(7) for case in grid[start::7]]
    for i in range(max(len(decodes) - 40, len(spread))):
        for case in (*decodes[40 + i : 41 + i], *spread[i : i + 1]):
            add(attention, case, i % 3 > 0)
    for case in (*cases.MORE, cases.LONGEST_FIRST):
        add(attention, case)
    for case in cache_cases.cache_grid():
        add(cache_update, case)
    return calls


def run_calls(memory, seconds: float, part: int, parts: int) -> None:
    """Every `parts`-th call, from `part` on: what runs under the tool."""
    calls, begun, done = all_calls(memory)[part::parts], time.monotonic(), 0
    for one in calls:
        if time.monotonic() - begun > seconds:
            break
        one()
        done += 1
    print(f"calls: {done} of {len(calls)}", flush=True)


def planted_fault(memory, tool: str) -> None:
    """A call in which `tool` must find something."""
    a = np.ones(4096, np.float32)
    call(memory, simple_add.OPERATOR, {"a": a, "b": a}, plant=tool)
