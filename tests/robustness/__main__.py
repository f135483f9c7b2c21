"""All of tests/robustness and the fuzzer, side by side, and the counts that docs/reliability.md quotes:

    python -m tests.robustness --fuzz-minutes 5              # front ends of the host
    python -m tests.robustness --gpu --fuzz-minutes 5 --jobs 8   # front ends of the GPU: eager CUDA, JAX, torch_xla

Every test file has a process of its own, then the fuzzer has --jobs. Ends with 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).parent
FILES = [*sorted(HERE.glob("test_*.py")), *sorted((HERE.parent / "fuzz").glob("test_*.py"))]
ROOT = HERE.parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the tests marked gpu, through the CUDA front ends")
    parser.add_argument("--fuzz-minutes", type=float, default=5, help="0: no fuzzing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--seed", type=int, help="of the fuzzer; a random one, if not given")
    args = parser.parse_args()
    failed = _tests(args)
    if args.fuzz_minutes:
        failed |= _fuzz(args)
    return 1 if failed else 0


def _tests(args: argparse.Namespace) -> bool:
    waiting, running, total = list(FILES), [], {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                running.append(_start(waiting.pop(0), args.gpu, Path(folder)))
            time.sleep(0.2)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                running.remove(entry)
                failed |= _report(*entry, total)
    print(json.dumps({"tests": total}), flush=True)
    return failed


def _start(file: Path, gpu: bool, folder: Path):
    report, log = folder / f"{file.stem}.xml", folder / f"{file.stem}.txt"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider", str(file)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "-m", "gpu" if gpu else "not gpu"], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
        )
    return file, process, report, log


def _report(file: Path, process: subprocess.Popen, report: Path, log: Path, total: dict[str, int]) -> bool:
    if process.returncode not in (0, 5):  # 5: no test was selected
        print(log.read_text()[-20000:], flush=True)
    name = file.relative_to(ROOT)
    if not report.is_file():
        print(f"{name}: ended with {process.returncode} and no report", flush=True)
        return True
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    for key, n in count.items():
        total[key] = total.get(key, 0) + n
    print(f"{name}: {count}, {float(suite.get('time', 0)):.0f} s", flush=True)
    return process.returncode not in (0, 5)


def _fuzz(args: argparse.Namespace) -> bool:
    # The front ends that compile are slower by far, and share the kernels with the eager one. So half of the processes
    # fuzz the eager one alone.
    frontends = [["eager-cuda"], ["eager-cuda", "jax-cuda"]] if args.gpu else [["eager"], ["eager", "jax", "torch_xla"]]
    seed = [] if args.seed is None else [f"--seed={args.seed}"]
    running = []
    for chosen in frontends:
        command = [sys.executable, "-m", "tests.fuzz", f"--minutes={args.fuzz_minutes}", *seed]
        command += [f"--jobs={max(1, args.jobs // 2)}", *(f"--frontend={name}" for name in chosen)]
        running.append(subprocess.Popen(command, cwd=ROOT))
    return any([process.wait() != 0 for process in running])


if __name__ == "__main__":
    sys.exit(main())
