"""Node agents for Kubernetes: a driver for dynamic resource allocation, and a device plugin."""
