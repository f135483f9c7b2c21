"""Device memory of this process through an XLA program and back, without a PyTorch that has CUDA: by the CUDA driver.

    PJRT_DEVICE=GPU python -m tests.runtime.shared_memory_program

test_shared_buffers.py runs it. Prints what it found, then "ok".
"""

from __future__ import annotations

import ctypes
import gc
import time

import numpy as np
import torch
import torch_xla

from xla_gpu._runtime import library
from xla_gpu._torch_xla import shared_memory

CUDA = ctypes.CDLL("libcuda.so.1")
OWNER = shared_memory.Owner(None, lambda: check(CUDA.cuCtxSynchronize()))
CUDA.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
CUDA.cuMemcpyHtoD_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
CUDA.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
CUDA.cuMemsetD32Async.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p]


def check(status: int) -> None:
    assert status == 0, f"CUDA error {status}"


def to_device(array: np.ndarray) -> int:
    address = ctypes.c_uint64()
    check(CUDA.cuMemAlloc_v2(ctypes.byref(address), array.nbytes))
    check(CUDA.cuMemcpyHtoD_v2(address.value, array.ctypes.data, array.nbytes))
    return address.value


def managed(capsule) -> int:
    """The address of a capsule's DLManagedTensor."""
    get = ctypes.PyDLL(None).PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, b"dltensor")


def address_of(capsule) -> int:
    return ctypes.c_uint64.from_address(managed(capsule)).value


def give_back(capsule) -> None:
    tensor = managed(capsule)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.c_void_p.from_address(tensor + 56).value)(tensor)


def from_device(address: int, like: np.ndarray) -> np.ndarray:
    array = np.empty_like(like)
    check(CUDA.cuCtxSynchronize())
    check(CUDA.cuMemcpyDtoH_v2(array.ctypes.data, address, array.nbytes))
    return array


def placeholders(device: torch.device, stream: int, address: int, big: np.ndarray) -> None:
    """Placeholders get the memory that was bound last, after the stream's work, and none after its end."""
    count, size = 64, 1024
    describe = lambda shape, addresses: [  # noqa: E731
        shared_memory.Memory(x, torch.Size(shape), torch.float32) for x in addresses
    ]
    made = shared_memory.make_placeholders(describe((size,), [address + 4096 * i for i in range(count)]), device)
    numbers = (ctypes.c_int64 * count)(*[number for _, number in made])
    values = np.arange(2 * count * size, dtype=np.float32).reshape(2, count, size)
    begins = [to_device(values[half]) for half in range(2)]

    def run(begin: int) -> tuple[float, np.ndarray]:
        addresses = (ctypes.c_void_p * count)(*[begin + 4096 * i for i in range(count)])
        start = time.perf_counter()
        shared_memory.bind(numbers, addresses, count, stream)
        bound = time.perf_counter()
        total = torch.stack([tensor for tensor, _ in made]) * 2
        torch_xla.sync(wait=True)
        end = time.perf_counter()
        shared_memory.unbind(numbers, count)
        times.append((1e6 * (bound - start), 1e6 * (end - bound)))
        return total.cpu().numpy()

    times: list[tuple[float, float]] = []
    for pattern in (0, 1, 1, 0):
        np.testing.assert_array_equal(run(begins[pattern]), 2 * values[pattern])
    print("placeholders have the memory that was bound last")
    for what, halves in (("the same", (0,) * 30), ("other", (0, 1) * 15)):
        times.clear()
        for half in halves:
            run(begins[half])
        bind, program = np.median(times, axis=0)
        print(f"{count} placeholders, {what} memory: bound in {bind:.1f} us, program in {program:.1f} us")

    # The first view of an execution is made anew and waits; the second was made before.
    (first, number), (second, other) = shared_memory.make_placeholders(
        [*describe((size,), [address]), *describe(big.shape, [address + 4096])], device
    )
    pair = (ctypes.c_int64 * 2)(number, other)
    for i in range(3):
        bits = int(np.float32(i + 1).view(np.uint32))
        check(CUDA.cuMemsetD32Async(address, bits, big.size, stream))
        shared_memory.bind(pair, (ctypes.c_void_p * 2)(begins[0], address), 2, stream)
        total = (second == i + 1).all() & (first[1] == 1)
        torch_xla.sync()
        assert bool(total.cpu()), "the program ran before the other stream's work"
    shared_memory.unbind(pair, 2)
    print("programs with placeholders wait for the other stream")


def main() -> None:
    device = torch_xla.device()
    torch.zeros(1).to(device).cpu()  # the client, and with it the primary context
    context = ctypes.c_void_p()
    check(CUDA.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(CUDA.cuCtxSetCurrent(context))
    stream = ctypes.c_void_p()
    check(CUDA.cuStreamCreate(ctypes.byref(stream), 1))  # one that does not wait for others
    take = lambda shape, addresses: shared_memory.import_memory(  # noqa: E731
        [shared_memory.Memory(address, torch.Size(shape), torch.float32, OWNER) for address in addresses],
        *(device, stream.value),
    )
    export_all = lambda tensors: shared_memory.export_memory(tensors, 2, 0, stream.value)  # noqa: E731
    export = lambda tensor: export_all([tensor])[0]  # noqa: E731

    x = np.arange(1 << 20, dtype=np.float32)
    address = to_device(x)
    (imported,) = take(x.shape, [address])
    capsule = export(imported)
    assert address_of(capsule) == address, "a copy was made"
    print("imported and exported at one address")
    give_back(capsule)
    y = imported * 2 + 1
    torch_xla.sync()
    capsule = export(y)
    del y  # the exported memory stays
    gc.collect()
    np.testing.assert_array_equal(from_device(address_of(capsule), x), x * 2 + 1)
    print("computed on it, and read the result at its address")
    give_back(capsule)

    # What the other stream still writes is seen: a fill of much memory, imported at once.
    big = np.zeros(1 << 28, np.float32)
    address = to_device(big)
    for i in range(3):
        bits = int(np.float32(i + 1).view(np.uint32))
        check(CUDA.cuMemsetD32Async(address, bits, big.size, stream))
        (view,) = take(big.shape, [address])
        total = (view == i + 1).all()
        assert bool(total.cpu()), "the program ran before the other stream's work"
        del view, total
    print("programs wait for the other stream")

    placeholders(device, stream.value, address, big)

    count = 200
    together = time.perf_counter()
    views = take((1024,), [address + 4096 * i for i in range(count)])
    begin = time.perf_counter()
    views += [view for i in range(count) for view in take((1024,), [address + 4096 * i])]
    between = time.perf_counter()
    capsules = [export(view) for view in views[:count]]
    end = time.perf_counter()
    capsules += export_all(views[:count])
    all_out = time.perf_counter()
    print(f"in {1e6 * (begin - together) / count:.1f} us together, {1e6 * (between - begin) / count:.1f} us each")
    print(f"out {1e6 * (all_out - end) / count:.1f} us together, {1e6 * (end - between) / count:.1f} us each")
    begin = time.perf_counter()
    for capsule in capsules:
        give_back(capsule)
    print(f"given back {1e6 * (time.perf_counter() - begin) / len(capsules):.1f} us each")
    del views, imported
    gc.collect()
    torch_xla.sync(wait=True)
    kept = shared_memory.forget_released()
    print(f"{kept} imports kept, {library.load().cdll.xla_gpu_export_count()} exports kept")
    assert kept == 0
    print("ok")


if __name__ == "__main__":
    main()
