"""Many calls on one parallel pipeline: rank 0 makes them, and free data groups run them (`follow`)."""
