"""triton_call without a GPU: Triton compiles, the call lowers, wrong arguments get an error."""

from __future__ import annotations

import gc
import importlib

import ml_dtypes
import numpy as np
import pytest

from xla_gpu._core.operator import ArraySpec
from xla_gpu._user_kernels import launch, triton_arguments, triton_bind, triton_call, triton_tuning

triton = pytest.importorskip("triton")

from tests.user_kernels import triton_functions as functions  # noqa: E402 - imports Triton

X = np.arange(1000, dtype=np.float32)
FLOATS = ArraySpec((1000,), "float32")
OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
BLOCK = {"BLOCK": 128}
NEEDS_GPU = "kernel_call: add: a CUDA kernel runs on an NVIDIA GPU alone, and this program runs on the CPU"


def blocks(meta):
    return triton.cdiv(meta["n"], meta["BLOCK"])


# ---- Programs --------------------------------------------------------------------------------------------------------
@pytest.mark.frontends("eager", "jax", "torch_xla", "torch_xla-compiled")
def test_a_run_says_what_it_needs(frontend):
    module = frontend.module() if hasattr(frontend, "module") else __import__("xla_gpu.jax").jax
    call = module.triton_call(functions.add, FLOATS_LIKE, grid=blocks, BLOCK=256)
    with pytest.raises(Exception, match=NEEDS_GPU):
        frontend.run(lambda ops, x: call(x, x, 1000), {"x": X})


@pytest.mark.frontends("jax")
def test_outside_of_jit(frontend):
    import jax

    from xla_gpu.jax import triton_call

    call = triton_call(functions.add, FLOATS_LIKE, grid=blocks, BLOCK=256)
    with pytest.raises(Exception, match=NEEDS_GPU):
        jax.block_until_ready(call(X, X, 1000))


class FLOATS_LIKE:
    shape, dtype = (1000,), np.dtype(np.float32)


# ---- What the handler sees -------------------------------------------------------------------------------------------
def bound(fn, arguments, results=(FLOATS,), grid=1, config=None, options=OPTIONS, aliases=(), **constexprs):
    call = triton_call.make_call(triton_call.describe(fn), grid, options, constexprs, config)
    free = [i for i in range(len(results)) if i not in dict(aliases).values()]
    encoded = triton_arguments.encode(call.where, arguments, free, lambda x: isinstance(x, ArraySpec))
    return triton_bind.bind(
        call, tuple(encoded.arrays), encoded.encoded, encoded.floats, tuple(results), tuple(aliases), False
    )


def attribute(call, name):
    (value,) = (value for each, value in call.attributes if each == name)
    return value


def numbers(call, name):
    return np.frombuffer(attribute(call, name).data, np.int64).tolist()


def parameters(call):
    count, *flat = numbers(call, "parameters")
    assert len(flat) == 3 * count
    return [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]


