"""nanoGPT: one process that saves one dict with torch.save, and overwrites it."""

from __future__ import annotations

import pathlib
import random
import re
import struct

from running import PYTHON, Failed, Place, run

URL, COMMIT = "https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"

SAVE, LOAD = "torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))", "checkpoint = torch.load(ckpt_path, map_location=device)"

# Replacements of these two lines.
WAYS = {
    "url": (
        "import fsspec; f = fsspec.open(f'ckptstore://nano/{out_dir}/ckpt.pt', 'wb'); h = f.open(); torch.save(checkpoint, h); f.close()",
        "import fsspec; checkpoint = torch.load(fsspec.open(f'ckptstore://nano/{out_dir}/ckpt.pt', 'rb').open(), map_location=device)",
    ),
    "save_object": (
        "import ckptstore; ckptstore.save_object(checkpoint, step=iter_num)",
        "import ckptstore; checkpoint = ckptstore.load_object(map_location=device)",
    ),
}

OPTIONS = """--dataset=drawn --device=cpu --dtype=float32 --compile=False --eval_interval=10 --eval_iters=2 --log_interval=1 --max_iters=40
    --batch_size=4 --block_size=32 --n_layer=2 --n_head=2 --n_embd=32 --gradient_accumulation_steps=1 --always_save_checkpoint=True
    --learning_rate=1e-2 --lr_decay_iters=40 --warmup_iters=5""".split()
KILLED, RESUMED = 25, 20  # the step of the kill, and the last saved step before it


def train(place: Place, way: str) -> str:
    folder = place.source("nanoGPT", URL, COMMIT)
    _data(folder / "data" / "drawn")
    text = (folder / "train.py").read_text()
    if text.count(SAVE) != 1 or text.count(LOAD) != 1:
        raise Failed("train.py does not have the lines to replace")
    theirs = _runs(place, folder, "train.py", "theirs")
    script = f"train_{way}.py"
    (folder / script).write_text(text.replace(SAVE, WAYS[way][0]).replace(LOAD, WAYS[way][1]))
    ours = _runs(place, folder, script, way)
    for what, mine, own in zip(("whole", "killed", "resumed"), ours, theirs):
        if mine != own:
            differ = [f"{a!r}, not {b!r}" for a, b in zip(mine, own) if a != b] or [f"{len(mine)} lines, not {len(own)}"]
            raise Failed(f"the {what} run prints {differ[0]}")
    if not ours[2] or not ours[2][0].startswith(f"step {RESUMED}:"):
        raise Failed(f"it was killed at {KILLED} and continued with {ours[2][:1]}")
    return f"2 lines of train.py; killed at {KILLED}, resumed from {RESUMED}, {len(ours[2])} losses of the rest as by torch.save"


def _runs(place: Place, folder: pathlib.Path, script: str, name: str) -> tuple[list[str], list[str], list[str]]:
    """Return the losses of a whole run, of a killed run, and of its resumed run."""
    def losses(out: str, *more: str, kill: bool = False) -> list[str]:
        env = place.environment(place.base / f"store-{name}", CKPTSTORE_RUN=f"{name}-{out}")
        lines = run([PYTHON, script, *OPTIONS, f"--out_dir={name}-{out}", *more], folder, env, (lambda line: line.startswith(f"iter {KILLED}:")) if kill else None)
        return [re.sub(r", time .*", "", line) for line in lines if line.startswith(("iter ", "step "))]

    whole = losses("whole")
    return whole, losses("killed", kill=True), losses("killed", "--init_from=resume")


def _data(folder: pathlib.Path) -> None:
    """Write random text, as tokens of two bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name in ("train", "val"):
        tokens = [draw.randrange(60) for _ in range(4000)]
        (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))


PROGRAMS = {f"nanogpt-{way.replace('_', '-')}": lambda place, way=way: train(place, way) for way in WAYS}
