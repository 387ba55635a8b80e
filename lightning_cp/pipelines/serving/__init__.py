"""Many calls on one parallel pipeline: rank 0 makes them, the other ranks follow (`follow`)."""
