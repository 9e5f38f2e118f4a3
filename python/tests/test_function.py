"""Training functions that report."""

import json
import textwrap
import unittest
from typing import Any

from launch import Launches

from ckptstore._function import signature

TRAINS = """
    import logging
    logging.basicConfig()
    {train}
    if __name__ == "__main__":
        ckptstore.run(train)
        emit("over")
"""


class Signatures(unittest.TestCase):
    def test_what_a_function_takes(self) -> None:
        class Callable:
            def __call__(self, config, reporter):  # type: ignore[no-untyped-def]
                return None

        for train, wanted in (
            (lambda config: 0, []),
            (lambda anything: 0, []),
            (lambda config, reporter: 0, ["reporter"]),
            (lambda config, checkpoint: 0, ["checkpoint"]),
            (lambda config, checkpoint, reporter: 0, ["checkpoint", "reporter"]),
            (lambda config, *, reporter: 0, ["reporter"]),
            (lambda config, depth=3: 0, []),
            (Callable(), ["reporter"]),
        ):
            self.assertEqual(signature(train), wanted)

    def test_what_is_no_training_function(self) -> None:
        async def waits(config):  # type: ignore[no-untyped-def]
            return None

        for train in (3, lambda: 0, lambda config, other: 0, lambda *configs, other: 0, waits):
            with self.assertRaisesRegex(TypeError, "not a training function"):
                signature(train)  # type: ignore[arg-type]


class Functions(Launches):
    def train(self, train: str, *flags: str, code: int = 0, world: int = 1, quiet: bool = True) -> list[Any]:
        return self.trained(world, TRAINS.replace("    {train}", textwrap.indent(textwrap.dedent(train), "    ")), *flags, code=code, quiet=quiet)

    def reported(self) -> list[dict[str, Any]]:
        """Return the reports in the log."""
        done = self.ckptstore("events", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line]
        return [line for line in lines if "report" in json.dumps([line.get("type"), line.get("subject"), line.get("kind")])]

    def test_reports(self) -> None:
        heard = self.train("""
            def train(config, reporter):
                config["own"] = 1
                for step in range(3):
                    reporter(loss=step)
                reporter({"loss": 9, "step": 100, "done": True})
                try:
                    reporter(loss=0)
                except ckptstore.AlreadyDone:
                    emit("done")
        """, world=2)
        self.assertCountEqual(heard, ["done", "over"] * 2)
        self.assertEqual(len(self.reported()), 4)

    def test_generators_and_results(self) -> None:
        for train, count in (
            ("def train(config):\n    yield 0\n    yield {'loss': 1}\n    yield 2.5\n", 3),
            ("def train(config):\n    yield {'loss': 1, 'done': True}\n    emit('never')\n    yield 2\n", 1),
            ("def train(config):\n    yield 1\n    return {'loss': 2}\n", 2),
            ("def train(config):\n    return iter([1, 2])\n", 2),
            ("def train(config):\n    return 0\n", 1),
            ("def train(config):\n    return {'loss': 1}\n", 1),
        ):
            with self.subTest(train):
                before = len(self.reported()) if self.ckptstore("jobs").returncode == 0 else 0
                self.assertEqual(self.train(train), ["over"])
                self.assertEqual(len(self.reported()) - before, count)

    def test_no_report_is_warned_of_unless_the_trainer_is_quiet(self) -> None:
        for quiet in (False, True):
            with self.subTest(quiet=quiet):
                self.assertEqual(self.train("def train(config): pass", quiet=quiet), ["over"])
                self.assertEqual("function ran until completion without reporting" in self.output, not quiet, self.output)

    def test_what_is_no_result(self) -> None:
        for train in ("def train(config): return 'x'", "def train(config): yield None", "def train(config): return {'a': [1]}"):
            self.train(train, code=1)
            self.assertIn("TypeError", self.output)

    def test_a_failure_is_told_after_the_results(self) -> None:
        self.train("""
            def train(config, reporter):
                reporter(loss=1)
                raise RuntimeError("out of patience")
        """, code=1)
        self.assertIn("RuntimeError: out of patience", self.output)
        self.assertEqual(len(self.reported()), 1)

    STOP = """
        import subprocess
        def stop(how):
            subprocess.run([os.environ["CKPTSTORE_BIN"], how, "train", "--store", os.environ["CKPTSTORE_STORE"]], check=True, stdout=subprocess.DEVNULL)
    """

    def test_a_stop_reaches_the_function(self) -> None:
        heard = self.train(self.STOP + """
        def train(config, reporter):
            try:
                while True:
                    if reporter._count == 2:
                        stop("preempt")
                    reporter(loss=1)
            except ckptstore.StopRequested as stopped:
                emit(stopped.why)
                current().wait(save(current(), 5, b"a" * 16).checkpoint, "committed")
                raise
        """, code=75)
        self.assertEqual(heard, ["preempt", "over"])

    def test_a_stop_reaches_a_generator(self) -> None:
        heard = self.train(self.STOP + """
        def train(config):
            yield 1
            stop("stop")
            try:
                while True:
                    yield 2
            except ckptstore.StopRequested as stopped:
                emit(stopped.why)
            finally:
                emit("cleaned")
        """)
        self.assertEqual(heard, ["stop", "cleaned", "over"])

    def test_a_stop_that_nobody_has_requested(self) -> None:
        self.train("def train(config): raise ckptstore.StopRequested('stop')", code=1)
        self.assertIn("no stop was requested", self.output)

    def test_the_config(self) -> None:
        heard = self.train("""
            def train(config, checkpoint):
                emit([config, bool(checkpoint)])
                current().wait(save(current(), 1, b"a" * 16).checkpoint, "committed")
                return 1
        """, "--set", "lr=0.5")
        self.assertEqual(heard, [[{"lr": 0.5}, False], "over"])
        heard = self.train("def train(config, checkpoint):\n    emit(checkpoint.resume)\n    return 1\n")
        self.assertEqual(heard, ["step-1.a1", "over"])
