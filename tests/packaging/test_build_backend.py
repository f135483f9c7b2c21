"""The build backend asks for a compiler where there is none, and ends in one line where a build cannot work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.packaging.test_cuda_toolchain import H200, ROOT, V100, Machine

# scikit-build-core is installed where a wheel is built, not where tests run: its hooks are stand-ins here.
SCIKIT_BUILD_CORE = """
def get_requires_for_build_wheel(settings=None): return ["ninja"]
get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel
build_wheel = build_editable = build_sdist = None
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = None
"""


@pytest.fixture
def backend(tmp_path):
    package = tmp_path / "stand-in" / "scikit_build_core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "build.py").write_text(SCIKIT_BUILD_CORE)
    machine = Machine(tmp_path / "bin")
    machine.program("c++", "#!/bin/sh\nexit 0\n")

    def requires(settings=None, **environ):
        code = f"import build_backend; print(build_backend.get_requires_for_build_wheel({settings!r}))"
        path = os.pathsep.join([str(package.parent), str(ROOT / "third_party")])
        environment = {"PATH": str(machine.folder), "PYTHONPATH": path, **environ}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)

    return machine, requires


def test_no_nvcc_asks_for_the_wheels(backend):
    _, requires = backend
    outcome = requires()
    assert outcome.stdout.startswith("['ninja', 'nvidia-cuda-nvcc==13.0.*', 'nvidia-nvvm==13.0.*'"), outcome.stderr


def test_an_nvcc_of_the_machine_is_used(backend):
    machine, requires = backend
    machine.nvcc()
    machine.gpus(H200)
    assert requires().stdout == "['ninja']\n"


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        (None, {"XLA_GPU_CUDA": "OFF"}),
        (None, {"CMAKE_ARGS": "-DFOO=1 -DXLA_GPU_CUDA=OFF"}),
        (None, {"CMAKE_ARGS": "-D XLA_GPU_CUDA:BOOL=off"}),
        ({"cmake.define.XLA_GPU_CUDA": "OFF"}, {}),
        ({"cmake.args": "-DXLA_GPU_CUDA=OFF"}, {}),
        ({"cmake.args": ["-DXLA_GPU_CUDA=OFF", "-DFOO=1"]}, {}),
    ],
)
def test_without_cuda_nothing_of_it_is_looked_at(backend, settings, environ):
    machine, requires = backend
    machine.nvcc("11.8")
    machine.gpus(V100)
    assert requires(settings, **environ).stdout == "['ninja']\n"


@pytest.mark.parametrize(
    "environ", [{"CUDAARCHS": "90a"}, {"CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES='80;90a-real'"}], ids=["env", "cmake"]
)
def test_a_named_architecture_needs_no_gpu(backend, environ):
    machine, requires = backend
    machine.gpus(V100)
    assert "nvidia-cuda-nvcc" in requires(**environ).stdout
    machine.nvcc()
    assert requires(**environ).stdout == "['ninja']\n"


def test_what_cannot_work_ends_in_one_line(backend):
    machine, requires = backend
    machine.gpus(H200, driver="550.54.15")

    def refuses(text, **environ):
        outcome = requires(**environ)
        assert outcome.returncode != 0 and outcome.stdout == ""
        lines = outcome.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("xla_gpu cannot be built here: "), outcome.stderr
        assert text in lines[0]

    refuses("NVIDIA driver 550.54.15 is too old for code of CUDA 13.0, which needs 580")  # before nvcc is downloaded
    machine.nvcc("11.8")
    refuses("nvcc is of CUDA 11.8")
    machine.nvcc("13.0")
    refuses("CUDA architecture 75", CUDAARCHS="75")
    refuses("CUDA architecture 140", CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=140")
    (machine.folder / "c++").unlink()
    refuses("no C++ compiler")
