"""The kernels of the CPU step, as Python functions that numba compiles. Imported only to compile them."""
