"""Random operations of torch_xla beside programs of xla_gpu.torch.jit: values as NumPy's, or an error that refuses.

On a GPU the programs go through proxies where they may. More of it:

    PJRT_DEVICE=GPU python -m tests.frontends.test_jit_stress SEED SECONDS

With a third argument what a refused operation left is read and computed with, which ends the process on a CPU: there
torch_xla's own client executes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import random
import sys
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

import xla_gpu.torch as xg  # noqa: E402
from xla_gpu._torch_xla import proxy_programs  # noqa: E402

N = 6

# How torch_xla refuses a computation whose memory was donated, and what it says of others that were pending then.
REFUSED = (
    "deleted",
    "donated",
    "Donation",
    "donate the same buffer twice",
    "null",
    "each tensor once",
    "Invalid buffer",
    "tensor_data",
    "in flight",
)


def on_device(values):
    return torch.from_numpy(np.array(values, np.float32)).to(torch_xla.device())


def sync_if_possible():
    with contextlib.suppress(RuntimeError):
        torch_xla.sync()


# What refers to a cache, and what it is to be.
COPIES = {
    "clone": lambda c, a: (c.clone(), a),
    "sum of nothing": lambda c, a: (c + 0, a),
    "part": lambda c, a: (c[0:2] * 1, a[0:2]),
    "deepcopy": lambda c, a: (copy.deepcopy(c), a),
    "cast": lambda c, a: (c.to(torch.float64), a),
    "cat": lambda c, a: (torch.cat([c, c]), np.concatenate([a, a])),
    "detach": lambda c, a: (c.detach() + 0, a),
    "empty_like": lambda c, a: (torch.empty_like(c).copy_(c), a),
    "to": lambda c, a: (c.to(c.device, copy=True), a),
    "expand": lambda c, a: (c.expand(2, N) + 0, np.stack([a, a])),
    "transposed": lambda c, a: (c.view(2, 3).t().clone(), a.reshape(2, 3).T),
    "index": lambda c, a: (c[torch.tensor([1, 0], device=c.device)], a[[1, 0]]),
    "nothing of it": lambda c, a: (torch.full((N,), 3.0, device=c.device), np.full(N, 3.0)),
    "data": lambda c, a: (c.data.clone(), a),
    "total": lambda c, a: (c.sum(), a.sum()),
    "strided": lambda c, a: (c[::2].clone(), a[::2]),
    "new_zeros": lambda c, a: (c.new_zeros(N) + c, a),
}


def add(x, caches):
    for cache in caches:
        cache.add_(x)
    return caches[0].sum(), caches


def scale(x, caches):
    return x * 2, [cache * 2 + x for cache in caches]


def one(x, cache, weight):
    cache.mul_(weight)
    cache.add_(x)
    return cache + weight


def subtract(x, caches):
    for cache in caches:
        cache.sub_(x)


class World:
    """Caches with what they are to be, and tensors that were made of them before."""

    def __init__(self, seed: int, keeps: bool = False) -> None:
        self.rng = random.Random(seed)
        self.keeps, self.failed = keeps, []
        self.counts: collections.Counter[str] = collections.Counter()
        self.log: collections.deque[str] = collections.deque(maxlen=40)
        self.add, self.scale, self.one, self.subtract = (
            xg.jit(function, donate_argnums=1) for function in (add, scale, one, subtract)
        )
        self.add_undonated = xg.jit(add)
        self.begin()

    def begin(self) -> None:
        self.expected = [np.arange(N, dtype=np.float32) + i for i in range(self.rng.choice([1, 2, 3]))]
        self.caches = [on_device(values) for values in self.expected]
        self.other, self.expected_other = on_device(np.full(N, 9.0)), np.full(N, 9.0, np.float32)
        self.made = []
        if self.rng.random() < 0.5:
            sync_if_possible()

    def check(self, tensor, expected, what: str) -> None:
        got = tensor.cpu().float().numpy()
        self.counts["compared"] += 1
        assert np.array_equal(got, expected), (what, got.tolist(), np.asarray(expected).tolist(), list(self.log))

    def note(self, tensor, expected, what: str) -> None:
        self.made.append((tensor, np.array(expected, np.float32), what))
        del self.made[:-12]

    def run(self) -> None:
        """One operation; what torch_xla refuses begins anew."""
        self.counts["operations"] += 1
        if not self.succeeds():
            self.counts["refused"] += 1
            if self.keeps:
                self.failed += [tensor for tensor, _, _ in self.made] + [*self.caches, self.other]
                del self.failed[:-24]
            self.made.clear()
            self.caches = self.other = None
            gc.collect()
            for _ in range(2):
                sync_if_possible()
            self.begin()
        if max(np.abs(values).max() for values in [*self.expected, self.expected_other]) > 1e5:
            self.begin()

    def succeeds(self) -> bool:
        """Whether torch_xla did not refuse an operation. Of one that it refused nothing is left.

        torch_xla ends the process where a computation needs what another one that failed was to return: not even the
        frames of the error may have such a tensor, which sync() would compute.
        """
        chosen = self.rng.choices(
            [self.call, self.refer, self.update, self.synchronise, self.read, self.use_failed],
            [53, 17, 8, 8, 14, 4 if self.failed else 0],
        )[0]
        try:
            chosen()
        except (RuntimeError, ValueError) as error:
            if not any(text in str(error) for text in REFUSED):
                raise
            return False
        return True

    def call(self) -> None:
        rng = self.rng
        name = rng.choices(["add", "scale", "one", "subtract", "undonated"], [34, 6, 7, 3, 3])[0]
        self.log.append(name)
        if self.made and rng.random() < 0.8:  # else most calls take memory away from what is pending
            torch_xla.sync()
        values = np.array([rng.randint(-3, 3) for _ in range(N)], np.float32)
        x = torch.from_numpy(values.copy())
        if rng.random() < 0.3:
            x = x.to(torch_xla.device()) * (1 if rng.random() < 0.3 else torch.ones((), device=torch_xla.device()))
        if name == "scale":
            doubled, self.caches = self.scale(x, self.caches)
            self.expected = [expected * 2 + values for expected in self.expected]
            self.note(doubled, 2 * values, name)
        elif name == "one":
            i = rng.randrange(len(self.caches))
            weight, factor = on_device(np.ones(N)), np.ones(N, np.float32)
            if len(self.caches) > 1 and rng.random() < 0.3:
                other = (i + 1) % len(self.caches)
                weight, factor = self.caches[other], self.expected[other]
            total = self.one(x, self.caches[i], weight)
            self.expected[i] = self.expected[i] * factor + values
            self.note(total, self.expected[i] + factor, name)
        elif name == "subtract":
            self.subtract(x, self.caches)
            self.expected = [expected - values for expected in self.expected]
        else:
            total, _ = (self.add if name == "add" else self.add_undonated)(x, self.caches)
            self.expected = [expected + values for expected in self.expected]
            if rng.random() < 0.5:
                self.check(total, self.expected[0].sum(), name)
            else:
                self.note(total, self.expected[0].sum(), name)

    def refer(self) -> None:
        """Something refers to a cache, and is computed now or later."""
        i = self.rng.randrange(len(self.caches))
        cache, expected = self.caches[i], self.expected[i].copy()
        way = self.rng.choice([*COPIES, "copy_", "copy_ of a part", "stack"])
        self.log.append(way)
        if way == "copy_":
            self.other.copy_(cache)
            self.expected_other = expected
        elif way == "copy_ of a part":
            self.other[0:2].copy_(cache[0:2])
            self.expected_other = np.concatenate([expected[0:2], self.expected_other[2:]])
        elif way == "stack":
            self.note(torch.stack(self.caches), np.stack(self.expected), way)
        else:
            self.note(*COPIES[way](cache, expected), way)

    def update(self) -> None:
        """A cache is updated outside of the programs."""
        i = self.rng.randrange(len(self.caches))
        cache, values = self.caches[i], np.array([self.rng.randint(-3, 3) for _ in range(N)], np.float32)
        way = self.rng.choice(["zero_", "add_", "item", "from the host", "from another", "swapped", "another"])
        self.log.append(way)
        if way == "zero_":
            cache.zero_()
            self.expected[i] = np.zeros(N, np.float32)
        elif way == "add_":
            cache.add_(1)
            self.expected[i] = self.expected[i] + 1
        elif way == "item":
            cache[1] = 5
            self.expected[i] = np.concatenate([self.expected[i][:1], [np.float32(5)], self.expected[i][2:]])
        elif way == "from the host":
            cache.copy_(torch.from_numpy(values.copy()))
            self.expected[i] = values
        elif way == "from another":
            cache.copy_(self.other)
            self.expected[i] = self.expected_other.copy()
        elif way == "swapped":
            self.caches.reverse()
            self.expected.reverse()
        else:
            self.caches[i], self.expected[i] = on_device(values), values

    def use_failed(self) -> None:
        """What an operation left that was refused, or other tensors that were pending then."""
        tensor = self.rng.choice(self.failed)
        way = self.rng.choice(["read", "computed", "argument", "cache"])
        self.log.append(f"failed: {way}")
        self.counts["failed tensors used"] += 1
        if way == "read":
            tensor.cpu()
        elif way == "computed":
            self.failed.append(tensor.sum() + 1)
        elif tensor.shape == (N,) and tensor.dtype == torch.float32:
            if way == "argument":
                self.failed.append(self.add_undonated(tensor, self.caches)[0])
            else:
                self.failed.append(self.add(torch.ones(N), [tensor])[0])
            raise RuntimeError("what is computed now is not known: deleted")

    def synchronise(self) -> None:
        self.log.append("sync")
        torch_xla.sync()

    def read(self) -> None:
        what = self.rng.choices(["cache", "other", "made", "collected", "let go of"], [6, 1, 5, 1, 1])[0]
        self.log.append(what)
        i = self.rng.randrange(len(self.caches))
        if what == "cache":
            self.check(self.caches[i], self.expected[i], what)
        elif what == "other":
            self.check(self.other, self.expected_other, what)
        elif what == "collected":
            gc.collect()
        elif self.made:
            tensor, expected, way = self.made.pop(self.rng.randrange(len(self.made)))
            if what == "made":
                self.check(tensor, expected, way)


@pytest.mark.parametrize("seed", [1, 2])
def test_values_beside_random_operations(seed, monkeypatch):
    monkeypatch.setattr(proxy_programs, "CAPTURED", 0)  # on GPUs
    world = World(seed)
    for _ in range(100):
        world.run()
    assert world.counts["compared"] > 15, world.counts


def main() -> None:
    proxy_programs.CAPTURED = 0
    world, end = World(int(sys.argv[1]), len(sys.argv) > 3), time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        world.run()
    print(dict(world.counts))


if __name__ == "__main__":
    main()
