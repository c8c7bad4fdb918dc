"""Runs programs nobody trusts. The only room that starts such processes."""
