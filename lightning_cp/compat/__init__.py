"""Private names of torch, Lightning, diffusers and accelerate. No other folder of the package imports one.

- `versions`: the tested versions, and the errors for a package that is missing or differs from them.
- `torch_names`, `compiler`, `distributed_names`, `fabric_names`, `trainer_names`, `diffusers_names`: private names that
  are imported. There is one module for each package that must not be imported early.
- `check`: a table of private attributes and methods of other packages' objects that are read, called or overridden. It
  is compared with the installed versions when a feature first needs its entries.
"""
