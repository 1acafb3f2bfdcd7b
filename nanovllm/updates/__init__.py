"""Weights that change and memory that is lent, while an engine stays.

Doors: `updating`, `sleeping`, `hold` and `memory` for engines; `weights`, `sleeper` and `settling`
for what builds a rank; `ledger` and `parcel`, which travel; `sharing` for other processes.
"""
