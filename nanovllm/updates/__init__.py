"""Weights that change and memory that is lent, while an engine stays.

Doors: for engines `interface`, `updating`, `sleeping`, `hold`, `memory`; to build a rank `weights`,
`sleeper`, `settling`; `ends` for replicas; `ledger`, `parcel` that travel; `sharing` for processes.
"""
