"""Measures the accuracy of quantisation: weight errors, and a model's loss.

weights.py  errors of a layer's packed weights against the checkpoint that they came from
loss.py     loss of a transformers model with its experts computed here
layers.py   layers loaded for either
"""
