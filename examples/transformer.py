"""A small GPT, trained by FSDP2 on the bytes of a text, which resumes where it stopped.

    trainer run --name gpt --nproc 2 -- python3 examples/transformer.py --steps 60 --save-every 10

Started again by the same name, on any number of ranks, it continues from its last
checkpoint. --way chooses how it saves and loads:

    save     ckptstore.save and ckptstore.load, the default
    dcp      dcp.save with ckptstore.dcp.StorageWriter, dcp.load with its reader
    url      dcp.save with checkpoint_id="ckptstore://RUN/step-N" only
    files    PyTorch's own FileSystemWriter and FileSystemReader, below --files

Rank 0 prints each step's loss and gradient norm and reports both to the trainer, so
that `ckptstore metrics gpt` has them. A step depends only on its number, the
ranks' number and the state before it: the losses of two runs are the same bits.
"""

import argparse
import pathlib

import ckptstore
import ckptstore.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TEXT = pathlib.Path(__file__).resolve().parent.parent / "LICENSE"


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(text, step, rows, context):
    """The rows of a step, of all ranks together: (rows, context + 1) bytes."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (rows,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def save(options, model, optimizer, step):
    """Save the state after a step. Way "save" returns once it is copied."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    run = ckptstore.context().run
    if options.way == "save":
        return ckptstore.save(state, step=step)
    if options.way == "dcp":
        dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter(f"ckptstore://{run}/step-{step}"))
    elif options.way == "url":
        dcp.save(state, checkpoint_id=f"ckptstore://{run}/step-{step}")
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(options.files / f"step-{step}"))


def load(options, model, optimizer, resume):
    """Load a checkpoint into the model and its optimizer, and return its step."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    run = ckptstore.context().run
    if options.way == "save":
        ckptstore.load(state, ref=resume)
    elif options.way == "dcp":
        dcp.load(state, storage_reader=ckptstore.dcp.StorageReader(f"ckptstore://{run}/{resume}"))
    elif options.way == "url":
        name = resume.rpartition(".a")[0]  # step-20 of step-20.a1
        dcp.load(state, checkpoint_id=f"ckptstore://{run}/{name}")
    else:
        dcp.load(state, storage_reader=dcp.FileSystemReader(resume))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def newest(files):
    """The newest complete checkpoint of PyTorch's own files, or None."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in files.glob("step-*/.metadata")]
    return files / f"step-{max(steps)}" if steps else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("save", "dcp", "url", "files"), default="save")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    parser.add_argument("--files", type=pathlib.Path, default=pathlib.Path("gpt-files"))
    parser.add_argument("--resume", help="for --way files: the directory to resume from")
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="sequences a step, of all ranks together")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    context = ckptstore.context()
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)

    torch.manual_seed(1)
    length = 64
    model = GPT(options.width, options.layers, heads=4, context=length)
    mesh = dist.init_device_mesh("cpu", (context.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    resume, done = context.resume, 0
    if options.way == "files":
        resume = options.resume or newest(options.files)
    if resume:
        done = load(options, model, optimizer, resume)
    if context.rank == 0:
        print(f"on {context.world_size} ranks after step {done}" + (f", from {resume}" if resume else ""), flush=True)

    handle = None
    for step in range(done + 1, options.steps + 1):
        rows = batch(text, step, options.rows, length)[context.rank :: context.world_size]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        metrics = {"loss": loss.item() / context.world_size, "norm": norm.item()}
        if context.rank == 0:
            print(f"step {step} loss {metrics['loss']!r} norm {metrics['norm']!r}", flush=True)
        request = ckptstore.report(metrics, step=step)
        if step % options.save_every == 0 or step == options.steps or request == "preempt":
            handle = save(options, model, optimizer, step)
        if request:
            break
    if handle is not None:
        handle.wait("committed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
