"""nanochat's GPT for transformers (trust_remote_code): rotary positions, normalized queries and keys, ReLU^2, windows,
a mix of the residual stream with the embedding before each layer, softly capped logits.

Needs torch and transformers alone. The scalars of the mix and the window of each layer are in config.json.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5.24 has another name for it, in arguments and in results.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


class NanoChatFP4Config(PretrainedConfig):
    """config.json has every entry, so none has a default."""

    model_type = "nanochat_fp4"


def norm(x, eps):
    """RMSNorm without weights, statistics in FP32."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=eps).to(x.dtype)


class NanoChatFP4Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)

    def forward(self, x, cos, sin, mask, cache):
        q, k, v = (p(x).unflatten(-1, (-1, self.config.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))

        def rotated(t):
            a, b = t.chunk(2, dim=-1)
            t = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(t.dtype)
            return norm(t, self.config.rms_norm_eps).transpose(1, 2)

        q, k, v = rotated(q), rotated(k), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class NanoChatFP4MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)).square())


class NanoChatFP4Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = NanoChatFP4Attention(config, layer_idx)
        self.mlp = NanoChatFP4MLP(config)

    def forward(self, x, cos, sin, mask, cache):
        x = x + self.self_attn(norm(x, self.eps), cos, sin, mask, cache)
        return x + self.mlp(norm(x, self.eps))


class NanoChatFP4PreTrainedModel(PreTrainedModel):
    config_class = NanoChatFP4Config
    base_model_prefix = "model"
    _no_split_modules = ["NanoChatFP4Layer"]
    _supports_sdpa = True


class NanoChatFP4Model(NanoChatFP4PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([NanoChatFP4Layer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None):
        config, device = self.config, input_ids.device
        seen = 0 if cache is None else cache.get_seq_length()
        query = torch.arange(seen, seen + input_ids.size(1), device=device)
        key = torch.arange(seen + input_ids.size(1), device=device)
        position_ids = query.unsqueeze(0) if position_ids is None else position_ids
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        # (B, T, 1, D / 2). Training multiplies by the reciprocal. A quotient is another FP32 number for some positions.
        angle = position_ids[..., None, None].float() * (1.0 / config.rope_theta**exponent)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()  # BF16 in every precision, as in training
        behind = query[:, None] - key
        padding = None if attention_mask is None else attention_mask[:, None, None, :].bool()

        x = x0 = norm(self.embed_tokens(input_ids), config.rms_norm_eps)
        for i, layer in enumerate(self.layers):
            mask = ((behind >= 0) & (behind <= config.windows[i]))[None, None]
            if padding is not None:  # a padded row still sees itself, so that nothing becomes NaN
                mask = (mask & padding[..., : key.numel()]) | (behind == 0)
            x = config.resid_lambdas[i] * x + config.x0_lambdas[i] * x0
            x = layer(x, cos, sin, mask, cache)
        return norm(x, config.rms_norm_eps)


class NanoChatFP4ForCausalLM(NanoChatFP4PreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = NanoChatFP4Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        x = self.model(input_ids, attention_mask, position_ids, cache)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        cap = self.config.final_logit_softcapping
        logits = cap * torch.tanh(self.lm_head(x).float() / cap)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
