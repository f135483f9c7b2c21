"""The target xla_gpu_kernel_call itself, called with what no front end of this package would pass."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from tests.user_kernels.small_cubin import small_cubin

torch = pytest.importorskip("torch")
xg = pytest.importorskip("xla_gpu.torch", exc_type=ImportError)

X = torch.arange(8, dtype=torch.float32)
THREE = np.array([1, 1, 1], np.int64)
RIGHT = {
    "arch": "sm_90a",
    "block": THREE,
    "check_inputs": False,
    "cluster": THREE,
    "cooperative": False,
    "cubin": np.frombuffer(small_cubin(), np.uint8),
    "grid": THREE,
    "name": "k",
    "parameters": np.array([2, 0, 0, 0, 1, 0, 0], np.int64),
    "pdl": False,
    "shared": 0,
}


def run(**attributes):
    return xg.ffi_call("xla_gpu_kernel_call", X)(X, **{**RIGHT, **attributes})


def test_right_attributes_reach_the_launch():
    with pytest.raises(Exception, match="kernel_call: k: a CUDA kernel runs on an NVIDIA GPU alone"):
        run()


INT64 = np.iinfo(np.int64)
WRONG = {
    "two numbers": (dict(grid=THREE[:2]), "grid: expected 3 numbers, got 2"),
    "no numbers": (dict(block=THREE[:0]), "block: expected 3 numbers, got 0"),
    "grid of 0": (dict(grid=np.array([1, 0, 1])), r"k: grid: expected 1 to .* CTAs, got \(1, 0, 1\)"),
    "negative grid": (dict(grid=np.array([INT64.min, 1, 1])), "k: grid: expected 1 to"),
    "grid past the limit": (dict(grid=np.array([1, 1, 65536])), "k: grid: expected 1 to"),
    "threads": (dict(block=np.array([1024, 2, 1])), "k: block: expected at most 1024 threads"),
    "block past the limit": (dict(block=np.array([1, 1, 65])), "k: block: expected 1 to"),
    "cluster": (dict(cluster=np.array([2, 1, 1])), "k: grid: expected whole clusters"),
    "large cluster": (dict(cluster=np.array([16, 16, 1]), grid=np.array([16, 16, 1])), "at most 16 CTAs in all"),
    "shared": (dict(shared=-1), "k: shared: expected 0 to 1048576 bytes, got -1"),
    "much shared": (dict(shared=2**40), "k: shared: expected 0 to"),
    "no cubin": (dict(cubin=np.zeros(0, np.uint8)), "k: cubin: expected an ELF file, got 0 bytes"),
    "other file": (dict(cubin=np.zeros(9, np.uint8)), "k: cubin: expected an ELF file, got 9 bytes"),
    "empty parameters": (dict(parameters=THREE[:0]), "k: parameters: expected a number and three more"),
    "count": (dict(parameters=np.array([3, 0, 0, 0, 1, 0, 0])), "k: parameters: expected a number and three more"),
    "negative count": (dict(parameters=np.array([-1])), "k: parameters: expected a number and three more"),
    "huge count": (dict(parameters=np.array([INT64.max])), "k: parameters: expected a number and three more"),
    "kind": (dict(parameters=np.array([1, 3, 0, 0])), "k: argument 0: expected an operand, a result or a number"),
    "operand": (dict(parameters=np.array([1, 0, 1, 0])), "k: argument 0: expected one of 1 operands, got operand 1"),
    "negative operand": (dict(parameters=np.array([1, 0, -1, 0])), "k: argument 0: expected one of 1 operands"),
    "result": (dict(parameters=np.array([1, 1, 1, 0])), "k: argument 0: expected one of 1 results, got result 1"),
    "size 0": (dict(parameters=np.array([1, 2, 0, 0])), "k: argument 0: expected a number of 1 to 8 bytes, got 0"),
    "size 9": (dict(parameters=np.array([1, 2, 0, 9])), "k: argument 0: expected a number of 1 to 8 bytes, got 9"),
    "alignment": (dict(parameters=np.array([1, 0, 0, 2**40])), "k: argument 0: expected memory aligned to"),
    "negative alignment": (dict(parameters=np.array([1, 0, 0, -16])), "k: argument 0: expected memory aligned to"),
    "too many bytes": (
        dict(parameters=np.array([4096, *([2, 0, 8] * 4096)])),
        "k: arguments: expected at most 32764 bytes, got 32768",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attributes(name):
    attributes, text = WRONG[name]
    attributes = {key: v.astype(v.dtype if v.dtype == np.uint8 else np.int64) if hasattr(v, "dtype") else v
                  for key, v in attributes.items()}  # fmt: skip
    with pytest.raises(ValueError, match=text):
        run(**attributes)


@pytest.mark.parametrize("name", RIGHT)
def test_missing_attribute(name):
    given = {key: value for key, value in RIGHT.items() if key != name}
    with pytest.raises(Exception, match="kernel_call"):
        xg.ffi_call("xla_gpu_kernel_call", X)(X, **given)


@pytest.mark.parametrize("name", RIGHT)
def test_attribute_of_another_type(name):
    with pytest.raises(Exception, match="kernel_call"):
        run(**{name: np.float32(1)})


# ---- Cubins that are damaged: the driver is never given one ---------------------------------------------------------
REACHED = "kernel_call: k: a CUDA kernel runs on an NVIDIA GPU alone"
DAMAGED = "kernel_call: k: cubin: expected "


def answer(cubin: bytes) -> str:
    with pytest.raises(Exception) as raised:
        run(cubin=np.frombuffer(cubin, np.uint8))
    return str(raised.value)


def test_a_cubin_that_is_cut_short():
    whole = small_cubin()
    assert REACHED in answer(whole)
    for size in [*range(0, len(whole), 5), len(whole) - 1]:
        assert DAMAGED in answer(whole[:size]), size


# Where a number of the file stands, what is written there, and the answer. Section headers are of 64 bytes.
FIELDS = {
    "machine": (18, "<H", 62, "an ELF header that is no cubin's"),
    "sections far away": (40, "<Q", 2**64 - 1, "section or program headers past the end of the file"),
    "many sections": (60, "<H", 65535, "section or program headers past the end of the file"),
    "small section headers": (58, "<H", 40, "section or program headers past the end of the file"),
    "segments": (56, "<H", 1, "section or program headers past the end of the file"),
    "no names": (62, "<H", 9, "a damaged table of section names"),
    "names are symbols": (62, "<H", 3, "a damaged table of section names"),
}
SECTION_FIELDS = {
    "name": (5, 0, "<I", 10**6, "section 5 with a name outside the table of section names"),
    "offset": (5, 24, "<Q", 2**63, "section 5 with contents past the end of the file"),
    "size": (5, 32, "<Q", 2**64 - 64, "section 5 with contents past the end of the file"),
    "text": (2, 32, "<Q", 2, "section 2 with strings without a terminating null"),
    "symbols' size": (3, 56, "<Q", 16, "section 3 with symbol entries of a wrong size"),
    "symbols' names": (3, 40, "<I", 4, "section 3 with symbols without a string table"),
    "link": (4, 40, "<I", 9, "section 4 with an sh_link that is no section"),
    "section that it is of": (4, 44, "<I", 0x8005, "section 4 with an sh_info that is no section"),
    "code of another symbol": (5, 44, "<I", 2, "section 5 with code whose sh_info is no symbol"),
    "short code": (5, 32, "<Q", 8, "section 3 with a symbol past the end of its section"),
    "info": (4, 32, "<Q", 15, "section 4 with a truncated attribute"),
    "relocations' size": (6, 32, "<Q", 23, "section 6 with relocation entries of a wrong size"),
    "relocations' symbols": (6, 40, "<I", 2, "section 6 with relocations without a symbol table"),
    "relocated section": (6, 44, "<I", 0, "section 6 with a relocation past the end of its section"),
    "alignment": (5, 48, "<Q", 24, "section 5 with an alignment that is no power of two up to 65536"),
    "contents elsewhere": (8, 24, "<Q", 65, "section 8 with contents that are not aligned"),
    "half a call": (7, 32, "<Q", 12, "section 7 with calls of a wrong size"),
    "half a note": (8, 32, "<Q", 16, "section 8 with a truncated note"),
    "null section": (0, 35, "<B", 16, "a section 0 that is not empty"),
    "few symbols": (3, 32, "<Q", 24, "section 5 with code whose sh_info is no symbol"),
}


def headers() -> int:
    return struct.unpack_from("<Q", small_cubin(), 40)[0]


@pytest.mark.parametrize("name", [*FIELDS, *SECTION_FIELDS])
def test_a_cubin_with_a_wrong_number(name):
    if name in FIELDS:
        at, form, value, text = FIELDS[name]
    else:
        section, at, form, value, text = SECTION_FIELDS[name]
        at += headers() + 64 * section
    cubin = bytearray(small_cubin())
    struct.pack_into(form, cubin, at, value)
    assert f"{DAMAGED}a whole cubin, got {len(cubin)} bytes with {text}" in answer(bytes(cubin))


def test_an_sh_info_that_is_no_number_of_a_section():
    """As in the Mercury sections of cubins for Blackwell, which this flag marks."""
    cubin = bytearray(small_cubin())
    struct.pack_into("<Q", cubin, headers() + 64 * 8 + 8, 0x10000000)
    struct.pack_into("<I", cubin, headers() + 64 * 8 + 44, 0x419)
    assert REACHED in answer(bytes(cubin))


def test_symbols_past_the_names_and_the_sections():
    symbols = struct.unpack_from("<Q", small_cubin(), headers() + 64 * 3 + 24)[0]
    for at, form, text in (
        (24, "<I", "a symbol whose name is outside the string table"),
        (30, "<H", "a symbol in no section"),
    ):
        cubin = bytearray(small_cubin())
        struct.pack_into(form, cubin, symbols + at, 60000)
        assert text in answer(bytes(cubin))


def test_attributes_relocations_and_calls_of_no_symbol():
    for section, at, form, value, text in (
        (4, 0, "<B", 5, "section 4 with an attribute of no form"),
        (7, 0, "<I", 2, "section 7 with a call of no symbol"),
        (7, 4, "<I", 0xFFFFFFBD, "section 7 with a call of no symbol"),
        (8, 0, "<I", 2**32 - 1, "section 8 with a truncated note"),
        (4, 1, "<B", 0x2F, "section 4 with an attribute of no symbol"),
        (6, 12, "<I", 2, "section 6 with a relocation by no symbol"),
    ):
        cubin = bytearray(small_cubin())
        start = struct.unpack_from("<Q", cubin, headers() + 64 * section + 24)[0]
        struct.pack_into(form, cubin, start + at, value)
        if value == 0x2F:
            struct.pack_into("<I", cubin, start + 4, 99)
        assert text in answer(bytes(cubin))


def test_any_flipped_bits():
    """Generated damage ends in an answer of the handler."""
    generator = random.Random(18)
    refused = 0
    for _ in range(800):
        cubin = bytearray(small_cubin())
        for _ in range(generator.randint(1, 3)):
            cubin[generator.randrange(len(cubin))] ^= 1 << generator.randrange(8)
        text = answer(bytes(cubin))
        assert REACHED in text or DAMAGED in text
        refused += DAMAGED in text
    assert refused > 100
