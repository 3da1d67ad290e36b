"""The Ray executor.

The driver itself never joins a Ray, because this would change the driver's process for good (threads, descriptors,
signal handlers, one Ray per process). A separate process, the *envoy*, joins on the driver's behalf, and ends with the
runtime or the driver. Ray actors hold a keeper for each reserved slot. Workers connect directly to the driver.
"""
