"""A small training with Hugging Face's Trainer, which kills itself after step $KILL and resumes.

    huggingface_training.py DIRECTORY (ckptstore | huggingface)

It prints each loss, the checkpoint that it resumes from, and the digest of the final weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckptstore.hf

transformers.logging.set_verbosity_error()


class Prints(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            print(f"= {state.global_step} {float(logs['loss']).hex()}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("KILL") == str(state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    directory, way = sys.argv[1:]
    transformers.set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=32))  # with dropout
    data = torch.Generator().manual_seed(1)
    texts = [{"input_ids": x, "labels": x} for x in torch.randint(0, 128, (64, 16), generator=data)]
    ours = way == "ckptstore"
    trainer = Trainer(
        model=model, train_dataset=texts, callbacks=[*([ckptstore.hf.Callback()] if ours else []), Prints()],
        args=TrainingArguments(
            output_dir=directory, max_steps=20, per_device_train_batch_size=4, save_strategy="steps", save_steps=4, logging_steps=1,
            logging_first_step=True, report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=1, learning_rate=1e-3, lr_scheduler_type="cosine",
        ),
    )
    path = ckptstore.hf.resume(f"{directory}-resumed") if ours else None
    if trainer.is_world_process_zero():
        print(f"= from {path}", flush=True)
    trainer.train(resume_from_checkpoint=path)
    if trainer.is_world_process_zero():
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        print(f"= end {digest}", flush=True)


main()
