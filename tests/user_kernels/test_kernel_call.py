"""kernel_call without a GPU: it compiles and lowers, wrong arguments get an error, and a run says what it needs."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

from tests.common.frontends import enable_x64
from tests.user_kernels import sources
from xla_gpu._core.operator import ArraySpec
from xla_gpu._user_kernels import launch
from xla_gpu._user_kernels.cuda_kernel import cuda_kernel

pytestmark = pytest.mark.usefixtures("compiler")

X = np.arange(1000, dtype=np.float32)
NEEDS_GPU = "kernel_call: {}: a CUDA kernel runs on an NVIDIA GPU alone, and this program runs on the CPU"
FLOATS = ArraySpec((1000,), "float32")


class Like:
    """A result's shape and dtype."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


# ---- Programs: traced, lowered, compiled, and refused by the handler -------------------------------------------------
def scale(kernel, ops, x):
    return ops.kernel_call(kernel, x, grid=8, block=128)(x, 2.0, 1000)


def ranks(kernel, ops, x):
    return ops.kernel_call(kernel, Like((16, 2), np.int32), grid=16, block=32, cluster=2)(x)


def total(kernel, ops, x):
    return ops.kernel_call(kernel, x, grid=64, block=1, cooperative=True)(x, None, ops.Scratch(256), ops.Result(0))


def increment(kernel, ops, x):
    return ops.kernel_call(kernel, [x], grid=8, block=128, input_output_aliases={0: 0})(x, 1000)[0]


SOURCES = {scale: sources.SCALE, ranks: sources.CLUSTER, total: sources.COOPERATIVE, increment: sources.INCREMENT}


@pytest.mark.parametrize("body", SOURCES, ids=lambda body: body.__name__)
@pytest.mark.frontends("eager", "jax", "torch_xla", "torch_xla-compiled")
def test_a_run_says_what_it_needs(frontend, body):
    kernel = cuda_kernel(SOURCES[body], body.__name__, arch="sm_90a")
    with pytest.raises(Exception, match=NEEDS_GPU.format(body.__name__)):
        frontend.run(lambda ops, x: body(kernel, ops, x), {"x": X})


@pytest.mark.frontends("eager", "torch_xla")
def test_in_place_form(frontend):
    kernel = cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    with pytest.raises(Exception, match=NEEDS_GPU.format("increment")):
        frontend.run(
            lambda ops, x: ops.kernel_call_(kernel, x, grid=8, block=128, input_output_aliases={0: 0})(x, 1000),
            {"x": X},
        )


def test_lowered_for_jax():
    """The program holds everything that the launch needs, and the alias."""
    jax = pytest.importorskip("jax")
    import xla_gpu.jax as xg

    kernel = cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    text = jax.jit(lambda x: increment(kernel, xg, x)).lower(X).as_text()
    assert "@xla_gpu_kernel_call" in text and "output_operand_aliases" in text
    for attribute in ("grid = dense<[8, 1, 1]>", "block = dense<[128, 1, 1]>", 'name = "increment"', "cubin = dense<"):
        assert attribute in text


def test_jax_must_not_change_what_the_kernel_reads():
    jax = pytest.importorskip("jax")
    import xla_gpu.jax as xg

    call = xg.kernel_call(cuda_kernel(sources.SCALE, "scale", arch="sm_90a"), X, grid=8, block=128)
    wide = X.astype(np.int64)
    with enable_x64(False), pytest.raises(TypeError, match=r"operand 0: expected an array .* JAX keeps, got int64"):
        call(wide, 2.0, 1000)
    with enable_x64():
        lowered = jax.jit(lambda x: call(x, 2.0, 1000)).trace(wide).lower(lowering_platforms=("cuda",))
    assert "(tensor<1000xi64>) -> tensor<1000xf32>" in lowered.as_text()


def test_exported_to_stablehlo():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_xla")
    from torch_xla.stablehlo import exported_program_to_stablehlo

    import xla_gpu.torch as xg

    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_90a")

    class Model(torch.nn.Module):
        def forward(self, x):
            return scale(kernel, xg, x) + 1

    exported = torch.export.export(Model(), (torch.from_numpy(X),))
    assert any(node.target is torch.ops.xla_gpu.kernel_call.default for node in exported.graph.nodes)
    text = exported_program_to_stablehlo(exported).get_stablehlo_text()
    assert "@xla_gpu_kernel_call" in text and "cubin = dense<" in text


