"""Device memory shared with another framework, at the adapter's table, against a plug-in without a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.common import frontends
from tests.common.machine import ROOT
from tests.runtime.test_pjrt_adapter import run

CODE = """
assert use() is None
table = library.cdll.GetPjrtApi()
cdll = library.cdll

def counts():
    numbers = (ct.c_int64 * 6)()
    plugin.fake_pjrt_buffers(numbers)
    return dict(zip(("host", "destroyed", "waits", "stream", "references", "views"), numbers))

def transfer(data, rank=2):
    dims = (ct.c_int64 * rank)(*range(2, 2 + rank))
    # ..., client, data, type, dims, rank, strides, their number, semantics, device, memory, layout, done, buffer
    args = (ct.c_size_t * 15)(120, 0, 11, data, 4, ct.addressof(dims), rank, 0, 0, 0, 0, 2, 0, 0, 0)
    error = entry(table, 22)(ct.addressof(args))
    return message(table, error) if error else args

def buffer_call(slot, buffer):
    args = (ct.c_size_t * 4)(32, 0, buffer, 0)
    assert not entry(table, slot)(ct.addressof(args))
    return args[3]

def released():
    ids = (ct.c_int64 * 8)()
    return ids[: cdll.xla_gpu_import_released(ids, 8)]

def announce(data, *ids):
    addresses = (ct.c_void_p * len(ids))(*(data for _ in ids))
    error = cdll.xla_gpu_import_buffers(addresses, (ct.c_int64 * len(ids))(*ids), len(ids), None)
    return error and error.decode()

def cancel(*data):
    ids = (ct.c_int64 * 8)()
    return ids[: cdll.xla_gpu_import_cancel((ct.c_void_p * len(data))(*data), len(data), ids)]

def placeholder(id, data=0xA000):
    error = cdll.xla_gpu_import_placeholders((ct.c_void_p * 1)(data), (ct.c_int64 * 1)(id), 1)
    return error.decode() if error else transfer(data)[14]

def bind(addresses):
    ids, data = (ct.c_int64 * 9)(*addresses), (ct.c_void_p * 9)(*addresses.values())
    error = cdll.xla_gpu_bind_placeholders(ids, data, len(addresses), None)
    return error and error.decode()

def execute(*buffers):
    "The memory that a program gets; the caller's list is as it was."
    options = (ct.c_size_t * 14)(112)
    given = (ct.c_size_t * 9)(*buffers)
    lists = (ct.c_size_t * 1)(ct.addressof(given))
    args = (ct.c_size_t * 10)(80, 0, 0, ct.addressof(options), ct.addressof(lists), 1, len(buffers))
    if error := entry(table, 55)(ct.addressof(args)):
        return message(table, error)
    assert list(given[: len(buffers)]) == list(buffers) and args[4] == ct.addressof(lists)
    memory = (ct.c_size_t * 9)()
    return [hex(x) for x in memory[: plugin.fake_pjrt_executed(memory, 9)]]

def export(rank=2):
    dims = (ct.c_int64 * 2)(3, 4)
    args = abi.ExportArgs(ct.sizeof(abi.ExportArgs), 1, 0, 2, 32, rank, dims)
    error = cdll.xla_gpu_export_buffers(ct.byref(args), 1, None)
    return error.decode() if error else args.managed_tensor

def give_back(managed):
    deleter = ct.c_void_p.from_address(managed + 48 + 8).value
    ct.CFUNCTYPE(None, ct.c_void_p)(deleter)(managed)
"""


def test_other_transfers_are_passed_on(fake_plugin):
    code = """
announce(0xA000, 1)
transfer(0xB000)
print(counts()["host"], released(), cancel(0xA000, 0xB000), cancel(0xA000))
transfer(0xA000)
print(counts()["host"], hex(buffer_call(73, transfer(0xB000)[14])))
"""
    assert run(fake_plugin, CODE + code).splitlines() == ["1 [] [1] []", "2 0x1234"]


def test_an_announced_address_becomes_a_view(fake_plugin):
    """The first view of a memory tells its device, and with it the stream of the following ones."""
    code = """
