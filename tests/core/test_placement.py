"""Placement: every element on exactly one server, bytes spread evenly, and the same answer everywhere."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.core.placement import Chunk, home_of, place, split_range
from aiokv.types import ITEM_SIZES, Key, TensorSpec

CHUNK_BYTES = 512 * 1024
SPLIT_BYTES = 64 * 1024
"""The defaults of the configuration."""

SIZES = [*range(1, 51), *range(999_999, 1_000_002)]


def place_default(key: Key, shape: tuple[int, ...], servers: int) -> list[Chunk]:
    """Place a float32 tensor under the default settings."""
    return place(key, TensorSpec(shape, "float32"), servers=servers, chunk_bytes=CHUNK_BYTES, split_bytes=SPLIT_BYTES)


def elements(chunks: list[Chunk], servers: int) -> list[int]:
    """Return how many elements each server has."""
    return [sum(chunk.stop - chunk.start for chunk in chunks if chunk.server == server) for server in range(servers)]


def imbalance(shapes: dict[Key, tuple[int, ...]], servers: int) -> float:
    """Return the largest share of a server over the mean."""
    totals = [0] * servers
    for key, shape in shapes.items():
        for server, count in enumerate(elements(place_default(key, shape, servers), servers)):
            totals[server] += count
    return max(totals) * servers / sum(totals)


def resnet50() -> dict[Key, tuple[int, ...]]:
    """Return the shapes of ResNet-50 by name: 53 convolutions with gamma and beta of their norms, and a dense layer."""
    shapes: dict[Key, tuple[int, ...]] = {}

    def layer(name: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{name}_weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{name}_gamma"] = shapes[f"{name}_beta"] = (outputs,)

    layer("conv0", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"stage{stage}_block{block}"
            layer(f"{name}_conv0", width, inputs, 1)
            layer(f"{name}_conv1", width, width, 3)
            layer(f"{name}_conv2", 4 * width, width, 1)
            if block == 0:
                layer(f"{name}_shortcut", 4 * width, inputs, 1)
            inputs = 4 * width
    shapes["dense_weight"], shapes["dense_bias"] = (1000, 2048), (1000,)
    return shapes


def vgg16() -> dict[Key, tuple[int, ...]]:
    """Return the sizes of scenario 13: the weights of three dense layers, weights and biases of 13 convolutions."""
    shapes: dict[Key, tuple[int, ...]] = {"fc6": (4096, 25088), "fc7": (4096, 4096), "fc8": (1000, 4096)}
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        shapes[f"conv{number}_weight"], shapes[f"conv{number}_bias"] = (outputs, inputs, 3, 3), (outputs,)
    return shapes


# --- cutting ---


@pytest.mark.parametrize(
    ("size", "parts", "lengths"),
    [(10, 4, [2, 3, 2, 3]), (3, 3, [1, 1, 1]), (2, 4, [0, 1, 0, 1]), (0, 2, [0, 0]), (7, 1, [7])],
)
def test_range_is_cut_into_neighbours_of_equal_length(size: int, parts: int, lengths: list[int]) -> None:
    ranges = split_range(size, parts)
    assert [high - low for low, high in ranges] == lengths
    assert [element for low, high in ranges for element in range(low, high)] == list(range(size))


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize("size", SIZES)
def test_scenario_34_split_tensor_is_complete_and_even(size: int, servers: int) -> None:
    spec = TensorSpec((size,), "float32")
    chunks = place("w", spec, servers=servers, chunk_bytes=CHUNK_BYTES, split_bytes=1)
    assert (chunks[0].start, chunks[-1].stop) == (0, size)
    assert all(left.stop == right.start for left, right in itertools.pairwise(chunks))
    shares = elements(chunks, servers)
    assert max(shares) - min(shares) <= 1


@given(
    size=hs.integers(0, 5000),
    dtype=hs.sampled_from(sorted(ITEM_SIZES)),
    servers=hs.integers(1, 9),
    chunk_bytes=hs.integers(8, 500),
    split_bytes=hs.integers(1, 50_000),
)
def test_chunk_is_never_larger_than_allowed(
    size: int, dtype: str, servers: int, chunk_bytes: int, split_bytes: int
) -> None:
    spec = TensorSpec((size,), dtype)
    chunks = place("w", spec, servers=servers, chunk_bytes=chunk_bytes, split_bytes=split_bytes)
    assert all((chunk.stop - chunk.start) * spec.itemsize <= chunk_bytes for chunk in chunks)
    assert [e for chunk in chunks for e in range(chunk.start, chunk.stop)] == list(range(size))
    assert all(0 <= chunk.server < servers for chunk in chunks)
    assert len({chunk.start for chunk in chunks}) == len(chunks)


def test_chunk_of_whole_elements_does_not_grow_over_its_limit() -> None:
    # 5 elements of 4 bytes in chunks of at most 10 bytes: 2, 2 and 1, not 3 and 2.
    chunks = place("w", TensorSpec((5,), "float32"), servers=1, chunk_bytes=10, split_bytes=1)
    assert sorted(chunk.stop - chunk.start for chunk in chunks) == [1, 2, 2]


def test_size_is_exact_beyond_the_precision_of_a_float() -> None:
    size = 2**56 + 1
    chunks = place("w", TensorSpec((size,), "uint8"), servers=1, chunk_bytes=2**55, split_bytes=1)
    assert len(chunks) == 3


def bounds(shape: tuple[int, ...], servers: int, chunk_bytes: int) -> list[tuple[int, int, int]]:
    """Return the chunks of a float32 tensor that is cut over all servers, with servers counted from the first one."""
    chunks = place("w", TensorSpec(shape, "float32"), servers=servers, chunk_bytes=chunk_bytes, split_bytes=1)
    return [((chunk.server - chunks[0].server) % servers, chunk.start, chunk.stop) for chunk in chunks]


@pytest.mark.parametrize(
    ("shape", "servers", "chunk_bytes", "expected"),
    [
        # Rows of 12 bytes: 5 of the 10 on each server, in chunks of at most 3: 2 and 3.
        ((10, 3), 2, 40, [(0, 0, 6), (0, 6, 15), (1, 15, 21), (1, 21, 30)]),
        # One server: 10 rows in chunks of at most 4.
        ((10, 3), 1, 48, [(0, 0, 9), (0, 9, 18), (0, 18, 30)]),
        # All axes but the first are a row, and just one fits.
        ((2, 3, 2), 1, 24, [(0, 0, 6), (0, 6, 12)]),
        # 22 rows on 3 servers are 7, 7 and 8, and 8 / (22 / 3) is 1.09: more than 1.05, so it is even by elements.
        ((22, 1, 2), 3, 4096, [(0, 0, 14), (1, 14, 29), (2, 29, 44)]),
        # 20 rows on 3 servers are 6, 7 and 7, and 7 / (20 / 3) is exactly 1.05.
        ((20, 2), 3, 4096, [(0, 0, 12), (1, 12, 26), (2, 26, 40)]),
        # As few rows as servers are even, fewer are not.
        ((3, 4), 3, 4096, [(0, 0, 4), (1, 4, 8), (2, 8, 12)]),
        ((2, 3), 3, 4096, [(0, 0, 2), (1, 2, 4), (2, 4, 6)]),
        # A row that does not fit in a chunk is cut: 6 elements on each server, in chunks of at most 5.
        ((2, 6), 2, 20, [(0, 0, 3), (0, 3, 6), (1, 6, 9), (1, 9, 12)]),
    ],
)
def test_cuts_are_between_rows_where_these_fit_and_are_spread_evenly(
    shape: tuple[int, ...], servers: int, chunk_bytes: int, expected: list[tuple[int, int, int]]
) -> None:
    assert bounds(shape, servers, chunk_bytes) == expected


@given(
    shape=hs.tuples(hs.integers(1, 300), hs.integers(1, 6), hs.integers(1, 3)),
    servers=hs.integers(1, 9),
    chunk_bytes=hs.integers(4, 200),
)
def test_no_server_has_a_twentieth_more_than_the_mean_of_a_key(
    shape: tuple[int, ...], servers: int, chunk_bytes: int
) -> None:
    spec = TensorSpec(shape, "float32")
    chunks = place("w", spec, servers=servers, chunk_bytes=chunk_bytes, split_bytes=1)
    # And the one element that can't be cut.
    assert max(elements(chunks, servers)) < 1.05 * spec.size / servers + 1
    assert all((chunk.stop - chunk.start) * spec.itemsize <= chunk_bytes for chunk in chunks)
    assert (chunks[0].start, chunks[-1].stop) == (0, spec.size)
    assert all(left.stop == right.start for left, right in itertools.pairwise(chunks))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_tensor_without_elements_has_one_empty_chunk(shape: tuple[int, ...]) -> None:
    (chunk,) = place_default("w", shape, 4)
    assert (chunk.start, chunk.stop) == (0, 0)


@pytest.mark.parametrize("shape", [(), (1,), (16_383,)])
def test_small_tensor_is_not_cut(shape: tuple[int, ...]) -> None:
    assert len(place_default("w", shape, 4)) == 1


def test_tensor_of_split_bytes_is_cut_over_all_servers() -> None:
    assert {chunk.server for chunk in place_default("w", (16_384,), 4)} == {0, 1, 2, 3}


# --- balance ---


def test_resnet50_has_the_published_size() -> None:
    shapes = resnet50()
    assert len(shapes) == 161
    assert sum(TensorSpec(shape, "float32").size for shape in shapes.values()) == 25_557_032


@pytest.mark.parametrize("servers", range(1, 9))
def test_resnet50_is_spread_evenly(servers: int) -> None:
    assert imbalance(resnet50(), servers) <= 1.05


@pytest.mark.parametrize("servers", range(1, 9))
def test_scenario_13_vgg_is_spread_evenly(servers: int) -> None:
    # Scenario 13 asks for 4 servers: without cutting, one of them would hold 70 % of the bytes.
    shapes = vgg16()
    sizes = sorted((TensorSpec(shape, "float32").size for shape in shapes.values()), reverse=True)
    assert (sizes[:2], 4_096_000 in sizes, len(sizes)) == ([102_760_448, 16_777_216], True, 29)
    assert imbalance(shapes, servers) <= 1.05


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("names", ["layer{}", "{}", "layers.{}.mlp.weight"])
def test_many_small_keys_are_spread_evenly(names: str, servers: int) -> None:
    assert imbalance({names.format(number): (256,) for number in range(1000)}, servers) <= 1.15


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_many_int_keys_are_spread_evenly(servers: int) -> None:
    assert imbalance(dict.fromkeys(range(1000), (256,)), servers) <= 1.15


@pytest.mark.parametrize("servers", [3, 5, 7])
@pytest.mark.parametrize("key", [2**63 - 1, 2**63 - 2])
def test_scenario_31_largest_keys_have_exactly_one_owner(key: int, servers: int) -> None:
    # Scenario 31, with the largest keys that there are here.
    (chunk,) = place_default(key, (10,), servers)
    assert 0 <= chunk.server < servers


# --- the same answer everywhere ---


def test_home_is_the_crc32_of_the_written_key() -> None:
    # Workers of different versions have to agree. The checksums are gzip's.
    assert [home_of("weight", servers) for servers in (1, 7, 1000)] == [0, 2_099_875_309 % 7, 309]
    assert home_of(7, 1000) == 1_790_921_346 % 1000
    assert home_of("7", 1000) == 4_149_124_136 % 1000


def test_int_and_str_of_the_same_text_are_different_keys() -> None:
    assert home_of(1, 1 << 32) != home_of("1", 1 << 32)


def test_place_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "from aiokv.core.placement import place; from aiokv.types import TensorSpec;"
        "spec = TensorSpec((9,), 'int8');"
        "print([place(key, spec, servers=5, chunk_bytes=4, split_bytes=9) for key in ('a', 'b', 3)])"
    )
    root = Path(__file__).parents[2]
    answers = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert answers[0] == answers[1] != ""
