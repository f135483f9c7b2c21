"""How a step computes and chooses: what the command line says, for the models of both frameworks."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from .config import LlamaConfig

# xla_gpu's operators beside attention. Without one of them a model has the framework's own operations in its place.
OPERATORS = (
    *("rms_norm", "rotary_and_cache", "silu_and_mul", "sample"),
    *("linear", "attention_block", "gated_mlp"),  # on one device
    "rotary_and_attention",  # attention_block without its products
    "rms_norm_of_prompts",  # rms_norm in steps of PROMPT_ROWS rows and more
)
# XLA times its Triton kernels and cuBLAS's one product at a time, and mostly takes its own. In a step over several
# devices, whose products are smaller, cuBLAS's are faster but for a few rows (docs/scaling.md).
CUBLAS: Any = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
CUBLAS_ROWS = 16
# Long steps over two devices are computed in halves: while one half's sum is on its way, the other half is multiplied.
# XLA's collective permute copies to the other GPU's memory then (3: peer), which takes no SM from the products; their
# order stays as the program has it, and neither sums nor products of the halves are joined again.
OVERLAP_ROWS = 4096
OVERLAP: Any = {
    **CUBLAS,
    "xla_gpu_collective_permute_mode": 3,
    "xla_gpu_dot_merger_threshold_mb": 0,
}
# XLA fuses norms and activations into what stands beside them: on an H200 calls of both made a step of few rows 0.3 ms
# slower; those of norms make one of 4096 rows up to 2 % faster.
USUAL = ("rotary_and_cache", "rotary_and_attention", "sample")
PROMPT_ROWS = 1024
# With rotary_and_cache, steps of up to so many rows call this in its place: one sequence gains 1 %, 32 next to nothing.
CHAINED_ROWS = 32
# The blocks of a layer and linear are for so many rows; with rotary_and_cache, larger steps are as without them. The
# matrix of the logits is XLA's, which is faster at one row.
BLOCKS = ("attention_block", "gated_mlp")
BLOCK_ROWS = 64


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """operators: those of OPERATORS that a model uses; the others are those of `sample`, for all requests alike."""

    operators: frozenset[str] = frozenset(USUAL)
    overlap_rows: int = OVERLAP_ROWS  # jax_model over two devices: from so many on, rows are computed in halves
    features_first: bool = False  # jax_model's matrices are [out, in], for products that are not XLA's
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # request i draws with seed + i

    def __post_init__(self) -> None:
        if self.operators & {"linear", "attention_block", "gated_mlp"}:
            object.__setattr__(self, "features_first", True)
        if unknown := self.operators - set(OPERATORS):
            raise ValueError(f"--operators: expected none or some of {', '.join(OPERATORS)}, got {min(unknown)}")
        if self.overlap_rows < 2:
            raise ValueError(f"overlap_rows: expected a number from 2, got {self.overlap_rows}")
        for name, value, most in (("top_p", self.top_p, 1), ("min_p", self.min_p, 1)):
            if not 0 <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')}: expected a number from 0 to 1, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature: expected a number >= 0, got {self.temperature}")
        if self.temperature > 0 and "sample" not in self.operators:
            raise ValueError("--temperature: expected 0 without the operator sample")


def usable(operators: frozenset[str], config: LlamaConfig) -> frozenset[str]:
    """Those of the operators that take matrices of the model's sizes: multiples of 16."""
    sizes = {"attention_block": config.num_heads * config.head_dim, "gated_mlp": config.intermediate_size}
    odd = {name for name, size in sizes.items() if size % 16 or config.hidden_size % 16}
    return operators - odd


def usual(dtype: str, devices: int, rows: int, quantized: bool = False) -> tuple[str, ...]:
    """The fastest operators for decode steps of so many rows. XLA multiplies float32 faster than those of BLOCKS; for
    more rows than these take, plain weights [in, out] are faster than [out, in], as they need them."""
    if devices > 1:
        return USUAL
    blocks = dtype != "float32" and (quantized or rows <= BLOCK_ROWS)
    return (*BLOCKS * blocks, *USUAL, "rms_norm_of_prompts")


def of_step(operators: frozenset[str], rows: int) -> frozenset[str]:
    """Those of the operators that a step of so many rows calls."""
    if rows >= PROMPT_ROWS and "rms_norm_of_prompts" in operators:
        operators |= {"rms_norm"}
    if "rotary_and_cache" not in operators:
        return operators
    if rows > BLOCK_ROWS:
        operators = operators.difference(BLOCKS, {"linear"})
    return operators if rows <= CHAINED_ROWS else operators - {"rotary_and_attention"}


def is_quantized(folder: pathlib.Path) -> bool:
    return "quantization_config" in json.loads((folder / "config.json").read_text())


def check_weights(arguments: Any, config: LlamaConfig) -> str | None:
    """What is wrong with --weights and --head-weights, if anything."""
    if arguments.head_weights is not None:
        if arguments.tensor_parallel > 1:
            return "--head-weights: expected no --tensor-parallel: quantised matrices are not divided"
        if config.tie_word_embeddings:
            return "--head-weights: expected a head of its own: this model's is its embedding"
    if arguments.weights is None:
        return None
    if arguments.tensor_parallel > 1:
        return "--weights: expected no --tensor-parallel: quantised matrices are not divided"
    if arguments.weights == "bfloat16":
        return None if arguments.dtype == "bfloat16" else "--weights bfloat16: expected --dtype bfloat16"
    if arguments.model and is_quantized(arguments.model):
        return f"--weights: the checkpoint in {arguments.model} is quantised already"
    return None
