"""Vocabularies of byte-level BPE, learnt in memory from the words of the prompt templates of diffusers' pipelines."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# Words of the templates that pipelines put before a prompt and cut off again after a fixed count of tokens: each of
# these words is one token, as it is for the real tokenizers; all other words become pieces of them or single bytes.
_WORDS = """
Describe the image by detailing color quantity text shape size texture spatial relationships of objects and background
key features input then explain how user s instruction should alter or modify Generate a new that meets requirements
while maintaining consistency with original where appropriate system assistant user Picture video motion camera actions
As an captioning expert generate descriptive prompt based on content suitable for to model editing first analyze
attributes Then precisely clearly determine given ensuring only specified parts are altered all other aspects remain
consistent You engineer Based provided source second target create interesting can be used together detailed scene
think enable_thinking helpful designed superior images degree alignment textual prompts Start generation follow
literally Pay careful attention layout described as left must appear right Match exact object counts assign colors
correct AI reasons about descriptions give structured responses focusing attribution without speculation JSON short
"""


@functools.cache
def bpe(end_of_word: str = "", lower: bool = False) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Vocabulary and merges: all bytes (also with the suffix for the end of a word), and the words above.

    Args:
        end_of_word: suffix of the last piece of a word (CLIP has "</w>"); a word has no space before it then.
        lower: whether the tokenizer makes all letters small.
    """
    words = sorted(set(_WORDS.split()))
    if lower:
        words = sorted({word.lower() for word in words})
    corpus = [piece for word in words for piece in ([word] if end_of_word else [word, f" {word}"])]
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=end_of_word))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        end_of_word_suffix=end_of_word,
        special_tokens=[letter + end_of_word for letter in alphabet] if end_of_word else [],
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return model["vocab"], tuple(merges)
