"""Libraries used in a training loop: each way saves their state, and the loop is killed and resumed."""

from __future__ import annotations

from running import PYTHON, Failed, Place, run, same

STEPS, INTERVAL, KILLED = 20, 5, 12

# The template of all loops. setup creates model, optimizer, state (a dict of the rest) and loss(); save and load depend on the way.
LOOP = """
import os, time, torch, ckptstore
torch.manual_seed(0 if os.environ.get("DIES") else 1)  # state that is not restored differs
step = 0
{setup}
{load}
for step in range(step + 1, %d):
    value = loss()
    {backward}
    optimizer.step(); optimizer.zero_grad()
    print(f"step {{step}} loss {{value.item()!r}}", flush=True)
    if step %% %d == 0:
        {save}
    if step == %d and os.environ.get("DIES"): time.sleep(600)
""" % (STEPS + 1, INTERVAL, KILLED)

WHOLE = '{"step": step, "rng": torch.get_rng_state(), "model": model.state_dict(), "optimizer": optimizer.state_dict(), **{name: one.state_dict() for name, one in state.items()}}'
LOADED = """
if kept is not None:
    step = kept["step"]; torch.set_rng_state(kept["rng"]); model.load_state_dict(kept["model"]); optimizer.load_state_dict(kept["optimizer"])
    for name, one in state.items(): one.load_state_dict(kept[name])
"""
# Statements that save, and statements that load.
TORCH = (f"torch.save({WHOLE}, 'own.pt')", "kept = torch.load('own.pt', weights_only=False) if os.path.exists('own.pt') else None" + LOADED)
OBJECT = (f"ckptstore.save_object({WHOLE}, step=step)", "kept = ckptstore.load_object(weights_only=False)" + LOADED)
SAVE = (
    'at["step"] = step; ckptstore.save(at, model=model, optimizer=optimizer, step=step)',
    'at = {"step": 0, "rng": ckptstore.rng_state(), **state}; ckptstore.load(at, model=model, optimizer=optimizer, ref="resume"); step = at["step"]',
)
FROZEN = (SAVE[0].replace("step=step)", 'step=step, frozen=["*base_layer*", "*embedding*"])'), SAVE[1])
RANKED = tuple(line.replace("**state", '"loader": ckptstore.per_rank(state["loader"])') for line in SAVE)
ACCELERATE = ("accelerator.save_state('own')", "if os.path.exists('own'): accelerator.load_state('own'); step = count.step")

TINY = """
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 256))
def loss(): return model(torch.randn(8, 256)).square().mean()
state = {}
"""
# Every base weight is quantized and does not change; a head is trained.
HEAD = """
head = torch.nn.Linear(256, 4)
model = torch.nn.ModuleDict({"base": base, "head": head})
def loss(): return head(torch.nn.functional.dropout(base(torch.randn(8, 256)), 0.1)).square().mean()
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
state = {}
"""

