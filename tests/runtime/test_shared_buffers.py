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
    numbers = (ct.c_int64 * 5)()
    plugin.fake_pjrt_buffers(numbers)
    return dict(zip(("host", "destroyed", "waits", "stream", "references"), numbers))

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

def export(rank=2):
    dims = (ct.c_int64 * 2)(3, 4)
    args = abi.ExportArgs(ct.sizeof(abi.ExportArgs), None, 1, 0, 2, 32, rank, dims)
    error = cdll.xla_gpu_export_buffer(ct.byref(args))
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
    assert lines == ["Unexpected PJRT_Client_BufferFromHostBuffer_Args size: expected 120, got 1", "0 []"]


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
        == ["xla_gpu_export_buffer: expected a buffer whose unsafe pointer was read, got none"] * 2
    )


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
