"""Clients of the Python API, of ``tandemrt serve`` and of a Triton server, shared by the load and fault tools."""
