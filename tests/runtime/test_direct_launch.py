"""Programs that the PJRT adapter records and launches again, against a plug-in whose programs copy their arguments.

Each case runs in a process of its own, which has one adapter.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.runtime.adapter_client import start

pytest.importorskip("torch")  # whose dtypes the results have

PROCESS = """
import sys
import torch
from xla_gpu._torch_xla import direct_launch
from xla_gpu._torch_xla.direct_launch import DeviceArray, DirectLaunch

def execute(executable, lists, device=0):
    # As torch_xla does: options of an older API, a list of arguments for each device, and one of results.
    options = (ct.c_size_t * 10)(80)
    arguments = [(ct.c_void_p * len(buffers))(*buffers) for buffers in lists]
    results = [(ct.c_void_p * RESULTS)() for _ in lists]
    given = (ct.c_void_p * len(lists))(*map(ct.addressof, arguments))
    returned = (ct.c_void_p * len(lists))(*map(ct.addressof, results))
    assert not call(EXECUTE, (ct.c_size_t * 10)(80, 0, executable, ct.addressof(options), ct.addressof(given),
                                                len(lists), len(lists[0]), ct.addressof(returned), 0, device))
    return [list(buffers) for buffers in results]

def destroyed_so_far():
    cdll.xla_gpu_launch_wait()
    return destroyed()

# A program of four arguments that returns the first three: an input, one that it always takes, and the state.
RESULTS, DEVICES = 3, (11, 12)
returning(RESULTS)
executable = compile(b"copy")
lists = [[from_host(*[10 * i + device] * 2, device=device) for i in range(4)] for device in DEVICES]
handle, results = direct_launch.record(lambda: execute(executable, lists), int(os.environ["ARGUMENTS"]), RESULTS)
if handle is None:
    sys.exit("not recorded")
form = torch.Size([2]), torch.int32
launch = DirectLaunch(handle, [0, 2], [0], [form, form], lists)

class Tensor:  # what torch_xla has
    shape, dtype = form
    _version, values = 0, torch.tensor([7, 8], dtype=torch.int32)

    def is_inference(self):
        return False

    def cpu(self):
        return self.values

state = Tensor()
launch.note(state, result=2)
before = destroyed_so_far()
"""

ENDS = {
    "launches": """
(first, constant), (kept,) = launch([np.array([5, 6], np.int32)], [state])
assert first.cpu().tolist() == [5, 6] and first.shape == (2,) and first.dtype is torch.int32
assert constant.cpu().tolist() == [21, 21]  # the first device's
assert kept.cpu().tolist() == [31, 31]
assert destroyed_so_far() == before + 2  # the input's; the state's buffers were torch_xla's
(second, _), (again,) = launch([first], [kept])
assert again is kept and kept.cpu().tolist() == [31, 31] and second.cpu().tolist() == [5, 6]
del first, second, constant, _
assert destroyed_so_far() == before + 2 + 2 * 5  # with the state's of the first launch
""",
    "borrowed": """
import time
began = time.perf_counter()
_, kept = launch([np.array([5, 6], np.int32)], [state])
first = time.perf_counter() - began
for _ in range(2):  # at once: what they take is the arrays' own
    began = time.perf_counter()
    launch([np.array([5, 6], np.int32)], kept)
print(first >= 0.3, time.perf_counter() - began < first)
""",
    "state": """
_, (kept,) = launch([np.array([5, 6], np.int32)], [state])
again = direct_launch.record(lambda: execute(executable, lists), 4, RESULTS)[0]
swapped = DirectLaunch(again, [2, 0], [0], [form, form], lists)  # the input is what becomes the state
swapped([np.array([7, 8], np.int32)], [kept])
print(kept.cpu().tolist())
""",
    "other devices": """
array = cdll.xla_gpu_launch_buffers(handle, 0, 0)
alone = DeviceArray(array, (2,), torch.int32)
returning(RESULTS)
one, _ = direct_launch.record(lambda: execute(executable, lists[:1]), 4, RESULTS)
narrow = DirectLaunch(one, [0], [], [form] * 3, lists)
try:
    narrow([alone], [])[0][0].cpu()
except RuntimeError as error:
    print(error)
""",
    "one of several devices": """
