"""Multi-token prediction (MTP): a layer of the model's own checkpoint that drafts tokens from the model's states.

Its row at a position reads the model's state there and the token after it, and predicts the token after that one, as
an EAGLE head does (eagle.py). For more than one draft the same layer reads what it computed for the draft before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

METHOD = "mtp"  # what vLLM makes of deepseek_mtp, mimo_mtp and others


@dataclasses.dataclass(frozen=True)
class Form:
    """What vLLM's class of such layers calls its parts.

    Attributes:
      target: the model that it is for.
      layers: the layers, in the class's model.
      token_norm: the norm of the token's embedding.
      state_norm: of the model's state.
      projection: what joins the two.
      embedding_first: whether the embedding stands in front of the state there.
      norm: of the decoder layer's result, in front of the output matrix; None: there is none.
      next_reads_normed: whether the next draft reads the result behind that norm, not the one in front of it.
      output: the output matrix, in the layer; None: the model's.
      rotates_as_model: whether the layer is to have the model's rotary embedding. ERNIE's checkpoints rotate
        neighbours, which vLLM's class for them does not.
      scales_float16: whether layers of this kind divide what they add to the residual stream by
        routed_scaling_factor in float16, and the model's first one the stream itself.
    """

    target: str
    layers: str
    token_norm: str
    state_norm: str
    projection: str
    embedding_first: bool
    norm: str | None
    next_reads_normed: bool
    output: str | None
    rotates_as_model: bool = False
    scales_float16: bool = False


_OF_DEEPSEEK = Form(
    target="DeepseekV3ForCausalLM",
    layers="layers",
    token_norm="enorm",
    state_norm="hnorm",
    projection="eh_proj",
    embedding_first=True,
    norm="shared_head.norm",
    next_reads_normed=False,
    output="shared_head.head",
    scales_float16=True,
)
# By what vLLM calls the architecture of the layers.
FORMS = {
    "DeepSeekMTPModel": _OF_DEEPSEEK,
    "Glm4MoeMTPModel": dataclasses.replace(_OF_DEEPSEEK, target="Glm4MoeForCausalLM", scales_float16=False),
    "ErnieMTPModel": Form(
        target="Ernie4_5_MoeForCausalLM",
        layers="layers",
        token_norm="mtp_emb_norm",
        state_norm="mtp_hidden_norm",
        projection="mtp_linear_proj",
        embedding_first=True,
        norm=None,
        next_reads_normed=False,
        output=None,
        rotates_as_model=True,
    ),
    "MiMoMTPModel": Form(
        target="MiMoForCausalLM",
        layers="mtp_layers",
        token_norm="token_layernorm",
        state_norm="hidden_layernorm",
        projection="input_proj",
        embedding_first=False,
        norm="final_layernorm",
        next_reads_normed=True,
        output=None,
    ),
}


def form_of(config: Any) -> Form:
    """Of the layers that a VllmConfig's drafts come from."""
    return FORMS[config.speculative_config.draft_model_config.hf_config.architectures[0]]


def refusals(config: Any) -> list[str]:
    """What of a VllmConfig with such drafts is not supported."""
    model, speculative, found = config.model_config, config.speculative_config, []
    head = speculative.draft_model_config
    architecture, name = (head.hf_config.architectures or ["none"])[0], "--speculative-config"
    form = FORMS.get(architecture)
    if form is None or model.architecture != form.target:
        targets = ", ".join(form.target for form in FORMS.values())
        found.append(f"{name}: {METHOD}: expected a model of {targets}, got {model.architecture}")
    if head.model != model.model:
        found.append(f"{name}: model: expected none with {METHOD}, whose layer is the model's own, got {head.model}")
    if (layers := getattr(model.hf_config, "num_nextn_predict_layers", None)) != 1:
        found.append(f"{name}: {METHOD}: expected one MTP layer (num_nextn_predict_layers: 1), got {layers}")
    # What --quantization rounds has its own name by now.
    if (got := speculative.quantization) not in (None, model.quantization, "fp8" if model.quantization else None):
        found.append(f"{name}: quantization: expected the model's, {model.quantization}, got {got}")
    return found
