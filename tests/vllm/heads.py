"""Tiny EAGLE heads, and the drafts that one gives by its definition: all rows at once, without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.vllm import tiny

# Layers of the model that an EAGLE-3 head reads, where its configuration says so.
STREAMS = (1, 3, 5)
OWN_VOCABULARY = 96


def config_of(folder: str) -> t.PretrainedConfig:
    return t.AutoConfig.from_pretrained(folder)


def save(method: str, target: str, folder: Path, **settings: Any) -> str:
    """A head with random weights for the model in ``target``; settings: of config.json."""
    own = settings.get("draft_vocab_size", OWN_VOCABULARY)
    generator = torch.Generator().manual_seed(7)
    model = config_of(target)
    hidden = settings.get("hidden_size", model.hidden_size)
    width = settings.get("intermediate_size", model.intermediate_size)
    size = settings.get("head_dim") or getattr(model, "head_dim", None) or hidden // model.num_attention_heads
    heads = model.num_attention_heads * size
    kv_heads = settings.get("num_key_value_heads", model.num_key_value_heads) * size
    inputs = 2 * hidden if method == "eagle3" else hidden
    shapes = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv_heads, inputs),
        "self_attn.v_proj": (kv_heads, inputs),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    layer = "midlayer" if method == "eagle3" else "layers.0"
    weights = {f"{layer}.{name}.weight": shape for name, shape in shapes.items()}
    weights["fc.weight"] = (hidden, 3 * model.hidden_size if method == "eagle3" else 2 * hidden)
    norms = [f"{layer}.post_attention_layernorm"]
    if method == "eagle3":
        weights["lm_head.weight"] = (own, hidden)
        if hidden != model.hidden_size:
            weights["embed_tokens.weight"] = (model.vocab_size, hidden)
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weights.items()}
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
    if method == "eagle3":
        chosen = torch.randperm(model.vocab_size, generator=generator)[:own].sort().values
        tensors["d2t"] = chosen - torch.arange(own)
        known = torch.zeros(model.vocab_size, dtype=torch.bool)
        known[chosen] = True
        tensors["t2d"] = known
    return write(method, target, folder, tensors, **settings)


def write(method: str, target: str, folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    described = config_of(target).to_dict()
    described |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    described.pop("layer_types", None)
    described.pop("sliding_window", None)
    if method == "eagle3":
        described |= {"draft_vocab_size": len(tensors["d2t"]), "eagle_aux_hidden_state_layer_ids": list(STREAMS)}
    described |= settings
    (folder / "config.json").write_text(json.dumps(described, default=str))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def as_speculators(folder: str, target: str) -> None:
    """Describes an EAGLE-3 head as the speculators library does."""
    path = Path(folder) / "config.json"
    layer = json.loads(path.read_text())
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    own = {name: layer.pop(name) for name in names if name in layer}
    described = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }
    path.write_text(json.dumps({**described, **own}))


def save_copy(method: str, folder: Path) -> tuple[str, str]:
    """A model and a head that computes what the model does, so that most of its drafts are right.

    The embedding's rows are as they are after a norm. For EAGLE the model is one layer, and the head that layer, whose
    rows begin with the second token. For EAGLE-3, whose layer adds to what it is given of the model alone, the model's
    tokens follow from the last one: the head's attention returns a row's own embedding, its MLP is the model's.
    """
    sizes = {"num_hidden_layers": 1 if method == "eagle" else 6, "num_key_value_heads": 4}
    target = tiny.save("llama", folder / "target", sizes)
    model = t.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    hidden = model.config.hidden_size
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(functional.rms_norm(embedding, (hidden,)))
        if method == "eagle3":
            for index, layer in enumerate(model.model.layers):
                layer.self_attn.o_proj.weight.zero_()
                if index:
                    layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(target)
    layer = {name: tensor.detach() for name, tensor in model.model.layers[0].state_dict().items()}
    one, none = torch.eye(hidden), torch.zeros(hidden, hidden)
    if method == "eagle":
        tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items() if name != "input_layernorm.weight"}
        tensors["fc.weight"] = torch.cat([one, none], 1)
        return target, write(method, target, folder / "head", tensors)
    own = {
        "self_attn.q_proj": torch.cat([6 * one, none], 1),
        "self_attn.k_proj": torch.cat([6 * one, none], 1),
        "self_attn.v_proj": torch.cat([one, none], 1),
        "self_attn.o_proj": one,
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.ones(hidden),
        "hidden_norm": torch.zeros(hidden),
    }
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in own.items()}
    tensors |= {f"midlayer.{name}": tensor for name, tensor in layer.items() if name.startswith("mlp")}
    tensors["fc.weight"] = torch.randn(hidden, 3 * hidden, generator=torch.Generator().manual_seed(3))
    tensors |= {"norm.weight": torch.ones(hidden), "lm_head.weight": model.lm_head.weight.detach()}
    tensors["d2t"] = torch.zeros(model.config.vocab_size, dtype=torch.int64)
    return target, write(method, target, folder / "head", tensors, norm_before_residual=True)


class Recorder:
    """What an engine drafts and accepts.

    Attributes:
      drafts: after each step of each request (all its tokens, its drafts).
      drafted: tokens that steps verified.
      accepted: of them.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.drafted = self.accepted = 0
        self._take, self._finish = runner.take_draft_token_ids, runner._drafter.finish
        runner.take_draft_token_ids, runner._drafter.finish = self._note_drafts, self._note_accepted

    def clear(self) -> None:
        self.drafts, self.drafted, self.accepted = [], 0, 0

    def _note_drafts(self) -> Any:
        taken = self._take()
        if taken is not None:
            table = self._runner.requests
            for req_id, drafts in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                self.drafts.append((table.tokens(table[req_id].slot).tolist(), list(drafts)))
        return taken

    def _note_accepted(self, output: Any) -> None:
        self._finish(output)
        for drafts, tokens in zip(output._rows.drafts, output.accepted, strict=True):
            self.drafted += len(drafts)
            self.accepted += max(0, len(tokens) - 1)


