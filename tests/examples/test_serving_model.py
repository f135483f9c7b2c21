"""The serving example's model against transformers, with eager tensors."""

# ruff: noqa: E402 (optional packages are looked for before what needs them)
from __future__ import annotations

import dataclasses
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from paged_llama import weights
from paged_llama.config import SHAPES, LlamaConfig
from paged_llama.model import PagedLlama, rotation_table
from paged_llama.options import StepOptions, is_quantized
from paged_llama.scheduler import Request, Scheduler, run
from tests.examples.tiny_llama import LLAMA3_ROPE, VARIANTS, tiny_model


def expected_tokens(model, prompt, count) -> list[int]:
    ids = torch.tensor([prompt])
    options = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=1, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return out[0, len(prompt) :].tolist()


BLOCKS = StepOptions(frozenset({"attention_block", "gated_mlp", "sample"}))


@pytest.fixture
def eager():
    """Skips where the eager front end does not work."""
    xla_gpu = pytest.importorskip("xla_gpu.torch")
    try:
        xla_gpu.simple_add(torch.ones(1), torch.ones(1))
    except Exception as error:
        pytest.skip(f"the eager frontend: {error}")


@torch.no_grad()
def serve_eagerly(config: LlamaConfig, load, prompts, count, options=None) -> list[list[int]]:
    requests = [Request(prompt, count, config.eos_token_ids) for prompt in prompts]
    longest = max(request.most_tokens for request in requests)
    scheduler = Scheduler(num_pages=40, page_size=4, max_seqs=3, chunk=16, max_tokens=longest)
    scheduler.add(requests)
    model = PagedLlama(config, torch.float32, longest, options=options)
    load(model)
    shape = (40, 4, 2 * config.num_kv_heads, config.head_dim)
    caches = [torch.full(shape, float("nan")) for _ in range(config.num_layers)]
    previous = torch.zeros(3, dtype=torch.int32)

    def launch(step):
        nonlocal previous, caches
        previous, caches = model(torch.from_numpy(step.packed), previous, caches, step.layout)
        return previous

    for _ in run(scheduler, launch, torch.Tensor.tolist):
        pass
    return [request.generated for request in requests]


