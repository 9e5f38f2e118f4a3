"""Provides the package's entry points from pyproject.toml, if the package is not installed."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import sys
import tempfile

PYTHON = pathlib.Path(__file__).resolve().parents[2]


def install() -> tempfile.TemporaryDirectory | None:
    """Make the package and its entry points available to this process and its children.

    Call it before importing fsspec. Keep the result until the end; it is None if the package
    is installed.
    """
    if any(point.name == "ckptstore" for point in importlib.metadata.entry_points(group="fsspec.specs")):
        return None
    text = (PYTHON / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(r'^\[project\.entry-points\."fsspec\.specs"\]\n(.*?)(?=^\[|\Z)', text, re.M | re.S)
    if section is None:
        raise AssertionError("pyproject.toml has no entry point for fsspec")
    points = re.findall(r'^(\S+)\s*=\s*"([^"]+)"', section[1], re.M)
    folder = tempfile.TemporaryDirectory()
    info = pathlib.Path(folder.name) / "ckptstore-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ckptstore\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\n" + "".join(f"{name} = {value}\n" for name, value in points))
    paths = [folder.name, str(PYTHON / "src")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return folder
