"""GPT-2 in Flax NNX, trained with Adapprox, AdamW or Adafactor: `python -m examples.gpt2.train`."""
