"""The library's surface is what was declared, nothing more: exported symbols = registered targets = operators of the
package; every operator has its files on every floor; the rules on who includes what hold."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

import xla_gpu
from tests.common import cases  # noqa: F401 - what the tests of all operators import must be importable
from xla_gpu._runtime import abi, library, targets
from xla_gpu.ops import COMPOSITES, OPERATORS

ROOT = Path(__file__).resolve().parents[2]
FFI, PACKAGE = ROOT / "ffi", ROOT / "python" / "xla_gpu"


def tool(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip(f"{command[0]} (binutils) is not installed")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    lines = tool("nm", "--dynamic", "--defined-only", str(library.find())).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def with_cuda() -> bool:
    return library.load().build_info()["cuda"] is not None


def operator_folders() -> list[str]:
    text = (FFI / "CMakeLists.txt").read_text()
    return re.search(r"set\(XLA_GPU_OPS\s+([\w\s]+)\)", text).group(1).split()


# Operators without a handler of their own: ragged_paged_attention is a second name and signature for another's target,
# composites are made of other operators and the framework's operations.
WITHOUT_TARGET = {"ragged_paged_attention"} | {op.name for op in COMPOSITES}
# Handlers that run users' kernels (ffi/user_kernels), and are no operators.
USER_KERNELS = {"kernel_call"}


# ---- Symbols = targets = operators -----------------------------------------------------------------------------------
def test_exported_handlers_are_the_handler_table(exported):
    table = {f"{h.target}_{'cuda' if h.platform == 'CUDA' else 'host'}" for h in library.load().handlers()}
    handlers = {name for name in exported if re.fullmatch(r"xla_gpu_.*_(host|cuda)", name)}
    assert handlers == table


def test_handler_table_is_the_operators():
    platforms = ["Host", "CUDA"] if with_cuda() else ["Host"]
    table = sorted((h.target, h.platform) for h in library.load().handlers())
    assert table == sorted(
        (f"xla_gpu_{name}", p)
        for name in {op.name for op in OPERATORS} - WITHOUT_TARGET | USER_KERNELS
        for p in platforms
    )


def test_scratch_is_declared_on_both_sides():
    declared = {op.target: op.has_scratch for op in OPERATORS}
    assert declared == {h.target: h.scratch_bytes != 0 for h in library.load().handlers() if h.target in declared}


def test_registered_targets_are_the_handler_table():
    own = {(t.name, t.runtime_platform) for t in targets.registered() if not t.name.startswith("xla_gpu_test_")}
    assert own >= {(h.target, h.platform) for h in library.load().handlers()}


def test_exports_are_the_public_header(exported):
    """Handlers aside, what leaves the library is what xla_gpu.h declares, GetPjrtApi, and what Python binds to."""
    header = (FFI / "runtime" / "xla_gpu.h").read_text()
    declared = set(re.findall(r"^XLA_GPU_EXPORT [^(]*?(\w+)\(", header, re.MULTILINE))
    others = {name for name in exported if not re.fullmatch(r"xla_gpu_.*_(host|cuda)", name)}
    assert others == declared | {"GetPjrtApi"}
    assert set(abi.SIGNATURES) <= declared


def test_operators_in_both_frontends():
    torch_frontend, jax_frontend = PACKAGE / "torch", PACKAGE / "jax"
    for frontend, module in ((torch_frontend, "torch"), (jax_frontend, "jax")):
        imported = pytest.importorskip(f"xla_gpu.{module}", exc_type=ImportError)
        in_place = [f"{op.name}_" for op in OPERATORS if op.in_place and module == "torch"]
        for name in in_place:
            assert getattr(imported, name, None).__doc__, f"xla_gpu.{module} has no {name}, or it has no docstring"
        for op in (*OPERATORS, *COMPOSITES):
            assert callable(getattr(imported, op.name, None)), f"{frontend} has no {op.name}"
            assert getattr(imported, op.name).__doc__, f"xla_gpu.{module}.{op.name} has no docstring"


def test_same_signatures_in_both_frontends():
    import inspect

    torch_frontend = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)
    jax_frontend = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)

    def parameters(function) -> list[tuple]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found if p.name != "group"]  # a mesh axis in JAX, and required

    for op in (*OPERATORS, *COMPOSITES):
        function = getattr(torch_frontend, op.name)
        assert list(inspect.signature(function).parameters) == list(op.arguments), op.name
        assert parameters(function) == parameters(getattr(jax_frontend, op.name)), op.name
        if op.in_place:
            assert parameters(function) == parameters(getattr(torch_frontend, f"{op.name}_")), op.name


# ---- Files: one stem on every floor ----------------------------------------------------------------------------------
@pytest.mark.parametrize("folder", operator_folders())
def test_operator_has_its_files(folder):
    ops = FFI / "ops" / folder
    for name in (f"{folder}.h", f"{folder}_ffi.cc", "CMakeLists.txt"):
        assert (ops / name).is_file(), ops / name
    for pattern in (f"{folder}*_cpu*.cc", f"{folder}*_cuda*.c[cu]"):
        assert list(ops.glob(pattern)), ops / pattern
    assert (PACKAGE / "ops" / f"{folder}.py").is_file()
    assert (ROOT / "tests" / "ops" / f"test_{folder}.py").is_file()


def test_no_folder_without_a_list_entry():
    assert sorted(operator_folders()) == sorted(p.name for p in (FFI / "ops").iterdir() if p.is_dir())
    modules = {p.stem for p in (PACKAGE / "ops").glob("*.py") if not p.stem.startswith("_")}
    assert modules == set(operator_folders()) | WITHOUT_TARGET


def test_every_source_file_is_compiled():
    """CMake lists sources one by one; a file that no list names would rot unseen."""
    listed = {
        (path.parent / name).resolve()
        for path in FFI.rglob("CMakeLists.txt")
        for name in re.findall(r"[\w/]+\.(?:cc|cu)\b", path.read_text())
    }
    for source in sorted(p for suffix in ("*.cc", "*.cu") for p in FFI.rglob(suffix)):
        assert source in listed, f"{source.relative_to(ROOT)} is in no CMakeLists.txt"


# ---- Who includes what -----------------------------------------------------------------------------------------------
def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_kernels_include_no_xla_and_no_framework():
    """Followed through our own headers, so that none is included by way of another header."""

    def reached(path: Path, seen: set[Path]) -> set[str]:
        found = set()
        for name in includes(path):
            found.add(name)
            ours = ROOT / name
            if name.startswith("ffi/") and ours not in seen:
                seen.add(ours)
                found |= reached(ours, seen)
        return found

    kernels = [
        p for p in (FFI / "ops").rglob("*") if p.suffix in (".cc", ".cu", ".cuh", ".h") and not p.stem.endswith("_ffi")
    ]
    kernels += [
        p for folder in ("host", "device") for p in (FFI / folder).iterdir() if p.suffix in (".cc", ".cu", ".cuh", ".h")
    ]
    assert kernels
    for path in kernels:
        forbidden = {i for i in reached(path, set()) if re.match(r"(xla|torch|ATen|c10|jax|pybind11|Python\.h)\b", i)}
        assert not forbidden, f"{path.relative_to(ROOT)} reaches {sorted(forbidden)}"


def test_only_framework_folders_import_frameworks():
    """A folder states what its modules may import; public modules and the doctor's probes are named one by one."""
    torch_side = r"_torch/|_torch_xla/|_torchax/|vllm/|torch/|_doctor/probe_torch"
    torchax_side = r"_torchax/|torchax\.py|_doctor/probe_torchax"
    jax_side = r"_jax/|jax/|_doctor/probe_jax|_doctor/probe_torchax|adapters/"
    allowed = {
        "torch": torch_side,
        "torch_xla": torch_side,
        "_XLAC": torch_side,
        "torchax": torchax_side,
        "jax": jax_side,
        "jaxlib": rf"{jax_side}|_torch_xla/hlo_module",  # torch_xla's calls are lowered by jaxlib
        "jax_plugins": r"_runtime/cuda_plugin",  # the CUDA plug-in that torch_xla borrows
    }
    statement = re.compile(
        r"^\s*(?:from|import)\s+(torch_xla|torchax|torch|_XLAC|jaxlib|jax_plugins|jax)\b", re.MULTILINE
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for module in statement.findall(path.read_text()):
            assert re.match(allowed[module], name), f"{name} imports {module}"


def test_handlers_do_not_throw_abort_or_exit():
    for path in sorted(p for suffix in ("*.cc", "*.cu", "*.h", "*.cuh") for p in FFI.rglob(suffix)):
        if FFI / "testing" in path.parents:
            continue  # no part of the library
        code = re.sub(r"//[^\n]*", "", path.read_text())
        if path == FFI / "handlers" / "context.cc":  # a call without a stream: NoThrow, around each handler, catches it
            code = code.replace("throw std::runtime_error(diagnostic_->Result());", "")
        found = re.findall(r"\b(?:throw\b(?!\(\))|(?:std::)?(?:abort|exit|terminate)\s*\()", code)
        assert not found, f"{path.relative_to(ROOT)}: {found}"


# ---- What the library needs ------------------------------------------------------------------------------------------
def test_depends_on_the_system_alone():
    dynamic = tool("readelf", "--dynamic", str(library.find()))
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic)
    assert needed
    system = r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(system, name)] == []
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_versions_agree():
    from importlib import metadata

    info = library.load().build_info()
    assert info["version"] == xla_gpu.__version__
    assert info["ffi_api"] == [0, 1]
    with contextlib.suppress(metadata.PackageNotFoundError):  # used from its source folder
        assert metadata.version("xla_gpu") == xla_gpu.__version__
    assert f'version = "{xla_gpu.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_handler_was_built_with_the_oldest_ffi_api():
    for handler in library.load().handlers():
        assert library.load().handler_version(handler.execute) == (0, 1), handler.target
