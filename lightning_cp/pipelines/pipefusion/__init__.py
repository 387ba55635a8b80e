"""PipeFusion: compute a transformer in patches of its tokens, and its blocks in stages on different ranks."""
