"""A compiled flex attention in a file, as models have it."""

import torch
from torch.nn.attention.flex_attention import flex_attention

compiled_flex = torch.compile(flex_attention, backend="eager")
