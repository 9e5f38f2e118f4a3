"""The identity of a process with torch.distributed alone."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import Launches

RANKS = """
    import torch, torch.distributed as dist, torch.multiprocessing
    def train(rank, folder):
        for launch in range(2):
            dist.init_process_group("gloo", init_method=f"file://{folder}/{launch}", rank=rank, world_size=2)
            context = ckptstore.context()
            slot = save(current(), launch, bytes([context.rank] * 16))
            current().wait(slot.checkpoint, "committed")
            emit([launch, context.rank, context.world_size, context.attempt, context.job, ckptstore.all_gather_object(rank)])
            ckptstore.report({"loss": torch.tensor([0.5], dtype=torch.bfloat16)})
            dist.destroy_process_group()
            ckptstore.close()
    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, (os.path.dirname(os.path.abspath(__file__)),), nprocs=2)
"""


class Identities(Launches):
    def test_ranks_of_a_process_group(self) -> None:
        heard = self.program(RANKS)
        self.assertCountEqual([values[:4] + values[5:] for values in heard], [[launch, rank, 2, launch + 1, [0, 1]] for launch in range(2) for rank in range(2)])
        self.assertEqual(len({values[4] for values in heard}), 2)  # a second process group is another launch


if __name__ == "__main__":
    unittest.main()
