"""Unpack archives of media: tar files of webdataset, and parquet files."""
