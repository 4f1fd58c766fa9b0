"""LightCheck's own table (ICCD 2023, figure 3), for the columns beside ours. Data only.

Its machine is not ours, so its columns are for the shape, not for a race.
"""

CONDITIONS = (
    "LightCheck: three nodes, each with two Xeon Gold 6230R, one V100 (16 GB), 192 GB of DRAM, six "
    "Optane modules of 128 GB and a hard disk; PyTorch 1.8.1, CUDA 11.1, Horovod, fp32 data "
    "parallel, rank 0 checkpoints. G copies on the GPU first, C through pinned host memory, D "
    "straight to persistent memory, disk to a file."
)
OVERHEAD_MAX_PERCENT = 5
# Fewest iterations between checkpoints at which they add at most 5 %; sizes in MB.
INTERVALS = {
    "resnet18": {"mb": 90, "G": 1, "C": 1, "D": 1, "disk": 7, "CheckFreq": 20, "torch.save": 102},
    "vgg16": {"mb": 1056, "G": 6, "C": 6, "D": 6, "disk": 64, "CheckFreq": 146, "torch.save": 904},
    "inception_v3": {
        "mb": 183, "G": 14, "C": 14, "D": 14, "disk": 30, "CheckFreq": 40, "torch.save": 118,
    },
    "alexnet": {
        "mb": 467, "G": 8, "C": 8, "D": 8, "disk": 95, "CheckFreq": 164, "torch.save": 1084,
    },
    "gpt2": {"mb": 1508, "G": 6, "C": 6, "D": 6, "disk": 46, "CheckFreq": 100, "torch.save": 682},
    "bert": {
        "mb": 4004, "G": 10, "C": 10, "D": 10, "disk": 82, "CheckFreq": 200, "torch.save": 1100,
    },
}  # fmt: skip
# Seconds from the failure on, with LightCheck, CheckFreq and torch.save.
RECOVERY_S = {
    "resnet18": (0.2, 2.5, 11.7),
    "vgg16": (2.4, 40.1, 164.5),
    "inception_v3": (3.4, 8.7, 25.4),
    "alexnet": (1.0, 17.5, 70.5),
    "gpt2": (2.0, 31.0, 204.6),
    "bert": (7.0, 97.0, 517.0),
}
COLUMNS = ("G", "C", "D", "disk", "CheckFreq", "torch.save")
