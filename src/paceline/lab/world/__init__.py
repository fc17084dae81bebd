"""Thousands of replicas as flows: regions, clocks, prices, distances, deaths and bursts over a day.

A replica is a column of numbers that moves along a curve which the exact simulator measured (`curve`), in ticks of a
second (`flow`). Which region serves what, and what dies when, is `day`; `exact` runs the real scheduler beside it and
says how far it is off. Nothing here plans a step.
"""
