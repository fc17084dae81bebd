"""Which engine of a fleet gets a request.

Pure choices, shared by the server and the simulator: figures of engines and what is asked go in, a choice with its
reasons comes out. Time is an argument; nothing here waits, reads or sends.
"""
