"""Tiny models with a layer of multi-token prediction (MTP), and the drafts that one gives by its definition."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from tests.vllm import tiny


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of checkpoints: what their MTP layer's tensors are called, and how it computes.

    Attributes:
      base: the tiny model.
      architecture: vLLM's, in the place of transformers'.
      prefix: of the layer's tensors, with the model's number of layers.
      norms: of the token's embedding, of the state, and of the result, if there is one.
      projection: of the first two, joined.
      embedding_first: in the join.
      reads_normed: whether the layer reads the model's state behind its norm, and its own result in front of its norm;
        otherwise the other way round.
    """

    base: str
    architecture: str
    prefix: str
    norms: tuple[str, ...]
    projection: str
    embedding_first: bool
    reads_normed: bool


_DEEPSEEK = Kind(
    base="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    prefix="model.layers.{}.",
    norms=("enorm", "hnorm", "shared_head.norm"),
    projection="eh_proj",
    embedding_first=True,
    reads_normed=True,
)
KINDS = {
    "mimo": Kind(
        base="qwen2",
        architecture="MiMoForCausalLM",
        prefix="model.mtp_layers.0.",
        norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
        projection="input_proj",
        embedding_first=False,
        reads_normed=False,
    ),
    "deepseek": _DEEPSEEK,
    # Without experts in the layer.
    "ernie": Kind(
        base="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        prefix="model.mtp_block.0.",
        norms=("mtp_emb_norm", "mtp_hidden_norm"),
        projection="mtp_linear_proj",
        embedding_first=True,
        reads_normed=True,
    ),
    "glm": dataclasses.replace(_DEEPSEEK, base="glm4_moe", architecture="Glm4MoeForCausalLM"),
}


def stored_name(kind: str, num_layers: int, name: str) -> str:
    """What a checkpoint of a model with so many layers calls a tensor of its MTP layer."""
    if name.startswith("mtp_"):  # ERNIE's, with the layer's number behind the name
        return f"model.{name.replace('.', '.0.', 1)}"
    return KINDS[kind].prefix.format(num_layers) + name


def layer_of(folder: str) -> t.PreTrainedModel:
    """A decoder layer as an MTP layer has one, as a model of transformers without a norm behind it."""
    config = t.AutoConfig.from_pretrained(folder)
    if config.model_type == "ernie4_5_moe":
        size = config.hidden_size // config.num_attention_heads
        config = t.Ernie4_5Config(**{**config.to_dict(), "model_type": "ernie4_5", "head_dim": size})
    config.num_hidden_layers = 1
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    model = t.AutoModelForCausalLM.from_config(config).float().eval().model
    model.norm = nn.Identity()
    return model


