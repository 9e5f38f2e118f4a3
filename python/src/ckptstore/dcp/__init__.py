"""PyTorch Distributed Checkpoint, kept in a store.

    dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter("ckpts/step-100"))
    dcp.load(state, storage_reader=ckptstore.dcp.StorageReader("ckpts/step-100"))

DCP plans, on torch's own process groups; the bytes go through shared memory to the
trainer or agent, which writes, verifies and commits them.

    dcp.save ──▶ StorageWriter ──▶ _place      which store, run and name a path means
                     │  └────────▶ _staging    the copy of dcp.async_save
                     └───────────▶ _session    slots, commit
    dcp.load ──▶ StorageReader ──▶ _place, store/describe, store/read
"""

from ._reader import StorageReader
from ._staging import Stager
from ._writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter"]
