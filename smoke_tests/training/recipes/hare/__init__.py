"""HARE's training: transformers' Trainer with accelerate, under DeepSpeed or without."""
