"""Training: one Run (run) that all four stages build, one loop (loop), one type that is a checkpoint (checkpoint).

new_model makes the model of a pre-training run; later_stage begins with the model of another stage. resume decides
where a run begins, extras has what the loop does between two steps, and report_run ends a run. compiling has a method's
kernels compiled while the data are read, and graphed replays micro-batches as CUDA graphs. Modules of this folder may
import evaluation, generation, models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
