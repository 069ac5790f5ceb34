"""One thread for each test process: processes share the cores, and torch's threads would wait for each other."""

import torch

torch.set_num_threads(1)
