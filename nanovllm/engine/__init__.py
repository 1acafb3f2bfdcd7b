"""The core: requests queued, scheduled, computed by steps and booked.

Door: `LLMEngine`, in `llm_engine.py`. `EngineCore.step` is the loop. Rooms that compute its steps
know files of it one by one, so every file is a door.
"""
