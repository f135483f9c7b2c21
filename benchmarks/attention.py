"""Paged attention on one GPU beside every peer that is installed, on the same inputs, in one process.

    python -m benchmarks.attention decode --json decode.json
    python -m benchmarks.attention prefill --cases 1x16k chunk
    python -m benchmarks.attention classes --members 4 --seed 7    # loads drawn from classes (loads.py)
    python -m benchmarks.attention sweep --members 150 --seed 7 --peer FA3    # of any shape (sweep.py)
    python -m benchmarks.attention decode --warm-up-peers          # compiles FlashInfer's kernels, and ends

Every implementation's result is checked against a float64 reference of some rows before it is timed. The table gives
the bytes that the load needs at least, the time that these or its operations take at their limit, our time and rates,
the fraction of the limit, and the ratio of the best paged peer's time to ours; then every peer's time, in microseconds.
See implementations.py for how the peers are found. Loads that do not fit into memory are left out. Ends with 1 if
a result of this package was wrong or missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys

import torch
from benchmarks import gpu_inputs, implementations, loads, memory, sweep, timing
from benchmarks.argument_types import containing, positive, require_gpu

TOLERANCE = 2e-2  # of a row's largest number: five roundings of a bfloat16 result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=("decode", "prefill", "classes", "sweep"),
        help="loads: of one new token, of prompts, drawn from classes, or of any shape",
    )
    parser.add_argument("--members", type=positive, default=3, help="loads drawn from each class, or in all")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn")
    parser.add_argument("--cases", "--only", metavar="TEXT", nargs="+", help="loads whose name contains one of these")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--peer", metavar="NAME", action="append", help="of the peers, these alone")
    parser.add_argument(
        "--all-kernels", action="store_true", help="FlashInfer also with windows and head sizes other than 128"
    )
    parser.add_argument("--warm-up-peers", action="store_true", help="compile what peers compile at first use, and end")
    parser.add_argument("--repeats", type=positive, help="replays timed; default: 30, 10 for prefill, 5 for sweep")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the figures there, as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        require_gpu(parser)
    return arguments


def check(out: torch.Tensor, rows: list[int], want: torch.Tensor) -> None:
    error = (out[rows].double() - want).abs().amax((1, 2))
    allowed = TOLERANCE * want.abs().amax((1, 2))
    if not bool((error <= allowed).all()):
        raise AssertionError(f"wrong result: errors {error.tolist()} of rows {rows} exceed {allowed.tolist()}")


def measure(case, peers, repeats: int, minimum_calls: int = 20) -> dict:
    amount, operations = loads.bytes_moved(case), loads.operations(case)
    minimum_calls = loads.calls_to_time(case, minimum_calls)
    sets = [gpu_inputs.build(case, seed) for seed in range(timing.sets_needed(amount))]
    tokens = sets[0].query.shape[0]
    rows = sorted({0, tokens // 3, tokens // 2, tokens - 1})
    want = gpu_inputs.reference(sets[0], rows)
    times, errors = {}, {}
    for peer in peers:
        calls = []
        try:
            calls = [peer.prepare(inputs) for inputs in sets]
            check(calls[0](), rows, want)
            times[peer.name] = timing.microseconds(calls, repeats, minimum_calls)
        except implementations.Unsuited:
            continue
        except Exception as error:  # a peer's refusal of a load is a result too
            errors[peer.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        finally:
            calls.clear()
            if gpu_inputs.DEVICE == "cuda":
                torch.cuda.empty_cache()
    row = {"load": case.name, "bytes": amount, "operations": operations, "limit": loads.limit(case)}
    row |= {"microseconds": times, "errors": errors, "best_peer": None, "ratio": None}
    paged = {peer.name: times[peer.name] for peer in peers[1:] if peer.paged and peer.name in times}
    if paged:
        row["best_peer"] = min(paged, key=paged.__getitem__)
        if "xla_gpu" in times:
            row["ratio"] = paged[row["best_peer"]] / times["xla_gpu"]
    return row


HEADER = f"{'load':50}{'MB':>9}{'limit us':>10}{'xla_gpu us':>12}{'TB/s':>7}{'TFLOP/s':>9}{'of limit':>10}{'ratio':>7}"


def report(row: dict) -> str:
    ours = row["microseconds"].get("xla_gpu")
    text = f"{row['load']:50}{row['bytes'] / 1e6:9.1f}{row['limit']:10.1f}"
    if ours:
        text += f"{ours:12.1f}{row['bytes'] / ours / 1e6:7.2f}{row['operations'] / ours / 1e6:9.1f}"
        text += f"{row['limit'] / ours:10.2f}"
    else:
        text += f"{'-':>12}{'-':>7}{'-':>9}{'-':>10}"
    text += f"{row['ratio']:7.2f}" if row["ratio"] else f"{'-':>7}"
    others = (f"{name} {time:.1f}" for name, time in row["microseconds"].items() if name != "xla_gpu")
    return f"{text}  {', '.join(others)}" + "".join(f"\n    {name}: {error}" for name, error in row["errors"].items())


def warm_up(arguments: argparse.Namespace, cases: list, peers: list) -> int:
    """One small load for each kernel that the cases need of the peers; each peer in a process of its own."""
    if not arguments.peer:
        names = [peer.name for peer in peers if getattr(peer, "compiles", False)]
        command = [sys.executable, "-m", "benchmarks.attention", *sys.argv[1:], "--peer"]
        processes = [subprocess.Popen([*command, name]) for name in names]
        return max([process.wait() for process in processes], default=0)
    done = set()
    for case in cases:
        rows = 1 if all(rows == 1 for rows, _ in case.sequences) else 64
        kind = (rows, case.head_dim, case.sliding_window is None, case.cache_dtype)
        if kind in done:
            continue
        done.add(kind)
        inputs = gpu_inputs.build(case.but(sequences=((rows, 64),)))
        for peer in peers[1:]:
            try:
                peer.prepare(inputs)()
                print(f"{peer.name}: {kind} is ready", flush=True)
            except implementations.Unsuited:
                continue
    return 0


@torch.no_grad()
def main() -> int:
    arguments = parse_arguments()
    gpu_inputs.DEVICE = arguments.device
    if arguments.what == "classes":
        drawn = (loads.members(name, arguments.members, arguments.seed) for name in loads.CLASSES)
        cases = [case for members in drawn for case in members]
    elif arguments.what == "sweep":
        cases = sweep.members(arguments.members, arguments.seed)
    else:
        cases = [*loads.DECODE, *loads.DECODE_VARIANTS] if arguments.what == "decode" else loads.PREFILL
    if arguments.cases:
        chosen = containing("--cases", arguments.cases, [case.name for case in cases])
        cases = [case for case in cases if case.name in chosen]
    ours, *peers = implementations.installed(arguments.all_kernels)
    if arguments.peer:
        if unknown := set(arguments.peer) - {peer.name for peer in peers}:
            installed = ", ".join(peer.name for peer in peers)
            sys.exit(f"--peer: expected what is installed here, {installed}, got {min(unknown)}")
        peers = [peer for peer in peers if peer.name in arguments.peer]
    peers = [ours] if arguments.ours else [ours, *peers]
    if arguments.warm_up_peers:
        return warm_up(arguments, cases, peers)

    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "no GPU"
    print(f"{gpu}, PyTorch {torch.__version__}: {', '.join(peer.name for peer in peers)}\n{HEADER}  peers", flush=True)
    result = {
        "what": arguments.what,
        "date": datetime.date.today().isoformat(),
        "machine": {"gpu": gpu, "torch": torch.__version__, "host": platform.machine()},
        "rows": [],
    }
    for case in cases:
        with memory.left_out_if_too_large(case.name):
            repeats = arguments.repeats or {"prefill": 10, "sweep": 5}.get(arguments.what, 30)
            row = measure(case, peers, repeats, minimum_calls=8 if arguments.what == "sweep" else 20)
            if arguments.what == "sweep":
                row["groups"] = sweep.groups_of(case)
            result["rows"].append(row)
            print(report(row), flush=True)
        if arguments.json:  # after each row, so that an end before the last loses none
            arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.what == "sweep":
        ordered = sorted((row for row in result["rows"] if row["ratio"]), key=lambda row: row["ratio"])
        print("", "In the order of the ratio:", HEADER, *map(report, ordered), "", sweep.summary(ordered), sep="\n")
    return 0 if all("xla_gpu" in row["microseconds"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
