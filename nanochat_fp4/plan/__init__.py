"""The plan of a run of every stage, from text to report: `python -m nanochat_fp4.plan speedrun`.

variables   names of the variables that a user can set; needs the standard library alone
settings    the numbers of speedrun and run1000, and what the variables make of them
cards       GPUs, their memory, and published rates of whole training steps (nanochat_fp4/cards.json)
stages      the command of each stage, parsed by the stage's own parser
model       the model and the memory of its training; hours
needs       data, packages and disk that a later stage will need, looked at before the first step
words       the page that a person reads
"""
