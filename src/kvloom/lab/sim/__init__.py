"""The other world: virtual time, a modelled device, modelled links. Nothing here decides anything."""
