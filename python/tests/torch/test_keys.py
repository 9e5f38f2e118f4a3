"""Keys that PyTorch's planner converts to strings: restored ones, and the warning of a save."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from launch import Launches

SAVES = """
    import logging
    import torch
    import torch.distributed.checkpoint as dcp
    import ckptstore.dcp

    told = []
    class Told(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
    logging.getLogger("ckptstore").addHandler(Told())
    logging.getLogger("ckptstore").propagate = False

    def keys():
        found = [text for text in told if "PyTorch's planner" in text]
        told.clear()
        return found

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()

    def save(state, way, name):
        if way == "url":
            dcp.save(state, checkpoint_id=f"ckptstore://train/{name}", no_dist=True)
        else:
            dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter(f"ckptstore://train/{name}"), no_dist=True)
        return keys()

    def moments(state):
        again = torch.optim.AdamW(model.parameters())
        again.load_state_dict(state)
        return all(torch.equal(moment, again.state[p][name]) for p in model.parameters() for name, moment in optimizer.state[p].items())

    way = sys.argv[1]
    emit(save({"optimizer": optimizer.state_dict(), "model": torch.nn.Sequential(model).state_dict()}, way, "step-1"))
    state = {"optimizers": [optimizer.state_dict()], "epochs": {3: torch.ones(1), 4: 0.5}}
    emit(save(state, way, "step-2"))
    emit(save(state, way, "step-3"))
    read = ckptstore.open("train@step-3").state_dict()
    emit([moments(read["optimizers"][0]), sorted(read["epochs"]), sorted(read)])
    emit(moments(ckptstore.open("train@step-1").state_dict()["optimizer"]))
    into = {"optimizers": [optimizer.state_dict()], "epochs": {3: torch.zeros(1), 4: 0.0}}
    dcp.load(into, checkpoint_id="ckptstore://train/step-3", no_dist=True) if way == "url" else dcp.load(into, storage_reader=ckptstore.dcp.StorageReader("ckptstore://train/step-3"), no_dist=True)
    emit([into["epochs"][3].item(), into["epochs"][4], into["epochs"]["4"]])
    emit(keys())
"""

OF_PYTORCH = """
    import logging
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"epochs": {3: torch.ones(1)}, "model": {"0.weight": torch.ones(1)}}, checkpoint_id=sys.argv[1], no_dist=True)
    logging.basicConfig()
    if sys.argv[2] == "quiet":
        logging.getLogger("ckptstore").setLevel("ERROR")
    for _ in range(2):
        emit(list(ckptstore.open(sys.argv[1]).state_dict()["epochs"]))
"""


class Keys(Launches):
    def test_by_pytorchs_planner(self) -> None:
        for way in ("url", "writer"):
            with self.subTest(way):
                plain, first, second, read, alone, loaded, told = self.program(SAVES, way, CKPTSTORE_STORE=f"{self.store}-{way}")
                self.addCleanup(self.run_program, [self.environment()["CKPTSTORE_BIN"], "agent", "stop", "--store", f"{self.store}-{way}"])
                self.assertEqual(plain, [])  # an optimizer's keys are restored, and a model's keys are strings
                self.assertEqual(len(first), 1, first)
                self.assertIn("in epochs ('3'): dcp.load fills tensors of a state dict that has the original keys, but adds other values under the strings", first[0])
                self.assertEqual(second, [])  # once in a process
                self.assertEqual(read, [True, ["3", "4"], ["epochs", "optimizers"]])
                self.assertTrue(alone)
                self.assertEqual(loaded, [1.0, 0.0, 0.5])  # like PyTorch's planner
                self.assertEqual(told, [])

    def test_in_files_of_pytorch(self) -> None:
        for how, times in (("loud", 1), ("quiet", 0)):
            with self.subTest(how):
                process = self.start(OF_PYTORCH, f"{self.folder}/files-{how}", how)
                out, err = process.communicate(timeout=240)
                self.assertEqual((process.returncode, out.count('EMIT ["3"]')), (0, 2), out + err)
                self.assertEqual(err.count("are strings in this checkpoint, because PyTorch's planner converts them, in epochs ('3')"), times, err)


if __name__ == "__main__":
    unittest.main()
