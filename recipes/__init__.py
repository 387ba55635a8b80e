"""The programs: each file with a `main` is a command of `lightning-cp`, and can be read from top to bottom.

Imported as `lightning_cp.recipes`. Only this folder uses Hydra and the packages of the extra `recipes`, and nothing
else imports it.
"""
