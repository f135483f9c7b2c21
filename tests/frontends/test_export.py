"""torch.export and jax.export: StableHLO with the typed custom call, the same for every platform."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.common import cases

CASE = cases.AttentionCase("export", ((1, 20), (4, 9)), num_heads=4, num_kv_heads=2, page_size=8)


def model():
    import torch

    import xla_gpu.torch  # noqa: F401 - registers torch.ops.xla_gpu

    class Attention(torch.nn.Module):
        def forward(self, query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs):
            out = torch.ops.xla_gpu.paged_attention(
                query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, scale=0.25, sliding_window=16
            )
            return out * 2

    return Attention()


def exported():
    import torch

    from tests.common.arrays import to_torch

    inputs = [to_torch(x) for x in cases.build(CASE, poison=False).arrays().values()]
    return torch.export.export(model(), tuple(inputs)), inputs


def check_custom_call(text: str) -> None:
    (call,) = re.findall(r"stablehlo\.custom_call @xla_gpu_paged_attention.*", text)
    # jax.export's portable form names the typed backend_config otherwise.
    assert "api_version = 4" in call or "mhlo.backend_config = {" in call
    assert re.search(r"scale = 2\.5\d*e-01 : f32", call)
    assert "sliding_window = 16 : i64" in call
    assert re.search(r"tensor<\d+xui8>|tensor<\d+xi8>", call), "the scratch result"


def test_torch_export_keeps_the_operator():
    pytest.importorskip("torch")
    program, inputs = exported()
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(t.startswith("xla_gpu.paged_attention") for t in targets)
    import torch

    torch.testing.assert_close(program.module()(*inputs), model()(*inputs))


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_torch_export_to_stablehlo(frontend):
    from torch_xla.stablehlo import exported_program_to_stablehlo

    program, inputs = exported()
    stablehlo = exported_program_to_stablehlo(program)
    check_custom_call(stablehlo.get_stablehlo_text())
    out = stablehlo(*inputs)  # runs on torch_xla's device
    np.testing.assert_allclose(out.cpu().numpy(), model()(*inputs).numpy(), atol=2e-5)


@pytest.mark.frontends("jax", "jax-cuda")
def test_jax_export(frontend):
    import jax
    import jax.export  # newer versions import it by themselves

    import xla_gpu.jax

    inputs = jax.device_put(cases.build(CASE, poison=False).arrays(), frontend.device())

    def attention(arrays):
        return xla_gpu.jax.paged_attention(**arrays, scale=0.25, sliding_window=16)

    checks = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_paged_attention")]
    platform = "cpu" if frontend.platform == "host" else "cuda"
    program = jax.export.export(jax.jit(attention), platforms=[platform], disabled_checks=checks)(inputs)
    check_custom_call(program.mlir_module())
    pytest.importorskip("flatbuffers", reason="jax needs it to serialise")
    again = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(np.asarray(again.call(inputs)), np.asarray(attention(inputs)))


def test_jax_export_is_the_same_for_every_platform():
    """One program for both: nothing of the platform is in the custom call."""
    pytest.importorskip("jax.export")
    import jax

    import xla_gpu.jax

    inputs = cases.build(CASE, poison=False).arrays()
    checks = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_paged_attention")]
    attention = jax.jit(lambda arrays: xla_gpu.jax.paged_attention(**arrays, scale=0.25, sliding_window=16))
    texts = [
        jax.export.export(attention, platforms=[p], disabled_checks=checks)(inputs).mlir_module()
        for p in ("cpu", "cuda")
    ]
    calls = [re.findall(r"stablehlo\.custom_call @xla_gpu_paged_attention.*", text) for text in texts]
    assert calls[0] == calls[1] != []


def test_jax_export_with_symbolic_sizes():
    pytest.importorskip("jax.export")
    import jax
    import jax.numpy as jnp

    import xla_gpu.jax as xj

    (n,) = jax.export.symbolic_shape("n")

    def export(function, name, *operands):
        described = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"xla_gpu_{name}")]
        return jax.export.export(jax.jit(function), disabled_checks=checks)(*described).call

    heads, vector, integers = ((n, 2, 8), "float32"), ((n,), "float32"), ((n,), "int32")
    silu = export(xj.silu_and_mul, "silu_and_mul", ((n, 8), "float32"))
    rotate = export(xj.rotary_embedding, "rotary_embedding", heads, heads, integers, ((9, 4, 2), "float32"))

    def sample(logits, temperature, top_k):
        others = {"top_p": temperature, "min_p": temperature, "seed": top_k, "step": top_k}
        return xj.sample(logits, temperature=temperature, top_k=top_k, **others)

    sampled = export(sample, "sample", ((n, 5), "float32"), vector, integers)
    for size in (3, 70):
        assert silu(jnp.ones((size, 8))).shape == (size, 4)
        positions = jnp.zeros(size, jnp.int32)
        q, _ = rotate(jnp.ones((size, 2, 8)), jnp.ones((size, 2, 8)), positions, jnp.ones((9, 4, 2)))
        assert q.shape == (size, 2, 8)
        assert not sampled(jnp.ones((size, 5)), jnp.ones(size), positions)[0].any()
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match=r"linear: x: expected known sizes, .* got .*\[n, 16\]"):
            export(xj.linear, "linear", ((n, 16), dtype), ((16, 16), dtype))


@pytest.mark.frontends("torch_xla", "torch_xla-cuda")
def test_hlo_shows_the_typed_custom_call(frontend):
    inputs = frontend.tensors(cases.build(CASE).arrays())
    out = frontend.module().paged_attention(**inputs, scale=0.25)
    text = frontend.module().hlo([out])
    assert 'custom_call_target="xla_gpu_paged_attention"' in text
    assert "API_VERSION_TYPED_FFI" in text
    assert re.search(r"scale\s*=\s*(2\.5\d*e-01|0\.25)", text)
