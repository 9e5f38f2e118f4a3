"""Times PyTorch DCP's coordinator on the input of `ckptstore bench plan`.

The same tensors, shapes and boxes, as the write items that DCP makes of
DTensors, through DCP's own functions: unpickle all local plans (decode),
dedup_save_plans (dedup), create_default_global_save_plan and the merge of
planner_data (global), _validate_global_plan (validate), pickle of Metadata
without storage_data (encode). Seconds are medians; the keys of the JSON are
those of `ckptstore bench plan --json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import pickle
import resource
import statistics
import sys
import time
from collections import ChainMap

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Box = tuple[list[int], list[int]]  # offsets, sizes
HIDDEN, WIDE = 8192, 28672
LAYER: list[tuple[str, list[int], int]] = [  # name, shape, dimension that tensor parallelism cuts
    ("self_attn.q_proj.weight", [HIDDEN, HIDDEN], 0),
    ("self_attn.k_proj.weight", [HIDDEN // 8, HIDDEN], 0),
    ("self_attn.v_proj.weight", [HIDDEN // 8, HIDDEN], 0),
    ("self_attn.o_proj.weight", [HIDDEN, HIDDEN], 1),
    ("mlp.gate_proj.weight", [WIDE, HIDDEN], 0),
    ("mlp.up_proj.weight", [WIDE, HIDDEN], 0),
    ("mlp.down_proj.weight", [HIDDEN, WIDE], 1),
    ("input_layernorm.weight", [HIDDEN], -1),
    ("post_attention_layernorm.weight", [HIDDEN], -1),
]


def part(box: Box, dim: int, i: int, n: int) -> Box:
    offsets, sizes = list(box[0]), list(box[1])
    size = -(-sizes[dim] // n)
    low = min(i * size, sizes[dim])
    offsets[dim], sizes[dim] = offsets[dim] + low, min(size, sizes[dim] - low)
    return offsets, sizes


def groups(ranks: int) -> int:
    return next(n for n in (8, 4, 2, 1) if ranks % n == 0)


def cut(layout: str, shape: list[int], split: int, rank: int, ranks: int) -> Box:
    box: Box = ([0] * len(shape), list(shape))
    n = groups(ranks)
    if layout == "shard0":
        return part(box, 0, rank, ranks)
    if layout == "hsdp":
        return part(box, 0, rank % (ranks // n), ranks // n)
    if layout == "fsdp-tp":
        if split >= 0:
            box = part(box, split, rank % n, n)
        return part(box, 0, rank // n, ranks // n)
    return box


def local_plan(layout: str, rank: int, ranks: int, tensors: int) -> SavePlan:
    items, paths = [], {}
    for i in range(tensors):
        name, shape, split = LAYER[i % len(LAYER)]
        fqn = f"model.layers.{i // len(LAYER)}.{name}"
        offsets, sizes = cut(layout, shape, split, rank, ranks)
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=torch.bfloat16), size=torch.Size(shape))
        items.append(WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
        paths[fqn] = (fqn,)
    return SavePlan(items, planner_data=paths)


def once(data: list[bytes]) -> tuple[dict[str, float], list[SavePlan], int]:
    seconds: dict[str, float] = {}
    began = lap = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal lap
        now = time.perf_counter()
        seconds[name], lap = now - lap, now

    plans = [pickle.loads(d) for d in data]
    stage("decode")
    deduped = dedup_save_plans(plans)
    stage("dedup")
    plan, metadata = create_default_global_save_plan(deduped)
    metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*[p.planner_data for p in plan])))
    stage("global")
    errors = _validate_global_plan(plan, metadata)
    if errors:
        raise SystemExit(f"validate the global plan: {errors[0]}, and {len(errors) - 1} more")
    stage("validate")
    size = encode(metadata)
    stage("encode")
    seconds["total"] = time.perf_counter() - began
    return seconds, plan, size


def encode(metadata: Metadata) -> int:
    return len(pickle.dumps(metadata))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512, help="ranks that save (512)")
    parser.add_argument("--tensors", type=int, default=500, help="tensors of the model (500)")
    parser.add_argument("--layout", default="shard0", choices=("shard0", "fsdp-tp", "hsdp", "replicated"))
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the medians are printed (3)")
    given = parser.parse_args()
    if min(given.ranks, given.tensors, given.runs) < 1:
        parser.error("--ranks, --tensors and --runs: want at least 1 of each")

    data = [pickle.dumps(local_plan(given.layout, r, given.ranks, given.tensors)) for r in range(given.ranks)]
    laps: list[dict[str, float]] = []
    load, size = [0] * given.ranks, 0
    for _ in range(given.runs):
        gc.collect()  # what the run before has left behind is not this one's
        seconds, plan, size = once(data)
        laps.append(seconds)
        load = [sum(2 * math.prod(i.tensor_data.chunk.sizes) for i in p.items if i.tensor_data) for p in plan]
        del plan
    report = {
        "bench": "plan",
        "by": f"PyTorch {torch.__version__}",
        "layout": given.layout,
        "ranks": given.ranks,
        "tensors": given.tensors,
        "items": given.ranks * given.tensors,
        "seconds": {k: round(statistics.median(lap[k] for lap in laps), 6) for k in laps[0]},
        "metadata_bytes": size,
        "imbalance": max(load) * given.ranks / sum(load),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
