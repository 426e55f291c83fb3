"""Draft heads: small networks on the states of a target, shared by training and decoding."""