@pytest.mark.parametrize(("variant", "files"), [*((variant, "one") for variant in VARIANTS), ("biases", "shards")])
def test_a_checkpoint_of_any_configuration_gives_the_tokens_of_transformers(variant, files, tmp_path, eager):
    theirs = tiny_model(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path, max_shard_size="100KB" if files == "shards" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (files == "shards")
    config = LlamaConfig.from_folder(tmp_path)
    prompts = [[(7 * i + 3 * j * j) % 96 for j in range(length)] for i, length in enumerate((1, 5, 70, 23))]
    got = serve_eagerly(config, lambda m: weights.load_checkpoint(m, tmp_path, torch.device("cpu")), prompts, 12)
    assert got == [expected_tokens(theirs, prompt, 12) for prompt in prompts]


QUANTIZABLE = {"hidden_size": 128, "intermediate_size": 256, "attention_bias": True}


@pytest.mark.parametrize("variant", ["biases", "tied"])
def test_blocks_give_the_tokens_of_transformers(variant, tmp_path, eager):
    """attention_block and gated_mlp in the place of a layer's operators."""
    theirs = tiny_model(**VARIANTS[variant], intermediate_size=128)
    theirs.save_pretrained(tmp_path)
    config = LlamaConfig.from_folder(tmp_path)
    got = serve_eagerly(
        config, lambda m: weights.load_checkpoint(m, tmp_path, torch.device("cpu")), PROMPTS, 12, BLOCKS
    )
    assert got == [expected_tokens(theirs, prompt, 12) for prompt in PROMPTS]


def test_operators_by_the_rows_of_a_step(tmp_path, eager, monkeypatch):
    """Steps of 3 rows call the blocks, those that read prompts as well do not."""
    from paged_llama import options

    monkeypatch.setattr(options, "BLOCK_ROWS", 3)
    monkeypatch.setattr(options, "CHAINED_ROWS", 3)
    monkeypatch.setattr(options, "PROMPT_ROWS", 5)
    usual = frozenset(options.usual("bfloat16", 1, 3))
    assert options.of_step(usual, 4) == usual - {*options.BLOCKS, "rotary_and_attention"}
    assert options.of_step(usual, 3) == usual
    assert options.of_step(usual, 5) == options.of_step(usual, 4) | {"rms_norm"}
    assert options.of_step(usual - {"rotary_and_cache"}, 4) == usual - {"rotary_and_cache"}
    theirs = tiny_model()
    theirs.save_pretrained(tmp_path)
    config = LlamaConfig.from_folder(tmp_path)

    def load(model):
        weights.load_checkpoint(model, tmp_path, torch.device("cpu"))

    assert serve_eagerly(config, load, PROMPTS, 6, StepOptions(usual)) == serve_eagerly(config, load, PROMPTS, 6)


PROMPTS = [[(7 * i + 3 * j * j) % 96 for j in range(length)] for i, length in enumerate((1, 70))]


@pytest.mark.parametrize(("weight_format", "head"), [("float8", None), ("int8", "float8"), ("int4", None)])
def test_matrices_quantised_at_load(weight_format, head, tmp_path, eager):
    """The tokens are those of transformers' model with the values that the format can hold."""
    from paged_llama import options, quantized

    theirs = tiny_model(**QUANTIZABLE)
    theirs.save_pretrained(tmp_path)

    def load(model):
        weights.load_checkpoint(model, tmp_path, torch.device("cpu"))
        quantized.quantize(model, weight_format, lambda: None)
        assert not any(isinstance(m, torch.nn.Linear) for m in model.layers.modules())
        assert isinstance(model.head, torch.nn.Linear)
        if head:
            quantized.quantize(model, head, lambda: None, head=True)
            assert model.head.weight.dtype == torch.float8_e4m3fn

    before = expected_tokens(theirs, PROMPTS[0], 12)
    quantized.round_reference(theirs, weight_format)
    if head:
        quantized.round_reference(theirs, head, head=True)
    expected = [expected_tokens(theirs, prompt, 12) for prompt in PROMPTS]
    usual = StepOptions(frozenset(options.usual("bfloat16", 1, 3)))
    for operators in (None, usual):
        assert serve_eagerly(LlamaConfig.from_folder(tmp_path), load, PROMPTS, 12, operators) == expected
    assert weight_format != "int4" or expected[0] != before  # the comparison sees the difference


def test_a_quantised_checkpoint_is_read_as_it_is(tmp_path, eager):
    """GPTQ's layout, with a layer that is not quantised."""
    from safetensors.torch import save_file

    from paged_llama import quantized

    theirs = tiny_model(**QUANTIZABLE)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    tensors["lm_head.weight"] = theirs.lm_head.weight.detach().clone()
    generator = torch.Generator().manual_seed(5)
    for name, linear in theirs.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name in ("lm_head", "model.layers.1.mlp.down_proj"):
            continue
        n, k = linear.weight.shape
        values = torch.randint(0, 16, (n, k), generator=generator)
        zeros = torch.randint(1, 16, (n, k // 128), generator=generator)
        scales = (torch.rand(n, k // 128, generator=generator) + 0.5) / 40
        linear.weight.data = (values - zeros.repeat_interleave(128, 1)) * scales.repeat_interleave(128, 1)
        shifts = 4 * torch.arange(8)

        def words(nibbles, shifts=shifts):
            packed = (nibbles.unflatten(-1, (-1, 8)) << shifts).sum(-1)
            return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

        del tensors[f"{name}.weight"]
        tensors[f"{name}.qweight"] = words(values).T.contiguous()
        tensors[f"{name}.qzeros"] = words(zeros.T - 1)
        tensors[f"{name}.scales"] = scales.T.contiguous()
        tensors[f"{name}.g_idx"] = (torch.arange(k) // 128).to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = theirs.config.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_quantized(tmp_path)
    got = serve_eagerly(
        LlamaConfig.from_folder(tmp_path),
        lambda model: quantized.load_checkpoint(model, tmp_path, torch.device("cpu")),
        PROMPTS,
        12,
    )
    assert got == [expected_tokens(theirs, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("variant", "devices", "overlap_rows"),
    [
        *((v, 1, 4096) for v in VARIANTS),
        *((v, 2, rows) for v in ("tied", "biases") for rows in (4096, 8)),
        ("odd-vocabulary", 4, 8),
    ],
)
def test_the_jax_model_gives_the_tokens_of_transformers(variant, devices, overlap_rows, tmp_path):
    """Also where steps of 8 rows and more are computed in halves."""
    jax_weights = pytest.importorskip("paged_llama.jax_weights", exc_type=ImportError)
    from paged_llama.jax_engine import Engine

    theirs = tiny_model(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    config = LlamaConfig.from_folder(tmp_path)
    prompts = [[(7 * i + 3 * j * j) % 96 for j in range(length)] for i, length in enumerate((1, 5, 70, 23))]
    requests = [Request(prompt, 12, config.eos_token_ids) for prompt in prompts]
    scheduler = Scheduler(num_pages=40, page_size=4, max_seqs=3, chunk=16, max_tokens=82)
    scheduler.add(requests)
    mesh = jax_weights.make_mesh(devices)
    parameters = jax_weights.load_checkpoint(config, "float32", 82, tmp_path, mesh)
    engine = Engine(config, parameters, scheduler, StepOptions(overlap_rows=overlap_rows))
    engine.warm_up()
    engine.run()
    assert [request.generated for request in requests] == [expected_tokens(theirs, p, 12) for p in prompts]


def jax_tokens(tmp_path, prompts, max_seqs: int, options: StepOptions) -> list[list[int]]:
    jax_weights = pytest.importorskip("paged_llama.jax_weights", exc_type=ImportError)
    from paged_llama.jax_engine import Engine

    theirs = tiny_model()
    theirs.save_pretrained(tmp_path)
    config = LlamaConfig.from_folder(tmp_path)
    requests = [Request(prompt, 12, config.eos_token_ids) for prompt in prompts]
    scheduler = Scheduler(num_pages=40, page_size=4, max_seqs=max_seqs, chunk=16, max_tokens=82)
    scheduler.add(requests)
    parameters = jax_weights.load_checkpoint(config, "float32", 82, tmp_path)
    if options.features_first:
        jax_weights.features_first(parameters)
    engine = Engine(config, parameters, scheduler, options)
    engine.warm_up()
    engine.run()
    return [request.generated for request in requests]


PROMPTS = [[(7 * i + 3 * j * j) % 96 for j in range(length)] for i, length in enumerate((1, 5, 70, 23))]


@pytest.mark.parametrize(
    "operators",
    [
        *("none", "rms_norm", "silu_and_mul,sample", "attention_block"),
        *("gated_mlp,linear,rotary_and_cache", "rotary_and_attention"),
    ],
)
def test_frameworks_operations_give_the_same_tokens(operators, tmp_path):
    names = frozenset() if operators == "none" else frozenset(operators.split(","))
    assert jax_tokens(tmp_path, PROMPTS, 3, StepOptions(names)) == jax_tokens(tmp_path, PROMPTS, 3, StepOptions())


def test_operators_by_the_rows_of_a_step_in_jax(tmp_path, monkeypatch):
    from paged_llama import options

    monkeypatch.setattr(options, "BLOCK_ROWS", 3)
    monkeypatch.setattr(options, "CHAINED_ROWS", 3)
    monkeypatch.setattr(options, "PROMPT_ROWS", 5)
    usual = StepOptions(frozenset(options.usual("bfloat16", 1, 3)))
    assert usual.features_first
    assert jax_tokens(tmp_path, PROMPTS, 3, usual) == jax_tokens(tmp_path, PROMPTS, 3, StepOptions())


def test_a_sampled_text_does_not_depend_on_what_runs_beside_it(tmp_path):
    """Request i has its own seed, and each of its tokens its own step."""
    options = StepOptions(temperature=1.5, top_k=40, top_p=0.95, min_p=0.001, seed=7)
    together = jax_tokens(tmp_path, PROMPTS, 3, options)
    assert together == jax_tokens(tmp_path, PROMPTS, 1, options)
    assert together != jax_tokens(tmp_path, PROMPTS, 3, dataclasses.replace(options, seed=70))
    assert together != jax_tokens(tmp_path, PROMPTS, 3, StepOptions())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("rope")])
def test_the_jax_models_rotations_are_transformers_to_an_ulp(variant):
    jax_model = pytest.importorskip("paged_llama.jax_model", exc_type=ImportError)
    theirs = tiny_model(**VARIANTS[variant])
    config = LlamaConfig.from_hugging_face(theirs.config.to_dict())
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(2000)[None])
    ours, half = jax_model.rotation_table(config, 2000), config.head_dim // 2
    expected = torch.stack([cos[0, :, :half], sin[0, :, :half]], -1).numpy()
    assert ours.dtype == expected.dtype and abs(ours - expected).max() < 1.3e-7


def test_the_jax_model_takes_bfloat16_checkpoints_and_refuses_others(tmp_path):
    jax_weights = pytest.importorskip("paged_llama.jax_weights", exc_type=ImportError)
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = LlamaConfig.from_folder(tmp_path)
    parameters = jax_weights.load_checkpoint(config, "bfloat16", 8, tmp_path)
    got = parameters["layers.0.out.weight"]
    want = model.state_dict()["model.layers.0.self_attn.o_proj.weight"].T.float().numpy()
    assert got.dtype.name == "bfloat16" and (got.astype("float32") == want).all()
    wrong = dataclasses.replace(config, intermediate_size=128)
    with pytest.raises(
        ValueError, match=r"gate_proj.weight \+ .*up_proj.weight: expected \[64, 256\], got \[64, 240\]"
    ):
        jax_weights.load_checkpoint(wrong, "bfloat16", 8, tmp_path)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("rope")])
def test_rotations_have_the_bits_of_transformers(variant):
    theirs = tiny_model(**VARIANTS[variant])
    config = LlamaConfig.from_hugging_face(theirs.config.to_dict())
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(500)[None])
    ours = rotation_table(config, 500)
    half = config.head_dim // 2
    assert torch.equal(ours[..., 0], cos[0, :, :half]) and torch.equal(ours[..., 1], sin[0, :, :half])


def test_older_config_files_mean_the_same():
    new = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rope_parameters": LLAMA3_ROPE,
    }
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}}
    assert LlamaConfig.from_hugging_face(old) == LlamaConfig.from_hugging_face(new)
    plain = LlamaConfig.from_hugging_face(old | {"rope_scaling": None})
    assert plain.rope_scaling is None and plain.num_kv_heads == 2 and plain.head_dim == 4


