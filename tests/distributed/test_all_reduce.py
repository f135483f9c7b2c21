"""all_reduce over devices in jax.shard_map: sums in the order of ranks, with the same bits on all ranks."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from tests.common import cases, compare, reference
from tests.distributed import devices

jax = pytest.importorskip("jax")
xg = pytest.importorskip("xla_gpu.jax", exc_type=ImportError)
from xla_gpu._runtime import device_groups  # noqa: E402 - after what may be missing

P = jax.sharding.PartitionSpec

# (platform, ranks): two GPUs are all that some machines have.
RANKS = [pytest.param("cpu", n, id=f"cpu-{n}") for n in (2, 3, 4)] + [
    pytest.param("cuda", n, id=f"cuda-{n}", marks=pytest.mark.gpu) for n in (2, 3, 4, 8)
]


def parts_of(shape, dtype: str, ranks: int, seed: str = "") -> np.ndarray:
    rng = cases.rng_for(f"all_reduce {shape} {dtype} {ranks} {seed}")
    return rng.standard_normal((ranks, *shape)).astype(cases.DTYPES[dtype])


@functools.cache
def per_rank(group, check_vma: bool = False):
    """The result of every rank, stacked."""

    def body(x):
        return xg.all_reduce(x[0], group=group)[None]

    return jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=check_vma))


def on_every_rank(group, parts: np.ndarray) -> np.ndarray:
    return np.asarray(per_rank(group)(devices.shard(group.mesh, parts, "tp")))


# Elements: less than a vector, an odd number, one CTA, a hidden size, the end of the low-latency path and past it, and
# more than the group's memory, which goes in pieces.
SHAPES = ((), (3,), (1001,), (4, 1024), (33, 4096), (63, 4099), (262_144,), (262_145,), (3_000_001,), (0, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize(("platform", "ranks"), RANKS)
def test_is_the_sum_in_the_order_of_ranks(platform, ranks, dtype, shape):
    group = xg.DeviceGroup(devices.mesh(platform, tp=ranks), "tp", timeout_s=20, max_bytes=1 << 20)
    parts = parts_of(shape, dtype, ranks)
    out = on_every_rank(group, parts)
    want = reference.all_reduce(parts)
    for rank in range(ranks):
        compare.assert_bitwise_equal(out[rank], want, f"rank {rank} of {group}")
    group.check()


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize(("platform", "ranks"), RANKS)
def test_data_may_be_all_ones(platform, ranks, dtype):
    """NaNs of that pattern: on GPUs it also stands where data are still to come."""
    group = xg.DeviceGroup(devices.mesh(platform, tp=ranks), "tp", timeout_s=20, max_bytes=1 << 20)
    parts = parts_of((263, 1001), dtype, ranks)  # more than goes in packets
    parts.view(np.uint8)[-1, 1:4] = 0xFF
    for _ in range(3):  # both areas, and the first again
        out = on_every_rank(group, parts).astype(np.float32)
        assert np.isnan(out[:, 1:4]).all()
        assert np.isfinite(out[:, [0, 4]]).all()
    group.check()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (7, 1000), (33, 8), (64, 4096), (5, 16384), (300, 4099)])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize(("platform", "ranks"), RANKS[:2] + RANKS[3:])
def test_with_residual_and_norm(platform, ranks, dtype, hidden, rows):
    group = xg.DeviceGroup(devices.mesh(platform, tp=ranks), "tp", timeout_s=20, max_bytes=1 << 20)
    parts = parts_of((rows, hidden), dtype, ranks, "norm")
    rng = cases.rng_for(f"norm {rows} {hidden} {dtype}")
    residual = rng.standard_normal((rows, hidden)).astype(parts.dtype)
    weight = rng.standard_normal(hidden).astype(parts.dtype)

    def body(x, residual, weight):
        out, sum_ = xg.all_reduce_add_rms_norm(x[0], residual, weight, eps=1e-5, group=group)
        return out[None], sum_[None]

    specs = (P("tp"), P(), P())
    step = jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=specs, out_specs=(P("tp"), P("tp")), check_vma=False))
    out, sum_ = (np.asarray(r) for r in step(devices.shard(group.mesh, parts, "tp"), residual, weight))
    want_out, want_sum = reference.all_reduce_add_rms_norm(parts, residual, weight, eps=1e-5)
    for rank in range(ranks):
        compare.assert_bitwise_equal(sum_[rank], want_sum, f"sum of rank {rank}")
        compare.assert_bitwise_equal(out[rank], out[0], f"rank {rank} beside rank 0")
    if dtype == "float32":
        np.testing.assert_allclose(out[0], want_out, rtol=2e-5)  # the mean is of float32 squares
    else:
        compare.assert_within_ulps(out[0], want_out, 2, "out")
    group.check()


def test_generated_calls():
    """Several sums and norms of random shapes in one program.

    Not on GPUs: XLA's compiler crashed there on one of these programs (docs/log/2026-11-21-tensor-parallel.md).
    """
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    most = min(4, len(jax.devices("cpu")))
    call = st.tuples(st.integers(0, 40), st.integers(1, 40) | st.integers(1, 9000), st.booleans())

    @hypothesis.seed(2026)
    @hypothesis.settings(max_examples=12, database=None, deadline=None, print_blob=False)
    @hypothesis.given(
        ranks=st.integers(2, most),
        max_bytes=st.sampled_from([1 << 16, 1 << 20]),
        dtype=st.sampled_from(cases.FLOATS),
        calls=st.lists(call, min_size=1, max_size=4),
    )
    def check(ranks, max_bytes, dtype, calls):
        group = xg.DeviceGroup(devices.mesh("cpu", tp=ranks), "tp", timeout_s=20, max_bytes=max_bytes)
        parts = [parts_of((rows, hidden), dtype, ranks) for rows, hidden, _ in calls]
        weights = [parts_of((hidden,), dtype, 1, "weight")[0] for _, hidden, _ in calls]

        def body(parts, weights):
            results = []
            for x, weight, (_, _, normed) in zip(parts, weights, calls, strict=True):
                if normed:
                    results += xg.all_reduce_add_rms_norm(x[0], x[0] * 0 + 1, weight, eps=1e-5, group=group)
                else:
                    results.append(xg.all_reduce(x[0], group=group))
            return [result[None] for result in results]

        step = jax.shard_map(body, mesh=group.mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False)
        got = [np.asarray(r) for r in jax.jit(step)([devices.shard(group.mesh, x, "tp") for x in parts], weights)]
        for x, weight, (_, _, normed) in zip(parts, weights, calls, strict=True):
            if not normed:
                wants = [reference.all_reduce(x)]
            else:
                out, added = reference.all_reduce_add_rms_norm(x, np.ones_like(x[0]), weight, eps=1e-5)
                first = got.pop(0)
                for rank in range(ranks):
                    compare.assert_norm(first[rank], out, f"norm of rank {rank}")
                wants = [added]
            for want in wants:
                mine = got.pop(0)
                for rank in range(ranks):
                    compare.assert_bitwise_equal(mine[rank], want, f"rank {rank}")
        group.check()

    check()


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_results_do_not_vary_along_the_axis(platform):
    """With check_vma, which infers where results are the same: no out_spec has to be believed."""
    if not devices.infers_replication():
        pytest.skip("jax 0.7 needs check_vma=False")
    mesh = devices.mesh(platform, tp=2)
    group = xg.DeviceGroup(mesh, "tp")
    x, residual, weight = parts_of((4, 64), "float32", 2), np.ones((4, 64), np.float32), np.ones(64, np.float32)

    def body(x, residual, weight):
        y = xg.all_reduce(x[0], group=group)
        return xg.all_reduce_add_rms_norm(x[0] + y, residual, weight, eps=1e-5, group=group)

    step = jax.shard_map(body, mesh=mesh, in_specs=(P("tp"), P(), P()), out_specs=P(), check_vma=True)
    _, sum_ = jax.jit(step)(x, residual, weight)
    total = x[0] + x[1]
    np.testing.assert_array_equal(np.asarray(sum_), (x[0] + total) + (x[1] + total) + residual)


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_many_groups_along_the_other_axis(platform):
    mesh = devices.mesh(platform, dp=2, tp=2)
    group = xg.DeviceGroup(mesh, "tp")
    x = parts_of((2, 100), "float32", 2)  # [dp, tp, 100]
    step = jax.shard_map(
        lambda x: xg.all_reduce(x, group=group),
        mesh=mesh,
        in_specs=P("dp", "tp"),
        out_specs=P("dp", "tp"),
        check_vma=False,
    )
    out = np.asarray(jax.jit(step)(x))
    for dp in range(2):
        for tp in range(2):
            compare.assert_bitwise_equal(out[dp, tp], x[dp, 0] + x[dp, 1], f"device {dp}, {tp}")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_sizes_neither_hang_nor_differ(ranks):
    """1000 messages of random sizes and types; the second run of each has the bits of the first, on every rank."""
    group = xg.DeviceGroup(devices.mesh("cuda", tp=ranks), "tp", timeout_s=20, max_bytes=4 << 20)
    assert group.uses_peer_memory
    rng = np.random.default_rng(0)
    # One program for each of 40 sizes, called in random order: sizes alternate, as in prefill and decode.
    sizes = [int(2 ** rng.uniform(0, 22)) for _ in range(40)]
    inputs = [
        devices.shard(group.mesh, parts_of((size,), cases.FLOATS[i % 3], ranks), "tp") for i, size in enumerate(sizes)
    ]
    results: dict[int, np.ndarray] = {}
    for call in range(1000):
        i = int(rng.integers(len(sizes)))
        out = np.asarray(per_rank(group)(inputs[i]))
        for rank in range(1, ranks):
            compare.assert_bitwise_equal(out[rank], out[0], f"call {call}: rank {rank} beside rank 0")
        compare.assert_bitwise_equal(out, results.setdefault(i, out), f"call {call}: size {sizes[i]}")
    for i, out in results.items():
        compare.assert_bitwise_equal(out[0], reference.all_reduce(np.asarray(inputs[i])), f"size {sizes[i]}")
    group.check()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_rows_neither_hang_nor_differ(ranks):
    """1000 calls with residual and norm: rows and hidden sizes at random, each of them again and again."""
    group = xg.DeviceGroup(devices.mesh("cuda", tp=ranks), "tp", timeout_s=20, max_bytes=4 << 20)
    rng = np.random.default_rng(1)
    step = jax.jit(
        jax.shard_map(
            lambda x, residual, weight: xg.all_reduce_add_rms_norm(x[0], residual, weight, eps=1e-5, group=group),
            mesh=group.mesh,
            in_specs=(P("tp"), P(), P()),
            out_specs=(P("tp"), P("tp")),  # every rank's rows, one after the other
            check_vma=False,
        )
    )
    shapes = [(int(2 ** rng.uniform(0, 8)), int(2 ** rng.uniform(3, 13))) for _ in range(40)]
    inputs, wants = [], []
    for i, (rows, hidden) in enumerate(shapes):
        parts = parts_of((rows, hidden), cases.FLOATS[i % 3], ranks, "rows")
        residual, weight = parts_of((rows, hidden), cases.FLOATS[i % 3], 1, "residual")[0], parts[0, 0]
        inputs.append(
            (devices.shard(group.mesh, parts, "tp"), *(devices.shard(group.mesh, a) for a in (residual, weight)))
        )
        wants.append(reference.all_reduce_add_rms_norm(parts, residual, weight, eps=1e-5)[1])
    results: dict[int, tuple[np.ndarray, ...]] = {}
    for call in range(1000):
        i = int(rng.integers(len(shapes)))
        got = tuple(np.asarray(result) for result in step(*inputs[i]))
        for result, first in zip(got, results.setdefault(i, got), strict=True):
            compare.assert_bitwise_equal(result, first, f"call {call}: {shapes[i]}")
    for i, (out, sum_) in results.items():
        rows = shapes[i][0]
        for rank in range(ranks):
            part = slice(rank * rows, (rank + 1) * rows)
            compare.assert_bitwise_equal(sum_[part], wants[i], f"sum of rank {rank}: {shapes[i]}")
            compare.assert_bitwise_equal(out[part], out[:rows], f"rank {rank} beside rank 0: {shapes[i]}")
    group.check()


@pytest.mark.gpu
def test_a_chain_in_one_program():
    """Calls of several sizes after one another in a captured graph, replayed."""
    group = xg.DeviceGroup(devices.mesh("cuda", tp=2), "tp", timeout_s=20)
    parts = [parts_of((rows, 4096), "bfloat16", 2) for rows in (1, 8, 33, 300)]

    def body(*parts):
        values = [x[0] for x in parts]
        for _ in range(16):
            # Each size needs the one before, so that the order is the program's.
            for i, value in enumerate(values):
                first = values[i - 1][:1] * jax.numpy.bfloat16(0.25)
                values[i] = xg.all_reduce((value + first) * jax.numpy.bfloat16(0.5), group=group)
        return tuple(value[None] for value in values)

    specs = (P("tp"),) * len(parts)
    step = jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=specs, out_specs=specs, check_vma=False))
    placed = [devices.shard(group.mesh, x, "tp") for x in parts]
    first = [np.asarray(x) for x in step(*placed)]
    for value in first:
        compare.assert_bitwise_equal(value[1], value[0], "rank 1 beside rank 0")
    for _ in range(20):
        for value, want in zip(step(*placed), first, strict=True):
            compare.assert_bitwise_equal(np.asarray(value), want, "a replay")
    group.check()


@pytest.mark.gpu
def test_of_slices():
    """XLA may hand a slice's address to a custom call, aligned to its elements alone."""
    group = xg.DeviceGroup(devices.mesh("cuda", tp=2), "tp", timeout_s=20)
    x = parts_of((9, 1001), "bfloat16", 2)

    def body(x):
        return xg.all_reduce(x[0][1:4], group=group)[None]

    step = jax.jit(jax.shard_map(body, mesh=group.mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))
    out = np.asarray(step(devices.shard(group.mesh, x, "tp")))
    compare.assert_bitwise_equal(out[0], reference.all_reduce(x[:, 1:4]), "rank 0")
    compare.assert_bitwise_equal(out[1], out[0], "rank 1")