for id in (8, 9):
    assert announce(0xA000, id) is None
    args = transfer(0xA000)
    assert buffer_call(76, args[14]) == 0xA000
    print(counts()["host"], counts()["stream"], cancel(0xA000), released())
    buffer_call(58, args[14])
    print(counts()["destroyed"], released(), released())
"""
    assert run(fake_plugin, CODE + code).splitlines() == ["0 0 [] []", "1 [8] []", "0 77 [] []", "2 [9] []"]


def test_the_transfer_of_a_view_has_ended(fake_plugin):
    """Its event is the adapter's own; the plug-in never sees it, and gets all others."""
    code = """
calls = []
on_ready = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_void_p)(lambda error, argument: calls.append((error, argument)))
announce(0xA000, 1)
event = transfer(0xA000)[13]
args = (ct.c_size_t * 5)(40, 0, event, ct.cast(on_ready, ct.c_void_p).value, 7)
print([entry(table, slot)(ct.addressof(args)) for slot in (9, 7, 8)], calls)
args[3] = 0
print(entry(table, 6)(ct.addressof(args)), args[3], entry(table, 5)(ct.addressof(args)))
args[2] = event + 1
print(*{message(table, entry(table, slot)(ct.addressof(args))) for slot in (5, 6, 7, 8, 9)})
"""
    unimplemented = "the fake plug-in does nothing else"
    assert run(fake_plugin, CODE + code).splitlines() == [
        "[None, None, None] [(None, 7)]",
        "None 1 None",
        unimplemented,
    ]


def test_an_address_is_announced_once(fake_plugin):
    code = """
print(announce(0xA000, 1), announce(0xA000, 2), announce(None, 3), announce(0xB000, 4, 5), sep="; ")
print(cancel(0xA000, 0xB000))
"""
    twice = "this memory is imported already, or by another thread"
    assert run(fake_plugin, CODE + code).splitlines() == [f"None; {twice}; data is null; {twice}", "[1]"]


def test_a_view_that_is_refused_is_no_copy(fake_plugin):
    """Host code must not read device memory: the transfer fails, and the reason is the thread's last error."""
    code = """
announce(0xA000, 1)
print(transfer(0xA000, rank=7))
print(counts()["host"], released())
"""
    lines = run(fake_plugin, CODE + code).splitlines()
    assert lines == ["xla_gpu: the fake plug-in refuses views of rank 7", "0 []"]


def test_an_exported_buffer_outlives_its_client(fake_plugin):
    code = """
announce(0xA000, 1)
buffer = transfer(0xA000)[14]
exports = []
for _ in range(2):
    cdll.xla_gpu_export_begin()
    assert buffer_call(73, buffer) == 0
    exports.append(export())
fields = (ct.c_int64 * 2).from_address(ct.c_size_t.from_address(exports[0] + 24).value)
print(hex(ct.c_size_t.from_address(exports[0]).value), list(fields), counts()["references"], counts()["waits"])
buffer_call(58, buffer)  # the client is done with it
print(counts()["destroyed"], cdll.xla_gpu_export_count())
give_back(exports[0])
print(counts()["destroyed"], cdll.xla_gpu_export_count())
give_back(exports[1])
print(counts()["destroyed"], cdll.xla_gpu_export_count(), released())
"""
    assert run(fake_plugin, CODE + code).splitlines() == ["0xa000 [3, 4] 2 2", "0 2", "0 1", "1 0 [1]"]


def test_an_export_needs_a_buffer(fake_plugin):
    code = """
print(export())
cdll.xla_gpu_export_begin()
print(export())
"""
    assert (
        run(fake_plugin, CODE + code).splitlines()
        == ["xla_gpu_export_buffers: expected 1 buffers whose unsafe pointers were read, got 0"] * 2
    )


