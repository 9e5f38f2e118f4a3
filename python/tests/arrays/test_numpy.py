"""numpy's objects in values: plain ones are restored, and forged pickles are refused."""

from __future__ import annotations

import base64
import json
import pathlib
import pickle
import subprocess
import sys
import unittest
from typing import Any

import numpy
from reader import read

PROTOCOLS = (2, 3, 4, 5)

DTYPES = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G",
    ">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16", "U3", ">U3", "S3",
    "M8[ns]", "M8[25s]", "M8[D]", ">M8[us]", "M8", "m8[ms]", "m8",
]

# [arange(3, int16), [[1.5, 2.5]] in Fortran order, float32(1.5), ["a", "é"], datetime64("2020-01-01", "ns"), dtype(">i4"), str_("")], as numpy 1.26 pickles them.
OF_NUMPY_1 = {
    2: "gAJdcQAoY251bXB5LmNvcmUubXVsdGlhcnJheQpfcmVjb25zdHJ1Y3QKcQFjbnVtcHkKbmRhcnJheQpxAksAhXEDY19jb2RlY3MKZW5jb2RlCnEEWAEAAABicQVYBgAAAGxhdGluMXEGhnEHUnEIh3EJUnEKKEsBSwOFcQtjbnVtcHkKZHR5cGUKcQxYAgAAAGkycQ2JiIdxDlJxDyhLA1gBAAAAPHEQTk5OSv////9K/////0sAdHERYoloBFgGAAAAAAABAAIAcRJoBoZxE1JxFHRxFWJoAWgCSwCFcRZoCIdxF1JxGChLAUsBSwKGcRloDFgCAAAAZjhxGomIh3EbUnEcKEsDaBBOTk5K/////0r/////SwB0cR1iiWgEWBEAAAAAAAAAAADDuD8AAAAAAAAEQHEeaAaGcR9ScSB0cSFiY251bXB5LmNvcmUubXVsdGlhcnJheQpzY2FsYXIKcSJoDFgCAAAAZjRxI4mIh3EkUnElKEsDaBBOTk5K/////0r/////SwB0cSZiaARYBQAAAAAAw4A/cSdoBoZxKFJxKYZxKlJxK2gBaAJLAIVxLGgIh3EtUnEuKEsBSwKFcS9oDFgCAAAAVTFxMImIh3ExUnEyKEsDaBBOTk5LBEsESwh0cTNiiWgEWAkAAABhAAAAw6kAAABxNGgGhnE1UnE2dHE3YmgiaAxYAgAAAE04cTiJiIdxOVJxOihLBGgQTk5OSv////9K/////0sAfXE7KGgEWAIAAABuc3E8aAaGcT1ScT5LAUsBSwF0cT+GcUB0cUFiaARYDAAAAAAAworCuTXCmsOlFXFCaAaGcUNScUSGcUVScUZoDFgCAAAAaTRxR4mIh3FIUnFJKEsDWAEAAAA+cUpOTk5K/////0r/////SwB0cUtiaCJoDFgCAAAAVTBxTImIh3FNUnFOKEsDaBBOTk5LAEsESwh0cU9iY19fYnVpbHRpbl9fCmJ5dGVzCnFQKVJxUYZxUlJxU2Uu",
    4: "gASV9gEAAAAAAABdlCiMFW51bXB5LmNvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmUjAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBSwOFlGgEjAVkdHlwZZSTlIwCaTKUiYiHlFKUKEsDjAE8lE5OTkr/////Sv////9LAHSUYolDBgAAAQACAJR0lGJoA2gGSwCFlGgIh5RSlChLAUsBSwKGlGgNjAJmOJSJiIeUUpQoSwNoEU5OTkr/////Sv////9LAHSUYolDEAAAAAAAAPg/AAAAAAAABECUdJRiaAGMBnNjYWxhcpSTlGgNjAJmNJSJiIeUUpQoSwNoEU5OTkr/////Sv////9LAHSUYkMEAADAP5SGlFKUaANoBksAhZRoCIeUUpQoSwFLAoWUaA2MAlUxlImIh5RSlChLA2gRTk5OSwRLBEsIdJRiiUMIYQAAAOkAAACUdJRiaCBoDYwCTTiUiYiHlFKUKEsEaBFOTk5K/////0r/////SwB9lChDAm5zlEsBSwFLAXSUhpR0lGJDCAAAirk1muUVlIaUUpRoDYwCaTSUiYiHlFKUKEsDjAE+lE5OTkr/////Sv////9LAHSUYmggaA2MAlUwlImIh5RSlChLA2gRTk5OSwBLBEsIdJRiQwCUhpRSlGUu",
    5: "gAWV7QEAAAAAAABdlCiMEm51bXB5LmNvcmUubnVtZXJpY5SMC19mcm9tYnVmZmVylJOUKJYGAAAAAAAAAAAAAQACAJSMBW51bXB5lIwFZHR5cGWUk5SMAmkylImIh5RSlChLA4wBPJROTk5K/////0r/////SwB0lGJLA4WUjAFDlHSUUpRoAyiWEAAAAAAAAAAAAAAAAAD4PwAAAAAAAARAlGgHjAJmOJSJiIeUUpQoSwNoC05OTkr/////Sv////9LAHSUYksBSwKGlGgOdJRSlIwVbnVtcHkuY29yZS5tdWx0aWFycmF5lIwGc2NhbGFylJOUaAeMAmY0lImIh5RSlChLA2gLTk5OSv////9K/////0sAdJRiQwQAAMA/lIaUUpRoAyiWCAAAAAAAAABhAAAA6QAAAJRoB4wCVTGUiYiHlFKUKEsDaAtOTk5LBEsESwh0lGJLAoWUaA50lFKUaBtoB4wCTTiUiYiHlFKUKEsEaAtOTk5K/////0r/////SwB9lChDAm5zlEsBSwFLAXSUhpR0lGJDCAAAirk1muUVlIaUUpRoB4wCaTSUiYiHlFKUKEsDjAE+lE5OTkr/////Sv////9LAHSUYmgbaAeMAlUwlImIh5RSlChLA2gLTk5OSwBLBEsIdJRiQwCUhpRSlGUu",
}


