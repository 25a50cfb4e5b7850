"""Prints the tables of docs/trl.md: `python -m groupwise.integrations.trl`."""

from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.fields import markdown

print(markdown(GRPOConfig), end="")
