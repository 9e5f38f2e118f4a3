"""Programs under PyTorch that no trainer has started."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from launch import Launches


class Alone(Launches):
    def test_a_wait_outlives_the_agent(self) -> None:
        heard = self.program("""
            import torch
            from ckptstore import _agent

            w = torch.arange(1 << 22, dtype=torch.float32)
            handle = ckptstore.save({"w": w}, step=1)
            os.kill(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid, 9)
            say([handle.wait(timeout=200), handle.wait("staged")])
            into = {"w": torch.zeros(1 << 22)}
            ckptstore.load(into, handle.checkpoint)
            say([torch.equal(into["w"], w), ckptstore.context().attempt])
        """)
        self.assertEqual(heard, [["committed", "committed"], [True, 2]])


if __name__ == "__main__":
    unittest.main()
