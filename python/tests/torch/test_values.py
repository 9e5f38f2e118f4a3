"""Values are encoded and decoded: known types are restored, and all others are refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import importlib.util
import io
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
import unittest
import uuid
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src"))

import torch  # noqa: E402

from ckptstore import _values  # noqa: E402
from ckptstore.errors import Error  # noqa: E402


class Colour(enum.Enum):
    RED = 1


class Mine:
    pass


class Runs:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return os.putenv, ("ckptstore_test", "ran")


KNOWN = [
    None, True, 3, 10**30, -0.0, float("inf"), "é", b"\x00\xff", [1, (2, 3)], {1: {"x": 2}}, {1, 2}, frozenset([1]), bytearray(b"x"), 1 + 2j,
    slice(1, 2), range(5), collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}), collections.deque([1, 2], 5), collections.Counter("aab"),
    pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), datetime.date(2020, 1, 2),
    datetime.timedelta(3), uuid.UUID(int=7), decimal.Decimal("1.5"), argparse.Namespace(a=1, b=[2]), types.SimpleNamespace(z=1),
    random.Random(3).getstate(), torch.float32, torch.strided, torch.Size([1, 2]), torch.device("cpu"),
]


class Values(unittest.TestCase):
    def back(self, value, **options):
        return _values.decode("key", _values.encode("key", value), **options)

    def test_what_is_known_comes_back(self) -> None:
        for value in KNOWN:
            with self.subTest(value=value):
                got = self.back(value)
                self.assertEqual(got, value)
                self.assertIs(type(got), type(value))
                self.assertIsNone(_values.loadable("key", value, _values.encode("key", value)))
        self.assertEqual(str(self.back(-0.0)), "-0.0")
        self.assertEqual(self.back(io.BytesIO(b"abc")).getvalue(), b"abc")
        self.assertEqual(self.back(collections.deque([1], 5)).maxlen, 5)

    def test_tensors_inside_values(self) -> None:
        tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
        (got, parameter, sparse) = self.back((tensor, torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()))
        self.assertTrue(torch.equal(got, tensor))
        self.assertIsInstance(parameter, torch.nn.Parameter)
        self.assertTrue(torch.equal(sparse.to_dense(), torch.eye(2)))

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "numpy is not installed")
    def test_numpy(self) -> None:
        import numpy

        arrays = [numpy.arange(5), numpy.zeros((2, 3), order="F"), numpy.array(["a"]), numpy.array([True, False]), numpy.arange(3, dtype=">f4")]
        for array in arrays:
            numpy.testing.assert_array_equal(self.back(array), array)
        for refused in (numpy.zeros(2, dtype=[("a", "i4")]), numpy.array([{"a": 2}], dtype=object), numpy.ndarray):
            data = _values.encode("key", {"x": [refused]})
            self.assertIn("numpy", _values.loadable("key", {"x": [refused]}, data) or "")
            with self.assertRaisesRegex(_values.NotAllowed, "'key' has a.* numpy.*unsafe_pickle=True"):
                _values.decode("key", data, allow=[numpy.ndarray, numpy.dtype])
            _values.decode("key", data, unsafe_pickle=True)
        for scalar in (numpy.float64(3), numpy.bool_(True), numpy.datetime64("2020-01-01"), numpy.dtype("f4")):
            self.assertEqual(self.back(scalar), scalar)
        numpy.testing.assert_equal(self.back(numpy.random.get_state()), numpy.random.get_state())
        state = numpy.random.default_rng(1).bit_generator.state
        self.assertEqual(self.back(state), state)

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "numpy is not installed")
    def test_a_dtype_that_lies_does_not_crash(self) -> None:
        # A record whose flags hide that its bytes are pointers to objects. tests/arrays has the others.
        def dtype(code: str, fields: bytes, size: str) -> bytes:
            return b"cnumpy\ndtype\n(X\x02\0\0\0" + code.encode() + b"\x89\x88tR(K\x03X\x01\0\0\0|N" + fields + size.encode("latin1") + b"tb"

        objects = dtype("O8", b"NN", "J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3f")
        record = dtype("V8", b"X\x01\0\0\0a\x85}X\x01\0\0\0a" + objects + b"K\0\x86s", "K\x08K\x01K\0")
        evil = b"\x80\x04cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85C\x01btR(K\x01K\x01\x85" + record + b"\x89C\x08AAAAAAAAtb."
        program = (
            "import sys\nfrom ckptstore import _values\n"
            "try: print(_values.decode('key', sys.stdin.buffer.read()))\n"
            "except _values.NotAllowed as error: print('refused', error)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], input=self.archive(evil), capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=120)
        self.assertEqual(done.returncode, 0, done)
        self.assertRegex(done.stdout.decode(), "^refused value 'key' has a numpy dtype 'V8'")

    def test_other_classes_are_named_and_allowed_by_name(self) -> None:
        for value, kind in ((Colour.RED, Colour), (Mine(), Mine), ({"x": [Mine()]}, Mine)):
            with self.subTest(value=value):
                data = _values.encode("key", value)
                self.assertIn(kind.__name__, _values.loadable("key", value, data) or "")
                self.assertIsNone(_values.loadable("key", value, data, allow=[kind]))
                with self.assertRaisesRegex(_values.NotAllowed, f"'key'.*{kind.__name__}"):
                    _values.decode("key", data)
                _values.decode("key", data, allow=[kind])
                _values.decode("key", data, unsafe_pickle=True)

    def test_a_random_generator_comes_back(self) -> None:
        generator = torch.Generator().manual_seed(7)
        torch.rand(3, generator=generator)
        again = _values.decode("g", _values.encode("g", generator))
        self.assertTrue(torch.equal(torch.rand(5, generator=again), torch.rand(5, generator=generator)))

    def test_what_is_there_says_what_may_take_its_place(self) -> None:
        @dataclasses.dataclass
        class Data:
            x: int = 0

        pair = collections.namedtuple("pair", "a b")
        for value, of in ((Colour.RED, Colour), (Data(), Data), (pair(1, 2), pair)):
            self.assertEqual(_values.meant(value, (Mine,)), (Mine, of))
        for value in (Colour, Mine(), None, 1, "a", (1, 2), {"a": 1}, Data):
            self.assertEqual(_values.meant(value, (Mine,)), (Mine,))

    def test_a_member_of_an_enum_is_never_changed(self) -> None:
        class Member:
            def __reduce__(self):
                return Colour, (1,), {"_value_": 2, "_name_": "BLUE"}

        with self.assertRaises(_values.NotAllowed):
            _values.decode("c", _values.encode("c", Member()), allow=[Colour])
        self.assertEqual((Colour.RED.value, Colour.RED.name), (1, "RED"))

    def test_no_function_is_called(self) -> None:
        data = _values.encode("key", Runs())
        with self.assertRaisesRegex(_values.NotAllowed, "putenv"):
            _values.decode("key", data)

    def archive(self, pickled: bytes, name: str = "data.pkl") -> bytes:
        """Return a torch.save archive with another pickle in it."""
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(_values.encode("key", ["x"]))) as of, zipfile.ZipFile(out, "w") as to:
            for entry in of.namelist():
                to.writestr(entry, pickled if entry.endswith("/data.pkl") else of.read(entry))
            if name != "data.pkl":
                to.writestr(of.namelist()[0].partition("/")[0] + "/" + name, b"")
        return out.getvalue()

    def test_no_class_is_changed(self) -> None:
        # argparse.Namespace itself, given the state (None, {"hacked": 1}): its class would have it from then on.
        evil = b"\x80\x02cargparse\nNamespace\nN}X\x06\x00\x00\x00hackedK\x01s\x86b."
        with self.assertRaisesRegex(_values.NotAllowed, "builtins.type with a state"):
            _values.decode("key", self.archive(evil))
        self.assertFalse(hasattr(argparse.Namespace, "hacked"))

    def test_attributes_of_modules_are_not_reached(self) -> None:
        for module, name in (("torch", "hub"), ("torch", "load"), ("builtins", "eval"), ("numpy", "load"), ("torch.serialization", "load"), ("builtins", "getattr")):
            with self.subTest(module=module, name=name), self.assertRaises(_values.NotAllowed):
                _values.decode("key", self.archive(b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\n."))

    def test_other_formats_are_refused(self) -> None:
        old = io.BytesIO()
        torch.save([1], old, _use_new_zipfile_serialization=False)
        for data in (old.getvalue(), b"", b"nonsense", pickle.dumps(1)):
            with self.assertRaisesRegex(Error, "'key'"):
                _values.decode("key", data)
        with self.assertRaisesRegex(_values.NotAllowed, "'key'"):
            _values.decode("key", self.archive(b"\x80\x02N.", "constants.pkl"))

    def test_what_cannot_be_pickled_is_named(self) -> None:
        with self.assertRaisesRegex(ValueError, "'key', a builtins.function"):
            _values.encode("key", lambda: 0)

    def test_torch_loads_what_is_encoded(self) -> None:
        for n in (0, 1, 100, 500, 5000, 70000):
            data = _values.encode("key", ["a" * n])
            self.assertEqual(torch.load(io.BytesIO(data), weights_only=True), ["a" * n])

    def test_a_value_that_grows_a_little_keeps_its_size(self) -> None:
        sizes = {len(_values.encode("key", {"n": n, "loss": n / 7, "text": "a" * (n % 400)})) for n in range(0, 100000, 997)}
        self.assertLessEqual(len(sizes), 3, sizes)

    def test_kept_archives_tell_values_apart(self) -> None:
        for pair in ((True, 1), (1, 1.0), (0.0, -0.0), ([True], [1]), ([0.0], [-0.0]), ("1", 1)):
            for value in pair:
                got = self.back(value)
                self.assertEqual(repr(got), repr(value))


if __name__ == "__main__":
    unittest.main()
