#!/usr/bin/env python3
"""Serves the prompts of a text file with vLLM on XLA: a tiny Llama with random weights over bytes, or a checkpoint.

    PJRT_DEVICE=CPU python examples/serve_vllm.py --check                 # or make demo-vllm
    PJRT_DEVICE=GPU python examples/serve_vllm.py --model DIR

Behind HTTP, the same engine is `PJRT_DEVICE=GPU vllm serve DIR`; see docs/vllm.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint (default: a tiny model)")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=HERE / "prompts.txt",
        metavar="FILE",
        help="a text file; lines of --- divide prompts",
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of each prompt (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the model (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare token for token with transformers' generate")
    arguments = parser.parse_args()
    if arguments.check and arguments.dtype != "float32":
        parser.error("--check compares tokens in float32: two correct programs may differ in bfloat16")
    return arguments


def write_tiny_model(folder: str) -> None:
    """A random Llama and a tokenizer with a token for each byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,  # so that no two logits are close
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)


def expected_tokens(folder: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found.append(out[0, len(prompt) :].tolist())
    return found


def serve(arguments: argparse.Namespace, folder: str) -> int:
    from vllm import LLM, SamplingParams

    texts = [text.strip() for text in arguments.prompts.read_text().split("\n---\n")]
    # Few buckets: little to compile for a demonstration.
    options = {"token_buckets": [8, 64, 512]}
    llm = LLM(
        folder,
        dtype=arguments.dtype,
        max_model_len=4096 if arguments.model is None else None,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        additional_config=options,
    )
    params = SamplingParams(temperature=0, max_tokens=arguments.max_new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    for output in outputs:
        print(f"{output.prompt[:60]!r} …\n    → {output.outputs[0].text!r}")
    count = sum(map(len, tokens))
    if not arguments.check:
        print(f"{count} tokens, {count / seconds:.1f} tokens/s")
        return 0
    expected = expected_tokens(folder, [list(output.prompt_token_ids) for output in outputs], arguments.max_new_tokens)
    if wrong := [index for index, (got, want) in enumerate(zip(tokens, expected, strict=True)) if got != want]:
        print(f"demo-vllm: FAILED, prompts {wrong} differ from transformers", file=sys.stderr)
        return 1
    print(f"demo-vllm: OK, {count} tokens identical to transformers, {count / seconds:.1f} tokens/s")
    return 0


def main() -> int:
    arguments = parse_arguments()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            write_tiny_model(folder)
        return serve(arguments, arguments.model or folder)


if __name__ == "__main__":
    sys.exit(main())
