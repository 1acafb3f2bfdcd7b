"""Hooks of mkdocs for the documentation site: what is generated while it is built."""
