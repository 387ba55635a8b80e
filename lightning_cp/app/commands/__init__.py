"""The recipes: each module is a script of recipes/ and a command of `lightning-cp`."""
