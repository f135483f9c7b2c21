"""The same weights in Hugging Face transformers: the small model that needs no files, and answers to compare with."""

from __future__ import annotations

import dataclasses
import pathlib

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .tokens import ByteTokenizer


def small_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 4 layers over bytes, with float32 weights drawn from `seed`.

    Everything that a large one has is in it: grouped heads, Llama 3's stretched rotations, chunks behind contexts. The
    weights are drawn wider than usual: with the usual ones an untrained model repeats one token forever. Raises
    ValueError for transformers 4, which does not know `rope_parameters` and would rotate otherwise than the example.
    """
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ValueError(
            f"the small model: expected transformers 5, found {transformers.__version__}: pip install 'transformers>=5'"
        )
    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        bos_token_id=ByteTokenizer.bos,
        eos_token_id=ByteTokenizer.eos,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


def load_model(folder: pathlib.Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@dataclasses.dataclass(frozen=True)
class Mismatch:
    index: int  # of the first token that differs, among the new ones
    got: int | None  # None: the text ended there
    expected: int | None
    gap: float  # between the two largest logits of transformers at that place: a tie in float32 if it is near 1e-6

    def __str__(self) -> str:
        return (
            f"new token {self.index}: got {self.got}, transformers has {self.expected} "
            f"(its two largest logits differ by {self.gap:.3g})"
        )


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt: list[int], max_new_tokens: int, eos: frozenset[int]) -> list[int]:
    """Greedy continuation of one prompt by transformers' own `generate`; ends with the end-of-sequence token."""
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos) or None,
        pad_token_id=0,  # one prompt at a time is never padded; without a number transformers warns
    )
    ids = torch.tensor([prompt])
    # A checkpoint's own generation settings (temperature, penalties) are not for this comparison.
    model.generation_config = config
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


@torch.no_grad()
def compare(model: LlamaForCausalLM, prompt: list[int], got: list[int], expected: list[int]) -> Mismatch | None:
    """The first place at which two continuations of a prompt differ, or None."""
    if got == expected:
        return None
    pairs = enumerate(zip(got, expected, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    logits = model(torch.tensor([prompt + expected[:index]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()

    def at(tokens: list[int]) -> int | None:
        return tokens[index] if index < len(tokens) else None

    return Mismatch(index, at(got), at(expected), first - second)
