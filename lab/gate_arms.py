"""Three rows of the study d8_builds: weighted Gram matrices, and the mean of the last weights.

    python -m scripts.base_train --recipes=lab/gate_arms.py --method=mixed_weighted

mixed_weighted measures Gram matrices in which a token counts by the square of its loss gradient (GuidedQuant,
arXiv 2505.07004). mixed_mean and bf16_mean end in the mean of the weights of the last 15% of the steps; they are meant
for --final-lr-frac=0.1 (arXiv 2510.06213). The file patches QuantizedTraining.after_update.
"""

import contextlib
import sys
from dataclasses import replace

import torch

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import quantized_training
from nanochat_fp4.nvfp4.contexts import full_precision
from nanochat_fp4.nvfp4.feedback import factor_for, gram_matrix
from nanochat_fp4.nvfp4.fused import groups_computed_as_one

MIXED = nf.get_recipe("clover_mixed")
nf.register(
    replace(MIXED, name="mixed_weighted", summary="clover_mixed, Gram matrices weighted by the loss's gradient")
)
nf.register(replace(MIXED, name="mixed_mean", summary="clover_mixed, at the end the mean of the last weights"))
nf.register(nf.Recipe("bf16_mean", summary="bf16, at the end the mean of the last weights"))

plain_after_update = quantized_training.QuantizedTraining.after_update


def update_weighted_gram_matrices(model, forward):
    """As update_gram_matrices, with x^T diag(g^2) x in the place of x^T x; g^2 has a mean of 1 over the tokens."""
    layers = [group[0] for group in groups_computed_as_one(model) if group[0].recipe.uses_feedback]
    inputs, outputs, losses = {}, {}, []
    hooks = [model.register_forward_hook(lambda m, args, out: losses.append(out))]
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0].detach())))
        hooks.append(layer.register_forward_hook(lambda m, args, out: outputs.__setitem__(m, out)))
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        with torch.enable_grad(), full_precision(model), eager:
            forward()
            grads = torch.autograd.grad(losses[0], [outputs[layer] for layer in layers])
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad(), torch.autocast(model.get_device().type, enabled=False):
        for layer, grad in zip(layers, grads):
            x = inputs[layer].reshape(-1, layer.in_features).float()
            weight = grad.reshape(-1, layer.out_features).float().square().sum(1, keepdim=True)
            weight = weight / weight.mean().clamp(min=1e-37)
            layer.gram_matrix = gram_matrix((x * weight).T @ x / len(x), layer.gram_matrix)
            layer.feedback_factor = factor_for(layer.gram_matrix)


def after_update(self, step, forward):
    name = "" if self.plan is None else self.plan.method.name
    if name == "mixed_weighted":
        if step % quantized_training.GRAM_EVERY == 0:
            update_weighted_gram_matrices(self.model, forward)
        return
    plain_after_update(self, step, forward)
    if name in ("mixed_mean", "bf16_mean") and step >= 0.85 * self.num_steps:
        if not hasattr(self, "mean"):
            self.mean, self.count = [p.detach().clone() for p in self.model.parameters()], 1
        else:
            self.count += 1
            torch._foreach_lerp_(self.mean, [p.detach() for p in self.model.parameters()], 1 / self.count)
        if step == self.num_steps - 1:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), self.mean)


quantized_training.QuantizedTraining.after_update = after_update
