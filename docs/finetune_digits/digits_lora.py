import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch import Trainer
from safetensors.torch import load_file

from lightning_cp.export import save_lora
from lightning_cp.families import (
    Components,
    Family,
    Grid,
    ObjectiveDefaults,
    TextStorage,
    collate,
    family_for,
    register_family,
)
from lightning_cp.finetune import FineTuning, LoraSettings, add_lora
from lightning_cp.objectives import objective_for
from lightning_cp.pytorch import ContextParallelStrategy
from lightning_cp.recipes.digits.data import load_scans


@dataclass
class DigitModel:  # takes the place of a pipeline: the parts that encode and denoise
    transformer: WanTransformer3DModel
    class_tokens: torch.Tensor  # [classes + 1, tokens, dim]; the last class is "no condition"

    @classmethod
    def load(cls, run):
        transformer = WanTransformer3DModel.from_pretrained(run / "transformer")
        table = load_file(run / "conditioning.safetensors")["class_tokens.table.weight"]
        return cls(transformer, table.unflatten(1, (-1, transformer.config.text_dim)))


@register_family
class DigitFamily(Family):
    name = "digits"
    pipelines = ("DigitModel",)  # family_for finds the family by this name
    components = Components(text=("class_tokens",), media=())
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2", "proj_out")
    grid = Grid(pixels=1, frame_step=1, patch=(1, 1, 1))
    objective = ObjectiveDefaults()  # flow matching without a shift

    @classmethod
    def read_facts(cls, pipe):
        return {"num_tokens": pipe.class_tokens.shape[1]}

    @property
    def text(self):
        return TextStorage("padded", self.facts["num_tokens"])

    def encode_text(self, pipe, captions, media=None):  # a caption is a digit; the empty one is "no condition"
        return [{"prompt_embeds": pipe.class_tokens[int(caption or -1)]} for caption in captions]

    def encode_media(self, pipe, media):  # there is no VAE: the model works on pixels
        return [{"latents": pixels} for pixels in media["pixels"]]

    def clean(self, stored, noise=None):
        return stored["latents"]

    def inputs(self, noisy, times, stored, options):
        return {
            "hidden_states": noisy.to(options.dtype),
            "timestep": 1000 * times.float(),
            "encoder_hidden_states": stored["prompt_embeds"].to(options.dtype),
            "return_dict": False,
        }


class Handful(torch.utils.data.Dataset):
    """The held-out scans, with white and black exchanged."""

    def __init__(self, base, family, count=32):
        scans = load_scans()
        captions = [str(label) for label in scans.labels[-count:].tolist()]
        pixels = -scans.pixels[-count:, None, None]  # [b, 1, 1, 8, 8], in [-1, 1]
        encoded = zip(family.encode_text(base, captions), family.encode_media(base, {"pixels": pixels}))
        self.samples = [{**text, **item} for text, item in encoded]
        self.text, (self.empty,) = family.text, family.encode_text(base, [""])
        self.buckets = [(1, 8, 8)] * count  # size of each sample

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, item):
        number, _epoch = item
        return self.samples[number]

    def collate(self, samples):
        return collate(samples, self.text, self.empty)


class DigitLora(FineTuning):
    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=4e-3)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=self.trainer.max_steps)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]

    def on_train_batch_end(self, *_):
        self.print(f"step {self.batches} loss {self.trainer.callback_metrics['loss']:.6f}", flush=True)


if __name__ == "__main__":
    run, ring, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    base = DigitModel.load(run)
    family = family_for(base)
    add_lora(base.transformer, LoraSettings(rank=16), family=family)
    objective = objective_for(family, seed=0, cond_dropout=0.1)
    data = Handful(base, family)
    module = DigitLora(base.transformer, family, objective=objective, data=data, batch_size=16)
    strategy = ContextParallelStrategy(ring=ring)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"strategy": strategy, "max_steps": steps, "gradient_clip_val": 1.0}
    trainer = Trainer(accelerator="cpu", devices=ring, **options, **quiet)
    trainer.fit(module)
    save_lora(module.transformer, "digits-lora")
