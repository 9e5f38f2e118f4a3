"""A small GPT-2, trained by Hugging Face's Trainer, which resumes where it stopped.

    trainer run --name gpt2 --store ckpts -- python3 examples/huggingface.py --steps 40

Kill it and start it again: it resumes from its last checkpoint, with the state of the
optimizer, the scheduler and the random generators. Needs transformers and accelerate.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ckptstore.hf


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--output", default="gpt2-output", help="the Trainer's own directory")
    given = arguments.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=256, n_positions=64))
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 256, (256, 64))]
    trainer = Trainer(
        model=model,
        train_dataset=texts,
        callbacks=[ckptstore.hf.Callback()],  # the one line that saves into the store
        args=TrainingArguments(
            given.output, max_steps=given.steps, save_steps=10, save_total_limit=1, logging_steps=10, report_to=[], use_cpu=True, disable_tqdm=True,
        ),
    )
    # The checkpoint to resume from as a directory; None at the first start.
    trainer.train(resume_from_checkpoint=ckptstore.hf.resume(f"{given.output}-resumed"))


if __name__ == "__main__":
    main()
