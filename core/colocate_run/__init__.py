"""Run jobs: configs, the command line, and the folder of a run."""
