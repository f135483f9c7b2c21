"""The C interface of the library (ffi/runtime/xla_gpu.h) as ctypes types and signatures."""

from __future__ import annotations

import ctypes as ct

ERROR_INVALID_ARGUMENT = 3  # XLA_FFI_Error_Code
ATTR_ARRAY, ATTR_DICTIONARY, ATTR_SCALAR, ATTR_STRING = 1, 2, 3, 4  # XLA_FFI_AttrType


class Handler(ct.Structure):
    _fields_ = [
        ("target", ct.c_char_p),
        ("platform", ct.c_char_p),
        ("execute", ct.c_void_p),
        ("scratch_bytes", ct.c_void_p),
    ]


class Stages(ct.Structure):
    _fields_ = [(stage, ct.c_void_p) for stage in ("instantiate", "prepare", "initialize", "execute")]


class Buffer(ct.Structure):
    _fields_ = [
        ("data", ct.c_void_p),
        ("dims", ct.POINTER(ct.c_int64)),
        ("rank", ct.c_int32),
        ("dtype", ct.c_int32),
    ]


class Attribute(ct.Structure):
    _fields_ = [
        ("name", ct.c_char_p),
        ("type", ct.c_int32),
        ("dtype", ct.c_int32),
        ("data", ct.c_void_p),
        ("size", ct.c_size_t),
    ]


class CallArgs(ct.Structure):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("stages", Stages),
        ("operands", ct.POINTER(Buffer)),
        ("num_operands", ct.c_size_t),
        ("results", ct.POINTER(Buffer)),
        ("num_results", ct.c_size_t),
        ("attributes", ct.POINTER(Attribute)),
        ("num_attributes", ct.c_size_t),
        ("stream", ct.c_void_p),
        ("device_ordinal", ct.c_int32),
    ]


class GroupMember(ct.Structure):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("group", ct.c_int64),
        ("ranks", ct.c_int32),
        ("rank", ct.c_int32),
        ("device_ordinal", ct.c_int32),
        ("timeout_ms", ct.c_int64),
        ("max_bytes", ct.c_int64),
        ("low_latency_bytes", ct.c_int64),
    ]


GROUP_HANDLE_BYTES = 64


class TvmFfiApi(ct.Structure):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("function_call", ct.c_void_p),
        ("env_set_stream", ct.c_void_p),
        ("error_move_from_raised", ct.c_void_p),
        ("object_dec_ref", ct.c_void_p),
    ]


class TvmFfiTarget(ct.Structure):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("name", ct.c_char_p),
        ("function", ct.c_void_p),
        ("arguments", ct.POINTER(ct.c_char_p)),
        ("num_arguments", ct.c_size_t),
        ("on_cuda", ct.c_int32),
        ("allow_capture", ct.c_int32),
    ]


class ExportArgs(ct.Structure):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("dtype_code", ct.c_uint8),
        ("dtype_bits", ct.c_uint8),
        ("rank", ct.c_int32),
        ("dims", ct.POINTER(ct.c_int64)),
        ("managed_tensor", ct.c_void_p),
    ]