plugin.fake_pjrt_executed_on.restype = ct.c_void_p
assert plugin.fake_pjrt_executed_on() is None
run = lambda: execute(executable, lists[1:], DEVICES[1])
handle, _ = direct_launch.record(run, 4, RESULTS)
assert plugin.fake_pjrt_executed_on() == DEVICES[1]
execute(executable, lists)
one = DirectLaunch(handle, [0, 2], [0], [form, form], lists)
state = Tensor()
one.note(state, result=2)
(first, _), (kept,) = one([np.array([5, 6], np.int32)], [state])
assert first.cpu().tolist() == [5, 6] and kept.cpu().tolist() == [32, 32]
assert plugin.fake_pjrt_executed_on() == DEVICES[1]
""",
    "after a failure": """
alone = DeviceArray(cdll.xla_gpu_launch_buffers(handle, 0, 0), (2,), torch.int32)
alone_on_one = direct_launch.record(lambda: execute(executable, lists[:1]), 4, RESULTS)[0]
narrow = DirectLaunch(alone_on_one, [2], [0], [form] * 2, lists)
(first, second), (kept,) = narrow([], [state])
outputs, _ = launch([first], [kept])
for array in (second, kept, outputs[0]):
    try:
        array.cpu()
    except RuntimeError as error:
        print(error)
""",
    "updated": """
table = Tensor()
(first, _), (kept,) = launch([table], [state])
(second, _), _ = launch([table], [kept])
table._version, table.values = 1, torch.tensor([9, 10], dtype=torch.int32)
(third, _), _ = launch([table], [kept])
print([array.cpu().tolist() for array in (first, second, third)])
""",
    "beside others": """
def others_first():
    returning(1)
    execute(compile(b"copy"), [[from_host(0, 0, device=device)] for device in DEVICES])
    returning(RESULTS)
    return execute(executable, lists)

handle, _ = direct_launch.record(others_first, 4, RESULTS)
(first, _), _ = DirectLaunch(handle, [0, 2], [0], [form, form], lists)([np.array([5, 6], np.int32)], [state])
assert first.cpu().tolist() == [5, 6]
""",
    "reading": """
(first, _), _ = launch([np.array([5, 6], np.int32)], [state])
try:
    first.cpu()
except RuntimeError as error:
    print(error)
""",
}


def run(fake_plugin, end: str, arguments: int = 4, mode: str = "") -> subprocess.CompletedProcess:
    return start(PROCESS + ENDS[end], fake_plugin, mode, ARGUMENTS=str(arguments))


def test_launches_are_repeated_with_other_buffers(fake_plugin):
    done = run(fake_plugin, "launches")
    assert done.returncode == 0, done.stderr


def test_a_launch_with_the_clients_buffers_is_waited_for(fake_plugin):
    """The client may let go of them when the call returns."""
    done = run(fake_plugin, "borrowed", mode="slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True\n"


def test_a_tensor_that_was_updated_is_copied_anew(fake_plugin):
    done = run(fake_plugin, "updated")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[7, 8], [7, 8], [9, 10]]\n"


def test_reading_the_state_waits_for_the_last_launch(fake_plugin):
    done = run(fake_plugin, "state", mode="slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[7, 8]\n"


def test_another_program_is_not_recorded(fake_plugin):
    done = run(fake_plugin, "launches", arguments=5)
    assert done.returncode == 1 and done.stderr.endswith("not recorded\n")


def test_a_program_with_other_results_is_not_the_one_to_record(fake_plugin):
    """Another thread's, for example."""
    done = run(fake_plugin, "beside others")
    assert done.returncode == 0, done.stderr


def test_a_plugin_that_does_not_say_how_many_results_a_program_has(fake_plugin):
    """The next execution is recorded."""
    done = run(fake_plugin, "launches", mode="uncounted")
    assert done.returncode == 0, done.stderr


def test_arrays_of_other_devices_are_refused(fake_plugin):
    done = run(fake_plugin, "other devices")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "xla_gpu_launch_run: input 0 has 2 buffers, the program is for 1 device\n"


def test_a_program_that_one_of_several_devices_runs(fake_plugin):
    """A client with several GPUs names the one in each execution of a program that is not sharded."""
    done = run(fake_plugin, "one of several devices")
    assert done.returncode == 0, done.stderr


def test_what_depends_on_a_failed_launch_fails_with_its_reason(fake_plugin):
    done = run(fake_plugin, "after a failure")
    assert done.returncode == 0, done.stderr
    assert done.stdout == 3 * "xla_gpu_launch_run: input 0 has 2 buffers, the program is for 1 device\n"


def test_what_a_computation_failed_with(fake_plugin):
    done = run(fake_plugin, "reading", mode="failing")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the fake plug-in computed nothing\n"
