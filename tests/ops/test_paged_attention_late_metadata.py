"""CUDA kernels plan from metadata that the kernel before may still be writing: with programmatic dependent launch they
start early, and read the metadata once before they wait and once behind it. What counts is what stands there behind."""

from __future__ import annotations

import pytest

from tests.common import cases
from tests.common.cases import AttentionCase

pytestmark = pytest.mark.frontends("eager-cuda")

# Lets the next kernel start at once, and writes 30 us later.
LATE = """
extern "C" __global__ void late(int* to, const int* from, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < 30000);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}
"""

# (new tokens, context) of each sequence: of two batches whose metadata replace each other.
BATCHES = {
    "several-rows": ([(5, 3000)] * 8, [(5, 4100 - 300 * i) for i in range(8)]),
    "several-rows-of-other-lengths": ([(4, 3000), (8, 2000)] * 4, [(8, 1000), (4, 5000)] * 4),
    "several-rows-of-40": ([(5, 2000)] * 40, [(5, 400 + 60 * i) for i in range(40)]),
    "fewer-sequences": ([(4, 900)] * 8, [(8, 3000)] * 4),
    "decode": ([(1, 3000)] * 20, [(1, 100 + 150 * i) for i in range(20)]),
    "decode-of-64": ([(1, 1500)] * 64, [(1, 100 + 25 * i) for i in range(64)]),
    "decode-of-140": ([(1, 600)] * 140, [(1, 100 + 5 * i) for i in range(140)]),
    "prompts": ([(100, 100), (39, 300)], [(60, 900), (79, 79)]),
    "long-prompts": ([(2000, 2000), (1000, 1000), (1500, 1500)], [(900, 900), (2400, 2400), (1100, 1100)]),
    "prompts-of-20": ([(300, 300)] * 20, [(50 + 20 * i, 50 + 30 * i) for i in range(20)]),
    "prompt-and-decode": ([(120, 120), (1, 700), (1, 30)], [(40, 2500), (40, 90), (42, 42)]),
}
SHAPES = {
    "gqa": dict(num_heads=32, num_kv_heads=4, head_dim=128),
    "head-64": dict(num_heads=8, num_kv_heads=2, head_dim=64),
    "head-256": dict(num_heads=8, num_kv_heads=4, head_dim=256),
    "fp8": dict(num_heads=32, num_kv_heads=8, head_dim=128, cache_dtype="float8_e4m3fn", scales="one"),
}  # fmt: skip


