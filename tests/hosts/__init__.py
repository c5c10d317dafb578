"""Hosts on one machine: network namespaces joined by a bridge, with processes of their own."""
