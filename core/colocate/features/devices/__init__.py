"""Samples of GPUs in use, by NVML: use, memory, power, temperature, errors. The page: docs/memory.md."""
