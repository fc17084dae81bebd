"""Several processes that compute one model: each holds a part of every layer and gets every plan."""
