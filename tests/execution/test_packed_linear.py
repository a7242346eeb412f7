"""Packed linear layers: the plain ones' results, products shared by layers of one input, and the way they're put in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from execution import packed_linear
from execution.errors import ModelError
from execution.fused_norm import FusedNorm
from execution.interface import Extension
from execution.packed_linear import WIDENED, Layout, PackedLinear, calls, layout, least_rows, pack
from execution.transformers_executor import TransformersExecutor

TOLERANCE = 1e-5  # of the largest result; both are float32, summed in another order

needs_packing = pytest.mark.skipif(
    layout(torch.device("cpu"), torch.float32) is None, reason="this torch has no oneDNN, so nothing is packed"
)
pytestmark = needs_packing


class Block(nn.Module):
    """Three layers of one input, one of another, and one that runs twice a pass."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, size, bias=bias) for size in (12, 6, 6))
        self.down, self.twice = nn.Linear(6, 12, bias=False), nn.Linear(12, 12)

    def forward(self, given: Tensor) -> Tensor:
        q, k, v = self.q(given), self.k(given), self.v(given)
        return self.twice(self.twice(q + self.down(k * v)))


@pytest.fixture(params=("reordered", "joined"))
def kind(request: pytest.FixtureRequest) -> Layout:
    """The layouts of a CPU and of CUDA."""
    return request.param


def packed_block(kind: Layout, bias: bool = True) -> tuple[Block, Block]:
    """A block that is packed, and its plain twin."""
    torch.manual_seed(1)
    plain, block = Block(bias).eval().requires_grad_(False), Block(bias).eval().requires_grad_(False)
    block.load_state_dict(plain.state_dict())
    with calls(block) as seen:
        block(torch.randn(1, 1, 12))
    pack(block, seen, kind)
    return block, plain


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("shape", ((1, 1), (1, 5), (3, 4), (2, 70)))
def test_a_packed_block_gives_the_plain_results(kind, bias, shape):
    block, plain = packed_block(kind, bias)
    given = torch.randn(*shape, 12)
    for _ in range(2):
        assert_close(block(given), plain(given))


def test_layers_of_one_input_share_a_product_and_what_runs_twice_stays(kind):
    block, _ = packed_block(kind)
    kinds = {name: type(layer) for name, layer in block.named_children()}
    packed = ["q", "k", "v", *(["down"] if kind == "reordered" else [])]  # alone, it has nothing to be joined with
    assert [name for name, layer in kinds.items() if layer is PackedLinear] == packed
    assert block.q._product is block.k._product is block.v._product
    assert type(block.twice) is nn.Linear


def test_members_called_out_of_order_or_alone(kind):
    block, plain = packed_block(kind)
    one, other = torch.randn(1, 3, 12), torch.randn(1, 3, 12)
    assert_close(block.v(one), plain.v(one))
    assert_close(block.q(other), plain.q(other))
    assert_close(block.k(one), plain.k(one))
    for layer, twin in ((block.v, plain.v), (block.q, plain.q), (block.k, plain.k), (block.q, plain.q)):
        assert_close(layer(other), twin(other))


def test_an_input_changed_in_place_is_computed_anew(kind):
    block, plain = packed_block(kind)
    given = torch.randn(1, 3, 12)
    block.q(given)
    given.mul_(2)
    assert_close(block.k(given), plain.k(given))


def test_a_result_is_let_go_once_all_members_had_it(kind):
    block, _ = packed_block(kind)
    given = torch.randn(1, 3, 12)
    for layer in (block.q, block.k, block.v):
        layer(given)
    assert block.q._product._given is None and not hasattr(block.q._product, "_result")


def test_layers_with_and_without_bias_are_not_joined(kind):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def forward(self, given: Tensor) -> Tensor:
            return self.a(given) + self.b(given)

    mixed, given = Mixed().requires_grad_(False), torch.randn(1, 2, 4)
    expected = mixed(given)
    with calls(mixed) as seen:
        mixed(given)
    pack(mixed, seen, kind)
    assert kind == "joined" or mixed.a._product is not mixed.b._product
    assert_close(mixed(given), expected)


