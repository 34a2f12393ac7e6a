"""Processes that run model code: what they may do, and how one talks to them."""
