# Writes torch_convert.sha256: for each pair of types, the SHA-256 of what
# PyTorch's copy_ makes of every element that the first type has, in the order
# of their bits. Elements that C++ leaves open are zero bytes: those of a NaN,
# and for uint32 those of an infinity, too.
#
#     python3 torch_convert.py > torch_convert.sha256
import hashlib

import torch

SMALL = "uint8 int8 uint16 int16 float16 bfloat16 float8_e4m3fn float8_e5m2"
print("#", torch.__version__)
for source in SMALL.split():
    bits = torch.uint8 if getattr(torch, source).itemsize == 1 else torch.uint16
    src = torch.arange(256**bits.itemsize, dtype=torch.int32).to(bits).view(getattr(torch, source))
    for target in (SMALL + " uint32 int32 uint64 int64 float32 float64 complex32 complex64 complex128").split():
        dst = torch.empty(src.shape, dtype=getattr(torch, target)).copy_(src)
        rows = dst.view(torch.uint8).reshape(len(src), -1)
        if dst.dtype != src.dtype and src.dtype.is_floating_point:
            wide = src.double()
            rows[wide.isnan() | (wide.isinf() & (target == "uint32"))] = 0
        print(source, target, hashlib.sha256(rows.numpy().tobytes()).hexdigest())
