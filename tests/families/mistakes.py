"""Families with one mistake each, and the proofs that must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_cp.families import Family, ObjectiveDefaults, Sample, TextStorage

Make = Callable[[type[Family]], type[Family]]


@dataclass(frozen=True)
class Mistake:
    """A mistake in one case's family.

    Args:
        case: name in `tests.families.cases.CASES`.
        make: derives the wrong class from the right one.
        found_by: names of the proofs that must fail; all others must pass.
    """

    case: str
    make: Make
    found_by: set[str]


def _inputs(change: Callable[[Family, dict[str, Any]], dict[str, Any]]) -> Make:
    """Change the transformer's arguments."""

    def make(base: type[Family]) -> type[Family]:
        class Wrong(base):  # type: ignore[valid-type, misc]
            def inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
                arguments = super().inputs(*args, **kwargs)
                return {**arguments, **change(self, arguments)}

        return Wrong

    return make


def _times(scale: float, *, offset: float = 0.0) -> Make:
    return _inputs(lambda _, arguments: {"timestep": arguments["timestep"] * scale + offset})


def _prediction(change: Callable[[Any], Any]) -> Make:
    def make(base: type[Family]) -> type[Family]:
        class Wrong(base):  # type: ignore[valid-type, misc]
            def prediction(self, output: Any, noisy: Any) -> Any:
                return change(super().prediction(output, noisy))

        return Wrong

    return make


def _facts(**changed: Any) -> Make:
    def make(base: type[Family]) -> type[Family]:
        class Wrong(base):  # type: ignore[valid-type, misc]
            @classmethod
            def read_facts(cls, pipe: Any) -> dict[str, Any]:
                return {**super().read_facts(pipe), **changed}

        return Wrong

    return make


def _transposed_tokens(base: type[Family]) -> type[Family]:
    """Order tokens by column, row: the transposed picture is packed. Inputs and prediction fit together."""

    class Wrong(base):  # type: ignore[valid-type, misc]
        def inputs(self, noisy: Tensor, *args: Any) -> dict[str, Any]:
            arguments = super().inputs(noisy, *args)
            rows, columns = noisy.shape[-2] // 2, noisy.shape[-1] // 2
            tokens = arguments["hidden_states"].unflatten(1, (rows, columns)).transpose(1, 2).flatten(1, 2)
            return {**arguments, "hidden_states": tokens}

        def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
            rows, columns = noisy.shape[-2] // 2, noisy.shape[-1] // 2
            return super().prediction(output.unflatten(1, (columns, rows)).transpose(1, 2).flatten(1, 2), noisy)

    return Wrong


def _cut_text(base: type[Family]) -> type[Family]:
    """Pad text to 64 positions, not to the full length."""

    class Wrong(base):  # type: ignore[valid-type, misc]
        @property
        def text(self) -> TextStorage:
            return replace(super().text, length=64)

    return Wrong


def _other_prediction(base: type[Family]) -> type[Family]:
    class Wrong(base):  # type: ignore[valid-type, misc]
        @property
        def objective(self) -> ObjectiveDefaults:
            right = super().objective
            return replace(right, prediction="epsilon" if right.prediction == "v_prediction" else "v_prediction")

    return Wrong


def _frames_put_last(base: type[Family]) -> type[Family]:
    class Wrong(base):  # type: ignore[valid-type, misc]
        def clean(self, *args: Any) -> Tensor:
            x0: Tensor = super().clean(*args)
            return torch.cat([x0[:, 1:], x0[:, -1:]], dim=1)

    return Wrong


