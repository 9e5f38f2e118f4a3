"""torchrun, also of a PyTorch that was built without libuv, as Debian's is: there,
the store of torchrun, and that of ranks which connect to it, ask for libuv whatever
USE_LIBUV says, and do not start.

    python3 launch.py TORCHRUN-ARGUMENT...
"""

import functools
import importlib

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main


def without_libuv():
    """Has stores made without libuv, where it is not there."""
    try:
        dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)
    except dist.DistStoreError:
        # In torch.distributed, the name of the module is that of its function.
        for module in (importlib.import_module("torch.distributed.rendezvous"), static_tcp_rendezvous):
            module.TCPStore = functools.partial(dist.TCPStore, use_libuv=False)


if __name__ == "__main__":
    without_libuv()
    main()
