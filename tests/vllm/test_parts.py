"""Buckets, block tables, the packed step and caches."""

from __future__ import annotations

import pickle
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from tests.vllm import test_gpt_oss, test_quantization, tiny
from vllm import SamplingParams
from xla_gpu.vllm import buckets, request_checks, request_limits
from xla_gpu.vllm.attention import StepMetadata
from xla_gpu.vllm.block_tables import BlockTables
from xla_gpu.vllm.kv_cache import KVCaches
from xla_gpu.vllm.platform import choose_start_method
from xla_gpu.vllm.step_layout import StepLayout


@pytest.fixture(scope="module", autouse=True)
def float32_products():
    """On a GPU XLA would multiply float32 matrices in TF32, which the worker does not let it do either."""
    torch_xla.backends.set_mat_mul_precision("highest")


def test_buckets():
    assert buckets.token_buckets(64, 8) == [1, 2, 4, 8, 16, 32, 64]
    assert buckets.token_buckets(100, 12) == [1, 2, 4, 8, 12, 16, 32, 64, 100]
    assert buckets.token_buckets(2000, 256)[5:] == [32, 64, 96, 128, 160, 192, 224, 256, 512, 768, 1024, 1536, 2000]
    assert buckets.token_buckets(512, 100)[5:] == [32, 64, 96, 100, 128, 256, 512]
    assert buckets.token_buckets(150, 150)[5:] == [32, 64, 96, 128, 150]
    assert buckets.token_buckets(100, 12, [4]) == [4, 12, 100]
    assert buckets.next_bucket([4, 12, 100], 5) == 12
    assert [buckets.logits_rows(rows, 64) for rows in (1, 8, 9, 32, 64)] == [8, 8, 64, 64, 64]
    assert [buckets.logits_rows(rows, 256) for rows in (8, 9, 64, 65)] == [8, 64, 64, 256]
    assert [buckets.logits_rows(rows, 5) for rows in (1, 5)] == [8, 8]
    assert buckets.compile_order([1, 8, 16, 64, 256], 16) == [16, 256, 8, 64, 1]
    assert buckets.compile_order([8, 16, 64, 256], 8) == [8, 256, 64, 16]
    for wrong in ([0], [101], ["8"], [True], [[8]], 8, "8", {"8": 8}):
        with pytest.raises(ValueError, match=r"token_buckets: expected a list of integers from 1 to max_.* = 100"):
            buckets.token_buckets(100, 12, wrong)


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([5, 320], {}, "prompt: expected token ids from 0 to 319, got 320"),
        ([-1, 5], {}, "prompt: expected token ids from 0 to 319, got -1"),
        ([5], {"allowed_token_ids": [5, 320]}, "allowed_token_ids: expected token ids from 0 to 319, got 320"),
        ([5], {"stop_token_ids": [1 << 63]}, "stop_token_ids: expected a number from"),
        ([5], {"n": 1000000}, "n: expected at most 16384, got 1000000"),
        ([5], {"top_k": 1 << 63}, "top_k: expected a number from"),
        ([5], {"seed": 1 << 64}, "seed: expected a number from"),
        ([5], {"temperature": float("nan")}, "temperature: expected a number from"),
    ],
)
def test_requests_that_a_step_cannot_take(prompt, fields, text):
    """vLLM compares token ids with those of the tokenizer: --skip-tokenizer-init leaves them to the platform."""
    largest = SamplingParams(max_tokens=1, allowed_token_ids=[0, 319], seed=(1 << 64) - 1)
    request_checks.check(largest, [0, 319], vocab_size=320)
    request_checks.check(largest, [0, 319], vocab_size=None)
    with pytest.raises(ValueError, match=re.escape(text)):
        request_checks.check(SamplingParams(**fields), prompt, vocab_size=320)


def test_late_interaction_is_refused():
    """Of vLLM 0.18: scores that a worker would compute."""
    request_checks.check_late_interaction(SimpleNamespace())
    request_checks.check_late_interaction(SimpleNamespace(late_interaction_params=None))
    with pytest.raises(ValueError, match=r"late_interaction_params: not supported; expected .*token_embed"):
        request_checks.check_late_interaction(SimpleNamespace(late_interaction_params=object()))


