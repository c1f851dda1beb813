"""The Triton model that `tbe-export` fills: `lookup/config.pbtxt` and `lookup/1/model.py`."""
