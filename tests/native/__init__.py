"""The native CPU kernels and the runner on them. Needs numba to compile them once; never torch."""