def test_grid_sees_arguments_and_constants():
    assert numbers(bound(functions.add, [FLOATS, FLOATS, 1000], grid=blocks, BLOCK=256), "grid") == [4, 1, 1]
    assert numbers(bound(functions.add, [FLOATS, FLOATS, 1000], grid=(2, 3), BLOCK=256), "grid") == [2, 3, 1]
    of_array = bound(functions.add, [FLOATS, FLOATS, 7], grid=lambda m: (m["x"].numel() // m["BLOCK"],), BLOCK=128)
    assert numbers(of_array, "grid") == [7, 1, 1]
    warps = bound(functions.add, [FLOATS, FLOATS, 7], options={**OPTIONS, "num_warps": 8}, BLOCK=128)
    assert numbers(warps, "block") == [256, 1, 1]


def test_a_grid_that_sees_other_values_is_another_call():
    def call(programs):
        return bound(functions.add, [FLOATS, FLOATS, 7], grid=lambda meta: programs, BLOCK=128)

    assert [numbers(call(programs), "grid")[0] for programs in (1, 2, 1)] == [1, 2, 1]


def test_grid_methods_of_two_objects_are_two_calls():
    class Rows:
        def __init__(self, rows):
            self.rows = rows

        def grid(self, meta):
            return (self.rows,)

    grids = [Rows(1).grid, Rows(2).grid, *(lambda meta, *, rows=rows: (rows,) for rows in (3, 4))]
    calls = [triton_call.make_call(triton_call.describe(functions.add), grid, OPTIONS, BLOCK, None) for grid in grids]
    # Traced programs find the call by its key.
    assert [triton_call.by_key(call.key).programs({}) for call in calls] == [(1,), (2,), (3,), (4,)]
    again = triton_call.make_call(triton_call.describe(functions.add), grids[0].__self__.grid, OPTIONS, BLOCK, None)
    assert again.key == calls[0].key


def test_a_grid_may_see_what_is_assigned_later():
    call = triton_call.make_call(triton_call.describe(functions.add), lambda meta: (rows,), OPTIONS, BLOCK, None)
    rows = 5
    assert triton_call.by_key(call.key).programs({}) == (rows,)


def test_other_heuristics_of_one_name_are_another_call():
    def make(block):
        fn = triton.heuristics({"BLOCK": lambda meta: block})(functions.add)
        return triton_call.make_call(triton_call.describe(fn), blocks, OPTIONS, {}, None)

    first, second = make(64), make(128)
    assert make(64).key == first.key != second.key
    for call, block in ((first, 64), (second, 128)):
        ((heuristic,),) = (values.values() for values in triton_call.by_key(call.key).function.heuristics)
        assert heuristic({}) == block


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_grid_that_sees_other_values_of_an_array_is_another_call(library):
    def make(programs):
        array = np.array([programs, 3], np.int32)
        array = array if library == "numpy" else pytest.importorskip("torch").from_numpy(array)
        grid = lambda meta: (int(array[0]), int(array[1]))  # noqa: E731
        return triton_call.make_call(triton_call.describe(functions.add), grid, OPTIONS, {"BLOCK": 128}, None)

    first, second = make(1), make(2)
    assert first.key != second.key and make(1).key == first.key
    # Traced programs find the call by its key.
    assert [triton_call.by_key(call.key).programs({}) for call in (first, second)] == [(1, 3), (2, 3)]


def test_specialisation():
    """Ones are compiled in, multiples of 16 are known to be, and the launch checks the alignment of arrays."""
    array = lambda kind, i: (kind, i, 16)  # noqa: E731
    n = {
        value: parameters(bound(functions.add, [FLOATS, FLOATS, value], BLOCK=128)) for value in (1, 16, 17, 18, 2**40)
    }
    arrays = [array(launch.OPERAND, 0), array(launch.OPERAND, 1)]
    tail = [array(launch.RESULT, 0), (launch.BITS, 0, 8), (launch.BITS, 0, 8)]  # the two scratch pointers
    assert n[1] == [*arrays, *tail]
    assert n[17] == [*arrays, (launch.BITS, 17, 4), *tail]
    assert n[2**40] == [*arrays, (launch.BITS, 2**40, 8), *tail]
    cubin = {n: attribute(bound(functions.softmax, [FLOATS, n], BLOCK=512), "cubin") for n in (300, 302, 304)}
    assert cubin[304] != cubin[300] == cubin[302]  # rows of aligned addresses are loaded in vectors


def test_numbers_of_other_widths():
    values = (np.int64(5), np.float64(0.5), np.uint8(3), np.float16(1.5), None)
    given = parameters(bound(functions.numbers, [FLOATS, *values], results=[ArraySpec((5,), "float32")]))[1:5]
    assert given == [
        (launch.BITS, int.from_bytes(v.tobytes().ljust(8, b"\0"), "little"), v.itemsize) for v in values[:4]
    ]
    values = (True, 2.5, ml_dtypes.bfloat16(1), 2, None)
    given = parameters(bound(functions.numbers, [FLOATS, *values], results=[ArraySpec((5,), "float32")]))[1:5]
    assert given == [
        (launch.BITS, 1, 1),
        (launch.BITS, int(np.float32(2.5).view(np.int32)), 4),
        (launch.BITS, int(np.asarray(values[2]).view(np.uint16)), 2),
        (launch.BITS, 2, 4),
    ]


def test_scratch_memory_of_tensor_descriptors():
    halves = [ArraySpec(shape, "float16") for shape in ((256, 192), (192, 128), (256, 128))]
    for num_ctas in (1, 2):
        call = bound(
            *(functions.matmul, [*halves[:2], launch.Result(0), 256, 128, 192], halves[2:]),
            **dict(grid=(2, 1), options={**OPTIONS, "num_ctas": num_ctas}, BM=128, BN=128, BK=64),
        )
        result, scratch = call.results
        assert result == halves[2] and scratch.dtype == "uint8"
        # Three descriptors of 128 bytes for each program; Triton may align them further.
        assert scratch.shape[0] >= 2 * num_ctas * 3 * 128
        assert np.prod(numbers(call, "grid")) == 2 * num_ctas and np.prod(numbers(call, "cluster")) == num_ctas


def test_configurations_and_heuristics():
    arguments = [FLOATS, 1024]
    with pytest.raises(ValueError, match="triton_call: tuned: config: expected one of the function's 2 configurations"):
        bound(functions.tuned, arguments, grid=blocks)
    small, large = functions.tuned.configs
    calls = [bound(functions.tuned, arguments, grid=blocks, config=config) for config in (small, large)]
    assert [numbers(call, "grid")[0] for call in calls] == [16, 4]
    assert [numbers(call, "block")[0] for call in calls] == [64, 128]
    ragged = bound(functions.tuned, [FLOATS, 1000], grid=blocks, config=large)  # EVEN is false
    assert attribute(ragged, "cubin") != attribute(calls[1], "cubin")


def test_what_tuning_found_is_used():
    call = triton_call.make_call(triton_call.describe(functions.tuned), blocks, OPTIONS, {}, None)
    encoded = triton_arguments.encode(call.where, [FLOATS, 512], [0], lambda x: isinstance(x, ArraySpec))
    arguments = (tuple(encoded.arrays), encoded.encoded, encoded.floats, (FLOATS,))
    key = triton_tuning.tuning_key(call, *arguments)
    assert not triton_tuning.is_tuned(call, key)
    triton_tuning.remember_config(key, functions.tuned.configs[0])
    assert triton_tuning.is_tuned(call, key)
    assert numbers(triton_bind.bind(call, *arguments, (), False), "grid") == [8, 1, 1]
    for rows in (2, 3):  # a grid that holds a number is another call, with the same configuration
        assert numbers(bound(functions.tuned, [FLOATS, 512], grid=lambda meta, rows=rows: (rows, 5)), "grid") == [
            rows,
            5,
            1,
        ]
    with pytest.raises(ValueError, match="config: expected one of"):  # another value of the key "n"
        bound(functions.tuned, [FLOATS, 513], grid=blocks)


def test_pruned_configurations_are_not_timed():
    configs = [triton.Config({"BLOCK": block}) for block in (32, 64, 128)]
    seen = []

    def fitting(configs, named, **constants):
        seen.append((named["x"].shape, named["n"], constants))
        return [config for config in configs if config.kwargs["BLOCK"] <= named["n"]]

    pruned = triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": fitting})(functions.add)
    call = triton_call.make_call(triton_call.describe(pruned), blocks, OPTIONS, {}, None)
    for n, expected in ((100, configs[:2]), (16, [])):
        encoded = triton_arguments.encode(call.where, [FLOATS, FLOATS, n], [0], lambda x: isinstance(x, ArraySpec))
        arguments = (encoded.encoded, encoded.floats, encoded.arrays, (FLOATS,))
        assert triton_tuning.configs_to_time(call, *arguments) == expected
    assert seen == [((1000,), 100, {}), ((1000,), 16, {})]


def test_a_grid_that_sees_an_array_is_known_by_its_shape():
    """The text of a CUDA tensor's values would wait for the GPU."""

    class Array:
        shape, dtype = (3,), "float32"

        def __repr__(self):
            raise AssertionError("read")

    def call(x):
        return triton_call.make_call(
            triton_call.describe(functions.add), lambda meta: x.shape[0], OPTIONS, {"BLOCK": 32}, None
        )

    assert call(Array()).key == call(Array()).key


# ---- Wrong arguments -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ([FLOATS, FLOATS, 7], {}, "add: expected values of BLOCK by name, as triton_call's own arguments"),
        ([FLOATS, FLOATS, 7, launch.Result(0), 128], {}, "add: expected values of BLOCK by name"),
        ([FLOATS, FLOATS], {"BLOCK": 128}, r"add: arguments: expected 4 \(x, y, n, out\), results included, got 3"),
        ([FLOATS, FLOATS, 1, 2], {"BLOCK": 128}, "add: arguments: expected 4"),
        ([FLOATS, FLOATS, 1000], {"BLOCK": 100}, "add: Triton does not compile it for compute capability"),
        ([FLOATS, FLOATS, 1000], {"BLOCK": 128, "WIDTH": 1}, "add: expected constants among the parameters"),
        ([FLOATS, FLOATS, "n"], {"BLOCK": 128}, "add: argument 2: expected an array, a number, None or Result"),
        ([FLOATS, FLOATS, 2**63], {"BLOCK": 128}, "add: argument 2: expected an integer of 64 bits"),
        ([FLOATS, FLOATS, 1000], {"BLOCK": 128, "grid": 0}, r"add: grid: expected 1 to"),
        ([FLOATS, FLOATS, 1000], {"BLOCK": np.zeros(3)}, "add: BLOCK: expected a constant, got an array"),
        ([FLOATS, ArraySpec((3,), "complex64"), 1], {"BLOCK": 128}, "add: y: expected a dtype that Triton knows"),
        ([FLOATS, FLOATS, launch.Result(1)], {"BLOCK": 128}, r"add: arguments: expected Result of each of \[0\] once"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(arguments, options, text):
    with pytest.raises((ValueError, TypeError), match=f"triton_call: {text}"):
        bound(functions.add, arguments, **options)


@pytest.mark.parametrize("module", ["torch", "jax"])
@pytest.mark.parametrize("aliases", [[(0, 0)], {"0": 0}, {0: None}, {False: 0}], ids=str)
def test_aliases_that_are_no_indices(module, aliases):
    pytest.importorskip(module)
    xg = importlib.import_module(f"xla_gpu.{module}")
    with pytest.raises(
        TypeError, match="triton_call: add: input_output_aliases: expected a dict of an operand's index"
    ):
        xg.triton_call(functions.add, FLOATS_LIKE, grid=1, BLOCK=128, input_output_aliases=aliases)


@pytest.mark.parametrize("num_warps", [3, 64])
def test_a_number_of_warps_that_triton_has_not(num_warps):
    with pytest.raises(
        ValueError, match=f"triton_call: add: num_warps: expected a power of 2 up to 32, got {num_warps}"
    ):
        bound(functions.add, [FLOATS, FLOATS, 7], options={**OPTIONS, "num_warps": num_warps}, BLOCK=128)


def test_functions_that_are_refused():
    for fn in (len, functions.add.fn, "add"):
        with pytest.raises(TypeError, match=r"triton_call: fn: expected a function of @triton\.jit, got"):
            triton_call.describe(fn)
    hooked = triton.Config({"BLOCK": 64}, pre_hook=print)
    with pytest.raises(ValueError, match="tuned: config: expected one without pre_hook"):
        bound(functions.tuned, [FLOATS, 8], config=hooked)
    with pytest.raises(TypeError, match=r"tuned: config: expected a triton\.Config, got int"):
        bound(functions.tuned, [FLOATS, 8], config=64)
    only = triton.autotune([hooked], key=[])(functions.add)
    with pytest.raises(ValueError, match="add: config: expected one without pre_hook"):
        bound(only, [FLOATS, FLOATS, 8])
    with pytest.raises(ValueError, match="add: num_warps: expected a positive int, got 0"):
        bound(functions.add, [FLOATS, FLOATS, 8], options={**OPTIONS, "num_warps": 0}, BLOCK=64)


# ---- The table of calls ----------------------------------------------------------------------------------------------
def made(programs: int) -> triton_call.TritonCall:
    return triton_call.make_call(triton_call.describe(functions.add), (programs,), OPTIONS, {"BLOCK": 128}, None)


def known(key: str) -> bool:
    gc.collect()
    try:
        return triton_call.by_key(key).key == key
    except ValueError as error:
        assert f"got the key {key!r}" in str(error)
        return False


def test_calls_that_nobody_holds_are_forgotten(monkeypatch):
    """A process that lives long may make a call for each number of rows that it meets."""
    monkeypatch.setattr(triton_call, "_KEPT", 8)
    held, dropped, kept = made(10_001), made(10_002).key, made(10_003).key
    triton_call.keep(kept)
    assert made(10_001).key == held.key and known(dropped)
    for programs in range(20_000, 20_100):
        made(programs)
    assert made(20_095).key == made(20_095).key
    assert known(held.key) and known(kept) and not known(dropped)
    assert triton_call.by_key(held.key).programs({}) == (10_001,)


def test_tuned_configurations_are_forgotten(monkeypatch):
    monkeypatch.setattr(triton_tuning, "_KEPT", 8)
    call = triton_call.make_call(triton_call.describe(functions.tuned), 1, OPTIONS, {}, None)
    assert call.config is None and call.function.configs
    for i in range(100):
        triton_tuning.remember_config(("many", i), call.function.configs[0])
    assert [triton_tuning.is_tuned(call, ("many", i)) for i in (0, 91, 92, 99)] == [False, False, True, True]


def test_a_traced_program_keeps_its_call(monkeypatch):
    """It has the call's key alone."""
    torch = pytest.importorskip("torch")
    import xla_gpu.torch as xg

    monkeypatch.setattr(triton_call, "_KEPT", 2)

    def traced():
        call = xg.triton_call(functions.add, torch.empty(1000), grid=(9,), BLOCK=128)

        class Module(torch.nn.Module):
            def forward(self, x):
                return call(x, x, 1000)

        return torch.export.export(Module(), (torch.ones(1000),))

    program = traced()
    for programs in range(30_000, 30_100):
        made(programs)
    gc.collect()
    with pytest.raises(Exception, match=NEEDS_GPU):
        program.module()(torch.ones(1000))
