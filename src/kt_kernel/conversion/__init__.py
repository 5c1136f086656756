"""Converts a checkpoint's experts to a packed directory.

plan.py  what will be converted, checked before anything is written
run.py   the conversion, layer by layer, resumable
"""

from .plan import Plan, Request, make_plan
from .run import Progress, convert

__all__ = ["Plan", "Progress", "Request", "convert", "make_plan"]
