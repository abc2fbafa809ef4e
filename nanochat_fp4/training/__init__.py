"""A training run: its set-up, the only training loop (trainer), its checkpoints, and how it resumes.

Scripts call flags, setup, trainer and load_model. Modules of this folder may import evaluation, generation, models,
data, nvfp4 and the flat modules of nanochat_fp4.
"""
