"""Check that a latent cache was made for the pipeline that it is to train, and by its encoders.

Imports neither torch nor diffusers.
"""

from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.errors import CacheError
from lightning_cp.finetune.encoder_files import check_made_by
from lightning_cp.finetune.family_table import family_of_pipeline
from lightning_cp.pipeline_folder import read_index
from lightning_cp.recipes.settings.components import read_file
from lightning_cp.recipes.settings.table import SettingsError, read


def check_cache(config: DictConfig) -> None:
    """Check a cache against the pipeline's folder, if it is a local one.

    The ranks also check what needs classes of diffusers: facts of the scheduler, and families of other packages.

    Raises: SettingsError: the cache is for another family, or another encoder has made it (also with another
        tokenizer or chat template).
    """
    source, cache = Path(str(read(config, "model.pretrained"))), Path(str(read(config, "data.path")))
    if read(config, "data.kind") != "latents" or not source.is_dir():
        return
    index, kind = read_file(cache / "index.json", "data.path"), read_index(source).get("_class_name")
    family, expected = index.get("family"), family_of_pipeline(kind)
    if family is not None and expected is not None and family != expected:
        raise SettingsError(
            f"data.path={cache} was encoded for {family}, but model.pretrained={source} is a {kind}, of the family "
            f"{expected}: encode the data with this pipeline"
        )
    settings = index.get("settings")
    try:
        check_made_by(cache, settings if isinstance(settings, dict) else {}, source)
    except CacheError as error:
        raise SettingsError(str(error)) from None
