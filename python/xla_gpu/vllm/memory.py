"""How much of the device's memory the KV caches get."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from .._core.environment import pjrt_device
from . import buckets, draft_heads, eagle, images, supported, tensor_parallel

_GIB = 1 << 30

# For kernels, command buffers and the runtime beside what is computed below.
_RESERVE = _GIB // 2

# Of which the sizes of plain experts are to be for grouped_linear.
_PLAIN_MULTIPLE = 16

_DISABLED_PASSES = "--xla_disable_hlo_passes"

# Of the CPU client, which has no limit of its own; vLLM's variable for its CPU platform sets another.
_CPU_GIB = 1.0


def set_pool(environ: MutableMapping[str, str], utilization: float, cache_bytes: int | None = None) -> None:
    """Lets the client's pool have the share of memory that --gpu-memory-utilization names.

    Without it, it would be JAX's three quarters. What the user set is kept. The pool is taken whole at start, unless
    the KV caches have a size of their own (``cache_bytes``): they fill it. One that grows by parts, as
    XLA_PYTHON_CLIENT_PREALLOCATE=false wants it, doubles them, and would have no part left for the last caches.
    """
    environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{utilization:.4f}")
    if cache_bytes is None:
        environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"


def keep_activations(environ: MutableMapping[str, str]) -> None:
    """Stops XLA from recomputing values to save memory, unless the user chose the passes that are disabled.

    It would do so wherever a program has more than 80 % of the GPU's memory. With KV caches that fill the GPU every
    program has, and what activations take is nothing beside them.
    """
    flags = environ.get("XLA_FLAGS", "")
    if _DISABLED_PASSES not in flags:
        environ["XLA_FLAGS"] = f"{flags} {_DISABLED_PASSES}=rematerialization".strip()


class Room:
    """Memory in one piece for what steps compute and for what XLA times its kernels on, held while the engine starts.

    Weights and KV caches are allocated beside it. Without it they could leave its size free in pieces, of which none
    holds the largest operand of a product; the start would fail.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        """Takes it, where the KV caches are to fill the pool."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        self._held: torch.Tensor | None = None
        fills = config.cache_config.kv_cache_memory_bytes is None and pjrt_device() == "GPU"
        if fills and tensor_parallel.active() is None:
            size = _work_bytes(config)
            limit = int(xm.get_memory_info(device)["bytes_limit"])
            if size < limit // 2:  # else the weights do not fit either, and the error is theirs
                self._held = torch.zeros(size, dtype=torch.int8, device=device)
                torch_xla.sync()
                xm.wait_device_ops()

    @property
    def bytes(self) -> int:
        """How much is held."""
        return 0 if self._held is None else self._held.numel()

    def give_back(self) -> None:
        """Frees it, as soon as the device has allocated all that was made before."""
        import torch_xla.core.xla_model as xm

        if self._held is not None:
            xm.wait_device_ops()
        self._held = None


def for_kv_caches(config: Any, device: torch.device, held: int = 0) -> int:
    """Bytes for KV caches, of all devices: what the pool has left beside the weights and what steps compute.

    Args:
      config: vLLM's.
      device: an XLA device.
      held: bytes of the pool that are free as soon as the caches exist, see Room.

    Raises:
      ValueError: nothing is left.
    """
    import torch_xla.core.xla_model as xm

    devices = tensor_parallel.active()
    # Every device has its part of each page, of latents the whole page.
    parts = 1 if devices is None or config.model_config.use_mla else devices.size
    if (fixed := config.cache_config.kv_cache_memory_bytes) is not None:
        return int(fixed) * parts
    if pjrt_device() == "CPU":
        return int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or _CPU_GIB) * _GIB)
    if devices is None:
        info = xm.get_memory_info(device)
        limit, used = int(info["bytes_limit"]), int(info["bytes_used"]) - held
    else:
        limit, used = tensor_parallel.pool_bytes(os.environ), devices.bytes_per_device
    steps = _work_bytes(config)
    available = limit - used - steps - _RESERVE
    if available <= 0:
        raise ValueError(
            f"xla_gpu.vllm: no memory is left for KV caches: of {limit / _GIB:.1f} GiB the weights take "
            f"{used / _GIB:.1f} and a step {steps / _GIB:.1f}. Raise --gpu-memory-utilization, or lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    return available * parts


def _work_bytes(config: Any) -> int:
    return max(step_bytes(config), timing_bytes(config), image_bytes(config))


def timing_bytes(config: Any) -> int:
    """What XLA allocates while it compiles: it times the kernels of a product on operands of their own.

    The head's weight is the largest operand. A program may be compiled in a thread beside another one.
    """
    model = config.model_config
    item = torch.tensor([], dtype=model.dtype).element_size()
    largest = max(model.get_vocab_size(), 2 * _size(model.hf_text_config, "intermediate_size", 0))
    return int(2 * largest * model.get_hidden_size() * item)


def _sizes(text: Any, name: str, default: int) -> list[int]:
    """A size in a model's configuration; some have one for each layer."""
    value = getattr(text, name, None)
    return [int(size) for size in value] if isinstance(value, (list, tuple)) else [int(value or default)]


def _size(text: Any, name: str, default: int) -> int:
    """The largest of these."""
    return max(_sizes(text, name, default))


