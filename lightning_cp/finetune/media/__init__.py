"""Find and read training media: images, videos, captions, and the sizes they are cropped to."""

from lightning_cp.finetune.media.buckets import Bucket, Crop, default_buckets, explicit_buckets, fit, nearest_bucket
from lightning_cp.finetune.media.folders import find_in_folders
from lightning_cp.finetune.media.images import read_image
from lightning_cp.finetune.media.load import LoadedMedia, load_media
from lightning_cp.finetune.media.source import Skipped, Source, Sources
from lightning_cp.finetune.media.sources import find_sources
from lightning_cp.finetune.media.videos import VideoInfo, probe, read_clip
from lightning_cp.finetune.settings import DataFolder

__all__ = [
    "Bucket",
    "Crop",
    "DataFolder",
    "LoadedMedia",
    "Skipped",
    "Source",
    "Sources",
    "VideoInfo",
    "default_buckets",
    "explicit_buckets",
    "find_in_folders",
    "find_sources",
    "fit",
    "load_media",
    "nearest_bucket",
    "probe",
    "read_clip",
    "read_image",
]