def test_rows_of_logits_with_drafts():
    scheduler = SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=100)
    config = SimpleNamespace(scheduler_config=scheduler, speculative_config=None)
    assert buckets.most_rows(config) == 32
    config.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    assert buckets.most_rows(config) == 96
    config.speculative_config.num_speculative_tokens = 4
    assert buckets.most_rows(config) == 100
    assert StepLayout(8, 4, 1, 2).logits_rows == 4
    layout = StepLayout(8, 4, 1, 2, max_draft_rows=6)
    assert layout.logits_rows == layout.unpack(np.zeros(layout.size, np.int32))["draft_rows"].size == 6


def test_layout_unpacks_what_it_packs():
    layout = StepLayout(num_tokens=5, max_seqs=3, num_groups=2, max_updates=4)
    packed, parts = layout.empty(unused_slot=9, unused_entry=99)
    assert packed.shape == (layout.size,) and sum(part.size for part in parts.values()) == layout.size
    assert (parts["slot_mapping"] == -1).all() and (parts["request_slots"] == 9).all()
    parts["num_seqs"][0] = 2
    assert layout.unpack(torch.from_numpy(packed))["num_seqs"].tolist() == [2]


def test_block_tables_send_what_is_new():
    tables = BlockTables(max_seqs=3, max_model_len=64, block_sizes=[8, 16], device=torch_xla.device())
    tables.append(1, [[5, 6], [7]])
    tables.clear(1)
    tables.append(1, [[8], [9]])  # another request: of two entries for one place the last counts
    tables.append(0, [list(range(10, 18)), []])
    indices, pages = tables.take_updates(room=4)
    got = tables.device_tables.cpu().numpy()
    got[indices] = pages
    got = got.reshape(tables.shape)
    assert got[0, 1, 0] == 8 and got[1, 1, 0] == 9
    assert got[0, 0].tolist() == list(range(10, 18))
    assert len(indices) == 4  # the others went to the device at once
    positions = np.array([0, 7, 9], np.int32)
    assert tables.cache_slots(0, np.zeros(3, np.int32), positions).tolist() == [80, 87, 89]
    assert len(tables.take_updates(room=4)[0]) == 0


def test_positions_that_a_table_does_not_have():
    """XLA reads the last row for an index behind it."""
    from xla_gpu.vllm.weights import check_positions

    rotary, learned, two = torch.nn.Module(), torch.nn.Embedding(66, 8), torch.nn.Module()
    rotary.register_buffer("cos_sin_cache", torch.zeros(64, 8))
    learned.offset = 2
    two.register_buffer("long_short_cos_sin_cache", torch.zeros(96, 8))
    two.max_position_embeddings = 64
    for name, module in (("rotary_emb", rotary), ("wpe", learned), ("embed_positions", learned), ("rope", two)):
        model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({name: module})})
        check_positions(model, 64)
        with pytest.raises(ValueError, match=rf"--max-model-len: expected at most 64, .* layer.{name} has, got 65"):
            check_positions(model, 65)
    check_positions(torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(8, 8)}), 65)


def test_an_engine_is_spawned_where_the_runtime_runs(monkeypatch):
    """vLLM forks by default, and a forked engine would wait for the runtime for ever."""
    torch_xla.device()
    environ: dict[str, str] = {}
    choose_start_method(environ)
    assert environ == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    monkeypatch.delitem(sys.modules, "torch_xla")
    environ = {}
    choose_start_method(environ)
    assert environ == {}