@pytest.mark.parametrize("spare_seqs", [0, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_metadata_of_the_kernel_before(frontend, name, shape, spare_seqs):
    import torch

    ops = frontend.module()
    first, second = BATCHES[name]
    rows = max(len(first), len(second))
    longest = max(context for _, context in first + second)
    tokens = max(sum(new for new, _ in batch) for batch in (first, second))
    case = AttentionCase(
        f"late-{name}-{shape}", ((1, longest),) * rows, spare_seqs=spare_seqs, spare_columns=0,
        padding_tokens=max(tokens - rows, 0), dtype="bfloat16", page_size=16, **SHAPES[shape],
    )  # fmt: skip
    arrays = frontend.tensors(cases.build(case).arrays())
    arrays["query"] = arrays["query"][:tokens].nan_to_num()
    seqs = len(arrays["context_lens"])

    def pack(batch):
        starts = [0]
        for new, _ in batch:
            starts.append(starts[-1] + new)
        contexts = [context for _, context in batch] + [0] * (seqs - len(batch))
        return torch.tensor(
            contexts + starts + starts[-1:] * (seqs + 1 - len(starts)) + [len(batch)], dtype=torch.int32, device="cuda"
        )

    def attention(metadata):
        arrays["context_lens"], arrays["query_start_loc"], arrays["num_seqs"] = metadata.split([seqs, seqs + 1, 1])
        return ops.paged_attention_with_lse(**arrays, **case.options())

    batches = [pack(second), pack(first)]
    wanted = [attention(batch.clone()) for batch in batches]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    kernel = ops.cuda_kernel(LATE, "late")
    metadata = batches[1].clone()
    write = ops.kernel_call_(kernel, metadata, grid=1, block=128, input_output_aliases={0: 0})
    for _ in range(2):
        for batch, want in zip(batches, wanted, strict=True):
            write(metadata, batch, metadata.numel())
            for got, good in zip(attention(metadata), want, strict=True):
                assert torch.equal(got.view(torch.uint8), good.view(torch.uint8))


# Of the same metadata: (new tokens, context) of each sequence.
ALIKE = {
    "one": [(5, 3000)],
    "one-of-few-keys": [(8, 100)],
    "several": [(6, 900), (5, 1300), (7, 2500), (8, 4000)],
    "more-work-tiles-than-SMs": [(4, 2900)] * 24,
    "many": [(5, 700)] * 40,
    "prompt": [(70, 70)],
}


@pytest.mark.parametrize("heads", [(32, 4, 128), (28, 4, 128), (16, 2, 64)])
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("operand", ["block_tables", "query", "kv_cache"])
def test_operands_of_the_kernel_before(frontend, operand, name, heads):
    """What is read first may be loaded before the other metadata are known for certain: it counts as it is then."""
    import torch

    ops = frontend.module()
    num_heads, num_kv_heads, head_dim = heads
    case = AttentionCase(
        f"late-{operand}-{name}", tuple(ALIKE[name]), spare_seqs=0, spare_columns=0, padding_tokens=0, dtype="bfloat16",
        page_size=16, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
    )  # fmt: skip
    arrays = frontend.tensors(cases.build(case).arrays())
    original = arrays[operand].clone()
    others = [original.flip(0) if operand != "block_tables" else original.flip(1)]
    if operand == "block_tables":  # page numbers out of range, until the kernel before has written others
        others += [torch.full_like(original, page) for page in (-1, 2**31 - 1)]

    def attention():
        return ops.paged_attention_with_lse(**arrays, **case.options())

    def words(tensor):
        return tensor.view(-1).view(torch.int32)

    values = [original, *others]
    wanted = []
    for value in values:
        arrays[operand].copy_(value)
        wanted.append([result.clone() for result in attention()])
    write = ops.kernel_call_(
        ops.cuda_kernel(LATE, "late"), words(arrays[operand]), grid=64, block=128, input_output_aliases={0: 0}
    )
    for turn in (1, 0, -1, 0):
        value = words(values[turn])
        write(words(arrays[operand]), value, value.numel())
        for got, good in zip(attention(), wanted[turn], strict=True):
            assert torch.equal(got.view(torch.uint8), good.view(torch.uint8))


# Lets the next kernel start at once, and writes zero and the number of sequences in turns for 60 us.
CHANGING = """
extern "C" __global__ void changing(volatile int* to, const int* from) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int number = from[0];
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin)::"memory");
  do {
    for (int i = 0; i < 8; ++i) to[0] = i % 2 * number;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  } while (now - begin < 60000);
}
"""


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("sequences", [((5, 300),) * 40, ((160, 900),) + ((1, 300),) * 39, ((6, 300),) * 20])
def test_number_of_sequences_that_changes_while_threads_read_it(frontend, sequences, kv_heads):
    """Threads of a CTA plan together, and may have read different numbers: none may wait for another for ever."""
    import torch

    ops = frontend.module()
    case = AttentionCase(
        f"changing-{len(sequences)}-{kv_heads}", sequences, spare_seqs=0, spare_columns=0, padding_tokens=0,
        dtype="bfloat16", page_size=16, num_heads=32, num_kv_heads=kv_heads, head_dim=128,
    )  # fmt: skip
    arrays = frontend.tensors(cases.build(case).arrays())
    wanted = ops.paged_attention_with_lse(**arrays, **case.options())
    number = arrays["num_seqs"].clone()
    write = ops.kernel_call_(
        ops.cuda_kernel(CHANGING, "changing"), arrays["num_seqs"], grid=1, block=1, input_output_aliases={0: 0}
    )
    for _ in range(20):
        write(arrays["num_seqs"], number)
        for got, good in zip(ops.paged_attention_with_lse(**arrays, **case.options()), wanted, strict=True):
            assert torch.equal(got.view(torch.uint8), good.view(torch.uint8))
