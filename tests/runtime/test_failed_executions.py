"""What the PJRT adapter returns of an execution that fails: buffers that have the error."""

from __future__ import annotations

import pytest

from tests.runtime.adapter_client import run

CASES = {
    "results have its error": """
os.environ["FAKE_PJRT"] = "exhausted"
results = execute(program, [x, y], 2)
assert refused is None
os.environ["FAKE_PJRT"] = ""
expected = "9: xla_gpu: the execution that was to compute this has failed: the fake plug-in is out of memory"
assert [read(result) for result in results] == [expected] * 2
assert read(x) == [1, 2]
for entry in 64, 69, 73, 74, 75, 76, 92, 100, 120, 125:
    error = call(entry, (ct.c_size_t * 16)(120, 0, results[0]))
    assert text_of(error) == expected, entry
""",
    "and what is computed with them": """
os.environ["FAKE_PJRT"] = "exhausted"
failed = execute(program, [x, y], 2)
os.environ["FAKE_PJRT"] = ""
computed = execute(program, [x, failed[1]], 2)
assert read(computed[0]) == read(computed[1]) == read(failed[0])
for buffer in *failed, *computed:
    destroy(buffer)
assert [read(result) for result in execute(program, [x, y], 2)] == [[1, 2], [3, 4]]
destroy(from_host(5, 6))
""",
    "lent to another framework": """
os.environ["FAKE_PJRT"] = "exhausted"
failed = execute(program, [x, y], 2)
cdll.xla_gpu_export_begin()
assert "out of memory" in text_of(call(POINTER, (ct.c_size_t * 4)(32, 0, failed[0])))
assert cdll.xla_gpu_export_count() == 0
""",
    "on two devices": """
os.environ["FAKE_PJRT"] = "exhausted"
options = (ct.c_size_t * 10)(80)
arguments, results = (ct.c_void_p * 2)(x, y), [(ct.c_void_p * 2)(), (ct.c_void_p * 2)()]
given = (ct.c_void_p * 2)(*[ct.addressof(arguments)] * 2)
returned = (ct.c_void_p * 2)(*map(ct.addressof, results))
assert not call(EXECUTE, (ct.c_size_t * 10)(80, 0, program, ct.addressof(options), ct.addressof(given), 2, 2,
                                            ct.addressof(returned), 0, 0))
buffers = [*results[0], *results[1]]
assert len(set(buffers)) == 4 and all("out of memory" in read(buffer) for buffer in buffers)
""",
    "without any": """
returning(0)
os.environ["FAKE_PJRT"] = "exhausted"
assert execute(program, [x, y], 0) is None and refused.endswith("the fake plug-in is out of memory")
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_failed_execution(case, fake_plugin):
    begin = """
returning(2)
program, x, y = compile(b"program"), from_host(1, 2), from_host(3, 4)
"""
    run(begin + CASES[case], fake_plugin)


def test_a_plugin_without_such_buffers(fake_plugin):
    code = """
returning(2)
os.environ["FAKE_PJRT"] = "exhausted"
assert execute(compile(b"program"), [from_host(1, 2), from_host(3, 4)], 2) is None
assert refused == "9: the fake plug-in is out of memory", refused
"""
    run(code, fake_plugin, "errorless")
