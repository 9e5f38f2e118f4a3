"""PyTorch's distributed checkpoint: its FSDP example and the recipe of its tutorials, with files and with the store."""

from __future__ import annotations

import re
import socket
import textwrap

from running import PYTHON, Failed, Place, changed, run, run_own, same

RAW = "https://raw.githubusercontent.com/pytorch"
EXAMPLE, EXAMPLE_COMMIT = "torch/distributed/checkpoint/examples/fsdp_checkpoint_example.py", "2b91fa3cc56e1fcd7ef0da4aaf96c87bf709ee6e"
RECIPE, RECIPE_COMMIT = "recipes_source/distributed_checkpoint_recipe.rst", "0e52e075d53494c325e0d8cf7175537d7ad02e6d"

WAYS = {  # of the example: writer and reader
    "theirs": ("dist_cp.FileSystemWriter('plain')", "dist_cp.FileSystemReader('plain')"),
    "url": ("FsspecWriter('ckptstore://fsdp/step-1')", "FsspecReader('ckptstore://fsdp/step-1')"),
    "writer": ("ckptstore.dcp.StorageWriter('ckptstore://fsdp/step-1')", "ckptstore.dcp.StorageReader('ckptstore://fsdp/step-1')"),
}


def example(place: Place, way: str) -> str:
    """Save a model and its optimizer, load both into new ones, and print both."""
    text = changed(
        place.file("pytorch", f"{RAW}/pytorch", EXAMPLE_COMMIT, EXAMPLE),
        ("FSDP(torch.nn.Linear(4, 4).cuda(dist.get_rank()))", "FSDP(torch.nn.Linear(4, 4), device_id=torch.device('cpu'))"),
        ("    torch.cuda.set_device(rank)\n", "    torch.manual_seed(rank)\n    torch.set_printoptions(precision=10)\n"),
        ('"cpu:gloo,cuda:nccl"', '"gloo"'), ("torch.cuda.device_count()", "2"), ('"12355"', f'"{_port()}"'),
        ("import shutil\n", "import shutil\nimport ckptstore.dcp\nfrom torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter\n"),
    )
    folder = place.base / "pytorch-example"
    folder.mkdir(exist_ok=True)

    def printed(way: str) -> dict[str, list[str]]:
        writer, reader = WAYS[way]
        written = text.replace("dist_cp.FileSystemWriter(CHECKPOINT_DIR)", writer).replace("dist_cp.FileSystemReader(CHECKPOINT_DIR)", reader)
        (folder / f"{way}.py").write_text(written)
        start = run_own if way == "theirs" else run
        whole = "\n".join(start([PYTHON, f"{way}.py"], folder, place.environment(place.base / f"store-example-{way}")))
        found = re.findall(r"(Before|After) loading --- rank: (\d)\n(.*?)(?=\n\n|\nBefore|\nAfter|\Z)", whole + "\n\n", re.S)
        return {stage: sorted(f"rank {rank} {block}" for at, rank, block in found if at == stage) for stage in ("Before", "After")}

    theirs, ours = printed("theirs"), printed(way)
    same(ours, theirs)
    for block in ours["After"]:
        values = re.findall(r"(?:model|optim)(_2)?[. ](\w+): ?(.*?)(?=\nmodel|\noptim|\Z)", block, re.S)
        one, two = ([(name, value.strip()) for which, name, value in values if bool(which) == second] for second in (False, True))
        if one != two or not one:
            raise Failed(f"after loading the models differ: {block}")
    return f"2 places of {EXAMPLE.rsplit('/', 1)[1]}, 2 ranks: model and optimizer of both, as printed, are those of its own files"


# Added to the recipe's scripts to print their states.
SHOW = """
def show(model, optimizer=None):
    import hashlib
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    options = StateDictOptions(full_state_dict=True)
    states = get_state_dict(model, optimizer, options=options) if optimizer else [model.state_dict()]
    def walk(at, name):
        if isinstance(at, dict):
            for key in sorted(at, key=str): walk(at[key], f"{name}.{key}")
        elif isinstance(at, torch.Tensor):
            print("state", name, hashlib.sha256(at.detach().contiguous().numpy().tobytes()).hexdigest()[:16], flush=True)
        elif isinstance(at, (list, tuple)):
            for number, value in enumerate(at): walk(value, f"{name}.{number}")
        else:
            print("state", name, repr(at), flush=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name, state in zip(("model", "optim"), states): walk(state, name)

"""


def recipe(place: Place) -> str:
    blocks = place.file("tutorials", f"{RAW}/tutorials", RECIPE_COMMIT, RECIPE).split(".. code-block:: python\n")[1:4]
    save, load, alone = (textwrap.dedent(re.split(r"\n(?=\S)", block)[0]) for block in blocks)
    cpu = (
        ('"nccl"', '"gloo"'), ("    torch.cuda.set_device(rank)\n", "    torch.manual_seed(0)\n"), ("ToyModel().to(rank)", "ToyModel()"),
        ("model = FSDP(model)", "model = FSDP(model, device_id=torch.device('cpu'))"), ('"12355 "', f'"{_port()}"'), ("    cleanup()\n\n", "    show(model, optimizer)\n    cleanup()\n\n"),
        ("class ToyModel(", SHOW + "class ToyModel("),
    )
    save = changed(save, *cpu, ('device="cuda"', 'device="cpu"'), ("torch.cuda.device_count()", "2"))
    # The original recipe loads names that it has not saved.
    overwritten = load[load.rindex("    optimizer = torch.optim.Adam"):load.index("    dcp.load(")]
    load = changed(load, *cpu, (overwritten, ""), ("torch.cuda.device_count()", "3"))
    load = changed(load, ("    state_dict = { \"app\"", "    torch.manual_seed(9)\n    state_dict = { \"app\""))
    alone = changed(
        alone, ("class ToyModel(", "import torch.distributed as dist\n" + SHOW + "class ToyModel("), ('"model": model.state_dict(),', '"app": {"model": model.state_dict()},'),
        ('model.load_state_dict(state_dict["model"])', 'model.load_state_dict(state_dict["app"]["model"])\n    show(model)'),
    )
    folder = place.base / "pytorch-recipe"
    folder.mkdir()

    def shown(way: str, path: str) -> dict[str, list[str]]:
        env, held = place.environment(place.base / f"store-recipe-{way}"), {}
        for name, text in ("save", save), ("load", load), ("alone", alone):
            (folder / f"{way}_{name}.py").write_text(changed(text, ('CHECKPOINT_DIR = "checkpoint"', f'CHECKPOINT_DIR = "{path}"')))
            held[name] = [line for line in run([PYTHON, f"{way}_{name}.py"], folder, env) if line.startswith("state ")]
        return held

    theirs, ours = shown("theirs", "checkpoint"), shown("url", "ckptstore://recipe/step-1")
    same(ours, theirs)
    if ours["load"] != ours["save"] or ours["alone"] != [line for line in ours["save"] if line.startswith("state model.")]:
        raise Failed(f"saved {ours['save']}, loaded by 3 ranks {ours['load']}, loaded without ranks {ours['alone']}")
    return f"the URL alone: saved by 2 ranks, loaded by 3 and without a process group, {len(ours['save'])} values as by its files"


def _port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


PROGRAMS = {f"pytorch-fsdp-{way}": lambda place, way=way: example(place, way) for way in WAYS if way != "theirs"}
PROGRAMS |= {"pytorch-recipe": recipe}
