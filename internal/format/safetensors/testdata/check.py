"""Opens files with the reference implementation of safetensors.

usage: python check.py FILE...

Prints "<key> <dtype> <shape>" for every tensor, in the order of the keys, and
fails if the reference does not accept a file or cannot load a tensor. Needs
the packages safetensors and numpy.
"""

import sys

from safetensors import safe_open


def check(path):
    with safe_open(path, framework="np") as f:
        print(f"{path}: {len(f.keys())} tensors, metadata {f.metadata()}")
        for key in sorted(f.keys()):
            part = f.get_slice(key)
            dtype, shape = part.get_dtype(), part.get_shape()
            print(ascii(key), dtype, shape)
            if dtype in ("BF16", "F8_E4M3", "F8_E5M2"):
                continue  # numpy has no such type
            array = f.get_tensor(key)
            if list(array.shape) != shape:
                raise SystemExit(f"{path}: {key!r} loads with shape {array.shape}, not {shape}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for path in sys.argv[1:]:
        check(path)