def test_pool():
    """The client's pool is taken whole where KV caches fill it, and what the user said of its size is kept."""
    from xla_gpu.vllm import memory

    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    memory.set_pool(environ, 0.9, 1 << 30)
    assert environ == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9000"}
    memory.set_pool(environ, 0.5)
    assert environ == {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9000"}


def test_attention_sinks():
    """A prompt through vLLM's attention layer with sinks, a logit of each head that takes weight and adds nothing."""
    from xla_gpu.vllm.attention import StepMetadata, XlaGpuAttention

    tokens, heads, kv_heads, size, scale = 12, 4, 2, 16, 0.3
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, count * size) for count in (heads, kv_heads, kv_heads))
    sinks = torch.randn(heads) * 2
    device = torch_xla.device()
    numbers = {
        "slot_mapping": range(16, 16 + tokens),
        "context_lens": [tokens],
        "query_start_loc": [0, tokens],
        "num_seqs": [1],
    }
    made = {name: torch.tensor(list(values), dtype=torch.int32).to(device) for name, values in numbers.items()}
    metadata = StepMetadata(block_tables=torch.tensor([[1]], dtype=torch.int32).to(device), **made)
    layer = XlaGpuAttention(heads, size, scale, kv_heads, sinks=sinks.to(device))
    cache = torch.zeros(2, 16, 2 * kv_heads, size, device=device)
    got = layer.forward(None, query.to(device), key.to(device), value.to(device), cache, metadata).cpu()

    q = query.view(tokens, heads, size).double()
    k, v = (x.view(tokens, kv_heads, size).repeat_interleave(heads // kv_heads, 1).double() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    with_sink = torch.cat([scores, sinks.double()[:, None, None].expand(heads, tokens, 1)], -1).softmax(-1)[..., :-1]
    expected = torch.einsum("hqk,khd->qhd", with_sink, v).reshape(tokens, heads * size)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


class CacheLayer(AttentionLayerBase):
    """An attention layer as far as its cache goes."""

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def test_memory_is_left_to_compile_in(monkeypatch):
    """XLA times a head's product on a copy of its weight; small steps alone would not leave room for that."""
    from xla_gpu.vllm import memory

    device = torch_xla.device()  # of this machine, not of what PJRT_DEVICE will say
    text = SimpleNamespace(intermediate_size=14336)
    model = SimpleNamespace(
        runner_type="generate",
        use_mla=False,
        is_multimodal_model=False,
        dtype=torch.bfloat16,
        hf_text_config=text,
        get_num_attention_heads=lambda _: 32,
        get_num_kv_heads=lambda _: 8,
        get_head_size=lambda: 128,
        get_hidden_size=lambda: 4096,
        get_vocab_size=lambda: 128256,
        get_num_experts=lambda: 0,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        speculative_config=None,
        lora_config=None,
        quant_config=None,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
    )
    head = 128256 * 4096 * 2
    assert memory.step_bytes(config) < head
    monkeypatch.setenv("PJRT_DEVICE", "GPU")
    monkeypatch.setattr(
        "torch_xla.core.xla_model.get_memory_info", lambda _: {"bytes_limit": 100 << 30, "bytes_used": 20 << 30}
    )
    available = memory.for_kv_caches(config, torch.device("cpu"))
    assert available <= (80 << 30) - 2 * head

    # What is held in one piece meanwhile is part of what is used, and counts once.
    assert memory.for_kv_caches(config, torch.device("cpu"), held=1 << 30) == available + (1 << 30)
    model.get_vocab_size = lambda: 1000
    room = memory.Room(config, device)
    assert room.bytes == max(memory.step_bytes(config), memory.timing_bytes(config))
    room.give_back()
    assert room.bytes == 0
    config.cache_config.kv_cache_memory_bytes = 1 << 26  # the pool grows as it is needed
    assert memory.Room(config, device).bytes == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_memory_is_left_to_experts(name, tmp_path, monkeypatch):
    """Which configurations call by different names: num_local_experts, num_experts, n_routed_experts."""
    from vllm.engine.arg_utils import EngineArgs

    from xla_gpu.vllm import expert_products, memory

    config = EngineArgs(model=tiny.save(name, tmp_path), max_num_batched_tokens=512, max_num_seqs=8)
    config = config.create_engine_config()
    with_experts = memory.step_bytes(config)
    text = config.model_config.hf_text_config  # some have a size for each layer
    text.moe_intermediate_size = [16, getattr(text, "moe_intermediate_size", None) or text.intermediate_size]
    assert memory.step_bytes(config) == with_experts
    monkeypatch.setattr(expert_products, "elements_of_step", lambda *_: 0)
    assert with_experts > memory.step_bytes(config)


@pytest.mark.parametrize(
    ("name", "dtype", "devices", "takes"),
    [
        ("qwen3_moe", "bfloat16", 1, True),  # of width 48
        ("qwen3_moe", "bfloat16", 2, False),
        ("qwen3_moe", "float32", 1, False),
        ("mxfp4", "bfloat16", 1, True),  # of width 96
        ("mxfp4", "bfloat16", 3, True),
        ("mxfp4", "float16", 2, False),
        ("awq", "float16", 2, True),  # of width 256
        ("awq", "float16", 4, False),
    ],
)
def test_memory_of_grouped_experts(name, dtype, devices, takes, tmp_path, monkeypatch):
    """Less, where all matrices of a device are grouped_linear's."""
    from vllm.engine.arg_utils import EngineArgs

    from xla_gpu.vllm import expert_products, memory

    if name == "mxfp4":
        model, _ = test_gpt_oss.save(tmp_path)
    elif name == "awq":
        model, _ = test_quantization.save(tmp_path, name, test_quantization.EXPERTS["qwen3_moe"], "qwen3_moe")
    else:
        model = tiny.save(name, tmp_path)
    config = EngineArgs(model=str(model), dtype=dtype, max_num_batched_tokens=512, max_num_seqs=8)
    config = config.create_engine_config()
    config.parallel_config.tensor_parallel_size = devices
    found = memory.step_bytes(config)
    monkeypatch.setattr(expert_products, "goes_by_groups", lambda *_: False)
    assert (memory.step_bytes(config) > found) == takes


def test_caches_of_one_form_lie_in_one_tensor(monkeypatch):
    wide = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    narrow = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
    pages = 6
    layers = {name: CacheLayer() for name in ("a", "b", "c", "narrow")}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    tensors = [KVCacheTensor(pages * wide.page_size_bytes, [name]) for name in "abc"]
    groups = [KVCacheGroupSpec(["a", "b", "c"], wide), KVCacheGroupSpec(["narrow"], narrow)]
    caches = KVCacheConfig(pages, [*tensors, KVCacheTensor(pages * narrow.page_size_bytes, ["narrow"])], groups)
    step = StepMetadata(
        slot_mapping=torch.tensor([17, -1, 3], dtype=torch.int32),
        context_lens=torch.tensor([18], dtype=torch.int32),
        block_tables=torch.tensor([[5, 1]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        num_seqs=torch.tensor([1], dtype=torch.int32),
    )
    made = KVCaches(config, caches, torch.device("cpu"))
    assert [list(tensor.shape) for tensor in made.tensors] == [[3 * pages, 16, 4, 8], [pages, 32, 2, 8]]
    found = made.metadata([step, step])
    for index, name in enumerate("abc"):  # each layer has pages of its own; padding stays padding
        assert found[name].block_tables.tolist() == [[5 + index * pages, 1 + index * pages]]
        assert found[name].slot_mapping.tolist() == [17 + index * pages * 16, -1, 3 + index * pages * 16]
        assert found[name].context_lens is step.context_lens
    assert found["narrow"].block_tables.tolist() == [[5, 1]] and found["narrow"].slot_mapping.tolist() == [17, -1, 3]
    made.bind()
    assert layers["a"].kv_cache[0] is layers["c"].kv_cache[0] and layers["narrow"].kv_cache[0] is made.tensors[1]

    monkeypatch.setattr(KVCaches, "MAX_BYTES", 2 * pages * wide.page_size_bytes)
    made = KVCaches(config, caches, torch.device("cpu"))
    assert [len(tensor) for tensor in made.tensors] == [2 * pages, pages, pages]
    assert made.metadata([step, step])["c"].block_tables.tolist() == [[5, 1]]


def test_limits_of_requests_go_with_the_configuration(llama, monkeypatch):
    """A server's processes get it pickled; what they check requests by is what the engine was made with."""
    config = EngineArgs(model=llama).create_engine_config()
    limits, vocab_size = request_limits.RequestLimits.of(config), config.model_config.get_vocab_size()
    assert limits == request_limits.RequestLimits(vocab_size=vocab_size)
    sent = pickle.loads(pickle.dumps(config))
    monkeypatch.setattr(type(config.model_config), "get_vocab_size", lambda _: 0)
    assert request_limits.RequestLimits.of(sent) == limits
    assert request_limits.of_the_request_being_processed() == request_limits.RequestLimits()  # nobody's
