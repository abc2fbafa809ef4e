"""Trains with transformers' Trainer, exports to compressed-tensors, and loads the result with transformers again.

The example needs transformers, accelerate and compressed-tensors: pip install -e '.[examples]'
"""

try:
    import nanochat_fp4 as nf  # It comes first, so that another package that is missing is one line.
except ModuleNotFoundError as e:
    message = "error: nanochat_fp4 is not installed in this Python; type pip install -e . in its checkout first"
    raise (SystemExit(message) if e.name == "nanochat_fp4" else e) from None
import accelerate  # noqa: F401, because without it transformers' Trainer would end in a traceback
import torch
import transformers
from tokenizers import Tokenizer, decoders, models


class Progress(transformers.TrainerCallback):
    """A method that changes late in a run, as nvidia_full does, must know the run's progress. Others ignore the call.
    nvidia_full ends in BF16, so that trainer.save_model writes its model, and nf.save_quantized refuses it."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        nf.set_progress(model, state.global_step / state.max_steps)


def main(folder: str = "trained", method: str = "clover", steps: int = 20):
    words = Tokenizer(models.BPE({chr(i): i for i in range(128)}, []))  # your tokenizer, and your data
    words.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=chr(0))
    rows = torch.tensor(tokenizer(open(__file__).read())["input_ids"][:512]).view(16, 32)
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = nf.convert(transformers.LlamaForCausalLM(config), method)
    args = transformers.TrainingArguments(
        folder, max_steps=steps, learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to="none"
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[Progress])
    trainer.train()
    trainer.save_model(f"{folder}/unquantized")  # to train on from
    # It prints in what the folder differs from the model.
    nf.save_quantized(model, f"{folder}/nvfp4", tokenizer=tokenizer, calibration=[rows], overwrite=True)
    return trainer, transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/nvfp4")


if __name__ == "__main__":
    nf.cli.ArgumentParser(description=__doc__).parse_args()  # It takes no flags.
    main()
