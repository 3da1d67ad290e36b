"""GPUs while groups use them, sampled by NVML: use, memory, power, temperature, errors. The page: docs/memory.md."""
