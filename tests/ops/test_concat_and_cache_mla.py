"""concat_and_cache_mla against NumPy, bit for bit: nothing is computed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common import cases, compare, mla_cases
from tests.common.mla_cases import LatentCase

ERRORS = (ValueError, RuntimeError)
TORCH = pytest.mark.frontends("eager", "eager-cuda", "torch_xla", "torch_xla-cuda")


def check(frontend, case: LatentCase) -> None:
    arrays = mla_cases.build_latents(case)
    (cache,) = frontend.call("concat_and_cache_mla", arrays)
    compare.assert_bitwise_equal(cache, mla_cases.stored(**arrays), f"{frontend.name} {case.name}")


@pytest.mark.parametrize("case", mla_cases.LATENT_CASES, ids=lambda case: case.name)
def test_values(frontend, case):
    check(frontend, case)


@pytest.mark.parametrize("case", mla_cases.latent_grid(), ids=lambda case: case.name)
@pytest.mark.frontends("eager", "eager-cuda")
def test_grid(frontend, case):
    check(frontend, case)


@TORCH
@pytest.mark.parametrize("case", [c for c in mla_cases.LATENT_CASES if c.num_tokens], ids=lambda case: case.name)
def test_in_place(frontend, case):
    from tests.common.arrays import to_numpy

    arrays = mla_cases.build_latents(case)
    tensors = frontend.tensors(arrays)
    returned = frontend.module().concat_and_cache_mla_(**tensors)
    compare.assert_bitwise_equal(
        to_numpy(tensors["kv_cache"]), mla_cases.stored(**arrays), f"{frontend.name}: the argument"
    )
    assert returned is None or returned is tensors["kv_cache"]


@TORCH
def test_functional_leaves_its_argument_alone(frontend):
    from tests.common.arrays import to_numpy

    arrays = mla_cases.build_latents(mla_cases.LATENT_CASES[0])
    tensors = frontend.tensors(arrays)
    new = frontend.module().concat_and_cache_mla(**tensors)
    compare.assert_bitwise_equal(to_numpy(new), mla_cases.stored(**arrays), frontend.name)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), arrays["kv_cache"], f"{frontend.name}: the argument")


@pytest.mark.parametrize("width", [16, 576])
@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.frontends("eager", "eager-cuda", "jax", "jax-cuda")
def test_of_duplicate_slots_one_wins_whole(frontend, dtype, tokens, width):
    """Each token's elements are its number's: a slot that two tokens had written would show both."""
    case = LatentCase("duplicates", tokens, width - 8, 8, page_size=4, num_pages=tokens, dtype=dtype, skipped=0)
    arrays = mla_cases.build_latents(case)
    numbers = (np.arange(tokens) % 64).astype(arrays["kv_c"].dtype)[:, None]
    arrays["kv_c"][:], arrays["k_pe"][:] = numbers, numbers
    slots = cases.rng_for("duplicates").integers(0, max(4, tokens // 16), tokens).astype(np.int32)
    arrays["slot_mapping"] = slots
    (cache,) = frontend.call("concat_and_cache_mla", arrays)
    flat = cache.reshape(-1, width)
    for slot in np.unique(slots):
        tokens_of_slot = np.flatnonzero(slots == slot)
        assert (flat[slot] == flat[slot, 0]).all(), f"slot {slot} is of two tokens"
        assert flat[slot, 0] in numbers[tokens_of_slot], f"slot {slot} holds no token's latent"
        # The last token's: the host stores in order, and on CUDA the other tokens' are left out.
        assert flat[slot, 0] == numbers[tokens_of_slot[-1], 0], f"slot {slot} holds an earlier token's latent"


def test_then_attention(frontend):
    """What mla_attention reads: each new token's value is its latent."""
    rows, rank, rope = 11, 16, 8
    rng = cases.rng_for("then attention")
    arrays = {
        "kv_c": rng.standard_normal((rows, rank)).astype(np.float32),
        "k_pe": rng.standard_normal((rows, rope)).astype(np.float32),
        "kv_cache": np.full((5, 4, rank + rope), np.nan, np.float32),
        "slot_mapping": (4 * np.array([3, 1, 4])[np.arange(rows) // 4] + np.arange(rows) % 4).astype(np.int32),
    }
    (cache,) = frontend.call("concat_and_cache_mla", arrays)
    batch = {
        "query": rng.standard_normal((rows, 2, rank + rope)).astype(np.float32),
        "kv_cache": np.array(cache),
        "context_lens": np.array([rows], np.int32),
        "block_tables": np.array([[3, 1, 4]], np.int32),
        "query_start_loc": np.array([0, rows], np.int32),
        "num_seqs": np.array([1], np.int32),
    }
    (out,) = frontend.call("mla_attention", batch, scale=0.3, value_dim=rank)
    keys = np.concatenate([arrays["kv_c"], arrays["k_pe"]], 1).astype(np.float64)
    scores = np.where(np.tri(rows, dtype=bool), batch["query"].transpose(1, 0, 2) @ keys.T * 0.3, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = (weights / weights.sum(-1, keepdims=True)) @ keys[:, :rank]
    np.testing.assert_allclose(out, want.transpose(1, 0, 2), atol=1e-5)


# ---- Slots past the cache --------------------------------------------------------------------------------------------
WRONG = LatentCase("bad-slots", skipped=0)
SLOTS = WRONG.num_pages * WRONG.page_size
BAD_SLOTS = {"just-past": (SLOTS, "int32"), "2147483647": (2**31 - 1, "int32"), "2**40+17": (2**40 + 17, "int64")}


def bad_slot(name: str) -> tuple[dict, dict]:
    """The arrays, and those with that token skipped."""
    slot, dtype = BAD_SLOTS[name]
    arrays = mla_cases.build_latents(WRONG)
    skipped = dict(arrays, slot_mapping=arrays["slot_mapping"].astype(dtype))
    skipped["slot_mapping"][4] = -1
    arrays = dict(skipped, slot_mapping=skipped["slot_mapping"].copy())
    arrays["slot_mapping"][4] = slot
    return arrays, skipped


def assert_slot_error(frontend, name: str) -> None:
    arrays, _ = bad_slot(name)
    text = rf"(?s)concat_and_cache_mla: slot_mapping\[4\] \(token 4\): expected .* = {SLOTS}, .*{BAD_SLOTS[name][0]}"
    with pytest.raises(ERRORS, match=text):
        frontend.call("concat_and_cache_mla", arrays)
    check(frontend, WRONG)


@pytest.mark.parametrize("name", BAD_SLOTS)
@pytest.mark.frontends(platform="host")
def test_host_names_the_token_of_a_slot_past_the_cache(frontend, name):
    assert_slot_error(frontend, name)


@pytest.mark.parametrize("name", BAD_SLOTS)
@pytest.mark.frontends(platform="cuda")
def test_cuda_slot_past_the_cache(frontend, name, monkeypatch):
    arrays, skipped = bad_slot(name)
    (cache,) = frontend.call("concat_and_cache_mla", arrays)
    compare.assert_bitwise_equal(cache, mla_cases.stored(**skipped), f"{frontend.name}: skipped")
    monkeypatch.setenv("XLA_GPU_CHECK_INPUTS", "1")
    assert_slot_error(frontend, name)


@pytest.mark.frontends("eager")
def test_a_failing_in_place_update_changes_nothing(frontend):
    """The slots are checked before the first is written."""
    from tests.common.arrays import to_numpy

    arrays, _ = bad_slot("just-past")
    tensors = frontend.tensors(arrays)
    with pytest.raises(ERRORS):
        frontend.module().concat_and_cache_mla_(**tensors)
    compare.assert_bitwise_equal(to_numpy(tensors["kv_cache"]), arrays["kv_cache"], "the cache after an error")


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.frontends("eager", "eager-cuda")
def test_memory_that_is_not_aligned_to_vectors(frontend, dtype, alias):
    """Of the target itself: buffers that begin at any multiple of 4 bytes."""
    from tests.robustness import memory

    case = LatentCase("unaligned", num_tokens=700, num_pages=90, kv_lora_rank=24, dtype=dtype)
    arrays = mla_cases.build_latents(case)
    (cache,) = memory.run(frontend, "concat_and_cache_mla", arrays, alias=alias, shift=4)
    compare.assert_bitwise_equal(cache, mla_cases.stored(**arrays), frontend.name)
