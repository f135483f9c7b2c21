"""What the benchmarks do on a machine with less memory than theirs."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import memory

from tests.common import machine

ROOT = Path(__file__).parents[2]


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=range(4),
)
def test_a_load_that_does_not_fit_is_left_out(capsys, error):
    with memory.left_out_if_too_large("64x128k"):
        raise error
    assert capsys.readouterr().out.startswith("64x128k: not measured, needs more memory than is free: ")


def test_other_errors_end_a_benchmark():
    with pytest.raises(AssertionError, match="wrong result"), memory.left_out_if_too_large("64x128k"):
        raise AssertionError("wrong result")


def test_weights_have_marlins_order():
    torch = pytest.importorskip("torch")
    from benchmarks import linear_peers

    k, n = 32, 128
    values = torch.randint(0, 16, (k, n), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    words = linear_peers.marlin_weight(values)
    assert words.shape == (k // 16, 2 * n)
    for row, word in itertools.product(range(k // 16), range(2 * n)):
        lane, first_feature = word % 128 // 4, word // 128 * 64 + word % 4 * 16
        for nibble, (pair, feature, odd) in enumerate(itertools.product((0, 1), (0, 8), (0, 8))):
            number = values[row * 16 + lane % 4 * 2 + pair + odd, first_feature + lane // 4 + feature]
            assert int(words[row, word]) >> 4 * nibble & 15 == number
    scale = torch.arange(2 * n).view(2, n)
    assert linear_peers.marlin_scale(scale)[1, :10].tolist() == [n + i for i in (0, 8, 16, 24, 32, 40, 48, 56, 1, 9)]


def prefill(tmp_path: Path, *options: str) -> list[int]:
    """The tokens that a prefill of four prompts over four CPU devices chooses."""
    path = tmp_path / "rows.json"
    arguments = ["--shape", "tiny", "--tensor-parallel", "4", "--prefill", "--cases", "4x64", "--steps", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-m", "benchmarks.decode_step", *arguments, *options, "--json", str(path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(path.read_text())["rows"]
    return row["tokens"]


def test_rows_in_parts_give_the_same_tokens(tmp_path):
    """Where each part's sum is an exchange of shares, in the order of ranks, beside the products of the next part."""
    jax = pytest.importorskip("jax")
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip("XLA's options for it came with jax 0.10.2")
    whole = prefill(tmp_path, "--joins", "all_reduce")
    assert prefill(tmp_path, "--joins", "exchange", "--row-parts", "2") == whole
    assert prefill(tmp_path, "--joins", "exchange", "--row-parts", "4") == whole


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--joins", "sum"], "--joins: expected some of one over 1 GPUs, got sum"),
        (["--prefill", "--row-parts", "0"], "--row-parts: expected a whole number from 1, got 0"),
        (["--cases", "1x"], "--cases: expected sequences x tokens, 64x2048 for example, got 1x"),
        (["--cases", "8x16x2"], "--cases: expected sequences x tokens, 64x2048 for example, got 8x16x2"),
        (["--cases", "0x16"], "--cases: expected sequences x tokens, 64x2048 for example, got 0x16"),
        (["--steps", "-1"], "--steps: expected a whole number from 1, got -1"),
        (["--tensor-parallel", "99"], "--tensor-parallel: expected at most"),
        (["--row-parts", "2"], "--row-parts: expected --prefill, and no --blocks"),
        (["--prefill", "--row-parts", "3"], "--row-parts: expected a divisor of the 64 rows of 1x64, got 3"),
        (
            ["--tensor-parallel", "4", "--joins", "exchange"],
            "--joins: exchange: expected a multiple of 4 rows in each part, got 1 of 1x64",
        ),
    ],
)
def test_wrong_options_of_a_step(options, expected, monkeypatch, capsys):
    pytest.importorskip("jax")
    from benchmarks import decode_step

    monkeypatch.setattr(sys, "argv", ["decode_step", "--shape", "tiny", "--cases", "1x64", *options])
    with pytest.raises(SystemExit):
        decode_step.main()
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["decode", "--device", "cpu", "--cases", "1x1k", "9x9k"],
            "--cases: expected a part of one of 1x1k llama3-8b, ",
        ),
        (["decode", "--device", "cpu", "--peer", "FA9"], "--peer: expected what is installed here, "),
        (["prefill", "--repeats", "0"], "--repeats: expected a whole number from 1, got 0"),
    ],
)
def test_wrong_options_of_attention(options, expected, monkeypatch, capsys):
    """A load or peer that is not there would be an empty table."""
    pytest.importorskip("torch")
    from benchmarks import attention

    monkeypatch.setattr(sys, "argv", ["attention", *options, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        attention.main()
    assert expected in f"{capsys.readouterr().err}{ended.value}"


@pytest.mark.skipif(bool(machine.gpu_count()), reason="of a machine without a GPU")
@pytest.mark.parametrize(
    ("name", "options", "or_cpu"),
    [
        ("attention", ["decode"], True),
        ("memory_bound", [], True),
        ("linear", [], False),
        ("grouped_linear", [], False),
        ("decoder_layer", [], False),
        ("sampling", [], False),
    ],
)
def test_without_a_gpu_a_benchmark_says_so(name, options, or_cpu, monkeypatch, capsys):
    pytest.importorskip("torch")
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit):
        module.main()
    wanted = (
        "expected a GPU that PyTorch reaches, or --device cpu: " if or_cpu else "expected a GPU that PyTorch reaches: "
    )
    assert f"{wanted}no NVIDIA GPU on this machine" in capsys.readouterr().err


def test_the_sweep_draws_the_same_loads_on_every_machine():
    from benchmarks import loads, sweep

    cases = sweep.members(300, seed=1)
    assert sweep.members(20, seed=1) == cases[:20] != sweep.members(20, seed=2)
    assert cases[0].name == "several tokens: 4x6 of 4909, 14/2, 128, page 256, soft_cap 30.0"
    assert {case.name.split(":")[0] for case in cases} == set(sweep.KINDS)
    for case in cases:
        assert all(1 <= rows <= keys <= sweep.LONGEST for rows, keys in case.sequences)
        assert len(case.sequences) <= 256
        assert case.padding_tokens == case.spare_seqs == 0
        assert loads.limit(case) <= sweep.MOST_MICROSECONDS


def test_the_summary_of_a_sweep():
    from benchmarks import sweep

    cases = sweep.members(3, seed=1)
    ratios = (0.5, 1.5, None)
    rows = [{"ratio": ratio, "groups": sweep.groups_of(case)} for ratio, case in zip(ratios, cases, strict=True)]
    lines = {line[:44].strip(): line[44:].split() for line in sweep.summary(rows).splitlines()}
    assert lines["all"] == ["2", "0.50", "1.00", "1.50", "1"]
    assert lines["load several tokens"] == ["1", "0.50", "0.50", "0.50", "0"]
    assert lines["KV heads 16"] == ["1", "1.50", "1.50", "1.50", "1"]
    assert lines["sequences 2 to 4"] == ["1", "0.50", "0.50", "0.50", "0"]


def test_every_option_is_explained():
    """In --help, of the benchmarks and of the examples."""
    options = [
        (path.name, node)
        for path in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
    ]
    assert len(options) > 50
    unexplained = [(name, node) for name, node in options if "help" not in {keyword.arg for keyword in node.keywords}]
    assert [f"{name}: {ast.unparse(node.args[0])}" for name, node in unexplained] == []
