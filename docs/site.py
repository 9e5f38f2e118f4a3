"""Builds the site from the pages of the repository.

    python3 docs/site.py OUT

It needs mkdocs-material (docs/requirements.txt). The pages stay as they are: copies of them get
a navigation by kind, and links to code lead to the repository. A broken link between pages
fails the build.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = "https://github.com/ckptstore/ckptstore/blob/main"
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md", "docs", "examples/README.md", "python/README.md"]
NAVIGATION = [("How-to guides", "docs/howto"), ("Reference", "docs/reference"), ("Explanation", "docs/explanation")]
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")


def title(page: pathlib.Path) -> str:
    return next(line[2:].strip() for line in page.read_text().splitlines() if line.startswith("# "))


def copy(source: pathlib.Path, to: pathlib.Path) -> None:
    """Copies a page; links to files that are not pages lead to the repository."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copyfile(source, to)
        return

    def link(match: re.Match[str]) -> str:
        target = match[2]
        path = (source.parent / target).resolve()
        if "://" in target or path.suffix in (".md", ".svg", ".png") or not path.exists():
            return match[0]
        return f"{match[1]}{CODE}/{path.relative_to(ROOT)}{match[4]}"

    to.write_text(LINK.sub(link, source.read_text()))


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        pages = pathlib.Path(folder, "pages")
        for name in PAGES:
            path = ROOT / name
            for source in path.rglob("*") if path.is_dir() else [path]:
                if source.suffix in (".md", ".svg", ".png"):
                    copy(source, pages / source.relative_to(ROOT))
        navigation: list[object] = [{"ckptstore": "README.md"}, {"Documentation": "docs/README.md"}, {"Tutorial": "docs/tutorial.md"}]
        for kind, where in NAVIGATION:
            listed = sorted((title(page), str(page.relative_to(pages))) for page in (pages / where).glob("*.md"))
            navigation.append({kind: [{name: path} for name, path in listed]})
        navigation += [{"Architecture": "ARCHITECTURE.md"}, {"Contributing": ["CONTRIBUTING.md", "docs/contributing.md"]}, {"Changelog": "CHANGELOG.md"}]
        config = {
            "site_name": "ckptstore", "docs_dir": str(pages), "site_dir": str(pathlib.Path(sys.argv[1]).resolve()), "nav": navigation,
            "theme": {"name": "material", "font": False, "features": ["navigation.sections", "content.code.copy"]},
            "plugins": ["search"], "markdown_extensions": ["tables", "fenced_code", "toc"],
            "validation": {"omitted_files": "ignore", "anchors": "warn"},
        }
        (pathlib.Path(folder) / "mkdocs.yml").write_text(json.dumps(config))  # JSON is YAML
        return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(pathlib.Path(folder) / "mkdocs.yml")], check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
