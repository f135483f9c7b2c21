"""What engines over several CPU devices do. SPMD is for a whole process, so this is one: test_tensor_parallel.py.

    PJRT_DEVICE=CPU python -m tests.vllm.tensor_parallel DEVICES FOLDER [OTHER ...]
    PJRT_DEVICE=CPU python -m tests.vllm.tensor_parallel --enable-expert-parallel DEVICES FOLDER [FOLDER ...]

One line of output starts with "RESULT " and is JSON: of the first model all that ``generate`` has, of others the greedy
tokens, or why they were refused; with whole experts on each device that of all models, and what ``grouped`` has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tests.common import machine
from tests.vllm import processes, tiny
from tests.vllm.engines import compiled_since_start, greedy, make, metric, random, run, runner_of, tokens

PROMPTS = tiny.prompts((5, 70, 33, 1))
NEW_TOKENS = 12
PENALISED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Of tests that read in XLA's programs what goes between devices.
ON_A_CPU = pytest.mark.skipif(
    os.environ.get("PJRT_DEVICE", "").upper() == "GPU",
    reason="on GPUs sums are calls of this library, and what XLA moves has other names",
)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def generate(llm) -> dict:
    """Tokens and log-probabilities: greedy, with all kinds of sampling, prompts read in chunks."""
    outputs = run(llm, PROMPTS[:2], greedy(2, logprobs=3))
    (prompt,) = run(llm, PROMPTS[2:3], greedy(1, prompt_logprobs=3))
    return {
        "greedy": tokens(llm, PROMPTS, greedy(NEW_TOKENS)),
        "sampled": tokens(llm, PROMPTS[:2], [random(8, seed=3), random(8, **PENALISED)]),
        "logprobs": [[likely(step) for step in o.outputs[0].logprobs] for o in outputs],
        "prompt_logprobs": [likely(step) for step in prompt.prompt_logprobs[1:]],
    }


def likely(step) -> list[list[float]]:
    """Of vLLM's log-probabilities at one place the three highest, and their tokens."""
    ranked = sorted(step.items(), key=lambda entry: entry[1].rank)[:3]
    return [[token, entry.logprob] for token, entry in ranked]


def draft(llm) -> list[list[int]]:
    """Tokens of few, of which some come again."""
    few = {"allowed_token_ids": [70, 71, 72]}
    return tokens(llm, PROMPTS, [greedy(24, **few), random(24, **few, seed=3), *[greedy(24)] * 2])


@contextlib.contextmanager
def cache_shardings() -> Iterator[list[str]]:
    """How the KV caches that are made meanwhile are divided, as torch_xla says it.

    On a GPU they are torch_xla's tensors until the first programs have run.
    """
    import torch_xla

    from xla_gpu.vllm.kv_cache import KVCaches

    found: list[str] = []
    make_caches = KVCaches.__init__

    def made(self: KVCaches, *arguments: object) -> None:
        make_caches(self, *arguments)
        found.extend(torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in self.tensors)

    KVCaches.__init__ = made
    try:
        yield found
    finally:
        KVCaches.__init__ = make_caches


def main(devices: int, folder: str, *others: str) -> None:
    with cache_shardings() as caches:
        llm = make(folder, tensor_parallel_size=devices)
    result = {**generate(llm), "compiled": compiled_since_start(llm)}
    if devices > 1:
        import torch_xla

        runner, spec = runner_of(llm), torch_xla._XLAC._get_xla_sharding_spec
        result["caches"] = caches
        layers = runner.model.modules()
        result["kv_heads"] = [layer.num_kv_heads for layer in layers if isinstance(layer, AttentionLayerBase)]
        result["weights"] = {name: spec(parameter) for name, parameter in runner.model.named_parameters()}
    drafting = make(folder, tensor_parallel_size=devices, speculative_config=DRAFTS)
    result["drafted"] = draft(drafting), metric(drafting, ACCEPTED) > 0
    result["others"] = [greedy_tokens(other, devices) for other in others]
    print("RESULT " + json.dumps(result))


def with_whole_experts(devices: int, *folders: str) -> None:
    result = {
        "tokens": [greedy_tokens(folder, devices, enable_expert_parallel=True) for folder in folders],
        "sharding": SHARDING,
        "grouped": grouped(),
    }
    print("RESULT " + json.dumps(result))


# Of the experts' parameters of all models, as torch_xla says it.
SHARDING: list[str] = []


