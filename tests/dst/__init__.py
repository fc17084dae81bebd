"""Deterministic simulation: the real engine under seeded random traffic and faults, checked after every half-step.

python -m tests.dst --seed 17            replay one seed
python -m tests.dst --seeds 0:400 --jobs 2
"""
