"""Convert archives to a folder of pictures and videos with captions, which `data.path` reads.

Archives are .tar files of webdataset (0.jpg with 0.txt or 0.json, and 0.mask.png, 0.reference.png), or .parquet files
with the bytes of the media, as on the Hugging Face Hub. The names of the written files depend on their contents only.
"""

import argparse
import sys
from pathlib import Path

from lightning_cp.errors import DataError
from lightning_cp.recipes.terminal import print_error


def main() -> int:
    """Convert what the command line names. Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="lightning-cp convert", description=__doc__)
    parser.add_argument("archives", nargs="+", help="archives, or patterns such as 'shards/*.tar'")
    parser.add_argument("target", type=Path, help="new folder")
    parser.add_argument("--caption", help="column with the captions; else txt, caption, captions or text")
    given = parser.parse_args()
    from lightning_cp.finetune.media.archives import convert_archives  # imports torch, which --help does not need

    try:
        samples = convert_archives(given.archives, given.target, given.caption)
    except DataError as error:
        print_error(error)
        return 2
    print(f"{samples} samples in {given.target}: data.path={given.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
