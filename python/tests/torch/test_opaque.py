"""Tensors by URL whose dtype the store does not know keep PyTorch's bytes, and load as with plain DCP."""

from __future__ import annotations

import os
import subprocess
import tempfile
import unittest
import warnings

from entry_point import install

FOLDER = install()

import torch
import torch.distributed.checkpoint as dcp

import ckptstore

BINARY = os.environ.get("CKPTSTORE_BIN", "ckptstore")
LIMIT = 120


def tensors() -> dict[str, torch.Tensor]:
    complex64 = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    made = {
        "per_tensor": torch.quantize_per_tensor(torch.arange(8.0), 0.1, 0, torch.quint8),
        "per_channel": torch.quantize_per_channel(torch.arange(8.0).reshape(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8),
        "conj": complex64.conj(),
        "neg": complex64.conj().imag,
        "plain": torch.arange(6.0),
    }
    if dtype := getattr(torch, "float4_e2m1fn_x2", None):  # since PyTorch 2.8
        made["float4"] = torch.arange(16, dtype=torch.uint8).view(dtype)
    return made


def blank(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with other elements."""
    if like.is_quantized:
        return like.clone().copy_(torch.zeros(like.shape))
    if like.is_complex() or like.dtype.is_floating_point and like.element_size() > 1:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.zeros(like.shape, dtype=torch.uint8).view(like.dtype)


def elements(of: torch.Tensor) -> list[object]:
    if of.is_quantized:
        return list(of.int_repr().flatten().tolist())
    if of.element_size() == 1:
        return list(of.view(torch.uint8).flatten().tolist())
    return list(of.resolve_conj().resolve_neg().flatten().tolist())


class Opaque(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        store = os.environ["CKPTSTORE_STORE"] = os.path.join(folder.name, "store")
        self.addCleanup(os.environ.pop, "CKPTSTORE_STORE")
        self.addCleanup(self.cli, "agent", "stop", "--store", store)
        warnings.simplefilter("ignore")

    def cli(self, *words: str) -> str:
        done = subprocess.run([BINARY, *words], capture_output=True, text=True, timeout=LIMIT, check=False)
        return done.stdout + done.stderr

    def test_they_are_loaded_as_they_were_saved(self) -> None:
        want = tensors()
        dcp.save({**want, "deep": {"conj": want["conj"].clone().conj(), "text": "text"}}, checkpoint_id="ckptstore://opaque/step-1", no_dist=True)

        into = {name: blank(of) for name, of in want.items()}
        self.assertNotEqual({k: elements(v) for k, v in into.items()}, {k: elements(v) for k, v in want.items()})
        dcp.load(into, checkpoint_id="ckptstore://opaque/step-1", no_dist=True)
        for name, of in want.items():
            self.assertEqual(elements(into[name]), elements(of), name)

        read = ckptstore.open("opaque@step-1").state_dict()
        for name, of in want.items():
            self.assertEqual((read[name].dtype, elements(read[name])), (of.dtype, elements(of)), name)
        self.assertEqual(elements(read["deep"]["conj"]), elements(want["conj"].conj()))
        self.assertIn("0 findings", self.cli("verify", "--store", os.environ["CKPTSTORE_STORE"]))


if __name__ == "__main__":
    unittest.main()
