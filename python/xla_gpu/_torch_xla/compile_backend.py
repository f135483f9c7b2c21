"""torch.compile's backend "xla_gpu": functions of CUDA (or CPU) tensors as XLA programs on their device.

aot_autograd makes the graph functional, so that inputs which a function changes are results of the program; its own
epilogue copies them back. Parameters are taken over once.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends import registry

from .._core.environment import pjrt_device, switch
from . import cuda_tensors, shared_memory

# "0" leaves torch.compile(backend="openxla") with CUDA tensors as torch_xla has it.
ENVIRONMENT = "XLA_GPU_OPENXLA_CUDA"
NAME = "xla_gpu"


class _Parameters:
    """XLA tensors of parameters, made once for each memory, layout and version of theirs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Any, torch.Tensor]] = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's XLA tensor; None for one that must be taken over in each call.

        Only shared memory shows what changes a parameter without counting a version, as ``.data`` does.
        """
        key = id(parameter)
        try:  # .data can also give the same memory another shape or other strides
            state = (parameter.data_ptr(), parameter._version, parameter.dtype, parameter.shape, parameter.stride())
        except RuntimeError:  # those of inference mode have no version
            return None
        known = self._known.get(key)
        if known is not None and known[0]() is parameter and known[1] == state:
            return known[2]
        if not cuda_tensors.is_row_major(parameter):
            return None
        tensor = cuda_tensors.to_xla(parameter)
        self._known[key] = (weakref.ref(parameter, lambda _: self._known.pop(key, None)), state, tensor)
        return tensor


_parameters = _Parameters()


class _Binding:
    """XLA tensors that stand for the CUDA arguments of one program; each call binds its memory to them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.Size, torch.dtype], tuple[torch.Tensor, int]] = {}
        self._numbers: Any = None
        self._count = 0

    def bind(self, positions: Sequence[int], memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The XLA tensors at these positions of the arguments, over row-major memory of one device."""
        keys = [(i, memory.shape, memory.dtype) for i, memory in zip(positions, memories, strict=True)]
        device = memories[0].device
        if any(key not in self._known for key in keys):
            torch.cuda.current_stream(device).synchronize()  # torch_xla may read arguments while it traces
            described = [shared_memory.Memory(x.data_ptr(), x.shape, x.dtype) for x in memories]
            made = shared_memory.make_placeholders(described, cuda_tensors.xla_device(device))
            self._known.update(zip(keys, made, strict=True))
        known = [self._known[key] for key in keys]
        self._count = len(known)
        self._numbers = (ctypes.c_int64 * self._count)(*[number for _, number in known])
        addresses = (ctypes.c_void_p * self._count)(*[memory.data_ptr() for memory in memories])
        stream: Any = torch.cuda.current_stream(device)
        shared_memory.bind(self._numbers, addresses, self._count, stream.cuda_stream)
        return [tensor for tensor, _ in known]

    def unbind(self) -> None:
        shared_memory.unbind(self._numbers, self._count)


class _Program:
    """One graph: compiled at its first call, and called with tensors of one device."""

    def __init__(self, graph: torch.fx.GraphModule, device: torch.device, results: list[torch.device]) -> None:
        self._graph: torch.fx.GraphModule | None = graph
        self._device, self._results = device, results  # where it runs as PyTorch has it, and where its results belong
        self._call: Callable[..., Any] | None = None
        self._binding: _Binding | None = _Binding()  # None: PyTorch computes a part of it
        self._lock = threading.Lock()

    def __call__(self, arguments: list[Any]) -> Any:
        given, xla = list(arguments), list(arguments)
        arguments.clear()  # a boxed function owns its arguments
        device, on_cuda = self._device, []
        if device.type == "cuda":
            cuda_tensors.refuse_capture(f"torch.compile(backend={NAME!r})")
        # What is kept between calls must not be of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for i, x in enumerate(given):
                if not isinstance(x, torch.Tensor):
                    continue
                if x.device != device and x.device.type != "cpu":
                    got = f"{device} and {x.device}"
                    raise ValueError(f"torch.compile(backend={NAME!r}): expected tensors of one device, got {got}")
                if not x.is_cuda or x.numel() == 0:
                    xla[i] = cuda_tensors.to_xla(x, device)
                elif _is_parameter(x) and (known := _parameters.get(x)) is not None:
                    xla[i] = known
                else:  # taken over together, with what is known of the program
                    on_cuda.append(i)
            with self._lock:
                if not on_cuda:
                    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in given):
                        # Parameters alone: nothing else makes the program wait for what the stream may still write.
                        torch.cuda.current_stream(device).synchronize()
                    return self._returned(self._run(xla))
                call = self._call_bound if self._binding is not None else self._call_imported
                with torch.cuda.device(device):  # its streams are recorded on the current device
                    return call(given, xla, on_cuda, device)

    def _run(self, xla: list[Any]) -> Sequence[Any]:
        """torch_xla's results for XLA tensors."""
        if self._call is None:
            from torch_xla.core import dynamo_bridge

            assert self._graph is not None
            self._call = dynamo_bridge.extract_compiled_graph(self._graph, xla)
            self._graph = None
            if not _is_one_program(self._call):
                self._binding = None  # before the first run, which may fail
        results = self._call(*xla)
        # torch_xla returns a single result as it is where sizes vary.
        return results if isinstance(results, (list, tuple)) else [results]

    def _call_bound(self, given: list[Any], xla: list[Any], on_cuda: list[int], device: torch.device) -> list[Any]:
        """The call keeps the memory. PyTorch's stream waits for a result, so it may be reused afterwards."""
        binding, ended = self._binding, False
        assert binding is not None
        memories = cuda_tensors.row_major([xla[i] for i in on_cuda])
        tensors = binding.bind(on_cuda, memories)
        for i, tensor in zip(on_cuda, tensors, strict=True):
            xla[i] = tensor
        try:
            results = self._run(xla)
            if self._binding is None:
                _wait_for_programs()
            # An argument that is returned is the caller's own.
            own = {id(tensor): given[i] for i, tensor in zip(on_cuda, tensors, strict=True)}
            out = self._returned([own.get(id(x), x) for x in results])
            ended = any(isinstance(x, torch.Tensor) and id(x) not in own and x.numel() > 0 for x in results)
            return out
        finally:
            try:
                if not ended:  # no result to wait for, or an error: the program may still be to start
                    try:
                        _wait_for_programs()
                    finally:
                        torch.cuda.synchronize(device)
            finally:
                binding.unbind()

    def _call_imported(self, given: list[Any], xla: list[Any], on_cuda: list[int], device: torch.device) -> list[Any]:
        """Takes the memory over, so that PyTorch can compute a part of the graph."""
        taken, owners = cuda_tensors.take_over([xla[i] for i in on_cuda])
        for i, tensor in zip(on_cuda, taken, strict=True):
            xla[i] = tensor
        out = self._returned(self._run(xla))
        if any(isinstance(x, torch.Tensor) and x.numel() > 0 for x in out):
            # PyTorch's stream waits for a result, and so for the program that read the arguments: it may reuse them.
            for owner in owners:
                owner.ordered = True
        return out

    def _returned(self, results: Sequence[Any]) -> list[Any]:
        """A program's results on the devices that PyTorch would have them on."""
        out = list(results)
        by_device: dict[torch.device, list[int]] = {}
        for i, (result, device) in enumerate(zip(out, self._results, strict=True)):
            if isinstance(result, torch.Tensor) and result.device.type == "xla" and device.type != "xla":
                by_device.setdefault(device, []).append(i)
        for device, where in by_device.items():
            tensors = [out[i] for i in where]
            on_cuda = device.type == "cuda"
            moved = cuda_tensors.export(tensors) if on_cuda else [x.to(device) for x in tensors]
            for i, tensor in zip(where, moved, strict=True):
                out[i] = tensor
        return out


def _is_parameter(tensor: torch.Tensor) -> bool:
    # NOTE: isinstance with Parameter is a function of Python's.
    return type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)


