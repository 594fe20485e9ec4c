"""Tensors of well-known networks, in the order of their layers: the first is the first that a step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

Shapes = list[tuple[str, tuple[int, ...]]]


def vgg16() -> Shapes:
    """Return the 32 tensors of VGG-16, 138,357,544 elements (Simonyan and Zisserman 2015, configuration D)."""
    shapes: Shapes = []
    before = 3
    for number, channels in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512), start=1):
        shapes += [(f"conv{number}.weight", (channels, before, 3, 3)), (f"conv{number}.bias", (channels,))]
        before = channels
    for number, (wide, outputs) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000)), start=1):
        shapes += [(f"fc{number}.weight", (outputs, wide)), (f"fc{number}.bias", (outputs,))]
    return shapes


def resnet50() -> Shapes:
    """Return the 161 tensors of ResNet-50, 25,557,032 elements (He and others 2016)."""
    shapes: Shapes = []

    def convolution(name: str, outputs: int, inputs: int, size: int) -> None:
        shapes.append((f"{name}.weight", (outputs, inputs, size, size)))
        shapes.extend((f"{name}.norm.{part}", (outputs,)) for part in ("weight", "bias"))

    convolution("stem", 64, 3, 7)
    before = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.1", width, before, 1)
            convolution(f"{name}.2", width, width, 3)
            convolution(f"{name}.3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.skip", 4 * width, before, 1)
            before = 4 * width
    return [*shapes, ("fc.weight", (1000, before)), ("fc.bias", (1000,))]


MODELS: Final[dict[str, Callable[[], Shapes]]] = {"resnet-50": resnet50, "vgg-16": vgg16}