def _takes_groups(config: Any, num_experts: int, widths: Sequence[int]) -> bool:
    """Whether ``grouped_linear`` takes the experts of all layers, as a device has them."""
    from .expert_matrices import groups_take

    model, quantisation, size = config.model_config, config.quant_config, config.parallel_config.tensor_parallel_size
    hidden, multiple = model.get_hidden_size(), _PLAIN_MULTIPLE if quantisation is None else quantisation.multiple
    own = widths if config.parallel_config.enable_expert_parallel else [width // size for width in widths]
    shapes = [shape for width in own for shape in ((2 * width, hidden), (hidden, width))]
    return all(groups_take(model.dtype, num_experts, n, k, multiple) for n, k in shapes)


def image_bytes(config: Any) -> int:
    """An upper bound of what the encoder of images needs at once, beside its weights and the rows that it stores."""
    model = config.model_config
    if not images.are_served(model):
        return 0
    vision, item = model.hf_config.vision_config, torch.tensor([], dtype=model.dtype).element_size()
    if images.takes_patches(model):
        return _patch_bytes(config, item)
    tiles, rows = max(images.batches(vision)), images.patches(vision)
    pixels = 3 * vision.image_size**2 * (4 + 2 * item)
    # Scores as they are, as float32, and what their softmax is.
    scores = vision.num_attention_heads * min(rows, images.MOST_QUERIES) * rows * (4 + 2 * item)
    widths = 8 * vision.hidden_size + 3 * vision.intermediate_size + 4 * model.get_hidden_size()
    return int(tiles * (pixels + scores + rows * widths * item))


def _patch_bytes(config: Any, item: int) -> int:
    """The same of an encoder for images of any size: of its largest program."""
    from .patches import PatchForm, PatchLayout, token_buckets

    vision = config.model_config.hf_config.vision_config
    layout = PatchLayout(token_buckets(config, images.most_rows(config))[-1], PatchForm.of(config.model_config))
    width = int(getattr(vision, "embed_dim", None) or vision.hidden_size)
    between = int(getattr(vision, "intermediate_size", 0) or width * vision.mlp_ratio)
    # The residual stream, the projection and its parts as they are and as float32, and what attention makes of them.
    of_patch = (12 * width + 3 * between) * item + 6 * width * 4 + layout.form.values * (4 + item)
    streams = images.num_streams(config.model_config)
    of_token = 4 * streams * config.model_config.get_hidden_size() * item
    return int(layout.num_patches * of_patch + layout.num_tokens * of_token)


def step_bytes(config: Any) -> int:
    """An upper bound of what the programs of a step need at once: activations, logits, the sampler's rows.

    XLA reuses the memory of what is not needed any more, so that a few of the widest layers are what counts.
    """
    model, scheduler = config.model_config, config.scheduler_config
    text = model.hf_text_config
    item = torch.tensor([], dtype=model.dtype).element_size()
    heads = model.get_num_attention_heads(config.parallel_config)
    kv_heads = model.get_num_kv_heads(config.parallel_config)
    attention = (2 * heads + 2 * kv_heads) * model.get_head_size()
    if model.use_mla:  # queries as they are and by latents, in two parts and joined; results by latents and by values
        of_head = 2 * text.qk_nope_head_dim + text.v_head_dim + 3 * text.kv_lora_rank + 2 * text.qk_rope_head_dim
        attention = heads * of_head + 2 * model.get_head_size()
    width = _size(text, "intermediate_size", 4 * model.get_hidden_size())
    tokens = scheduler.max_num_batched_tokens
    experts = 0
    if num_experts := model.get_num_experts():  # whatever the configuration calls them
        from . import expert_products

        widths = _sizes(text, "moe_intermediate_size", width)
        top_k = _size(text, "num_experts_per_tok", 0) or _size(text, "moe_k", num_experts)
        parallel = config.parallel_config
        others = parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1
        if others:
            num_experts //= parallel.tensor_parallel_size
        sizes = (top_k, num_experts, model.get_hidden_size(), max(widths))
        traits = config.quant_config is not None, _takes_groups(config, num_experts, widths), others
        given = *sizes, item, *traits
        experts = max(expert_products.elements_of_step(rows, *given) for rows in buckets.of_steps(config)) * item
    # Of LoRA, the products between an adapter's two matrices, for each of up to three layers that vLLM joins.
    lora = config.lora_config
    between = 0 if lora is None else 2 * 3 * lora.max_loras * lora.max_lora_rank
    # Of a head that drafts, what it reads of the model, and its first layer's row, which is that and an embedding.
    states = 0 if not draft_heads.has_head(config) else 2 * (eagle.NUM_STREAMS + 1) * model.get_hidden_size()
    # Of images, what the first layers add.
    added = 2 * (images.num_streams(model) - 1) * model.get_hidden_size() if images.are_served(model) else 0
    rows = tokens * (8 * model.get_hidden_size() + attention + 3 * width + between + states + added) * item + experts
    if block := images.tokens_of_block(model):  # scores and their softmax, and keys, values and results as float32
        rows += tokens * heads * (3 * 2 * block + 8 * model.get_head_size()) * 4
    if supported.pools(model):
        return int(rows)
    # Logits as they are and as float32, and four arrays of their size for sampling; the penalties' counts.
    vocabulary = model.get_vocab_size()
    logits = max(buckets.most_rows(config), 128) * vocabulary * (item + 5 * 4)
    counts = (scheduler.max_num_seqs + 1) * vocabulary * 4
    return int(rows + logits + counts)
