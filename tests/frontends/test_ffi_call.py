"""ffi_call: third-party handlers in torch_xla and on eager tensors, with the meaning of jax.ffi.ffi_call."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.common import compare
from tests.frontends.third_party_handlers import LAYOUTS, A, ffi, run, spec, torch
from xla_gpu import errors

pytestmark = [
    pytest.mark.frontends("eager", "torch_xla", "torch_xla-compiled"),
    pytest.mark.usefixtures("ffi_targets"),
]


# ---- Results, attributes, aliases, layouts ---------------------------------------------------------------------------
def test_one_result_and_a_typed_attribute(frontend):
    call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(2.5))
    compare.assert_bitwise_equal(run(frontend, call, A)[0], A * np.float32(2.5), frontend.name)


def test_attribute_values_are_not_confused(frontend):
    """The reason for this project's own way into torch_xla."""
    for factor in (2.0, 5.0, -0.0, 2.0):
        call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(factor))
        compare.assert_bitwise_equal(run(frontend, call, A)[0], A * np.float32(factor), f"{frontend.name} {factor}")

    def both(a):
        return tuple(ffi.ffi_call("xla_gpu_test_scale", a).bind(factor=f)(a) for f in (np.float32(2), np.float32(5)))

    if not frontend.name.endswith("-compiled"):  # there, NumPy scalars go through .bind outside
        first, second = run(frontend, both, A)
        np.testing.assert_array_equal(first, A * 2)
        np.testing.assert_array_equal(second, A * 5)


def test_attributes_given_inside_torch_compile(frontend):
    """Plain Python values need no .bind."""

    def body(a):
        return ffi.ffi_call("xla_gpu_test_describe", spec((64,), torch.uint8))(a, n=3, flag=True, text="x")

    (out,) = run(frontend, body, A)
    assert bytes(out).rstrip(b"\0") == b"flag=scalar:1:01 n=scalar:5:0300000000000000 text=string:78"


@pytest.mark.parametrize("container", [tuple, list])
def test_several_results_in_the_container_asked_for(frontend, container):
    kinds = []

    def body(a):
        results = ffi.ffi_call("xla_gpu_test_two_results", container([a, spec((), torch.int32)]))(a)
        kinds.append(type(results))
        return tuple(results)

    plus_one, count = run(frontend, body, A)
    np.testing.assert_array_equal(plus_one, A + 1)
    assert count.dtype == np.int32 and count.shape == () and int(count) == 6
    assert set(kinds) == {container}


class Described:
    """Anything with shape and dtype."""

    shape, dtype = (6,), np.dtype(np.float32)


@pytest.mark.parametrize(
    "result", [Described(), spec((6,)), torch.zeros(6), A], ids=["object", "meta", "tensor", "numpy"]
)
@pytest.mark.frontends("eager", "torch_xla")
def test_what_describes_a_result(frontend, result):
    (out,) = run(frontend, ffi.ffi_call("xla_gpu_test_negate", result), A)
    np.testing.assert_array_equal(out, -A)


def test_jax_shape_dtype_struct_describes_a_result(frontend):
    jax = pytest.importorskip("jax")
    (out,) = run(frontend, ffi.ffi_call("xla_gpu_test_negate", jax.ShapeDtypeStruct((6,), np.float32)), A)
    np.testing.assert_array_equal(out, -A)


def test_empty_operand(frontend):
    (out,) = run(frontend, ffi.ffi_call("xla_gpu_test_negate", spec((0,))), A[:0])
    assert out.shape == (0,)


def test_alias_shares_the_buffer_and_keeps_the_operand(frontend):
    """The handler refuses two buffers; the operand that the caller still holds keeps its value."""

    def body(a):
        out = ffi.ffi_call("xla_gpu_test_increment", a, input_output_aliases={0: 0})(a)
        return out, a + 0

    out, kept = run(frontend, body, A)
    np.testing.assert_array_equal(out, A + 1)
    np.testing.assert_array_equal(kept, A)