def save(kind: str, folder: Path, sizes: Mapping[str, Any] | None = None, own_output: bool = False) -> str:
    """A model whose MTP layer has random weights.

    Args:
      kind: of KINDS.
      folder: of the checkpoint.
      sizes: in the place of the configuration's.
      own_output: the layer has another output matrix than the model.
    """
    target = tiny.save(KINDS[kind].base, folder, {"tie_word_embeddings": False, **(sizes or {})})
    generator = torch.Generator().manual_seed(7)
    layer = layer_of(target)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, tensor in layer.layers[0].state_dict().items()
    }
    hidden = layer.config.hidden_size
    tensors[f"{KINDS[kind].projection}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    for name in KINDS[kind].norms:
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    if own_output:
        tensors["shared_head.head.weight"] = torch.randn(tiny.VOCAB_SIZE, hidden, generator=generator) * 0.2
    return add(kind, target, tensors)


def save_copy(kind: str, folder: Path) -> str:
    """A model of one layer, and an MTP layer that computes what the model does, from the second token on.

    The embedding's rows are as they are after a norm.
    """
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if kind == "mimo":
        sizes["layer_types"] = ["full_attention"]
    if kind == "ernie":  # whose MTP layer is as the first one; vLLM wants one with experts too, which adds nothing here
        sizes["num_hidden_layers"] = 2
    target = tiny.save(KINDS[kind].base, folder, {"tie_word_embeddings": False, **sizes})
    path = Path(target) / "model.safetensors"
    stored = load_file(path)
    for name, tensor in stored.items():
        if name.startswith("model.layers.1.") and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()
    embedding = stored["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    stored["model.embed_tokens.weight"] = functional.rms_norm(embedding, (hidden,))
    save_file(stored, path, {"format": "pt"})
    of_layer = "model.layers.0."
    tensors = {name.removeprefix(of_layer): value for name, value in stored.items() if name.startswith(of_layer)}
    parts = [torch.eye(hidden), torch.zeros(hidden, hidden)]
    joined = parts if KINDS[kind].embedding_first else parts[::-1]
    tensors[f"{KINDS[kind].projection}.weight"] = torch.cat(joined, 1)
    # The model's own norm has ones too.
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in KINDS[kind].norms}
    return add(kind, target, tensors)


def add(kind: str, target: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Adds an MTP layer to a checkpoint."""
    path, described = Path(target) / "model.safetensors", Path(target) / "config.json"
    config = json.loads(described.read_text())
    stored = load_file(path)
    tensors = dict(tensors)
    if "shared_head.norm.weight" in tensors:
        tensors["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        tensors.setdefault("shared_head.head.weight", stored["lm_head.weight"])
    stored |= {stored_name(kind, config["num_hidden_layers"], name): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, path, {"format": "pt"})
    config |= {"architectures": [KINDS[kind].architecture], "num_nextn_predict_layers": 1}
    described.write_text(json.dumps(config))
    return target


def quantise(folder: str, stored: Path, quantize: Callable[[torch.Tensor], Any], settings: Mapping[str, Any]) -> str:
    """A checkpoint in ``stored`` of layers that are quantised, MTP's too; ``folder`` gets the weights that they mean.

    quantize: gives the tensors of a matrix by their names behind the layer's, and what they mean.
    """
    tensors, path = {}, Path(folder) / "model.safetensors"
    meant = load_file(path)
    for name, tensor in meant.items():
        plain = tensor.dim() != 2 or not name.startswith("model.layers.")
        if plain or any(part in name for part in (".gate.", "eh_proj", "embed_tokens", "shared_head")):
            tensors[name] = tensor
        else:
            made, meant[name] = quantize(tensor)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in made.items()}
    save_file(meant, path, {"format": "pt"})
    stored.mkdir()
    for file in Path(folder).glob("*.json"):
        (stored / file.name).write_bytes(file.read_bytes())
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return str(stored)


class Reference:
    """The drafts of an MTP layer after any tokens of a sequence, in float32, without a cache."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind = KINDS[kind]
        self.target = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        stored, layers = load_file(Path(folder) / "model.safetensors"), self.target.config.num_hidden_layers
        self.layer = layer_of(folder)
        own = list(self.layer.layers[0].state_dict())
        named = [*own, *(f"{name}.weight" for name in (*self.kind.norms, self.kind.projection))]
        self.weights = {name: stored[stored_name(kind, layers, name)] for name in named}
        self.layer.layers[0].load_state_dict({name: self.weights[name] for name in own})
        output = stored_name(kind, layers, "shared_head.head.weight")
        self.output = stored.get(output, stored["lm_head.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.target.config.rms_norm_eps)

    def _states(self, tokens: list[int]) -> torch.Tensor:
        """The model's, in front of its norm or behind it."""
        found: list[torch.Tensor] = []

        def note(_: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            found.append(result[0] if self.kind.reads_normed else given[0][0])

        hook = self.target.model.norm.register_forward_hook(note)
        self.target(torch.tensor([tokens]))
        hook.remove()
        return found[0]

    def _run(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what logits are computed from, what the next row reads) of each row."""
        embedded = self.target.model.embed_tokens.weight[torch.tensor(tokens)].clone()
        embedded[0] = 0
        token, state, *of_result = self.kind.norms
        parts = [self._norm(token, embedded), self._norm(state, states)]
        joined = torch.cat(parts if self.kind.embedding_first else parts[::-1], -1)
        projected = functional.linear(joined, self.weights[f"{self.kind.projection}.weight"])
        out = self.layer(inputs_embeds=projected[None], use_cache=False).last_hidden_state[0]
        normed = self._norm(of_result[0], out) if of_result else out
        return normed, out if self.kind.reads_normed else normed

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """The ``count`` drafts after ``tokens``, and how close the choice between the two most likely ones ever was."""
        states = self._states(tokens[:-1])
        read, drafts, closest = tokens[1:], [], float("inf")
        for _ in range(count):
            hidden, carried = self._run(read, states)
            best = functional.linear(hidden[-1], self.output).topk(2)
            closest = min(closest, float(best.values[0] - best.values[1]))
            drafts.append(int(best.indices[0]))
            # A row reads the state that the row before it carried.
            states, read = torch.cat([states, carried[-1:]]), [*read, drafts[-1]]
        return drafts, closest
