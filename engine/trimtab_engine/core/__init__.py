"""Pure scheduling core: standard library only, no clock, no torch. The server and the simulator both drive it."""
