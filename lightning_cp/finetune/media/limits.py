"""Limits of what a small file can claim. Each is checked before memory is allocated for the claim.

Pictures have the limit of Pillow against decompression bombs: `2 * PIL.Image.MAX_IMAGE_PIXELS`, 179 million pixels.
"""

FRAME_PIXELS = 1 << 26
"""Pixels of a video's frame, as stored and as shown: 8192 x 8192. The decoder keeps about one frame per thread."""
CLIP_PIXELS = 1 << 30
"""Pixels of all frames of a clip, which are in memory before they are resized: 3 GiB."""
SOUND_SAMPLES = 1 << 26
"""Samples of a clip's sound on each channel: 23 minutes at 48 kHz, 512 MiB."""
BYTES_PER_CLIP = 8
"""Fewest bytes of a video for each clip that is cut from it: more clips than that need a forged duration."""
EPOCH_ITEMS = 1_000_000_000
"""Most items of an epoch, with all repeats."""
CAPTION_BYTES = 1 << 20
"""Most bytes of the captions of one file."""
TABLE_BYTES = 1 << 32
"""Most bytes of a table, which is read whole."""
