"""Paged attention on one GPU beside every peer that is installed, on the same inputs, in one process.

    python -m benchmarks.attention decode --json decode.json
    python -m benchmarks.attention prefill --only 1x16k

Every implementation's result is checked against a float64 reference of some rows before it is timed. The table gives
the bytes and operations that the load needs at least, each time, the rate, the fraction of the limit, and the ratio of
the best paged peer's time to ours. See implementations.py for how the peers are found.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform

import torch
from benchmarks import gpu_inputs, implementations, loads, timing

# Measured on one H200, 2026-11-20: the best readers' bandwidth, and a bfloat16 matrix product of 8192 x 8192 x 8192.
BYTES_PER_SECOND = 4.5e12
OPERATIONS_PER_SECOND = 798e12
TOLERANCE = 2e-2  # absolute, of bfloat16 results of magnitude 1 and below


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("--only", metavar="TEXT", help="loads whose name contains TEXT")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    return parser.parse_args()


def check(out: torch.Tensor, inputs: gpu_inputs.Inputs) -> float:
    """Largest error of some rows; raises if it is too large."""
    count = inputs.query.shape[0]
    rows = sorted({0, count // 3, count // 2, count - 1})
    error = (out[rows].double() - gpu_inputs.reference(inputs, rows)).abs().max().item()
    if not error <= TOLERANCE:
        raise AssertionError(f"wrong result: largest error {error}")
    return error


def measure(case, peers, repeats: int) -> dict:
    amount = loads.bytes_moved(case)
    count = timing.sets_needed(amount)
    sets = [gpu_inputs.build(case, seed) for seed in range(count)]
    times, errors = {}, {}
    for peer in peers:
        try:
            calls = [peer.prepare(inputs) for inputs in sets]
            check(calls[0](), sets[0])
            minimum = 3 if loads.operations(case) > 1e11 else 20
            times[peer.name] = timing.microseconds(calls, repeats, minimum)
        except implementations.Unsuited:
            continue
        except Exception as error:  # a peer's refusal of a load is a result too
            errors[peer.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        torch.cuda.empty_cache()
    return {
        "load": case.name,
        "bytes": amount,
        "operations": loads.operations(case),
        "microseconds": times,
        "errors": errors,
    }


def report(row: dict, peers) -> str:
    ours = row["microseconds"].get("xla_gpu")
    limit = max(row["bytes"] / BYTES_PER_SECOND, row["operations"] / OPERATIONS_PER_SECOND) * 1e6
    paged = {p.name: row["microseconds"][p.name] for p in peers[1:] if p.paged and p.name in row["microseconds"]}
    text = f"{row['load']:32} {row['bytes'] / 1e6:8.1f} MB {row['operations'] / 1e9:9.1f} GFLOP"
    if ours:
        text += f" | {ours:8.1f} us {row['bytes'] / ours / 1e6:5.2f} TB/s {row['operations'] / ours / 1e6:6.1f} TFLOP/s"
        text += f" {limit / ours:5.2f} of the limit"
    if ours and paged:
        best = min(paged, key=paged.get)
        text += f" | {paged[best] / ours:5.2f} x {best}"
    others = {name: time for name, time in row["microseconds"].items() if name != "xla_gpu"}
    text += " | " + ", ".join(f"{name} {time:.1f}" for name, time in others.items())
    return text + "".join(f"\n    {name}: {error}" for name, error in row["errors"].items())


def main() -> None:
    arguments = parse_arguments()
    cases = [*loads.DECODE, *loads.DECODE_VARIANTS] if arguments.what == "decode" else loads.PREFILL
    peers = implementations.installed()[: 1 if arguments.ours else None]
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, [p.name for p in peers], flush=True)
    rows = []
    for case in cases:
        if arguments.only and arguments.only not in case.name:
            continue
        rows.append(measure(case, peers, arguments.repeats))
        print(report(rows[-1], peers), flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "host": platform.machine()}
            arguments.json.write_text(json.dumps({"what": arguments.what, "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
