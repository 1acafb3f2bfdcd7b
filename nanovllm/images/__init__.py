"""Image inputs on the host: what is read, resized and counted before a request reaches the engine.

Every file is a door.
"""
