"""Forks trainers of torch_trainer.py; see nursery.py."""

import importlib
import socket
import sys

import torch_trainer
import zygote

if __name__ == "__main__":
    # Here, once: an optimizer's first step would import it, which takes longer than all the rest.
    importlib.import_module("torch._dynamo")
    importlib.import_module("lightckpt.checkpointer")
    zygote.serve(socket.socket(fileno=int(sys.argv[1])), torch_trainer.live)