def test_without_the_alias_the_handler_sees_two_buffers(frontend):
    with pytest.raises((RuntimeError, ValueError), match="the operand was copied"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_increment", a)(a), A)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_order_axes_from_major_to_minor(frontend, layout):
    """As in jax.ffi. raw_copy shows in which order the elements lie."""
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    (flat,) = run(frontend, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
    np.testing.assert_array_equal(flat, a.transpose(layout).reshape(-1))
    (back,) = run(frontend, ffi.ffi_call("xla_gpu_test_raw_copy", spec((2, 3, 4)), output_layouts=layout), flat)
    np.testing.assert_array_equal(back, a)
    both = ffi.ffi_call("xla_gpu_test_raw_copy", [spec((2, 3, 4))], input_layouts=[layout], output_layouts=[layout])
    np.testing.assert_array_equal(run(frontend, both, a)[0], a)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.frontends("eager")
def test_traced_results_have_the_strides_of_eager_ones(frontend, layout):
    """torch.compile's code for what follows is made for these."""
    del frontend
    call = ffi.ffi_call("xla_gpu_test_raw_copy", [spec((2, 3, 4))], input_layouts=[layout], output_layouts=[layout])
    a = torch.zeros(2, 3, 4)
    with torch._subclasses.FakeTensorMode() as mode:
        (traced,) = call(mode.from_tensor(a))
    (result,) = call(a)
    assert traced.stride() == result.stride()
    assert result.permute(layout).is_contiguous()


@pytest.mark.frontends("eager")
def test_layouts_mean_what_they_mean_in_jax(frontend, third_party):
    jax = pytest.importorskip("jax")
    jax.ffi.register_ffi_target(
        "xla_gpu_test_raw_copy", jax.ffi.pycapsule(third_party.xla_gpu_test_raw_copy), platform="cpu"
    )
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for layout in LAYOUTS:
        with jax.default_device(jax.devices("cpu")[0]):
            call = jax.ffi.ffi_call(
                "xla_gpu_test_raw_copy", jax.ShapeDtypeStruct((24,), np.float32), input_layouts=[layout]
            )
            theirs = np.asarray(jax.jit(call)(a))
        (ours,) = run(frontend, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
        compare.assert_bitwise_equal(ours, theirs, str(layout))


# ---- Side effects and stages -----------------------------------------------------------------------------------------
def test_side_effects_happen_though_nobody_uses_the_result(frontend, third_party):
    before = third_party.xla_gpu_test_ticks()

    def body(a):
        unused = ffi.ffi_call("xla_gpu_test_tick", a, has_side_effect=True)(a)
        # torch_xla's graph holds what live tensors need: the result must still be kept until the program runs.
        return (a + 1, unused) if frontend.name.startswith("torch_xla") else a + 1

    run(frontend, body, A)
    assert third_party.xla_gpu_test_ticks() == before + 1


def test_all_stages_run(frontend, third_party):
    stages = range(4)  # instantiate, prepare, initialize, execute
    before = [third_party.xla_gpu_test_stage_calls(s) for s in stages]
    (out,) = run(frontend, ffi.ffi_call("xla_gpu_test_staged", spec((6,))).bind(key=7), A)
    np.testing.assert_array_equal(out, A)
    calls = [third_party.xla_gpu_test_stage_calls(s) - b for s, b in zip(stages, before, strict=True)]
    # XLA's CPU runtime knows two stages, its GPU runtime and the eager front end all four.
    wanted = [1, 1, 1, 1] if frontend.name == "eager" else [1, 0, 0, 1]
    assert [min(c, 1) for c in calls] == wanted, calls


@pytest.mark.frontends("eager", "torch_xla")
def test_an_error_of_an_early_stage_comes_through(frontend):
    with pytest.raises((ValueError, RuntimeError), match="key is not 7"):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_staged", a)(a, key=8), A)


@pytest.mark.parametrize("code", [2, 3, 5, 8, 13])
@pytest.mark.frontends("eager", "torch_xla")
def test_an_error_of_the_handler_comes_through(frontend, code):
    """Every code, with its text; eagerly, InvalidArgument (3) is a ValueError and the others are a HandlerError."""
    message = f"a text that only this test knows, {code}"
    kind = {3: ValueError}.get(code, errors.HandlerError) if frontend.name == "eager" else (RuntimeError, ValueError)
    with pytest.raises(kind, match=message):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_fail", a)(a, code=code, message=message), A)


# ---- On CUDA ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cuda_targets(third_party):
    ffi.register_ffi_target("xla_gpu_test_fill", third_party.xla_gpu_test_fill_cuda, platform="CUDA")
    ffi.register_ffi_target("xla_gpu_test_raw_copy", third_party.xla_gpu_test_raw_copy_cuda, platform="CUDA")


CUDA = pytest.mark.frontends("eager-cuda", "torch_xla-cuda", "torch_xla-cuda-compiled")


@CUDA
def test_cuda_handler_runs_on_the_frontends_stream(frontend, cuda_targets):
    """What the handler queued comes before what is queued next."""
    for value in (2.0, -3.5):
        call = ffi.ffi_call("xla_gpu_test_fill", spec((1 << 20,))).bind(value=np.float32(value))
        (out,) = run(frontend, lambda a, call=call: call(a) + a[0], A)
        assert (out == value).all()


@CUDA
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cuda_layouts(frontend, cuda_targets, layout):
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    (flat,) = run(frontend, ffi.ffi_call("xla_gpu_test_raw_copy", spec((24,)), input_layouts=[layout]), a)
    np.testing.assert_array_equal(flat, a.transpose(layout).reshape(-1))
    (back,) = run(frontend, ffi.ffi_call("xla_gpu_test_raw_copy", spec((2, 3, 4)), output_layouts=layout), flat)
    np.testing.assert_array_equal(back, a)


@CUDA
def test_cuda_target_that_is_registered_for_cpu_alone(frontend, cuda_targets):
    with pytest.raises(
        Exception, match=r"'xla_gpu_test_negate' is not registered on platform 'CUDA'.*registered on cpu"
    ):
        run(frontend, lambda a: ffi.ffi_call("xla_gpu_test_negate", a)(a), A)


# ---- Threads ---------------------------------------------------------------------------------------------------------
@pytest.mark.frontends("eager")
def test_from_many_threads(frontend):
    del frontend
    failures = []

    def work(factor):
        call = ffi.ffi_call("xla_gpu_test_scale", spec((1000,)))
        a = torch.ones(1000)
        for _ in range(200):
            if not (call(a, factor=np.float32(factor)) == factor).all():
                failures.append(factor)

    threads = [threading.Thread(target=work, args=(f,)) for f in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@pytest.mark.frontends("torch_xla")
def test_export_keeps_third_party_calls(frontend):
    """torch.export, as StableHLO."""
    from torch_xla.stablehlo import exported_program_to_stablehlo

    call = ffi.ffi_call("xla_gpu_test_scale", spec((6,))).bind(factor=np.float32(3))

    class Model(torch.nn.Module):
        def forward(self, a):
            return call(a) + 1

    stablehlo = exported_program_to_stablehlo(torch.export.export(Model(), (torch.from_numpy(A),)))
    text = stablehlo.get_stablehlo_text()
    assert "@xla_gpu_test_scale" in text and "api_version = 4" in text
    np.testing.assert_array_equal(stablehlo(torch.from_numpy(A)).cpu().numpy(), A * 3 + 1)
