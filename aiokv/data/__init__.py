"""Training data: which worker and device gets what, and the file formats that MXNet reads.

Nothing here knows the network. What a sampler needs to know of the other workers is a number each.
"""

from __future__ import annotations

from aiokv.data.exchange import with_dlpack
from aiokv.data.header import IRHeader, pack_record, unpack_record
from aiokv.data.idx import read_idx
from aiokv.data.recordio import IndexedRecordReader, RecordReader, RecordWriter
from aiokv.data.sampler import ShardedSampler
from aiokv.data.sharding import shard
from aiokv.data.splitting import split_and_load, split_data

__all__ = [
    "IRHeader",
    "IndexedRecordReader",
    "RecordReader",
    "RecordWriter",
    "ShardedSampler",
    "pack_record",
    "read_idx",
    "shard",
    "split_and_load",
    "split_data",
    "unpack_record",
    "with_dlpack",
]
