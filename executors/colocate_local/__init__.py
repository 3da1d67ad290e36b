"""The embedded executor: slots are threads of this process, or processes on this machine. No server."""
