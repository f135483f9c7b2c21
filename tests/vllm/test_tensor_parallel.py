"""--tensor-parallel-size over two CPU devices: the tokens of one device, the model divided, no traffic but its sums."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vllm import engines, tiny
from tests.vllm.tensor_parallel import generate
from xla_gpu.vllm.tensor_parallel import Joined

LAYERS = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_devices(llama, tmp_path_factory) -> dict:
    """What tensor_parallel.py says, and the text of the programs that hold attention."""
    dump = tmp_path_factory.mktemp("hlo")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text",
    }
    command = [sys.executable, "-m", "tests.vllm.tensor_parallel", llama, "2"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    texts = [path.read_text() for path in dump.glob("*after_optimizations.txt")]
    return {
        **json.loads(line.removeprefix("RESULT ")),
        "programs": [t for t in texts if "xla_gpu_paged_attention" in t],
    }


def test_same_tokens_as_one_device(two_devices, engine):
    expected = generate(engine)
    assert two_devices["greedy"] == expected["greedy"]
    assert two_devices["sampled"] == expected["sampled"]
    torch.testing.assert_close(torch.tensor(two_devices["logprobs"]), torch.tensor(expected["logprobs"]))
    assert two_devices["compiled"] == 0


def test_the_model_is_divided(two_devices):
    assert two_devices["caches"] == ["{devices=[1,1,2,1]0,1}"] * LAYERS
    for name, spec in two_devices["weights"].items():
        divided = any(part in name for part in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"))
        assert spec.startswith("{devices=[2,1" if divided else "{replicated}"), (name, spec)


def test_devices_exchange_sums_and_logits_alone(two_devices):
    assert len(two_devices["programs"]) == 2  # of 8 and of 64 tokens
    for text in two_devices["programs"]:
        found = re.findall(r"= (\S+)\{\S* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text)
        (num_tokens,) = {shape.removeprefix("f32[2,").removesuffix(",64]") for shape, _ in found[: 2 * LAYERS]}
        assert num_tokens in ("8", "64")
        # On the CPU all_reduce is an all-gather and a call. The last one is of the logits, not of the head.
        assert found[: 2 * LAYERS] == [(f"f32[2,{num_tokens},64]", "all-gather")] * (2 * LAYERS)
        assert found[2 * LAYERS :] in ([("f32[8,320]", "all-gather")], [("f32[320,8]", "all-gather")])


def test_one_number_of_devices_for_a_process(engine, llama):
    with pytest.raises(
        Exception, match="--tensor-parallel-size: expected 1, which an engine of this process has, got 2"
    ):
        engines.make(llama, tensor_parallel_size=2)


def test_refused_models(tmp_path):
    folder = tiny.save("mixtral", tmp_path / "experts")
    with pytest.raises(Exception, match=r"a model with experts \(4\): expected none with --tensor-parallel-size 2"):
        engines.make(folder, tensor_parallel_size=2)
    folder = Path(tiny.save("llama", tmp_path / "quantised"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="quantised weights: expected none with --tensor-parallel-size 2"):
        engines.make(str(folder), tensor_parallel_size=2)


def test_joined_outputs():
    gate, up = torch.ones(3, 4), torch.zeros(3, 2)
    joined = Joined([gate, up])
    assert joined.shape == (3, 6)
    assert joined[..., :4] is gate and joined[..., 4:] is up and joined.split([4, 2], dim=-1) == (gate, up)
    with pytest.raises(NotImplementedError, match=r"a split into \[3, 3\] along -1, where the parts are \[4, 2\]"):
        joined.split([3, 3], dim=-1)
    with pytest.raises(NotImplementedError, match=r"the element .* of a joined layer's outputs"):
        joined[..., :3]
    with pytest.raises(AttributeError, match="the attribute float"):
        joined.float()
