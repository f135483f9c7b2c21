"""The CUDA side of a build: which nvcc, for which architectures, and whether compiler, GPU and driver can be used.

The build backend asks before a compiler is downloaded, CMake before anything is compiled (cuda.cmake runs this file).
What cannot be used is an Unusable error of one line: what was found, and what to do. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST_NVCC = (12, 8)
OLDEST_GPU = 80  # compute capability 8.0
WHEELS_VERSION = (13, 0)  # of the compiler that build_backend.py asks the registry for
_DRIVERS = {12: 550, 13: 580}  # by CUDA's major version: the oldest that runs its code, compressed as ffi/ has it
# Code for an architecture runs on the later ones of its major version too, and the driver takes the latest that fits:
# 86 serves 8.7 and 8.8, 100 10.3, 120 12.1. Code for 86 and 89 differs from 80's, and float8 conversions are
# instructions from 89 on. The kernels use nothing that only a family's code (100f, 120f) has.
EVERY_GPU = ("80", "86", "89", "90a", "100", "110", "120")
_SECONDS = 30  # nothing healthy takes this long

_HOST_ONLY = "XLA_GPU_CUDA=OFF pip install . builds the CPU handlers alone"
_NAME_ONE = "name the GPUs to build for, as CUDAARCHS=90a does (H100, H200)"


class Unusable(Exception):
    """Something that the build needs is missing, too old or too new. One line: what was found, what to do."""


class Gpu(NamedTuple):
    """A GPU of this machine."""

    name: str
    architecture: int  # 90: compute capability 9.0
    driver: str

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.architecture // 10}.{self.architecture % 10})"


class Toolchain(NamedTuple):
    """What the build uses."""

    nvcc: str
    architectures: list[str]  # as CMAKE_CUDA_ARCHITECTURES wants them
    notes: list[str]  # for who builds, a line each


def toolchain(nvcc: str, asked: str, environ: Mapping[str, str]) -> Toolchain:
    """Checks ``nvcc`` with its host compiler, and resolves the requested architectures ("": none)."""
    version = nvcc_version(nvcc)
    check_host_compiler(nvcc, environ)
    known = known_architectures(nvcc)
    architectures, notes = resolve(asked, known, version)
    return Toolchain(nvcc, architectures, notes)


# ---- nvcc ------------------------------------------------------------------------------------------------------------
def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """CUDACXX, else nvcc of CUDA_HOME or CUDA_PATH, else of PATH, else of NVIDIA's wheels beside this Python."""
    if given := environ.get("CUDACXX"):
        if path := shutil.which(given, path=environ.get("PATH")):
            return path
        raise Unusable(f"CUDACXX is {given}, which is no program: set it to an nvcc, or unset it")
    places = [os.path.join(environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    for place in [*places, environ.get("PATH", "")]:
        if path := shutil.which("nvcc", path=place):
            return path
    return str(folder / "bin" / "nvcc") if (folder := wheels()) else None


def wheels() -> Path | None:
    """The folder that the wheels nvidia-cuda-nvcc, -nvvm, -crt, -runtime and -cccl share, if they are installed."""
    # Not by import: other wheels of NVIDIA's make nvidia a package of one place.
    folders = (Path(entry, "nvidia", "cu13") for entry in sys.path if entry)
    return next((folder for folder in folders if (folder / "bin" / "nvcc").is_file()), None)


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Its version, which must be one that compiles the kernels."""
    outcome = _run(nvcc, "--version")
    found = re.search(r"release (\d+)\.(\d+)", outcome.stdout)
    if outcome.returncode != 0 or found is None:
        raise Unusable(f"{nvcc} does not work ({_last_line(outcome)}): install a CUDA toolkit; {_HOST_ONLY}")
    version = int(found[1]), int(found[2])
    if version < OLDEST_NVCC:
        raise Unusable(
            f"{nvcc} is of CUDA {_dotted(version)}, and the kernels need {_dotted(OLDEST_NVCC)} or newer: point "
            "CUDA_HOME to a newer toolkit, or take this one out of PATH and pip brings CUDA "
            f"{_dotted(WHEELS_VERSION)}'s compiler"
        )
    return version


def known_architectures(nvcc: str) -> list[int]:
    """The architectures that this nvcc makes code for."""
    return sorted(int(number) for number in re.findall(r"compute_(\d+)$", _run(nvcc, "--list-gpu-arch").stdout, re.M))


def check_host_compiler(nvcc: str, environ: Mapping[str, str]) -> None:
    """Whether nvcc takes the host compiler: each release has a newest GCC and Clang that it works with."""
    host = environ.get("CUDAHOSTCXX")
    options = ["-ccbin", host] if host else []
    if "-allow-unsupported-compiler" in environ.get("CUDAFLAGS", ""):
        options.append("-allow-unsupported-compiler")
    outcome = _run(nvcc, "-std=c++17", "-x", "cu", "-E", "-o", os.devnull, os.devnull, *options)
    if outcome.returncode != 0:
        said = (outcome.stderr + outcome.stdout).strip().splitlines() or [f"exit status {outcome.returncode}"]
        why = next((line for line in said if "#error" in line or "rror:" in line), said[-1])
        why = re.sub(r"^.*?#error[ -]*", "", why).split("! The nvcc flag")[0].strip()
        raise Unusable(
            f"{nvcc} does not accept the host compiler {host or 'in PATH'} ({why}): install a g++ that it supports and "
            f"set CUDAHOSTCXX to it; {_HOST_ONLY}"
        )


def check_cxx(environ: Mapping[str, str]) -> None:
    """Whether there is a C++17 compiler at all: CXX, or one of the names that CMake tries."""
    given = environ.get("CXX", "").split()
    names = [given[0]] if given else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name, path=environ.get("PATH")))), None)
    if found is None:
        raise Unusable(
            f"no C++ compiler ({', '.join(names)}) in PATH: install one (Debian, Ubuntu: apt-get install g++), or set "
            "CXX to one"
        )
    outcome = _run(found, *given[1:], "-std=c++17", "-fsyntax-only", "-x", "c++", os.devnull)
    if outcome.returncode != 0:
        raise Unusable(
            f"{found} does not compile C++17 ({_last_line(outcome)}): install g++ 9 or newer, or set CXX to one"
        )


# ---- GPUs and their driver -------------------------------------------------------------------------------------------
def gpus() -> list[Gpu]:
    """This machine's GPUs as nvidia-smi tells; empty where there is no driver or no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    outcome = _run(program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    found = []
    for line in outcome.stdout.splitlines():
        if match := re.fullmatch(r"(.+), *(\d+)\.(\d), *([\d.]+)", line.strip()):
            found.append(Gpu(match[1], 10 * int(match[2]) + int(match[3]), match[4]))
    if not found and "No devices were found" not in outcome.stdout + outcome.stderr:
        raise Unusable(
            f"the NVIDIA driver does not work (nvidia-smi: {_last_line(outcome)}): repair or update it, or "
            f"{_NAME_ONE}; {_HOST_ONLY}"
        )
    return found


def usable_gpus(cuda: tuple[int, int]) -> list[Gpu]:
    """Those of this machine's GPUs that the kernels run on. Raises Unusable where none of its GPUs can be used."""
    found = gpus()
    usable = [gpu for gpu in found if gpu.architecture >= OLDEST_GPU]
    if found and not usable:
        raise Unusable(
            f"{found[0]} is too old for the kernels, which need compute capability 8.0 or newer: build for another "
            f"machine's GPU ({_NAME_ONE}); {_HOST_ONLY}"
        )
    needed = _DRIVERS.get(cuda[0], 0)
    if usable and int(usable[0].driver.split(".")[0]) < needed:
        raise Unusable(
            f"NVIDIA driver {usable[0].driver} is too old for code of CUDA {_dotted(cuda)}, which needs {needed} or "
            f"newer: update the driver"
            + (f", or point CUDA_HOME to a CUDA {cuda[0] - 1} toolkit" if cuda[0] > OLDEST_NVCC[0] else "")
        )
    return usable


# ---- Architectures ---------------------------------------------------------------------------------------------------
def resolve(asked: str, known: list[int], cuda: tuple[int, int]) -> tuple[list[str], list[str]]:
    """CMake's list for what was asked, with notes for who builds.

    ``asked``: "" or native for this machine's GPUs, all, all-major, or a list of architectures. ``known``: those that
    nvcc makes code for.
    """
    if asked in ("", "native"):
        found = usable_gpus(cuda)
        if found:
            wanted = [entry for gpu in found for entry in of_gpu(gpu, known, cuda)]
            return _unique(wanted), [f"code for this machine's GPU: {', '.join(_unique(map(str, found)))}"]
        if asked:
            raise Unusable(f"architecture native, and nvidia-smi finds no GPU here: {_NAME_ONE}")
        return every_gpu(known), [f"no GPU here: code for all GPUs, which takes long. For fewer, {_NAME_ONE}"]
    if asked == "all":
        return every_gpu(known), []
    if asked == "all-major":
        return [entry for entry in every_gpu(known) if entry.split("-")[0] not in ("86", "89")], []
    notes = []
    for entry in (entries := re.split(r"[;,\s]+", asked.strip("; "))):
        match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", entry)
        if match is None:
            raise Unusable(
                f"CUDA architecture {entry!r}: expected a list as CMake has it, such as 80;90a-real, or native, all, "
                "all-major"
            )
        if int(match[1]) < OLDEST_GPU:
            raise Unusable(
                f"CUDA architecture {entry}: the kernels need compute capability 8.0 (80) or newer; leave it out"
            )
        if int(match[1]) not in known:
            names = ", ".join(str(number) for number in known if number >= OLDEST_GPU)
            raise Unusable(
                f"CUDA architecture {entry} is unknown to nvcc {_dotted(cuda)}, which has {names}: take a newer CUDA "
                "toolkit, or leave it out"
            )
        if match[1] == "90" and not match[2] and match[3] != "-virtual":
            notes.append("architecture 90 leaves out the Hopper kernels, which are much faster there: 90a has them")
    return entries, notes


def of_gpu(gpu: Gpu, known: list[int], cuda: tuple[int, int]) -> list[str]:
    """Code for a GPU, and its PTX."""
    if gpu.architecture == 90:
        # 90a's PTX runs on Hopper alone. That of 90, for later GPUs, would be generated apart: a third more time.
        return ["90a"]
    older = [number for number in known if OLDEST_GPU <= number <= gpu.architecture]
    if not older:
        raise Unusable(f"nvcc {_dotted(cuda)} makes no code for {gpu}: take another CUDA toolkit; {_HOST_ONLY}")
    if older[-1] // 10 == gpu.architecture // 10:
        return [str(older[-1])]  # an older one of the same major version runs too
    return [f"{older[-1]}-virtual"]


def every_gpu(known: list[int]) -> list[str]:
    """Code for all GPUs that the kernels run on, and PTX of the last for later ones."""
    names = [name for name in EVERY_GPU if int(name.rstrip("a")) in known]
    return [*(f"{name}-real" for name in names[:-1]), names[-1]]


def _unique(items: object) -> list[str]:
    return list(dict.fromkeys(items))  # type: ignore[call-overload, no-any-return]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {_SECONDS} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))


def _last_line(outcome: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (outcome.stdout + "\n" + outcome.stderr).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {outcome.returncode}"


def main() -> int:
    """For CMake: prints nvcc, the wheels' folder where nvcc is theirs, the architectures, and notes, a line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", default="")
    parser.add_argument("--architectures", default="")
    parser.add_argument("--host-compiler", default="")
    parser.add_argument("--flags", default="")
    arguments = parser.parse_args()
    environ = dict(os.environ)
    if arguments.host_compiler:
        environ["CUDAHOSTCXX"] = arguments.host_compiler
    if arguments.flags:
        environ["CUDAFLAGS"] = arguments.flags
    try:
        nvcc = arguments.nvcc or find_nvcc(environ)
        if nvcc is None:
            raise Unusable(
                "no nvcc in CUDACXX, CUDA_HOME, PATH or Python's packages: install a CUDA toolkit "
                f"({_dotted(OLDEST_NVCC)} or newer), or build the CPU handlers alone with -DXLA_GPU_CUDA=OFF"
            )
        found = toolchain(nvcc, arguments.architectures, environ)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    folder = wheels()
    print(found.nvcc)
    print(folder if folder and Path(found.nvcc).is_relative_to(folder) else "")
    print(";".join(found.architectures))
    print("\n".join(found.notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
