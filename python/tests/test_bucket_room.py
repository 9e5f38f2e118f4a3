"""The warnings of the disk of an agent's store."""

import json
import pathlib
import tempfile
import unittest

from ckptstore import _room


class Room(unittest.TestCase):
    def logged(self, identity):
        """Return what is logged after a save into a store with this store.json."""
        with tempfile.TemporaryDirectory() as store, self.assertLogs("ckptstore") as logs:
            pathlib.Path(store, "store.json").write_text(json.dumps(identity))
            _room._log.warning("the first line")
            _room._report(store, "bert", lambda: 1000)
        return logs.output[1:]

    def test_directory(self):
        self.assertIn("more fit", self.logged({"store": "s"})[0])

    def test_bucket(self):
        self.assertEqual(self.logged({"store": "s", "data": "s3://models/team"}), [])


if __name__ == "__main__":
    unittest.main()
