"""Names of launches, and modules whose framework is missing."""

from __future__ import annotations

import subprocess
import sys
import unittest

from launch import DEADLINE, Launches

KEY = "from ckptstore._identity import identity; print(identity().key())"


class Names(Launches):
    def key(self, **env: str) -> str:
        """Return the key of a rank whose launcher is a shell of its own."""
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **env}
        command = ["sh", "-c", '"$@"; exit', "sh", "env", *(f"{name}={value}" for name, value in rank.items()), sys.executable, "-c", KEY]
        return self.run_program(command).stdout.strip()

    def test_a_name_makes_the_key(self) -> None:
        self.assertNotEqual(self.key(), self.key(), "launchers of their own")
        named = self.key(CKPTSTORE_LAUNCH="one")
        self.assertEqual(len(named), 32)
        self.assertEqual(self.key(CKPTSTORE_LAUNCH="one"), named)
        self.assertNotEqual(self.key(CKPTSTORE_LAUNCH="two"), named)
        self.assertNotEqual(self.key(CKPTSTORE_LAUNCH="one", MASTER_PORT="29501"), named)

    def test_no_framework(self) -> None:
        """The package imports no framework, and a missing one is named with the command that installs it."""
        program = """
import sys
import ckptstore
print(sorted({"ray", "torch", "lightning", "transformers"} & set(sys.modules)))
sys.modules["ray"] = None  # as if it was not installed
try:
    ckptstore.ray
except ImportError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, env=self.environment(), check=True)
        first, second = done.stdout.splitlines()
        self.assertEqual(first, "[]")
        self.assertRegex(second, r"^ckptstore\.ray needs Ray Train 2\.60 or later: pip install 'ray\[train\]>=2\.60' \(")


if __name__ == "__main__":
    unittest.main()
