"""Checkpoint folders: read tensor by tensor, write shard by shard, carry the rest over."""

from __future__ import annotations

from modelopt_lite.checkpoint.dequant import DequantizedSource, Source, open_source
from modelopt_lite.checkpoint.header import TensorInfo, read_header
from modelopt_lite.checkpoint.reader import Checkpoint
from modelopt_lite.checkpoint.shards import ShardLayout, plan_layout
from modelopt_lite.checkpoint.sidecars import copy_sidecars, sidecar_files
from modelopt_lite.checkpoint.writer import StreamingWriter, parse_size

__all__ = [
    "Checkpoint",
    "DequantizedSource",
    "ShardLayout",
    "Source",
    "StreamingWriter",
    "TensorInfo",
    "copy_sidecars",
    "open_source",
    "parse_size",
    "plan_layout",
    "read_header",
    "sidecar_files",
]
