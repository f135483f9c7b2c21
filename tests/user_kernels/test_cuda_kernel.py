"""cuda_kernel without a GPU: CUDA source and cubins, what is refused, and the cache of compiled source."""

from __future__ import annotations

import re

import pytest

from tests.user_kernels import sources
from xla_gpu._user_kernels import cuda_kernel as cuda_kernels
from xla_gpu._user_kernels import nvrtc
from xla_gpu._user_kernels.cuda_kernel import cuda_kernel

pytestmark = pytest.mark.usefixtures("compiler")


# ---- Kernels ---------------------------------------------------------------------------------------------------------
def test_source_with_an_error():
    with pytest.raises(
        ValueError, match=r"(?s)cuda_kernel: k: NVRTC does not compile the source for sm_90a:.*undefined"
    ):
        cuda_kernel('extern "C" __global__ void k() { x = 1; }', "k", arch="sm_90a")


def test_unknown_kernel():
    with pytest.raises(ValueError, match=r'(?s)cuda_kernel: skale: .*"skale" is undefined'):
        cuda_kernel(sources.SCALE, "skale", arch="sm_90a")
    cubin = cuda_kernel(sources.SCALE, "scale", arch="sm_90a").cubin
    with pytest.raises(ValueError, match="name: expected a kernel of the cubin, which has scale, got 'skale'"):
        cuda_kernel(cubin, "skale")


def test_cubin_is_taken_as_it_is():
    kernel = cuda_kernel(sources.SCALE, "scale", arch="sm_80")
    assert cuda_kernel(kernel.cubin, "scale", arch="sm_80") is kernel
    assert cuda_kernel(kernel.cubin, "scale").arch == "sm_80"
    with pytest.raises(ValueError, match="arch: expected sm_80, as the cubin was compiled, got sm_90"):
        cuda_kernel(kernel.cubin, "scale", arch="sm_90")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_architecture_and_parameters_are_read_from_the_cubin(arch):
    kernel = cuda_kernel(sources.SCALE, "scale", arch=arch)
    assert kernel.parameters == (8, 4, 4, 8)
    assert cuda_kernel(kernel.cubin, "scale").arch == re.match(r"sm_\d+", arch)[0]


def test_damaged_cubins():
    """Cut short at every length, and with every byte of the header turned over: an error, or the same kernel."""
    cubin = cuda_kernel(sources.SCALE, "scale", arch="sm_90a").cubin
    for length in range(0, len(cubin) - 1, 7):
        with pytest.raises(ValueError, match="cuda_kernel: scale: source_or_cubin: expected a"):
            cuda_kernel(cubin[:length], "scale")
    for at in range(64):
        damaged = bytearray(cubin)
        damaged[at] ^= 0xFF
        try:
            assert cuda_kernel(bytes(damaged), "scale").parameters == (8, 4, 4, 8)
        except ValueError as error:
            assert "cuda_kernel" in str(error)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, "k"), "source_or_cubin: expected CUDA source as a str or a cubin as bytes, got int"),
        (("", ""), "name: expected a string that is not empty"),
        (
            (b"PK", "k"),
            "source_or_cubin: expected a cubin, which is an ELF file for CUDA, got 2 bytes of something else",
        ),
    ],
)
def test_kernels_that_are_refused(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        cuda_kernel(*arguments)


def test_arch_and_options_that_are_refused():
    for arch in ("90", "sm90", "compute_90"):
        with pytest.raises(ValueError, match="arch: expected 'sm_90a', for example"):
            cuda_kernel(sources.SCALE, "scale", arch=arch)
    with pytest.raises(TypeError, match="options: expected a sequence of strings"):
        cuda_kernel(sources.SCALE, "scale", options="-G")
    with pytest.raises(TypeError, match="arch: expected a str, 'sm_90a', for example, got int"):
        cuda_kernel(sources.SCALE, "scale", arch=90)


# ---- The cache on disk -----------------------------------------------------------------------------------------------
@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_GPU_CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled(source, *options):
    cuda_kernels._compiled.cache_clear()  # as in a new process
    return cuda_kernel(source, "k", arch="sm_90a", options=options).cubin


SOURCE = 'extern "C" __global__ void k(float* x) {{ *x = {}; }}'


def test_cache_is_used_and_repaired(cache, monkeypatch):
    first = compiled(SOURCE.format(1))
    (file,) = cache.iterdir()
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled though it is in the cache"))
    assert compiled(SOURCE.format(1)) == first
    monkeypatch.undo()
    monkeypatch.setenv("XLA_GPU_CACHE_DIR", str(cache))
    for damage in (file.read_bytes()[:-1], b"", file.read_bytes()[:40] + b"\0" + file.read_bytes()[41:]):
        file.write_bytes(damage)
        assert compiled(SOURCE.format(1)) == first
    assert [path.name for path in cache.iterdir()] == [file.name]  # no temporary file is left


def test_cache_tells_sources_and_options_apart(cache):
    cubins = {compiled(SOURCE.format(1)), compiled(SOURCE.format(2)), compiled(SOURCE.format(1), "--fmad=false", "-G")}
    assert len(cubins) == len(list(cache.iterdir())) == 3


def test_headers_of_ones_own_are_never_stale(cache, tmp_path):
    header = tmp_path / "own" / "value.h"
    header.parent.mkdir()
    source = '#include "value.h"\nextern "C" __global__ void k(float* x) { *x = VALUE; }'
    header.write_text("#define VALUE 1\n")
    first = compiled(source, f"-I{header.parent}")
    header.write_text("#define VALUE 2\n")
    assert compiled(source, f"-I{header.parent}") != first
    assert [path for path in cache.iterdir() if path.is_file()] == []


def test_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("XLA_GPU_CACHE_DIR", "/dev/null/nothing")
    assert compiled(SOURCE.format(3))
