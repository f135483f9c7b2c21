"""LoRA adapters: tokens beside transformers' with the adapter's product added to the weights."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.vllm import engines, processes, tiny
from tests.vllm.engines import greedy
from vllm import SamplingParams, TokensPrompt
from xla_gpu._runtime import cuda_driver

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LENGTHS = (5, 37, 130, 12)
NEW = 16


def write(folder: Path, model, modules, rank: int, seed: int, part: str = "", **settings) -> str:
    """An adapter for ``modules`` of a transformers model, or of a part of it, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(modules)) and part in name:
            n, k = module.weight.shape
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, k, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * 0.2
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    names = sorted({module.rpartition(".")[2] for module in modules})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def add(model, adapter: str) -> None:
    """Adds an adapter's product to the weights of transformers' model."""
    from safetensors.torch import load_file

    scale, found = 2.0, load_file(str(Path(adapter) / "adapter_model.safetensors"))
    modules = dict(model.named_modules())
    for name in {key.partition(".lora_")[0] for key in found}:
        weight = modules[name.removeprefix("base_model.model.")].weight
        weight.data += scale * found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"]


def expected(folder: str, adapter: str | None, prompts, new: int = NEW) -> list[list[int]]:
    """Greedy tokens of transformers with an adapter."""
    reference = tiny.Reference(folder)
    if adapter is not None:
        add(reference.model, adapter)
    return [reference.greedy(prompt, new) for prompt in prompts]


def tokens(llm, prompts, adapters, params=None) -> list[list[int]]:
    wrapped = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(wrapped, params or greedy(NEW), lora_request=list(adapters), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory) -> list[LoRARequest]:
    """Of all layers, of some and of a smaller rank, and of others."""
    model, folder = tiny.Reference(llama).model, tmp_path_factory.mktemp("adapters")
    kinds = [(ATTENTION + MLP, 8), (("q_proj", "v_proj"), 3), (("k_proj", "up_proj", "o_proj"), 4)]
    paths = [write(folder / str(i), model, modules, rank, i) for i, (modules, rank) in enumerate(kinds)]
    return [LoRARequest(f"adapter-{index}", index + 1, path) for index, path in enumerate(paths)]


@pytest.fixture(scope="module")
def reference(llama, adapters):
    """Tokens of each adapter, by its name, and without one."""
    prompts = tiny.prompts(LENGTHS)
    found = {one.lora_name: expected(llama, one.lora_path, prompts) for one in adapters}
    found[None] = expected(llama, None, prompts)
    assert len({str(value) for value in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def llm(llama):
    return engines.make(llama, enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8)


def test_each_request_has_its_own(llm, adapters, reference):
    """Three adapters and none, where a step has room for two; then once more, out of the prefix cache."""
    prompts = tiny.prompts(LENGTHS)
    requests = [(index, one) for index in range(len(prompts)) for one in (*adapters, None)]
    for _ in range(2):
        got = tokens(llm, [prompts[index] for index, _ in requests], [one for _, one in requests])
        for (index, one), found in zip(requests, got, strict=True):
            assert found == reference[one and one.lora_name][index], (index, one)
    assert engines.compiled_since_start(llm) == 0
    engines.state_is_released(llm)


def test_adapters_are_read_forgotten_and_pinned(llm, adapters, reference, llama, tmp_path):
    """As the server does it: more of them than the host keeps, and a slot that another adapter has by now."""
    prompts, engine = tiny.prompts(LENGTHS), llm.llm_engine
    for known in engine.list_loras():
        assert engine.remove_lora(known)
    assert engine.list_loras() == set()
    assert not engine.remove_lora(1)
    assert engine.add_lora(adapters[0])
    assert engine.pin_lora(1)
    assert not engine.pin_lora(2)
    more = LoRARequest("more", 4, adapters[2].lora_path)
    for one in (adapters[1], adapters[2], more):
        assert engine.add_lora(one)
    assert engine.list_loras() == {1, 3, 4}  # three at most, of which the first was pinned
    for one, name in ((more, "adapter-2"), (adapters[1], "adapter-1"), (adapters[0], "adapter-0")):
        assert tokens(llm, prompts[:2], [one] * 2) == reference[name][:2]
    assert engine.list_loras() == {1, 2, 4}
    # Gone while a request has it: it is read again.
    assert engine.remove_lora(1)
    assert tokens(llm, prompts, [adapters[0]] * len(prompts)) == reference["adapter-0"]
    assert engines.compiled_since_start(llm) == 0


def test_gone_while_a_request_runs(llm, adapters, reference):
    engine, prompts = llm.llm_engine, tiny.prompts(LENGTHS)
    for index, one in enumerate((adapters[1], adapters[0])):
        engine.add_request(f"gone-{index}", {"prompt_token_ids": prompts[index]}, greedy(NEW), lora_request=one)
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 4:
            assert engine.remove_lora(adapters[0].lora_int_id)
        if steps == 6:
            assert engine.remove_lora(adapters[1].lora_int_id)
            assert engine.add_lora(adapters[2])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
    assert finished == {"gone-0": reference["adapter-1"][0], "gone-1": reference["adapter-0"][1]}


WAITING = {"additional_config": {"token_buckets": [8, 64], "async_scheduling": False}}
NGRAMS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}


@pytest.mark.parametrize("options", [{}, WAITING, NGRAMS], ids=["asynchronous", "waiting", "drafts"])
def test_files_that_are_gone(options, llama, adapters, reference, tmp_path):
    """Requests whose adapter cannot be read again end, those that run and those that wait; others go on."""
    llm = engines.make(llama, enable_lora=True, max_lora_rank=8, max_loras=2, max_num_seqs=4, **options)
    engine, prompts = llm.llm_engine, tiny.prompts(LENGTHS)
    folder = tmp_path / "gone"
    shutil.copytree(adapters[0].lora_path, folder)
    names = {"gone": LoRARequest("gone", 9, str(folder)), "other": adapters[1], "none": None}
    expected = {"other": reference[adapters[1].lora_name], "none": reference[None]}
    assert tokens(llm, prompts[:1], [names["gone"]]) == reference[adapters[0].lora_name][:1]

    def finished(remove_at: int) -> dict[str, object]:
        for index, prompt in enumerate(prompts):
            for name, adapter in names.items():
                params = greedy(NEW, logprobs=1, prompt_logprobs=0)
                engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params, lora_request=adapter)
        found, steps = {}, 0
        while engine.has_unfinished_requests():
            steps += 1
            if steps == remove_at:
                assert engine.remove_lora(9)
                shutil.rmtree(folder)
            found |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        return found

    found = finished(remove_at=6)
    assert len(found) == len(prompts) * len(names)
    ended = [name for name, output in found.items() if output.finish_reason in ("error", "abort")]
    assert ended and all(name.startswith("gone") for name in ended)
    for name, wanted in expected.items():
        assert [list(found[f"{name}-{index}"].token_ids) for index in range(len(prompts))] == wanted
    # Nothing that was stored without the adapter is taken for its own when it is back.
    shutil.copytree(adapters[0].lora_path, folder)
    for again in (0, 1):
        got = tokens(llm, prompts, [names["gone"]] * len(prompts))
        assert got == reference[adapters[0].lora_name], again
    engines.state_is_released(llm)
    assert engines.compiled_since_start(llm) == 0


