"""What a start leaves for the next one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch_xla

from xla_gpu.vllm import compile_cache


def drafts_of(number, width):
    """Of n-grams; with a width, of a head that has it."""
    if width is None:
        return SimpleNamespace(method="ngram", num_speculative_tokens=number)
    head = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": width}))
    return SimpleNamespace(method="eagle", num_speculative_tokens=number, draft_model_config=head)


def config(**changes):
    sizes = {"max_model_len": 256, "path": "/a", "max_num_seqs": 8, "hidden_size": 64, **changes}
    hf_config = SimpleNamespace(to_dict=lambda: {"_name_or_path": sizes["path"], "hidden_size": sizes["hidden_size"]})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf_config,
            max_model_len=sizes["max_model_len"],
            max_logprobs=20,
            dtype="bfloat16",
            quantization=None,
            logprobs_mode="raw_logprobs",
        ),
        cache_config=SimpleNamespace(block_size=16, gpu_memory_utilization=0.9, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=sizes["max_num_seqs"], max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=sizes.get("devices", 1), enable_expert_parallel=sizes.get("whole_experts", False)
        ),
        speculative_config=sizes.get("drafts") and drafts_of(sizes["drafts"], sizes.get("head")),
        lora_config=None,
        additional_config={},
    )


@pytest.fixture
def preloaded(monkeypatch):
    calls = []
    monkeypatch.setattr(compile_cache.executable_cache, "preload", lambda *args: calls.append(args))
    monkeypatch.setattr(compile_cache.executable_cache, "finish_preloading", lambda: calls.append("finished"))
    monkeypatch.setattr(compile_cache.executable_cache, "used", lambda: ["b", "a", "b"])
    return calls


def test_the_next_start_loads_what_this_one_used(preloaded, tmp_path):
    environ = {"PJRT_DEVICE": "GPU", compile_cache.ENVIRONMENT: str(tmp_path)}
    folder = compile_cache.use(environ)
    first = compile_cache.Start(folder, config())
    first.preload(torch_xla.device(), 4)
    size, mib = 100 << 30, 1 << 20
    assert first.choose_cache_bytes(size) == size and preloaded == []
    first.finish()
    second = compile_cache.Start(folder, config(path="/elsewhere"))
    second.preload(torch_xla.device(), 4)
    assert preloaded == ["finished", (["a", "b"], 4)]
    # A little more memory, or less, is left alone: with other caches no program is the same.
    for available in (size - 64 * mib, size + 300 * mib):
        assert compile_cache.Start(folder, config()).choose_cache_bytes(available) == size
    for available in (size - 65 * mib, size + 500 * mib):
        assert compile_cache.Start(folder, config()).choose_cache_bytes(available) == available
    sizes = [{"max_num_seqs": 9}, {"hidden_size": 65}, {"max_model_len": 128}]
    for others in (*sizes, {"drafts": 3}, {"whole_experts": True}):
        assert compile_cache.Start(folder, config(**others)).executables == []
    with_head = {"drafts": 3, "head": 64, "devices": 2}
    compile_cache.Start(folder, config(**with_head)).finish()
    assert compile_cache.Start(folder, config(**with_head)).executables == ["a", "b"]
    for changed in ({"devices": 1}, {"devices": 4}, {"head": 65}, {"head": None}, {"drafts": 2}):
        assert compile_cache.Start(folder, config(**{**with_head, **changed})).executables == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"executables": 1}', '{"kv_cache_bytes": "x"}'])
def test_a_record_that_is_none(preloaded, tmp_path, text):
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / f"{compile_cache.configuration_hash(config())}.json").write_text(text)
    start = compile_cache.Start(tmp_path, config())
    assert start.executables == [] and start.choose_cache_bytes(100) == 100
    compile_cache.Start(None, config()).finish()