def test_placeholders_get_the_memory_that_is_bound(fake_plugin):
    code = """
first, second, other = placeholder(1), placeholder(2, 0xA100), transfer(0xB000)[14]
print(bind({1: 0xC000, 2: 0xD000}), execute(first, other, second), counts()["stream"])
print(bind({1: 0xC100, 2: 0xD000}), execute(first, other, second), execute(second))
"""
    assert run(fake_plugin, CODE + code).splitlines() == [
        "None ['0xc000', '0x0', '0xd000'] 77",
        "None ['0xc100', '0x0', '0xd000'] ['0xd000']",
    ]


def test_one_view_of_an_execution_is_made_anew(fake_plugin):
    """It makes the program wait for the other framework; for the others the views of the same memory serve again."""
    code = """
buffers = [placeholder(i, 0xA000 + 256 * i) for i in range(4)]
for shift in (0, 0, 16, 0, *range(32, 129, 16), 16):
    bind({i: 0xC000 + 256 * i + shift for i in range(4)})
    before = counts()
    execute(*buffers)
    after = counts()
    print(after["views"] - before["views"], after["destroyed"] - before["destroyed"])
before = counts()["destroyed"]
for buffer in buffers:
    buffer_call(58, buffer)
print(counts()["destroyed"] - before, released())
"""
    assert run(fake_plugin, CODE + code).splitlines() == [
        *("4 0", "1 1", "4 0", "1 1", *["4 0"] * 6, "4 4", "1 1"),
        "36 []",
    ]


def test_a_placeholder_without_memory_is_an_error(fake_plugin):
    """Never a program over what was bound before."""
    code = """
first, second = placeholder(1), placeholder(2, 0xA100)
print(execute(first))
print(bind({1: 0xC000}), execute(first), bind({1: None}))
print(execute(first))
print(bind({1: 0xC000}), execute(first, second))
print(bind({1: 0xC000, 7: 0xD000}))
buffer_call(58, first)
print(bind({1: 0xC000}))
"""
    refused = "xla_gpu: argument {} of an execution is a placeholder that no memory was bound to"
    lines = run(fake_plugin, CODE + code).splitlines()
    first, second = refused.format(0), refused.format(1)
    assert lines[:4] == [first, "None ['0xc000'] None", first, f"None {second}"]
    assert lines[4] == "xla_gpu_bind_placeholders: 7 is no placeholder"
    assert lines[5] == "xla_gpu_bind_placeholders: 1 is no placeholder"


def test_a_placeholder_that_is_exported(fake_plugin):
    """Its client may destroy it while the other framework has it."""
    code = """
buffer = placeholder(1)
cdll.xla_gpu_export_begin()
buffer_call(73, buffer)
managed = export()
buffer_call(58, buffer)
print(counts()["destroyed"], cdll.xla_gpu_export_count(), bind({1: 0xC000}))
give_back(managed)
print(counts()["destroyed"], cdll.xla_gpu_export_count())
"""
    gone = "xla_gpu_bind_placeholders: 1 is no placeholder"
    assert run(fake_plugin, CODE + code).splitlines() == [f"0 1 {gone}", "1 0"]


def test_results_of_torch_xla_get_their_buffers_while_they_are_computed():
    if reason := frontends.ALL["torch_xla"].unavailable():
        pytest.skip(reason)
    import torch
    import torch_xla

    from xla_gpu._torch_xla import shared_memory

    x = torch.ones(1024, 1024).to(torch_xla.device())
    asked = []
    for i in range(4):
        y = x @ x @ x + i
        torch_xla.sync()
        address = shared_memory.wait_for_buffer(y, lambda: asked.append(1))
        assert address == shared_memory.wait_for_buffer(y) != 0
    assert len(asked) >= 4


@pytest.mark.gpu
def test_on_a_gpu():
    """Memory of the CUDA driver through a program and back, with both orders of streams, and nothing kept."""
    if reason := frontends.ALL["torch_xla-cuda"].unavailable():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.runtime.shared_memory_program"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert process.stdout.splitlines()[-1:] == ["ok"], process.stdout + process.stderr[-3000:]