def same(got: Any, want: Any) -> bool:
    return type(got) is type(want) and (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


class Values(unittest.TestCase):
    def assertSame(self, got: Any, want: Any) -> None:
        if not same(got, want):
            self.fail(f"got {got!r}, want {want!r}")

    def arrays(self, code: str) -> list[Any]:
        dtype = numpy.dtype(code)
        flat = numpy.arange(6).astype("i8" if dtype.kind in "Mm" else dtype).astype(dtype)
        cube = numpy.resize(flat, 24).reshape(2, 3, 4)
        return [
            flat, flat.reshape(2, 3), numpy.asfortranarray(flat.reshape(2, 3)), cube.transpose(0, 2, 1),
            flat[::2], flat[3].reshape(()), flat[:0], numpy.zeros((0, 3), dtype),
        ]

    def test_every_dtype_comes_back(self) -> None:
        for code in DTYPES:
            for want in [*self.arrays(code), self.arrays(code)[0][4]]:
                for protocol in PROTOCOLS:
                    with self.subTest(code=code, shape=want.shape, protocol=protocol):
                        got = read(pickle.dumps(want, protocol))
                        self.assertSame(got, want)
                        if isinstance(got, numpy.ndarray):
                            self.assertTrue(got.flags.writeable and got.flags.aligned)

    def test_dtypes_come_back(self) -> None:
        for code in [*DTYPES, "U0", "S0"]:
            for protocol in PROTOCOLS:
                self.assertEqual(read(pickle.dumps(numpy.dtype(code), protocol)), numpy.dtype(code))

    def test_scalars_come_back(self) -> None:
        for want in (numpy.float64("nan"), numpy.bool_(True), numpy.str_(""), numpy.bytes_(b""), numpy.str_("é"), numpy.datetime64("NaT"), numpy.timedelta64(3, "h")):
            for protocol in PROTOCOLS:
                self.assertSame(read(pickle.dumps(want, protocol)), want)

    def test_buffers_outside_of_the_pickle(self) -> None:
        for want in (numpy.arange(6.0).reshape(2, 3), numpy.asfortranarray(numpy.ones((2, 3), ">i4")), numpy.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)):
            buffers: list[pickle.PickleBuffer] = []
            data = pickle.dumps(want, 5, buffer_callback=buffers.append)
            got = read(data, [bytes(b.raw()) for b in buffers])
            self.assertSame(got, want)
            self.assertTrue(got.flags.writeable)
            if buffers:  # numpy 1 pickles the bytes of arrays with neither C's nor Fortran's order
                with self.assertRaisesRegex(ValueError, "bytes"):
                    read(data, [bytes(b.raw())[:-1] for b in buffers])

    def test_objects_are_shared_as_they_were(self) -> None:
        array = numpy.arange(3.0)
        for protocol in PROTOCOLS:
            got = read(pickle.dumps([array, array, numpy.ones(3), array.dtype], protocol))
            self.assertIs(got[0], got[1])
            self.assertSame(got[2], numpy.ones(3))

    def test_random_generators_go_on(self) -> None:
        for protocol in PROTOCOLS:
            old = numpy.random.RandomState(3)
            saved = pickle.dumps(old.get_state(), protocol)
            want, state = old.random_sample(5), read(saved)
            old.set_state(state)
            self.assertSame(old.random_sample(5), want)
            for kind in (numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64):
                new = numpy.random.Generator(kind(7))
                saved = pickle.dumps(new.bit_generator.state, protocol)
                want = new.random(5)
                new.bit_generator.state = read(saved)
                self.assertSame(new.random(5), want)

    def check(self, got: list[Any]) -> None:
        want = [numpy.arange(3, dtype="<i2"), numpy.asfortranarray([[1.5, 2.5]]), numpy.float32(1.5), numpy.array(["a", "é"]), numpy.datetime64("2020-01-01", "ns")]
        for g, w in zip(got, want):
            self.assertSame(g, w)
        self.assertEqual(got[5:], [numpy.dtype(">i4"), numpy.str_("")])

    def test_pickles_of_numpy_1(self) -> None:
        for protocol, text in OF_NUMPY_1.items():
            with self.subTest(protocol=protocol):
                data = base64.b64decode(text)
                self.assertIn(b"numpy.core.", data)
                self.check(read(data))

    def test_pickles_of_numpy_2(self) -> None:
        # A name of protocol 2 ends with its line, so a longer name may replace it.
        self.check(read(base64.b64decode(OF_NUMPY_1[2]).replace(b"numpy.core.", b"numpy._core.")))


