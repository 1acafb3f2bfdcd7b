"""Requests with images on their way to the core: they wait until these are ready, and others pass.

Doors: `waiting_core`, a core before the core; `image_prompts`, what an engine does with images.
"""
