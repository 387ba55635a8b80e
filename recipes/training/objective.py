"""Build the objective of a fine-tuning run: settings in place of the defaults of the pretrained weights."""

from __future__ import annotations

from dataclasses import fields

from hydra.utils import instantiate
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_cp.finetune.families import Family
from lightning_cp.finetune.objectives import Diffusion, ExpertFlowMatching, FlowMatching, Objective, objective_for
from lightning_cp.recipes.settings.components import components_of


def build_objective(config: DictConfig, family: Family) -> Objective:
    """Build the objective. Raises: ValueError: a setting is of another kind of objective than the family's."""
    names = components_of(config)
    kind = FlowMatching if family.objective.prediction == "flow" else Diffusion
    valid = [name for name in map(str, config.objective) if name in {x.name for x in fields(kind)}]
    chosen = {str(name): value for name, value in config.objective.items() if value is not None}
    chosen.pop("reduction")  # it weights samples, see `BatchDivision`
    for name, value in chosen.items():
        if name not in valid:
            raise ValueError(
                f"objective.{name}={value} is not valid for {family.name}, which is trained with "
                f"{kind.__name__}: its settings are objective.{', objective.'.join(valid)}"
            )
        if OmegaConf.is_list(value):
            chosen[name] = tuple(list(x) if OmegaConf.is_list(x) else x for x in value)
    if "density" in chosen:
        chosen["density"] = instantiate(chosen["density"])
    component = names if len(names) > 1 else names[0]
    objective = objective_for(
        family, seed=config.seed, component=component, **{"cond_dropout": config.cond_dropout, **chosen}
    )
    if isinstance(objective, ExpertFlowMatching):
        for name, one in objective.objectives.items():
            _report_range(one, family, name, share=f" in {objective.probabilities[name]:.1%} of the steps")
    else:
        _report_range(objective, family, names[0])
    return objective


def _report_range(objective: Objective, family: Family, component: str, *, share: str = "") -> None:
    """Print the noise levels that are trained on rank 0, if they are not all. Args: share: share of the steps."""
    trained, used = getattr(objective, "sigma_range", (0.0, 1.0)), family.sigma_range(component)
    if trained == used == (0.0, 1.0):
        return
    text = f"{component} is trained on {trained[0]:g} < sigma <= {trained[1]:g}{share}"
    if not used[0] <= trained[0] < trained[1] <= used[1]:
        text = (
            f"warning: {text} (objective.sigma_range), but the pipeline uses it for {used[0]:g} < sigma <= {used[1]:g} "
            "only: leave objective.sigma_range out to train on these"
        )
    rank_zero_only(print)(text, flush=True)
