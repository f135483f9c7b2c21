"""What each weight format costs in accuracy: logits of random Llama models beside those of float32.

    python -m benchmarks.weight_formats

No weights are downloaded: models are random, their matrices normal or with the heavy tails of trained ones (Student's
t, 5 degrees of freedom). Every matrix but the embedding is quantised by xla_gpu.quantization, the head too. Activations
stay in float32, so the figures are those of the weights alone.
"""

from __future__ import annotations

import argparse
import math

import torch
import transformers

from xla_gpu import quantization

SHAPES = {  # hidden, intermediate, layers, heads, kv heads
    "256 x 4": (256, 768, 4, 4, 2),
    "512 x 8": (512, 1536, 8, 8, 2),
    "1024 x 12": (1024, 2816, 12, 16, 4),
}
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
    return torch.as_tensor(quantization.dequantize(quantization.quantize(stored, weight_format)))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    print("| model | matrices | weights | relative error of logits | KL divergence, nats | same most likely token |")
    print("|---|---|---|---|---|---|")
    for name in arguments.shapes:
        for tails in (False, True):
            model = make(SHAPES[name], tails, seed=1)
            tokens = torch.randint(model.config.vocab_size, (4, arguments.tokens // 4))
            want = model(tokens).logits
            original = {key: value.clone() for key, value in model.state_dict().items()}
            for weight_format in FORMATS:
                for key, module in model.named_modules():
                    if isinstance(module, torch.nn.Linear):
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
