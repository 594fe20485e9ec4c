"""The workloads' tensors, and the texts that name them."""

from __future__ import annotations

import math

import pytest

from aiokv.bench.workloads import parse_workload, resnet50_shapes
from aiokv.errors import ConfigError


def test_resnet50_has_the_161_tensors_and_25_557_032_parameters_of_the_paper_s_model() -> None:
    shapes = resnet50_shapes()
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes.values())) == 25_557_032


def test_resnet50_begins_and_ends_with_the_layers_that_everybody_knows() -> None:
    shapes = list(resnet50_shapes().values())
    assert shapes[:3] == [(64, 3, 7, 7), (64,), (64,)]
    assert shapes[-2:] == [(1000, 2048), (1000,)]


def test_resnet50_has_53_convolutions() -> None:
    assert sum(len(shape) == 4 for shape in resnet50_shapes().values()) == 53


@pytest.mark.parametrize(
    ("text", "keys", "nbytes"),
    [
        ("large:64", 1, 64 * 2**20),
        ("large:0.5", 1, 2**19),
        ("large:0.1", 1, 104_856),
        ("resnet50", 161, 102_228_128),
        ("small", 1000, 1000 * 1024),
        ("latency:4", 1, 4),
    ],
)
def test_workload_has_so_many_keys_and_bytes(text: str, keys: int, nbytes: int) -> None:
    workload = parse_workload(text)
    assert (workload.name, len(workload.shapes), workload.nbytes) == (text, keys, nbytes)


@pytest.mark.parametrize("text", ["", "huge", "large", "latency", "resnet50:2", "small:5", "limits"])
def test_unknown_workload_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="known: large:MIB, resnet50, small, latency:BYTES") as caught:
        parse_workload(text)
    assert repr(text) in caught.value.message


@pytest.mark.parametrize("text", ["large:", "large:x", "large:0", "large:-1", "large:nan", "large:inf", "large:1e9"])
def test_large_needs_a_size_that_can_be(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a number of MiB, such as large:64"):
        parse_workload(text)


@pytest.mark.parametrize("text", ["latency:", "latency:4.5", "latency:3", "latency:0", "latency:-4"])
def test_latency_needs_whole_values(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a number of bytes that is a multiple of 4, such as"):
        parse_workload(text)


def test_large_arrays_get_fewer_rounds() -> None:
    assert parse_workload("large:256").rounds < parse_workload("large:16").rounds
