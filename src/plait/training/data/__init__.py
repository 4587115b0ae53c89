"""Data for training: sources, splits, tokenizers, examples and batches. `build.build_data` is the way in.

Only `batches` needs torch; everything before it is files, text and numpy.
"""
