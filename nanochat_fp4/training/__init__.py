"""A training run: its set-up, the only training loop (trainer), its checkpoints, and how it resumes.

stage, pretraining and post_training are what scripts/ calls. Modules of this folder may import evaluation, generation,
models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
