"""sample beside PyTorch's way of doing the same, which sorts, and beside FlashInfer's sampler where it is installed.

    python -m benchmarks.sampling                     # on a GPU: CUDA graphs over rotating inputs
    python -m benchmarks.sampling --flashinfer        # its kernels are compiled at first use: minutes

Logits are normal numbers of standard deviation 3 in bfloat16 or float32, 128 256 to a row. FlashInfer is given
probabilities, which its callers compute before: the softmax is counted.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import torch
from benchmarks import memory, timing
from benchmarks.argument_types import positive, require_gpu

import xla_gpu.torch as xla_gpu

VOCAB = 128256
RULES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "flat top_p": {"temperature": 5.0, "top_p": 0.9},
}


def columns(rows: int, rule: dict[str, float]) -> dict[str, torch.Tensor]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **rule}
    dtypes = {"top_k": torch.int32}
    made = {n: torch.full((rows,), v, dtype=dtypes.get(n, torch.float32), device="cuda") for n, v in values.items()}
    made["seed"] = torch.arange(rows, device="cuda")
    made["step"] = torch.full((rows,), 3, dtype=torch.int32, device="cuda")
    return made


def sorting(logits: torch.Tensor, rule: dict[str, float]) -> Callable[[], object]:
    """What programs without a kernel do."""

    def run() -> torch.Tensor:
        if rule["temperature"] == 0:
            return logits.argmax(-1)
        x = logits.float() / rule["temperature"]
        if "min_p" in rule:
            probabilities = x.softmax(-1)
            x = x.masked_fill(probabilities < rule["min_p"] * probabilities.amax(-1, True), -torch.inf)
        if "top_k" in rule or "top_p" in rule:
            ordered, order = x.sort(-1)
            if "top_k" in rule:
                ordered[:, : -int(rule["top_k"])] = -torch.inf
            if "top_p" in rule:
                gone = ordered.softmax(-1).cumsum(-1) <= 1 - rule["top_p"]
                gone[:, -1] = False
                ordered.masked_fill_(gone, -torch.inf)
            x = torch.empty_like(x).scatter_(-1, order, ordered)
        return (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1)

    return run


def flashinfer(logits: torch.Tensor, rule: dict[str, float]) -> Callable[[], object] | None:
    import flashinfer.sampling as theirs

    if rule["temperature"] == 0 or "min_p" in rule:
        return None
    top_k, top_p = int(rule.get("top_k", 0)), rule.get("top_p", 1.0)

    def run() -> torch.Tensor:
        probabilities = (logits.float() / rule["temperature"]).softmax(-1)
        if top_k and top_p < 1:
            return theirs.top_k_top_p_sampling_from_probs(probabilities, top_k, top_p, filter_apply_order="joint")
        if top_k:
            return theirs.top_k_sampling_from_probs(probabilities, top_k)
        if top_p < 1:
            return theirs.top_p_sampling_from_probs(probabilities, top_p)
        return theirs.sampling_from_probs(probabilities)

    return run


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 64], help="rows of logits (default: %(default)s)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], help="of the logits (default: %(default)s)"
    )
    parser.add_argument(
        "--rules", nargs="+", default=list(RULES), choices=list(RULES), help="how tokens are drawn (default: all)"
    )
    parser.add_argument("--flashinfer", action="store_true", help="beside FlashInfer's sampler too")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    arguments = parser.parse_args()
    require_gpu(parser)
    rows_of_json = []
    for dtype in arguments.dtypes:
        for rows in arguments.rows:
            for name in arguments.rules:
                with memory.left_out_if_too_large(f"{dtype} {rows} rows {name}"):
                    rule = RULES[name]
                    sets = []
                    for _ in range(2):
                        logits = (torch.randn(rows, VOCAB, device="cuda") * 3).to(getattr(torch, dtype))
                        sets.append((logits, columns(rows, rule)))
                    row = {"dtype": dtype, "rows": rows, "rule": name}
                    row["xla_gpu"] = timing.microseconds([lambda s=s: xla_gpu.sample(s[0], **s[1]) for s in sets])
                    row["torch"] = timing.microseconds([sorting(logits, rule) for logits, _ in sets])
                    if arguments.flashinfer and (call := flashinfer(sets[0][0], rule)):
                        row["flashinfer"] = timing.microseconds([call])
                    rows_of_json.append(row)
                    others = "".join(f"   {n} {row[n]:8.1f} us" for n in ("torch", "flashinfer") if n in row)
                    print(f"{dtype:9}{rows:4} x {VOCAB} {name:12} {row['xla_gpu']:8.1f} us{others}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows_of_json, indent=1))


if __name__ == "__main__":
    main()
