"""An unpickler of numpy's objects and of Python's plain ones.

As a program it reads pickles and uses their values. Its input is a JSON object of names and
pickles in hexadecimal; its output is a line of JSON for each.
"""

from __future__ import annotations

import copy
import io
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src"))

from ckptstore import _values_numpy  # noqa: E402

PYTHON = {
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
    ("__builtin__", "bytes"): bytes,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "list"): list,
}


class Reader(_values_numpy.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return self.find_numpy(module, name) or PYTHON[module, name]


def read(data: bytes, buffers: Any = None) -> Any:
    return Reader(io.BytesIO(data), buffers=buffers).load()


def use(value: Any) -> str:
    """Use an array as a training would."""
    out = [repr(value), str(value), repr(copy.deepcopy(value))]
    for part in value if isinstance(value, list) else [value]:
        out.append(repr(part.tolist()) if hasattr(part, "tolist") else "")
    return " ".join(out)


if __name__ == "__main__":
    for name, text in json.load(sys.stdin).items():
        print(json.dumps(["reads", name]), flush=True)  # the last line, if it crashes
        try:
            used = use(read(bytes.fromhex(text)))
        except Exception as error:
            print(json.dumps(["refused", f"{type(error).__name__}: {error}"]), flush=True)
        else:
            print(json.dumps(["read", used]), flush=True)
