"""The model on the device: read by vLLM's loaders on the host, then moved, or made of random numbers there."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from . import (
    divided_layers,
    draft_heads,
    eagle,
    encoders,
    images,
    latent_attention,
    layer_operators,
    mtp,
    mtp_head,
    tensor_parallel,
)

# vLLM's range of random weights (load format "dummy").
_DUMMY_RANGE = 1e-3

# What vLLM's models call an embedding of positions.
_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")


def load_model(config: VllmConfig, device: torch.device) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """The model of ``config`` with its weights on ``device``, the head that drafts tokens, and the encoder of images.

    The last two are None where there is none, or no request may have images.

    Raises:
      ValueError: the model has fewer positions than --max-model-len.
    """
    random = config.load_config.load_format == "dummy"
    model, tower = _parts(_on_host(config, config.model_config), config)
    length = config.model_config.max_model_len
    check_positions(model, length)
    latent_attention.take(model, config.model_config.dtype, random)
    take_operators(model, length)
    encoders.take(model, config.model_config.dtype)
    head = None
    if draft_heads.has_head(config):
        head = _head(config, model, random)
    if random:
        torch_xla.manual_seed(config.model_config.seed)
    move(model, device, random, config.parallel_config.enable_expert_parallel, head)
    if tower is not None:
        move(tower.eval(), device, random, divided=False)
    return model.eval(), head, tower


def _head(config: VllmConfig, model: nn.Module, random: bool) -> nn.Module:
    """The head that drafts tokens, on the host beside ``model``."""
    head = _on_host(config, config.speculative_config.draft_model_config)
    if config.speculative_config.method == mtp.METHOD:
        head = mtp_head.take(config, head, model, random)
    else:
        eagle.share_weights(model, head, random)
    length = draft_heads.head_length(config)
    check_positions(head, length)
    latent_attention.take(head, config.model_config.dtype, random)
    take_operators(head, length)
    return head


def _on_host(config: VllmConfig, model_config: Any) -> nn.Module:
    """A model with its weights; those that will be random are never touched here, so that they take no memory."""
    host = torch.device("cpu")
    if config.load_config.load_format == "dummy":
        with set_default_torch_dtype(model_config.dtype), host:
            model: nn.Module = initialize_model(vllm_config=config, model_config=model_config)
            process_weights_after_loading(model, model_config, host)
        return model
    # vLLM's loaders copy into slices of parameters, layer by layer: on the host that is done in place.
    config.load_config.device = "cpu"
    with set_current_vllm_config(config):  # some make layers while they load
        model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=model_config)
    return model


def _parts(model: Any, config: VllmConfig) -> tuple[nn.Module, nn.Module | None]:
    """Of a model that takes images too the model of text, and the rest of it.

    Where no request has images the rest is left out, and takes no memory.
    """
    if not config.model_config.is_multimodal_model:
        return model, None
    of_text: nn.Module = model.get_language_model()
    if not images.are_served(config.model_config):
        return of_text, None
    for name, module in model._modules.items():
        if module is of_text:
            model._modules[name] = None
    return of_text, model


def check_positions(model: nn.Module, max_model_len: int) -> None:
    """Raises ValueError where a table of positions ends before ``max_model_len``: XLA would read its last row instead.

    vLLM lets such a length through where VLLM_ALLOW_LONG_MAX_MODEL_LEN is set.
    """
    for name, module in model.named_modules():
        if (table := getattr(module, "cos_sin_cache", None)) is not None:
            positions = int(table.shape[0])
        elif hasattr(module, "long_short_cos_sin_cache"):  # two tables, one behind the other
            positions = int(module.max_position_embeddings)
        elif hasattr(module, "num_embeddings") and name.rpartition(".")[2] in _LEARNED_POSITIONS:
            positions = module.num_embeddings - int(getattr(module, "offset", 0))
            if (padding := getattr(module, "padding_idx", None)) is not None:  # RoBERTa's positions begin behind it
                positions -= padding + 1
        else:
            continue
        if positions < max_model_len:
            raise ValueError(
                f"xla_gpu.vllm: --max-model-len: expected at most {positions}, the positions that {name} has, "
                f"got {max_model_len}"
            )


def take_operators(model: nn.Module, max_model_len: int) -> None:
    """Has the layers use this library's operators, unless they are divided over several devices."""
    if tensor_parallel.active() is None:
        layer_operators.take(model, max_model_len)


def move(
    model: nn.Module,
    device: torch.device,
    random: bool = False,
    whole_experts: bool = False,
    head: nn.Module | None = None,
    divided: bool = True,
) -> None:
    """Puts parameters and buffers on ``device``, one after the other, so that the host's copies go early.

    A parameter that several modules share stays shared, which nn.Module.to does not promise across devices.

    Args:
      model: on the host.
      device: an XLA device.
      random: draw the floating-point parameters on the device instead of copying them.
      whole_experts: of several devices, each is to have experts of its own.
      head: one that drafts tokens, moved beside the model: what they share once.
      divided: several devices share the model; else each has all of it.
    """
    devices = tensor_parallel.active()
    if devices is not None and divided:
        divided_layers.divide(devices, model, random, whole_experts, head)
    moved: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # so that no id is used twice

    def on_device(tensor: torch.Tensor, draw: bool) -> torch.Tensor:
        if id(tensor) not in moved:
            kept.append(tensor)
            if draw and tensor.is_floating_point() and tensor.element_size() > 1:
                drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                moved[id(tensor)] = drawn.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE)
            else:
                moved[id(tensor)] = tensor.detach().to(device)
            if devices is not None:
                devices.place(tensor, moved[id(tensor)])
            if draw:
                torch_xla.sync()
            if isinstance(tensor, nn.Parameter):
                moved[id(tensor)] = nn.Parameter(moved[id(tensor)], requires_grad=False)
                if not draw:
                    tensor.data = torch.empty(0, dtype=tensor.dtype)
        return moved[id(tensor)]

    for module in (model if head is None else nn.ModuleList([model, head])).modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = on_device(parameter, random)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_device(buffer, False)
        # vLLM's attention hands this parameter of its parent to its implementation.
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if sinks is not None:
            module.impl.sinks = on_device(sinks, random)
    torch_xla.sync()
