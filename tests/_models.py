"""Models from elsewhere in tiny configurations, with random weights: nothing is downloaded.

Each entry of MODELS makes a Sample; it raises Missing where its package or checkout is not there. NANOCHAT_DIR has a
checkout of nanochat, NANOGPT_DIR one of nanoGPT.
"""

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 128, 64, 24, 2


class Missing(Exception):
    """Why a model cannot be made here."""


@dataclass
class Sample:
    """A model, and how it is trained: output(model) on a fixed batch, loss(model) of it."""

    model: nn.Module
    output: Callable[[nn.Module], torch.Tensor]
    loss: Callable[[nn.Module], torch.Tensor]


def package(name: str):
    _torchvision()  # transformers and timm import it where it is installed
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Missing(f"needs {name.partition('.')[0]}") from e


@functools.cache
def _torchvision() -> None:
    """torchvision's wheel for CUDA lacks its operators beside a torch for the CPU, and cannot be imported; no model
    here needs them."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")


def tokens(vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (BATCH, LENGTH), generator=generator)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def regression(model: nn.Module, output: Callable[[nn.Module], torch.Tensor]) -> Sample:
    with torch.no_grad():
        target = numbers(*output(model).shape)
    return Sample(model, output, lambda m: (output(m) - target).square().mean())


def classification(model: nn.Module) -> Sample:
    images, labels = numbers(8, 3, 32, 32), torch.arange(8)
    return Sample(model, lambda m: m(images), lambda m: nn.functional.cross_entropy(m(images), labels))


def labelled(model: nn.Module) -> Sample:
    """A model of transformers that takes labels."""
    ids = tokens()
    return Sample(model, lambda m: m(input_ids=ids, labels=ids).logits, lambda m: m(input_ids=ids, labels=ids).loss)


# ----------------------------------------------------------------------------------------------------------------------
# torch's own


def torch_encoder() -> Sample:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    x = numbers(BATCH, LENGTH, WIDTH)
    return regression(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda m: m(x))


def torch_transformer() -> Sample:
    x, y = numbers(BATCH, LENGTH, WIDTH), numbers(BATCH, 8, WIDTH)
    model = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
    return regression(model, lambda m: m(x, y))


class Experts(nn.Module):
    """Experts in 3-D weights, as transformers has them, between a projection and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.router = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(0.1 * numbers(4, WIDTH, WIDTH)) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        parts = torch.bmm(torch.bmm(x.expand(4, -1, -1), self.up).relu(), self.down)
        return self.lm_head(x + (self.router(x).softmax(-1).T.unsqueeze(-1) * parts).sum(0))


def experts() -> Sample:
    x = numbers(LENGTH, WIDTH)
    return regression(Experts(), lambda m: m(x))


# ----------------------------------------------------------------------------------------------------------------------
# transformers, timm, torchvision


def llama() -> Sample:
    t = package("transformers")
    config = t.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return labelled(t.LlamaForCausalLM(config))


def gpt2() -> Sample:
    t = package("transformers")
    config = t.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return labelled(t.GPT2LMHeadModel(config))


def bert() -> Sample:
    t = package("transformers")
    config = t.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * WIDTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    model, ids = t.BertForMaskedLM(config), tokens()
    return Sample(model, lambda m: m(input_ids=ids).logits, lambda m: m(input_ids=ids, labels=ids).loss)


def experts_of_transformers(name: str, **sizes) -> Callable[[], Sample]:
    """A model whose config and class are named so."""

    def make() -> Sample:
        t = package("transformers")
        common = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "eos_token_id": None}
        common |= {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2}
        config = getattr(t, f"{name}Config")(**(common | sizes))
        return labelled(getattr(t, f"{name}ForCausalLM")(config))

    return make


def t5() -> Sample:
    t = package("transformers")
    config = t.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=1, num_heads=4, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return labelled(t.T5ForConditionalGeneration(config))


def whisper_encoder() -> Sample:
    t = package("transformers")
    whisper = package("transformers.models.whisper.modeling_whisper")
    config = t.WhisperConfig(
        d_model=WIDTH, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH, num_mel_bins=16,
        max_source_positions=LENGTH, dropout=0, attention_dropout=0, activation_dropout=0,
    )  # fmt: skip
    x = numbers(BATCH, 16, 2 * LENGTH)
    return regression(whisper.WhisperEncoder(config), lambda m: m(x).last_hidden_state)


