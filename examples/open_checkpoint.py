"""Inspect a checkpoint: its contents, one tensor, a corner of it.

    python3 examples/open_checkpoint.py gpt@latest --store ckpts
    python3 examples/open_checkpoint.py gpt@step-60 --store ckpts --tensor model.head.weight

It needs no trainer and no GPU, and PyTorch or numpy only to hold the data.
"""

import argparse
import math

import ckptstore


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("ref", help="RUN, RUN@NAME, an ID, or the path of a DCP directory or safetensors file")
    arguments.add_argument("--store", help="directory or URL (default: $CKPTSTORE_STORE)")
    arguments.add_argument("--tensor", help="the tensor to read a corner of (default: the largest)")
    given = arguments.parse_args()

    with ckptstore.open(given.ref, store=given.store) as checkpoint:
        print(f"{checkpoint.ref}: step {checkpoint.step}, saved by {checkpoint.world_size} ranks")
        for name, tensor in checkpoint.tensors.items():
            print(f"  {name:40} {tensor.dtype:10} {list(tensor.shape)}")
        for name, value in checkpoint.objects.items():
            print(f"  {name:40} {value.nbytes} bytes")
        if not checkpoint.tensors:
            return
        name = given.tensor or max(checkpoint.tensors, key=lambda each: math.prod(checkpoint.tensors[each].shape))
        # The first two elements of each dimension: this reads 64 KiB, however large the tensor is.
        corner = checkpoint.tensors[name][tuple(slice(0, 2) for _ in checkpoint.tensors[name].shape)]
        print(f"the corner of {name}:\n{corner}")


if __name__ == "__main__":
    main()
