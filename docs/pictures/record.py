"""Records what a command prints, as an animated SVG.

    python3 record.py OUT.svg [--title TEXT] -- COMMAND...

Each line appears when the command printed it; pauses of more than two seconds are cut. The
picture ends on the last screen. Exit code: that of the command.
"""

from __future__ import annotations

import argparse
import html
import pathlib
import subprocess
import sys
import time

PAUSE = 2.0  # seconds, the longest
ROWS, WIDTH, CHAR, LINE = 36, 118, 7.25, 16  # of the screen; pixels of a character


def record(command: list[str]) -> tuple[list[tuple[float, str]], int]:
    """Returns the lines of a command with the seconds at which they appear, and its exit code."""
    lines, at, last = [], 0.0, time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        now = time.monotonic()
        at, last = at + min(now - last, PAUSE), now
        text = line.rstrip("\n").expandtabs()
        lines += [(at, text[start : start + WIDTH]) for start in range(0, max(len(text), 1), WIDTH)]
    return lines, process.wait()


def picture(title: str, lines: list[tuple[float, str]]) -> str:
    """Returns the SVG: a screen that scrolls when it is full."""
    height = min(len(lines) + 1, ROWS) * LINE + 40
    width = int(WIDTH * CHAR) + 30
    steps = [(at, max(0, number + 2 - ROWS) * LINE) for number, (at, _) in enumerate(lines)]
    scroll = [(at, shift) for number, (at, shift) in enumerate(steps) if shift and (number == 0 or steps[number - 1][1] != shift)]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="monospace" font-size="12" role="img">',
        f"<title>{html.escape(title)}</title>", f'<rect width="{width}" height="{height}" rx="6" fill="#1d2330"/>',
        f'<clipPath id="screen"><rect y="30" width="{width}" height="{height - 34}"/></clipPath>',
        f'<text x="14" y="20" fill="#8fa3c8">{html.escape(title)}</text>', '<g clip-path="url(#screen)"><g>',
    ]
    out += [f'<animateTransform attributeName="transform" type="translate" to="0 {-shift}" begin="{at:.2f}s" dur="0.01s" fill="freeze"/>' for at, shift in scroll]
    for number, (at, line) in enumerate(lines):
        shown = f'<set attributeName="visibility" to="visible" begin="{at:.2f}s"/>'
        out.append(f'<text x="14" y="{46 + number * LINE}" xml:space="preserve" fill="#e6ebf5" visibility="hidden">{shown}{html.escape(line)}</text>')
    return "\n".join([*out, "</g></g>", "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--title", help="default: the command")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    lines, code = record(options.command)
    options.out.write_text(picture("$ " + (options.title or " ".join(options.command)), lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
