"""The Ray executor.

The driver itself never joins a Ray: that would mark the driver's process for good (threads, descriptors, signal
handlers, one Ray per process). A separate process, the *envoy*, joins on the driver's behalf, and ends with the runtime
or with the driver. In each reserved slot a Ray actor holds a keeper; workers talk straight to the driver.
"""
