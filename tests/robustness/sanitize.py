"""The CUDA handlers under compute-sanitizer: memcheck, initcheck, synccheck.

    sanitize="python tests/robustness/sanitize.py --library build/cuda/ffi/libxla_gpu_ffi.so"
    $sanitize                                   # on a machine with a GPU, some 3 minutes
    $sanitize --seconds 60 --jobs 12 --parts 4  # the same in several processes, more calls
    $sanitize --tool racecheck --seconds 300    # another tool
    $sanitize --host                            # the same calls on the host, no tool

No framework takes part: sanitized_calls.py calls the handlers through xla_gpu_call on memory of the CUDA driver's, each
buffer an allocation of exactly its size, results and scratch never written before the call. So whatever a tool reports
is ours. The calls are a grid of decode batches, those of tests/common/cases.py, and some with numbers in their metadata
that no batch may have; as many as the time allows, a spread of them first. Sound calls are compared with the float64
reference, loosely: the tests are strict. memcheck and initcheck must also find a fault that is planted for them. Ends
with 1 if something was found, or nothing could be said.

compute-sanitizer is part of the CUDA toolkit, and of the package nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from tests.robustness import sanitized_calls  # noqa: E402

TOOLS = ("memcheck", "initcheck", "synccheck")
PLANTED = ("memcheck", "initcheck")
DONE = re.compile(r"^calls: (\d+) of (\d+)$", re.MULTILINE)
# The last line of a tool; where more was found than printed, another follows, of what was not printed.
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were not)", re.MULTILINE)
# initcheck reports linear's counters, which nobody clears: what is no token of the call counts as 0 (CountIn in
# ffi/ops/linear/work_range.cuh). Two threads of a CTA read them. Partial sums are read by all of its threads, so that
# other reports would tell if those were missing.
COUNTERS = re.compile(
    r"^=+ Uninitialized __global__ memory read of size 8 bytes\n"
    r"=+ +at void xla_gpu::linear::LinearKernel<.*\n"
    r"=+ +by thread \((?:0|32),0,0\) in block ",
    re.MULTILINE,
)


def find_sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    places += [str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*")]
    folders = [f"{place}/{folder}" for place in places if place for folder in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit("compute-sanitizer was not found in PATH, CUDA_HOME or /usr/local/cuda*")
    return found


def options_of(tool: str, number: int) -> list[str]:
    """compute-sanitizer's, for the process of that number."""
    limit = "20" if tool != "initcheck" else "100000"  # all, since COUNTERS are recognised by the text
    options = ["--tool", tool, "--print-limit", limit, "--error-exitcode", "99", "--launch-timeout", "120"]
    options += ["--port", str(49152 + 32 * number)]  # several at once must not meet
    if tool == "memcheck":
        # Padding, so that a buffer's neighbour is no other buffer. Failing calls of the CUDA API are for the handlers
        # to report: they ask it questions whose answer may be an error. The driver's context is not given back.
        options += ["--padding", "256", "--report-api-errors", "no", "--leak-check", "no"]
    return options


@dataclasses.dataclass
class Outcome:
    errors: int | None  # that the tool counted, without COUNTERS; None if it did not come to count
    done: int | None  # calls; None if the program did not come to its end
    calls: int
    seconds: float
    output: str


def under_tool(command: list[str], limit: float) -> Outcome:
    begun = time.monotonic()
    # One thread for NumPy: the processes share the cores.
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nno end within {limit:.0f} s: {' '.join(command)}\n"
    counts, done = SUMMARY.findall(output), DONE.search(output)
    return Outcome(
        errors=int(counts[-1]) - len(COUNTERS.findall(output)) if counts else None,
        done=int(done[1]) if done else None,
        calls=int(done[2]) if done else 0,
        seconds=time.monotonic() - begun,
        output=output,
    )


def report(tool: str, parts: list[Outcome], planted: Outcome | None) -> bool:
    """Prints what became of one tool. Whether all is well."""
    sound = all(part.errors == 0 and part.done is not None for part in parts)
    errors = "no count" if any(part.errors is None for part in parts) else sum(part.errors or 0 for part in parts)
    text = f"{tool}: {sum(part.done or 0 for part in parts)} calls of {sum(part.calls for part in parts)}, "
    text += f"{errors} errors, {max(part.seconds for part in parts):.0f} s"
    if any(part.done is None for part in parts):
        text += ", ended before the last call"
    if planted is not None:
        text += f"; a planted fault: {'found' if planted.errors else 'NOT FOUND'}"
    print(text, flush=True)
    for part in parts:
        if part.errors != 0 or part.done is None:
            long = len(part.output) > 8000
            print(part.output[:3000] + "\n…\n" + part.output[-5000:] if long else part.output, flush=True)
    if planted is not None and not planted.errors:
        print(planted.output[-3000:], flush=True)
        sound = False
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libxla_gpu_ffi.so; default: the installed one, or XLA_GPU_LIBRARY")
    parser.add_argument("--tool", action="append", help=f"of compute-sanitizer; default: {', '.join(TOOLS)}")
    parser.add_argument("--seconds", type=float, default=45, help="of calls in each process (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default %(default)s)")
    parser.add_argument("--parts", type=int, default=1, help="processes of each tool, with a part of the calls each")
    parser.add_argument("--host", action="store_true", help="the host's handlers, without a tool")
    parser.add_argument("--inside", type=int, metavar="PART", help=argparse.SUPPRESS)  # this process runs under a tool
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library:
        os.environ["XLA_GPU_LIBRARY"] = str(Path(args.library).resolve(strict=True))
    if args.plant:
        sanitized_calls.planted_fault(sanitized_calls.Cuda(), args.plant)
        return 0
    if args.host or args.inside is not None:
        memory = sanitized_calls.Host() if args.host else sanitized_calls.Cuda()
        sanitized_calls.run_calls(memory, args.seconds, args.inside or 0, args.parts)
        return 0

    sanitizer, tools = find_sanitizer(), args.tool or TOOLS
    started: dict[tuple[str, int | None], concurrent.futures.Future[Outcome]] = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for part in [None, *range(args.parts)]:  # planted faults first, which show that a tool works here at all
            for tool in tools:
                if part is None and tool not in PLANTED:
                    continue
                inside = ["--plant", tool] if part is None else ["--inside", str(part), "--parts", str(args.parts)]
                command = [sanitizer, *options_of(tool, len(started)), sys.executable, __file__, *inside]
                # Above the time for calls stands that of a last one, and of a kernel that a tool takes long to prepare.
                limit = 2 * args.seconds + 180
                started[tool, part] = pool.submit(under_tool, [*command, "--seconds", str(args.seconds)], limit)
        sound = True
        for tool in tools:
            parts = [started[tool, part].result() for part in range(args.parts)]
            sound &= report(tool, parts, started[tool, None].result() if (tool, None) in started else None)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
