"""Settings of recipes/check_family.py."""
