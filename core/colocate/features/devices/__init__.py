"""Samples the GPUs in use by NVML: utilization, memory, power, temperature and errors. See docs/memory.md."""