def timm_vit() -> Sample:
    make = package("timm").create_model
    return classification(
        make("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=4, num_classes=16)
    )


def torchvision_vit() -> Sample:
    make = package("torchvision").models.VisionTransformer
    model = make(32, 8, num_layers=2, num_heads=4, hidden_dim=WIDTH, mlp_dim=2 * WIDTH, num_classes=16)
    nn.init.normal_(model.heads.head.weight, std=0.05)  # zero: the first gradients of all else would be, too
    return classification(model)


# ----------------------------------------------------------------------------------------------------------------------
# Checkouts


def checkout(file: str, holds: str, without: str = "") -> Path:
    """The checkout whose file holds this text, and not that one."""
    for folder in filter(None, (os.environ.get(name) for name in ("NANOCHAT_DIR", "NANOGPT_DIR"))):
        path = Path(folder).expanduser() / file
        text = path.read_text() if path.is_file() else ""
        if holds in text and not (without and without in text):
            return Path(folder).expanduser()
    raise Missing("needs a checkout in NANOCHAT_DIR or NANOGPT_DIR")


@contextlib.contextmanager
def on_path(root: Path, *names: str) -> Iterator[None]:
    """Imports of these packages come from the checkout, and are forgotten again."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in names]

    kept = {name: sys.modules.pop(name) for name in ours()}
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(kept)


def nanogpt() -> Sample:
    with on_path(checkout("model.py", "class GPTConfig"), "model"):
        module = importlib.import_module("model")
    config = module.GPTConfig(
        block_size=LENGTH, vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=WIDTH, dropout=0.0, bias=False
    )
    ids = tokens()
    return Sample(module.GPT(config), lambda m: m(ids, ids)[0], lambda m: m(ids, ids)[1])


def _nanochat(root: Path) -> Sample:
    with on_path(root, "nanochat"):
        module = importlib.import_module("nanochat.gpt")
    config = module.GPTConfig(
        sequence_len=LENGTH, vocab_size=VOCABULARY, n_layer=2, n_head=2, n_kv_head=2, n_embd=WIDTH, window_pattern="L"
    )
    with torch.device("meta"):
        model = module.GPT(config)
    model.to_empty(device="cpu")
    model.init_weights()
    ids = tokens()
    # Their logits are for generation: the loss is what both revisions compute as in training.
    return Sample(model, lambda m: m(ids, ids, loss_reduction="none"), lambda m: m(ids, ids))


def nanochat_speedrun() -> Sample:
    return _nanochat(checkout("nanochat/gpt.py", "def setup_optimizers"))


def nanochat_newest() -> Sample:
    return _nanochat(checkout("nanochat/gpt.py", "def setup_optimizer(", without="def setup_optimizers"))


OWN: dict[str, Callable[[], Sample]] = {
    "nn.TransformerEncoder": torch_encoder,
    "nn.Transformer": torch_transformer,
    "experts in 3-D weights": experts,
}
MODELS: dict[str, Callable[[], Sample]] = OWN | {
    "Llama (transformers)": llama,
    "GPT-2 (transformers)": gpt2,
    "BERT (transformers)": bert,
    "Mixtral (transformers)": experts_of_transformers(
        "Mixtral", intermediate_size=2 * WIDTH, num_local_experts=4, num_key_value_heads=2
    ),
    "Qwen3-MoE (transformers)": experts_of_transformers(
        "Qwen3Moe", moe_intermediate_size=48, num_experts=6, head_dim=16
    ),
    "gpt-oss (transformers)": experts_of_transformers("GptOss", num_local_experts=4, head_dim=16),
    "DeepSeek-V3 (transformers)": experts_of_transformers(
        "DeepseekV3",
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_shared_experts=1,
    ),  # fmt: skip
    "OLMoE (transformers)": experts_of_transformers("Olmoe", num_experts=4),
    "T5 (transformers)": t5,
    "Whisper's encoder (transformers)": whisper_encoder,
    "ViT (timm)": timm_vit,
    "ViT (torchvision)": torchvision_vit,
    "nanoGPT": nanogpt,
    "nanochat f5425245f": nanochat_speedrun,
    "nanochat, newest": nanochat_newest,
}


def simulate_fp4_tensor_cores() -> list[tuple[int, int]]:
    """For a process of its own: as if a CPU had them. Returns a list that gets the dimensions of the scales of each
    product's operands: 1 for tiles of 128x4, 2 for row-major ones."""
    from nanochat_fp4.nvfp4 import dispatch

    products = []

    def mm(a, b, out_dtype, name, nonnegative=False):
        products.append((a.scales.dim(), b.scales.dim()))
        return (a.dequantize() @ b.dequantize().T).to(out_dtype)

    dispatch.verdict, dispatch.mm = lambda device_type: dispatch.Verdict("scaled_mm"), mm
    return products


def conv1d(linear: nn.Linear) -> nn.Module:
    """A layer of GPT-2's own class, in a Python without transformers too, which computes what the linear one does."""
    layer = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils", "forward": None})()
    layer.nx, layer.nf = linear.in_features, linear.out_features
    layer.weight, layer.bias = nn.Parameter(linear.weight.detach().T.clone()), None
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone())
    return layer


class Foreign(nn.Module):
    """What save_quantized asks of a PreTrainedModel: a config that becomes JSON, and a tied head."""

    config = types.SimpleNamespace(to_json_string=lambda: '{"model_type": "foreign", "dtype": null}')
    all_tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.lm_head(x)
