"""Where a pipeline's weights are: stages of a call, sharding over ranks, and pipelines that only encode."""