def test_sampling_with_an_adapter(llm, adapters):
    """Prompt log-probabilities, several tokens of a seed, and a neighbour with another adapter."""
    prompt = tiny.prompts((40,))[0]
    wrapped = TokensPrompt(prompt_token_ids=prompt)
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    alone = llm.generate(wrapped, params, lora_request=adapters[0], use_tqdm=False)[0]
    beside = llm.generate([wrapped] * 2, params, lora_request=list(adapters[:2]), use_tqdm=False)
    plain = llm.generate(wrapped, params, use_tqdm=False)[0]

    def described(output):
        scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        return [list(one.token_ids) for one in output.outputs], scores

    assert described(beside[0])[0] == described(alone)[0]
    assert described(beside[0])[1] == pytest.approx(described(alone)[1], abs=1e-4)
    assert described(beside[1]) != described(alone) != described(plain)


REFUSED = [
    ({"r": 16, "rank": 16}, "LoRA rank 16 is greater than max_lora_rank 8"),
    ({"use_dora": True}, "DoRA"),
    ({"alpha_pattern": {"q_proj": 3}}, "adapter wrong: alpha_pattern: expected none in adapter_config.json"),
    ({"modules": ("lm_head",)}, "expected target modules in .* but received .'lm_head'"),
    ({"wide": True}, r"q_proj: expected lora_A and lora_B of shapes \(4, 64\) and \(64, 4\), got \(4, 63\) and"),
    ({"infinite": True}, "q_proj: expected numbers that torch.float32 holds, got others"),
    ({"gone": True}, "Loading lora wrong failed: No adapter found for"),
    ({"cut": True}, "adapter wrong: expected PEFT's settings in adapter_config.json, got"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=lambda value: next(iter(value)) if value else "")
def test_an_adapter_that_does_not_fit(llm, llama, tmp_path, changes, text):
    from safetensors.torch import load_file

    model, settings = tiny.Reference(llama).model, dict(changes)
    wide, infinite, gone, cut = (settings.pop(name, False) for name in ("wide", "infinite", "gone", "cut"))
    modules, rank = settings.pop("modules", ("q_proj",)), settings.pop("rank", 4)
    path = write(tmp_path, model, modules, rank, 0, **settings)
    file = tmp_path / "adapter_model.safetensors"
    if wide or infinite:
        tensors = load_file(str(file))
        name = next(name for name in sorted(tensors) if "lora_A" in name)
        tensors[name] = tensors[name][:, 1:].contiguous() if wide else tensors[name] / 0
        save_file(tensors, str(file))
    if gone:
        path += "/none"
    if cut:
        (tmp_path / "adapter_config.json").write_text('{"r": 4, ')
    with pytest.raises(Exception, match=text):
        llm.llm_engine.add_lora(LoRARequest("wrong", 9, path))
    assert 9 not in llm.llm_engine.list_loras()
    assert len(tokens(llm, [[5, 6, 7]], [None])[0]) == NEW


# Models whose joined layers differ, a process for each; of a model with experts the other layers; quantised weights;
# two devices.
PROGRAM = """
import sys
from pathlib import Path
from tests.vllm import engines, test_lora, test_quantization, tiny
from vllm.lora.request import LoRARequest
name, folder, modules, options = sys.argv[1], sys.argv[2], eval(sys.argv[3]), eval(sys.argv[4])
if name in test_quantization.LAYOUTS:
    saved, meant = map(str, test_quantization.save(Path(folder) / "model", name))
else:
    saved = meant = tiny.save(name, Path(folder) / "model")
path = test_lora.write(Path(folder) / "adapter", tiny.Reference(meant).model, modules, 4, 1)
prompts = tiny.prompts(test_lora.LENGTHS)
expected = test_lora.expected(meant, path, prompts), test_lora.expected(meant, None, prompts)
llm = engines.make(saved, enable_lora=True, **options)
got = [test_lora.tokens(llm, prompts, [one] * 4) for one in (LoRARequest("one", 1, path), None)]
print("RESULT", list(expected) == got and got[0] != got[1], engines.compiled_since_start(llm), got, expected)
"""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MODELS = [
    ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}),
    ("qwen3_moe", ATTENTION, {"max_loras": 3}),
    ("qwen3", ATTENTION + MLP, {}),
    ("llama", ATTENTION, {"speculative_config": NGRAM}),
    ("awq", ATTENTION + MLP, {}),
    ("mistral", ATTENTION + MLP, {"tensor_parallel_size": 2, "max_loras": 2}),
    ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {"tensor_parallel_size": 2}),
    ("fp8-blocks", ATTENTION + MLP, {"tensor_parallel_size": 2}),
    # Copies of kv heads; in the second one's checkpoint q, k and v are one matrix.
    ("llama", ATTENTION + MLP, {"tensor_parallel_size": 4}),
    ("phi3", ("qkv_proj", "o_proj"), {"tensor_parallel_size": 4}),
]