def _is_one_program(call: Any) -> bool:
    """Whether torch_xla made one program of a graph: operators that it does not know run on the CPU, by PyTorch."""
    if not isinstance(call, torch.fx.GraphModule):
        return True
    targets = [node.target for node in call.graph.nodes if node.op.startswith("call")]
    programs = [target for target in targets if target is not operator.getitem]
    return len(programs) <= 1 and all(getattr(x, "__name__", "") == "optimized_mod" for x in programs)


def _wait_for_programs() -> None:
    """Waits until torch_xla has started the programs that it was given, and they have run."""
    import _XLAC

    _XLAC._xla_wait_device_ops([])


def _compile(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    results = _devices_of_results(graph)
    inputs = [x.device for x in example_inputs if isinstance(x, torch.Tensor)]
    traced = [*inputs, *(device for device in results if device is not None), *_devices_of_constants(graph)]
    device = next((device for device in traced if device.type != "cpu"), torch.device("cpu"))
    xla_device = cuda_tensors.xla_device(device)
    if device.type == "cuda" and xla_device != (default := cuda_tensors.xla_device(torch.device("cpu"))):
        # torch_xla runs compiled graphs there, and ends the process for a buffer of another GPU.
        raise ValueError(
            f"torch.compile(backend={NAME!r}): expected tensors on cuda:{default.index or 0}, torch_xla's device in "
            f"this process, got {device}: let CUDA_VISIBLE_DEVICES name one GPU for each process"
        )
    _put_constants_on_xla(graph, xla_device)
    program = _Program(graph, device, [device if each is None else each for each in results])
    program._boxed_call = True  # type: ignore[attr-defined]  # aot_autograd then passes a list that it lets go of
    return program


def _devices_of_results(graph: torch.fx.GraphModule) -> list[torch.device | None]:
    """Where each result was when the graph was traced; None for one that is no tensor."""
    (output,) = graph.graph.find_nodes(op="output")
    values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
    return [x.device if isinstance(x, torch.Tensor) else None for x in values]


def _devices_of_constants(graph: torch.fx.GraphModule) -> list[torch.device]:
    devices = [node.kwargs.get("device") for node in graph.graph.nodes if node.op == "call_function"]
    return [device for device in devices if isinstance(device, torch.device)]


def _put_constants_on_xla(graph: torch.fx.GraphModule, device: torch.device) -> None:
    """Operators that make tensors name the device that was traced."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """See xla_gpu.torch.openxla."""
    # Imported when it is used: with it comes half of PyTorch's compiler.
    from torch._dynamo.backends.common import aot_autograd
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):  # XLA has no kernels of PyTorch's other ways to compute attention
        return aot_autograd(fw_compiler=_compile, decompositions=_decompositions())(graph, example_inputs, **options)


@functools.cache
def _decompositions() -> Any:
    """Operators that torch_xla computes otherwise than PyTorch: its running variance of a batch is the biased one."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return get_decompositions([aten._native_batch_norm_legit_functional, aten._batch_norm_with_update_functional])


def register() -> None:
    """Makes the backend known by its name, and with PJRT_DEVICE=GPU makes "openxla" take CUDA tensors too."""
    if NAME not in registry._COMPILER_FNS:  # torch has no public question for it
        registry.register_backend(name=NAME, compiler_fn=backend)
    if pjrt_device() != "GPU" or not switch(ENVIRONMENT, True):
        return
    if torch.version.cuda is None:  # not is_available(): it would start CUDA in processes that fork later
        return
    own = registry.lookup_backend("openxla")

    def openxla(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        on_cuda = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)
        return (backend if on_cuda else own)(graph, example_inputs, **options)

    openxla._tags = ()  # type: ignore[attr-defined]
    registry._COMPILER_FNS["openxla"] = openxla
