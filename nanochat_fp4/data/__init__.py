"""The way of text and conversations to a model: files, documents, tokens, rows.

dataset chooses the text, text opens it, and sources reads files and downloads. tokenizer and tokenizer_files have the
tokens, chat_data the conversations, and dataloader makes the batches of all stages. Modules of this folder may import
the flat modules of nanochat_fp4, and nothing else of this project.
"""