def test_end_of_sequence_tokens_come_from_the_generation_settings(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == {5, 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected 'llama', got 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type: expected default, linear or llama3, got",
        ),
    ],
)
def test_a_configuration_that_the_model_cannot_do_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hugging_face({"model_type": "llama"} | change)


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    cpu = torch.device("cpu")
    for change, message in (
        ({"attention_bias": True}, "the checkpoint has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"intermediate_size": 128}, r"gate_proj.weight \+ .*up_proj.weight: expected \[256, 64\], got \[240, 64\]"),
    ):
        model = PagedLlama(LlamaConfig.from_hugging_face(config | change), torch.float32, 8)
        with pytest.raises(ValueError, match=message):
            weights.load_checkpoint(model, tmp_path, cpu)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        weights.load_checkpoint(model, tmp_path, cpu)


def test_published_shapes_have_the_size_of_their_names():
    def parameters(config):
        return sum(p.numel() for p in PagedLlama(config, torch.bfloat16, 1).parameters())

    assert parameters(SHAPES["llama3-8b"]) == 8_030_261_248
    assert parameters(SHAPES["llama3-70b"]) == 70_553_706_496
    assert parameters(SHAPES["llama3-1b"]) == 1_235_814_400


def test_a_comparison_names_the_first_token_that_differs():
    model = tiny_model()
    from paged_llama import reference  # imports the models of transformers, as tiny_model() does

    prompt = [3, 50, 7]
    expected = reference.generate(model, prompt, 8, frozenset({1}))
    assert expected == expected_tokens(model, prompt, 8)
    assert reference.compare(model, prompt, list(expected), expected) is None
    wrong = [*expected[:5], (expected[5] + 1) % 96, *expected[6:]]
    mismatch = reference.compare(model, prompt, wrong, expected)
    assert (mismatch.index, mismatch.got, mismatch.expected) == (5, wrong[5], expected[5])
    assert 1e-4 < mismatch.gap < 1e3 and f"new token 5: got {wrong[5]}" in str(mismatch)
    shorter = reference.compare(model, prompt, expected[:4], expected)
    assert (shorter.index, shorter.got, shorter.expected) == (4, None, expected[4])
