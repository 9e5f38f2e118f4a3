"""Storage of PyTorch Distributed Checkpoint (DCP) in a store.

    dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter("ckpts/step-100"))
    dcp.load(state, storage_reader=ckptstore.dcp.StorageReader("ckpts/step-100"))

DCP plans saves and loads, on torch's own process groups. The bytes go through shared
memory to the trainer or agent, which writes, verifies and commits them.

    dcp.save ──▶ StorageWriter ──▶ _place      store, run and name of a path
                     │  └────────▶ _staging    the copy of dcp.async_save
                     └───────────▶ _session    slots, commit
    dcp.load ──▶ StorageReader ──▶ _place, store/describe, store/read
"""

from ._reader import StorageReader
from ._staging import Stager
from ._writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter"]
