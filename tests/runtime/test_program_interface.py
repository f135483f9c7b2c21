"""What the adapter leaves of an optimised program: parameters and result, as XLA reads them."""

from __future__ import annotations

import pytest

from tests.runtime.test_pjrt_adapter import run

jax = pytest.importorskip("jax")
hlo = pytest.importorskip("jaxlib._hlo")

ASK = """
assert use() is None
given = bytes.fromhex(open(os.environ["PROGRAM"]).read())
plugin.fake_pjrt_set_program(given, ct.c_size_t(len(given)))
table = library.cdll.GetPjrtApi()

def ask(executable=1, size=None):
    program = (ct.c_size_t * 6)(48, 0, 0, 0, 0, 0)
    args = (ct.c_size_t * 4)(32, 0, executable, ct.addressof(program))
    assert not entry(table, 48)(ct.addressof(args))
    code = ct.create_string_buffer(program[3])
    program[2] = ct.addressof(code)
    assert not entry(table, 48)(ct.addressof(args))
    return code.raw[:program[3]]

got = ask()
assert ask() == got  # the next executable's
print(got.hex())
"""


def field(number: int, content: bytes) -> bytes:
    size, digits = len(content), b""
    while size >= 0x80:
        digits, size = digits + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + digits + bytes([size]) + content


def step(x, y):
    for _ in range(20):
        x = jax.numpy.sin(x) @ y
    return x, [x.sum(), y.astype(jax.numpy.bfloat16)]


@pytest.fixture(scope="module")
def module() -> bytes:
    """An optimised HloModuleProto."""
    forms = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    compiled = jax.jit(step, donate_argnums=0).lower(*forms).compile()
    return compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()


def asked(program: bytes, fake_plugin, tmp_path, mode: str = "") -> bytes:
    (tmp_path / "program").write_text(program.hex())
    return bytes.fromhex(run(fake_plugin, ASK, mode, PROGRAM=str(tmp_path / "program")))


def test_parameters_and_result_stay(module, fake_plugin, tmp_path):
    config = field(2, b"kept")
    got = asked(field(1, module) + config, fake_plugin, tmp_path)
    assert got.endswith(config) and len(got) < len(module) / 2
    # The size of the module's own field, of two bytes or three.
    start = next(at for at in range(1, 5) if got[at] < 0x80) + 1
    small, whole = (
        hlo.HloModule.from_serialized_hlo_module_proto(proto) for proto in (got[start : -len(config)], module)
    )
    text = small.to_string()
    assert text.count("parameter(") == 2 and text.count("custom-call(") == 1 and "sine" not in text
    forms = [hlo.XlaComputation(part.as_serialized_hlo_module_proto()).program_shape() for part in (small, whole)]
    assert forms[0].result_shape() == forms[1].result_shape()
    assert forms[0].parameter_shapes() == forms[1].parameter_shapes()
    heads = [part.to_string().splitlines()[0] for part in (small, whole)]  # aliases and layouts
    for word in ("input_output_alias", "entry_computation_layout"):
        assert all(word in head for head in heads)


@pytest.mark.parametrize("change", ["format", "divided", "cut", "empty", "no entry"])
def test_what_is_not_understood_stays_whole(change, module, fake_plugin, tmp_path):
    given = {
        "format": field(1, module),
        "divided": field(1, module + field(12, b"")),
        "cut": field(1, module)[:-5],
        "empty": b"",
        "no entry": field(1, field(1, b"name")),
    }[change]
    assert asked(given, fake_plugin, tmp_path, "mlir" if change == "format" else "") == given
