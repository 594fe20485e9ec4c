"""What a training loop uses: gradients in, updated parameters out, wherever the update is made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv.checkpoint import files
from aiokv.checkpoint.residuals import inherited, merged, rank_url, residual_file
from aiokv.core.merging import Merging
from aiokv.kernels import get_backend
from aiokv.kvstore import KVStore, create
from aiokv.optim import LearningRule, rule_to_params
from aiokv.telemetry import Counters, take_note
from aiokv.training.checks import (
    check_compression,
    check_more_than_0,
    check_not_on_servers,
    check_saved,
    check_sums,
    learning_rule,
    training_rule,
)
from aiokv.training.gradients import (
    GradientSum,
    LossScale,
    are_finite,
    global_norm,
    read_gradients,
    writable,
)
from aiokv.training.parameters import Parameters, bare
from aiokv.training.update_place import Place, is_async, place_of_update
from aiokv.training.updating import Updater

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.arrays import Array
    from aiokv.optim import FloatRule, Optimizer
    from aiokv.training.config import TrainingConfig

DIVISOR = "aiokv.trainer.divisor"
"""The key by which all workers learn what rank 0 divides its first gradients by."""
OVERFLOW = "aiokv.trainer.overflow"
"""The key by which workers agree whether a step is made: how many of them have gradients that are not finite."""


class Trainer:
    """Trains parameters: give it the gradients of a batch, and it leaves the updated values where the old ones were.

    The update is that of the sum of all workers' gradients, divided by the batch size: let the loss be the sum over
    the samples of a batch. Every worker makes a trainer with the same parameters and takes the same number of steps;
    in the beginning all get the values of rank 0.

    Args:
        params: by name, arrays of NumPy or tensors with DLPack, such as PyTorch's, in the host's memory or on CUDA
            devices; they are updated in place. A list of tensors are replicas of one parameter, one for each device.
        optimizer: the name of an update rule (see `aiokv.optim`), or the rule.
        optimizer_params: the rule's parameters, if it is given by name.
        kvstore: a store; the name of one, which is made and closed by this trainer; or None, to train alone. With
            "local" and a single device no store is needed, and none is made.
        update_on_kvstore: True: servers update and keep the state. False: they only sum, and every worker updates; the
            results have the same bits on all workers. None: on the servers, unless there are none, or a parameter has
            more than 16 Mi elements and the store is "local". Async stores always update on the servers.
        compression_params: how gradients are compressed on their way to the servers, as
            `{"type": "2bit", "threshold": 0.5}`; None: not at all. See `aiokv.codec`.
        grad_accumulation: so many steps are added up and make one update.
        clip_norm: scale this worker's gradients down when their norm is larger; see `step`.
        loss_scale: what the loss was multiplied by; gradients are divided by it. "dynamic": see `loss_scale`.
        reduction: what servers make of the workers' gradients: "sum", "mean", "mean_of_world", "median" or
            "trimmed_mean"; see `aiokv.operations.Operations.set_optimizer`.
        staleness_rate: what servers multiply each gradient by, of its staleness: "1", "1/max(1,tau)" or "1/(1+tau)".
        backend: what computes the updates of workers; see `aiokv.kernels.get_backend`.

    Raises:
        ConfigError: settings contradict each other.
        KeyUseError, SpecMismatchError: a parameter can't be trained.
        OptimizerError: unknown rule, or a wrong parameter.
        AlreadyInitializedError: the store has one of the names already, with another value.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        optimizer: str | Optimizer = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        kvstore: KVStore | str | None = "local",
        update_on_kvstore: bool | None = None,
        compression_params: Mapping[str, Any] | None = None,
        grad_accumulation: int = 1,
        clip_norm: float | None = None,
        loss_scale: float | str | None = None,
        reduction: str = "sum",
        staleness_rate: str = "1",
        backend: str = "auto",
    ) -> None:
        compute = get_backend(backend)
        self._params = Parameters(params, compute)
        self._rule = training_rule(optimizer, optimizer_params)
        self._merging = Merging(reduction, staleness_rate)
        self._merging.check(self._rule)
        for name, weight in self._params.weights.items():
            self._merging.check_dtype(name, weight.dtype.name, self._rule)
        check_more_than_0("grad_accumulation", grad_accumulation)
        if clip_norm is not None:
            check_more_than_0("clip_norm", clip_norm)
        self._every = grad_accumulation
        self._clip_norm = clip_norm
        self._checks = not (loss_scale is None and clip_norm is None)
        self._loss_scale = LossScale(1.0 if loss_scale is None else loss_scale)
        self._updater = Updater(compute)
        self._sums = GradientSum(compute)
        self._collected = self._steps = 0
        self.counters = Counters()
        """Name of an event, such as `step_left_out`, -> how often it happened."""
        self._samples = 0.0
        self._divisor: float | None = None
        """What the servers divide by, or this worker: it is known from the first step on."""
        self._compresses = False
        self._place = place_of_update(
            kvstore.type if isinstance(kvstore, KVStore) else kvstore,
            update_on_kvstore,
            by_name=not isinstance(kvstore, KVStore),
            devices=len(next(iter(self._params.replicas.values()))),
            largest=max(weight.size for weight in self._params.weights.values()),
        )
        self._compression = compression_params
        self._owned: KVStore | None = None
        self._store: KVStore | None = None
        if compression_params is not None:
            check_compression(compression_params, self._place)
        if self._place is not Place.SERVERS:
            check_sums(self._merging)
        if self._place is not Place.ALONE:
            self._store = self._connect(kvstore)

    @classmethod
    def from_config(cls, params: Mapping[str, Any], config: TrainingConfig, **changes: Any) -> Self:
        """Make a trainer of a configuration; see `aiokv.training.config.load_training_config`.

        Args:
            params: as for the class.
            config: what to train with. Its batch size is for the training loop, which passes it to `step`.
            changes: arguments of the class that win over it, such as a store that is there.
        """
        return cls(params, **{**config.trainer_arguments(), **changes})

    def _connect(self, kvstore: KVStore | str | None) -> KVStore:
        assert kvstore is not None, "without a store a trainer is alone"
        store = kvstore
        if isinstance(store, str):
            store = self._owned = create(store)
        # Servers that only sum need no rule, and their sums are no business of a rule that somebody else has set.
        store.init(self._params.weights, policy="sum" if self._place is Place.WORKERS else None)
        # An integer: no codec touches it.
        store.init(OVERFLOW, np.zeros(1, np.int32), policy="sum")
        store.pull(self._params.weights)
        self._params.spread()
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._owned is not None:
            # A worker that fails must not look as if it had left in good order.
            self._owned.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the store, if this trainer has made it. Can be called twice."""
        if self._owned is not None:
            self._owned.close()

    # --- what there is ---

    @property
    def kvstore(self) -> KVStore | None:
        """The store; None when this trainer is alone."""
        return self._store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether servers make the updates."""
        return self._place is Place.SERVERS

    @property
    def num_workers(self) -> int:
        """How many workers train these parameters."""
        return 1 if self._store is None else self._store.num_workers

    @property
    def loss_scale(self) -> float:
        """What the loss has to be multiplied by before the next backward pass.

        A "dynamic" one begins with 65536; it is halved after a step that overflowed, and doubled after 2000 that did
        not. All workers have the same one in sync training.
        """
        return self._loss_scale.value

    @property
    def learning_rate(self) -> float:
        """The rate of the last update, or of the first if none was made, before any multiplier."""
        return learning_rule(self._rule).learning_rate_at(max(self._steps, 1))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the rate that a schedule begins with, or the rate itself, from the next update on, on the servers too.

        Every worker calls it between the same steps.

        Raises:
            OptimizerError: the rule has no such rate, or it can't be. With an async store also when other workers
                are so far ahead that updates of this worker's next round are made: let the first one call it.
        """
        params = rule_to_params(learning_rule(self._rule)) | {"learning_rate": learning_rate}
        rule = training_rule(self._rule.name, params)
        if self._place is Place.SERVERS and self._divisor is not None:
            assert self._store is not None, "servers are those of a store"
            self._store.set_learning_rate(learning_rate)
        self._rule = rule

    # --- training ---

    def step(self, batch_size: float, gradients: Mapping[str, Any] | None = None) -> bool:
        """Make one update of a batch's gradients, or add them to those of the batches before.

        What is exchanged is the gradient times a number that makes it one of rank 0's first batch size. So batch sizes
        may change at any time, and differ from worker to worker; what is summed are the means of the workers' batches.

        With `loss_scale` or `clip_norm`, gradients that are not finite are noticed before anything is pushed: then no
        worker makes this step. In sync training with several workers, agreeing on that takes one exchange of four
        bytes a step. With an async store only the worker whose gradients they are leaves its step out. With `clip_norm`
        it is this worker's gradient, divided by batch size and loss scale, whose norm over all parameters counts.

        Args:
            batch_size: samples in this worker's batch.
            gradients: by name, in the form of the parameters; they are only read. None: the `.grad` of the parameters,
                as PyTorch leaves it there; it is not set to zero.

        Returns:
            Whether an update was made: False while steps are added up, and when the gradients were not finite.

        Raises:
            KeyUseError, SpecMismatchError: a gradient is missing, or of another shape or dtype than its parameter.
        """
        check_more_than_0("batch_size", batch_size)
        is_last = self._collected + 1 == self._every
        found = read_gradients(self._params.tensors, gradients)
        on_devices = found if self._stays_on_devices else None
        if on_devices is None:
            self._sums.add(self._params.gathered(found, apart=self._every > 1), copy=not is_last)
        self._collected += 1
        self._samples += batch_size
        if not is_last:
            return False
        divisor = self._samples * self.loss_scale
        self._collected, self._samples = 0, 0.0
        try:
            return self._take_step(divisor, on_devices)
        finally:
            self._sums.clear()

    @property
    def _stays_on_devices(self) -> bool:
        """Whether gradients may go to the store as they are, and values from there to the parameters."""
        return (
            self._params.on_devices
            and self._place is Place.SERVERS
            and self._store is not None
            and self._store.uses_devices
            and self._every == 1
            and not self._checks
        )

    def _take_step(self, divisor: float, on_devices: Mapping[str, list[Any]] | None) -> bool:
        if self._divisor is None:
            self._divisor = self._agree_on_divisor(divisor)
        if self._store is not None and self._compression is not None and not self._compresses:
            self._store.set_gradient_compression(self._compression)
            self._compresses = True
        if on_devices is not None and self._divisor == divisor:
            assert self._store is not None, "it uses the devices"
            self._steps += 1
            self._store.pushpull(bare(on_devices), out=bare(self._params.replicas))
            return True
        if on_devices is not None:
            self._sums.add(self._params.gathered(on_devices, apart=False), copy=False)
        pushed = self._scaled(self._divisor / divisor, divisor)
        if self._checks and self._overflows(pushed):
            return False
        self._steps += 1
        self._loss_scale.stepped(overflow=False)
        if self._place is Place.SERVERS:
            assert self._store is not None, "servers are those of a store"
            self._store.pushpull(pushed, out=self._params.weights)
            self._params.spread()
        else:
            self._update_here(self._summed(pushed), self._divisor)
        return True

    def _agree_on_divisor(self, divisor: float) -> float:
        """Return what rank 0 divides its first gradients by; let the servers do so."""
        if self._store is None:
            return divisor
        self._store.init(DIVISOR, np.array([divisor]), policy="sum")
        agreed = float(self._store.pull(DIVISOR)[0])
        if self._place is Place.SERVERS:
            rule = self._rule_dividing_by(agreed)
            self._store.set_optimizer(rule.name, **self._merging._asdict(), **rule_to_params(rule))
        return agreed

    def _scaled(self, factor: float, divisor: float) -> dict[str, Array]:
        """Return the sums times a factor, which limits their norm too."""
        if self._clip_norm is not None:
            norm = global_norm(self._sums.totals.values()) / divisor
            if norm > self._clip_norm:
                factor *= self._clip_norm / norm
        weights = self._params.weights
        return {name: self._sums.scaled(name, weight.dtype, factor) for name, weight in weights.items()}

    @property
    def _has_to_agree(self) -> bool:
        return self._checks and self._store is not None and self.num_workers > 1 and not is_async(self._store.type)

    def _overflows(self, gradients: Mapping[str, Array]) -> bool:
        """Say whether a worker that takes part in this update has gradients that are not finite, and take note."""
        here = overflow = not are_finite(gradients.values())
        if self._has_to_agree:
            assert self._store is not None, "others are reached through a store"
            overflow = bool(self._store.pushpull(OVERFLOW, np.full(1, here, np.int32))[0])
            # Servers count the rounds of this key, so for a schedule this was a step.
            self._steps += overflow
        if overflow:
            whose = "this worker has" if here else "another worker has"
            text = f"a step is left out: {whose} gradients with inf or NaN, loss scale {self.loss_scale:g}"
            take_note(self.counters, "warning", "step_left_out", text, {"here": here, "loss_scale": self.loss_scale})
            self._loss_scale.stepped(overflow=True)
        return overflow

    def _summed(self, pushed: dict[str, Array]) -> dict[str, Array]:
        """Return the sums over all workers."""
        if self._store is None:
            return pushed
        sums: list[Array] = self._store.pushpull(pushed)
        return dict(zip(pushed, sums, strict=True))

    def _rule_dividing_by(self, divisor: float) -> FloatRule:
        params = rule_to_params(self._rule) | {"rescale_grad": self._rule.rescale_grad / divisor}
        return training_rule(self._rule.name, params)

    def _update_here(self, totals: Mapping[str, Array], divisor: float) -> None:
        rule = self._rule_dividing_by(divisor)
        if self._params.on_devices:
            # They may have been changed since.
            self._params.fetch()
        for name, weight in self._params.weights.items():
            self._updater.update(name, weight, totals[name], rule, self._steps)
        self._params.spread()

    def allreduce_grads(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Write the sum over all devices and workers over the gradients. For use with `update`, in the place of `step`.

        What lies between the two sees the gradients that the update is made of; they are not divided yet.

        Args:
            gradients: as for `step`, but written.

        Raises:
            ConfigError: updates are made on the servers.
            KeyUseError, SpecMismatchError: as in `step`, or a gradient can't be written.
        """
        check_not_on_servers(self._place, "allreduce_grads")
        found = read_gradients(self._params.tensors, gradients)
        for name, arrays in found.items():
            writable(name, arrays)
        self._sums.clear()
        self._sums.add(self._params.gathered(found, apart=False), copy=False)
        sums = self._summed({name: self._sums.scaled(name, found[name][0].dtype, 1.0) for name in found})
        self._params.write(found, sums)
        self._sums.clear()

    def update(self, batch_size: float, gradients: Mapping[str, Any] | None = None) -> bool:
        """Make one update of gradients that `allreduce_grads` has summed.

        Args:
            batch_size: what they are divided by, the same on all workers.
            gradients: as for `step`; of several devices only those of the first are used.

        Returns:
            Whether it was made; see `step`. The norm that `clip_norm` limits is that of the sum here.

        Raises:
            ConfigError: updates are made on the servers.
            KeyUseError, SpecMismatchError: as in `step`.
        """
        check_not_on_servers(self._place, "update")
        check_more_than_0("batch_size", batch_size)
        divisor = batch_size * self.loss_scale
        found = read_gradients(self._params.tensors, gradients)
        self._sums.clear()
        first = {name: arrays[:1] for name, arrays in found.items()}
        self._sums.add(self._params.gathered(first, apart=False), copy=False)
        totals = self._scaled(1.0, divisor)
        self._sums.clear()
        # All workers have the same gradients, so they need not agree.
        overflow = self._checks and not are_finite(totals.values())
        self._loss_scale.stepped(overflow=overflow)
        if not overflow:
            self._steps += 1
            self._update_here(totals, divisor)
        return not overflow

    # --- states ---

    def save_states(self, url: str) -> None:
        """Write what the rule keeps for the parameters, the counts of updates, learning rate and loss scale to a file.

        What compression has left of this worker's gradients is written beside it; see `aiokv.checkpoint.residuals`.
        Where servers update, the parameters are written too: every worker calls it, and rank 0 writes; see
        `aiokv.operations.Operations.save`. What steps have added up for the next update is not written.

        Args:
            url: a path, or an address that fsspec knows; the file is a safetensors file.

        Raises:
            DataError: it can't be written.
        """
        rate = self._rule.learning_rate if isinstance(self._rule, LearningRule) else None
        facts = {"steps": self._steps, "learning_rate": rate, "divisor": self._divisor, **self._loss_scale.state()}
        if self._place is not Place.SERVERS:
            facts |= {"workers": self.num_workers, "compresses": self._compresses}
            save_id = self._updater.save(url, self._rule, facts)
            if self._store is not None and self._compresses:
                rank, state = self._store.rank, self._store.compression_state()
                files.write(rank_url(url, rank), residual_file(state, rank, save_id, None))
            return
        assert self._store is not None, "servers are those of a store"
        facts |= {"optimizer": self._rule.name} | self._merging._asdict()
        self._store.save(url, keys=[*self._params.weights, OVERFLOW], facts={"trainer": facts})

    def load_states(self, url: str) -> None:
        """Go on with what `save_states` has written, with the same bits as if nothing had happened.

        Every worker loads the same file. Where servers update, they may be others, and the parameters get the values
        of the file.

        Raises:
            DataError: it can't be read, or is of another rule or of parameters of other shapes.
            UnknownKeyError: it has a state of a parameter that there is not; or the servers update, and it has not all
                parameters.
            OptimizerError: the servers have a rule already, with other parameters or for another first batch size.
        """
        if self._place is Place.SERVERS:
            facts = self._load_from_servers(url)
        else:
            loaded = self._updater.read(url, self._rule, self._params.weights)
            facts = loaded.facts
            if facts["compresses"]:
                self._load_residuals(url, loaded.checksum, facts["workers"])
            self._updater.use(loaded)
            if facts["learning_rate"] is not None:
                self.set_learning_rate(facts["learning_rate"])
        if facts["divisor"] is not None:
            # Servers have a rule that divides by it.
            self._divisor = facts["divisor"]
        self._steps = facts["steps"]
        self._loss_scale.restore(facts)

    def _load_residuals(self, url: str, save_id: str, workers: int) -> None:
        if self._store is None:
            text = f"{url}: what compression had left of gradients is not used: nothing is sent here"
            take_note(self.counters, "warning", "residuals_not_used", text, {"url": url})
            return
        ranks = inherited(range(workers), self._store.rank, self._store.num_workers)
        read = {rank: files.read(rank_url(url, rank)) for rank in ranks}
        self._store.restore_compression_state(merged(url, read, save_id, list(self._params.weights)))

    def _load_from_servers(self, url: str) -> dict[str, Any]:
        """Let the servers go on with a file; return what was saved of this trainer."""
        assert self._store is not None, "servers are those of a store"
        check = partial(check_saved, url=url, rule=self._rule, merging=self._merging)
        loaded = self._store.load(url, keys=[*self._params.weights, OVERFLOW], check=check)
        facts: dict[str, Any] = loaded["trainer"]
        if facts["learning_rate"] is not None:
            # The servers have it from the file.
            self._rule = training_rule(
                self._rule.name, rule_to_params(self._rule) | {"learning_rate": facts["learning_rate"]}
            )
        self._store.pull(self._params.weights)
        self._params.spread()
        return facts