def of(value: Any) -> bytes:
    """Return opcodes that push a value, for the middle of a pickle."""
    return pickle.dumps(value, 3)[2:-1] if isinstance(value, (bytes, tuple)) else pickle.dumps(value, 2)[2:-1]


def dtype(code: str, *state: Any) -> bytes:
    return b"cnumpy\ndtype\n" + of((code, False, True)) + b"R" + of(state) + b"b"


def record(flags: int) -> bytes:
    """Return a dtype of 8 bytes with a field of objects."""
    field = b"}" + of("a") + dtype("O8", 3, "|", None, None, None, -1, -1, 63) + b"K\x00\x86s"
    return b"cnumpy\ndtype\n" + of(("V8", False, True)) + b"R(K\x03" + of("|") + b"N" + of(("a",)) + field + b"K\x08K\x01" + of(flags) + b"tb"


F8, U2, S2, BOOL = (dtype("f8", 3, "<", None, None, None, -1, -1, 0), dtype("U2", 3, "<", None, None, None, 8, 4, 8),
                    dtype("S2", 3, "|", None, None, None, 2, 1, 0), dtype("b1", 3, "|", None, None, None, -1, -1, 0))
EMPTY = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"


def array(of_dtype: bytes, shape: Any = (1,), data: Any = b"AAAAAAAA", fortran: bool = False, version: int = 1) -> bytes:
    return EMPTY + b"(" + of(version) + of(shape) + of_dtype + of(fortran) + of(data) + b"tb"


def scalar(of_dtype: bytes, data: Any) -> bytes:
    return b"cnumpy._core.multiarray\nscalar\n(" + of_dtype + of(data) + b"tR"


def buffer(of_dtype: bytes, data: bytes, shape: Any, *more: Any) -> bytes:
    return b"cnumpy._core.numeric\n_frombuffer\n(" + of(data) + of_dtype + of(shape) + b"".join(map(of, more)) + b"tR"


def date(*unit: Any) -> bytes:
    return array(dtype("M8", 4, "<", None, None, None, -1, -1, 0, (None, unit)))


NOT_PLAIN, LIES, OTHER = "NotPlain: a.* numpy.*unsafe_pickle=True", "ValueError: ", "[A-Z][a-z]+Error: "