# ---- What the handler sees -------------------------------------------------------------------------------------------
def bound(kernel, arguments, geometry=None, results=(FLOATS,), aliases=()):
    """The custom call for these arguments; arrays are ArraySpec."""
    free = [i for i in range(len(results)) if i not in dict(aliases).values()]
    encoded = launch.encode("here", kernel.parameters, arguments, free, lambda x: isinstance(x, ArraySpec))
    return launch.bind(
        *(kernel.key, tuple(encoded.arrays), tuple((geometry or launch.geometry("here", 8, 128)).encoded())),
        *(tuple(encoded.encoded), launch.double_bytes(encoded.floats), tuple(results), tuple(aliases), False),
    )


def parameters(call):
    """The attribute `parameters` as (kind, value, size) each."""
    (data,) = (value.data for name, value in call.attributes if name == "parameters")
    count, *numbers = np.frombuffer(data, np.int64).tolist()
    assert len(numbers) == 3 * count
    return [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


def bits(value):
    return int.from_bytes(value.tobytes().ljust(8, b"\0"), "little", signed=True)


def test_numbers_keep_their_bits():
    kernel = cuda_kernel(sources.WIDTHS, "widths", arch="sm_90a")
    assert kernel.parameters == (8, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 1, 8, 8)
    numbers = [
        *(np.int8(-1), np.uint8(255), np.int16(-2), np.uint16(65535), np.int32(-3), np.uint32(2**32 - 1)),
        *(
            np.int64(-(2**63)),
            np.uint64(2**64 - 1),
            np.float16(-0.0),
            np.float32("nan"),
            np.float64(0.1),
            np.bool_(True),
        ),
    ]
    x, *given, null, y = parameters(bound(kernel, [FLOATS, *numbers, None]))
    assert x == (launch.OPERAND, 0, 0) and y == (launch.RESULT, 0, 0) and null == (launch.BITS, 0, 8)
    assert given == [(launch.BITS, bits(number), number.itemsize) for number in numbers]


def test_python_numbers_take_the_parameters_width():
    kernel = cuda_kernel(sources.WIDTHS, "widths", arch="sm_90a")
    numbers = (-1, 255, -2, 65535, -3, 2**32 - 1, -(2**63), 2**64 - 1, ml_dtypes.bfloat16(0.5), 0.1, 0.1, True)
    given = parameters(bound(kernel, [FLOATS, *numbers, None]))[1:-2]
    types = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
    typed = [type_(number) for type_, number in zip(types, numbers, strict=False)]
    typed += [ml_dtypes.bfloat16(0.5), np.float32(0.1), np.float64(0.1), np.bool_(True)]
    mask = [2 ** (8 * number.itemsize) - 1 for number in typed]
    assert [value & m for (_, value, _), m in zip(given, mask, strict=True)] == [
        bits(number) & m for number, m in zip(typed, mask, strict=True)
    ]
    assert [size for _, _, size in given] == [number.itemsize for number in typed]


def test_calls_that_differ_share_nothing():
    """Every attribute counts, also the sign of a zero and the type of an equal number."""
    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_90a")
    other = cuda_kernel(sources.SCALE, "scale", arch="sm_80")
    geometries = [
        launch.geometry("here", *arguments)
        for arguments in ((8, 128), (9, 128), (8, 64), (8, 128, 2), (8, 128, 1, 16), (8, 128, 1, 0, True))
    ]
    geometries.append(launch.geometry("here", 8, 128, pdl=True))
    calls = [bound(kernel, [FLOATS, 2.0, 1000], geometry) for geometry in geometries]
    calls += [bound(kernel, [FLOATS, factor, 1000]) for factor in (0.0, -0.0, np.int32(0), float("nan"))]
    calls += [bound(other, [FLOATS, 2.0, 1000]), bound(kernel, [FLOATS, 2.0, 999])]
    # np.int32(0) and 0.0 have the same bits: to the kernel they are the same.
    assert len({call.attributes for call in calls}) == len(calls) - 1
    assert bound(kernel, [FLOATS, 2.0, 1000]) is bound(kernel, [FLOATS, 2.0, 1000])


def test_scratch_and_results_in_the_middle():
    kernel = cuda_kernel(sources.COOPERATIVE, "total", arch="sm_90a")
    call = bound(kernel, [FLOATS, launch.Result(1), launch.Scratch(4096), launch.Result(0)], results=(FLOATS, FLOATS))
    assert call.results == (FLOATS, FLOATS, ArraySpec((4096,), "uint8"))
    assert parameters(call) == [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 0, 0)]


