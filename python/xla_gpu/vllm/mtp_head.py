"""The layer that drafts tokens by multi-token prediction, called as vLLM's EAGLE heads are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear

from .eagle import same_matrix
from .mtp import Form, form_of


class MtpHead(nn.Module):  # type: ignore[misc]
    """The parts of vLLM's class that drafts need, and the model's embedding and output matrix.

    vLLM's own forward methods set rows to zero by a mask, whose number of rows XLA does not know when it compiles.

    Attributes:
      fc: what joins a token's embedding and a state.
      lm_head: the output matrix.
      logits_processor: vLLM's, which multiplies by it.
    """

    def __init__(self, form: Form, fc: ReplicatedLinear, layer: Any, model: Any, own: Any, random: bool) -> None:
        """Args as ``take`` has them; own: vLLM's class with its weights, of which ``layer`` is a layer."""
        super().__init__()
        self._form = form
        self.embed_tokens = model.model.embed_tokens
        self.token_norm = layer.get_submodule(form.token_norm)
        self.state_norm = layer.get_submodule(form.state_norm)
        self.fc = fc
        self.block = layer.mtp_block
        if form.rotates_as_model:
            self.block.self_attn.rotary_emb = model.model.layers[0].self_attn.rotary_emb
        self._scale = 1.0
        if form.scales_float16 and fc.weight.dtype is torch.float16:
            self._scale /= self.block.routed_scaling_factor
        self.norm = None if form.norm is None else layer.get_submodule(form.norm)
        self.lm_head = model.lm_head
        if form.output is not None:
            output = layer.get_submodule(form.output)
            if not random and not same_matrix(output, model.lm_head):
                self.lm_head = output
        self.logits_processor = own.model.logits_processor

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what logits are computed from, what the next draft reads) of each row, T[rows, hidden_size].

        Args:
          input_ids: the token after each row.
          positions: of the rows.
          hidden_states: T[rows, hidden_size], of the model, or what the row before gave.
        """
        # The first row's token is not read, as in training.
        embedded = torch.where((positions == 0)[:, None], 0.0, self.embed_tokens(input_ids))
        read = [self.token_norm(embedded), self.state_norm(hidden_states)]
        joined = self.fc(torch.cat(read if self._form.embedding_first else read[::-1], -1))
        if self._scale != 1.0:
            joined = joined * self._scale
        hidden, residual = self.block(positions=positions, hidden_states=joined, residual=None)
        hidden = residual + hidden
        normed = hidden if self.norm is None else self.norm(hidden)
        return normed, normed if self._form.next_reads_normed else hidden


def take(config: VllmConfig, own: Any, model: Any, random: bool) -> MtpHead:
    """The head of a VllmConfig.

    Args:
      config: whose drafts are of MTP.
      own: vLLM's class for the layers, with its weights, on the host.
      model: beside it.
      random: there is no checkpoint.
    """
    form = form_of(config)
    (layer,) = getattr(own.model, form.layers).values()
    plain = layer.get_submodule(form.projection)
    # As the EAGLE heads' fc is, which is divided between several devices.
    with set_current_vllm_config(config):
        fc = ReplicatedLinear(
            plain.in_features, plain.out_features, bias=False, params_dtype=plain.weight.dtype, return_bias=False
        )
    fc.weight = plain.weight
    return MtpHead(form, fc, layer, model, own, random)
