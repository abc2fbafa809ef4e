"""The training of models, in all four stages.

- trainer has the class Trainer, the loop of every stage, and later_stage has what mid-training, SFT and RL share.
- checkpoint_manager saves and reads checkpoints. load_model loads models from them, and decides where a run begins.
- step is one optimizer step in parts, and graphed replays its micro-batches as CUDA graphs.
- memory counts the memory of a step, and chooses the rows that fit.
- telemetry looks inside of the layers, wandb_run logs, and flags has the flags that stages share.

Modules of this folder may import evaluation, generation, models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
