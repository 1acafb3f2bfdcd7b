"""The core: requests queued, scheduled, computed by steps and booked.

Door: `LLMEngine`, in `llm_engine.py`. `EngineCore.step` is the loop.
"""
