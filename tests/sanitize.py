"""The CUDA handlers under compute-sanitizer: memcheck, initcheck, synccheck.

    python tests/sanitize.py --library build/cuda/ffi/libxla_gpu_ffi.so      # on a machine with a GPU, some 3 minutes
    python tests/sanitize.py --library … --tool racecheck --seconds 300      # another tool, longer
    python tests/sanitize.py --library … --host                              # the same calls on the host, no tool

No framework takes part: the handlers are called through xla_gpu_call on memory of the CUDA driver's, each buffer an
allocation of exactly its size, results and scratch never written before the call. So whatever a tool reports is ours.
The calls are those of tests/cases.py, a spread of them first, as many as the time allows; some have numbers in their
metadata that no batch may have. Sound calls are compared with the float64 reference, loosely: the tests are strict.
memcheck and initcheck must also find a fault that is planted for them. Ends with 1 if something was found, or nothing
could be said.

compute-sanitizer is part of the CUDA toolkit, and of the package nvidia-cuda-sanitizer-api.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from tests import cases, reference  # noqa: E402
from xla_gpu import _frames, _targets  # noqa: E402
from xla_gpu._signature import ArraySpec  # noqa: E402
from xla_gpu.ops import merge_attention_states, paged_attention, reshape_and_cache, simple_add  # noqa: E402

TOOLS = ("memcheck", "initcheck", "synccheck")
DONE = re.compile(r"^calls: (\d+) of (\d+)$", re.MULTILINE)
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


# ---- Memory ----------------------------------------------------------------------------------------------------------
class Cuda:
    """The driver's memory, in the context that the library's CUDA runtime uses too."""

    platform, ordinal = "CUDA", 0

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), self.ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        if size:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        if address:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            array = np.ascontiguousarray(array)
            source = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))

    def read(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            target = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def wait(self) -> None:
        self._call("cuCtxSynchronize")


class Host:
    """The same on the host, to try this file without a GPU."""

    platform, ordinal = "cpu", -1

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        block = np.empty(size + 64, np.uint8)
        address = (block.ctypes.data + 63) // 64 * 64
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        self._blocks.pop(address, None)

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def wait(self) -> None:
        pass


# ---- One call --------------------------------------------------------------------------------------------------------
def call(memory, operator, arrays: dict[str, np.ndarray], plant: str | None = None, **options) -> list[np.ndarray]:
    """The operator's results. `plant` leaves out what a tool must notice: operands' values, or half of the result."""
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in arrays.items()}
    bound = operator.bind(**specs, **options)
    given = [arrays[name] for name in operator.operands if name in arrays]
    operands = [memory.allocate(array.nbytes) for array in given]
    aliased = {result: operand for operand, result in bound.aliases}
    outs = [np.empty(spec.shape, cases.DTYPES.get(spec.dtype, spec.dtype)) for spec in bound.all_results]
    results = [
        operands[aliased[i]] if i in aliased else memory.allocate(out.nbytes // (2 if plant == "memcheck" else 1))
        for i, out in enumerate(outs)
    ]
    try:
        for address, array in zip(operands, given, strict=True):
            if plant != "initcheck":
                memory.write(address, array)
        frame = _frames.Frame(bound, _targets.lookup(bound.target, memory.platform))
        frame.run(operands, results, None, memory.ordinal)
        memory.wait()
        for address, out in zip(results[: len(bound.results)], outs, strict=False):  # scratch is nobody's business
            memory.read(address, out)
    finally:
        for address in {*operands, *results}:
            memory.free(address)
    return outs[: len(bound.results)]


def compare(name: str, got: np.ndarray, want: np.ndarray) -> None:
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    same = (np.isfinite(got) == finite).all()
    scale = max(1.0, np.abs(want[finite]).max(initial=0.0))
    if not same or np.abs(got[finite] - want[finite]).max(initial=0.0) > 0.05 * scale:
        raise SystemExit(f"{name}: the result is wrong, whatever the tool says")


# ---- All calls -------------------------------------------------------------------------------------------------------
def attention(memory, case) -> None:
    arrays = cases.build(case).arrays()
    out, lse = call(memory, paged_attention.OPERATOR_WITH_LSE, arrays, **case.options())
    want, want_lse = reference.paged_attention(**arrays, **case.options())
    compare(f"{case.name}: out", out, want)
    compare(f"{case.name}: lse", lse, want_lse)


def cache_update(memory, case) -> None:
    arrays = cases.build_cache(case)
    (cache,) = call(memory, reshape_and_cache.OPERATOR, arrays)
    compare(case.name, cache, reference.reshape_and_cache(**arrays))


def addition(memory, dtype: str, size: int) -> None:
    a = np.arange(size).astype(cases.DTYPES[dtype])
    (out,) = call(memory, simple_add.OPERATOR, {"a": a, "b": a[::-1].copy()})
    compare(f"simple_add {dtype}[{size}]", out, a.astype(np.float64) + a[::-1].astype(np.float64))


def merging(memory, dtype: str, head_dim: int) -> None:
    rng = cases.rng_for(f"sanitize-{dtype}-{head_dim}")
    out = [rng.standard_normal((5, 3, head_dim)).astype(cases.DTYPES[dtype]) for _ in range(2)]
    lse = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(2)]
    lse[0][0], lse[1][1] = -np.inf, -np.inf
    arrays = {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]}
    call(memory, merge_attention_states.OPERATOR, arrays)


WRONG = {
    "block_tables": (-1, 2**31 - 1, -(2**31), "num_pages"),
    "context_lens": (-1, 2**31 - 1, -(2**31), 10**6),
    "query_start_loc": (-1, 2**31 - 1, 10**6),
    "num_seqs": (-1, 2**31 - 1, 10**6),
}


def hostile_attention(memory, case, argument: str, value) -> None:
    """Only the tool judges: rows may be NaN, which tests/test_bad_values.py checks."""
    arrays = cases.build(case).arrays()
    array = arrays[argument]
    pages = arrays["kv_cache"].shape[case.layout == "split"]
    array.reshape(-1)[len(array.reshape(-1)) // 3] = pages if value == "num_pages" else value
    try:
        call(memory, paged_attention.OPERATOR, arrays, **case.options())
    except ValueError:
        if memory.platform == "CUDA":  # there, a handler does not look
            raise


def hostile_slots(memory, case) -> None:
    arrays = cases.build_cache(case)
    slots = arrays["slot_mapping"]
    if slots.size < 3:
        return
    largest = np.iinfo(slots.dtype).max
    slots[:3] = case.num_pages * case.page_size, largest, largest - 7
    try:
        call(memory, reshape_and_cache.OPERATOR, arrays)
    except ValueError:
        if memory.platform == "CUDA":
            raise


def all_calls(memory) -> list:
    """Functions without arguments, the most telling first."""
    calls = []

    def add(function, *arguments):
        calls.append(lambda: function(memory, *arguments))

    for dtype in cases.FLOATS:
        for size in (1, 1000, 4099):
            add(addition, dtype, size)
        for head_dim in (8, 128):
            add(merging, dtype, head_dim)
    for case in cases.COMMON:
        add(attention, case)
    for case in cases.CACHE_CASES:
        add(cache_update, case)
    for case in (cases.COMMON[1], cases.COMMON[2], cases.COMMON[9]):
        for argument, values in WRONG.items():
            for value in values:
                add(hostile_attention, case, argument, value)
    for case in cases.CACHE_CASES:
        add(hostile_slots, case)
    grid = cases.grid()
    # Neighbours in the grid are alike: every seventh first, so that whatever the time allows is a spread.
    for case in [*cases.MORE, *(case for start in range(7) for case in grid[start::7])]:
        add(attention, case)
    for case in cases.cache_grid():
        add(cache_update, case)
    return calls


def run_calls(memory, seconds: float) -> None:
    """What runs under the tool."""
    calls, begun, done = all_calls(memory), time.monotonic(), 0
    for one in calls:
        if time.monotonic() - begun > seconds:
            break
        one()
        done += 1
    print(f"calls: {done} of {len(calls)}", flush=True)


# ---- The tools -------------------------------------------------------------------------------------------------------
def find_sanitizer() -> str:
    places = [os.environ.get("CUDA_HOME", ""), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    places += [str(path) for path in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*")]
    folders = [f"{place}/{folder}" for place in places if place for folder in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit("compute-sanitizer was not found in PATH, CUDA_HOME or /usr/local/cuda*")
    return found


def under_tool(sanitizer: str, tool: str, arguments: list[str]) -> tuple[int | None, str]:
    """(errors that the tool counted, None if it did not come to count; all that was printed)."""
    options = ["--tool", tool, "--print-limit", "20", "--error-exitcode", "99"]
    if tool == "memcheck":
        options += ["--leak-check", "no"]  # the driver's own context is not given back
    command = [sanitizer, *options, sys.executable, __file__, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    output = process.stdout + process.stderr
    counts = SUMMARY.findall(output)
    return (int(counts[-1]) if counts else None), output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libxla_gpu_ffi.so; default: the installed one, or XLA_GPU_LIBRARY")
    parser.add_argument("--tool", action="append", help=f"of compute-sanitizer; default: {', '.join(TOOLS)}")
    parser.add_argument("--seconds", type=float, default=45, help="of calls for each tool")
    parser.add_argument("--host", action="store_true", help="the host's handlers, without a tool")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this process runs under a tool
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library:
        os.environ["XLA_GPU_LIBRARY"] = str(Path(args.library).resolve())
    if args.plant:
        a = np.ones(4096, np.float32)
        call(Cuda(), simple_add.OPERATOR, {"a": a, "b": a}, plant=args.plant)
        return 0
    if args.host or args.inside:
        run_calls(Host() if args.host else Cuda(), args.seconds)
        return 0

    sanitizer, failed = find_sanitizer(), False
    for tool in args.tool or TOOLS:
        begun = time.monotonic()
        errors, output = under_tool(sanitizer, tool, ["--inside", "--seconds", str(args.seconds)])
        done = DONE.search(output)
        print(f"{tool}: {done[1] if done else 'not all'} calls", end="")
        print(f" of {done[2]}, " if done else ", ", end="")
        print(
            f"{'no count' if errors is None else errors} errors, {time.monotonic() - begun:.0f} s", end="", flush=True
        )
        sound = errors == 0 and done is not None
        if tool in ("memcheck", "initcheck"):
            planted, _ = under_tool(sanitizer, tool, ["--plant", tool])
            print(f"; a planted fault: {planted or 'not'} found", end="")
            sound = sound and bool(planted)
        print(flush=True)
        if not sound:
            failed = True
            print(output[-6000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
