"""What tests with tensors share: one thread, so that they are quick beside each other and give the same sums."""

import torch

torch.set_num_threads(1)