class Reference:
    """The drafts of a head after any tokens of a sequence, in float32."""

    def __init__(
        self, method: str, target: str, folder: str, window: int | None = None, streams: Sequence[int] = STREAMS
    ) -> None:
        """window: keys that a row's attention reads, where the model's does; vLLM's heads have the model's.

        streams: layers of the model that an EAGLE-3 head reads.
        """
        self.method, self.window, self.streams = method, window, streams
        self.target = t.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config = t.LlamaConfig(**json.loads((Path(folder) / "config.json").read_text()))
        self.weights = load_file(Path(folder) / "model.safetensors")
        self.layer = "midlayer" if method == "eagle3" else "layers.0"

    def _multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{self.layer}.{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[name if name == "norm.weight" else f"{self.layer}.{name}.weight"]
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        count, config = len(x), self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        rotary = t.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cos, sin = rotary(x, torch.arange(count)[None])
        query, key, value = (
            self._multiply(f"self_attn.{name}_proj", x).view(1, count, number, size).transpose(1, 2)
            for name, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = t.models.llama.modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
        key, value = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        if self.window is not None:
            mask = mask.triu(1 - self.window)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._multiply("self_attn.o_proj", out.transpose(1, 2).reshape(count, -1))

    def _run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what logits are computed from, what the next row reads) of each row."""
        embedding = self.weights.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        embedded = embedding[torch.tensor(tokens)]
        if self.method == "eagle":
            residual = functional.linear(torch.cat([embedded, states], -1), self.weights["fc.weight"])
            attended = self._attend(residual)
        else:
            residual = states
            norm = self._norm("hidden_norm", states)
            if getattr(self.config, "norm_before_residual", False):
                residual = norm
            attended = self._attend(torch.cat([self._norm("input_layernorm", embedded), norm], -1))
        residual = residual + attended
        x = self._norm("post_attention_layernorm", residual)
        gate, up = self._multiply("mlp.gate_proj", x), self._multiply("mlp.up_proj", x)
        out = residual + self._multiply("mlp.down_proj", functional.silu(gate) * up)
        return (out, out) if self.method == "eagle" else (self._norm("norm.weight", out), out)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """The ``count`` drafts after ``tokens``, and how close the choice between the two most likely ones ever was."""
        found = self.target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        if self.method == "eagle":
            states = found.last_hidden_state[0]
        else:
            joined = torch.cat([found.hidden_states[index][0] for index in self.streams], -1)
            states = functional.linear(joined, self.weights["fc.weight"])
        read, drafts, closest = tokens[1:], [], float("inf")
        for _ in range(count):
            hidden, carried = self._run(read, states)
            if self.method == "eagle":
                logits = self.target.lm_head(hidden[-1])
            else:
                logits = functional.linear(hidden[-1], self.weights["lm_head.weight"])
            best = logits.topk(2)
            closest = min(closest, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            drafts.append(token + int(self.weights["d2t"][token]) if self.method == "eagle3" else token)
            # A row reads the state that the row before it carried.
            states, read = torch.cat([states, carried[-1:]]), [*read, drafts[-1]]
        return drafts, closest
