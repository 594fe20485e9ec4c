"""The keys that a server holds: what a message about one must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.core.keys import BUNDLE_START, check_key, check_kind, check_same_spec, check_spec, name_keys
from aiokv.core.server.rounds.bundle import Bundle
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.rows import RowChunk, RowOptions, check_norms, check_options, options_of
from aiokv.core.tables import check_sparse
from aiokv.errors import (
    AlreadyInitializedError,
    MembershipError,
    PolicyError,
    ProtocolError,
    SpecMismatchError,
    UnknownKeyError,
)
from aiokv.policy import get_policy
from aiokv.types import Key, TensorSpec
from aiokv.wire.messages import GetPushes, GetState, InitBundle, InitRows, Pull, PullRows, Push, PushRows, PutState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.server.creation import AnyInit
    from aiokv.optim import Optimizer
    from aiokv.types import Rank
    from aiokv.wire.messages import Init


@dataclass(slots=True)
class Entry:
    """What is kept of a key, besides its chunks. `rows` is set when it is row-sparse."""

    spec: TensorSpec
    policy: str
    group: tuple[Rank, ...]
    digest: bytes
    rows: RowOptions | None = None


class Catalog:
    """All keys, chunks and bundles of one server.

    Every method raises the error that the sender of the message should get.
    """

    def __init__(self) -> None:
        self.chunks: dict[tuple[Key, int], Chunk] = {}
        """Every chunk, by key and first element; that of a bundle under its first key and `BUNDLE_START`."""
        self._keys: dict[Key, Entry] = {}
        self._bundles: dict[int, Bundle] = {}
        self.next_bundle = 0
        """The number of the next bundle."""
        self.revision = 0
        """How often bundles were made or taken out."""
        self._numbers: dict[tuple[Key, ...], int] = {}
        self._bundle_of: dict[Key, Bundle] = {}
        self._kind: type | None = None

    # --- keys ---

    def find(self, key: Key, start: int) -> Chunk | None:
        """Return the chunk in which a key's element `start` is the first one of a chunk or of the key in its bundle."""
        chunk = self.chunks.get((key, start))
        if chunk is None and start == 0 and key in self._bundle_of:
            return self._bundle_of[key].chunk
        return chunk

    def first_missing(self, keys: tuple[Key, ...]) -> Key | None:
        """Return the first of the keys that does not exist, if there is one."""
        return next((key for key in keys if key not in self._keys), None)

    def entry(self, key: Key) -> Entry | None:
        """Return what is kept of a key, if it is here."""
        return self._keys.get(key)

    def spec(self, key: Key) -> TensorSpec:
        """Return shape and dtype of a key.

        Raises:
            UnknownKeyError: there is none.
        """
        if key not in self._keys:
            raise UnknownKeyError(f"key {key!r} is not initialized: call init first", key=key)
        return self._keys[key].spec

    def dtypes(self) -> list[tuple[Key, str]]:
        """Return every key that the update rule is for, with its dtype."""
        return [(key, entry.spec.dtype) for key, entry in self._keys.items() if not get_policy(entry.policy).keeps_sum]

    def is_sparse(self, key: Key) -> bool:
        """Return True when the key is here, and a row-sparse one."""
        return key in self._keys and self._keys[key].rows is not None

    def check_tables(self, rule: Optimizer) -> None:
        """Compare a rule with the row-sparse keys.

        Raises:
            OptimizerError: it can't update one of them.
        """
        for key, entry in self._keys.items():
            if entry.rows is not None:
                check_norms(key, rule)

    def check_init(self, message: AnyInit, *, learns: bool = False) -> None:
        """Compare an init with the keys, or with what new keys may be.

        Args:
            message: the init.
            learns: whoever sends it is told later which policies keys have that are here.

        Raises:
            KeyUseError: str and int keys are mixed.
            SpecMismatchError, PolicyError, MembershipError: they differ.
        """
        for key, spec in specs_of(message):
            if key not in self._keys:
                check_kind(check_key(key), self._kind)
                continue
            known = self._keys[key]
            check_options(key, known.rows, options_of(message) if isinstance(message, InitRows) else None)
            check_same_spec(key, known.spec, spec)
            if known.policy != message.policy and not learns:
                raise PolicyError(
                    f"key {key!r} is kept under policy {known.policy}, not {message.policy}",
                    key=key,
                    expected=known.policy,
                    got=message.policy,
                )
            if known.group != message.group:
                expected, got = list(known.group) or "all", list(message.group) or "all"
                text = f"key {key!r} belongs to ranks {expected}, not {got}"
                raise MembershipError(text, key=key, expected=str(expected), got=str(got))

    def has_values(self, message: AnyInit) -> bool:
        """Return True when the root's init brings what is there already, and False when all of it is new.

        Raises:
            AlreadyInitializedError: some of it is there, or with another value.
        """
        start = 0 if isinstance(message, InitBundle) else message.start
        named = specs_of(message)
        digests = digests_of(message)
        found = [(key, digest) for (key, _), digest in zip(named, digests, strict=True) if self.find(key, start)]
        for key, digest in found:
            if len(found) < len(named) or not digest or self._keys[key].digest != digest:
                text = f"key {key!r} was initialised with another value; delete it first"
                if len(found) < len(named):
                    text = f"key {key!r} has a value already, but others of the call have none: initialise them alone"
                raise AlreadyInitializedError(text, key=key)
        return bool(found)

    def remove(self, key: Key) -> list[Chunk]:
        """Take a key out whose bundle has been divided; return its chunks here."""
        del self._keys[key]
        for keys in [keys for keys in self._numbers if key in keys]:
            self._bundles.pop(self._numbers.pop(keys), None)
            self.revision += 1
        return [self.chunks.pop(place) for place in list(self.chunks) if place[0] == key]

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def create(self, message: Init, nbytes: int) -> Chunk:
        """Enter a new chunk.

        Raises:
            KeyUseError, SpecMismatchError, PolicyError: key, spec or policy can't be, or differ from the key's
                other chunks.
        """
        key, start, stop = message.key, message.start, message.stop
        kind = self._check_new(message)
        spec = TensorSpec(message.shape, message.dtype)
        chunk = Chunk(key, start, stop, spec, get_policy(message.policy), f"key {key!r}", message.group)
        if not 0 <= start <= stop <= spec.size or nbytes != chunk.nbytes:
            raise SpecMismatchError(
                f"key {key!r}: {nbytes} bytes for elements {start} to {stop} of {spec}",
                key=key,
                expected=f"{chunk.nbytes} bytes",
                got=f"{nbytes} bytes",
            )
        self._kind = kind
        self._keys[key] = Entry(spec, message.policy, message.group, message.digest)
        chunk.born = message.clock
        self.chunks[key, start] = chunk
        return chunk

    def check_key(self, key: Key) -> None:
        """Refuse what is no key, or no key of this cluster's kind.

        Raises:
            KeyUseError: it can't be.
        """
        check_kind(check_key(key), self._kind)

    def create_table(self, message: InitRows, options: RowOptions) -> RowChunk:
        """Enter a new row-sparse chunk.

        Raises:
            KeyUseError, SpecMismatchError, PolicyError: key, spec or policy can't be, or differ from the key's
                other chunks.
        """
        kind = self._check_new(message)
        key, start = message.key, message.start
        spec, policy = TensorSpec(message.shape, message.dtype), get_policy(message.policy)
        chunk = RowChunk(key, start, message.stop, spec, policy, f"key {key!r}", message.group)
        self._kind = kind
        self._keys[key] = Entry(spec, message.policy, message.group, message.digest, options)
        chunk.born = message.clock
        self.chunks[key, start] = chunk
        return chunk

    def lookup(self, message: Push | Pull | PushRows | PullRows) -> Chunk:
        """Return the chunk that a push or pull is about; that of a bundle if the key is in one.

        Raises:
            KeyUseError, UnknownKeyError: no such key here, or not these elements of it.
            SpecMismatchError: another shape, dtype or storage.
            ProtocolError: cut in other places than the key is.
        """
        key = message.key
        chunk = self.chunks.get((key, message.start))
        if chunk is not None and isinstance(message, (Push, Pull)) and chunk.is_named_by(message):
            return chunk
        self._check_spec(message)
        check_sparse(key, is_sparse=self.is_sparse(key), wanted=isinstance(message, (PushRows, PullRows)))
        return self._chunk_at(key, message.start, message.stop)

    def first(self, key: Key) -> Chunk:
        """Return the first chunk of a key; that of a bundle if the key is in one.

        Raises:
            KeyUseError, UnknownKeyError: no such key here.
            ProtocolError: its first chunk is on another server.
        """
        if key not in self._keys:
            self.check_key(key)
        self.spec(key)
        bundle = self._bundle_of.get(key)
        chunk = self.chunks.get((key, 0)) if bundle is None else bundle.chunk
        if chunk is None:
            raise ProtocolError(f"key {key!r}: its first chunk is on another server")
        return chunk

    def _chunk_at(self, key: Key, start: int, stop: int) -> Chunk:
        chunk = self.chunks.get((key, start))
        if chunk is None and key in self._bundle_of and (start, stop) == (0, self._keys[key].spec.size):
            chunk = self._bundle_of[key].chunk
        elif chunk is not None and chunk.stop != stop:
            chunk = None
        if chunk is not None:
            return chunk
        here = [(one.start, one.stop) for (name, _), one in self.chunks.items() if name == key]
        if key in self._bundle_of or any(first < stop and start < last for first, last in here):
            raise ProtocolError(f"key {key!r}: asked for elements {start} to {stop}, which are no chunk of this server")
        # Who made the key may be lost, in the middle of it.
        text = f"key {key!r}: elements {start} to {stop} are not initialized, others are"
        raise UnknownKeyError(f"{text}: initialize it once more, or delete it", key=key)

    def lookup_state(self, message: GetState | PutState | GetPushes) -> Chunk:
        """Return the chunk that is saved, loaded or asked about; that of a bundle if the key is in one.

        Raises:
            KeyUseError, UnknownKeyError: no such key here, or not these elements of it.
            SpecMismatchError: another shape or dtype.
            ProtocolError: cut in other places than the key is.
        """
        key, start, stop = message.key, message.start, message.stop
        self._check_spec(message)
        if not self.is_sparse(key):
            return self._chunk_at(key, start, stop)
        for (name, _), chunk in self.chunks.items():
            if name == key and chunk.start <= start and stop == chunk.stop:
                return chunk
        raise ProtocolError(f"key {key!r}: rows {start} to {stop} are not the last ones of a chunk of this server")

    def _check_spec(self, message: Push | Pull | PushRows | PullRows | GetState | PutState | GetPushes) -> None:
        """Refuse a message about a key that is not here, or has another spec."""
        key = message.key
        if key not in self._keys:
            self.check_key(key)
        spec = self.spec(key)
        if message.shape != spec.shape or message.dtype != spec.dtype:
            check_same_spec(key, spec, TensorSpec(message.shape, message.dtype))

    def _check_new(self, message: AnyInit) -> type | None:
        """Check what new keys may be; return whether they are str or int."""
        kind = self._kind
        get_policy(message.policy)
        for key, spec in specs_of(message):
            kind = check_kind(check_key(key), kind)
            check_spec(key, spec)
        self.check_init(message)
        return kind

    # --- bundles ---

    def bundle(self, number: int) -> Bundle:
        """Return a bundle by its number.

        Raises:
            UnknownKeyError: there is none.
        """
        bundle = self._bundles.get(number)
        if bundle is None:
            text = f"no bundle has the number {number} on this server: its keys were deleted, or never initialized"
            raise UnknownKeyError(text)
        return bundle

    def bundle_of(self, key: Key) -> Bundle | None:
        """Return the bundle whose chunk a key lies in."""
        return self._bundle_of.get(key)

    def create_bundle(self, message: InitBundle, nbytes: int) -> Bundle:
        """Enter new keys as one chunk.

        Raises:
            KeyUseError, SpecMismatchError, PolicyError: a key, spec or the policy can't be.
        """
        named = specs_of(message)
        kind = self._check_new(message)
        total = TensorSpec((sum(spec.size for _, spec in named),), message.dtype)
        if nbytes != total.nbytes:
            raise ProtocolError(f"keys {name_keys(message.keys)}: expected {total.nbytes} bytes, got {nbytes}")
        first = message.keys[0]
        policy = get_policy(message.policy)
        if not policy.is_plain:
            raise PolicyError(f"keys {name_keys(message.keys)}: under policy {policy} each key is a chunk of its own")
        stop = BUNDLE_START + total.size
        chunk = Chunk(first, BUNDLE_START, stop, total, policy, f"keys {name_keys(message.keys)}", message.group)
        self._kind = kind
        for (key, spec), digest in zip(named, digests_of(message), strict=True):
            self._keys[key] = Entry(spec, message.policy, message.group, digest)
        chunk.born = message.clock
        self.chunks[first, BUNDLE_START] = chunk
        bundle = self._enter(message, chunk)
        self._bundle_of.update((key, bundle) for key in message.keys)
        return bundle

    def bundle_like(self, message: InitBundle) -> Bundle:
        """Return the bundle of these keys, which all exist, in this order; a divided one if nobody has made it.

        Raises:
            ProtocolError: a key is not whole on this server.
        """
        number = self._numbers.get(message.keys)
        for key, spec in specs_of(message) if number is None else []:
            chunk = self.chunks.get((key, 0))
            if key not in self._bundle_of and (chunk is None or chunk.size != spec.size):
                raise ProtocolError(f"key {key!r} is cut into chunks, so it can't go in a bundle")
        return self._enter(message, None) if number is None else self._bundles[number]

    def _enter(self, message: InitBundle, chunk: Chunk | None) -> Bundle:
        specs = tuple(spec for _, spec in specs_of(message))
        # Its number may be known from elsewhere.
        bundle = Bundle(self._numbers.get(message.keys, self.next_bundle), message.keys, specs, chunk)
        self.next_bundle = max(self.next_bundle, bundle.number + 1)
        self.revision += 1
        self._bundles[bundle.number] = bundle
        self._numbers[message.keys] = bundle.number
        return bundle

    def numbered(self) -> tuple[tuple[int, tuple[Key, ...]], ...]:
        """Return the number and the keys of each bundle."""
        return tuple((number, keys) for keys, number in self._numbers.items())

    def number(self, numbered: Iterable[tuple[int, tuple[Key, ...]]], following: int) -> None:
        """Give bundles the numbers that they have elsewhere; some of their keys may not be here yet."""
        here = {bundle.keys: bundle for bundle in self._bundles.values()}
        self._numbers = {keys: number for number, keys in numbered}
        self._bundles = {}
        for keys, number in self._numbers.items():
            if keys in here:
                here[keys].number = number
                self._bundles[number] = here[keys]
        self.next_bundle = following

    def complete_bundles(self) -> None:
        """Enter the bundles that have a number, but were divided before they came here."""
        for keys, number in self._numbers.items():
            if number not in self._bundles and all(key in self._keys for key in keys):
                self._bundles[number] = Bundle(number, keys, tuple(self._keys[key].spec for key in keys), None)

    def replace(self, bundle: Bundle, chunks: list[Chunk]) -> None:
        """Enter the chunks that a bundle was divided into, in its place."""
        del self.chunks[bundle.keys[0], BUNDLE_START]
        for chunk in chunks:
            self.chunks[chunk.key, 0] = chunk
            del self._bundle_of[chunk.key]


def specs_of(message: AnyInit) -> list[tuple[Key, TensorSpec]]:
    """Return each key of an init with its spec.

    Raises:
        ProtocolError: a bundle without keys, with one twice, or without a shape for each.
    """
    if not isinstance(message, InitBundle):
        return [(message.key, TensorSpec(message.shape, message.dtype))]
    keys, shapes = message.keys, message.shapes
    if not keys or not len(keys) == len(shapes) == len(set(keys)):
        raise ProtocolError(
            f"a bundle has at least one key, none twice, and a shape for each; got {len(keys)} keys, "
            f"{len(set(keys))} different ones, and {len(shapes)} shapes"
        )
    pairs = zip(message.keys, message.shapes, strict=True)
    return [(key, TensorSpec(shape, message.dtype)) for key, shape in pairs]


def digests_of(message: AnyInit) -> tuple[bytes, ...]:
    """Return the digest of each key of an init.

    Raises:
        ProtocolError: there are fewer or more than keys.
    """
    if not isinstance(message, InitBundle):
        return (message.digest,)
    if len(message.digests) != len(message.keys):
        wanted, got = len(message.keys), len(message.digests)
        raise ProtocolError(f"a bundle has a digest for each of its {wanted} keys, got {got}")
    return message.digests
