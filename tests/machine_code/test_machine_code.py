"""The comparison of two builds' machine code, on kernels made here. No CUDA tools are needed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("elftools", reason="pyelftools reads the object files; it is in the test extra")

from tests.machine_code.arrivals import early_arrivals, kernels
from tests.machine_code.compare import compare, report
from tests.machine_code.kernels import (
    Kernel,
    ToolError,
    code_sections,
    count_opcodes,
    demangle,
    parse_usage,
    read_build,
    tool,
)
from tests.machine_code.sizes import duplicates, size, template, templates
from tests.machine_code.sizes import report as report_sizes

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _Z3addPf:
  REG:14 STACK:48 SHARED:1024 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN1a3mulIiEEvv:
  REG:255 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:864 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def kernel(name, code, source="a.cu.o", opcodes=None, architecture="sm_90a", **figures):
    numbers = {"registers": 32, "stack": 0, "shared": 0, "parameters": 560, **figures}
    return Kernel(name, architecture, source, code, opcodes or {0x221: 10}, **numbers)


def instruction(opcode):
    return opcode.to_bytes(2, "little") + bytes(14)


def test_usage_is_read():
    usage = parse_usage(USAGE)
    assert usage["_Z3addPf"] == {
        "REG": 14, "STACK": 48, "SHARED": 1024, "LOCAL": 0, "CONSTANT[0]": 560, "TEXTURE": 0, "SURFACE": 0, "SAMPLER": 0
    }  # fmt: skip
    assert usage["_ZN1a3mulIiEEvv"]["REG"] == 255


def test_spills_are_loads_and_stores_of_local_memory():
    # LDL, STL with a predicate in the bits above the opcode, LDG.
    code = instruction(0x7983) + instruction(0x0387) + instruction(0x7981)
    assert count_opcodes(code) == {0x983: 1, 0x387: 1, 0x981: 1}
    assert kernel("f", "1", opcodes=count_opcodes(code)).spills == 2


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")
def test_the_path_of_an_unnamed_namespace_plays_no_part():
    names = [
        f"_ZN7xla_gpu{len(part)}{part}3AddIfEEvv" for part in ("_GLOBAL__N__a1_4_x_cu_1", "_GLOBAL__N__b2_4_y_cu_2")
    ]
    assert set(demangle(names).values()) == {"void xla_gpu::(anonymous namespace)::Add<float>()"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_code_of_an_object_file(tmp_path):
    """Names and line tables leave the digest as it is; an instruction and the place of a relocation do not."""

    def digest(name, body, *flags):
        (tmp_path / "f.c").write_text(f"void other(void); int {name}(int x) {{ {body} }}")
        subprocess.run(["gcc", "-O1", "-ffunction-sections", *flags, "-c", "f.c"], cwd=tmp_path, check=True)
        return code_sections(tmp_path / "f.o")[name][0]

    assert digest("f", "return x + 1;") == digest("renamed", "\n\nreturn x + 1;", "-g")
    assert digest("f", "return x + 1;") != digest("f", "return x + 2;")
    assert digest("f", "other(); return 1;") == digest("g", "other(); return 1;")
    assert digest("f", "other(); return 1;") != digest("f", "other(); other(); return 1;")


def test_same_kernels_in_another_order():
    kernels = [kernel("f<1>", "1"), kernel("f<2>", "2", "b.cu.o"), kernel("f<1>", "3", "b.cu.o")]
    result = compare(kernels, reversed(kernels))
    assert result.equal and len(result.same) == 3
    assert report(result) == "3 kernels are the same (0 of them renamed)"


def test_a_moved_and_renamed_kernel_is_the_same():
    result = compare(
        [kernel("old<1>", "1"), kernel("f", "2")], [kernel("f", "2", "b.cu.o"), kernel("new<1>", "1", "b.cu.o")]
    )
    assert result.equal
    assert report(result) == "2 kernels are the same (1 of them renamed)"


def test_a_changed_kernel_has_its_figures_before_and_after():
    before = kernel("f", "1", registers=32, shared=1024, opcodes={0x221: 10})
    after = kernel("f", "2", registers=40, shared=1024, opcodes={0x221: 12, 0x387: 3})
    result = compare([before], [after])
    assert not result.equal
    text = report(result)
    assert "1 kernel changed" in text and "f  [sm_90a, a.cu.o]" in text
    assert "instructions 10 -> 15, registers 32 -> 40, spills 0 -> 3, stack 0, shared 1024, parameters 560" in text


def test_one_name_in_two_files_pairs_within_the_file():
    """A template's kernel is in each file that launches it; the unchanged one is not paired with the changed one."""
    before = [kernel("f", "1", "a.cu.o"), kernel("f", "1", "b.cu.o")]
    after = [kernel("f", "2", "a.cu.o"), kernel("f", "1", "b.cu.o")]
    result = compare(before, after)
    assert [(a.source, b.source) for a, b in result.changed] == [("a.cu.o", "a.cu.o")]
    assert len(result.same) == 1 and not result.gone and not result.new


