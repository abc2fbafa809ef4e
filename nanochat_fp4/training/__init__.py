"""The training of models, in all four stages.

- run has the class Run, which all four stages build, and loop has their training loop.
- checkpoint has the class Checkpoint, which is the state of a run at one step.
- new_model makes the model of a pre-training run, and later_stage begins a run with the model of another stage.
- resume decides where a run begins, extras has what the loop does between two steps, and report_run ends a run.
- startup starts torch's compiler while the data are read, and graphed replays micro-batches as CUDA graphs.

Modules of this folder may import evaluation, generation, models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
