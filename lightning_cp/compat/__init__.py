"""Private names of torch, Lightning, diffusers and accelerate. No other folder of the package imports one.

- `versions`: the tested versions, and the error for a name that the installed version does not have.
- `torch_names`, `torch_operators`, `dcp_names`, `fabric_names`, `trainer_names`, `diffusers_names`: private names that
  are imported. There is one module for each package that must not be imported early.
- `table`: private attributes and methods of other packages' objects that are read, called or overridden.
- `check`: checks the table against the installed versions, when a feature first needs its entries.
"""
