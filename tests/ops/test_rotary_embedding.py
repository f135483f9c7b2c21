"""rotary_embedding, and wrong positions and slots of rotary_and_cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cache_cases, cases, compare, layer_cases, reference

EAGER = pytest.mark.frontends("eager", "eager-cuda")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_values(frontend, dtype, interleaved):
    arrays = layer_cases.rotary(dtype, rotary_dim=16)
    got = frontend.call("rotary_embedding", arrays, interleaved=interleaved)
    for g, w in zip(got, reference.rotary_embedding(**arrays, interleaved=interleaved), strict=True):
        compare.assert_norm(g, w, frontend.name, floor=1e-6)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@EAGER
def test_sizes(frontend, dtype):
    small = (0, 2, 1, 8), (3, 1, 1, 1, 0), (5, 4, 4, 128), (9, 3, 2, 80, 32)
    for sizes in (*small, (2, 3, 1, 257, 256), (300, 32, 8, 64, 64)):
        arrays = layer_cases.rotary(dtype, *sizes)
        for interleaved in (False, True):
            got = frontend.call("rotary_embedding", arrays, interleaved=interleaved)
            for g, w in zip(got, reference.rotary_embedding(**arrays, interleaved=interleaved), strict=True):
                compare.assert_norm(g, w, f"{frontend.name} {sizes}", floor=1e-6)


def test_is_the_rotation_of_transformers():
    """To the bit in float32."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    import xla_gpu.torch

    rng = cases.rng_for("rotary transformers")
    query, key = (torch.from_numpy(rng.standard_normal((30, h, 64)).astype(np.float32)) for h in (8, 2))
    angles = torch.arange(30).float()[:, None] * 10000.0 ** (-torch.arange(32) / 32)
    table = torch.stack([angles.cos(), angles.sin()], -1)
    got = xla_gpu.torch.rotary_embedding(query, key, torch.arange(30, dtype=torch.int32), table)
    cos, sin = (torch.cat([x, x], -1)[None] for x in (angles.cos(), angles.sin()))
    want = llama.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w[0].transpose(0, 1))


WRONG = [
    ("positions", -1),
    ("positions", 50),
    ("positions", 2**31 - 1),
    ("slot_mapping", 9 * 16),
]  # the first three of both operators


@pytest.mark.parametrize(
    ("operator", "name", "value"),
    [*(("rotary_embedding", *wrong) for wrong in WRONG[:3]), *(("rotary_and_cache", *wrong) for wrong in WRONG)],
    ids=str,
)
@EAGER
def test_wrong_values(frontend, operator, name, value, monkeypatch):
    """On the host an error that names the token; on CUDA NaN, or nothing stored, in that token alone."""
    case = cache_cases.CacheCase("rotary-wrong", skipped=0)
    arrays = layer_cases.rotary("float32") if operator == "rotary_embedding" else layer_cases.rotary_and_cache(case)
    wrong = arrays | {name: arrays[name].copy()}
    wrong[name][2] = value
    if frontend.platform == "cuda":
        right, got = (frontend.call(operator, x) for x in (arrays, wrong))
        if name == "positions":
            assert np.isnan(got[0][2]).all()
        for g, r in zip(got[:1], right[:1], strict=True):
            others = np.arange(len(g)) != 2
            compare.assert_bitwise_equal(g[others], r[others], frontend.name)
        monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    with pytest.raises(ValueError, match=rf"{operator}: {name}\[2\].*: expected .*, got {value}"):
        frontend.call(operator, wrong)
