"""The models: nanochat's GPT, the paper's Llama-like family, and models of transformers.

families says what base_train must know of a family. The optimizers of the models (optim), their attention
(flash_attention) and their loss (cross_entropy) are here as well. nvfp4.convert quantizes their linear layers. Modules
of this folder may import nvfp4, data and the flat modules of nanochat_fp4.
"""
