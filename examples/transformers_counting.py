"""A small GPT-2 learns to count with transformers' Trainer; comments mark what gossip changes.

torchrun --standalone --nproc-per-node 2 examples/transformers_counting.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pyparallel import SGP
from pyparallel.integrations.transformers import GossipTrainer  # needs transformers 5.6

torch.manual_seed(0)
starts = torch.randint(64, (1152, 1))
tokens = (starts + torch.arange(16)) % 64
data = [{"input_ids": each, "labels": each} for each in tokens]
special = {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, **special))
arguments = {
    "output_dir": "runs/counting",
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "save_strategy": "epoch",
    "logging_steps": 16,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def make_trainer(epochs):
    return GossipTrainer(  # was Trainer
        model=model,
        args=TrainingArguments(num_train_epochs=epochs, **arguments),
        train_dataset=data[:1024],
        eval_dataset=data[1024:],
        algorithm=SGP(overlap=1),  # new
    )


trainer = make_trainer(2)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
resumed = make_trainer(4)
resumed.train(resume_from_checkpoint=True)
later = resumed.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss {before:.2f}, after 2 epochs loss {after:.2f}, resumed, after 4 loss {later:.2f}")
trained = GPT2LMHeadModel.from_pretrained("runs/counting/checkpoint-128")
