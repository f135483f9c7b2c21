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