def test_renamed_and_changed_pairs_with_the_most_alike():
    before = [kernel("old<64>", "1", opcodes={1: 50, 2: 50}), kernel("old<128>", "2", opcodes={1: 50, 3: 100})]
    after = [kernel("new<128>", "3", opcodes={1: 52, 3: 100}), kernel("new<64>", "4", opcodes={1: 50, 2: 49})]
    result = compare(before, after)
    assert {(a.name, b.name) for a, b in result.changed} == {("old<64>", "new<64>"), ("old<128>", "new<128>")}
    assert "was old<64>" in report(result)


def test_gone_and_new_and_other_architectures():
    before = [kernel("f", "1", architecture="sm_80"), kernel("g", "2", opcodes={1: 100})]
    after = [kernel("f", "1"), kernel("h", "3", opcodes={2: 100})]
    result = compare(before, after)
    assert {k.name for k in result.gone} == {"f", "g"} and {k.name for k in result.new} == {"f", "h"}
    assert "2 kernels gone" in report(result) and "2 kernels new" in report(result)


def test_sizes_by_template():
    kernels = [
        kernel("void a::(anonymous namespace)::Add<b::Traits<(b::Format)3, c::Mul<float> > >(b::Params)", "1"),
        kernel("a::Mul(float*)", "2", opcodes={0x221: 300}),
        kernel("void a::Mul<float>(float*)", "3", opcodes={0x221: 20}),
    ]
    assert [template(k) for k in kernels] == ["Add", "Mul", "Mul"]
    assert [(name, size(group)) for (_, name), group in templates(kernels).items()] == [("Mul", 5120), ("Add", 160)]
    assert report_sizes(kernels).splitlines()[:2] == ["5280 bytes in 3 kernels", "      5120    2 sm_90a Mul"]


def test_duplicates_are_of_one_architecture_and_have_code():
    large, huge = {0x221: 100}, {0x221: 1000}
    kernels = [
        kernel("f", "1", "a.cu.o", large), kernel("g", "1", "b.cu.o", large),
        kernel("f", "1", "a.cu.o", large, architecture="sm_80"),
        kernel("h", "2", "a.cu.o", huge), kernel("h", "2", "b.cu.o", huge), kernel("i", "3", "a.cu.o", huge),
        kernel("empty<1>", "4"), kernel("empty<2>", "4"),
    ]  # fmt: skip
    assert [[k.name for k in group] for group in duplicates(kernels).values()] == [["h", "h"], ["f", "g"]]
    text = report_sizes(kernels)
    assert (
        "2 times the same 16000 bytes\n  h  [sm_90a, a.cu.o]\n  h  [sm_90a, b.cu.o]" in text and "empty<1>" not in text
    )


def test_a_folder_without_objects_is_named(tmp_path):
    with pytest.raises(ToolError, match=r"has no \*\.cu\.o file"):
        read_build(tmp_path)


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolError, match=r"nvdisasm is not in PATH: .* nvidia-cuda-nvdisasm"):
        tool("nvdisasm")


def sass(*lines):
    """As cuobjdump prints it: instructions as (text, scoreboard set, scoreboards waited for)."""
    text = "\n\t\tFunction : kernel\n"
    for i, (instruction, scoreboard, waits) in enumerate(lines):
        control = (scoreboard << 5 | sum(1 << wait for wait in waits) << 11) << 41
        text += f"        /*{16 * i:04x}*/                   {instruction} ;  /* 0x0000000000000000 */\n"
        text += f"                                                      /* 0x{control:016x} */\n"
    return text


def early(*lines):
    [(name, code)] = kernels(sass(*lines))
    assert name == "kernel"
    found = early_arrivals(code)
    return {arrival.address: [load.address for load in loads] for arrival, loads in found.items()}


LOAD, ARRIVE = "LDS R5, [UR8+0x10]", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x38], RZ"
NONE = (7, ())


def test_an_arrival_behind_loads_is_found():
    assert early((LOAD, 0, ()), (ARRIVE, *NONE), ("EXIT", *NONE)) == {0x10: [0x00]}
    # An instruction in between, or the arrival itself, waits for the load.
    assert early((LOAD, 0, ()), ("IADD3 R6, R5, R5, RZ", 7, (0,)), (ARRIVE, *NONE)) == {}
    assert early((LOAD, 0, ()), (ARRIVE, 7, (0,))) == {}
    assert early((LOAD, 0, ()), ("IADD3 R6, R7, R7, RZ", 7, (1,)), (ARRIVE, *NONE)) == {0x20: [0x00]}


def test_an_arrival_behind_a_branch_is_found():
    loop = ((ARRIVE, *NONE), (LOAD, 0, ()), ("@P0 BRA 0x0", *NONE), ("EXIT", *NONE))
    assert early(*loop) == {0x00: [0x10]}
    # Neither behind a branch that is always taken, nor behind the end.
    assert early((LOAD, 0, ()), ("BRA 0x30", *NONE), (ARRIVE, *NONE), ("EXIT", *NONE)) == {}
    assert early((LOAD, 0, ()), ("EXIT", *NONE), (ARRIVE, *NONE)) == {}
    # BSYNC goes to where its BSSY says.
    join = (("BSSY B0, 0x40", *NONE), (LOAD, 0, ()), ("BSYNC B0", *NONE), (LOAD, 1, ()), (ARRIVE, *NONE))
    assert early(*join) == {0x40: [0x10]}
