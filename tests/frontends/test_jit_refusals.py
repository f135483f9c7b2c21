"""xla_gpu.torch.jit: what it refuses, and that nothing has changed afterwards."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch_xla = pytest.importorskip("torch_xla")

import xla_gpu.torch as xg  # noqa: E402
from tests.frontends.xla_tensors import on_device  # noqa: E402


def test_wrong_arguments_say_so():
    x = on_device([1.0, 2.0])

    def named(x, y):
        return x

    with pytest.raises(ValueError, match=r"jit\(named\): expected each tensor once"):
        xg.jit(named)(x, x)
    with pytest.raises(ValueError, match=r"jit\(named\): donate_argnums: expected numbers from 0 to 1, got 2"):
        xg.jit(named, donate_argnums=(0, 2))(x, 1)
    with pytest.raises(ValueError, match=r"expected tensors on an XLA device or the CPU, got one on meta"):
        xg.jit(named)(torch.ones(2, device="meta"), 1)
    with pytest.raises(ValueError, match=r"expected tensors without gradients"):
        xg.jit(named)(torch.ones(2, requires_grad=True), 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.clone())
        with pytest.raises(ValueError, match=r"expected tensors without gradients, got one with a tangent"):
            xg.jit(named)(dual, 1)
    large = [torch.full((1 << 19,), number).to(torch_xla.device()) for number in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"expected updates in place by copy_\(\), got an argument"):
        xg.jit(lambda x, y: x.set_(y))(*large)
    assert large[0][0].item() == 1
    with pytest.raises(
        TypeError, match=r"jit\(named\): argument 1: expected tensors, arrays and hashable values, got set"
    ):
        xg.jit(named)(x, {1})
    with pytest.raises(ValueError, match=r"jit\(<lambda>\): result: expected XLA tensors, got one on cpu"):
        xg.jit(lambda x: torch.ones(2))(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no lowering for aten::view.* would run on the host"):
            xg.jit(lambda x: x.view(torch.int32))(x)
    with pytest.raises(TypeError, match=r"jit\(named\): expected arguments by position, got y by name"):
        xg.jit(named)(x, y=1)
    with pytest.raises(TypeError, match=r"jit\(named\): expected arrays of a dtype that .* have, got object"):
        xg.jit(named)(x, np.array([None]))
    with pytest.raises(TypeError, match="jit: function: expected a function, got int"):
        xg.jit(3)
    for wrong in ("0", [1.5], True):
        with pytest.raises(TypeError, match="jit: donate_argnums: expected an int or a sequence of ints"):
            xg.jit(named, donate_argnums=wrong)
    with pytest.raises(TypeError, match="jit: compiler_options: expected a mapping, got list"):
        xg.jit(named, compiler_options=[])


@pytest.mark.parametrize("calls_before", [0, 1])
def test_transformations_of_a_program_are_refused(calls_before):
    """Compiled before or not: with functorch's wrappers as arguments torch_xla's call did not return."""
    x = on_device([[1.0, 2.0]])
    doubled = xg.jit(lambda x: x * 2)
    for _ in range(calls_before):
        doubled(x[0])
    for transformed in (torch.vmap(doubled), torch.func.grad(lambda x: doubled(x).sum())):
        with pytest.raises(
            RuntimeError, match=r"jit\(<lambda>\) cannot run under torch\.vmap or another transformation"
        ):
            transformed(x)
    assert xg.jit(torch.vmap(lambda x: x * 2))(x).tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("calls_before", [0, 1])
def test_tracers_and_fake_tensors_are_refused(calls_before):
    """They have no values: the process ended where torch_xla read them, or the trace had them as constants."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = on_device([1.0, 2.0])
    doubled = xg.jit(lambda x: x * 2)
    for _ in range(calls_before):
        doubled(x)

    class Module(torch.nn.Module):
        def forward(self, x):
            return doubled(x)

    def in_fake_mode():
        with FakeTensorMode(allow_non_fake_inputs=True):
            return doubled(x)

    calls = (
        in_fake_mode,
        lambda: doubled(FakeTensorMode().from_tensor(torch.ones(2))),
        lambda: make_fx(doubled)(x),
        lambda: torch.export.export(Module(), (torch.ones(2),), strict=False),
    )
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"jit\(<lambda>\) cannot be traced by torch\.export or make_fx, nor called"
        ):
            call()
    assert doubled(x).tolist() == [2.0, 4.0]


