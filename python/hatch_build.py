"""Adds the programs and the native helper to a platform wheel of build.py.

Other wheels are pure: the package finds the programs elsewhere.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("ckptstore", "trainer")


class Programs(BuildHookInterface):
    """Adds the directory CKPTSTORE_WHEEL_PROGRAMS, for the platform CKPTSTORE_WHEEL_PLATFORM."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("CKPTSTORE_WHEEL_PROGRAMS")
        if not folder or self.target_name != "wheel":
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + os.environ["CKPTSTORE_WHEEL_PLATFORM"]
        for name in sorted(set(os.listdir(folder)) - set(PROGRAMS)):
            build_data["force_include"][os.path.join(folder, name)] = f"ckptstore/bin/{name}"
        for name in PROGRAMS:
            build_data["force_include"][os.path.join(folder, name)] = f"ckptstore/bin/{name}"
            build_data["shared_scripts"][os.path.join(self.root, "scripts", name)] = name