def test_the_cpu_gathers_and_calls_the_handler():
    group = xg.DeviceGroup(devices.mesh("cpu", tp=4), "tp")
    assert not group.uses_peer_memory and group.size == 4 and group.axis == "tp"
    group.check()
    text = per_rank(group).lower(parts_of((8,), "float32", 4)).compile().as_text()
    assert re.search(r" all-gather\(", text) and 'custom_call_target="xla_gpu_all_reduce"' in text
    assert "all-reduce(" not in text


def test_misuse_is_named():
    mesh = devices.mesh("cpu", tp=2)
    group = xg.DeviceGroup(mesh, "tp")
    with pytest.raises(
        ValueError, match=r"all_reduce: group: expected a call inside jax\.shard_map over axis 'tp' of 2"
    ):
        xg.all_reduce(np.ones(3, np.float32), group=group)
    with pytest.raises(TypeError, match=r"all_reduce: group: expected an xla_gpu\.jax\.DeviceGroup, got str"):
        xg.all_reduce(np.ones(3, np.float32), group="tp")
    with pytest.raises(ValueError, match=r"DeviceGroup: axis: expected one of tp, got 'dp'"):
        xg.DeviceGroup(mesh, "dp")
    with pytest.raises(TypeError, match=r"DeviceGroup: mesh: expected a jax\.sharding\.Mesh, got str"):
        xg.DeviceGroup("mesh", "tp")
    for name, value in (
        *(("timeout_s", value) for value in (0, float("inf"), float("nan"), "1")),
        *(("max_bytes", value) for value in (1, 2**50, None, True)),
    ):
        with pytest.raises((ValueError, TypeError), match=f"DeviceGroup: {name}: expected "):
            xg.DeviceGroup(mesh, "tp", **{name: value})
    other = devices.mesh("cpu", tp=4)
    step = jax.shard_map(
        lambda x: xg.all_reduce(x, group=group), mesh=other, in_specs=P("tp"), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"axis 'tp' of 2 devices, got an axis of 4"):
        jax.jit(step)(np.ones(4, np.float32))
    step = jax.shard_map(
        lambda x: xg.all_reduce(x, group=group), mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False
    )
    # What a rank has, not what is gathered of it.
    with pytest.raises(TypeError, match=r"x: expected dtype float32 or float16 or bfloat16, got int32\[2\]"):
        jax.jit(step)(np.ones(4, np.int32))


def test_one_gpu_for_two_ranks_of_a_process_is_refused():
    """Their kernels would wait for each other, and need not fit on the GPU together."""
    members = [device_groups.Member(0, 0), device_groups.Member(0, 1), device_groups.Member(0, 0)]
    settings = device_groups.Settings(1000, 1 << 20)
    number, reason = device_groups.connect([members], "twice", settings, 0, lambda mine: mine[None])
    assert number == 0 and "got GPU 0 for ranks 0 and 2, whose kernels wait for each other" in reason
    members[2] = device_groups.Member(1, 0)  # of another process: GPUs are counted anew
    _, reason = device_groups.connect([members], "other", settings, 0, lambda mine: np.stack([mine, mine]))
    assert "another GPU" not in reason