def test_what_is_refused_at_the_trace_is_refused_later():
    difference = xg.jit(lambda x, y: x - y)
    x, y = on_device([1.0], [2.0])
    assert difference(x, y).item() == -1
    with pytest.raises(ValueError, match="expected each tensor once"):
        difference(x, x)
    with pytest.raises(ValueError, match="expected tensors without gradients"):
        difference(x, on_device([1.0]).requires_grad_())


def test_values_that_a_trace_needs_are_refused():
    of_results = (lambda x: x * x.sum().item(), lambda x: x + 1 if x.sum() > 0 else x - 1)
    of_arguments = (
        *(lambda x: x * float(x), lambda x: x + 1 if x else x - 1, lambda x: x[: int(x)], lambda x: x * x.cpu().item()),
        lambda x: x * torch.tensor(x.tolist()).to(x.device),
    )
    for function in (*of_results, *of_arguments):
        with pytest.raises(RuntimeError, match=r"jit\(<lambda>\): expected a function of tensors alone"):
            xg.jit(function)(on_device([1.0]))


def test_captured_tensors_are_not_updated():
    count = on_device([0.0])
    norm = torch.nn.BatchNorm1d(2).to(torch_xla.device())

    def counts(x):
        count.add_(x)
        return count * 2

    def takes(x):
        count.copy_(x)
        return count * 2

    for function, x in ((counts, on_device([1.0])), (takes, on_device([1.0])), (norm, torch.ones(3, 2))):
        with pytest.raises(ValueError, match="expected updates in place of arguments alone"):
            xg.jit(function)(x)
    assert count.item() == 0 and norm.running_mean.tolist() == [0, 0]

    def local(x):
        made = torch.tensor([1.0]).to(x.device)
        made[0] = 5
        return x * made

    assert xg.jit(local)(on_device([2.0])).item() == 10


def test_arrays_cannot_be_updated():
    add = xg.jit(lambda x: x.add_(1))
    assert add(on_device([1.0])).item() == 2
    with pytest.raises(ValueError, match=r"expected XLA tensors where the function updates them .* on cpu"):
        add(torch.ones(1))


@dataclasses.dataclass
class Output:
    value: object


def test_dataclasses_are_refused():
    with pytest.raises(TypeError, match=r"result: expected tensors, lists, .* got the dataclass Output"):
        xg.jit(lambda x: [Output(x + 1)])(on_device([1.0]))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda x: {x}, "set"), (lambda x: (y for y in [x]), "generator"), (lambda x: iter([x]), "list_ite")],
)
def test_results_whose_tensors_are_not_found_are_refused(make, kind):
    """A second call would have those of the first."""
    with pytest.raises(TypeError, match=f"result: expected tensors, lists, .* got a {kind}"):
        xg.jit(lambda x: [make(x + 1)])(on_device([1.0]))
    plain = frozenset(["a", 1])
    assert xg.jit(lambda x: (x + 1, plain))(on_device([1.0]))[1] is plain


def test_tensors_that_are_not_dense_are_refused():
    step, dense = xg.jit(lambda x: x + 1), torch.ones(2, 2)
    given = {
        "torch.sparse_coo": dense.to_sparse(),
        "quantised": torch.quantize_per_tensor(dense, 1.0, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([dense, dense[:1]], layout=torch.jagged),
    }
    for kind, tensor in given.items():
        with pytest.raises(ValueError, match=rf"jit\(<lambda>\): expected dense tensors, got a {kind} one of torch\."):
            step(tensor)


def test_what_a_function_keeps_of_its_trace_has_no_value():
    """It would end the process in torch_xla, which looks for its memory without asking whether there is one."""
    kept = SimpleNamespace()
    weight = on_device([1.0] * 4)

    def keeps(x):
        kept.doubled, kept.parts = x * 2, x.split(2)
        kept.total, kept.positive = x.sum(), (x > 0).any()
        kept.normed = torch.ops.xla_gpu.rms_norm(x, weight, eps=1e-5)[0]
        kept.result = x + 1
        return kept.result

    step, x = xg.jit(keeps), on_device([1.0] * 4)
    for _ in range(2):
        assert step(x).tolist() == [2.0] * 4
    assert [part.shape for part in (kept.parts[1], kept.total, kept.result)] == [(2,), (), (4,)]
    for tensor in (kept.doubled, kept.parts[1], kept.normed, kept.total, kept.positive, kept.result):
        with pytest.raises(RuntimeError):
            tensor.cpu()
        with pytest.raises(RuntimeError):
            tensor.sum().cpu()
        if tensor is not kept.parts[1]:
            with pytest.raises(RuntimeError):
                step(tensor).cpu()
        torch_xla.sync()
    assert step(x).tolist() == [2.0] * 4
