"""Which attention and dropout the modules of a parallel model compute, and how their calls are intercepted."""