@pytest.mark.parametrize(("name", "modules", "options"), MODELS)
def test_models(name, modules, options, tmp_path):
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU" and len(cuda_driver.driver().gpus) < options.get(
        "tensor_parallel_size", 1
    ):
        pytest.skip("needs two GPUs")
    result = processes.run(["-c", PROGRAM, name, str(tmp_path), repr(modules), repr(options)])
    equal, compiled, details = result.line().split(maxsplit=2)
    assert equal == "True", details
    assert compiled == "0"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_dtype": "bfloat16"}, "--lora-dtype: expected the model's, torch.float32, got torch.bfloat16"),
    ],
)
def test_refused_at_start(llama, options, text):
    with pytest.raises(Exception, match=text):
        engines.make(llama, enable_lora=True, **options)


def test_models_without_adapters_are_refused(tmp_path):
    with pytest.raises(Exception, match="--enable-lora: expected a model that vLLM has LoRA for, got Falcon"):
        engines.make(tiny.save("falcon", tmp_path), enable_lora=True)


def test_the_server(llama, adapters, reference, tmp_path, monkeypatch):
    """An adapter from the start, one that is loaded and unloaded while the server runs, and one that is not there."""
    from tests.vllm.test_server import GREEDY, running

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    prompts = tiny.prompts(LENGTHS)
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    modules = ("--lora-modules", f"first={adapters[0].lora_path}")

    with running(llama, tmp_path / "log", *options, *modules) as server:

        def post(path: str, **body) -> str:
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{server.url}/v1/{path}", json.dumps(body).encode(), headers), timeout=60
            ) as response:
                return response.read().decode()

        def stream(case: tuple[int, str]) -> list[int]:
            return server.stream(model=case[1], prompt=prompts[case[0]], max_tokens=NEW, **GREEDY)

        post("load_lora_adapter", lora_name="second", lora_path=adapters[1].lora_path)
        names = {"first": "adapter-0", "second": "adapter-1", "tiny": None}
        cases = [(index, name) for index in range(len(prompts)) for name in names]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(stream, cases))
        assert got == [reference[names[name]][index] for index, name in cases]
        post("unload_lora_adapter", lora_name="second")
        for path, body, status in (
            ("completions", {"model": "second", "prompt": [5]}, 404),
            ("load_lora_adapter", {"lora_name": "none", "lora_path": str(tmp_path)}, 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as failure:
                post(path, **body)
            with failure.value:
                assert failure.value.code == status
        assert stream((1, "first")) == reference["adapter-0"][1]
