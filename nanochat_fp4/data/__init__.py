"""The way of text and conversations to a model: shards, tokenizer, rows and batches.

dataset chooses the text, and dataloader makes batches of it. shards, corpus, shuffled and download serve these two.
chat_data and chat_loader serve the later stages, and rows reads published datasets. Modules of this folder may import
the flat modules of nanochat_fp4, and nothing else of this project.
"""
