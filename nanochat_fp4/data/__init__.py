"""Text and conversations on their way to a model: shards, tokenizer, rows and batches.

dataset and dataloader serve pre-training. chat_data and chat_loader serve the later stages. Modules of this folder may
import the flat modules of nanochat_fp4, and nothing else of this project.
"""