# ---- Wrong arguments -------------------------------------------------------------------------------------------------
KERNEL = "kernel_call: scale: "
WRONG = {
    "too few": ([FLOATS, 2.0], r"arguments: expected 4, as the kernel has parameters \(of 8, 4, 4, 8 bytes\), got 3"),
    "too many": ([FLOATS, 2.0, 1, 2], "arguments: expected 4, as the kernel has parameters .* got 5"),
    "wide number": (
        [FLOATS, np.float64(2), 1],
        "argument 1: expected 4 bytes, as the kernel's parameter, got a number",
    ),
    "no array": ([2.0, 2.0, 1], None),
    "array for a number": ([FLOATS, FLOATS, 1], "argument 1: expected 4 bytes, as the kernel's .* got a pointer of 8"),
    "null for a number": ([FLOATS, None, 1], "argument 1: expected 4 bytes, as the kernel's .* got a number of 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit(name):
    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_90a")
    arguments, text = WRONG[name]
    if text is None:
        # A number in the place of a pointer has the pointer's width, and cannot be told from an address.
        assert parameters(bound(kernel, arguments))[0][2] == 8
        return
    with pytest.raises(ValueError, match=KERNEL + text):
        bound(kernel, arguments)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**32, "argument 2: expected an integer of 32 bits, as the kernel's parameter, got 4294967296"),
        (-(2**31) - 1, "argument 2: expected an integer of 32 bits"),
        ("7", "argument 2: expected an array, a number, None, Result or Scratch, got str"),
        (1j, "argument 2: expected an array, a number, None, Result or Scratch, got complex"),
        (np.complex128(1), "argument 2: expected a number of up to 64 bits, got complex128"),
        (launch.Result(1), r"arguments: expected Result of each of \[0\] once, got \[1\]"),
    ],
)
def test_values_that_are_refused(value, text):
    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_90a")
    with pytest.raises((ValueError, TypeError), match=text):
        bound(kernel, [FLOATS, 2.0, value])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1), r"grid: expected 1 to \(2147483647, 65535, 65535\), got \(0, 1, 1\)"),
        ((-1, 1), "grid: expected 1 to"),
        (((1, 65536), 1), r"grid: expected 1 to .* got \(1, 65536, 1\)"),
        ((2**31, 1), "grid: expected 1 to"),
        (((1, 1, 1, 1), 1), "grid: expected an int or up to three"),
        ((1.5, 1), "grid: expected an int, got float"),
        ((True, 1), "grid: expected an int, got bool"),
        ((1, 1025), r"block: expected 1 to \(1024, 1024, 64\), got \(1025, 1, 1\)"),
        ((1, (512, 4)), "block: expected at most 1024 threads in all"),
        ((3, 32, 2), r"grid: expected whole clusters of \(2, 1, 1\) CTAs, got \(3, 1, 1\)"),
        ((17, 32, 17), "cluster: expected 1 to"),
        ((1, 32, 1, -1), "shared: expected 0 or more bytes, got -1"),
    ],
)
def test_geometry_that_is_refused(arguments, text):
    with pytest.raises((ValueError, TypeError), match=f"kernel_call: k: {text}"):
        launch.geometry("kernel_call: k", *arguments)


@pytest.mark.parametrize(
    ("aliases", "text"),
    [
        (((1, 0),), "1: 0: expected an operand below 1 and a result below 1"),
        (((0, 1),), "0: 1: expected an operand below 1 and a result below 1"),
    ],
)
def test_aliases_that_are_refused(aliases, text):
    kernel = cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    with pytest.raises(ValueError, match=f"kernel_call: increment: input_output_aliases: {text}"):
        bound(kernel, [FLOATS, 1000], aliases=aliases)


def test_alias_of_another_shape():
    kernel = cuda_kernel(sources.INCREMENT, "increment", arch="sm_90a")
    other = ArraySpec((999,), "float32")
    with pytest.raises(ValueError, match=r"expected one shape and dtype, got operand float32\[1000\] and .*\[999\]"):
        bound(kernel, [FLOATS, 1000], results=(other,), aliases=((0, 0),))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_is_no_kernel_is_refused(framework):
    pytest.importorskip(framework)
    module = importlib.import_module(f"xla_gpu.{framework}")
    with pytest.raises(TypeError, match="kernel_call: kernel: expected what cuda_kernel returns, got str"):
        module.kernel_call(sources.SCALE, X, grid=8, block=128)
