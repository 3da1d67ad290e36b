"""The local executor. Slots are threads of the driver, or processes on this machine."""
