"""torch.compile's backend "xla_gpu": functions of CUDA (or CPU) tensors as XLA programs on their device.

aot_autograd makes the graph functional, so that inputs which a function changes are results of the program; its own
epilogue copies them back. Parameters are taken over once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends import registry

from . import cuda_tensors

# "0" leaves torch.compile(backend="openxla") with CUDA tensors as torch_xla has it.
ENVIRONMENT = "XLA_GPU_OPENXLA_CUDA"
NAME = "xla_gpu"


class _Parameters:
    """XLA tensors of parameters, made once for each memory and version of theirs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Any, torch.Tensor]] = {}

    def get(self, parameter: torch.Tensor) -> torch.Tensor:
        state = (parameter.data_ptr(), parameter._version)
        known = self._known.get(id(parameter))
        if known is not None and known[0]() is parameter and known[1] == state:
            return known[2]
        key = id(parameter)
        tensor = cuda_tensors.to_xla(parameter)
        self._known[key] = (weakref.ref(parameter, lambda _: self._known.pop(key, None)), state, tensor)
        return tensor


_parameters = _Parameters()


class _Program:
    """One graph: compiled at its first call, and called with tensors of one device."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._graph: torch.fx.GraphModule | None = graph
        self._call: Callable[..., Any] | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()  # a boxed function owns its arguments
        devices = {x.device for x in given if isinstance(x, torch.Tensor) and x.device.type != "cpu"}
        if len(devices) > 1:
            raise ValueError(f"torch.compile(backend={NAME!r}): expected tensors of one device, got {devices}")
        device = devices.pop() if devices else torch.device("cpu")
        with torch.no_grad():
            xla = [self._argument(x) for x in given]
            foreign = [i for i, x in enumerate(xla) if isinstance(x, torch.Tensor) and x.device.type == "cuda"]
            taken, owners = cuda_tensors.take_over([xla[i].detach() for i in foreign])
            for i, tensor in zip(foreign, taken, strict=True):
                xla[i] = tensor
            if self._call is None:
                from torch_xla.core import dynamo_bridge

                assert self._graph is not None
                self._call = dynamo_bridge.extract_compiled_graph(self._graph, xla)
                self._graph = None
            results = self._call(*xla)
            if device.type == "xla":
                return results
            out = [self._result(x, device) for x in results]
        if any(isinstance(x, torch.Tensor) and x.numel() > 0 for x in out):
            # PyTorch's stream waits for a result, and so for the program that read the arguments: it may reuse them.
            for owner in owners:
                owner.ordered = True
        return out

    @staticmethod
    def _argument(value: Any) -> Any:
        """An argument on XLA; CUDA tensors that are no parameters stay, since they are taken over together."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cuda":
            return cuda_tensors.to_xla(value)
        return _parameters.get(value) if isinstance(value, torch.nn.Parameter) else value

    @staticmethod
    def _result(value: Any, device: torch.device) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "xla":
            return value
        return cuda_tensors.export(value) if device.type == "cuda" else value.to(device)


def _compile(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    _put_constants_on_xla(graph)
    program = _Program(graph)
    program._boxed_call = True  # type: ignore[attr-defined]  # aot_autograd then passes a list that it lets go of
    return program


def _put_constants_on_xla(graph: torch.fx.GraphModule) -> None:
    """Operators that make tensors name the device that was traced."""
    import torch_xla

    device = torch_xla.device()
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
        return aot_autograd(fw_compiler=_compile)(graph, example_inputs, **options)


def register() -> None:
    """Makes the backend known by its name, and with PJRT_DEVICE=GPU makes "openxla" take CUDA tensors too."""
    if NAME not in registry._COMPILER_FNS:  # torch has no public question for it
        registry.register_backend(name=NAME, compiler_fn=backend)
    if os.environ.get("PJRT_DEVICE") != "GPU" or os.environ.get(ENVIRONMENT, "1") == "0":
        return
    if torch.version.cuda is None:  # not is_available(): it would start CUDA in processes that fork later
        return
    own = registry.lookup_backend("openxla")

    def openxla(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        on_cuda = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)
        return (backend if on_cuda else own)(graph, example_inputs, **options)

    openxla._tags = ()  # type: ignore[attr-defined]
    registry._COMPILER_FNS["openxla"] = openxla
