# pyright: strict
"""Each line with `wrong` at its end is an error to the type checkers."""

import torch

import nanochat_fp4 as nf

print(nf.nonsense)  # wrong
nf.Operand(3)  # wrong
nf.Operand("rtn", raw="yes")  # wrong
nf.Gemm("rtn")  # wrong
nf.quantize(torch.ones(16), "rtn", seed="0")  # wrong
nf.convert(torch.ones(16))  # wrong
nf.QuantLinear(16, 16, methd="clover")  # wrong
