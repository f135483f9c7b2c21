"""What the NVIDIA driver says of itself and its GPUs, through libcuda and NVML: no framework, no CUDA toolkit."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

# Attributes of cuDeviceGetAttribute.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


class Gpu(NamedTuple):
    """One GPU that this process may use."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


class Driver(NamedTuple):
    """A driver that works."""

    version: str | None  # "580.95.05", where NVML tells
    cuda: tuple[int, int]  # the newest CUDA version that it supports
    gpus: tuple[Gpu, ...]


class DriverError(RuntimeError):
    """There is no driver, no GPU, or they do not work; the text says which."""


def driver() -> Driver:
    """The driver and the GPUs that CUDA_VISIBLE_DEVICES leaves. Raises DriverError."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"no NVIDIA driver: libcuda.so.1 cannot be loaded ({error}). Install the driver; in a container, start it "
            "with the GPUs (docker run --gpus all)."
        ) from None

    def call(function: str, *arguments: object) -> None:
        status = getattr(cuda, function)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"the NVIDIA driver does not work: {function} returned {status} ({reason})")

    call("cuInit", 0)
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    gpus = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        call("cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        gpus.append(Gpu(name.value.decode(), (major.value, minor.value), memory.value))
    if not gpus:
        raise DriverError("the NVIDIA driver finds no GPU that this process may use (see CUDA_VISIBLE_DEVICES)")
    return Driver(_driver_version(), (version.value // 1000, version.value % 1000 // 10), tuple(gpus))


def _driver_version() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            text = ctypes.create_string_buffer(96)
            return text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