# The forgery, and the error that refuses the pickle.
HOSTILE = {
    "a record that hides objects behind its flags": (array(record(0)), NOT_PLAIN),
    "a record with objects": (array(record(63)), NOT_PLAIN),
    "objects of which the bytes are pointers": (array(dtype("O8", 3, "|", None, None, None, -1, -1, 63)), NOT_PLAIN),
    "objects that the flags do not tell of": (array(dtype("O8", 3, "|", None, None, None, -1, -1, 0)), NOT_PLAIN),
    "a list of objects": (array(F8, data=[1]), NOT_PLAIN),
    "void": (array(dtype("V8", 3, "|", None, None, None, 8, 1, 0)), NOT_PLAIN),
    "a scalar of objects": (scalar(dtype("O8", 3, "|", None, None, None, -1, -1, 63), b"AAAAAAAA"), NOT_PLAIN),
    "a scalar of a list": (scalar(F8, [1]), NOT_PLAIN),
    "flags that lie": (array(dtype("f8", 3, "<", None, None, None, -1, -1, 63)), LIES + "numpy dtype 'f8'"),
    "flags of another dtype": (array(dtype("f8", 3, "<", None, None, None, 8, 8, 8)), LIES),
    "item size that lies": (array(dtype("U2", 3, "<", None, None, None, 1 << 30, 4, 8)), LIES + "numpy dtype 'U2'"),
    "item size of nothing": (array(dtype("S2", 3, "|", None, None, None, 0, 1, 0), (1 << 40,), b""), LIES),
    "negative item size": (array(dtype("S2", 3, "|", None, None, None, -8, 1, 0)), LIES),
    "alignment that lies": (array(dtype("f8", 3, "<", None, None, None, 8, 1 << 20, 0)), LIES),
    "byte order of another": (array(dtype("f8", 3, "?", None, None, None, -1, -1, 0)), LIES),
    "byte order that swaps": (array(dtype("f8", 3, "S", None, None, None, -1, -1, 0)), LIES),
    "a number for the code": (b"cnumpy\ndtype\n" + of((8, False, True)) + b"R", OTHER),
    "fields of numbers": (array(dtype("f8", 3, "<", None, ("a",), {"a": 1}, -1, -1, 0)), LIES),
    "subarray of numbers": (array(dtype("f8", 3, "<", ("f8", (1 << 40,)), None, None, -1, -1, 0)), LIES),
    "metadata": (array(dtype("f8", 4, "<", None, None, None, -1, -1, 0, {"a": 1})), LIES),
    "state of version 9": (array(dtype("f8", 9, "<", None, None, None, -1, -1, 0)), LIES),
    "state of two parts": (array(dtype("f8", 3, "<")), LIES),
    "text as the state": (b"cnumpy\ndtype\n" + of(("f8", False, True)) + b"R" + of("f8") + b"b", LIES),
    "unit without its parts": (array(dtype("M8", 4, "<", None, None, None, -1, -1, 0, (None, (b"s",)))), LIES),
    "unit with metadata": (array(dtype("M8", 4, "<", None, None, None, -1, -1, 0, ({"a": 1}, (b"s", 1, 1, 1)))), LIES),
    "unit of another": (date(b"parsec", 1, 1, 1), LIES),
    "unit with code in it": (date(b"ns],O", 1, 1, 1), LIES),
    "unit of nothing": (date(b"s", 0, 1, 1), LIES),
    "unit beyond an int": (date(b"s", 1 << 40, 1, 1), LIES),
    "unit divided": (date(b"s", 1, 0, 1), LIES),
    "too few bytes": (array(F8, (100000,)), LIES + "a numpy array of 100000 elements of 8 bytes has 8 bytes"),
    "too many bytes": (array(F8, (1,), b"A" * 16), LIES),
    "a shape whose bytes wrap around": (array(F8, (1 << 32, 1 << 32), b""), LIES),
    "negative shape": (array(F8, (-1, -1)), OTHER),
    "shape of text": (array(F8, "x"), OTHER),
    "shape of floats": (array(F8, (1.0,)), OTHER),
    "65 dimensions": (array(F8, (1,) * 65), OTHER),
    "text without characters, many": (array(dtype("U0", 3, "<", None, None, None, 0, 4, 8), (1 << 40,), b""), OTHER),
    "state of an array of version 2": (array(F8, version=2), LIES),
    "state of an array of two parts": (EMPTY + of((1, (1,))) + b"b", LIES),
    "dtype that is text": (array(of("f8")), LIES),
    "character beyond Unicode": (array(U2, data=b"\xff" * 8), LIES),
    "truth beyond 1": (array(BOOL, (8,), b"\x02" * 8), LIES),
    "truth beyond 1 in a scalar": (scalar(BOOL, b"\x02"), LIES),
    "scalar of too few bytes": (scalar(F8, b"AAA"), LIES),
    "buffer too short": (buffer(F8, b"A" * 8, (2,), "C"), LIES),
    "buffer with a lying dtype": (buffer(dtype("f8", 3, "<", None, None, None, -1, -1, 63), b"A" * 8, (1,), "C"), LIES),
    "buffer of a record": (buffer(record(0), b"A" * 8, (1,), "C"), NOT_PLAIN),
    "buffer that is text": (b"cnumpy._core.numeric\n_frombuffer\n(" + of("A" * 8) + F8 + of((8,)) + of("C") + b"tR", LIES),
    "axes out of range": (buffer(F8, b"A" * 8, (1, 1), "K", (0, 7)), LIES),
    "order of another": (buffer(F8, b"A" * 8, (1,), "A"), LIES),
    "a second state for an array": (b"]" + array(F8) + b"q\x01a" + b"h\x01(K\x01" + of((1,)) + record(0) + b"\x89" + of(b"A" * 8) + b"tba", NOT_PLAIN),
    "a good second state for an array": (array(F8) + b"(K\x01" + of((1,)) + F8 + b"\x89" + of(b"B" * 8) + b"tb", NOT_PLAIN),
    "a second state for a dtype": (U2 + of((3, "<", None, None, None, 1 << 30, 4, 8)) + b"b", NOT_PLAIN),
    "a call of ndarray": (b"cnumpy\nndarray\n(K\x01\x85" + F8 + of(b"A" * 8) + of(1 << 40) + b"tR", NOT_PLAIN),
    "a new ndarray": (b"cnumpy\nndarray\nK\x01\x85\x85\x81", OTHER),
    "ndarray by OBJ": (b"(" + b"cnumpy\nndarray\nK\x05o", OTHER),
    "ndarray by INST": (b"(K\x05inumpy\nndarray\n", OTHER),
    "a new dtype": (b"cnumpy\ndtype\n" + of(("O",)) + b"\x81", OTHER),
    "reconstruct another class": (b"cnumpy._core.multiarray\n_reconstruct\n(cbuiltins\nlist\nK\x00\x85C\x01btR", NOT_PLAIN),
    "reconstruct a dtype": (array(F8).replace(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"), NOT_PLAIN),
    "an array without its state": (EMPTY, NOT_PLAIN),
    "a dtype without its state": (b"cnumpy\ndtype\n" + of(("f8", False, True)) + b"R", NOT_PLAIN),
    "an array in a list before its state": (b"]" + EMPTY + b"q\x01h\x01\x86a", LIES + "numpy array is used before"),
    "a class and no array": (b"]cnumpy\nndarray\na", NOT_PLAIN),
    "a class from the memo": (b"(" + b"cnumpy\nndarray\nq\x01K\x00\x85C\x01bcnumpy._core.multiarray\n_reconstruct\nh\x01l", NOT_PLAIN),
    "a state for a name": (b"cnumpy\nndarray\n}b", NOT_PLAIN),
    "a function of numpy": (b"cnumpy\nload\n", OTHER),
    "a class of numpy's random generators": (b"cnumpy.random._pickle\n__randomstate_ctor\n", OTHER),
}


class Hostile(unittest.TestCase):
    def child(self, pickles: dict[str, bytes]) -> list[list[str]]:
        """Use the values of pickles in a separate process, which may crash, and return its results."""
        program = pathlib.Path(__file__).with_name("reader.py")
        sent = json.dumps({name: (b"\x80\x04" + body + b".").hex() for name, body in pickles.items()})
        done = subprocess.run([sys.executable, str(program)], input=sent, capture_output=True, text=True, timeout=120)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(done.returncode, 0, f"it ended with {done.returncode} at {lines[-1:]}: {done.stderr[-500:]}")
        self.assertEqual([name for what, name in lines if what == "reads"], list(pickles))
        return [line for line in lines if line[0] != "reads"]

    def test_pickles_that_lie_are_refused(self) -> None:
        results = self.child({name: body for name, (body, _) in HOSTILE.items()})
        for (name, (_, want)), (what, text) in zip(HOSTILE.items(), results, strict=True):
            with self.subTest(name):
                self.assertEqual(what, "refused", text)
                self.assertRegex(text, "^" + want)
                self.assertLess(len(text), 600)

    def test_the_parts_of_these_pickles_are_good(self) -> None:
        # Each pickle above is refused for its forgery, not for its format.
        good = [array(F8), array(U2, data=b"A\0\0\0B\0\0\0"), array(S2, (4,)), array(BOOL, (2,), b"\0\1"), scalar(F8, b"A" * 8), buffer(F8, b"A" * 8, (1,), "C"), date(b"s", 1, 1, 1)]
        [(what, text)] = self.child({"good": b"](" + b"".join(good) + b"e"})
        self.assertEqual(what, "read", text)
        self.assertIn("['AB']", text)


if __name__ == "__main__":
    unittest.main()
