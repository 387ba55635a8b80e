"""Find and read training media: images, videos, captions, and the sizes they are cropped to."""

from lightning_cp.media.buckets import Bucket, default_buckets, explicit_buckets, nearest_bucket
from lightning_cp.media.fit import Crop, fit
from lightning_cp.media.images import read_image
from lightning_cp.media.load import LoadedMedia, load_media
from lightning_cp.media.source import Skipped, Source, Sources
from lightning_cp.media.sources import find_sources
from lightning_cp.media.videos import VideoInfo, probe, read_clip

__all__ = [
    "Bucket",
    "Crop",
    "LoadedMedia",
    "Skipped",
    "Source",
    "Sources",
    "VideoInfo",
    "default_buckets",
    "explicit_buckets",
    "find_sources",
    "fit",
    "load_media",
    "nearest_bucket",
    "probe",
    "read_clip",
    "read_image",
]
