"""Makes this folder with `transformers`: python tests/data/gpt2_transformers/make.py FOLDER."""

import sys

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

folder = sys.argv[1]
torch.manual_seed(0)
config = GPT2Config(
    n_layer=2,
    n_embd=32,
    n_head=4,
    n_positions=24,
    n_inner=48,
    vocab_size=70,
    activation_function="gelu_new",
    layer_norm_epsilon=3e-5,
    bos_token_id=1,
    eos_token_id=1,
)
model = GPT2LMHeadModel(config).eval()
tokens = torch.randint(0, 70, (2, 24), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    for parameter in model.parameters():  # so that norms and biases are not ones and zeros
        parameter.add_(0.1 * torch.randn(parameter.shape))
    logits = model(tokens).logits
model.save_pretrained(folder, safe_serialization=True)
np.savez(f"{folder}/logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