def test_what_is_packed():
    assert layout(torch.device("cpu"), torch.float32) == "reordered"
    assert layout(torch.device("cpu"), torch.bfloat16) is None is layout(torch.device("mps"), torch.float16)
    assert layout(torch.device("cuda"), torch.float32) == layout(torch.device("cuda"), torch.bfloat16) == "joined"


def layers_of(executor: TransformersExecutor) -> set[type]:
    return {type(module) for module in executor._network.modules() if isinstance(module, nn.Linear | PackedLinear)}


@pytest.mark.parametrize(("one", "more", "least"), [(1.0, 1.2, 1), (1.0, 0.98, 1), (1.0, 0.6, WIDENED)])
def test_short_passes_are_widened_where_that_is_clearly_faster(one, more, least, monkeypatch):
    block, _ = packed_block("reordered")
    clock = [0.0]

    def times(product: object, given: Tensor) -> Tensor:
        clock[0] += one if given.shape[1] == 1 else more
        return given

    monkeypatch.setattr(packed_linear._Reordered, "_times", times)
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: clock[0])
    assert least_rows(block) == least
    assert least_rows(nn.Linear(2, 2)) == 1  # nothing to widen for


@pytest.mark.parametrize("least", [1, WIDENED])
def test_packed_logits_are_the_plain_ones(family, least, make_pair, some_tokens, monkeypatch):
    """Rows of unequal length, single positions, a rollback; and `packed=False` leaves transformers' own layers."""
    monkeypatch.setattr("execution.transformers_executor.least_rows", lambda network: least)
    found = []
    for packed in (True, False):
        executor = make_pair(family, packed=packed).executor
        assert layers_of(executor) == ({PackedLinear} if packed else {nn.Linear})
        rows = [executor.open() for _ in range(3)]
        logits = executor.extend([Extension(row, some_tokens(9 - seed, seed), 2) for seed, row in enumerate(rows)])
        executor.truncate(rows[0], 4)
        logits += executor.extend([Extension(rows[0], some_tokens(1, seed=9), 1)])
        logits += executor.extend([Extension(row, some_tokens(1, seed), 1) for seed, row in enumerate(rows)])
        found.append(torch.cat(logits))
    assert_close(*found)


@pytest.mark.parametrize("passes", ["eager", "static"])
def test_the_layout_of_cuda_gives_the_plain_logits(family, passes, make_pair, some_tokens, monkeypatch):
    """On a CPU, with norms fused too, in passes of either kind."""
    monkeypatch.setattr("execution.transformers_executor.layout", lambda device, dtype: "joined")
    pair = make_pair(family)
    modules = list(pair.executor._network.modules())
    own_norms = family in ("gemma2", "gemma3", "gpt2", "gpt_neox")  # 1 + weight, or a mean
    assert any(isinstance(module, FusedNorm) for module in modules) != own_norms
    assert any(isinstance(module, PackedLinear) for module in modules) == (family not in ("gpt2", "gpt_neox"))
    rows = [pair.executor.open() for _ in range(3)]
    texts = {row: some_tokens(9 - row, row) for row in rows}
    pair.executor.extend([Extension(row, text, 0) for row, text in texts.items()])
    for width in (1, 5, 1, 5, 1, 5):
        batch = [Extension(row, some_tokens(width, row), 1) for row in rows]
        for extension, logits in zip(batch, pair.executor.extend(batch), strict=True):
            texts[extension.row] += extension.tokens
            assert_close(logits, pair.plain(texts[extension.row])[-1:])


def test_a_model_that_reads_its_weights_is_told_how_to_run(make_config):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(make_config("llama"))
    layer = network.model.layers[0].self_attn
    forward = layer.forward

    def peeks(*given, **named):
        assert layer.q_proj.weight.dtype == torch.float32
        return forward(*given, **named)

    layer.forward = peeks
    with pytest.raises(ModelError, match=r"cannot be run with packed weights .* use --weights plain"):
        TransformersExecutor(network, "some/model", vocab_size=61)
