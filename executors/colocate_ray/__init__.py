"""The Ray executor.

The driver itself never joins a Ray: that would mark its process for good (threads, descriptors, signal handlers, one
Ray per process). A process of its own, the *envoy*, does it on the driver's behalf, and is gone with the runtime or
with the driver. In each reserved slot a Ray actor holds a keeper; workers talk straight to the driver.
"""
