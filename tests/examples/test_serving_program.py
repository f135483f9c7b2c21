"""The serving example's programs, whole, on a checkpoint, against transformers."""

# ruff: noqa: E402 (optional packages are looked for before what needs them)
from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from paged_llama import program
from paged_llama.tokens import read_prompts
from tests.examples import EXAMPLES
from tests.examples.tiny_llama import VARIANTS, tiny_model

# Of a serving run that mixes prompts and decoding, hands pages out again, and takes seconds.
SIZES = ("--max-seqs", "4", "--chunk", "64", "--num-pages", "160", "--page-size", "8")


def save_checkpoint(folder: pathlib.Path, **changes) -> pathlib.Path:
    """A model of two layers in two shards, with a byte-level BPE tokenizer trained on the example's prompts."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(read_prompts(EXAMPLES / "prompts.txt"), vocab_size=400, special_tokens=["<s>", "</s>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    model = tiny_model(vocab_size=len(fast), **VARIANTS["rope-llama3"], **changes, bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def divisible_checkpoint(tmp_path_factory) -> pathlib.Path:
    """Of four KV heads, which two and four devices divide, and two query heads for each."""
    return save_checkpoint(tmp_path_factory.mktemp("divisible"), num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module", params=["serve_llama.py", "serve_llama_jax.py"])
def served(request, checkpoint, tmp_path_factory):
    """The program's result on that checkpoint, its figures, and the folder of XLA's dumps."""
    pytest.importorskip("jax" if request.param == "serve_llama_jax.py" else "torch_xla")
    folder = tmp_path_factory.mktemp("served")
    arguments = ["--check", "--device", "cpu", "--model", checkpoint, "--json", folder / "figures.json"]
    result = subprocess.run(
        [sys.executable, EXAMPLES / request.param, *arguments, "--max-new-tokens", "24", *SIZES],
        env=os.environ | {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result, json.loads((folder / "figures.json").read_text()), folder


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("program", ["serve_llama.py", "serve_llama_jax.py"])
def test_a_model_divided_over_devices_agrees_with_transformers(program, devices, divisible_checkpoint):
    pytest.importorskip("jax" if program == "serve_llama_jax.py" else "torch_xla")
    arguments = ["--check", "--quiet", "--model", divisible_checkpoint, "--tensor-parallel", str(devices)]
    command = [sys.executable, EXAMPLES / program, *arguments, "--max-new-tokens", "12", *SIZES]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tokens identical to transformers" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--random-prompts", "3"], "--random-prompts: expected 64x2048, for example, got 3"),
        (["--random-prompts", "0x5"], "--random-prompts: expected 64x2048, for example, got 0x5"),
        (["--seed", str(2**63)], "--seed: expected an integer of 64 bits"),
        (["--json", "/nobody/figures.json"], "--json: expected a file in a folder that is there, got /nobody/"),
        (["--prompts", "bytes"], "bytes: expected text in UTF-8, got another byte at 1"),
        (["--model", "half"], r"half/config.json: expected JSON: "),
        (["--model", "list"], r"list/config.json: expected a JSON object, got list"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_named(arguments, text, tmp_path, monkeypatch, capsys):
    """Before anything is loaded, and without a traceback."""
    (tmp_path / "bytes").write_bytes(b"h\xff\xfe")
    for name, content in (("half", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    monkeypatch.chdir(tmp_path)

    class Backend:
        name = "program"

        def start(self, arguments):
            pass

    try:
        status = program.main(
            Backend(), "", ["--shape", "llama3-8b", *arguments] if "--model" not in arguments else arguments
        )
    except SystemExit as error:
        status = error.code
    assert status == 2 and text in capsys.readouterr().err


def test_a_number_of_devices_that_does_not_divide_the_model_is_refused():
    pytest.importorskip("jax")
    for devices, text in (("3", "expected a number that divides num_kv_heads = 4, got 3"), ("0", "at least 1, got 0")):
        command = [sys.executable, EXAMPLES / "serve_llama_jax.py", "--quiet", "--tensor-parallel", devices]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 2 and text in result.stderr, result.stderr


def test_the_program_agrees_with_transformers(served):
    result, figures, _ = served
    last = result.stdout.strip().splitlines()[-1]
    pattern = r"demo: OK, (\d+) tokens identical to transformers, \d+\.\d tokens/s, (\d+) compilations"
    new_tokens, compilations = map(int, re.fullmatch(pattern, last).groups())
    assert new_tokens == figures["new_tokens"] > 200
    assert compilations == figures["compilations"]
    if "torch_xla" in result.args[1].read_text():
        assert compilations == 3  # the empty cache and the two layouts
    assert figures["requests_unlike_transformers"] == 0


def test_the_program_used_what_it_is_there_to_show(served):
    _, figures, _ = served
    assert figures["requests"] > figures["max_seqs"]
    assert figures["pages_handed_out"] > figures["num_pages"] >= figures["most_pages_in_use"]
    assert figures["mixed"]["new_tokens"] > 0, "no step read a prompt and generated beside it"
    assert figures["decode"]["steps"] > 0


def test_the_compiled_steps_update_the_cache_in_place(served):
    result, _, folder = served
    texts = [path.read_text() for path in folder.glob("*cpu_after_optimizations.txt")]
    kinds = ("xla_gpu_attention_block", "xla_gpu_rotary_and_cache")  # of a decode step, of one with prompts
    steps = [(kind, text) for text in texts for kind in kinds if kind in text]
    assert sorted(kind for kind, _ in steps) == sorted(kinds)
    caches = 1 if "serve_llama.py" in str(result.args) else 2  # of its two layers
    cache = rf"f32\[{2 * 160 // caches},8,4,16\]\S*"
    for kind, text in steps:
        assert "API_VERSION_TYPED_FFI" in text
        # Of the results, attention's rows or the query, cache and perhaps scratch memory, the second is the cache.
        assert len(re.findall(rf"= \(\S+ {cache}(?:, \S+)?\) custom-call\(.*{kind}", text)) == 2
        aliases = re.findall(r"(?:may|must)-alias", text.splitlines()[0])
        assert len(aliases) >= caches, "the program's results are its inputs"
        makers = set(re.findall(rf"= {cache} ([\w-]+)\(", text))
        assert makers <= {"custom-call", "parameter", "get-tuple-element"}, makers


def test_the_small_model_of_transformers_4_is_refused(monkeypatch):
    # It would be built without an error, of other rotations than the example's: texts that differ, without a reason.
    from paged_llama import reference

    monkeypatch.setattr(reference.transformers, "__version__", "4.57.6")
    with pytest.raises(ValueError, match=r"expected transformers 5, found 4\.57\.6"):
        reference.small_model(0)
