"""Run jobs from configs: reading a config, the command line, and the folder of a run."""
