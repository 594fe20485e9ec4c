"""The settings of a training job, from the same layers as those of a node; a later layer wins.

defaults < table [training] of the TOML file < environment (AIOKV_TRAINING_*) < arguments
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aiokv.layers import (
    FILE,
    TRAINING,
    Layer,
    argument_layer,
    convert,
    environment_layer,
    file_layers,
    says,
    types_of,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Text = Annotated[str, Meta(min_length=1, description="a text")]
Positive = Annotated[float, Meta(gt=0)]
STRATEGIES: Final = {"auto": None, "servers": True, "workers": False}
"""Communication strategy -> `update_on_kvstore` of the Trainer."""


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training loop needs to know. Make it with `load_training_config`, which checks every value."""

    kvstore_type: Annotated[
        Literal["none", "local", "dist", "dist_sync", "dist_async"],
        Meta(description="one of none, local, dist, dist_sync, dist_async"),
        says("The store that workers meet in; none: train alone."),
    ] = "local"
    communication_strategy: Annotated[
        Literal["auto", "servers", "workers"],
        Meta(description="one of auto, servers, workers"),
        says("Who makes the updates. servers: weights come down from them. workers: sums of gradients come down."),
    ] = "auto"
    optimizer: Annotated[Text, says("The update rule.")] = "sgd"
    learning_rate: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="a number of at least 0"),
        says("The learning rate; the rule's own when not given."),
    ] = None
    optimizer_params: Annotated[
        dict[str, Any],
        Meta(description="a table of parameters; in the environment as JSON"),
        says("The rule's other parameters."),
    ] = {}
    batch_size: Annotated[Count, says("Samples in a worker's batch.")] = 32
    gradient_accumulation: Annotated[Count, says("So many batches are added up and make one update.")] = 1
    compression: Annotated[
        dict[str, Any],
        Meta(description='a table such as {"type": "2bit"}; in the environment as JSON'),
        says("How gradients are compressed on their way to the servers; not at all when empty."),
    ] = {}
    clip_norm: Annotated[
        Positive | None,
        Meta(description="a number of more than 0"),
        says("The largest norm of a worker's gradient; no limit when not given."),
    ] = None
    loss_scale: Annotated[
        Positive | Literal["dynamic"] | None,
        Meta(description="a number of more than 0, or dynamic"),
        says("What the loss is multiplied by for low precisions; not at all when not given."),
    ] = None

    reduction: Annotated[
        Literal["sum", "mean", "mean_of_world", "median", "trimmed_mean"],
        Meta(description="one of sum, mean, mean_of_world, median, trimmed_mean"),
        says("What servers make of the workers' gradients."),
    ] = "sum"
    staleness_rate: Annotated[
        Literal["1", "1/max(1,tau)", "1/(1+tau)"],
        Meta(description="one of 1, 1/max(1,tau), 1/(1+tau)"),
        says("What servers multiply each gradient by; tau: how many versions old it is."),
    ] = "1"

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what `aiokv.Trainer` is called with, beside the parameters."""
        params = dict(self.optimizer_params)
        if self.learning_rate is not None:
            params["learning_rate"] = self.learning_rate
        return {
            "optimizer": self.optimizer,
            "optimizer_params": params,
            "kvstore": None if self.kvstore_type == "none" else self.kvstore_type,
            "update_on_kvstore": STRATEGIES[self.communication_strategy],
            "compression_params": self.compression or None,
            "grad_accumulation": self.gradient_accumulation,
            "clip_norm": self.clip_norm,
            "loss_scale": self.loss_scale,
            "reduction": self.reduction,
            "staleness_rate": self.staleness_rate,
        }


_FIELDS: Final = types_of(TrainingConfig)


def load_training_config(*, environ: Mapping[str, str] | None = None, **arguments: Any) -> TrainingConfig:
    """Put the settings together from the file, the environment and the arguments.

    The file is that of `aiokv.config.load_config`; its path is the argument `config` or AIOKV_CONFIG.

    Args:
        environ: the environment; None: that of this process.
        arguments: fields of `TrainingConfig`, or `config`; None counts as not given.

    Raises:
        ConfigError: an unknown name, a value that can't be, or no such file.
    """
    config, _ = trace_training_config(environ=environ, **arguments)
    return config


def trace_training_config(
    *, environ: Mapping[str, str] | None = None, **arguments: Any
) -> tuple[TrainingConfig, dict[str, str]]:
    """Do as `load_training_config` does; return also where each setting that was given comes from.

    Raises:
        ConfigError: as `load_training_config`.
    """
    variables = os.environ if environ is None else environ
    given = argument_layer(arguments)
    own = environment_layer(variables, f"AIOKV_{TRAINING.upper()}_", _FIELDS)
    file = given.pop(FILE, None)
    if file is None and variables.get("AIOKV_CONFIG"):
        file = variables["AIOKV_CONFIG"], "AIOKV_CONFIG"
    layers = [(file_layers(*file)[1], True)] if file else []
    layers += [(own, False), (given, True)]
    merged: Layer = {}
    for layer, strict in layers:
        for name, (value, origin) in layer.items():
            if name not in _FIELDS:
                raise unknown("setting of training", name, origin, list(_FIELDS))
            read = value if strict else _read(name, value)
            merged[name] = convert(name, read, _FIELDS[name], origin, strict=strict), origin
    config = TrainingConfig(**{name: value for name, (value, _) in merged.items()})
    return config, {name: origin for name, (_, origin) in merged.items()}


def _read(name: str, text: str) -> Any:
    """Return what a variable says: a table of parameters is written in JSON there."""
    if name in {"compression", "optimizer_params"}:
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text
