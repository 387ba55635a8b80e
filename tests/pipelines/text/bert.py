"""BERT: a tokenizer of single characters, and the model."""

from __future__ import annotations

import string

from transformers import BertConfig, BertModel, BertTokenizer

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CHARACTERS = [character for character in string.printable if not character.isspace() and not character.isupper()]


def bert(*, hidden: int = 16, layers: int = 2, heads: int = 2, length: int = 77) -> tuple[BertTokenizer, BertModel]:
    """Its tokenizer makes letters small."""
    tokens = [*_SPECIAL, *_CHARACTERS, *(f"##{character}" for character in _CHARACTERS)]
    tokenizer = BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}, model_max_length=length)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
    )
    return tokenizer, BertModel(config).eval()
