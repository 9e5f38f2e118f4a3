"""A local folder that a program creates from a URL is named when the program ends."""

from __future__ import annotations

import os
import unittest

from launch import Launches

MAKES = """
    import pathlib
    os.makedirs("ckptstore:/acc/step-1")
    pathlib.Path("ckptstore:/acc/step-1/model.bin").touch()
"""


class Folders(Launches):
    def printed(self, source: str, **env: str) -> list[str]:
        process = self.start(source, **env)
        out, err = process.communicate()
        self.assertEqual(process.returncode, 0, out + err)
        return [line for line in err.splitlines() if "is a local folder" in line]

    def test_one_that_was_made(self) -> None:
        folder = os.path.realpath(os.path.join(self.folder, "ckptstore:"))
        (line,) = self.printed(MAKES)
        self.assertTrue(line.startswith(f"ckptstore: {folder} is a local folder that this program made from a URL: its files are in no store"), line)
        self.assertIn("ckptstore.save", line)
        self.assertEqual(self.printed("pass"), [], "of an earlier program")
        (line,) = self.printed("os.makedirs('ckptstore:/acc/step-2')")
        self.assertIn(folder, line)

    def test_in_a_working_directory_of_later(self) -> None:
        (line,) = self.printed("os.mkdir('inner')\nos.chdir('inner')\nos.mkdir('ckptstore:')")
        self.assertIn("/inner/ckptstore: is a local folder", line)
        (line,) = self.printed("os.chdir('inner')\nos.rmdir('ckptstore:')\nos.chdir('..')\nos.mkdir('ckptstore:')")
        self.assertNotIn("/inner/", line)

    def test_by_one_process_of_a_launch(self) -> None:
        self.assertEqual(self.printed(MAKES, RANK="1", WORLD_SIZE="2"), [])
        forks = "import multiprocessing as m; c = m.get_context('fork').Process(target=print); c.start(); c.join(); assert c.exitcode == 0"
        leaves = "child = os.fork(); child or sys.exit(0); assert os.waitpid(child, 0)[1] == 0"
        self.assertEqual(len(self.printed("os.makedirs('ckptstore:/more')\n" + forks + "\n" + leaves, RANK="0", WORLD_SIZE="2")), 1)

    def test_where_the_working_directory_is_gone(self) -> None:
        self.assertEqual(self.printed("os.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')"), [])


if __name__ == "__main__":
    unittest.main()