# The package, the loop's setup, and the statements with which each way saves and loads. The first way is the package's own.
LOOPS: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "accelerate": ("accelerate", """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
class Count:
    def state_dict(self): return {"step": step}
    def load_state_dict(self, kept): self.step = kept["step"]
count = Count()
module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
model, optimizer, scheduler = accelerator.prepare(module, adamw, torch.optim.lr_scheduler.OneCycleLR(adamw, 1e-2, total_steps=20))
accelerator.register_for_checkpointing(count)
def loss():
    loss = model(torch.randn(8, 16)).square().mean()
    accelerator.backward(loss); optimizer.step(); scheduler.step(); optimizer.zero_grad()
    return loss
state = {"scheduler": scheduler}
""", {"theirs": ACCELERATE, "save": SAVE, "save-object": OBJECT}),
    "peft": ("peft", """
import peft
from transformers import LlamaConfig, LlamaForCausalLM
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4))
model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
def loss():
    tokens = torch.randint(64, (4, 16))
    return model(input_ids=tokens, labels=tokens).loss
state = {}
""", {"theirs": TORCH, "save": SAVE, "frozen": FROZEN, "save-object": OBJECT}),
    "torchdata": ("torchdata", TINY + """
from torchdata.stateful_dataloader import StatefulDataLoader
loader = StatefulDataLoader([torch.full((8, 256), float(number)).sin() for number in range(12)], batch_size=None, shuffle=True, num_workers=2)
state = {"loader": loader}
model[2].p = 0.0  # a new iterator draws from the dropout's random generator
batches = iter(())
def loss():
    global batches
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader); batch = next(batches)
    return model(batch).square().mean()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""", {"theirs": TORCH, "per-rank": RANKED, "save-object": OBJECT}),
    **{f"torchao-{name.lower()}": ("torchao", f"{TINY}\nimport torchao.optim\noptimizer = torchao.optim.{name}(model.parameters(), lr=1e-3)",
        {"theirs": TORCH, "save": SAVE, "save-object": OBJECT}) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{f"torchao-{name.lower()}": ("torchao", f"""
from torchao.quantization import quantize_, {name}Config
base = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).requires_grad_(False)
quantize_(base, {name}Config())
{HEAD}""", {"theirs": TORCH, "save": SAVE, "save-object": OBJECT}) for name in ("Int8WeightOnly", "Float8WeightOnly")},
    "bitsandbytes": ("bitsandbytes", f"""
from bitsandbytes.nn import Linear4bit, Params4bit
base = torch.nn.Sequential(Linear4bit(256, 256, compute_dtype=torch.float32, quant_type="nf4"), torch.nn.GELU()).to("cpu")
{HEAD}
class Quantized:  # load_state_dict of a Linear4bit does not accept its own state_dict
    def state_dict(self): return base.state_dict()
    def load_state_dict(self, kept):
        stats = {{name.removeprefix("0.weight."): value for name, value in kept.items() if name.startswith("0.weight.")}}
        base[0].weight = Params4bit.from_prequantized(kept["0.weight"], stats, device="cpu", module=base[0])
        base[0].bias.data.copy_(kept["0.bias"])
model = head
state = {{"base": Quantized()}}
""", {"theirs": TORCH, "save-object": OBJECT}),
}


def train(place: Place, name: str) -> str:
    package, setup, ways = LOOPS[name]
    place.needs(package)
    folder = place.base / f"loop-{name}"
    backward = "pass" if name == "accelerate" else "value.backward()"

    def losses(way: str) -> dict[str, list[str]]:
        here = folder / way
        here.mkdir(parents=True)
        (here / "loop.py").write_text(LOOP.format(setup=setup, save=ways[way][0], load=ways[way][1], backward=backward))
        env = place.environment(place.base / f"store-loop-{name}-{way}")
        killed = run([PYTHON, "loop.py"], here, {**env, "DIES": "1"}, lambda line: line.startswith(f"step {KILLED} "))
        resumed = run([PYTHON, "loop.py"], here, env)
        return {"killed": [one for one in killed if one.startswith("step ")], "resumed": [one for one in resumed if one.startswith("step ")]}

    theirs, *ours = ways
    own = losses(theirs)
    first = KILLED - KILLED % INTERVAL
    if not own["resumed"] or not own["resumed"][0].startswith(f"step {first + 1} ") or len(own["resumed"]) != STEPS - first:
        raise Failed(f"its own resume prints {own['resumed'][:1]}")
    if own["resumed"][:KILLED - first] != own["killed"][first:]:
        raise Failed(f"its own resume continues with {own['resumed'][0]!r}, not {own['killed'][first]!r}")
    for way in ours:
        try:
            same(losses(way), own)
        except Failed as why:
            raise Failed(f"{way}: {why}") from why
    return f"killed at {KILLED}, resumed from {first}, {STEPS - first} losses as by {'save_state' if package == 'accelerate' else 'torch.save'}: {', '.join(ours)}"


PROGRAMS = {name: lambda place, name=name: train(place, name) for name in LOOPS}
