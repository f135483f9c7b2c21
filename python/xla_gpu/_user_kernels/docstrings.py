"""What the functions for users' kernels say in every front end."""

from __future__ import annotations

# Literals: the documentation site reads them from the source.
CUDA_KERNEL = """
Args:
  source_or_cubin: CUDA C++ source as a str, which NVRTC compiles (package nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12
    for CUDA 12); or a cubin as bytes.
  name: the kernel. In a source also a C++ name, ``scale<float>``; in a cubin the name that it has there.
  arch: the GPU, "sm_90a". By default this machine's first GPU, and "sm_90a" where there is none: the program then
    compiles and lowers, and cannot run.
  options: NVRTC's options, such as ``"--use_fast_math"``.

Returns:
  A CudaKernel for kernel_call. Compiled sources are kept in ``XLA_GPU_CACHE_DIR``, by default ``~/.cache/xla_gpu``,
    unless they include headers of their own.

Raises:
  ValueError: the source does not compile, with NVRTC's log; the cubin is damaged, or has no such kernel.
  TypeError: an argument is of another type.
  xla_gpu.errors.CompatibilityError: NVRTC is not installed.
"""

KERNEL_CALL = """
The function that is returned takes the kernel's arguments in their order: arrays, whose addresses the kernel gets;
numbers; None, a null pointer; ``Scratch(n)``, n bytes of device memory that hold nothing yet. NumPy scalars have their
own width. A Python int, float or bool has the width of the kernel's parameter. The addresses of the results follow; or
``Result(i)`` among the arguments stands for that of result i. A result that is aliased to an operand has no address of
its own: the kernel writes through the operand's.

Numbers, grid and so on are constants of the compiled program: what varies from call to call belongs into an array.

Args:
  kernel: made by cuda_kernel.
  result_shape_dtypes: anything with ``shape`` and ``dtype``, or a sequence of these, one for each result.
  grid: CTAs, those of all clusters: an int or up to three.
  block: threads of a CTA: an int or up to three.
  shared: bytes of dynamic shared memory, up to what the GPU allows.
  cluster: CTAs of a cluster: an int or up to three.
  cooperative: all CTAs run at the same time, as ``grid.sync()`` needs.
  pdl: programmatic dependent launch: the kernel may start before the one in front of it has ended, and must wait for it
    by ``griddepcontrol.wait``.
  input_output_aliases: operand index to result index; operands are counted without the other arguments.

Returns:
  A function of the kernel's arguments. It returns an array; or a tuple or list of them where result_shape_dtypes is a
    tuple or list.

Raises:
  ValueError: arguments do not fit the kernel's parameters in number or size, or the grid is empty or past the limits.
    By the launch: the cubin is for another GPU, or dynamic shared memory is more than it has.
  TypeError: an argument is of another type.
"""

TRITON_CALL = """
Triton's own compiler compiles the function, and its cache keeps the cubin. It is specialised by Triton's rules:
integers that are 1 become constants, arrays and integers divisible by 16 are known to be.

The function that is returned takes, in their order, the arguments that have no constant: arrays, numbers and None.
Results follow, or take the places of ``Result(i)``, as in kernel_call. A Python int is an i32 where it fits, a float an
fp32; NumPy scalars have their own width.

Args:
  fn: a function of ``@triton.jit``, also under ``@triton.autotune`` and ``@triton.heuristics``.
  result_shape_dtypes: anything with ``shape`` and ``dtype``, or a sequence of these, one for each result.
  grid: programs: an int, up to three, or a function of a dict of all arguments and constants by name. In it arrays have
    ``shape``, ``dtype`` and ``numel()``.
  num_warps: warps of a program.
  num_stages: stages of software pipelines.
  num_ctas: CTAs of a program's cluster.
  input_output_aliases: operand index to result index; operands are counted without the other arguments.
  config: the triton.Config of an autotuned function. Without it, a call on eager CUDA tensors times all of them once
    for each tuning key, and calls in programs take the one that was found.
  **constexprs: values of the function's constants.

Returns:
  A function of the remaining arguments. It returns an array; or a tuple or list of them where result_shape_dtypes is a
    tuple or list.

Raises:
  ValueError: Triton does not compile the function, with its error; arguments do not fit its parameters; an autotuned
    function has no configuration yet.
  TypeError: fn is no Triton function, or an argument is of another type.
  xla_gpu.errors.CompatibilityError: Triton is not installed.
"""

REGISTER_TVM_FFI_TARGET = """
The function gets its arguments as ``arguments`` names them: "args" is all operands and "rets" all results, "args.0" and
"rets.0" one of them, "attrs.eps" an attribute, "ctx.stream" the stream. Arrays come as tensors in row-major order; the
function writes its results into them, and what it returns is dropped. It runs with tvm-ffi's current stream set to the
program's. The errors that it raises are those of the call.

Args:
  name: of the FFI target.
  function: a tvm_ffi.Function: of a tvm_ffi.Module, of FlashInfer's, TileLang's or CuTe DSL's compiled modules. One
    that wraps a Python function needs the GIL, and can hang a program of XLA.
  platform: "cpu" or "CUDA".
  arguments: what the function takes, in its order.
  allow_capture: the function may be captured into a CUDA graph: it neither waits nor allocates, and launches the same
    kernels each time.

Raises:
  xla_gpu.errors.TargetError: the name is taken, or ``arguments`` names something else.
  TypeError: function is no tvm_ffi.Function.
  xla_gpu.errors.CompatibilityError: apache-tvm-ffi is not installed.
"""
