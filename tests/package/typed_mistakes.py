"""Mistakes in user code. mypy and pyright have to report an error on each line that ends with `# wrong`, and on no
other line (test_typing.py). This file is checked, not run."""

import torch
from torch import nn

import torch_ext
from torch_ext import AdamWW  # wrong
from torch_ext import AdamW, load_policy

model = nn.Linear(2, 3)
policy = load_policy(model)
optimizer = AdamW(model.parameters())

torch_ext.xyz  # wrong
torch_ext.load_polcy(model)  # wrong
torch_ext.AdamW9bit(model.parameters())  # wrong
AdamW(model.parameters(), learning_rate=0.1)  # wrong
AdamW(model.parameters(), states="4bit")  # wrong
AdamW(model.parameters(), states=torch.bfloat16)  # wrong
AdamW(model.parameters(), policy="bf16")  # wrong
AdamW(model.parameters(), betas=0.9)  # wrong
AdamW(model.parameters(), lr="3e-4")  # wrong
AdamW(model.parameters(), min_8bit_size="4096")  # wrong
AdamW(model.parameters(), keep_32bit=[torch.bfloat16])  # wrong
AdamW(model)  # wrong
AdamW()  # wrong
load_policy(model, bf17=True)  # wrong
policy.param_dtyp  # wrong
policy.lr = 0.1  # wrong
policy.weight_decay.upper()  # wrong
policy.main_params_dtype.itemsize  # wrong
optimizer.stepp()  # wrong
optimizer.step(3)  # wrong
optimizer.load_state_dict("checkpoint")  # wrong
optimizer.skipped_steps().upper()  # wrong
torch_ext.clip_grad_norm_(optimizer, "1.0")  # wrong
torch_ext.parallelize(model, policy, strategi="optim")  # wrong