# name: (result, arguments). A char* result is an error text, or NULL.
SIGNATURES = {
    "xla_gpu_handlers": (ct.POINTER(Handler), [ct.POINTER(ct.c_size_t)]),
    "xla_gpu_build_info": (ct.c_char_p, []),
    "xla_gpu_register_ffi": (ct.c_char_p, [ct.c_void_p, ct.c_char_p, ct.c_char_p, ct.POINTER(Stages)]),
    "xla_gpu_register_pjrt": (ct.c_char_p, [ct.c_void_p, ct.c_char_p, ct.POINTER(Stages)]),
    "xla_gpu_pjrt_ffi_api": (ct.c_char_p, [ct.c_void_p, ct.POINTER(ct.c_void_p)]),
    "xla_gpu_handler_version": (
        ct.c_char_p,
        [ct.c_void_p, ct.POINTER(ct.c_int), ct.POINTER(ct.c_int), ct.POINTER(ct.c_uint32)],
    ),
    "xla_gpu_call": (ct.c_char_p, [ct.POINTER(CallArgs), ct.POINTER(ct.c_int32)]),
    "xla_gpu_tvm_ffi_register": (
        ct.c_char_p,
        [ct.POINTER(TvmFfiApi), ct.POINTER(TvmFfiTarget), ct.POINTER(ct.c_void_p)],
    ),
    "xla_gpu_import_buffers": (ct.c_char_p, [ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_void_p]),
    "xla_gpu_import_placeholders": (ct.c_char_p, [ct.c_void_p, ct.c_void_p, ct.c_size_t]),
    "xla_gpu_bind_placeholders": (ct.c_char_p, [ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_void_p]),
    "xla_gpu_import_cancel": (ct.c_size_t, [ct.c_void_p, ct.c_size_t, ct.c_void_p]),
    "xla_gpu_import_released": (ct.c_size_t, [ct.POINTER(ct.c_int64), ct.c_size_t]),
    "xla_gpu_export_begin": (None, []),
    "xla_gpu_export_buffers": (ct.c_char_p, [ct.c_void_p, ct.c_size_t, ct.c_void_p]),
    "xla_gpu_export_count": (ct.c_size_t, []),
    "xla_gpu_pjrt_use_plugin": (ct.c_char_p, [ct.c_char_p]),
    "xla_gpu_record_programs": (None, [ct.c_int32]),
    "xla_gpu_append_compile_options": (ct.c_char_p, [ct.c_char_p, ct.c_size_t]),
    "xla_gpu_compile_recorded": (ct.c_char_p, [ct.c_int32, ct.POINTER(ct.c_int64)]),
    "xla_gpu_finish_recorded": (ct.c_char_p, [ct.c_int32, ct.POINTER(ct.c_int64)]),
    "xla_gpu_preload_executables": (ct.c_char_p, [ct.c_char_p, ct.c_int32]),
    "xla_gpu_used_executables": (ct.c_char_p, []),
    "xla_gpu_executable_cache_counts": (None, [ct.POINTER(ct.c_int64)]),
    "xla_gpu_launch_record": (None, [ct.c_int32]),
    "xla_gpu_launch_take_recorded": (ct.c_void_p, [ct.POINTER(ct.c_size_t)]),
    "xla_gpu_launch_destroy": (None, [ct.c_void_p]),
    "xla_gpu_launch_buffers": (ct.c_void_p, [ct.c_void_p, ct.c_int32, ct.c_size_t]),
    "xla_gpu_launch_run": (
        ct.c_char_p,
        [ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_size_t, ct.c_size_t, ct.c_void_p],
    ),
    "xla_gpu_array_make": (
        ct.c_char_p,
        [
            ct.c_void_p,
            ct.c_void_p,
            ct.c_size_t,
            ct.c_int32,
            ct.c_void_p,
            ct.c_size_t,
            ct.POINTER(ct.c_void_p),
        ],
    ),
    "xla_gpu_array_read": (ct.c_char_p, [ct.c_void_p, ct.c_void_p, ct.c_size_t]),
    "xla_gpu_array_destroy": (None, [ct.c_void_p]),
    "xla_gpu_launch_wait": (None, []),
    "xla_gpu_execution_note": (None, []),
    "xla_gpu_execution_record": (ct.c_char_p, []),
    "xla_gpu_execution_take": (ct.c_void_p, []),
    "xla_gpu_execution_destroy": (None, [ct.c_void_p]),
    "xla_gpu_proxy_expect": (ct.c_char_p, [ct.c_void_p, ct.POINTER(ct.c_int32), ct.c_size_t]),
    "xla_gpu_proxy_take": (ct.c_void_p, []),
    "xla_gpu_proxy_destroy": (None, [ct.c_void_p]),
    "xla_gpu_group_allocate": (ct.c_char_p, [ct.POINTER(GroupMember), ct.c_void_p]),
    "xla_gpu_group_connect": (ct.c_char_p, [ct.c_int64, ct.c_int32, ct.POINTER(ct.c_int32), ct.c_void_p]),
    "xla_gpu_group_error": (ct.c_char_p, [ct.c_int64]),
}


class _ApiHead(ct.Structure):
    """What XLA_FFI_Api and PJRT_Api both begin with."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("extension_start", ct.c_void_p),
        ("version_struct_size", ct.c_size_t),
        ("version_extension_start", ct.c_void_p),
        ("major", ct.c_int),
        ("minor", ct.c_int),
    ]


def api_version(address: int) -> tuple[int, int]:
    """Major and minor version of the XLA_FFI_Api or PJRT_Api at ``address``."""
    head = _ApiHead.from_address(address)
    return head.major, head.minor
