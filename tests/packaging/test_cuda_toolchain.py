"""Which architectures a build chooses, and what it says of compilers, GPUs and drivers that it cannot use.

nvcc, nvidia-smi and c++ are programs that are made here in place of nvcc, nvidia-smi and c++.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLCHAIN = ROOT / "third_party" / "cuda_toolchain.py"
KNOWN = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
H200, L4, V100 = "NVIDIA H200, 9.0", "NVIDIA L4, 8.9", "Tesla V100, 7.0"

NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
  *--list-gpu-arch*) printf 'compute_%s\\n' {known} ;;
  *) {compile} ;;
esac
"""
GCC_TOO_NEW = (
    "echo '/cuda/host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not "
    "supported! The nvcc flag -allow-unsupported-compiler can be used' >&2; exit 1"
)


def load():
    spec = importlib.util.spec_from_file_location("cuda_toolchain", TOOLCHAIN)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path):
    """A folder of programs that is all of PATH, and what cuda_toolchain.py answers there."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder):
        self.folder = folder

    def program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def nvcc(self, version="13.0", known=KNOWN, compile_="true", name="nvcc"):
        return self.program(name, NVCC.format(version=version, known=" ".join(map(str, known)), compile=compile_))

    def gpus(self, *gpus, driver="580.95.05"):
        self.program("nvidia-smi", "#!/bin/sh\n" + "".join(f"echo '{gpu}, {driver}'\n" for gpu in gpus))

    def ask(self, architectures="", *options, **environ):
        command = [sys.executable, TOOLCHAIN, f"--architectures={architectures}", *options]
        environment = {"PATH": str(self.folder), **environ}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def architectures(self, asked="", **environ):
        outcome = self.ask(asked, **environ)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout.splitlines()[2]

    def refuses(self, *parts, asked="", **environ):
        outcome = self.ask(asked, **environ)
        assert outcome.returncode == 1 and outcome.stdout == "", outcome.stdout
        lines = outcome.stderr.splitlines()
        assert len(lines) == 1, outcome.stderr
        for part in parts:
            assert re.search(part, lines[0]), lines[0]


# ---- Which architectures ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([H200], "90a"),
        ([H200] * 8, "90a"),
        ([L4], "89"),
        (["NVIDIA A100, 8.0", L4], "80;89"),
        (["NVIDIA GB300, 10.3"], "103"),
        ([V100, L4], "89"),  # the older one is left out
        (["NVIDIA X, [N/A]"], None),
    ],
)
def test_nothing_said_is_this_machines_gpu(machine, gpus, expected):
    machine.nvcc()
    machine.gpus(*gpus)
    if expected is None:
        machine.refuses("the NVIDIA driver does not work", "CUDAARCHS=90a")
    else:
        assert machine.architectures() == expected == machine.architectures("native")


def test_a_gpu_newer_than_nvcc_gets_the_nearest_code(machine):
    machine.nvcc("12.8", [80, 86, 89, 90, 100, 120])
    machine.gpus("NVIDIA GB300, 10.3")
    assert machine.architectures() == "100"  # of the same major version
    machine.gpus("NVIDIA T5000, 11.0")
    assert machine.architectures() == "100-virtual"


def test_no_gpu_is_every_gpu(machine):
    machine.nvcc()
    assert machine.architectures() == "80-real;86-real;89-real;90a-real;100-real;110-real;120"
    assert "takes long" in machine.ask().stdout
    machine.program("nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert machine.architectures() == machine.architectures("all")


def test_what_is_said_is_built_and_no_gpu_is_asked(machine):
    machine.nvcc()
    machine.program("nvidia-smi", "#!/bin/sh\necho broken; exit 9\n")
    for said in ("80;90a-real", "89", "90a-real", "120-virtual", "100f", "all"):
        assert machine.architectures(said) == (said if said != "all" else machine.architectures("all"))
    assert machine.architectures("80,90a-real") == "80;90a-real"
    assert machine.architectures("all-major") == "80-real;90a-real;100-real;110-real;120"


def test_plain_90_is_built_with_a_word_about_90a(machine):
    machine.nvcc()
    assert machine.architectures("90") == "90"
    assert "90a" in machine.ask("90").stdout.splitlines()[3]
    assert machine.ask("90a-real;90-virtual").stdout.splitlines()[3:] == [""]


# ---- What cannot be used ---------------------------------------------------------------------------------------------
def test_no_nvcc(machine):
    machine.refuses("no nvcc in CUDACXX, CUDA_HOME, PATH", "install a CUDA toolkit", "-DXLA_GPU_CUDA=OFF")


def test_cuda_home_comes_before_path(machine):
    machine.nvcc("11.8")
    machine.nvcc("13.0", name="toolkit/bin/nvcc")
    assert machine.architectures("80", CUDA_HOME=str(machine.folder / "toolkit")) == "80"
    machine.refuses("CUDA 11.8", "12.8 or newer", "CUDA_HOME", asked="80")


def test_the_wheels_nvcc_is_found_beside_packages_of_cuda_12(machine):
    """Wheels for CUDA 12 bring nvidia/__init__.py, after which Python looks for nvidia.cu13 there alone."""
    (machine.folder / "site-12" / "nvidia").mkdir(parents=True)
    (machine.folder / "site-12" / "nvidia" / "__init__.py").touch()
    nvcc = machine.nvcc(name="site-13/nvidia/cu13/bin/nvcc")
    path = os.pathsep.join(str(machine.folder / site) for site in ("site-12", "site-13"))
    lines = machine.ask("90a", PYTHONPATH=path).stdout.splitlines()
    assert lines[:2] == [str(nvcc), str(nvcc.parent.parent)]


def test_cudacxx_that_is_no_program(machine):
    machine.nvcc()
    machine.refuses("CUDACXX is /nowhere/nvcc", "unset it", CUDACXX="/nowhere/nvcc")


def test_an_nvcc_that_does_not_run(machine):
    machine.program("nvcc", "#!/bin/sh\necho 'libfoo.so: cannot open shared object file' >&2; exit 127\n")
    machine.refuses("nvcc does not work", "libfoo.so", "XLA_GPU_CUDA=OFF")


def test_a_host_compiler_that_nvcc_does_not_take(machine):
    machine.nvcc(compile_=GCC_TOO_NEW)
    machine.refuses("host compiler in PATH", "gcc versions later than 15 are not supported", "CUDAHOSTCXX")
    machine.refuses("host compiler g\\+\\+-16", CUDAHOSTCXX="g++-16")


def test_a_host_compiler_is_named_or_allowed_as_cmake_has_it(machine):
    machine.nvcc(
        compile_=f'case "$*" in *"-ccbin g++-15"* | *-allow-unsupported-compiler*) ;; *) {GCC_TOO_NEW} ;; esac'
    )
    machine.refuses("gcc versions later than 15", asked="80")
    assert machine.architectures("80", CUDAHOSTCXX="g++-15") == "80"
    assert machine.architectures("80", CUDAFLAGS="-O3 -allow-unsupported-compiler") == "80"
    for option in ("--host-compiler=g++-15", "--flags=-allow-unsupported-compiler"):
        assert machine.ask("80", option).returncode == 0


@pytest.mark.parametrize(("version", "driver", "needed"), [("13.0", "550.54.15", "580"), ("12.9", "535.183.01", "550")])
def test_a_driver_that_is_too_old(machine, version, driver, needed):
    machine.nvcc(version)
    machine.gpus(H200, driver=driver)
    machine.refuses(f"driver {driver} is too old", f"CUDA {version}", f"needs {needed}", "update the driver")
    assert machine.architectures("90a-real") == "90a-real"  # for another machine


def test_a_driver_that_does_not_work(machine):
    machine.nvcc()
    machine.program(
        "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    machine.refuses("Driver/library version mismatch", "repair", "CUDAARCHS=90a", "XLA_GPU_CUDA=OFF")


def test_a_gpu_that_is_too_old(machine):
    machine.nvcc()
    machine.gpus(V100)
    machine.refuses(r"Tesla V100 \(compute capability 7.0\)", "8.0 or newer", "XLA_GPU_CUDA=OFF")


def test_native_without_a_gpu(machine):
    machine.nvcc()
    machine.refuses("architecture native", "finds no GPU", asked="native")


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ("140", ["architecture 140 is unknown to nvcc 13.0", "120, 121", "newer CUDA toolkit"]),
        ("80;75-real", ["architecture 75-real", "8.0"]),
        ("sm_90", ["'sm_90'", "expected a list as CMake has it"]),
        ("OFF", ["'OFF'"]),
    ],
)
def test_an_architecture_that_cannot_be_built(machine, asked, parts):
    machine.nvcc()
    machine.refuses(*parts, asked=asked)


def test_no_host_compiler(machine, monkeypatch):
    toolchain = load()
    with pytest.raises(toolchain.Unusable, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\) in PATH: install one"):
        toolchain.check_cxx({"PATH": str(machine.folder)})
    with pytest.raises(toolchain.Unusable, match=r"no C\+\+ compiler \(g\+\+-99\)"):
        toolchain.check_cxx({"PATH": os.environ["PATH"], "CXX": "g++-99 -m64"})
    machine.program("c++", "#!/bin/sh\necho \"c++: error: unrecognized option '-std=c++17'\" >&2; exit 1\n")
    with pytest.raises(toolchain.Unusable, match=r"does not compile C\+\+17 .*unrecognized option.*g\+\+ 9 or newer"):
        toolchain.check_cxx({"PATH": str(machine.folder)})
    machine.program("c++", "#!/bin/sh\nexit 0\n")
    toolchain.check_cxx({"PATH": str(machine.folder)})


def test_a_driver_that_hangs_is_not_waited_for(machine, monkeypatch):
    toolchain = load()
    monkeypatch.setattr(toolchain, "_SECONDS", 0.2)
    machine.program("nvidia-smi", f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(60)'\n")
    monkeypatch.setenv("PATH", str(machine.folder))
    with pytest.raises(toolchain.Unusable, match="no answer within"):
        toolchain.gpus()