def greedy_tokens(folder: str, devices: int, **options: object) -> list[list[int]] | str:
    import torch_xla

    try:
        llm = make(folder, tensor_parallel_size=devices, **options)
    except Exception as error:
        return str(error)
    spec = torch_xla._XLAC._get_xla_sharding_spec
    parameters = runner_of(llm).model.named_parameters()
    SHARDING.extend(f"{name} {spec(parameter)}" for name, parameter in parameters if ".experts.w" in name)
    return tokens(llm, PROMPTS, greedy(NEW_TOKENS))


def grouped() -> float:
    """What experts by grouped_linear, in bfloat16, each device's with the others', differ by from those of one device.

    With what must not reach other rows infinite: an expert that no row is sent to, and one row.
    """
    import torch_xla

    from xla_gpu.vllm import expert_products, moe, routing, tensor_parallel
    from xla_gpu.vllm.expert_matrices import Matrices

    devices, device = tensor_parallel.active(), torch_xla.device()
    torch.manual_seed(0)
    num_experts, hidden, width, rows = 8, 64, 48, 40
    shapes = {"w13_weight": (2 * width, hidden), "w2_weight": (hidden, width), "w13_bias": (2 * width,)}
    made = {name: (torch.randn(num_experts, *shape) / 8).bfloat16() for name, shape in shapes.items()}
    made["w2_weight"][5] = float("inf")
    x, router = torch.randn(rows, hidden).bfloat16(), torch.randn(rows, num_experts)
    x[3], router[:, 5] = float("inf"), -1e9
    weights, chosen = routing.softmax(router, 2, True)
    placed = {name: devices.mark(tensor.to(device), 0) for name, tensor in made.items()}
    placed = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in placed.items()}
    layer = SimpleNamespace(activation="silu", has_whole_experts=True)
    operands = [devices.mark(tensor.to(device)) for tensor in (x, weights, chosen)]
    w13 = Matrices(placed["w13_weight"], bias=placed["w13_bias"])
    parts = moe.on_each(devices, layer, operands[0], w13, Matrices(placed["w2_weight"]), *operands[1:])
    got = devices.mark(devices.sum(parts)).cpu().float()
    wide = {name: tensor.float() for name, tensor in made.items()}
    matrices = Matrices(wide["w13_weight"], bias=wide["w13_bias"]), Matrices(wide["w2_weight"])
    expected = expert_products.weighted_sum(x.float(), *matrices, weights, chosen, "silu")
    others = [row for row in range(rows) if row != 3]
    return ((got - expected)[others].norm() / expected[others].norm()).item()


def run_on(devices: int, folders: list[str], dump: Path, *options: str) -> dict:
    """What this program says with ``options`` and ``folders``, and the texts of XLA's programs.

    Those that hold attention, and that of the layer of ``grouped``.
    """
    result, texts = run_module("tensor_parallel", devices, [*options, str(devices), *folders], dump)
    programs = [text for text in texts.values() if "xla_gpu_paged_attention" in text]
    layers = [text for text in texts.values() if "xla_gpu_grouped_linear" in text]
    return {**result, "programs": programs, "grouped_layers": layers}


def run_module(name: str, devices: int, arguments: list[str], dump: Path) -> tuple[dict, dict[str, str]]:
    """What a module of this folder says in a process of its own, and the texts of XLA's programs by file name.

    ``arguments`` say over how many devices; a machine with fewer GPUs skips the test.
    """
    if os.environ.get("PJRT_DEVICE", "").upper() == "GPU" and machine.gpu_count() < devices:
        pytest.skip(f"{devices} GPUs are needed, this machine has {machine.gpu_count()}")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text"
    done = processes.run(["-m", f"tests.vllm.{name}", *arguments], 1200, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.line()), {path.name: path.read_text() for path in dumped(dump)}


def dumped(folder: Path) -> list[Path]:
    """The texts of XLA's programs in a folder."""
    return list(folder.glob("*after_optimizations.txt"))


def exchanged(program: str) -> list[tuple[str, str]]:
    """What goes between the devices: shapes, and the operations that move them."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= (\S+)\{{\S* ({kinds})\(", program)


if __name__ == "__main__":
    if sys.argv[1] == "--enable-expert-parallel":
        with_whole_experts(int(sys.argv[2]), *sys.argv[3:])
    else:
        main(int(sys.argv[1]), *sys.argv[2:])