def _without_reference_ids(_: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    ids = arguments["img_ids"].clone()
    ids[..., 0] = 0
    return {"img_ids": ids}


def _mask_of_the_last_frame(_: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    hidden = arguments["hidden_states"].clone()
    hidden[:, 4:8] = hidden[:, 4:8].flip(2)
    return {"hidden_states": hidden}


def _last_channels(base: type[Family]) -> type[Family]:
    """Take the variance for the noise."""

    class Wrong(base):  # type: ignore[valid-type, misc]
        def prediction(self, output: Tensor, noisy: Tensor) -> Tensor:
            return output[:, -noisy.shape[1] :]

    return Wrong


def _negatives_like_captions(base: type[Family]) -> type[Family]:
    class Wrong(base):  # type: ignore[valid-type, misc]
        def encode_negative(self, *args: Any) -> list[Sample]:
            texts: list[Sample] = self.encode_text(*args)
            return texts

    return Wrong


def _condition_first(_: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_states": arguments["hidden_states"].roll(5, dims=1)}


def _frame_rate_of_the_pipeline(base: type[Family]) -> type[Family]:
    """Store the pipeline's default frame rate with every clip."""

    class Wrong(base):  # type: ignore[valid-type, misc]
        def encode_media(self, *args: Any) -> list[Sample]:
            return [{**x, "fps": torch.tensor(self.facts["fps"])} for x in super().encode_media(*args)]

    return Wrong


def _bins_before_channels(_: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    sound = arguments["audio_hidden_states"]
    return {"audio_hidden_states": sound.unflatten(2, (2, 2)).transpose(2, 3).flatten(2)}


def _control(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Make:
    """Change the arguments of the ControlNet."""
    return _inputs(lambda _, arguments: {"controlnet": {**arguments["controlnet"], **change(arguments["controlnet"])}})


def _outputs_exchanged(base: type[Family]) -> type[Family]:
    class Wrong(base):  # type: ignore[valid-type, misc]
        side = base.components.side
        assert side is not None
        components = replace(base.components, side=replace(side, outputs=side.outputs[::-1]))

    return Wrong


def _kept_and_changed_parts_exchanged(_: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    kept, changed, mask = arguments["control_hidden_states"].split([4, 4, 64], dim=1)
    return {"control_hidden_states": torch.cat([changed, kept, mask], dim=1)}


CAPTURE, ORACLE, BATCH = {"capture"}, {"oracle"}, {"batch"}
MISTAKES = {
    "token_order": Mistake("flux", _transposed_tokens, CAPTURE | ORACLE),
    "sign": Mistake("flux", _prediction(torch.neg), ORACLE),
    "time_plus_one": Mistake("wan", _times(1.0, offset=1.0), CAPTURE | ORACLE),
    "normalisation": Mistake("sd3", _facts(shift_factor=0.0), ORACLE),
    "mask_of_the_text": Mistake("qwen_image", _inputs(lambda *_: {"encoder_hidden_states_mask": None}), BATCH),
    "mask_of_the_frames": Mistake("wan_image", _inputs(_mask_of_the_last_frame), CAPTURE),
    "guidance": Mistake("flux", _inputs(lambda _, x: {"guidance": 1000 * x["guidance"]}), CAPTURE),
    "text_length": Mistake("wan", _cut_text, CAPTURE),
    "positions": Mistake("cogvideox", _facts(sample_size=[12, 20]), CAPTURE),
    "frame_rate": Mistake("ltx", _frame_rate_of_the_pipeline, CAPTURE),
    "order_of_the_sound": Mistake("ltx2", _inputs(_bins_before_channels), CAPTURE | ORACLE),
    "velocity_of_the_sound": Mistake("minimax_h3", _prediction(lambda x: {**x, "sound": -x["sound"]}), ORACLE),
    "prediction_type": Mistake("cogvideox_v_prediction", _other_prediction, ORACLE),
    "positions_of_the_flux2_reference": Mistake("flux2_reference", _inputs(_without_reference_ids), CAPTURE),
    "sign_in_a_list": Mistake("z_image", _prediction(torch.neg), ORACLE),
    "learned_variance": Mistake("pixart_sigma", _last_channels, ORACLE),
    "instruction_of_negatives": Mistake("sana_euler", _negatives_like_captions, CAPTURE),
    "channels_of_the_condition": Mistake("hunyuan_video15", _inputs(_condition_first), CAPTURE | ORACLE),
    "tokens_of_the_control": Mistake(
        "flux_controlnet", _control(lambda x: {"controlnet_cond": x["controlnet_cond"].flip(1)}), CAPTURE
    ),
    "outputs_of_the_controlnet": Mistake("flux_controlnet", _outputs_exchanged, CAPTURE),
    "parts_of_the_control": Mistake("wan_vace", _inputs(_kept_and_changed_parts_exchanged), CAPTURE),
    "extra_frames": Mistake("cogvideox_1_5", _frames_put_last, ORACLE),
}
