"""``python -m xla_gpu doctor``: what is installed, and which front ends work.

A front end is tried by a call of simple_add in a process of its own: a framework that crashes, hangs or is half
installed takes nothing else down. This process imports no framework.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

from .._runtime import cuda_driver
from .._runtime.library import load as load_library
from ..errors import LibraryError
from .architectures import code_for

REPORT_MARK = "xla_gpu doctor report: "
_PACKAGES = (
    *("torch", "torch_xla", "torchax", "jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "numpy"),
    *("vllm", "vllm-tpu"),  # the second is vLLM's Python side alone
    *("triton", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "apache-tvm-ffi"),  # for users' kernels
)
_FRONTEND_SECONDS = 240  # the first compilation on a GPU takes its time; nothing healthy takes this long
_DEVICE_SECONDS = 60


class Frontend(NamedTuple):
    """A way to call the operators: a framework on a device."""

    name: str
    device: str  # "CPU" or "GPU"
    requires: tuple[str, ...]  # modules
    module: str  # of this package: run with the device as its argument, it tries the front end
    environment: dict[str, str]
    install: str  # what brings the framework


_GPU_EXTRAS = (
    "in a checkout of xla_gpu: pip install '.[cuda12]' (driver 550 or newer) or '.[cuda13]' (driver 580 or newer)"
)
_TORCH, _JAX, _TORCHAX = (
    f"in a checkout of xla_gpu: pip install '.[{extra}]'" for extra in ("torch", "jax", "torchax")
)
_TORCHAX_NEEDS = ("torchax", "torch", "jax", "jaxlib")
_GPU_TORCHAX = f"{_GPU_EXTRAS}, and pip install '.[torchax]'"
_VLLM_NEEDS = ("vllm", "torch", "torch_xla")
_VLLM = "pip install 'vllm==0.12.0' 'torch==2.9.0' 'torch_xla==2.9.0', see docs/vllm.md"
_CUDA_TORCH = "a build of PyTorch with CUDA: pip install torch==2.9.0"
FRONTENDS = (
    Frontend("torch_xla", "CPU", ("torch", "torch_xla"), "probe_torch_xla", {"PJRT_DEVICE": "CPU"}, _TORCH),
    Frontend("torch_xla", "GPU", ("torch", "torch_xla"), "probe_torch_xla", {"PJRT_DEVICE": "GPU"}, _GPU_EXTRAS),
    Frontend("JAX", "CPU", ("jax", "jaxlib"), "probe_jax", {"JAX_PLATFORMS": "cpu"}, _JAX),
    Frontend("JAX", "GPU", ("jax", "jaxlib"), "probe_jax", {"JAX_PLATFORMS": "cuda"}, _GPU_EXTRAS),
    Frontend("torchax", "CPU", _TORCHAX_NEEDS, "probe_torchax", {"JAX_PLATFORMS": "cpu"}, _TORCHAX),
    Frontend("torchax", "GPU", _TORCHAX_NEEDS, "probe_torchax", {"JAX_PLATFORMS": "cuda"}, _GPU_TORCHAX),
    Frontend("eager PyTorch", "CPU", ("torch",), "probe_torch", {}, _TORCH),
    Frontend("eager PyTorch", "GPU", ("torch",), "probe_torch", {}, _CUDA_TORCH),
    Frontend("vLLM", "CPU", _VLLM_NEEDS, "probe_vllm", {"PJRT_DEVICE": "CPU"}, _VLLM),
    Frontend("vLLM", "GPU", _VLLM_NEEDS, "probe_vllm", {"PJRT_DEVICE": "GPU"}, _VLLM),
)

# Statuses of a front end.
WORKS, FAILS, NOT_INSTALLED, NO_DEVICE = "works", "does not work", "not installed", "no device"


def run(as_json: bool) -> int:
    """Prints the report and returns the exit status, 0 if nothing that should work fails."""
    report = examine()
    print(json.dumps(report, indent=2) if as_json else as_text(report))
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """The report. Takes a minute or so: a process for each front end, which imports its framework."""
    library, device = _library_report(), _device_report()
    with ThreadPoolExecutor(max_workers=2) as pool:
        frontends = list(pool.map(lambda frontend: try_frontend(frontend, library, device), FRONTENDS))
    return {
        "ok": all(frontend["status"] != FAILS for frontend in frontends) and "error" not in library,
        "versions": _versions(),
        "library": library,
        "device": device,
        "frontends": frontends,
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("xla_gpu", *_PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    if versions["xla_gpu"] is None:  # a checkout on PYTHONPATH
        from .. import __version__

        versions["xla_gpu"] = __version__
    return versions


def _library_report() -> dict[str, Any]:
    try:
        library = load_library()
    except LibraryError as error:
        return {"error": str(error)}
    targets: dict[str, list[str]] = {}
    for handler in library.handlers():
        targets.setdefault(handler.platform, []).append(handler.target)
    return {"path": str(library.path), **library.build_info(), "targets": targets}


def _device_report() -> dict[str, Any]:
    # In a process of its own: a broken driver may hang.
    program = f"import json; from {__name__} import ask_driver; print(json.dumps(ask_driver()))"
    outcome = run_process([sys.executable, "-c", program], {}, _DEVICE_SECONDS)
    try:
        report: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"gpus": [], "error": f"asking the NVIDIA driver failed: {outcome.failure()}"}
    return report


def ask_driver() -> dict[str, Any]:
    """The driver and its GPUs, or why there are none; called in a process of its own."""
    try:
        driver = cuda_driver.driver()
    except cuda_driver.DriverError as error:
        return {"gpus": [], "error": str(error)}
    return {
        "driver": driver.version,
        "driver_cuda": _dotted(driver.cuda),
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": _dotted(gpu.compute_capability),
                "memory_bytes": gpu.memory_bytes,
            }
            for gpu in driver.gpus
        ],
    }


def installed(module: str) -> bool:
    if importlib.util.find_spec(module) is None:
        return False
    # torch_xla 2.9's wheel holds files of torchax, and not what they import. The package of that name has metadata.
    return module != "torchax" or any(True for _ in metadata.distributions(name=module))


def try_frontend(frontend: Frontend, library: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"frontend": frontend.name, "device": frontend.device}

    def outcome(status: str, reason: str, remedy: str) -> dict[str, Any]:
        return {**result, "status": status, "reason": reason, "remedy": remedy}

    missing = [module for module in frontend.requires if not installed(module)]
    if missing:
        return outcome(NOT_INSTALLED, f"not installed: {', '.join(missing)}", frontend.install)
    if frontend.device == "GPU" and not device["gpus"]:
        return outcome(NO_DEVICE, "this process may use no GPU; see device", "run where there is an NVIDIA GPU")
    if "error" in library:
        return outcome(FAILS, library["error"], "make the library load; see above")
    if frontend.device == "GPU" and library["cuda"] is None:
        return outcome(FAILS, "the library was built without CUDA", "build it with XLA_GPU_CUDA=ON")
    command = [sys.executable, "-m", f"{__package__}.{frontend.module}", frontend.device]
    # The front ends share the GPU while they are tried, and with whatever else runs there: none may take most of it.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **frontend.environment}
    process = run_process(command, environment, _FRONTEND_SECONDS)
    for line in process.stdout.splitlines():
        if line.startswith(REPORT_MARK):
            report: dict[str, Any] = json.loads(line.removeprefix(REPORT_MARK))
            result["runtime"] = report.get("runtime")
            if "error" in report:
                return outcome(FAILS, report["error"], _remedy(frontend, library, device))
            if process.status == 0:
                return {**result, "status": WORKS}
    return outcome(FAILS, process.failure(), _remedy(frontend, library, device))


def _remedy(frontend: Frontend, library: dict[str, Any], device: dict[str, Any]) -> str:
    """What most often helps; the reason names the particular case."""
    if frontend.device == "GPU":
        built_for = library["cuda_architectures"]
        for gpu in device["gpus"]:
            if built_for and code_for(gpu["compute_capability"], built_for) is None:
                return (
                    f"the library has no code for {gpu['name']} (compute capability {gpu['compute_capability']}); it "
                    f"was built for {', '.join(built_for)}. `pip install .` in a checkout here builds it for "
                    "this GPU, with CUDAARCHS=all for all"
                )
    return f"if the reason does not say: {frontend.install}"


class Outcome(NamedTuple):
    status: int | None  # None: it ran past its limit
    stdout: str
    stderr: str
    seconds: int

    def failure(self) -> str:
        """Why the process failed, with the last that it said."""
        if self.status is None:
            how = f"no answer within {self.seconds} s"
        elif self.status < 0:
            how = f"the process died of {signal.Signals(-self.status).name}"
        else:
            how = f"the process ended with status {self.status}"
        said = [line.strip() for line in self.stderr.splitlines() if line.strip()][-3:]
        return f"{how}: {' | '.join(said)}" if said else how


def run_process(command: list[str], environment: dict[str, str], seconds: int) -> Outcome:
    # A session of its own, so that what the framework started is ended with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        return Outcome(None, stdout, stderr, seconds)
    return Outcome(process.returncode, stdout, stderr, seconds)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# ---- The report as text ----------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["versions", *_rows({name: version or "-" for name, version in report["versions"].items()})]

    lines += ["", "library"]
    library = report["library"]
    if "error" in library:
        lines.append(f"  {library['error']}")
    else:
        cuda = f"{library['cuda']} for {', '.join(library['cuda_architectures'])}" if library["cuda"] else "none"
        lines += _rows(
            {
                "path": library["path"],
                "FFI API": ".".join(map(str, library["ffi_api"])),
                "CUDA": cuda,
                "host kernels": library["host_isa"],
                "host processors": str(library["host_processors"]),
                "compiler": library["compiler"],
                **{f"{where} targets": ", ".join(names) for where, names in library["targets"].items()},
            }
        )

    lines += ["", "device"]
    device = report["device"]
    if device["gpus"]:
        lines.append(f"  NVIDIA driver {device['driver'] or '(version unknown)'}, CUDA {device['driver_cuda']}")
    for gpu in device["gpus"]:
        memory = gpu["memory_bytes"] / 2**30
        lines.append(f"  {gpu['name']}, compute capability {gpu['compute_capability']}, {memory:.0f} GiB")
        if built_for := library.get("cuda_architectures"):
            code = code_for(gpu["compute_capability"], built_for)
            slow = ", which the driver compiles when it is first used" if code and code.startswith("PTX") else ""
            lines.append(f"    runs the library's {code}{slow}" if code else "    the library has no code for it")
    if not device["gpus"]:
        lines.append(f"  {device['error']}")

    lines += ["", "runtimes"]
    for frontend in report["frontends"]:
        if runtime := frontend.get("runtime"):
            facts = [f"PJRT API {runtime['pjrt_api'] or 'built in'}", f"FFI API {runtime['ffi_api'] or 'not told'}"]
            if runtime.get("plugin"):
                facts.append(runtime["plugin"])
            platforms = [where for where, names in library.get("targets", {}).items() if names == runtime["targets"]]
            names = f"all {platforms[0]} targets" if platforms else f"targets {', '.join(runtime['targets']) or 'none'}"
            facts.append(names)
            lines.append(f"  {frontend['frontend']} {frontend['device']}: {'; '.join(facts)}")

    lines += ["", "front ends"]
    for frontend in report["frontends"]:
        lines.append(f"  {frontend['frontend']:<13} {frontend['device']}  {frontend['status']}")
        if frontend["status"] != WORKS:
            lines += [f"      why: {frontend['reason']}", f"      do:  {frontend['remedy']}"]
    verdict = "all front ends that can work here do" if report["ok"] else "something that should work does not"
    if report["ok"] and all(frontend["status"] != WORKS for frontend in report["frontends"]):
        verdict = "no front end works yet: install the framework of one"
    lines += ["", verdict]
    return "\n".join(lines)


def _rows(values: dict[str, str]) -> list[str]:
    width = max(map(len, values))
    return [f"  {name:<{width}}  {value}" for name, value in values.items()]
